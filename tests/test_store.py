"One suite for every kind of store: verbs on bytes, commits, damage, a network that fails, hostile keys"
import os
import subprocess
import sys
import tempfile
import threading
import time
from dataclasses import asdict, replace

import pytest
from bucket_hub import BucketHub
from stores import Moto, Proxy, Rclone, Seaweed, new_name, s3_environment

from incremental_train import bucket as bucket_room
from incremental_train import store as store_room
from incremental_train.bucket import Unreachable, open_store, probe
from incremental_train.config import Refused
from incremental_train.queue import Queue
from incremental_train.store import Conflict, _json, _key, _record, _sha, checkout, commit, draft, keep, line, log, newest, revert, sweep, write
from incremental_train.trace import parse_trace

LIVE = os.environ.get('LIVE_BUCKET')
live = pytest.param('live', marks=[pytest.mark.live, pytest.mark.skipif(not LIVE, reason='LIVE_BUCKET names no bucket, such as s3://bucket/prefix or namespace/name, with its credentials in the environment')])
KINDS = ['folder', 's3', 'hub', pytest.param('seaweed', marks=pytest.mark.slow), live]


@pytest.fixture(scope='module')
def servers(tmp_path_factory):
    "Servers, started when first asked for; yields a function from a kind to its server"
    running, make = {}, {'s3': Moto, 'seaweed': Seaweed, 'rclone': Rclone, 'hub': lambda folder: BucketHub()}
    def get(kind):
        if kind not in running: running[kind] = make[kind](str(tmp_path_factory.mktemp(kind)))
        return running[kind]
    yield get
    for server in running.values(): server.shutdown() if isinstance(server, BucketHub) else server.close()


@pytest.fixture
def kind(request): return request.param


@pytest.fixture
def reach(monkeypatch):
    "Point the clients at a server"
    from huggingface_hub import constants
    def at(kind, url):
        if kind == 'hub':
            monkeypatch.setattr(constants, 'ENDPOINT', url); monkeypatch.setattr(constants, 'HF_HUB_OFFLINE', False)
            monkeypatch.setenv('HF_TOKEN', 'hf_secretcanary123')
        else:
            for name, value in s3_environment(url).items(): monkeypatch.setenv(name, value)
    monkeypatch.setattr(bucket_room, 'WAITS', (0.05, 0.1)); monkeypatch.setattr(store_room, 'PAUSE', 0.02)
    return at


@pytest.fixture
def fresh(kind, servers, reach, tmp_path):
    "Opens a store that is empty at first; every call is another client of the same bytes"
    name = new_name()
    if kind == 'folder': return lambda: open_store(str(tmp_path/'bucket'), name)
    if kind == 'live':
        return lambda: open_store(LIVE, name)
    reach(kind, servers(kind).url)
    return lambda: open_store('ada/lessons' if kind == 'hub' else 's3://lessons/here', name)


every = pytest.mark.parametrize('kind', KINDS, indirect=True)
FILES = {'adapter_model.safetensors': os.urandom(400_000), 'optimizer.pt': os.urandom(50_000), 'trainer_state.json': b'{"step": 1}'}


def some(n): return {**FILES, 'trainer_state.json': b'{"step": %d}' % n}
def body(step, *jobs): return {'global_step': step, 'ledger': [{'id': id} for id in jobs], 'at': time.time_ns()}


@every
def test_verbs(fresh):
    "What is put is got, by every client; what is not there is None; a prefix names a folder"
    a, b = fresh(), fresh()
    assert (a.get('x/y'), a.list(), a.folders(), a.get_all(['x', 'y'])) == (None, [], [], {'x': None, 'y': None})
    a.delete('nothing')
    big = os.urandom(6_000_000)
    a.put_all({'x/big': big, 'x/small': b'1', 'xy/other': b'2'}); a.put('top.json', b'{}')
    assert b.get('x/big') == big and b.get_all(['x/small', 'x/none', 'top.json']) == {'x/small': b'1', 'x/none': None, 'top.json': b'{}'}
    assert b.list() == ['top.json', 'x/big', 'x/small', 'xy/other'] and b.list('x') == ['x/big', 'x/small'] and b.folders() == ['x', 'xy']
    assert -5 < b.age('x') < 60
    b.put('x/small', b''); assert a.get('x/small') == b''
    assert a.put_new('once', b'a') and not b.put_new('once', b'b') and b.get('once') == b'a'
    a.delete('x'); a.delete('top.json')
    assert b.list() == ['once', 'xy/other']


