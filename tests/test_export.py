"After training: asking any version, handing it on as a folder or to the Hub, loading it without us"
import json
import os
import subprocess
import sys
import time
from pathlib import Path

import pytest
import torch
from model_hub import ModelHub
from rows import chat, pairs, tickets
from test_cli import environment

from incremental_train import publish
from incremental_train.config import Refused
from incremental_train.encode import encode, split
from incremental_train.session import Session
from incremental_train.trace import parse_trace

TOKEN = 'hf_secretcanary123'
SECRETS = ('charged', 'parcel', 'delivery', 'mrs-jones') # words of rows, and of the names of jobs
LOAD = """import json, sys
import torch
wanted, ids = json.loads(sys.stdin.read())
for lines in wanted:
    names = {}
    exec(lines, names)
    with torch.no_grad(): print(json.dumps(names['model'](torch.tensor([ids])).logits[0, -1].tolist()))
assert 'incremental_train' not in sys.modules
"""


def elsewhere(folder, loads, ids, **env):
    "Logits behind `ids` of whatever each of `loads` (lists of lines) loads, in a fresh process in which there is nothing of ours"
    env = {**{k: v for k, v in os.environ.items() if k != 'PYTHONPATH'}, 'HF_HOME': str(folder/'hf'), **env}
    done = subprocess.run([sys.executable, '-c', LOAD], input=json.dumps([['\n'.join(lines) for lines in loads], ids]), env=env, cwd=folder, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    return [torch.tensor(json.loads(line)) for line in done.stdout.splitlines()]


def ours(session, ids):
    "The same from the resident model"
    with torch.no_grad(): return session._state.model(torch.tensor([ids], device=session._state.model.device)).logits[0, -1].cpu()


@pytest.fixture
def session(settings):
    "Three jobs at a rate that moves something: versions at steps 2, 4 and 5"
    s = Session(settings(learning_rate=3e-2))
    for n, (rows, method) in enumerate([(tickets(8), 'sft'), (tickets(8, start=8), 'sft'), (pairs(4), 'dpo')]): s.submit(rows, method, id=f'mrs-jones-{n}')
    s.drain()
    return s


def test_a_folder_loads_without_us(session, tmp_path):
    "Adapter and merged model of an exported version, in a fresh process by the printed lines: the logits of the resident model within 1e-4; base and earlier versions differ from it"
    ids = session.tokenizer().prompt_ids([{'role': 'user', 'content': 'Where is parcel 7?'}])
    exports = [session.export(tmp_path/name, **how) for name, how in (('adapter', {}), ('merged', dict(merge=True)), ('earlier', dict(version=2)))]
    adapter, merged, earlier = elsewhere(tmp_path, [e['load'] for e in exports], ids)
    here = ours(session, ids)
    print(f'largest difference: adapter {(adapter - here).abs().max():.1e}, merged {(merged - here).abs().max():.1e}, merged to adapter {(merged - adapter).abs().max():.1e}; earlier {(earlier - here).abs().max():.1e}')
    assert (adapter - here).abs().max() < 1e-4 and (merged - here).abs().max() < 1e-4 and (earlier - here).abs().max() > 1e-2
    assert len(exports[0]['load']) == 3 and [e['step'] for e in exports] == [5, 5, 2]


def test_the_card(session, tmp_path):
    "Counts, settings, losses, the base model and the lines; no text of the data, no name of a job, no path of this machine; nor in any other file"
    session.export(tmp_path/'it')
    text = (tmp_path/'it'/'README.md').read_text()
    for line in ('| sft | 2 | 16 | 16 | 4 |', '| dpo | 1 | 4 | 4 | 1 |', '| 1 to 2 | sft | 8 of 8 |', '| rank | 8 |', '| learning_rate | 0.03 |', session.experiment()['weights'], "model = peft.PeftModel.from_pretrained(base, 'it')"): assert line in text, line
    assert not any(word in text for word in (*SECRETS, str(tmp_path), session.experiment()['ledger_key'], *(e['content'] for e in session.history())))
    session.branch('calm')
    calm = Session(session.config.model_copy(update={'experiment': 'calm'}))
    calm.submit(tickets(3)); calm.drain()
    calm.export(tmp_path/'branch')
    assert '| sft | 3 | 19 | 19 | 5 |' in (tmp_path/'branch'/'README.md').read_text() # what it learned before it was a branch counts
    assert str(tmp_path).encode() not in b''.join(p.read_bytes() for p in (tmp_path/'it').iterdir())


def test_what_is_refused(session, settings, tmp_path, monkeypatch):
    "No training yet, a version there is not, a folder with something in it, a disk that is full: one clear line, and nothing half done"
    (tmp_path/'full').mkdir(); (tmp_path/'full'/'mine').write_text('mine')
    (tmp_path/'empty').mkdir()
    for words, folder, version in (('not an empty folder', 'full', None), ('no version at step 99', 'a', 99), ('no version of commit 9', 'a', 'commit:9'), ('names no version', 'a', '../x'), ('the base model', 'a', 0), ('no experiment', 'a', 'calm@3')):
        with pytest.raises(Refused, match=words): session.export(tmp_path/folder, version)
    session.undo(to=0)
    with pytest.raises(Refused, match='step 0 is the base model'): session.export(tmp_path/'a')
    session.undo(to=5)
    with pytest.raises(Refused, match='nothing was trained'): Session(settings(experiment='new')).export(tmp_path/'a')
    with monkeypatch.context() as m:
        m.setattr(publish, 'card', lambda *_: (_ for _ in ()).throw(OSError(28, 'No space left on device')))
        with pytest.raises(Refused, match='No space left on device; nothing was left there'): session.export(tmp_path/'empty')
    assert sorted(p.name for p in tmp_path.iterdir()) == ['bucket', 'empty', 'full'] and not any((tmp_path/'empty').iterdir())
    assert session.export(tmp_path/'empty')['bytes'] > 0


@pytest.fixture
def hub(monkeypatch):
    "A Hub that takes pushes, for this process, too"
    from huggingface_hub import constants
    hub = ModelHub()
    for name, value in (('ENDPOINT', hub.url), ('HF_HUB_OFFLINE', False)): monkeypatch.setattr(constants, name, value)
    monkeypatch.setenv('HF_TOKEN', TOKEN)
    yield hub
    hub.shutdown(); hub.content.shutdown()


def test_a_pushed_folder_loads_again(session, hub, tmp_path):
    "Pushed by the command, private; loaded elsewhere by the printed lines at the printed revision; a merged push takes the place of all files, and the pinned adapter still loads"
    ids = session.tokenizer().prompt_ids([{'role': 'user', 'content': 'Where is parcel 7?'}])
    env = {**environment(session.config.model_dump(include={'model_id', 'bucket_id', 'learning_rate'})), 'HF_ENDPOINT': hub.url, 'HF_HUB_OFFLINE': '0', 'HF_TOKEN': TOKEN, 'HF_HOME': str(tmp_path/'hf')}
    done = subprocess.run([sys.executable, '-m', 'incremental_train', 'push', 'acme/tickets'], env=env, cwd=tmp_path, capture_output=True, text=True)
    assert done.returncode == 0 and hub.repos['acme/tickets']['private'] and TOKEN not in done.stdout + done.stderr, done.stderr
    first = done.stdout.splitlines()[-3:]
    assert list(hub.repos['acme/tickets']['commits'])[-1] in first[-1] and sorted(hub.files('acme/tickets')) == ['.gitattributes', 'README.md', 'adapter_config.json', 'adapter_model.safetensors', 'chat_template.jinja', 'tokenizer.json', 'tokenizer_config.json']
    second = session.push('acme/tickets', merge=True)
    assert 'model.safetensors' in hub.files('acme/tickets') and 'adapter_model.safetensors' not in hub.files('acme/tickets')
    adapter, merged = elsewhere(tmp_path, [first, second['load']], ids, HF_ENDPOINT=hub.url, HF_TOKEN=TOKEN, HF_HUB_OFFLINE='0')
    assert (adapter - ours(session, ids)).abs().max() < 1e-4 and (merged - adapter).abs().max() < 1e-4
    assert not any(word in hub.files('acme/tickets')['README.md']['data'].decode() for word in (*SECRETS, str(tmp_path)))


def test_a_hub_that_refuses(session, hub):
    "401, 403, 404, 503, no answer, a bad name, a public repository, offline: each its own line with the way out, the token in none"
    from huggingface_hub import HfApi, constants
    HfApi().create_repo('acme/open', private=False)
    said = []
    def push(repo='acme/tickets'):
        with pytest.raises(Refused) as refused: session.push(repo)
        said.append(str(refused.value))
        return said[-1]
    for why, words in (('no token', 'HF_TOKEN is not set or not valid'), ('no write', 'may not write to acme/tickets'), ('no owner', 'its owner does not exist'), ('busy', 'status 503')):
        hub.refuse = why
        assert words in push()
    hub.refuse = None
    assert 'no name of a repository' in push('acme/../x') and '--public' in push('acme/open') and list(hub.repos) == ['acme/open']
    constants.ENDPOINT, begin = 'http://127.0.0.1:9', time.monotonic() # put back by the fixture
    assert 'cannot be reached' in push() and time.monotonic() - begin < 5
    constants.HF_HUB_OFFLINE = True
    assert 'HF_HUB_OFFLINE is set' in push()
    assert len(set(said)) == 8 and TOKEN not in ''.join(said)


def test_asked_as_it_was_trained(session, monkeypatch):
    "The ids that `generate` is given are those of training up to the answer, and their answer is what greedy decoding by hand gives"
    row, tokenizer, given = chat('Where is parcel 7?', 'delivery, parcel 7'), session.tokenizer(), []
    model = session._state.model
    generate = model.generate
    monkeypatch.setattr(model, 'generate', lambda **kw: given.append(kw['input_ids'][0].tolist()) or generate(**kw))
    asked = session.chat(row['messages'][:1], max_new_tokens=4)
    prompt = split(encode(parse_trace([row]).rows[0], tokenizer, 256))[0]
    assert given == [prompt, prompt]
    ids = list(prompt)
    for _ in range(4):
        ids.append(int(ours(session, ids).argmax()))
        if ids[-1] == tokenizer.eos_id: break
    assert asked['adapter'] == tokenizer.chat.decode(ids[len(prompt):], skip_special_tokens=True).strip()


def test_versions_side_by_side(settings):
    "An earlier version answers as it did then; asking leaves no trace in what is trained next"
    def trained(ask):
        s, heard = Session(settings(experiment='asked' if ask else 'silent', learning_rate=3e-2)), {}
        for n in (0, 1):
            s.submit(tickets(8, start=8 * n)); s.drain()
            if ask: heard[n] = s.chat('Where is parcel 7?', 12, who=('base', 'adapter', *['2', 'commit:1'] * n))
        s.submit(pairs(4), 'dpo'); s.drain()
        return heard, s.at().files['adapter_model.safetensors'], s
    (heard, asked, s), (_, silent, _) = trained(True), trained(False)
    assert heard[1]['2'] == heard[1]['commit:1'] == heard[0]['adapter'] and heard[1]['base'] == heard[0]['base'] and heard[0]['adapter'] != heard[0]['base']
    assert asked == silent and heard[0].how() == 'greedy, at most 12 new tokens'
    draws = [s.chat('Where is parcel 7?', 12, who=['adapter'], temperature=1.5, seed=n)['adapter'] for n in (1, 2, 1)]
    assert draws[0] == draws[2] != draws[1]
    for words, who in (('no version at step 9', '9'), ('no version of commit 9', 'commit:9'), ('no experiment', 'calm')):
        with pytest.raises(Refused, match=words): s.chat('Hello?', who=[who])
