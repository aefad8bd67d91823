"DPO and KTO steps are TRL's, against a reference that stays where it is"
import math
import statistics
from pathlib import Path

import pytest
import torch
from datasets import Dataset
from peft import PeftModel, set_peft_model_state_dict
from rows import MAKE, pairs, thumbs, tickets
from safetensors.torch import load_file
from test_train import recorded
from transformers import AutoModelForCausalLM, AutoTokenizer
from trl import DPOConfig, DPOTrainer, KTOConfig, KTOTrainer

from incremental_train.encode import encode_trace
from incremental_train.session import Session
from incremental_train.toy import TEMPLATE, toy_model
from incremental_train.train import train
from incremental_train.trace import parse_trace


@pytest.fixture(scope='module')
def bare_toy(tmp_path_factory):
    "A toy whose template writes nothing behind an end token, so that TRL's own answer ends where ours does"
    folder = toy_model(tmp_path_factory.mktemp('bare'))
    (folder/'chat_template.jinja').write_text(TEMPLATE.replace("'<|im_end|>' + '\\n'", "'<|im_end|>'"))
    return folder


def conversational(row):
    "A row as TRL's users write it"
    answer = lambda text: [{'role': 'assistant', 'content': text}]
    prompt = [{'role': 'user', 'content': row['prompt']}]
    if 'chosen' in row: return {'prompt': prompt, 'chosen': answer(row['chosen']), 'rejected': answer(row['rejected'])}
    return {'prompt': prompt, 'completion': answer(row['completion']), 'label': row['desirable']}


def plain_trl(base, checkpoint, method, rows, folder):
    "Losses and gradients of a plain TRL trainer on raw rows: four in a batch, or one alone without KL"
    model = PeftModel.from_pretrained(AutoModelForCausalLM.from_pretrained(base), checkpoint, is_trainable=True)
    trained = [p for p in model.parameters() if p.requires_grad]
    optimizer = torch.optim.AdamW(trained, lr=1e-2, weight_decay=0.0)
    optimizer.load_state_dict(torch.load(checkpoint/'optimizer.pt', weights_only=True)['adam'][method])
    gradients = recorded(optimizer, model)
    trainer_class, config_class = {'dpo': (DPOTrainer, DPOConfig), 'kto': (KTOTrainer, KTOConfig)}[method]
    alone = {'loss_type': 'apo_zero_unpaired', 'per_device_train_batch_size': 1} if method == 'kto' and len(rows) == 1 else {'per_device_train_batch_size': 4}
    args = config_class(output_dir=str(folder), num_train_epochs=1, train_sampling_strategy='sequential', max_length=None, logging_steps=1, report_to='none', save_strategy='no',
                        use_cpu=True, bf16=False, gradient_checkpointing=False, disable_tqdm=True, **alone)
    trainer = trainer_class(model=model, args=args, train_dataset=Dataset.from_list(list(map(conversational, rows))), processing_class=AutoTokenizer.from_pretrained(base),
                            optimizers=(optimizer, torch.optim.lr_scheduler.LambdaLR(optimizer, lambda _: 1.0)))
    set_peft_model_state_dict(model, load_file(checkpoint/'reference.safetensors'), adapter_name='ref')
    trainer.train()
    return [log['loss'] for log in trainer.state.log_history if 'loss' in log], gradients


@pytest.mark.parametrize('method, rows', [('dpo', pairs(6, start=20)), ('kto', thumbs(6, start=20)), ('dpo', pairs(1, start=30)), ('kto', thumbs(1, start=31)),
                                          ('kto', thumbs(12, start=40)[::2]), ('kto', thumbs(12, start=41)[::2])], ids=['dpo', 'kto', 'one pair', 'one thumb', 'all undesirable', 'all desirable'])
