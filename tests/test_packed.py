"The packed engine against TRL's and against the model's own forward pass, over architectures and random rows"
import pytest
import torch
from hypothesis import given, settings as examples, strategies as st
from rows import MAKE, chat, pairs, thumbs, tickets
from safetensors.torch import save_file
from transformers import AutoModelForCausalLM, AutoTokenizer, CONFIG_MAPPING

from incremental_train.config import DpoOptions, KtoOptions, TrlOptions, load_config
from incremental_train.encode import ChatTokenizer, Encoded, encode_trace
from incremental_train.model import Base, add_adapter, load_base
from incremental_train.pack import pack, packed_logps, packing
from incremental_train.packed_engine import can_pack
from incremental_train.state import State, move_reference
from incremental_train.toy import toy_tokenizer
from incremental_train.trace import parse_trace
from incremental_train.train import mean_loss, train

SHAPE = dict(vocab_size=512, hidden_size=32, intermediate_size=64, num_hidden_layers=2, num_attention_heads=4, num_key_value_heads=2, bos_token_id=1, eos_token_id=2, pad_token_id=2, max_position_embeddings=1024, tie_word_embeddings=False, initializer_range=0.3)
ARCHITECTURES = { # model_type, what differs, targets
    'llama': ('llama', {}, 'q_proj,v_proj'), 'all seven': ('llama', {}, 'q_proj,k_proj,v_proj,o_proj,gate_proj,up_proj,down_proj'), 'qwen2': ('qwen2', {}, 'q_proj,v_proj'), 'qwen3': ('qwen3', {'head_dim': 8}, 'q_proj,v_proj'), 'mistral': ('mistral', {'sliding_window': 512}, 'q_proj,v_proj'),
    'gemma': ('gemma', {'head_dim': 8}, 'q_proj,v_proj'), 'gemma2, soft-capped head': ('gemma2', {'head_dim': 8, 'query_pre_attn_scalar': 8, 'attn_logit_softcapping': None, 'final_logit_softcapping': 3.0, 'sliding_window': 512}, 'q_proj,v_proj'),
    'gemma3': ('gemma3_text', {'head_dim': 8, 'query_pre_attn_scalar': 8, 'sliding_window': 512}, 'q_proj,v_proj'), 'phi, biased head': ('phi', {}, 'q_proj,v_proj'), 'phi3': ('phi3', {'sliding_window': None}, 'qkv_proj,down_proj'), 'granite, scaled head': ('granite', {'logits_scaling': 4.0}, 'q_proj,v_proj')}


@pytest.fixture(scope='module')
def made(tmp_path_factory):
    "Makes a tiny random model of an architecture, once"
    bases = {}
    def make(name):
        if name in bases: return bases[name]
        kind, more, _ = ARCHITECTURES[name]
        folder = toy_tokenizer(tmp_path_factory.mktemp('model'))
        config = CONFIG_MAPPING[kind](**{**SHAPE, **more})
        with torch.random.fork_rng(devices=[]):
            torch.manual_seed(0)
            model = AutoModelForCausalLM.from_config(config)
            for n, p in model.named_parameters():
                if n.endswith('bias'): torch.nn.init.normal_(p, std=0.3)
        model.config.architectures = [type(model).__name__]
        model.config.save_pretrained(folder)
        save_file({k: v.contiguous() for k, v in model.state_dict().items()}, folder/'model.safetensors', metadata={'format': 'pt'})
        return bases.setdefault(name, Base(name, None, folder))
    return make


def state_of(base, engine, targets='q_proj,v_proj', **settings):
    config = load_config({}, **{'learning_rate': 1e-2, 'lora_target_modules': targets, **settings})
    return State(add_adapter(load_base(base, 'float32', 'cpu'), config, 'toy'), AutoTokenizer.from_pretrained(base.folder), config, engine=engine)


def differences(base, method, rows, warm=(), **settings):
    "Largest difference of a step's loss and, relative, of an adapter gradient, from the same state"
    seen = {}
    for engine in ('packed', 'trl'):
        state = state_of(base, 'packed', **settings) # the state that both start from is made by one engine
        if warm: train(state, 'sft', list(warm)); move_reference(state)
        state.engine = engine
        grads, named = [], [p for p in state.model.parameters() if p.requires_grad]
        state.adam[method].register_step_pre_hook(lambda *_: grads.append([p.grad.clone() for p in named]))
        seen[engine] = [s.loss for s in train(state, method, rows[:settings.get('grad_accum', 4)])], grads, mean_loss(state, method, rows)
    (a, x, v), (b, y, w) = seen.values()
    gradient = max(((p - q).norm() / q.norm()).item() for p, q in zip(x[0], y[0]) if q.norm() > 1e-8)
    return max(abs(p - q) for p, q in zip(a, b)), gradient, abs(v - w)


def encoded(base, rows, method): return encode_trace(parse_trace(rows, method), ChatTokenizer(base.folder), 256)


@pytest.mark.parametrize('name', ARCHITECTURES)
@pytest.mark.parametrize('method', ['sft', 'dpo', 'kto'])
def test_equal_to_trl(made, name, method):
    "One step from a trained state: losses within 1e-5 and gradients within 1e-4, validation too; ragged rows"
    base = made(name)
    assert can_pack(load_base(base, 'float32', 'cpu'), 256) == ''
    loss, gradient, validation = differences(base, method, encoded(base, MAKE[method](6), method), encoded(base, tickets(5), 'sft'), targets=ARCHITECTURES[name][2])
    assert loss < 1e-5 and gradient < 1e-4 and validation < 1e-5, (loss, gradient, validation)


