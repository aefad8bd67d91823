"A run file: killed, stopped, planned, refused, on the real tickets"
import json
import os
import random
import signal
import subprocess
import sys
import time
import tomllib
from pathlib import Path

import pytest
import torch
from drains import finish, server
from rows import MAKE

from incremental_train.config import Refused
from incremental_train.encode import encode_trace
from incremental_train.plan import Schedule
from incremental_train.runfile import as_toml, load_run, prepare
from incremental_train.runs import Record
from incremental_train.session import Session
from incremental_train.store import checkout
from incremental_train.trace import parse_trace

PROJECT = Path(__file__).parents[1]


@pytest.fixture
def written(toy, tmp_path):
    "Makes a run file of 22 rows, 4 per step, two epochs: 12 steps, checkpoints every 3, validations every 4"
    def write(name, method='sft', lora={}, data={}, **train):
        for part, rows in (('train', MAKE[method](22)), ('val', MAKE[method](6, start=100))): (tmp_path/f'{method}-{part}.jsonl').write_text('\n'.join(map(json.dumps, rows)))
        keys = {'name': name, 'method': method, 'seed': 7, 'threads': 1, 'model': {'id': str(toy)}, 'data': {'train': f'{method}-train.jsonl', 'val': f'{method}-val.jsonl', 'max_tokens': 128, **data},
                'lora': {'dropout': 0.05, 'targets': ['q_proj', 'v_proj'], **lora}, 'train': {'learning_rate': 0.01, 'batch_size': 4, 'epochs': 2, 'eval_every': 4, 'checkpoint_every': 3, 'keep_checkpoints': 2, **train}}
        (tmp_path/f'{name}.toml').write_text(as_toml(keys))
        return tmp_path/f'{name}.toml'
    return write


def run(path, **kwargs):
    "A run in a session of its own"
    loaded = load_run(path, {})
    return Session(loaded.config).run(loaded, **kwargs)


def stored(path): return checkout(Session(load_run(path, {}).config).store)


def weights(path):
    "Bytes of what a run ended with"
    files = stored(path).files
    return files['adapter_model.safetensors'], files['optimizer.pt']


def killed_at(path, step, seconds=60):
    "Run in a process of its own and kill it as soon as its log has `step`"
    process = server.Process(target=run, args=(path,))
    process.start()
    log, end = load_run(path, {}).record/'log.jsonl', time.monotonic() + seconds
    while time.monotonic() < end and process.exitcode is None and not (log.exists() and f'"step": {step}, "loss"' in log.read_text()): time.sleep(0.002)
    os.kill(process.pid, signal.SIGKILL)
    return finish(process)


@pytest.mark.parametrize('method', ['sft', 'dpo', 'kto'])
def test_killed_three_times(written, method):
    "kill -9 at three random steps: the same adapter and the same Adam as the undisturbed run, and a log in which each step counts once"
    whole, hurt = written('whole', method), written('hurt', method)
    run(whole)
    steps = sorted(random.Random(method).sample(range(1, 12), 3))
    assert [killed_at(hurt, step) for step in steps] == [-9] * 3
    result = run(hurt)
    assert result.summary['finished'] and result.receipt.rows_trained_once and result.receipt.trained_rows == 44
    assert weights(hurt) == weights(whole)
    logs = [Record(load_run(p, {}).record) for p in (whole, hurt)]
    assert logs[0].train == logs[1].train and logs[0].val == logs[1].val and [k for k, _ in logs[0].train] == list(range(1, 13))


def test_checkpoints_and_settings_do_not_change_the_result(written):
    "Other checkpoint and validation intervals, a rehearsed power cut, one kept checkpoint: the same bytes, and never fewer than two versions"
    whole, other = written('whole'), written('other', checkpoint_every=5, eval_every=7, keep_checkpoints=1)
    run(whole)
    assert 'goes on at step 6' in run(other, stop_after=8).summary['stopped']
    assert len(list((stored(other), *Session(load_run(other, {}).config).store.folders()))) >= 2
    run(other)
    assert weights(other) == weights(whole)
    assert sum(name.startswith('checkpoint-') for name in Session(load_run(other, {}).config).store.folders()) == 2


def test_a_damaged_checkpoint_of_a_run(written):
    "The newest checkpoint is damaged: the run goes on from the one before, to the same bytes"
    whole, hurt = written('whole'), written('hurt')
    run(whole)
    run(hurt, stop_after=8)
    at = stored(hurt)
    (Path(str(Session(load_run(hurt, {}).config).store))/at.commit.prefix/'optimizer.pt').write_bytes(b'x')
    result = run(hurt)
    assert result.receipt.continued.endswith('is missing') or 'fell back to step 3' in result.receipt.continued
    assert weights(hurt) == weights(whole)


