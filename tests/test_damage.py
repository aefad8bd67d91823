"A damaged checkpoint is never used and never stops the user"
import pytest
from rows import tickets

from incremental_train.session import Session
from incremental_train.state import load_files, state_files
from incremental_train.store import log


def cut(name): return lambda store, folder: store.put(f'{folder}/{name}', store.get(f'{folder}/{name}')[:len(store.get(f'{folder}/{name}')) // 2])
def remove(name): return lambda store, folder: store.delete(f'{folder}/{name}')
def empty(name): return lambda store, folder: store.put(f'{folder}/{name}', b'')
def flip(name): return lambda store, folder: store.put(f'{folder}/{name}', store.get(f'{folder}/{name}')[:-1] + bytes([store.get(f'{folder}/{name}')[-1] ^ 1]))


@pytest.fixture
def two_checkpoints(settings):
    "Checkpoints at steps 3 and 6"
    session = Session(settings(keep_checkpoints=2))
    for n in range(2): session.submit(tickets(12, start=12 * n), id=f'job-{n}'); session.drain()
    return session


@pytest.mark.parametrize('name, harm', [('optimizer.pt', cut), ('trainer_state.json', remove), ('adapter_model.safetensors', empty), ('rng.pt', flip), ('adapter_config.json', flip)])
def test_falls_back_to_the_newest_that_verifies(two_checkpoints, settings, name, harm):
    "Cut, missing, empty or one bit wrong: goes on from step 3, whose bytes it starts with, and the receipt names the file and the lost job"
    store, newest = two_checkpoints.store, two_checkpoints.status()['checkpoint']
    third = store.get(log(store)[0].prefix + '/adapter_model.safetensors')
    harm(name)(store, newest)
    session = Session(settings(keep_checkpoints=2))
    assert any(name in notice and newest in notice for notice in session.status()['notices'])
    session.submit(tickets(4, start=30), id='after')
    starts = []
    session.drain(watch=lambda event: starts.append(session._at.files['adapter_model.safetensors']) if type(event).__name__ == 'Job' else None)
    receipt = session.history()[-1]
    assert starts == [third] and receipt['first_step'] == 4
    for words in ('fell back to step 3', name, newest, 'job-1'): assert words in receipt['continued']
    assert [e['status'] for e in session.history()] == ['trained', 'lost: its commit was damaged', 'trained']


def test_records_and_hint(two_checkpoints, settings):
    "A torn record is passed over by its number; a hint that names what is not there changes nothing"
    store = two_checkpoints.store
    store.put('state.json', b'{"seq": 9, "global_step": 99}')
    assert Session(settings()).status()['global_step'] == 6
    store.put('state.json', b'not json')
    store.put('commits/00000000000000000002.json', store.get('commits/00000000000000000002.json')[:100])
    assert Session(settings()).status()['global_step'] == 3


def test_all_damaged_starts_new_and_says_so(two_checkpoints, settings):
    "With nothing left that verifies the drain begins at step 0, and the receipt lists what is lost"
    for c in log(two_checkpoints.store): two_checkpoints.store.delete(c.prefix)
    session = Session(settings())
    session.submit(tickets(4))
    assert 'job-0' in (text := session.drain().receipts[0].continued) and 'job-1' in text and text.startswith('fell back to step 0')


def test_a_full_disk_loses_nothing(two_checkpoints, settings, monkeypatch):
    "Writing fails in the middle of a commit: one clear refusal, the last commit stands, the job still waits, and the next drain trains it"
    session, state = two_checkpoints, two_checkpoints.status()
    session.submit(tickets(4, start=40), id='waits')
    put = session.store.put
    def full(key, data):
        if key.endswith('optimizer.pt'): raise OSError(28, 'No space left on device')
        put(key, data)
    monkeypatch.setattr(session.store, 'put', full)
    with pytest.raises(ValueError, match='No space left on device.*the last good commit stands'): session.drain()
    monkeypatch.undo()
    after = session.status()
    assert (after['commit'], [j['id'] for j in after['queue']]) == (state['commit'], ['waits'])
    assert session.drain().receipts[0].first_step == 7


def test_state_files_round_trip(two_checkpoints):
    "Loading a checkpoint's files gives a state that writes the same adapter again"
    files = two_checkpoints._at.files
    load_files(two_checkpoints._state, files)
    again = state_files(two_checkpoints._state)
    assert {n: again[n] for n in ('adapter_model.safetensors', 'adapter_config.json', 'trainer_state.json')} == {n: files[n] for n in ('adapter_model.safetensors', 'adapter_config.json', 'trainer_state.json')}
