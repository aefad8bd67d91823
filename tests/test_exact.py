"The same jobs give the same adapter, byte for byte, whatever happened between"
import json
import os
import random
import subprocess
import sys
import time

import pytest
from drains import finish, outcome, start, submit
from rows import MAKE, tickets

from incremental_train.config import load_config
from incremental_train.session import Session
from incremental_train.store import newest

SIZES = [[('sft', 5), ('sft', 3), ('dpo', 5), ('dpo', 1), ('kto', 5)], [('sft', 2), ('dpo', 6), ('dpo', 3), ('kto', 1), ('kto', 7)]] # two days; the second one's SFT moves the reference
DAYS = [[(method, MAKE[method](n, start=100 * day + 10 * i)) for i, (method, n) in enumerate(sizes)] for day, sizes in enumerate(SIZES)]
JOBS = [(f'job-{i:02d}', n, True) for i, (_, n) in enumerate(sum(SIZES, []))]
STEPS = sum(-(-n // 4) for _, n in sum(SIZES, []))


@pytest.fixture(scope='module')
def bucket(toy, tmp_path_factory):
    "Makes the settings of a new bucket"
    def new(**changes):
        return {**dict(model_id=str(toy), bucket_id=str(tmp_path_factory.mktemp('bucket')), learning_rate=1e-2, lora_dropout=0.1, queue_persist=True, threads=1), **changes}
    return new


def two_days(settings, drain_all):
    "Ten mixed jobs, submitted last ones first where the method decides the order, drained after each day by `drain_all`"
    for day, jobs in enumerate(DAYS):
        session = Session(load_config({}, **settings))
        named = [(method, rows, f'job-{5 * day + i:02d}') for i, (method, rows) in enumerate(jobs)]
        for method, rows, id in sorted(named, key=lambda job: ('kto', 'dpo', 'sft').index(job[0])): session.submit(rows, method, id=id)
        drain_all(session)


def one_process(settings, **kwargs):
    "A drain that nothing disturbs, in one process"
    return lambda session: finish(start(settings, **kwargs)) == 0 or pytest.fail('the drain failed')


@pytest.fixture(scope='module')
def undisturbed(bucket):
    "One process per day: what every other way must equal"
    settings = bucket()
    begin = time.monotonic()
    two_days(settings, one_process(settings))
    ends = outcome(settings)
    assert ends[1:] == (STEPS, JOBS, [])
    return ends, (time.monotonic() - begin) / 2


def test_a_new_process_per_job(bucket, undisturbed):
    "Each job submitted and drained by a process of its own, in the order in which one drain takes them"
    settings = bucket()
    for n, job in enumerate(sum(DAYS, [])):
        submit(settings, [job], first=n)
        one_process(settings)(None)
    assert outcome(settings) == undisturbed[0]


def test_the_commands(bucket):
    "The same by commands, as a person does on three days: 1, 10 and 5 rows are 1, 3 and 2 steps, and equal one session's"
    settings, session = bucket(), Session(load_config({}, **bucket()))
    env = {**os.environ, **{k.upper(): str(v) for k, v in settings.items()}}
    command = lambda *args, **kwargs: json.loads(subprocess.run([sys.executable, '-m', 'incremental_train', *args, '--json'], env=env, capture_output=True, check=True, **kwargs).stdout)
    jobs = []
    for n, rows in enumerate([tickets(1), tickets(10, start=1), tickets(5, start=11)]):
        assert command('submit', '-', '--id', f'job-{n}', input=json.dumps(rows).encode())['position'] == 1
        jobs += command('drain')['jobs']
        session.submit(rows, id=f'job-{n}'); session.drain()
    assert [j['steps'] for j in jobs] == [1, 3, 2] and [j['first_step'] for j in jobs] == [1, 2, 5]
    assert all(j['rows_trained_once'] and 0 not in j['lr'] for j in jobs)
    assert outcome(settings)[0] == outcome(session.config.model_dump())[0]


@pytest.mark.parametrize('every', [1, 2])
def test_other_checkpoint_intervals(bucket, undisturbed, every):
    "Commits inside jobs change nothing"
    settings = bucket(checkpoint_every=every)
    two_days(settings, one_process(settings))
    assert outcome(settings) == undisturbed[0]


def test_another_thread_draws(bucket, undisturbed):
    "Somebody else's use of torch's global generator, and their seeding of it, change nothing"
    settings = bucket()
    two_days(settings, one_process(settings, noisy=True))
    assert outcome(settings) == undisturbed[0]


def test_cut_after_every_step(bucket, undisturbed):
    "`--max-seconds 0` cuts after each step; each drain goes on at the next row"
    settings, steps = bucket(), []
    def drain_all(session):
        while len(session.queue):
            done = session.drain(max_seconds=0)
            steps.append(done.global_step)
            assert len(done.receipts) <= 1
    two_days(settings, drain_all)
    assert outcome(settings) == undisturbed[0] and steps == list(range(1, STEPS + 1))


def killed_rounds(settings_of, attempt, kills_wanted, attempts=150):
    "Rounds of two days, killed and restarted until nothing waits; as many rounds as the kills need. -> (settings of each round, method of the job that was due at each kill)"
    rounds, kills = [], []
    def drain_all(session):
        for _ in range(attempts):
            code = attempt(rounds[-1], len(kills))
            assert code in (0, -9), code
            if code == 0: return
            session.queue.refresh()
            due = next(iter(session.queue), None)
            kills.append('before the first commit' if not newest(session.store)[0] else due.method if due else 'after the last')
        raise AssertionError('too many attempts')
    while len(kills) < kills_wanted:
        rounds.append(settings_of(len(rounds)))
        two_days(rounds[-1], drain_all)
    return rounds, {where: kills.count(where) for where in sorted(set(kills))}


def test_killed_at_random_instants(bucket, undisturbed):
    "`kill -9` at 20 or more random instants of a drain, before the first commit included, restarted each time"
    chance, length = random.Random(12), undisturbed[1]
    def attempt(settings, n):
        process, delay = start(settings), chance.uniform(0, length) if n % 5 else chance.uniform(0, 0.3 * length)
        process.join(delay)
        process.kill()
        return finish(process)
    rounds, kills = killed_rounds(lambda n: bucket(checkpoint_every=1 if n % 2 else None), attempt, 20)
    print(f'{sum(kills.values())} kills in {len(rounds)} rounds: {kills}')
    for settings in rounds: assert outcome(settings) == undisturbed[0]


def test_killed_inside_commits(bucket, undisturbed):
    "Dead at the n-th call that flushes, names or removes a file: between files, before and after the record, before the job leaves the queue"
    chance = random.Random(7)
    def attempt(settings, n): return finish(start(settings, die=1 + n if n < 3 else chance.randrange(1, 160)))
    rounds, kills = killed_rounds(lambda n: bucket(), attempt, 20)
    print(f'{sum(kills.values())} kills inside commits in {len(rounds)} rounds: {kills}')
    for settings in rounds: assert outcome(settings) == undisturbed[0]


def test_two_drains_at_once(bucket, undisturbed):
    "Two processes on one bucket: one waits for the other, then takes what is left; without leases: test_lease.py"
    settings = bucket()
    def both(session):
        processes = [start(settings, wait=True), start(settings, wait=True)]
        assert [finish(p) for p in processes] == [0, 0]
    two_days(settings, both)
    assert outcome(settings) == undisturbed[0]


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
    assert outcome(settings)[1:] == (1, [('job-00', 4, True)], [])


def test_the_engine_trl(bucket):
    "TRL's trainers keep the same promise: ten mixed jobs at once, and cut after every step"
    whole, cut = bucket(engine='trl'), bucket(engine='trl')
    two_days(whole, one_process(whole))
    def in_pieces(session):
        for _ in range(60):
            if not len(session.queue): return
            session.drain(max_seconds=0)
        pytest.fail('the queue does not get empty')
    two_days(cut, in_pieces)
    assert outcome(cut) == outcome(whole) and outcome(whole)[1:] == (STEPS, JOBS, [])


def test_a_commit_is_written_while_the_next_job_trains(bucket, undisturbed):
    "Receipts come when commits stand: the second job has made its step before the first one's receipt, and the bytes are the same"
    settings, events = bucket(), []
    def drain_all(session):
        session.drain(watch=lambda e: events.append((type(e).__name__, getattr(e, 'id', getattr(e, 'global_step', None)))))
    two_days(settings, drain_all)
    assert outcome(settings) == undisturbed[0]
    names = [e for e in events if e[0] in ('Job', 'Step', 'Receipt')]
    first, second = names.index(('Receipt', 'job-00')), names.index(('Job', 'job-01'))
    assert second < first and names[second + 1][0] == 'Step' and [id for name, id in names if name == 'Receipt'] == [id for name, id in names if name == 'Job']