def test_ctrl_c_saves_and_goes_on(written):
    "Ctrl-C in a terminal: exit code 0, a commit at the step it stopped at, and the same command goes on behind it"
    path = written('long', epochs=40, eval_every=None, checkpoint_every=None)
    command = [sys.executable, '-m', 'incremental_train', 'run', str(path), '--json']
    process = subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE)
    log, end = load_run(path, {}).record/'log.jsonl', time.monotonic() + 60
    while time.monotonic() < end and not (log.exists() and '"step": 3, ' in log.read_text()): time.sleep(0.01)
    process.send_signal(signal.SIGINT)
    out, err = process.communicate(timeout=60)
    stopped = json.loads(out)
    assert process.returncode == 0 and err == b'' and not stopped['finished'] and stopped['stopped'] == f"stopped after step {stopped['steps']}, saved; the same command goes on"
    assert stored(path).commit.step == stopped['steps'] >= 3
    assert run(path, stop_after=stopped['steps'] + 1).receipt.steps == stopped['steps'] + 1


def test_not_a_number_and_undo(written):
    "A loss that is not a number stops the run with the last good commit named; undo goes back to a checkpoint, and the run goes on from there"
    path = written('nan')
    loaded = load_run(path, {})
    session = Session(loaded.config)
    def poison(event):
        if getattr(event, 'step', 0) == 7:
            with torch.no_grad(): next(p for p in session._state.model.parameters() if p.requires_grad).fill_(float('nan'))
    failed = session.run(loaded, watch=poison)
    assert failed.summary['failed'] and 'the loss of step 8 is nan' in failed.summary['stopped'] and 'the last good commit is 2, at step 6' in failed.summary['stopped']
    assert session.undo(3)['to_step'] == 3
    again = session.run(loaded)
    assert again.summary['finished'] and [k for k, _ in Record(loaded.record).train] == list(range(1, 13))
    whole = written('whole')
    run(whole)
    assert weights(path) == weights(whole)


def test_early_stopping_keeps_the_best(written):
    "A rate at which the validation loss turns: the run ends before its last step, with the weights of the best validation, also when it was killed on the way"
    settings = dict(learning_rate=0.3, epochs=10, eval_every=3, patience=2, keep_best=True, spike=0.0)
    whole, hurt = written('whole', **settings), written('hurt', **settings)
    result = run(whole)
    s = result.summary
    assert s['finished'] and s['steps'] < 60 and 'stopped early' in s['stopped'] and s['best_val_loss'] < s['final_val_loss'] and stored(whole).commit.step == s['best_step']
    killed_at(hurt, s['steps'] - 1)
    assert run(hurt).summary['best_step'] == s['best_step'] and weights(hurt) == weights(whole)