@every
def test_of_many_writers_one_wins(fresh):
    "Eight at once on one key, five times; or the store says that it cannot"
    store = fresh()
    assert probe(store) == store.exclusive and store.list() == []
    if not store.exclusive: return
    for n in range(5):
        won, barrier = [], threading.Barrier(8)
        def race(i, client=None):
            client = fresh(); barrier.wait()
            if client.put_new(f'key-{n}', b'%d' % i): won.append(b'%d' % i)
        threads = [threading.Thread(target=race, args=(i,)) for i in range(8)]
        for t in threads: t.start()
        for t in threads: t.join()
        assert won == [store.get(f'key-{n}')]


HOSTILE = ['../x', '/etc/passwd', 'a/../b', 'a//b', '.hidden', 'a/.git', 'a\\b', 'x' * 300, '/'.join('a' * 400), 'naïve', 'a b', 'a\nb', 'a\0b', '%2e%2e', 'C:x', '', '~', 'a/', '\u202ea']


@every
def test_hostile_keys(fresh):
    "Every verb refuses them before anything is asked of the store"
    store = fresh()
    for key in HOSTILE:
        for verb in (store.get, store.delete, store.age, lambda k: store.put(k, b'x'), lambda k: store.put_new(k, b'x'), *([store.list] if key else [])):
            with pytest.raises(Refused, match='is not a key'): verb(key)
    assert store.list() == []


@every
def test_commits(fresh):
    "Commit, continue from another client, lose a race, go back, clean up"
    a, b = fresh(), fresh()
    a.exclusive = b.exclusive = probe(a)
    one = commit(a, checkout(a), some(1), body(4, 'one'))
    assert str(checkout(b)) == 'continued exactly from step 4 (verified 3 files, 0.5 MB)' and checkout(b).files == some(1)
    two = commit(b, checkout(b), some(2), body(8, 'two'))
    with pytest.raises(Conflict): commit(a, one, some(3), body(8, 'late'))
    assert checkout(a).commit == two.commit and [c.seq for c in log(a)] == [1, 2] and [c.seq for c in line(a, two.commit)] == [2, 1]
    revert(a, two, one.commit, {**body(4), 'undo': {'from': 2, 'to': 1}})
    assert checkout(b).files == some(1) and checkout(b).commit.parent == 1
    at, last = checkout(a), []
    for n in range(4): at = commit(a, at, some(n), body(8 + 4 * n, f'more-{n}')); last.append(at.commit.prefix)
    keep(a, two.commit)
    removed = sweep(a, at, keep=2, pinned=[last[0]], grace=-1)
    assert sorted({k.split('/')[0] for k in a.list()} - {'commits', 'kept', 'state.json'}) == sorted([two.commit.prefix, last[0], *last[2:]]) and one.commit.prefix in removed
    assert checkout(b).files == some(3) and newest(b)[0] == 7 and checkout(b).commit == at.commit


