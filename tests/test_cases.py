"Faults that people reported about systems like this one, one test each; the names are those of the reports' list"
import ast
import gc
import hashlib
import json
import math
import re
import shutil
import threading
import warnings
import weakref
from pathlib import Path

import pytest
import torch
from drains import finish, outcome, start, submit as submit_jobs, wait_for_commit
from rows import chat, pairs, thumbs
from safetensors.torch import load

from incremental_train.chat import ChatTokenizer
from incremental_train.config import Refused, load_config
from incremental_train.encode import encode, encode_trace
from incremental_train.model import Base, add_adapter, answer, load_base
from incremental_train.plan import count_params
from incremental_train.runfile import RunFileError, as_toml, load_run
from incremental_train.session import Session
from incremental_train.state import State, adapter_tensors
from incremental_train.store import Conflict, checkout, draft, log, write
from incremental_train.toy import toy_model, toy_tokenizer
from incremental_train.trace import parse_trace
from incremental_train.train import mean_loss, train

COUNT = [chat(f'Count to {n}.', ' '.join(map(str, range(1, n + 1))) + '.') for n in range(1, 13)]
BOM = b'\xef\xbb\xbf'


def jsonl(rows): return '\n'.join(map(json.dumps, rows)) + '\n'
def turn(role, content, **more): return {'role': role, 'content': content, **more}
def keys_of(session): return {key: hashlib.sha256(session.store.get(key)).hexdigest() for key in session.store.list()}
def labels_of(encoded): return [l for l in encoded.labels if l != -100]
def spans_in(labels): return sum(a == -100 and b != -100 for a, b in zip([-100, *labels], labels))


@pytest.fixture(scope='module')
def tokenizer(toy): return ChatTokenizer(toy)


@pytest.fixture
def session(settings): return Session(settings())


def with_template(folder, template): return ChatTokenizer(toy_tokenizer(folder, template))


def state_of(toy, engine='packed', **settings):
    "A fresh resident model"
    from transformers import AutoTokenizer
    config = load_config({}, **{'learning_rate': 1e-2, 'threads': 1, **settings})
    return State(add_adapter(load_base(Base('toy', None, Path(toy)), 'float32', 'cpu'), config, 'toy'), AutoTokenizer.from_pretrained(toy), config, engine=engine)


def gradients(state, method, rows):
    "(losses, gradients of each step)"
    steps, named = [], [p for p in state.model.parameters() if p.requires_grad]
    state.adam[method].register_step_pre_hook(lambda *_: steps.append([p.grad.clone() for p in named]))
    return [s.loss for s in train(state, method, rows)], steps


def refused(session, source, method='sft'):
    "The message of a refused submit, which leaves no trace"
    before, waiting = keys_of(session), len(session.queue)
    with pytest.raises(Refused) as e: session.submit(source, method)
    assert keys_of(session) == before and len(session.queue) == waiting and 'Traceback' not in str(e.value)
    return str(e.value)


def test_D01_data_bom(session, tokenizer, tmp_path):
    "A byte order mark, also where two files were put together, in bytes, text and file: the same rows as without"
    plain = jsonl(COUNT[:3]).encode()
    array = json.dumps(COUNT[:3], indent=1).encode()
    (tmp_path/'bom.jsonl').write_bytes(BOM + plain)
    wanted = parse_trace(plain).rows
    for source in (BOM + plain, (BOM + plain).decode(), tmp_path/'bom.jsonl', str(tmp_path/'bom.jsonl'), BOM + array, array.decode(), plain.decode().encode('utf-16'), plain.replace(b'\n', b'\r\n'), plain[:len(jsonl(COUNT[:1]))] + BOM + plain[len(jsonl(COUNT[:1])):],
                   BOM + plain.replace(b'"messages"', b'"\\ufeffmessages"')):
        trace = parse_trace(source)
        assert trace.rows == wanted and '\ufeff' not in repr(trace)
    assert [e.ids for e in encode_trace(parse_trace(BOM + plain), tokenizer, 256)] == [e.ids for e in encode_trace(parse_trace(plain), tokenizer, 256)]
    assert (session.submit(BOM + plain)['rows'], session.submit(BOM + json.dumps(COUNT[4:6], indent=1).encode())['steps']) == (3, 1)


def test_D02_data_malformed_line(session):
    "The physical line, blank ones counted; a trace is refused whole"
    lines = [json.dumps(chat(f'Question {n}?', f'Answer {n}.')) for n in range(9)]
    lines[3:3] = ['']
    lines[6] = '{"messages": [{"role": "user", "content": "Question 7?"}, {"role": "assistant", "content": "Press the "Save" key."}]}'
    for break_ in ('\n', '\r\n', '\r'):
        said = refused(session, break_.join(lines))
        assert said.startswith('line 7: is not JSON') and 'line 6' not in said and 'Save' not in said and len(said.splitlines()) == 1


def test_D03_data_content_parts(session, tokenizer):
    "Parts of text are joined in order; a picture is refused by its name and line"
    question = lambda content, answer='Three.': {'messages': [turn('user', content), turn('assistant', answer)]}
    part = lambda text: {'type': 'text', 'text': text}
    rows = encode_trace(parse_trace([question('Sum 1 and 2.'), question([part('Sum 1 and 2.')], [part('Three.')]), question([part('Sum 1 '), part('and 2.')])]), tokenizer, 256)
    assert rows[0] == rows[1] == rows[2] and "{'type'" not in tokenizer.chat.decode(rows[1].ids)
    for kind in ({'type': 'image_url', 'image_url': {'url': 'file:///x.png'}}, {'type': 'input_audio', 'data': 'x'}, {'text': 'no type'}, 'loose text', {'type': 'text', 'text': 3}):
        said = refused(session, jsonl([question('Hello?'), question([part('What is it?'), kind])]))
        assert said.startswith('line 2: messages[0].content[1]') and (not isinstance(kind, dict) or str(kind.get('type', '')).split()[0:1] == [] or kind['type'] in said) and 'x.png' not in said


