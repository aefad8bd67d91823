"The trained step is TRL's, the checkpoint is PEFT's, and no text stays behind"
import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from datasets import Dataset
from fastcore.nbio import new_nb, write_nb
from peft import PeftModel
from rows import chat, tickets
from transformers import AutoModelForCausalLM, AutoTokenizer
from trl import SFTConfig, SFTTrainer

from incremental_train.session import Session
from incremental_train.train import train
from incremental_train.encode import encode_trace
from incremental_train.trace import parse_trace

MARKED = """{% for m in messages %}{{ '<|im_start|>' + m['role'] + '\n' }}{% if m['role'] == 'assistant' %}{% generation %}{{ m['content'] + '<|im_end|>' }}{% endgeneration %}{% else %}{{ m['content'] + '<|im_end|>' }}{% endif %}{{ '\n' }}{% endfor %}{% if add_generation_prompt %}{{ '<|im_start|>assistant\n' }}{% endif %}"""


def drained(config, rows):
    "A session that has trained `rows`, and the folder of its newest checkpoint"
    session = Session(config)
    session.submit(rows)
    session.drain()
    return session, Path(str(session.store), session.status()['checkpoint'])


def recorded(optimizer, model):
    "The adapter's gradients at each step of `optimizer`, filled while it trains"
    steps = []
    named = [p for p in model.parameters() if p.requires_grad]
    optimizer.register_step_pre_hook(lambda *_: steps.append([p.grad.clone() for p in named]))
    return steps


def plain_trl(toy, checkpoint, rows, folder, batch):
    "Losses and gradients of TRL as its own users call it: raw messages, its own tokenisation and labels"
    processor = AutoTokenizer.from_pretrained(toy)
    processor.chat_template = MARKED
    model = PeftModel.from_pretrained(AutoModelForCausalLM.from_pretrained(toy), checkpoint, is_trainable=True)
    trained = [p for p in model.parameters() if p.requires_grad]
    optimizer = torch.optim.AdamW(trained, lr=1e-2, weight_decay=0.0)
    optimizer.load_state_dict(torch.load(checkpoint/'optimizer.pt', weights_only=True)['adam']['sft'])
    gradients = recorded(optimizer, model)
    args = SFTConfig(output_dir=str(folder), per_device_train_batch_size=batch, gradient_accumulation_steps=4 // batch, num_train_epochs=1, train_sampling_strategy='sequential',
                     assistant_only_loss=True, max_length=None, logging_steps=1, report_to='none', save_strategy='no', use_cpu=True, bf16=False, gradient_checkpointing=False, disable_tqdm=True)
    trainer = SFTTrainer(model=model, args=args, train_dataset=Dataset.from_list(rows), processing_class=processor, optimizers=(optimizer, torch.optim.lr_scheduler.LambdaLR(optimizer, lambda _: 1.0)))
    trainer.train()
    return [log['loss'] for log in trainer.state.log_history if 'loss' in log], gradients


@pytest.mark.parametrize('batch', [1, 4])
def test_each_step_is_plain_trl(toy, settings, tmp_path, batch):
    "Loss and adapter gradients of three steps (4 + 4 + 2 rows) equal a plain SFTTrainer's from the same state, within 1e-5"
    session, checkpoint = drained(settings(), tickets(5))
    rows = tickets(10, start=5)
    theirs, their_gradients = plain_trl(toy, checkpoint, rows, tmp_path/'trl', batch)
    gradients = recorded(session._state.adam['sft'], session._state.model)
    ours = train(session._state, 'sft', encode_trace(parse_trace(rows), session.tokenizer(), 256))
    assert len(ours) == len(theirs) == 3
    loss = max(abs(a.loss - b) for a, b in zip(ours, theirs))
    gradient = max((a - b).abs().max().item() for x, y in zip(gradients, their_gradients) for a, b in zip(x, y))
    print(f'batch {batch}: largest difference of loss {loss:.1e}, of a gradient {gradient:.1e} (largest gradient {max(g.abs().max().item() for x in gradients for g in x):.2f})')
    assert loss < 1e-5 and gradient < 1e-5


def test_loss_counts_tokens_not_rows(toy, settings):
    "A step's loss is the sum over its trained tokens divided by their number, computed here by hand"
    rows = [chat('Hi', 'ok'), chat('Where?', 'delivery, low, ' * 10), chat('Who?', 'billing'), chat('Why?', 'no')]
    session, _ = drained(settings(), rows[:1])
    encoded = encode_trace(parse_trace(rows), session.tokenizer(), 256)
    with torch.no_grad():
        logp = [torch.log_softmax(session._state.model(input_ids=torch.tensor([r.ids])).logits[0].double(), -1) for r in encoded]
    nats = [-sum(lp[t - 1, l].item() for t, l in enumerate(r.labels) if l != -100) for r, lp in zip(encoded, logp)]
    by_hand = sum(nats) / sum(r.trained for r in encoded)
    assert train(session._state, 'sft', encoded)[0].loss == pytest.approx(by_hand, abs=1e-5)


