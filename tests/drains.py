"Drains in processes of their own, cheap to start and safe to kill: a fork server has torch and TRL loaded already"
import multiprocessing
import os
import threading
import time

from incremental_train.config import load_config
from incremental_train.session import Session
from incremental_train.store import checkout

server = multiprocessing.get_context('forkserver')
server.set_forkserver_preload(['incremental_train.session', 'incremental_train.train'])


def die_at(call, names=('fsync', 'link', 'replace', 'unlink')):
    "Let this process kill itself just before its `call`-th of these calls to the file system"
    left = [call]
    def dying(original):
        def count(*args, **kwargs):
            left[0] -= 1
            if not left[0]: os.kill(os.getpid(), 9)
            return original(*args, **kwargs)
        return count
    for name in names: setattr(os, name, dying(getattr(os, name)))


def noise():
    "Draw from torch's global generator for ever, and seed it now and then"
    import torch
    while True:
        torch.rand(100)
        if torch.rand(1) < 0.01: torch.manual_seed(7)


def drain(settings, max_seconds=None, die=None, noisy=False, wait=False):
    "One drain, in whatever process calls this"
    if die: die_at(die)
    if noisy: threading.Thread(target=noise, daemon=True).start()
    done = Session(load_config({}, **settings)).drain(max_seconds, wait=wait)
    assert not done.failed, done.failed


def start(*args, **kwargs):
    "A new process that drains"
    process = server.Process(target=drain, args=args, kwargs=kwargs)
    process.start()
    return process


def finish(process, seconds=120):
    "Wait for a process; its exit code, negative for a signal"
    process.join(seconds)
    assert process.exitcode is not None, 'the drain hangs'
    return process.exitcode


def submit(settings, traces, first=0):
    "Queue traces, SFT rows or (method, rows), as jobs job-00, job-01, …"
    session = Session(load_config({}, **settings))
    for n, trace in enumerate(traces, first):
        method, rows = trace if isinstance(trace, tuple) else ('sft', trace)
        session.submit(rows, method, id=f'job-{n:02d}')
    return session


def outcome(settings):
    "What a bucket ends with: bytes of adapter and reference, global step, (id, rows, once) of each standing job, keys left in the queue"
    session = Session(load_config({}, **settings))
    at = checkout(session.store)
    jobs = sorted((e['id'], e['rows'], e['rows_trained_once']) for e in session.history() if e['status'] == 'trained')
    return (at.files['adapter_model.safetensors'], at.files['reference.safetensors']), at.commit.step, jobs, session.store.list('queue')


def wait_for_commit(settings, seq, seconds=60):
    "Until a bucket has commit `seq`"
    from incremental_train.store import newest
    store, end = Session(load_config({}, **settings)).store, time.monotonic() + seconds
    while newest(store)[0] < seq and time.monotonic() < end: time.sleep(0.005)
    return newest(store)[0]