def test_D04_data_sharegpt(session, tokenizer):
    "The same ids and labels as messages, the system turn kept, also where it is a column; an unknown name is named"
    plain = [chat('What is 2 + 2?', 'Four.', 'And twice that?', 'Eight.'), {'messages': [turn('system', 'Answer in one word.'), *chat('Capital of Italy?', 'Rome.')['messages']]}, chat('Name a fruit.', 'Pear.')]
    names = {'user': 'human', 'assistant': 'gpt', 'system': 'system'}
    shared = [{'conversations': [{'from': names[m['role']], 'value': m['content']} for m in row['messages']]} for row in plain[:2]] + [{'conversations': plain[2]['messages']}]
    column = {'conversations': shared[1]['conversations'][1:], 'system': 'Answer in one word.'}
    ours, theirs = (encode_trace(parse_trace(rows), tokenizer, 256) for rows in (plain, shared))
    assert ours == theirs and [spans_in(r.labels) for r in theirs] == [2, 1, 1] and encode_trace(parse_trace([column]), tokenizer, 256)[0] == ours[1] and parse_trace([column]).notices == ()
    said = refused(session, jsonl([shared[0], {'conversations': [{'from': 'narrator', 'value': 'Night falls.'}, {'from': 'gpt', 'value': 'Good night.'}]}]))
    assert 'line 2' in said and "'narrator'" in said and 'human' in said and 'Night' not in said


def test_D05_data_truncated_labels(settings, tokenizer):
    "A prompt that fills the limit gives way to its answer, token for token; what cannot fit is refused with both lengths"
    session, words = Session(settings(max_length=64)), ' '.join(f'item{n}' for n in range(600))
    long = {'messages': [turn('user', words), turn('assistant', 'Yes.')]}
    free, limited = (encode(parse_trace([long]).rows[0], tokenizer, n) for n in (100_000, 64))
    assert labels_of(limited) == labels_of(free) == tokenizer.ids('Yes.<|im_end|>') and len(limited.ids) <= 64
    assert any('1 row is longer' in n for n in session.submit([long])['notices'])
    receipt = session.drain().receipts[0]
    assert receipt.shortened == 1 and math.isfinite(receipt.first_loss) and receipt.first_loss > 0
    assert all(t.abs().max() > 0 for name, t in adapter_tensors(session._state).items() if 'lora_B' in name)
    said = refused(session, jsonl([{'messages': [turn('system', words), turn('user', words), turn('assistant', 'Yes.')]}, chat('Is water wet?', 'Yes.')]))
    assert re.fullmatch(r'line 1: needs \d{3,} tokens .*MAX_LENGTH is 64;.*', said)
    said = refused(session, [chat('Where?', words)])
    assert said.startswith('line 1: needs')


STRICT = """{%- for t in messages -%}
{%- if (loop.index0 % 2 == 0) != (t.role == 'user') -%}{{ raise_exception('bad order') }}{%- endif -%}
<{{ t.role }}>{{ t.content }}</{{ t.role }}>
{%- endfor -%}"""
IN_A_ROW = [chat('What is 2 + 2?', 'Four.'), {'messages': [turn('user', 'First part.'), turn('user', 'How many days in a week?'), turn('assistant', 'Seven.')]}, {'messages': [turn('user', 'Two facts.'), turn('assistant', 'Ice floats.'), turn('assistant', 'Iron sinks.')]}]


def test_D06_data_consecutive_roles(session, settings, tokenizer, tmp_path):
    "ChatML takes two turns of one role; a strict template refuses them at submit, each by its line, in words"
    assert session.submit(IN_A_ROW)['rows'] == 3
    assert [spans_in(r.labels) for r in encode_trace(parse_trace(IN_A_ROW), tokenizer, 256)] == [1, 1, 2]
    folder = toy_model(tmp_path/'strict')
    (folder/'chat_template.jinja').write_text(STRICT)
    said = refused(Session(settings(model_id=str(folder), experiment='strict')), jsonl(IN_A_ROW))
    assert [line[:7] for line in said.splitlines()] == ['line 2:', 'line 3:'] and said.count('same role') == 2 and 'bad order' in said and 'jinja' not in said and 'days' not in said


@pytest.mark.parametrize('desirable', [True, False])
def test_D07_data_kto_single_row(session, desirable):
    "One row: 0.5 from a fresh adapter, a gradient, a moved adapter, and the receipt says what the KL term is"
    steps = []
    session.submit([{'prompt': 'What is 2 + 2?', 'completion': 'Four.', 'desirable': desirable}], 'kto')
    receipt = session.drain(watch=lambda e: steps.append(e) if type(e).__name__ == 'Step' else None).receipts[0]
    assert receipt.steps == 1 and receipt.first_loss == pytest.approx(0.5, abs=1e-4) and math.isfinite(steps[0].grad_norm) and steps[0].grad_norm > 0
    assert session.status()['global_step'] == 1 and 'KL' in str(receipt) and '0 by definition in 1 step of one row' in str(receipt)
    tensors = adapter_tensors(session._state)
    assert all(t.isfinite().all() for t in tensors.values()) and all(t.abs().max() > 0 for name, t in tensors.items() if 'lora_B' in name)


