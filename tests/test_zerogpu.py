"The drain under a card that is lent for seconds, and the Space in examples/space"
import importlib.util
import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
from drains import drain, outcome, submit
from rows import tickets

from incremental_train import gpu
from incremental_train.config import Refused, load_config
from incremental_train.session import Session
from incremental_train.trace import parse_trace

PROJECT = Path(__file__).parents[1]
SPACE = PROJECT/'examples/space'


@pytest.fixture
def lent(toy, tmp_path):
    "Settings of a bucket, an environment with the stand-in, and what the stand-in has seen"
    log = tmp_path/'calls.jsonl'
    settings = lambda bucket, **more: dict(model_id=str(toy), bucket_id=str(tmp_path/bucket), learning_rate=1e-2, threads=1, **more)
    environment = {**os.environ, 'PYTHONPATH': os.pathsep.join([str(Path(__file__).parent/'zerogpu'), *sys.path]), 'ZEROGPU_LOG': str(log)}
    return settings, environment, lambda: [json.loads(line) for line in log.read_text().splitlines()]


def test_inside_its_time_and_on_from_there(lent):
    """A drain of 8 s ends inside them, at a commit; a call too short to load is killed and costs nothing; the next one goes on from the commit. Jobs that fit
    are trained as they are without a lent card, to the same bytes, and an empty queue asks for none. A refusal comes back in words. This side loads no model"""
    settings, environment, calls = lent
    long, short = settings('long', grad_accum=1), settings('short')
    scenarios = [(long, {'long': tickets(3000)}, [8, 0.2, 8]), (short, {'job-00': tickets(5), 'job-01': tickets(6, start=50)}, [None, None]), ({**short, 'lora_r': 4}, {'other': tickets(3, start=80)}, [None])]
    played = subprocess.run([sys.executable, Path(__file__).parent/'zerogpu/calls.py'], input=json.dumps(scenarios), env=environment, capture_output=True, text=True, timeout=180)
    assert played.returncode == 0, played.stderr
    (first, killed, second, before), (whole, nothing, beside), (refused, aside) = json.loads(played.stdout)

    one, late, two, all, no = calls()
    assert [(c['asked'], c['end']) for c in (one, late, two, all, no)] == [(8, 'returned'), (0.2, 'late'), (8, 'returned'), (60, 'returned'), (60, 'returned')]
    assert one['seconds'] < 8 and two['seconds'] < 8
    at, further = first['global_step'], second['global_step']
    assert 1 <= at < further < 3000 and first['stopped'].startswith(f'stopped after step {at}, saved; {at} of 3000 rows')
    assert 'GPU task aborted' in killed['refused'] and 'the next drain goes on' in killed['refused'] and killed['status']['global_step'] == at
    kept = Session(load_config({}, **long)).at().commit
    assert kept.step == further and kept.body['open'][0]['trained_rows'] == further and f'then verified at step {at}' in kept.body['open'][0]['continued'].replace('continued exactly from', 'verified at')
    assert [end['queue'] for end in (first, killed, second)] == [['long']] * 3 and first['told'] == ['asking for a GPU for 8 s']

    assert whole['queue'] == [] and [job['rows_trained_once'] for job in whole['jobs']] == [True, True] and (nothing['jobs'], nothing['told']) == ([], [])
    plain = settings('plain', queue_persist=True)
    submit(plain, [tickets(5), tickets(6, start=50)])
    drain(plain)
    assert outcome(plain)[:3] == outcome(short)[:3]
    assert 'LORA_R is 4, but this experiment was begun with 8' in refused['refused'] and refused['queue'] == ['other']
    assert before == beside == aside == {'loaded': False, 'cuda': False}


@pytest.mark.slow
def test_the_command(lent, tmp_path):
    "`drain --max-seconds` in a terminal, twice, with a queue in the bucket"
    settings, environment, calls = lent
    persistent = settings('bucket', grad_accum=1, queue_persist=True)
    submit(persistent, [tickets(3000)])
    command = [sys.executable, '-m', 'incremental_train', 'drain', '--max-seconds', '8', '--json']
    steps = [json.loads(subprocess.run(command, env=environment | {k.upper(): str(v) for k, v in persistent.items()}, capture_output=True, check=True).stdout)['global_step'] for _ in range(2)]
    assert 1 <= steps[0] < steps[1] and all(call['end'] == 'returned' and call['seconds'] < 8 for call in calls())


def test_stores_that_do_not_survive_a_fork(toy, monkeypatch):
    "S3 and its kin are refused before a card is asked for, where a card is lent"
    monkeypatch.setattr(gpu, '_lent', lambda *args: pytest.fail('a card was asked for'))
    session = Session(load_config({}, model_id=str(toy), bucket_id='s3://bucket/here'))
    session.queue.submit(parse_trace(tickets(2)))
    with pytest.raises(Refused, match='s3://bucket/here cannot be used from the process that ZeroGPU lends a card to'): session.drain()
    assert len(session.queue) == 1


def test_the_space(toy, tmp_path, monkeypatch):
    "What the Space's buttons do, without Gradio: a trace is handed in, trained and found in the history; a bad one is refused in words"
    for name, value in dict(MODEL_ID=str(toy), BUCKET_ID=str(tmp_path/'bucket'), LEARNING_RATE='1e-2', QUEUE_PERSIST='true').items(): monkeypatch.setenv(name, value)
    spec = importlib.util.spec_from_file_location('space_app', SPACE/'app.py')
    app = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(app)
    (tmp_path/'trace.jsonl').write_text('\n'.join(map(json.dumps, tickets(5))))
    (tmp_path/'bad.jsonl').write_text('{"messages": []}')
    assert '5 rows, 2 steps' in app.hand_in(str(tmp_path/'trace.jsonl'), 'sft')
    assert app.hand_in(str(tmp_path/'bad.jsonl'), 'sft').startswith('**Refused**') and 'line 1' in app.hand_in(str(tmp_path/'bad.jsonl'), 'sft')
    assert app.hand_in(None, 'sft').startswith('**Refused**')
    assert '5, each trained once' in app.train(60) and 'nothing waiting' in app.train(60)
    assert '| trained |' in app.history() and 'gradio' not in sys.modules


def test_what_a_space_reads():
    "The header of the Space's README and its requirements name what is there"
    import yaml
    header = yaml.safe_load((SPACE/'README.md').read_text().split('---')[1])
    assert header['sdk'] == 'gradio' and (SPACE/header['app_file']).exists() and header['suggested_hardware'] == 'zero-a10g'
    assert {'title', 'sdk_version', 'python_version'} <= header.keys() and 'incremental_train' in (SPACE/'requirements.txt').read_text()