def test_equal_to_trl_with_every_option(made):
    "Hinge, IPO and smoothing, KTO's weights and its form without KL, a tiny budget, gradient checkpointing"
    base = made('llama')
    warm = encoded(base, tickets(5), 'sft')
    for options in (DpoOptions(loss_type='hinge', beta=0.3), DpoOptions(loss_type='ipo'), DpoOptions(label_smoothing=0.2)):
        loss, gradient, validation = differences(base, 'dpo', encoded(base, pairs(5), 'dpo'), warm, trl=TrlOptions(dpo=options))
        assert loss < 1e-5 * max(1, 1 / options.beta ** 2 if options.loss_type == 'ipo' else 1) and gradient < 1e-4, (options, loss, gradient)
    for options in (KtoOptions(desirable_weight=1.5, undesirable_weight=0.7), KtoOptions(loss_type='apo_zero_unpaired')):
        loss, gradient, _ = differences(base, 'kto', encoded(base, thumbs(5), 'kto'), warm, trl=TrlOptions(kto=options))
        assert loss < 1e-5 and gradient < 1e-4
    for settings in ({'token_budget': 40}, {'gradient_checkpointing': True}):
        for method in MAKE:
            loss, gradient, _ = differences(base, method, encoded(base, MAKE[method](4), method), warm, **settings)
            assert loss < 1e-5 and gradient < 1e-4


def test_rows_that_look_alike(made):
    "One-row steps, identical rows, a row that begins another, rows that share nothing"
    base = made('llama')
    warm = encoded(base, tickets(5), 'sft')
    alike = [chat('Where is my parcel?', 'delivery')] * 3 + [chat('Where is my parcel?', 'delivery, low')]
    turns = [chat('Where?', 'here'), chat('Where?', 'here', 'Really?', 'yes'), chat('Where?', 'here', 'Really?', 'yes', 'Sure?', 'no')]
    apart = [{'text': 'abc def'}, {'text': 'xyz'}, {'text': 'Q'}, {'text': '12 34 56'}]
    same_pairs = [{'prompt': 'Where is it?', 'chosen': 'here', 'rejected': 'here or there'}] * 2 + [{'prompt': 'Where is it?', 'chosen': 'there', 'rejected': 'here'}]
    for method, rows in (('sft', alike), ('sft', turns), ('sft', apart), ('sft', alike[:1]), ('dpo', same_pairs), ('dpo', pairs(1)), ('kto', thumbs(1)), ('kto', thumbs(3, start=0) + thumbs(1))):
        loss, gradient, _ = differences(base, method, encoded(base, rows, method), warm)
        assert loss < 1e-5 and gradient < 1e-4, (method, rows, loss, gradient)


@pytest.fixture(scope='module')
def trained(made):
    "A state whose adapter is not the first one"
    state = state_of(made('llama'), 'packed')
    with torch.no_grad():
        for n, p in enumerate(p for p in state.model.parameters() if p.requires_grad): p.copy_(torch.sin(torch.arange(p.numel()).float() + n).view_as(p) * 0.1)
    return state


ids = st.lists(st.integers(3, 40), min_size=2, max_size=30)


@examples(max_examples=60, deadline=None, derandomize=True)
@given(st.lists(ids, min_size=1, max_size=3), st.lists(st.tuples(st.integers(0, 2), ids, st.integers(0, 60)), min_size=1, max_size=7))
def test_random_rows(trained, starts, rows):
    "Random rows on random beginnings, some the same, some cut: each label's log-probability and the adapter's gradient are those of rows that go alone"
    net, named = trained.model.get_base_model(), [p for p in trained.model.parameters() if p.requires_grad]
    sequences = []
    for start, tail, prompt in rows:
        row = starts[start % len(starts)] * (1 + start) + tail
        sequences.append(Encoded(row, [-100 if t < min(prompt, len(row) - 1) else row[t] for t in range(len(row))]))
    weights = [0.3 + 0.1 * i for i in range(len(sequences))] # so that a label given to the wrong row shows
    def gradient(loss): return torch.autograd.grad(loss, named)
    with packing(net):
        p = pack(sequences)
        ours = packed_logps(net, p)
        g = gradient((ours * torch.tensor(weights)[p.row]).sum())
    plain = [torch.log_softmax(net(input_ids=torch.tensor([s.ids])).logits[0, :-1], -1).gather(1, torch.tensor(s.labels[1:]).clamp(min=0)[:, None])[:, 0][torch.tensor(s.labels[1:]) != -100] for s in sequences]
    assert (ours - torch.cat(plain)).abs().max() < 1e-4
    h = gradient(sum(w * lp.sum() for w, lp in zip(weights, plain)))
    assert all((a - b).norm() <= 1e-4 * b.norm() + 1e-6 for a, b in zip(g, h))
    assert p.tokens <= sum(len(s.ids) for s in sequences)


def test_what_cannot_be_packed(made, tmp_path):
    "A window shorter than the longest row, and a model without attention: the reason is named, and auto takes trl"
    base = made('mistral')
    assert 'looks back 512 tokens' in can_pack(load_base(base, 'float32', 'cpu'), 1024)
    config = CONFIG_MAPPING['mamba'](vocab_size=512, hidden_size=32, state_size=4, num_hidden_layers=2)
    assert can_pack(AutoModelForCausalLM.from_config(config), 256) != ''