def test_D08_data_dpo_prompt_repeated(session, tokenizer):
    "Text, turns, or conversations that repeat the prompt, with a system turn or an earlier exchange: the prompt stands there once and only the last answer is scored"
    ask, good, bad = turn('user', 'How do I boil an egg?'), turn('assistant', 'Eight minutes in boiling water.'), turn('assistant', 'Put it in the freezer.')
    three = [{'prompt': ask['content'], 'chosen': [ask, good], 'rejected': [ask, bad]}, {'chosen': [ask, good], 'rejected': [ask, bad]}, {'prompt': [ask], 'chosen': [good], 'rejected': [bad]}]
    more = [{'prompt': [ask], 'chosen': [ask, good], 'rejected': [ask, bad]}, {'prompt': ask['content'], 'chosen': good['content'], 'rejected': bad['content']}, {'prompt': ask['content'], 'chosen': good, 'rejected': bad}, {'conversations': [{'from': 'human', 'value': ask['content']}], 'chosen': {'from': 'gpt', 'value': good['content']}, 'rejected': {'from': 'gpt', 'value': bad['content']}}]
    encoded = encode_trace(parse_trace(three + more, 'dpo'), tokenizer, 256)
    assert all(e == encoded[0] for e in encoded) and session.submit(three, 'dpo')['rows'] == 3
    for sequence, a in zip(encoded[0].sequences, (good, bad)):
        assert tokenizer.chat.decode(sequence.ids).count(ask['content']) == 1 and labels_of(sequence) == tokenizer.ids(a['content'] + '<|im_end|>')
    system, earlier = turn('system', 'Cook.'), [turn('user', 'Hi'), turn('assistant', 'Hello.')]
    same = lambda *rows: len(set(parse_trace(list(rows), 'dpo').rows)) == 1
    assert same({'prompt': [system, ask], 'chosen': [ask, good], 'rejected': [ask, bad]}, {'prompt': ask['content'], 'chosen': [system, ask, good], 'rejected': [system, ask, bad]}, {'prompt': [system], 'chosen': [ask, good], 'rejected': [ask, bad]})
    assert same({'chosen': [*earlier, ask, good], 'rejected': [*earlier, ask, bad]}, {'prompt': [*earlier, ask], 'chosen': good['content'], 'rejected': bad['content']})
    long = encode(parse_trace([{'chosen': [*earlier, ask, good], 'rejected': [*earlier, ask, bad]}], 'dpo').rows[0], tokenizer, 256)
    assert labels_of(long.chosen) == labels_of(encoded[0].chosen)
    for row in ({'prompt': 'Something else', 'chosen': [ask, good], 'rejected': [ask, bad]}, {'chosen': [ask, good], 'rejected': [turn('user', 'Why?'), bad]}, {'chosen': [ask, good, ask], 'rejected': [ask, bad]}, {'chosen': 'a', 'rejected': 'b'}, {'chosen': [ask, good], 'rejected': [ask, good]}, {'prompt': 'a', 'chosen': [], 'rejected': 'b'}):
        assert refused(session, [row], 'dpo').startswith('line 1: ')
    assert 'begin with the prompt' in parse_trace([{'prompt': 'Human: Hi Assistant:', 'chosen': 'Human: Hi Assistant: Hello', 'rejected': 'Human: Hi Assistant: No'}], 'dpo').notices[0]


def test_D09_resume_target_modules(settings):
    "Other layers, rank or alpha: both sides named with the way out, nothing touched; put back, it trains"
    base = dict(lora_target_modules='q_proj,v_proj')
    session = Session(settings(**base))
    session.submit(COUNT[:2]); session.drain()
    for change, words in ((dict(lora_target_modules='q_proj,k_proj,v_proj,o_proj'), ('k_proj,o_proj,q_proj,v_proj', 'k_proj, o_proj added', 'q_proj,v_proj')), ({**base, 'lora_r': 4}, ('LORA_R is 4', '8')), ({**base, 'lora_alpha': 32}, ('LORA_ALPHA is 32', '16'))):
        other = Session(settings(**change))
        other.submit(COUNT[2:4])
        before = keys_of(other)
        with pytest.raises(Refused) as e: other.drain()
        for word in (*words, 'put it back', 'new experiment'): assert word in str(e.value)
        assert 'parameter group' not in str(e.value) and keys_of(other) == before and len(other.queue) == 1
    again = Session(settings(**base))
    assert again.drain().global_step == 2 and not len(again.queue)


