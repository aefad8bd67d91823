"The same jobs give the same adapter, byte for byte, whatever happened between"
import json
import os
import random
import subprocess
import sys
import time

import pytest
from drains import finish, outcome, start, submit
from rows import tickets

from incremental_train.config import load_config
from incremental_train.session import Session
from incremental_train.store import tip

SIZES = (1, 10, 5, 4, 7)
STEPS = 1 + 3 + 2 + 1 + 2
TRACES = [tickets(n, start=100 * i) for i, n in enumerate(SIZES)]


@pytest.fixture(scope='module')
def bucket(toy, tmp_path_factory):
    "Makes the settings of a new bucket"
    def new(**changes):
        return {**dict(model_id=str(toy), bucket_id=str(tmp_path_factory.mktemp('bucket')), learning_rate=1e-2, lora_dropout=0.1, queue_persist=True, threads=1), **changes}
    return new


@pytest.fixture(scope='module')
def undisturbed(bucket):
    "Five jobs drained in one process: what every other way must equal"
    settings = bucket()
    submit(settings, TRACES)
    begin = time.monotonic()
    assert finish(start(settings)) == 0
    adapter, step, jobs, left = outcome(settings)
    assert (step, left) == (STEPS, []) and jobs == [(f'job-{i}', n, True) for i, n in enumerate(SIZES)]
    return adapter, step, jobs, left, time.monotonic() - begin


def test_a_new_process_per_job(bucket, undisturbed):
    "Each job submitted and drained by commands of their own, as a person does on five days"
    settings = bucket()
    env = {**os.environ, **{k.upper(): str(v) for k, v in settings.items()}}
    command = lambda *args, **kwargs: json.loads(subprocess.run([sys.executable, '-m', 'incremental_train', *args, '--json'], env=env, capture_output=True, check=True, **kwargs).stdout)
    jobs = []
    for n, rows in enumerate(TRACES):
        assert command('submit', '-', '--id', f'job-{n}', input=json.dumps(rows).encode())['position'] == 1
        jobs += command('drain')['jobs']
    assert outcome(settings) == undisturbed[:4]
    assert [j['steps'] for j in jobs] == [1, 3, 2, 1, 2] and [j['first_step'] for j in jobs] == [1, 2, 5, 7, 8]
    assert all(j['rows_trained_once'] and 0 not in j['lr'] for j in jobs)


@pytest.mark.parametrize('every', [1, 2])
def test_other_checkpoint_intervals(bucket, undisturbed, every):
    "Commits inside jobs change nothing"
    settings = bucket(checkpoint_every=every)
    submit(settings, TRACES)
    assert finish(start(settings)) == 0
    assert outcome(settings) == undisturbed[:4]


def test_another_thread_draws(bucket, undisturbed):
    "Somebody else's use of torch's global generator, and their seeding of it, change nothing"
    settings = bucket()
    submit(settings, TRACES)
    assert finish(start(settings, noisy=True)) == 0
    assert outcome(settings) == undisturbed[:4]


def test_cut_after_every_step(bucket, undisturbed):
    "`--max-seconds 0` cuts after each step; each drain goes on at the next row"
    settings, session = bucket(), None
    session = submit(settings, TRACES)
    for n in range(1, STEPS + 1):
        done = session.drain(max_seconds=0)
        assert done.global_step == n and len(done.receipts) <= 1
    assert outcome(settings) == undisturbed[:4]


def killed_rounds(settings_of, attempt, kills_wanted, attempts=120):
    "Rounds of submit, drain, kill, restart until the queue is empty; as many rounds as the kills need. -> (settings of each round, tips at the kills)"
    rounds, kills = [], []
    while len(kills) < kills_wanted:
        settings = settings_of(len(rounds))
        rounds.append(settings)
        store = submit(settings, TRACES).store
        while True:
            attempts -= 1
            assert attempts, 'too many attempts'
            code = attempt(settings, len(kills))
            assert code in (0, -9), code
            if code == 0: break
            kills.append(tip(store))
    return rounds, kills


def test_killed_at_random_instants(bucket, undisturbed):
    "`kill -9` at 20 or more random instants of a drain, before the first commit included, restarted each time"
    chance, length = random.Random(12), undisturbed[4]
    def attempt(settings, n):
        process, delay = start(settings), chance.uniform(0, 0.7 * length)
        process.join(delay)
        process.kill()
        return finish(process)
    rounds, kills = killed_rounds(lambda n: bucket(checkpoint_every=1 if n % 2 else None), attempt, 20)
    print(f'{len(kills)} kills in {len(rounds)} rounds, {kills.count(0)} before the first commit, the others after commits {sorted(set(kills) - {0})}')
    for settings in rounds: assert outcome(settings) == undisturbed[:4]


def test_killed_inside_commits(bucket, undisturbed):
    "Dead at the n-th call that flushes, names or removes a file: between files, before and after the record, before the job leaves the queue"
    chance = random.Random(7)
    def attempt(settings, n): return finish(start(settings, die=1 + n if n < 3 else chance.randrange(1, 120)))
    rounds, kills = killed_rounds(lambda n: bucket(), attempt, 20)
    print(f'{len(kills)} kills inside commits in {len(rounds)} rounds, {kills.count(0)} of them before the first was there')
    for settings in rounds: assert outcome(settings) == undisturbed[:4]


def test_two_drains_at_once(bucket, undisturbed):
    "Two processes on one bucket: the loser of a race loads the winner's state, and every job counts once"
    settings = bucket()
    submit(settings, TRACES)
    processes = [start(settings), start(settings)]
    assert [finish(p) for p in processes] == [0, 0]
    assert outcome(settings) == undisturbed[:4]


@pytest.mark.parametrize('warmup', [0, 5])
def test_one_job_or_three(bucket, warmup):
    "12 rows in one job and 4 + 4 + 4 in three: the same rates, the same bytes"
    rows, results = tickets(12), []
    for traces in ([rows], [rows[:4], rows[4:8], rows[8:]]):
        settings = bucket(warmup_steps=warmup)
        done = submit(settings, traces).drain()
        results.append(([rate for r in done.receipts for rate in r.lr], outcome(settings)[0]))
    assert results[0] == results[1] and len(results[0][0]) == 3 and all(results[0][0])


def test_a_done_job_is_not_trained_again(bucket):
    "The commit landed and the process died before the job left the queue: the next drain only cleans up"
    settings = bucket()
    session = submit(settings, [tickets(4)])
    payload = {key: session.store.get(key) for key in session.store.list('queue')}
    session.drain()
    for key, data in payload.items(): session.store.put(key, data)
    again = Session(load_config({}, **settings))
    assert len(again.queue) == 1 and not again.drain().receipts
    assert outcome(settings)[1:] == (1, [('job-0', 4, True)], [])
