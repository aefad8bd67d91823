"Peak memory of the packed engine by rows per step, each in a process of its own: it should follow TOKEN_BUDGET alone. Prints one JSON object"
import argparse
import json
import subprocess
import sys

from against_trl import MODEL, TARGETS, rows_of


def peak(path, per_step, steps, budget):
    "Train steps of so many rows; MB above imports and weights, and in all"
    from incremental_train.config import load_config
    from incremental_train.cost import reset_peak, resident_mb
    from incremental_train.model import add_adapter, find_base, load_base
    from incremental_train.packed_engine import train_packed
    from incremental_train.state import State
    base = find_base(MODEL)
    config = load_config({}, lora_target_modules=TARGETS, grad_accum=per_step, max_length=512)
    rows = rows_of('sft', path, per_step * steps, 512, base)
    model = load_base(base, 'float32', 'cpu')
    for p in model.parameters(): p.sum()
    floor = resident_mb(); reset_peak()
    train_packed(State(add_adapter(model, config, base.id), None, config, budget=budget), 'sft', rows)
    return {'rows_per_step': per_step, 'above_floor_mb': round(resident_mb(peak=True) - floor), 'peak_mb': round(resident_mb(peak=True))}


if __name__ == '__main__':
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument('--data', required=True, help='JSONL of SFT rows')
    parser.add_argument('--per-step', type=int, nargs='+', default=[8, 32, 128])
    parser.add_argument('--rows', type=int, default=128, help='trained in all, the same for each')
    parser.add_argument('--budget', type=int, default=512)
    parser.add_argument('--one', type=int, help=argparse.SUPPRESS)
    args = parser.parse_args()
    if args.one: print(json.dumps(peak(args.data, args.one, args.rows // args.one, args.budget))); raise SystemExit
    seen = []
    for n in args.per_step:
        done = subprocess.run([sys.executable, *sys.argv, '--one', str(n)], capture_output=True, text=True)
        if done.returncode: raise SystemExit(done.stderr)
        seen.append(json.loads(done.stdout.splitlines()[-1]))
    peaks = [s['peak_mb'] for s in seen]
    print(json.dumps({'budget': args.budget, 'rows': args.rows, 'peaks': seen, 'spread': round(max(peaks) / min(peaks) - 1, 3)}))