def test_each_step_is_plain_trl(bare_toy, settings, tmp_path, method, rows):
    "Loss and adapter gradients of whole and ragged steps equal a plain trainer's from the same state and reference, within 1e-5; the policy has left the reference before"
    session = Session(settings(model_id=str(bare_toy)))
    for kind in ('sft', 'dpo', 'kto'): session.submit(MAKE[kind](5), kind)
    session.drain()
    theirs, their_gradients = plain_trl(bare_toy, Path(str(session.store), session.status()['checkpoint']), method, rows, tmp_path/'trl')
    gradients = recorded(session._state.adam[method], session._state.model)
    ours = train(session._state, method, encode_trace(parse_trace(rows, method), session.tokenizer(), 256))
    assert len(ours) == len(theirs) == len(gradients) == len(their_gradients)
    loss = max(abs(a.loss - b) for a, b in zip(ours, theirs))
    gradient = max((a - b).abs().max().item() for x, y in zip(gradients, their_gradients) for a, b in zip(x, y))
    print(f'{method}, {len(rows)} rows: largest difference of loss {loss:.1e}, of a gradient {gradient:.1e} (largest gradient {max(g.abs().max().item() for x in gradients for g in x):.2f})')
    assert loss < 1e-5 and gradient < 1e-5 and all(math.isfinite(s.loss) for s in ours)


def test_reverse_order_and_first_losses(settings):
    "5 + 5 + 5 rows submitted as KTO, DPO, SFT are drained as SFT, DPO, KTO, two steps each; the first preference loss after SFT is ln 2 or 0.5"
    for first, second in (('dpo', 'kto'), ('kto', None)):
        session = Session(settings(experiment=first))
        for method in filter(None, (second, first, 'sft')): session.submit(MAKE[method](5), method)
        done = session.drain()
        assert [(r.method, r.steps) for r in done.receipts] == [(m, 2) for m in ('sft', first, second) if m]
        assert done.receipts[1].first_loss == pytest.approx({'dpo': math.log(2), 'kto': 0.5}[first], abs=1e-4)
        assert [j['reference'] for j in done.summary()['jobs'] if 'reference' in j] == [{'commit': 1, 'step': 2}] * (1 + bool(second))


def test_one_thumb_after_sft(settings):
    "A one-row KTO job starts at 0.5 and moves the adapter; so does one after it, against the same reference, in a new session"
    session = Session(settings())
    session.submit(tickets(4)); session.submit(thumbs(1), 'kto')
    assert session.drain().receipts[1].first_loss == pytest.approx(0.5, abs=1e-4)
    again = Session(settings())
    again.submit(thumbs(1, start=1), 'kto')
    receipt = again.drain().receipts[0]
    assert receipt.reference == {'commit': 1, 'step': 1} and receipt.first_loss != pytest.approx(0.5, abs=1e-6) and receipt.losses[0] > 0


def test_the_reference_outlives_its_commit(settings):
    "Many preference jobs later the reference still stands, its commit's files are kept, and an undo brings back the one that belonged to that version"
    session = Session(settings(keep_checkpoints=2))
    session.submit(tickets(4)); session.drain()
    first = session.status()['checkpoint']
    for n in range(5): session.submit(pairs(1, start=n), 'dpo'); session.drain()
    assert session.store.list(first) and session.status()['reference'] == {'commit': 1, 'step': 1}
    assert session._at.files['reference.safetensors'] == session.store.get(f'{first}/adapter_model.safetensors')
    session.submit(tickets(4, start=9)); session.drain()
    assert session.status()['reference']['step'] == 7
    session.undo()
    assert session.status()['reference'] == {'commit': 1, 'step': 1}


@pytest.mark.slow
def test_two_hundred_jobs_in_one_process(settings):
    "One-row jobs of alternating methods: no growth of wrappers, adapters, memory (2 %) or time per job (10 %, medians of the first and last 20)"
    session, seconds, memory = Session(settings()), [], []
    import psutil, time
    process = psutil.Process()
    for n in range(220): # the first 20 warm up
        method = ('sft', 'dpo', 'kto')[n % 3]
        session.submit(MAKE[method](1, start=n), method)
        begin = time.perf_counter(); session.drain()
        seconds.append(time.perf_counter() - begin); memory.append(process.memory_info().rss)
    base = session._state.model.get_base_model()
    assert list(session._state.model.peft_config) == ['default'] and 'forward' not in vars(base) and not session._state.model._forward_pre_hooks
    early, late = (statistics.median(x) for x in (seconds[20:40], seconds[-20:]))
    before, after = (statistics.median(x) for x in (memory[20:40], memory[-20:]))
    print(f'seconds per job {early:.3f}, then {late:.3f} ({late / early - 1:+.1%}); memory {before / 1e6:.0f} MB, then {after / 1e6:.0f} MB ({after / before - 1:+.1%})')
    assert after / before < 1.02
