"Two drains of one bucket: who holds it, who waits, who takes over, and that no row is trained twice"
import os
import signal
import time

import pytest
from drains import finish, outcome, start, submit, wait_for_commit
from rows import tickets

from incremental_train.config import load_config
from incremental_train.lease import Held, holder
from incremental_train.session import Session


@pytest.fixture
def bucket(toy, tmp_path):
    "Settings for processes: 8 jobs of 3 steps wait, so that a drain takes a moment"
    settings = dict(model_id=str(toy), bucket_id=str(tmp_path/'bucket'), learning_rate=1e-2, queue_persist=True, threads=1, lease_seconds=60)
    submit(settings, [tickets(12, start=12 * n) for n in range(8)])
    return settings


def each_once(settings):
    _, step, jobs, queue = outcome(settings)
    assert step == 24 and [id for id, _, once in jobs if once] == [f'job-{n:02d}' for n in range(8)] and not queue


def when_held(settings, seconds=60):
    "Until a drain holds the bucket"
    store, end = Session(load_config({}, **settings)).store, time.monotonic() + seconds
    while not (other := holder(store, settings['lease_seconds'])) and time.monotonic() < end: time.sleep(0.01)
    return other


def test_a_second_drain_says_who_is_at_work_and_leaves(bucket):
    "Host, process and since when; the queue is as it was; with `wait` it goes on when the first one has ended"
    first = start(bucket)
    assert when_held(bucket)['process'] == first.pid
    with pytest.raises(Held, match=rf'process {first.pid} on .*, since \d{{4}}-.*`drain --wait`'): Session(load_config({}, **bucket)).drain()
    said = []
    done = Session(load_config({}, **bucket)).drain(wait=True, watch=lambda e: said.append(e) if isinstance(e, str) else None)
    assert finish(first) == 0 and not done.stopped and any(f'waiting for process {first.pid}' in text for text in said)
    each_once(bucket)
    assert Session(load_config({}, **bucket)).store.get('lease.json') is None


def test_a_killed_drain_is_followed_at_once(bucket):
    "Its lease is of this machine and its process is gone: nobody waits a minute"
    first = start(bucket)
    when_held(bucket); wait_for_commit(bucket, 2)
    first.kill(); assert finish(first) == -9
    assert Session(load_config({}, **bucket)).store.get('lease.json')
    begin = time.monotonic()
    assert not Session(load_config({}, **bucket)).drain().stopped and time.monotonic() - begin < 50
    each_once(bucket)


def test_one_that_slept_loses(bucket):
    "A drain that is stopped longer than its lease is taken over; awake again it finds its commit taken, says so, and leaves the rest alone"
    bucket = {**bucket, 'lease_seconds': 1.0}
    first = start(bucket)
    when_held(bucket); wait_for_commit(bucket, 2)
    os.kill(first.pid, signal.SIGSTOP)
    try:
        time.sleep(1.2)
        done = Session(load_config({}, **bucket)).drain()
        assert not done.stopped
    finally: os.kill(first.pid, signal.SIGCONT)
    assert finish(first) == 0
    each_once(bucket)


def test_two_that_do_not_know_of_each_other(bucket, monkeypatch):
    "Without any lease (a clock that is wrong, a bucket of another kind) the commit numbers decide, and every row is trained once"
    bucket = {**bucket, 'lease_seconds': 1e-3} # every lease is dead at once
    both = [start(bucket), start(bucket)]
    assert [finish(p) for p in both] == [0, 0]
    Session(load_config({}, **bucket)).drain() # what the one that lost left
    each_once(bucket)
