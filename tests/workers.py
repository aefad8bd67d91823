"""Workers that train without torch and are killed at random: `python workers.py BUCKET_ID JOBS WORKERS CHANCE SEED` prints how it ended, as JSON.

"Training" appends the job's name to the weights, so that a job lost or trained twice shows in them. One process imports everything once and forks the
workers; each kills itself with the given chance before and after every write and every removal, so after a file, before a commit, after it, in cleaning up."""
import json
import os
import random
import signal
import sys
import time

from incremental_train.bucket import open_store, probe
from incremental_train.queue import Queue
from incremental_train.store import Conflict, checkout, commit, line, sweep
from incremental_train.trace import parse_trace


def dying(store, chance, seed):
    "The same store, deadly"
    rng = random.Random(seed)
    def deadly(verb):
        def call(*args):
            if rng.random() < chance: os.kill(os.getpid(), signal.SIGKILL)
            answer = verb(*args)
            if rng.random() < chance: os.kill(os.getpid(), signal.SIGKILL)
            return answer
        return call
    for verb in ('put', 'put_new', 'delete') if store.exclusive else ('put_all', 'delete'): setattr(store, verb, deadly(getattr(store, verb))) # a Hub bucket writes by batches only
    if store.exclusive: store.put_all = lambda files: [store.put(key, data) for key, data in files.items()]
    return store


def work(bucket, exclusive, chance, seed):
    "Train what waits, as a drain does it"
    store = dying(open_store(bucket), chance, seed)
    store.exclusive = exclusive
    queue = Queue(store)
    while True:
        at = checkout(store)
        queue.refresh()
        trained = {entry['id'] for c in line(store, at.commit) for entry in c.body['ledger']}
        for job in [job for job in queue if job.id in trained]: queue.remove(job.id)
        job = next(iter(queue), None)
        if job is None: return
        weights = json.loads(at.files.get('weights.json', b'[]')) + [job.trace.rows[0].text]
        try: now = commit(store, at, {'weights.json': json.dumps(weights).encode(), 'optimizer.bin': os.urandom(2000)}, {'global_step': at.commit.step + 1, 'ledger': [{'id': job.id}], 'at': time.time_ns()})
        except Conflict: continue
        queue.remove(job.id)
        sweep(store, now, keep=2)


def begin(bucket, jobs):
    "Queue the jobs; whether the store keeps writers apart"
    store = open_store(bucket)
    store.put('first', b'') # the bucket is there
    exclusive = probe(store)
    queue = Queue(store)
    for n in range(jobs): queue.submit(parse_trace([{'text': f'{n:02d}'}]), id=f'job-{n:02d}')
    return exclusive


def end(bucket, exclusive):
    "What the bucket holds"
    store = open_store(bucket)
    store.exclusive = exclusive
    at = checkout(store)
    return {'weights': json.loads(at.files['weights.json']), 'ledger': sorted(e['id'] for c in line(store, at.commit) for e in c.body['ledger']), 'queue': store.list('queue'), 'commits': at.tip, 'verified': not at.passed_over}


def forked(action, *args):
    "Start `action` in a process of its own; (process id, a pipe with its answer). The process that forks never talks to a store: clients with threads do not survive a fork"
    read, write = os.pipe()
    pid = os.fork()
    if pid: os.close(write); return pid, read
    try: os.write(write, json.dumps(action(*args)).encode()); status = 0
    except BaseException as e: print(f'{type(e).__name__}: {e}', file=sys.stderr, flush=True); status = 1
    os._exit(status)


def answer(pid, pipe):
    "Wait for a process and take what it answered"
    with os.fdopen(pipe, 'rb') as f: data = f.read()
    os.waitpid(pid, 0)
    return json.loads(data)


def main(bucket, jobs, workers, chance, seed):
    exclusive = answer(*forked(begin, bucket, jobs))
    running, kills, finished, deadline = {}, 0, 0, time.monotonic() + 200
    while finished < workers and time.monotonic() < deadline:
        while len(running) + finished < workers:
            seed += 1
            pid, pipe = forked(work, bucket, exclusive, chance, seed)
            running[pid] = pipe
        pid, status = os.wait()
        os.close(running.pop(pid))
        if os.WIFSIGNALED(status): kills += 1
        elif os.WEXITSTATUS(status) == 0: finished += 1
        else: raise SystemExit('a worker failed')
    print(json.dumps({'kills': kills, 'finished': finished, 'exclusive': exclusive, 'torch': 'torch' in sys.modules, **answer(*forked(end, bucket, exclusive))}))


if __name__ == '__main__': main(sys.argv[1], int(sys.argv[2]), int(sys.argv[3]), float(sys.argv[4]), int(sys.argv[5]))