HARM = {'cut': lambda d: d[:len(d) // 2], 'emptied': lambda d: b'', 'one byte flipped': lambda d: d[:len(d) // 2] + bytes([d[len(d) // 2] ^ 1]) + d[len(d) // 2 + 1:], 'deleted': None}


@every
@pytest.mark.parametrize('harm', HARM)
def test_damage(fresh, harm):
    "Each file of the newest checkpoint, and its record: the newest commit that verifies is used, and file and checkpoint are named"
    store = fresh()
    store.exclusive = probe(store)
    one = commit(store, checkout(store), some(1), body(4, 'one'))
    two = commit(store, one, some(2), body(8, 'two'))
    record = next(k for k in store.list('commits') if f'{2:020d}' in k)
    for name in [*(f'{two.commit.prefix}/{n}' for n in FILES), record]:
        good = store.get(name)
        if HARM[harm] is None: store.delete(name)
        else: store.put(name, HARM[harm](good))
        at = checkout(fresh_like(store, fresh))
        assert at.commit.seq == 1 and at.files == some(1), name
        if name != record: assert 'fell back to step 4' in str(at) and name.split('/')[1] in str(at) and two.commit.prefix in str(at) and at.lost_jobs == ('two',)
        elif harm != 'deleted': assert 'does not match its checksum' in str(at)
        store.put(name, good)
    assert checkout(fresh_like(store, fresh)).commit == two.commit


def fresh_like(store, fresh):
    other = fresh()
    other.exclusive = store.exclusive
    return other


@every
def test_a_record_that_points_outside(fresh):
    "A manifest with a hostile path counts as damaged, whatever its checksum says"
    store = fresh()
    one = commit(store, checkout(store), some(1), body(4, 'one'))
    for path in ('../../secret', '/etc/passwd', '.ssh'):
        bad = replace(draft(one, some(2), body(8, 'two')).commit, files=({'path': path, 'size': 1, 'sha256': '0' * 64},))
        key = next(k for k in [f'commits/{2:020d}.json', f'commits/{2:020d}-{bad.nonce[:12]}.json'] if store.exclusive == ('-' not in k))
        store.delete(key)
        _record(store, bad)
        at = checkout(fresh_like(store, fresh))
        assert at.commit.seq == 1 and 'names a file that it must not' in str(at)
        store.delete(key)


@every
def test_submits_at_once(fresh):
    "Six clients submit the same rows and rows of their own at one moment: each trace is queued once"
    fresh().put('touch', b'')
    traces, barrier, seen = [parse_trace([{'text': f'row {i}'}]) for i in range(7)], threading.Barrier(6), []
    def go(i):
        queue = Queue(fresh()); barrier.wait()
        seen.append(queue.submit(traces[6])[0].id); queue.submit(traces[i])
    threads = [threading.Thread(target=go, args=(i,)) for i in range(6)]
    for t in threads: t.start()
    for t in threads: t.join()
    queue = Queue(fresh())
    assert sorted(job.trace.rows[0].text for job in queue) == [f'row {i}' for i in range(7)]
    if fresh().exclusive: assert set(seen) == {job.id for job in queue if job.trace.rows[0].text == 'row 6'}
    for job in list(queue): queue.remove(job.id)
    assert fresh().list('queue') == []


# ---- a network that fails

@pytest.fixture
def shaky(kind, servers, reach):
    "A store behind faults: (store, where to put faults)"
    reach(kind, servers(kind).url)
    if kind == 'hub':
        yield open_store('ada/lessons', new_name()), servers('hub').faults
        servers('hub').faults.clear()
    else:
        proxy = Proxy(servers(kind).url)
        reach(kind, proxy.url)
        yield open_store('s3://lessons', new_name()), proxy.faults
        proxy.shutdown()


networked = pytest.mark.parametrize('kind', ['s3', 'hub'], indirect=True)


@networked
@pytest.mark.parametrize('what', [503, 'drop', 'lose'])
def test_faults_that_pass(shaky, kind, what):
    "A refusal, a dropped connection, a lost answer: tried again, said, and no commit is lost or doubled"
    store, faults = shaky
    at, said = commit(store, checkout(store), some(1), body(4, 'one')), []
    store.say = said.append
    puts = [('PUT', 'optimizer.pt', what), ('PUT', 'commits/', what), ('PUT', 'state.json', what)] if kind == 's3' else [('POST', '/batch', what)] * 2
    faults += puts
    two = commit(store, at, some(2), body(8, 'two'))
    faults += [('GET', 'optimizer.pt', what)] if kind == 's3' else [('POST', 'paths-info', what)]
    assert checkout(store).commit == two.commit and not faults and [c.seq for c in log(store)] == [1, 2]
    if kind == 's3': assert said and all('trying again in' in text for text in said)


@networked
def test_faults_that_stay_are_not_damage(shaky, kind, monkeypatch):
    "A server that answers 503 to everything, then none at all: an error in one line, no fall back, no secret; afterwards all is as it was"
    store, faults = shaky
    one = commit(store, checkout(store), some(1), body(4, 'one'))
    monkeypatch.setattr('huggingface_hub.utils._http.time.sleep', lambda s: None) # it would wait for minutes
    for what in (503, 'drop'):
        faults += [(m, '' if kind == 's3' else pattern, what) for m in ('GET', 'POST', 'PUT', 'HEAD', 'DELETE') for pattern in (('',) if kind == 's3' else ('/tree', '/batch', '/paths-info'))] * 60
        for action in (lambda: checkout(store), lambda: commit(store, one, some(2), body(8, 'two')), lambda: store.list(), lambda: store.delete('x')):
            with pytest.raises(Unreachable) as e: action()
            assert '\n' not in str(e.value) and 'testsecret1' not in str(e.value) and 'hf_secretcanary123' not in str(e.value)
        faults.clear()
    assert checkout(store).commit == one.commit


@pytest.mark.parametrize('kind', ['hub'], indirect=True)
def test_a_lagging_list_and_half_a_batch(shaky, servers):
    "The newest record is found by the hint when lists lag; a batch that fails in part is made whole or is an error, never a commit"
    store, faults = shaky
    at = commit(store, checkout(store), some(1), body(4, 'one'))
    two = commit(store, at, some(2), body(8, 'two'))
    hub = servers('hub')
    hub.lag = 2
    try: assert checkout(store).commit == two.commit
    finally: hub.lag = 0
    size, lost = hub.content.size, []
    def forgetful(name):
        if not lost: lost.append(name); raise KeyError(name)
        return size(name)
    hub.content.size = forgetful
    commit(store, two, some(3), body(12, 'three'))
    hub.content.size = size
    assert lost and checkout(store).files == some(3)


@pytest.mark.parametrize('kind', ['rclone'], indirect=True)
def test_a_store_that_ignores_if_absent(fresh):
    "It is found out, works for one writer, and two writers at once leave a fork that both see and resolve alike"
    a, b = fresh(), fresh()
    assert not probe(a) and not probe(b)
    one = commit(a, checkout(a), some(1), body(4, 'one'))
    ours, theirs = draft(one, some(2), body(8, 'a')), draft(one, some(3), body(8, 'b'))
    write(a, ours)
    with pytest.raises(Conflict): write(b, theirs)
    record = asdict(theirs.commit)
    b.put(_key(2, theirs.commit.nonce), _json({**record, 'check': _sha(_json(record))})) # at the same moment, so that neither saw the other
    found = [checkout(client) for client in (fresh_like(a, fresh), fresh_like(b, fresh))]
    assert found[0].commit == found[1].commit and 'written twice' in str(found[0]) and found[0].lost_jobs == (('b',) if found[0].commit == ours.commit else ('a',))


def test_a_full_disk(tmp_path):
    "A file system that takes no more in the middle of a commit leaves the last one whole: here the kernel refuses files above 100 kB to a process"
    store = open_store(str(tmp_path/'bucket'))
    one = commit(store, checkout(store), {'w.bin': b'1' * 50_000}, body(4, 'one'))
    code = f'''
import resource
from incremental_train.bucket import open_store
from incremental_train.store import checkout, commit
store = open_store({str(tmp_path/'bucket')!r})
resource.setrlimit(resource.RLIMIT_FSIZE, (100_000, 100_000))
try: commit(store, checkout(store), {{'w.bin': b'2' * 50_000, 'optimizer.pt': b'2' * 200_000}}, {{'global_step': 8, 'ledger': [], 'at': 1}})
except OSError as e: print(e.strerror)'''
    assert 'File too large' in subprocess.run([sys.executable, '-c', code], capture_output=True, text=True, check=True).stdout
    assert checkout(open_store(str(tmp_path/'bucket'))).commit == one.commit and not list((tmp_path/'bucket').rglob('.tmp-*'))


def test_commit_records_do_not_grow():
    "The record of the 300th job is as small as that of the first"
    with tempfile.TemporaryDirectory() as folder:
        store = open_store(folder)
        at = checkout(store)
        for n in range(300): at = commit(store, at, {'w.bin': b'w'}, body(n + 1, f'job-{n:03d}'))
        sizes = [len(store.get(f'commits/{seq:020d}.json')) for seq in (1, 300)]
        assert sizes[1] < 1.1 * sizes[0], sizes