def test_checkpoint_is_an_adapter(toy, settings):
    "`PeftModel.from_pretrained(base, checkpoint)` gives the session's logits; the other files load without running code"
    session, checkpoint = drained(settings(), tickets(5))
    ids = torch.tensor([session.tokenizer().ids('Where is my parcel?')])
    opened = PeftModel.from_pretrained(AutoModelForCausalLM.from_pretrained(toy), checkpoint).eval()
    with torch.no_grad():
        assert torch.equal(opened(input_ids=ids).logits, session._state.model(input_ids=ids).logits)
        with session._state.model.disable_adapter(): assert not torch.equal(opened(input_ids=ids).logits, session._state.model(input_ids=ids).logits)
    assert AutoTokenizer.from_pretrained(checkpoint).chat_template == session.tokenizer().template
    for name in ('optimizer.pt', 'scheduler.pt', 'rng.pt'): torch.load(checkpoint/name, weights_only=True)


def test_rank_and_weights_of_a_resident_model_stay(settings):
    "Drain after drain on one resident model: one adapter, the same trained parameters, all in the optimizer, each moved"
    session = Session(settings())
    for n in range(3):
        session.submit(tickets(4, start=4 * n))
        before = {} if session._state is None else {name: p.clone() for name, p in session._state.model.named_parameters() if 'lora_B' in name}
        session.drain()
        model = session._state.model
        trained = [p for p in model.parameters() if p.requires_grad]
        assert list(model.peft_config) == ['default'] and sum(p.numel() for p in trained) == 3584
        assert {id(p) for p in trained} == {id(p) for g in session._state.adam['sft'].param_groups for p in g['params']}
        assert not any(torch.equal(p, before[name]) for name, p in model.named_parameters() if name in before)


def test_no_text_stays_behind(toy, tmp_path):
    "After a drain no byte of a row and no token is in any file under bucket, caches, logs, the working folder or a saved notebook; with QUEUE_PERSIST it is there before, and gone after"
    canary, token = 'Zyx "quoted" canary 4711', 'hf_secretcanary'
    env = {**os.environ, 'MODEL_ID': str(toy), 'BUCKET_ID': str(tmp_path/'bucket'), 'QUEUE_PERSIST': 'true', 'HF_TOKEN': token, 'XDG_CACHE_HOME': str(tmp_path/'cache'),
           'HF_HOME': str(tmp_path/'hf'), 'HF_DATASETS_CACHE': str(tmp_path/'datasets'), 'TMPDIR': str(tmp_path/'tmp'), 'HOME': str(tmp_path/'home'), 'CHECKPOINT_EVERY': '1', 'MEASURE_AFTER': 'true'}
    for name in ('tmp', 'home', 'work'): (tmp_path/name).mkdir()
    forms = [canary.encode(), json.dumps(canary)[1:-1].encode(), canary.encode('utf-16-le'), b'canary 4711', token.encode()]
    trace = json.dumps([chat(canary, f'answer {canary}')] * 5).encode()

    def run(*args):
        done = subprocess.run([sys.executable, '-m', 'incremental_train', *args], input=trace, env=env, cwd=tmp_path/'work', capture_output=True)
        assert done.returncode == 0, done.stderr
        (tmp_path/'work'/'log.txt').open('ab').write(done.stdout + done.stderr) # a person who keeps what was printed

    def found(): return [p for p in tmp_path.rglob('*') if p.is_file() and any(form in p.read_bytes() for form in forms)]

    run('submit', '-')
    assert [p.parent.name for p in found()] == ['queue']
    run('drain')
    run('status'), run('history')
    (tmp_path/'work'/'trace.json').write_bytes(trace)
    cells = ["from incremental_train.session import Session\nsession = Session()", "session.submit('trace.json', id='again')", 'session.drain()', 'session.history()', 'session.status()']
    write_nb(new_nb(cells), tmp_path/'work'/'day.ipynb')
    subprocess.run([sys.executable, '-c', "from execnb.shell import CaptureShell; CaptureShell().execute('day.ipynb', 'day.ipynb', exc_stop=True)"], env=env, cwd=tmp_path/'work', check=True, capture_output=True)
    assert b'continued exactly from step 2 ' in (tmp_path/'work'/'day.ipynb').read_bytes()
    (tmp_path/'work'/'trace.json').unlink()
    assert found() == []