@pytest.mark.parametrize('batch,epochs,expected', [(8, 2, (113, 226, 9, 4)), (4, 2, (225, 450, 18, 9)), (6, 3, (150, 450, 18, 9))])
def test_the_course(batch, epochs, expected):
    "The example's arithmetic, one validation and one checkpoint more at the end where the last step is none"
    keys = tomllib.loads((PROJECT/'examples/lora-r8.toml').read_text())['train']
    s = Schedule(900, batch, epochs, keys['eval_every'], keys['checkpoint_every'], 100)
    assert (s.per_epoch, s.steps, s.steps // s.eval_every, s.steps // s.checkpoint_every) == expected
    assert s.validations[-1] == s.checkpoints[-1] == s.steps and s.resumes_at(120) == 101


def test_the_example_plans(tmp_path):
    "The three commands of the example, in a folder of its own, up to the plan's exact lines; what a slip says, and that nothing else is printed"
    (tmp_path/'pyproject.toml').write_text('')
    for name in ('tickets.py', 'lora-r8.toml'): (tmp_path/name).write_text((PROJECT/'examples'/name).read_text())
    command = lambda *args: subprocess.run([sys.executable, *args], cwd=tmp_path, capture_output=True, text=True)
    assert command('tickets.py').returncode == 0
    assert json.loads(command('-m', 'incremental_train', 'prepare', 'data/tickets.jsonl', '--val', '100', '--seed', '12', '--json').stdout)['train'] == 900
    planned = command('-m', 'incremental_train', 'plan', 'lora-r8.toml', '--stop-after', '120')
    assert planned.stdout.splitlines()[:4] == ['lora-r8: 900 training records, 100 validation records', '  batch 8, 2 epochs = 113 steps per epoch, 226 steps (1808 examples seen)',
        '  validation loss every 25 steps (9 times), checkpoint every 50 steps (4)',
        '  LoRA rank 8, alpha 16, dropout 0.05, on q_proj, v_proj; learning rate 0.0002; at most 320 tokens per example; 2 threads']
    assert 'a stop at 120 goes on at step 101' in planned.stdout and '1800 examples in all' in planned.stdout and '460,800 of 134,515,008 parameters = 0.34%' in planned.stdout
    (tmp_path/'typo.toml').write_text((tmp_path/'lora-r8.toml').read_text().replace('2e-4', '2e4'))
    typo = command('-m', 'incremental_train', 'run', 'typo.toml')
    assert typo.returncode == 2 and typo.stdout == '' and typo.stderr == 'ValueError: typo.toml: learning_rate must be between 0 and 1\n'


def test_labels_do_not_depend_on_the_limit(toy):
    "Of the generated tickets, long ones lose the end of the user's turn and never a token of the answer"
    sys.path.insert(0, str(PROJECT/'examples'))
    from tickets import tickets
    from incremental_train.encode import ChatTokenizer
    trace, tokenizer = parse_trace(tickets(300, seed=11)), ChatTokenizer(toy)
    free, limited = encode_trace(trace, tokenizer, 100_000), encode_trace(trace, tokenizer, 640)
    trained = lambda row: [l for l in row.labels if l != -100]
    assert sum(r.shortened for r in limited) > 3 and all(len(r.ids) <= 640 for r in limited)
    assert [trained(r) for r in free] == [trained(r) for r in limited]


def test_too_much_is_refused_before_anything_is_loaded(written, monkeypatch):
    "Free memory of 1 GB, an allowed one, an allowed time: both numbers and what to change; a base without weights can be planned and not run"
    path = written('big')
    loaded = load_run(path, {})
    monkeypatch.setattr('incremental_train.planning.free_mb', lambda: 400.0)
    session = Session(loaded.config)
    with pytest.raises(Refused, match='needs .* MB of memory, 400 are free'): session.run(loaded)
    monkeypatch.undo()
    with pytest.raises(Refused, match=r'minutes, 0.0001 are allowed \(--max-minutes\); with epochs = 1 it would need'): session.run(loaded, max_minutes=0.0001)
    assert session._state is None and not loaded.record.exists() and session.store.list() == []


def test_a_base_without_weights(written, toy, tmp_path):
    "Config and tokenizer are enough for a plan, not for a run"
    import shutil
    shutil.copytree(toy, tmp_path/'bare')
    (tmp_path/'bare/model.safetensors').unlink()
    path = written('bare')
    path.write_text(path.read_text().replace(str(toy), './bare'))
    loaded = load_run(path, {})
    assert Session(loaded.config).plan(loaded).schedule.steps == 12
    with pytest.raises(Refused, match='no complete model.safetensors'): Session(loaded.config).run(loaded)


def test_two_runs_under_one_name(written):
    "A changed setting or changed rows under the same name are refused with what changed; intervals may change"
    path = written('one')
    run(path, stop_after=4)
    with pytest.raises(Refused, match='LORA_R is 4, but this experiment was begun with 8'): run(written('one', lora={'rank': 4}))
    with pytest.raises(Refused, match='train.learning_rate 0.01 -> 0.02'): run(written('one', learning_rate=0.02))
    rows = Path(load_run(path, {}).train)
    before = rows.read_text()
    written('one', checkpoint_every=6)
    rows.write_text(before.replace('order 3', 'order 30', 1))
    with pytest.raises(Refused, match='rows of data.train'): run(path)
    rows.write_text(before)
    assert run(path).summary['finished']


def test_checkpointing_the_gradients(written):
    "On and off: first losses within 1e-5, every lora_B moved after one step"
    results = {on: run(written(f'gc-{on}'.lower(), gradient_checkpointing=on, lora={'dropout': 0.0})) for on in (False, True)}
    a, b = (results[on].receipt.losses for on in (False, True))
    assert abs(a[0] - b[0]) < 1e-5 and max(abs(x - y) for x, y in zip(a, b)) < 1e-3
    from safetensors.torch import load
    tensors = load(stored(written('gc-true', gradient_checkpointing=True, lora={'dropout': 0.0})).files['adapter_model.safetensors'])
    assert all(t.abs().max() > 0 for name, t in tensors.items() if 'lora_B' in name)


def test_prepare_shares_no_row(tmp_path):
    "Any method's rows; copies in another key order count as copies"
    (tmp_path/'rows.jsonl').write_text('\n'.join(map(json.dumps, MAKE['dpo'](30))) + '\n' + json.dumps(dict(reversed(MAKE['dpo'](1)[0].items()))) + '\n')
    done = prepare(tmp_path/'rows.jsonl', 10, 3, tmp_path/'out')
    parts = [set(Path(f).read_text().splitlines()) for f in done['files']]
    assert (done['train'], done['val'], done['duplicates']) == (20, 10, 1) and not parts[0] & parts[1]