def test_D10_resume_truncated_newest(settings):
    "A file cut, missing or empty, a hint at a step that is not there: the newest checkpoint that is whole is used, tensor for tensor, and the bad file is named"
    for experiment, name, harm in (('a', 'optimizer.pt', lambda p: p.write_bytes(p.read_bytes()[:p.stat().st_size // 2])), ('b', 'trainer_state.json', Path.unlink), ('c', 'adapter_model.safetensors', lambda p: p.write_bytes(b'')), ('d', None, None)):
        session = Session(settings(experiment=experiment, keep_checkpoints=2))
        for rows in (COUNT[:4] * 3, COUNT[4:8] * 3): session.submit(rows); session.drain()
        folders = [c.prefix for c in log(session.store)]
        third = load(session.store.get(f'{folders[0]}/adapter_model.safetensors'))
        if name: harm(Path(str(session.store), folders[1], name))
        else: session.store.put('state.json', json.dumps({'seq': 3, 'global_step': 9}).encode())
        again, starts = Session(settings(experiment=experiment, keep_checkpoints=2)), []
        again.submit(COUNT[8:12])
        receipt = again.drain(watch=lambda e: starts.append({k: v.clone() for k, v in adapter_tensors(again._state).items()}) if type(e).__name__ == 'Job' else None).receipts[0]
        if not name: assert receipt.first_step == 7; continue
        assert receipt.first_step == 4 and folders[1] in receipt.continued and name in receipt.continued
        assert starts[0].keys() == third.keys() and all(torch.equal(starts[0][k], third[k]) for k in third)


def test_D11_resume_lr_schedule(settings):
    "Twelve rows at once or in three days: the same rates, none 0, the same adapter and the same step count"
    ends = []
    for n, traces in enumerate(([COUNT], [COUNT[:4], COUNT[4:8], COUNT[8:]])):
        session, rates = Session(settings(experiment=f'e{n}', learning_rate=1e-4)), []
        for rows in traces:
            session.submit(rows)
            rates += [r for receipt in session.drain().receipts for r in receipt.lr]
        ends.append((rates, adapter_tensors(session._state), session.status()['steps']['sft'], json.loads(session._at.files['trainer_state.json'])['steps']['sft']))
    (rates, one, *steps), (others, three, *too) = ends
    assert rates == others == [1e-4] * 3 and steps == too == [3, 3] and max((one[k] - three[k]).abs().max().item() for k in one) < 1e-6


def test_D12_resume_adapter_discarded(settings):
    "Three drains on a resident model and one in a new session: each begins with the checkpoint's tensors, trains the same parameters, all of them in the optimizer, and moves every lora_B"
    seen = {}
    def look(session, method):
        def watch(event):
            if type(event).__name__ != 'Job': return
            model, at = session._state.model, checkout(session.store)
            if at.files: saved, now = load(at.files['adapter_model.safetensors']), adapter_tensors(session._state); assert saved.keys() == now.keys() and all(torch.equal(saved[k], now[k]) for k in saved)
            trained = {n: p for n, p in model.named_parameters() if p.requires_grad}
            seen['before'] = {n: p.clone() for n, p in trained.items() if 'lora_B' in n}
            assert sum(p.numel() for p in trained.values()) == 3584 and list(model.peft_config) == ['default'] and all('.default.' in n for n in trained)
            assert {id(p) for p in trained.values()} == {id(p) for g in session._state.adam[method].param_groups for p in g['params']}
        return watch
    first = Session(settings())
    for session, method, rows in ((first, 'sft', COUNT[:4]), (first, 'sft', COUNT[4:8]), (first, 'dpo', pairs(4)), (Session(settings()), 'sft', COUNT[8:])):
        session.submit(rows, method)
        assert not session.drain(watch=look(session, method)).failed
        assert not any(torch.equal(dict(session._state.model.named_parameters())[n], b) for n, b in seen['before'].items())


def test_D13_num_uneven_tokens(toy, tokenizer):
    "Four uneven rows: the loss is the sum over tokens divided by their number, and one pass or four give the same loss and gradient; validation too"
    rows = encode_trace(parse_trace([chat('Short?', 'Yes.'), COUNT[11], chat('Short?', 'No.'), chat('List the months.', 'January, February, March, April, May, June, July, August')]), tokenizer, 256)
    (one, g), (four, h) = (gradients(state_of(toy, token_budget=budget), 'sft', rows) for budget in (4096, 1))
    assert abs(one[0] - four[0]) < 1e-5 and all((a - b).norm() <= 1e-5 * b.norm() + 1e-9 for a, b in zip(g[0], h[0]))
    state = state_of(toy)
    with torch.no_grad(): logp = [torch.log_softmax(state.model(input_ids=torch.tensor([r.ids])).logits[0].double(), -1) for r in rows]
    nats = [-sum(lp[t - 1, l].item() for t, l in enumerate(r.labels) if l != -100) for r, lp in zip(rows, logp)]
    by_token, by_row = sum(nats) / sum(r.trained for r in rows), sum(n / r.trained for n, r in zip(nats, rows)) / 4
    assert one[0] == pytest.approx(by_token, abs=1e-5) and abs(by_token - by_row) > 1e-4 and mean_loss(state, 'sft', rows) == pytest.approx(by_token, abs=1e-5)


def test_D14_num_eos_masked(toy, tokenizer, tmp_path):
    "Pad and end are one token: each answer's end is trained, the text's once, padding never; after 60 steps on one row the model stops by itself"
    rows = encode_trace(parse_trace([chat('Say stop.', 'Stop.'), {'text': 'The cat sat.'}, chat('One?', '1', 'Two?', '2')]), tokenizer, 256)
    end = tokenizer.eos_id
    assert [r.labels.count(end) for r in rows] == [1, 1, 2] and rows[1].labels[-1] == end and rows[1].ids.count(end) == 1
    assert encode(parse_trace([{'text': 'The cat sat.<|im_end|>'}]).rows[0], tokenizer, 256) == rows[1]
    state, batches = state_of(toy, engine='trl', grad_accum=3, token_budget=3 * 256), []
    hook = state.model.register_forward_pre_hook(lambda m, a, kwargs: batches.append({k: v.clone() for k, v in kwargs.items() if isinstance(v, torch.Tensor)}), with_kwargs=True)
    train(state, 'sft', rows); hook.remove()
    ids, mask, labels = (batches[0][k] for k in ('input_ids', 'attention_mask', 'labels'))
    assert state.processor.pad_token_id == end and ids.shape[0] == 3 and (mask == 0).any() and (labels[mask == 0] == -100).all()
    assert [(labels[i] == end).sum().item() for i in range(3)] == [1, 1, 2]
    state = state_of(toy_model(tmp_path, initializer_range=0.5), grad_accum=1, learning_rate=3e-2, lora_target_modules='q_proj,k_proj,v_proj,o_proj,gate_proj,up_proj,down_proj')
    losses = [s.loss for s in train(state, 'sft', rows[:1] * 60)]
    said = answer(state.model, tokenizer, [turn('user', 'Say stop.')], max_new_tokens=64)
    assert losses[-1] < 0.1 and said == 'Stop.', (losses[-1], said)


def test_D15_num_gradient_checkpointing(toy, tokenizer):
    "With and without, by either engine: the same loss and gradients, every lora_B moved, no warning about gradients; also on a model that has trained before"
    rows = encode_trace(parse_trace(COUNT[:8]), tokenizer, 256)
    for engine in ('packed', 'trl'):
        results = {}
        for on in (True, False):
            state = state_of(toy, engine, gradient_checkpointing=on)
            with warnings.catch_warnings():
                warnings.filterwarnings('error', message='.*requires_grad.*')
                results[on] = gradients(state, 'sft', rows)
            assert all(t.abs().max() > 0 for name, t in adapter_tensors(state).items() if 'lora_B' in name)
        (a, g), (b, h) = results[True], results[False]
        assert len(a) == 2 and max(abs(x - y) for x, y in zip(a, b)) < 1e-5 and all((x - y).norm() <= 1e-4 * y.norm() + 1e-8 for s, t in zip(g, h) for x, y in zip(s, t))


def run_file(folder, toy, rows, **changes):
    "A run file on the toy, with its rows"
    (folder/'rows.jsonl').write_text(jsonl(rows))
    keys = {'name': 'run', 'seed': 7, 'threads': 1, 'model': {'id': str(toy)}, 'data': {'train': 'rows.jsonl', 'max_tokens': 64}, 'lora': {'dropout': 0.1, 'targets': ['q_proj', 'v_proj']}, 'train': {'learning_rate': 0.01, 'batch_size': 4, 'checkpoint_every': 3}}
    for key, value in changes.items(): keys[key] = {**keys[key], **value} if isinstance(value, dict) else value
    (folder/f"{keys['name']}.toml").write_text(as_toml(keys))
    return folder/f"{keys['name']}.toml"


def test_D16_plan_large_vocab(toy, tmp_path, monkeypatch):
    "Two bases that differ in their vocabulary alone: the line for loss and logits grows with it in the engine packed, and is more than one whole copy where every position is projected; what does not fit is refused with both numbers"
    def planned(vocab, engine):
        folder = toy_model(tmp_path/f'v{vocab}', vocab_size=64)
        config = json.loads((folder/'config.json').read_text())
        (folder/'config.json').write_text(json.dumps({**config, 'hidden_size': 64, 'intermediate_size': 128, 'vocab_size': vocab, 'tie_word_embeddings': True, 'head_dim': 16}))
        rows = [{'text': ' '.join(f'w{n}x{i}' for i in range(200))} for n in range(8)]
        loaded = load_run(run_file(tmp_path, folder, rows, name=f'{engine}-{vocab}', data={'max_tokens': 320}, train={'batch_size': 8, 'engine': engine, 'token_budget': 2560, 'gradient_checkpointing': True, 'checkpoint_every': 50}), {})
        return loaded, Session(loaded.config).plan(loaded)
    line = lambda plan: next(mb for part, mb in plan.memory.items() if 'logits' in part)
    (_, small), (_, large) = planned(49152, 'packed'), planned(151936, 'packed')
    assert large.train.longest == 320 and line(large) / line(small) == pytest.approx(151936 / 49152, rel=0.03)
    loaded, plan = planned(151936, 'trl') # TRL's head on a CPU scores every position, in tiles of 32,768 tokens of the vocabulary: its line does not grow beyond that, and is more than a whole copy
    assert line(plan) * 1e6 >= 8 * 320 * 151936 * 4
    monkeypatch.setattr('incremental_train.planning.free_mb', lambda: 1000.0)
    session = Session(loaded.config)
    with pytest.raises(Refused) as e: session.run(loaded)
    assert f'{plan.peak_mb:,.0f}' in str(e.value) and '1,000 are free' in str(e.value) and session.store.list() == [] and session._state is None


def test_D17_ui_double_start(settings, toy, tmp_path):
    "Two drains at once in one process, a second process beside it, a killed one, two that began from the same state: two steps in the end, each job trained once"
    def base(name): return dict(model_id=str(toy), bucket_id=str(tmp_path/name), learning_rate=1e-2, queue_persist=True, threads=1)
    a = submit_jobs(base('a'), [COUNT[:8]])
    threads = [threading.Thread(target=a.drain) for _ in range(2)]
    for t in threads: t.start()
    for t in threads: t.join(60)
    assert outcome(base('a'))[1:] == (2, [('job-00', 8, True)], [])
    submit_jobs(base('b'), [COUNT[:8]])
    both = [start(base('b')), start(base('b'))]
    codes = [finish(p) for p in both]
    assert 0 in codes and outcome(base('b'))[1:] == (2, [('job-00', 8, True)], [])
    submit_jobs(base('c'), [COUNT[:8]])
    assert finish(start(base('c'), die=12)) == -9 and finish(start(base('c'))) == 0
    assert outcome(base('c'))[1:] == (2, [('job-00', 8, True)], [])


def test_D17_ui_double_start_two_machines(settings):
    "Both read step 0 and train; the second commit is refused because its number is taken, and what is done is dropped"
    session = Session(settings())
    session.submit(COUNT[:8], id='job')
    empty = checkout(session.store)
    session.drain()
    with pytest.raises(Conflict): write(session.store, draft(empty, {'a': b'x'}, {'global_step': 2, 'ledger': [], 'at': 0}))
    other = Session(settings())
    assert not len(other.queue) and not other.drain().receipts and other.status()['global_step'] == 2


def test_D18_ui_error_swallowed(session, monkeypatch):
    "What a panel shows comes from here: a refusal names the line and the next submit works; a job whose step raises is named with the reason, stays, and the next one runs"
    assert 'line 2' in refused(session, jsonl(COUNT[:1]) + '{"messages": "x" "y"}\n')
    session.submit(COUNT[:4], id='bad')
    from incremental_train import train as room
    monkeypatch.setattr(room, 'train', lambda *a, **k: (_ for _ in ()).throw(RuntimeError('boom')))
    failed = session.drain()
    assert failed.failed == [{'id': 'bad', 'error': 'boom'}] and 'bad failed and still waits: boom' in str(failed)
    monkeypatch.undo()
    session.submit(COUNT[4:8], id='good')
    assert [j['state'] for j in session.status()['queue']] == ['waiting'] * 2 and {r.id for r in session.drain().receipts} == {'bad', 'good'}


def test_D19_queue_restart(settings, toy, tmp_path):
    "kill -9 in the first of three jobs: the same ids in draining order, nothing runs, each is trained once; in memory the loss is announced"
    base = dict(model_id=str(toy), bucket_id=str(tmp_path/'kept'), learning_rate=1e-2, queue_persist=True, threads=1, checkpoint_every=1)
    submit_jobs(base, [COUNT[:8], ('dpo', pairs(4)), COUNT[8:12]])
    process = start(base)
    wait_for_commit(base, 1); process.kill(); finish(process)
    again = Session(load_config({}, **base))
    ids = [j['id'] for j in again.status()['queue']]
    assert set(ids) <= {'job-00', 'job-01', 'job-02'} and ids == [i for i in ('job-00', 'job-02', 'job-01') if i in ids] and all(j['state'] == 'waiting' or j['state'].startswith('interrupted after') for j in again.status()['queue'])
    again.drain()
    history = again.history()
    assert outcome(base)[1:] == (4, [('job-00', 8, True), ('job-01', 4, True), ('job-02', 4, True)], []) and all(e['status'] == 'trained' for e in history)
    memory = Session(settings(queue_persist=False))
    assert any('a restart of this process loses the job' in n for n in memory.submit(COUNT[:4])['notices'])
    after = Session(settings(queue_persist=False)).status()
    assert after['queue'] == [] and after['queue_in'] == 'memory'


def test_D20_hub_access_errors(toy, tmp_path):
    "No token, gated, no such repository, no such revision: four messages, before any job is taken; the token is in none"
    from hub import Hub
    from test_hub import Place
    hub = Hub('acme/toy'); hub.push(toy)
    place, said = Place(tmp_path, hub.url), set()
    place.run('submit', '-', rows=COUNT[:4]); shutil.rmtree(tmp_path/'hf')
    for why, words, more in (('no token', ['HF_TOKEN'], {}), ('gated', ['acme/toy', 'request access', f'{hub.url}/acme/toy'], {}), ('no repository', ['MODEL_ID', 'acme/toy'], {}), ('no revision', ['v9', 'acme/toy'], {'MODEL_REVISION': 'v9'})):
        hub.refuse = why
        place.run('drain', **more).refused(*words)
        said.add(place.err)
        assert len(place.waiting()) == 1
    hub.shutdown()
    assert len(said) == 4


def test_S01(session, tokenizer):
    "Half a surrogate pair, escaped or not, in a content, a key or a list of objects: refused by the line; a whole pair is one character"
    for bad in (r'{"text": "a\ud83d b"}', r'{"text": "a\ude00 b"}', r'{"text": "a\ud83d\ud83d b"}', '{"text": "a\ud83d b"}', r'{"text": "a", "\udfff": 1}', [{'text': 'a'}, {'text': 'a\ud83d b'}]):
        said = refused(session, bad if isinstance(bad, list) else '{"text": "fine \\ud83d\\ude00"}\n' + bad)
        assert said.startswith('line 2: holds half of a surrogate pair')
    assert refused(session, b'{"text": "fine"}\n{"text": "gr\xfcn"}\n{"text": "sch\xf6n"}').splitlines() == [f'line {n}: holds bytes that are not UTF-8; save the file as UTF-8' for n in (2, 3)]
    row, = parse_trace(r'{"text": "\ud83d\ude00"}').rows
    assert row.text == '😀' and tokenizer.chat.decode(encode(row, tokenizer, 64).ids) == '😀'


def test_S02(session):
    "NaN and its kin, as words and as numbers too large; what is stored is strict JSON"
    for bad in ('NaN', 'Infinity', '-Infinity', '1e999', '-1e999'):
        assert refused(session, '{"prompt": "p", "completion": "c", "desirable": true}\n\n{"prompt": "p NaN",\n "completion": "c", "desirable": %s}' % bad, 'kto').startswith('line 4: ' if bad[-1] not in '9' else 'line 3: ')
    assert refused(session, [{'prompt': 'p', 'completion': 'c', 'desirable': float('nan')}], 'kto').startswith('line 1: ')
    session.submit(COUNT[:4]); session.submit(thumbs(2), 'kto'); session.drain()
    strict = lambda name: (_ for _ in ()).throw(ValueError(name))
    stored = [k for k in session.store.list() if k.endswith('.json')]
    for key in stored: json.loads(session.store.get(key), parse_constant=strict)
    assert len(stored) > 5


def test_S03(settings, tmp_path):
    "A template without a system role: refused at submit by line and role"
    folder = toy_model(tmp_path/'gemma')
    for template in ("{% for m in messages %}{% if m.role == 'system' %}{{ raise_exception('not supported') }}{% endif %}{{ m.content }}<|im_end|>{% endfor %}", "{% for m in messages %}{{ {'user': '<u>', 'assistant': '<a>'}[m.role] + m.content }}<|im_end|>{% endfor %}"):
        (folder/'chat_template.jinja').write_text(template)
        said = refused(Session(settings(model_id=str(folder))), jsonl([COUNT[0], {'messages': [turn('system', 'Be brief, canary.'), *COUNT[1]['messages']]}]))
        assert said.startswith('line 2: ') and '(system, user, assistant)' in said and 'canary' not in said


BEGIN = "{{ bos_token }}{% for m in messages %}<|im_start|>{{ m.role }}\n{{ m.content }}<|im_end|>\n{% endfor %}{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"


def begins(folder, template):
    "A tokenizer that puts `<|endoftext|>` in front of every text"
    toy_tokenizer(folder, template)
    data = json.loads((folder/'tokenizer.json').read_text())
    data['post_processor'] = {'type': 'TemplateProcessing', 'single': [{'SpecialToken': {'id': '<|endoftext|>', 'type_id': 0}}, {'Sequence': {'id': 'A', 'type_id': 0}}], 'pair': [{'Sequence': {'id': 'A', 'type_id': 0}}, {'Sequence': {'id': 'B', 'type_id': 1}}],
                              'special_tokens': {'<|endoftext|>': {'id': '<|endoftext|>', 'ids': [0], 'tokens': ['<|endoftext|>']}}}
    (folder/'tokenizer.json').write_text(json.dumps(data))
    (folder/'tokenizer_config.json').write_text(json.dumps({**json.loads((folder/'tokenizer_config.json').read_text()), 'bos_token': '<|endoftext|>'}))
    return ChatTokenizer(folder)


def test_S04(tmp_path):
    "Template and tokenizer both know the begin token: it stands there once, in training and when asked, in conversations and in texts that write it themselves"
    for name, template in (('prints', BEGIN), ('base', None)):
        t = begins(tmp_path/name, template)
        row = encode(parse_trace([COUNT[1]]).rows[0], t, 256)
        asked = t.prompt_ids(COUNT[1]['messages'][:1])
        assert row.ids.count(0) == asked.count(0) == 1 and row.ids[0] == 0 and row.ids[:len(asked)] == asked
        for text in ('The cat sat.', '<|endoftext|>The cat sat.'): assert encode(parse_trace([{'text': text}]).rows[0], t, 256).ids.count(0) == 1


def test_S05(tokenizer, tmp_path):
    "A prompt that ends in a space, an answer that begins with a letter, with and without anything between them: the labels are the answer, the ids before them what the model is asked with"
    glue = with_template(tmp_path/'glue', "{% for m in messages %}{{ m['content'] }}{% endfor %}")
    for t in (tokenizer, glue):
        for prompt, said in (('Answer with the ', 'team'), ('Where is my', ' parcel?'), ('Where is my ', ' parcel?'), ('é', '\u0301x'), ('a\n', '\nb')):
            rows = [e for method, row in (('sft', {'prompt': prompt, 'completion': said}), ('kto', {'prompt': prompt, 'completion': said, 'desirable': True}), ('dpo', {'prompt': prompt, 'chosen': said, 'rejected': 'no'})) for e in encode(parse_trace([row], method).rows[0], t, 256).sequences[:1]]
            asked = t.prompt_ids([turn('user', prompt)])
            for row in rows:
                assert row.ids[:len(asked)] == asked and all(l == -100 for l in row.labels[:len(asked)]) and t.chat.decode(labels_of(row)) == said


def test_S06(session):
    "Whatever a checkpoint holds loads without running code, and training goes on"
    import io
    session.submit(COUNT[:4]); session.drain()
    for name, data in checkout(session.store).files.items():
        if name.endswith('.pt'): torch.load(io.BytesIO(data), weights_only=True)
    again = Session(session.config)
    again.submit(COUNT[4:8])
    assert again.drain().receipts[0].first_step == 2 and 'rng.pt' in checkout(session.store).files


def test_S07(toy, tmp_path):
    "A run of six steps with dropout, stopped after three and gone on with: the adapter of the undisturbed run, byte for byte"
    ends = []
    for name, stops in (('whole', [None]), ('cut', [3, None])):
        loaded = load_run(run_file(tmp_path, toy, COUNT, name=name, train={'epochs': 2}), {})
        for stop in stops: result = Session(loaded.config).run(loaded, stop_after=stop)
        ends.append((result.receipt.steps, checkout(Session(loaded.config).store).files['adapter_model.safetensors']))
    assert ends[0] == ends[1] and ends[0][0] == 6


def test_S08(settings):
    "Warm-up never begins at 0: one row moves the adapter"
    session = Session(settings(warmup_steps=10))
    session.submit(COUNT[:1])
    receipt = session.drain().receipts[0]
    assert receipt.lr == [pytest.approx(1e-3)] and all(t.abs().max() > 0 for n, t in adapter_tensors(session._state).items() if 'lora_B' in n)


def test_S09(toy, tmp_path):
    "A key that is misspelt, misplaced or written with a hyphen: the key, its place and the nearest one"
    good = run_file(tmp_path, toy, COUNT).read_text()
    for old, new, words in (('learning_rate = 0.01', 'leraning_rate = 0.01', ('leraning_rate in [train]', 'learning_rate')), ('seed = 7', 'seed = 7\nlearning_rate = 0.01', ('learning_rate must stand in [train]', 'at the top')), ('checkpoint_every = 3', 'keep-checkpoints = 3', ('keep-checkpoints in [train]', 'keep_checkpoints')), ('[lora]', '[lroa]', ('lroa', 'lora'))):
        assert old in good
        (tmp_path/'bad.toml').write_text(good.replace(old, new))
        with pytest.raises(RunFileError) as e: load_run(tmp_path/'bad.toml', {})
        assert all(w in str(e.value) for w in words)


def test_S10(toy, tmp_path):
    "A number in quotes: key, value and what is wanted"
    path = run_file(tmp_path, toy, COUNT)
    path.write_text(path.read_text().replace('learning_rate = 0.01', 'learning_rate = "2e-4"'))
    with pytest.raises(RunFileError) as e: load_run(path, {})
    assert all(w in str(e.value) for w in ('learning_rate', "'2e-4'", 'between 0 and 1', 'without quotes'))


def test_S11(session, monkeypatch):
    "Memory runs out in one job: nothing of the failed step is held, and the next job runs in the same process"
    from incremental_train import train as room
    held, original = [], room.train
    def out_of_memory(state, method, rows, on_step, *more):
        if len(rows) != 8: return original(state, method, rows, on_step, *more)
        big = torch.zeros(1_000_000)
        held.append(weakref.ref(big))
        raise torch.OutOfMemoryError('CUDA out of memory. Tried to allocate 9 GiB')
    monkeypatch.setattr(room, 'train', out_of_memory)
    session.submit(COUNT[:8], id='large'); session.submit(COUNT[8:12], id='small')
    done = session.drain()
    gc.collect()
    assert [r.id for r in done.receipts] == ['small'] and done.failed[0]['id'] == 'large' and 'out of memory; lower MAX_LENGTH' in done.failed[0]['error'] and held[0]() is None


def test_S12():
    "No widget but those of ipywidgets, which every notebook service has"
    known, found = {'anywidget', 'bqplot', 'ipyvuetify', 'ipyfilechooser', 'ipyevents', 'ipympl', 'ipytree', 'ipydatagrid', 'itables', 'plotly', 'panel', 'gradio', 'streamlit'}, set()
    project = Path(__file__).parents[1]
    for path in (project/'incremental_train').glob('*.py'):
        for node in ast.walk(ast.parse(path.read_text())):
            if isinstance(node, ast.Import): found |= {a.name.split('.')[0] for a in node.names}
            if isinstance(node, ast.ImportFrom) and not node.level: found.add(node.module.split('.')[0])
    assert {'json', 'pydantic'} <= found and not found & known
    assert not {re.split('[<>=]', r)[0] for r in re.search('^requirements = (.*)$', (project/'settings.ini').read_text(), re.M)[1].split()} & known


def test_S13(session, monkeypatch):
    "The second of three jobs raises: the others are trained, it still waits with its reason"
    from incremental_train import train as room
    original = room.train
    monkeypatch.setattr(room, 'train', lambda state, method, rows, *more: original(state, method, rows, *more) if len(rows) != 2 else 1 / 0)
    for n, rows in enumerate((COUNT[:4], COUNT[4:6], COUNT[6:10]), 1): session.submit(rows, id=str(n))
    done = session.drain()
    assert [r.id for r in done.receipts] == ['1', '3'] and [f['id'] for f in done.failed] == ['2'] and 'division' in done.failed[0]['error'] and [j['id'] for j in session.status()['queue']] == ['2']


def test_S14(settings, tmp_path):
    "Another template under the same name: named and refused before training"
    folder = toy_model(tmp_path/'base')
    session = Session(settings(model_id=str(folder)))
    session.submit(COUNT[:4]); session.drain()
    (folder/'chat_template.jinja').write_text(BEGIN)
    other = Session(settings(model_id=str(folder)))
    other.submit(COUNT[4:8])
    before = keys_of(other)
    with pytest.raises(Refused, match="the base model's chat template is SHA-256 .* was begun with"): other.drain()
    assert keys_of(other) == before and other.experiment()['template'] and checkout(other.store).files['chat_template.jinja'] != BEGIN.encode()


def test_S15(session, settings, tmp_path):
    "The adapter file holds the adapter and no embedding; the embedding takes none; rank 8 on q and v of SmolLM2-135M is 1.84 MB"
    session.submit(COUNT[:4]); session.drain()
    data = checkout(session.store).files['adapter_model.safetensors']
    assert all('lora_' in k for k in load(data)) and 3584 * 4 < len(data) < 3584 * 4 + 4096
    with pytest.raises(Refused, match='LORA_TARGET_MODULES names embed_tokens'):
        other = Session(settings(lora_target_modules='embed_tokens', experiment='e')); other.submit(COUNT[:1]); other.drain()
    shape = dict(model_type='llama', architectures=['LlamaForCausalLM'], hidden_size=576, intermediate_size=1536, num_hidden_layers=30, num_attention_heads=9, num_key_value_heads=3, vocab_size=49152, tie_word_embeddings=True, max_position_embeddings=8192)
    (tmp_path/'config.json').write_text(json.dumps(shape))
    trainable, total = count_params(tmp_path, 8, ('q_proj', 'v_proj'))
    assert (trainable, total) == (460_800, 134_515_008) and trainable * 4 / 1e6 == pytest.approx(1.84, abs=0.005)


def test_S16(session):
    "DPO after SFT: the reference is the adapter that SFT left, so the first loss is ln 2"
    session.submit(COUNT); session.submit(pairs(4), 'dpo')
    sft, dpo = session.drain().receipts
    assert sft.steps == 3 and dpo.first_loss == pytest.approx(math.log(2), abs=1e-4) and dpo.reference == {'commit': 1, 'step': 3}
    reference = load(checkout(session.store).files['reference.safetensors'])
    assert any(t.abs().max() > 0 for n, t in reference.items() if 'lora_B' in n)
