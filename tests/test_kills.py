"Killed at any instant, every job is in the weights exactly once (with the real engine: test_exact.py)"
import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
from bucket_hub import BucketHub
from drains import die_at
from stores import Moto, new_name, s3_environment

from incremental_train.bucket import open_store
from incremental_train.store import checkout, commit, sweep

JOBS = 25


def run(bucket, workers, chance, seed, environment={}):
    "Workers until all jobs are done; how it ended"
    env = {**{k: v for k, v in os.environ.items() if k != 'HF_HUB_OFFLINE'}, **environment}
    done = subprocess.run([sys.executable, str(Path(__file__).parent/'workers.py'), bucket, str(JOBS), str(workers), str(chance), str(seed)], env=env, capture_output=True, text=True, timeout=280)
    assert done.returncode == 0, done.stderr[-2000:]
    return json.loads(done.stdout.splitlines()[-1])


def each_once(end):
    assert sorted(end['weights']) == [f'{n:02d}' for n in range(JOBS)] and end['ledger'] == [f'job-{n:02d}' for n in range(JOBS)] and not end['queue'] and end['verified'] and not end['torch'], end
    return end['kills']


def test_folder(tmp_path):
    "Three workers at once, at least 45 kills"
    kills = sum(each_once(run(f'{tmp_path}/bucket-{n}', 3, 0.09, 1000 * n)) for n in range(2))
    print(f'folder: {kills} kills')
    assert kills >= 45


def test_s3(tmp_path):
    "Three workers at once, at least 45 kills"
    server = Moto(tmp_path)
    kills = sum(each_once(run(f's3://lessons/{new_name()}', 3, 0.09, 5000 + 1000 * n, s3_environment(server.url))) for n in range(2))
    server.close()
    print(f's3: {kills} kills')
    assert kills >= 45


@pytest.mark.slow
def test_hugging_face(tmp_path):
    "One worker after the other, at least 12 kills"
    hub = BucketHub()
    end = run(f'ada/{new_name()}', 1, 0.1, 9000, {'HF_ENDPOINT': hub.url, 'HF_HOME': str(tmp_path/'hf'), 'HF_TOKEN': 'hf_secretcanary123', 'HF_HUB_DISABLE_PROGRESS_BARS': '1'})
    hub.shutdown()
    print(f"hub: {each_once(end)} kills")
    assert end['kills'] >= 12 and not end['exclusive']


CALLS = ('open', 'fsync', 'link', 'replace', 'unlink', 'rmdir', 'mkdir')


def test_a_kill_at_every_file_operation(tmp_path):
    "With KEEP_CHECKPOINTS=1 a commit and its cleaning up are killed before each of their file operations: there is always a checkpoint that verifies, the old one or the new"
    operations, n = None, 0
    while operations is None or n < operations:
        n += 1
        bucket = str(tmp_path/f'bucket-{n}')
        store = open_store(bucket)
        at = checkout(store)
        for step in (1, 2, 3): at = commit(store, at, {'w.bin': b'%d' % step, 'o.bin': b'adam'}, {'global_step': step, 'ledger': [{'id': f'job-{step}'}], 'at': step}); sweep(store, at, keep=1, grace=-1)
        pid = os.fork()
        if not pid:
            die_at(n, CALLS)
            now = commit(store, at, {'w.bin': b'4', 'o.bin': b'adam'}, {'global_step': 4, 'ledger': [{'id': 'job-4'}], 'at': 4})
            sweep(store, now, keep=1, grace=-1)
            os._exit(0)
        _, status = os.waitpid(pid, 0)
        if not os.WIFSIGNALED(status): operations = n # it came to its end
        again = checkout(open_store(bucket))
        assert again.commit.step in (3, 4) and again.files['w.bin'] == b'%d' % again.commit.step and not again.passed_over, n
        after = commit(store := open_store(bucket), again, {'w.bin': b'5'}, {'global_step': 5, 'ledger': [], 'at': 5})
        assert checkout(store).commit == after.commit
    print(f'{n - 1} kills')
    assert n > 25
