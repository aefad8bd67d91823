"How long a submit and `--help` take: 1,000 rows in a running session, cold start of both"
import argparse
import json
import os
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from statistics import median

from incremental_train.config import load_config
from incremental_train.session import Session
from incremental_train.toy import toy_model

ROWS = [{'messages': [{'role': 'system', 'content': 'Turn the ticket into one line.'}, {'role': 'user', 'content': f'Where is parcel {n}? It should have come on Monday.'},
                      {'role': 'assistant', 'content': f'delivery | normal | trace parcel {n}'}]} for n in range(1000)]


def seconds(call):
    "Wall time of one call"
    begin = time.perf_counter(); call()
    return time.perf_counter() - begin


def measure(model_id, folder, rounds):
    "Medians over `rounds`, each kind in turn"
    session, text = Session(load_config({}, model_id=model_id, bucket_id=f'{folder}/bucket')), json.dumps(ROWS)
    session.submit(ROWS[:1]) # loads the tokenizer
    command = lambda *args: lambda: subprocess.run([sys.executable, '-m', 'incremental_train', *args], env={**os.environ, 'MODEL_ID': model_id, 'BUCKET_ID': f'{folder}/bucket'}, check=True, capture_output=True)
    Path(folder, 'trace.json').write_text(text)
    kinds = {'submit_1000_rows_warm_s': lambda: session.submit(text), 'submit_1000_rows_cold_s': command('submit', f'{folder}/trace.json'), 'help_s': command('--help'), 'python_start_s': lambda: subprocess.run([sys.executable, '-c', ''], check=True)}
    times = {name: [] for name in kinds}
    for _ in range(rounds):
        for name, call in kinds.items():
            times[name].append(seconds(call))
            for job in list(session.queue): session.queue.remove(job.id)
    return {name: round(median(values), 3) for name, values in times.items()}


if __name__ == '__main__':
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument('--model', help='MODEL_ID; unset: the toy model')
    parser.add_argument('--rounds', type=int, default=5)
    args = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder:
        model = args.model or str(toy_model(f'{folder}/toy'))
        print(json.dumps({'model': args.model or 'toy', 'rounds': args.rounds, **measure(model, folder, args.rounds)}))
