"Several processes train as one: the same numbers, one writer, and a lost one ends the job where the next start goes on"
import json
import os
import pickle
import signal
import socket
import subprocess
import sys
import time
from pathlib import Path

import pytest
import torch
from drains import outcome, server, submit
from rows import MAKE, pairs, thumbs, tickets

from incremental_train.config import load_config
from incremental_train.encode import encode_trace
from incremental_train.model import find_base, fingerprints
from incremental_train.ranks import everywhere, take_part, together, world
from incremental_train.runfile import as_toml, load_run
from incremental_train.session import Session
from incremental_train.state import adapter_tensors, load_files, move_reference, state_files
from incremental_train.store import checkout
from incremental_train.trace import parse_trace
from incremental_train.train import load_state, mean_loss, train

server.set_forkserver_preload(['incremental_train.session', 'incremental_train.train', 'incremental_train.trl_engine'])


def as_rank(rank, ranks, port, patience, said, env, main, args):
    "What a launcher gives a process, and then the command"
    os.environ.update(env, RANK=str(rank), WORLD_SIZE=str(ranks), LOCAL_RANK=str(rank), MASTER_ADDR='127.0.0.1', MASTER_PORT=str(port))
    os.dup2(os.open(said, os.O_CREAT | os.O_APPEND | os.O_WRONLY), 2)
    take_part(lambda: main(*args), patience)


def launch(main, *args, said, ranks=2, patience=60, env={}):
    "Processes that know of each other"
    with socket.socket() as s: s.bind(('127.0.0.1', 0)); port = s.getsockname()[1]
    processes = [server.Process(target=as_rank, args=(r, ranks, port, patience, str(said), env, main, args)) for r in range(ranks)]
    for p in processes: p.start()
    return processes


def finish(processes, seconds=90):
    "Exit codes by rank; nobody may hang"
    end = time.monotonic() + seconds
    for p in processes: p.join(max(0.1, end - time.monotonic()))
    codes = [p.exitcode for p in processes]
    for p in processes:
        if p.exitcode is None: p.kill()
    assert None not in codes, f'a process hangs: {codes}'
    return codes


# the same numbers

def new_state(settings):
    config = load_config({}, **settings)
    base = find_base(config.model_id)
    state = together(load_state, None, config, base, fingerprints(base.folder), 'float32', 'cpu')
    state.engine = config.engine
    return state


def encoded(settings, method, data): return encode_trace(parse_trace(data, method), Session(load_config({}, **settings)).tokenizer(), 256)


def one_step(state, method, rows):
    "-> (loss, metrics, adapter before and after, gradient norm, mean loss after)"
    before = adapter_tensors(state)
    (step,) = train(state, method, rows, references={})
    return step.loss, step.metrics, before, adapter_tensors(state), step.grad_norm, mean_loss(state, method, rows) if state.engine == 'packed' else 0.0 # TRL's evaluation is the first process's alone


def write_steps(settings, tasks, out):
    "Each task from its own state"
    state, seen = new_state(settings), []
    for method, files, rows in tasks:
        together(load_files, state, files)
        seen.append(one_step(state, method, rows))
    with open(out, 'wb') as f: pickle.dump(seen, f)


def one_process(settings):
    "Steps of 4, 3 and 1 ragged rows by each method, each from the state that the one before leaves: -> (tasks, what they came to)"
    state, tasks, seen = new_state(settings), [], []
    for method, rows in (('sft', tickets(8)), ('sft', tickets(4, start=20)), ('kto', thumbs(8)), ('dpo', pairs(8))):
        rows = encoded(settings, method, rows)
        for part in filter(None, (rows[:4], rows[4:7], rows[7:])):
            tasks.append((method, state_files(state), part))
            seen.append(one_step(state, method, part))
        if state.reference is None: move_reference(state) # not again: KTO's KL is then above 0
    return tasks, seen


@pytest.mark.parametrize('engine', ['packed', 'trl'])
@pytest.mark.parametrize('ranks', [2, pytest.param(3, marks=pytest.mark.slow)])
def test_two_processes_make_the_single_one_s_steps(toy, tmp_path, engine, ranks):
    "Losses within 1e-5 and, from the same state, updates within 1e-3, by each method, a step of one row included"
    settings = dict(model_id=str(toy), bucket_id=str(tmp_path/'unused'), learning_rate=1e-2, threads=1, engine=engine)
    tasks, alone = one_process(settings)
    assert set(finish(launch(write_steps, settings, tasks, str(tmp_path/'steps'), said=tmp_path/'said', ranks=ranks))) == {0}, (tmp_path/'said').read_text()
    worst = {}
    for (method, _, rows), one, many in zip(tasks, alone, pickle.loads((tmp_path/'steps').read_bytes()), strict=True):
        norm = lambda a, b: sum((a[k].double() - b[k].double()).pow(2).sum().item() for k in a) ** 0.5
        found = {'loss': abs(one[0] - many[0]), 'update': norm(one[3], many[3]) / norm(one[3], one[2]), 'metrics': max([abs(one[1][k] - many[1][k]) for k in one[1]], default=0), 'gradient norm': abs(one[4] - many[4]) / one[4], 'loss after': abs(one[5] - many[5])}
        assert one[1].keys() == many[1].keys() and norm(one[2], many[2]) == 0
        worst[method] = {k: max(v, worst.get(method, {}).get(k, 0)) for k, v in found.items()}
    print(engine, ranks, {m: {k: f'{v:.1e}' for k, v in w.items()} for m, w in worst.items()})
    assert any(one[1].get('kl') for one in alone) and any(abs(one[1].get('margin', 0)) > 1e-3 for one in alone)
    for w in worst.values(): assert w['loss'] < 1e-5 and w['update'] < 1e-3 and w['metrics'] < 1e-4 and w['loss after'] < 2e-5 and w['gradient norm'] < 1e-4


# a job from the queue to its commit

JOBS = [('sft', 5), ('sft', 3), ('dpo', 5), ('dpo', 1), ('kto', 5)]
TRACES = [(method, MAKE[method](n, start=10 * i)) for i, (method, n) in enumerate(JOBS)]
STEPS = sum(-(-n // 4) for _, n in JOBS)


@pytest.fixture
def bucket(toy, tmp_path_factory):
    def new(**changes): return {**dict(model_id=str(toy), bucket_id=str(tmp_path_factory.mktemp('bucket')), learning_rate=1e-2, queue_persist=True, threads=1), **changes}
    return new


def drain(settings, out):
    "A drain; leaves who drained, and what came of it"
    done = Session(load_config({}, **settings)).drain()
    assert not done.failed, done.failed
    with open(out, 'a') as f: print(json.dumps({'process': os.getpid(), 'world': world(), **done.summary()}), file=f)


def difference(losses, settings) -> float:
    "Largest one between the losses of five jobs and those that a bucket's commits hold"
    store = Session(load_config({}, **settings)).store
    held = [e['losses'] for c in range(1, 6) for e in json.loads(store.get(f'commits/{c:020d}.json'))['body']['ledger']]
    return max(abs(a - b) for one, other in zip(losses, held, strict=True) for a, b in zip(one, other, strict=True))


@pytest.mark.parametrize('engine', ['packed', pytest.param('trl', marks=pytest.mark.slow)])
def test_one_writer(bucket, tmp_path, engine):
    "Two processes drain five mixed jobs: the first one alone writes, and the losses are a single process's"
    single, settings = bucket(engine=engine), bucket(engine=engine)
    losses = [r.losses for r in submit(single, TRACES).drain().receipts]
    submit(settings, TRACES)
    processes = launch(drain, settings, str(tmp_path/'out'), said=tmp_path/'said')
    assert finish(processes) == [0, 0], (tmp_path/'said').read_text()
    (done,) = map(json.loads, (tmp_path/'out').read_text().splitlines())
    assert (done['process'], done['world'], done['waiting']) == (processes[0].pid, 2, 0)
    worst = difference(losses, settings)
    print(f'{engine}: losses of {STEPS} steps of one drain within {worst:.1e}')
    assert worst < 1e-5 and outcome(settings)[1:] == (STEPS, [(f'job-{i:02d}', n, True) for i, (_, n) in enumerate(JOBS)], [])
    session = Session(load_config({}, **settings))
    assert session.experiment()['processes'] == 2 and session.store.get('lease.json') is None


@pytest.mark.parametrize('engine', ['packed', pytest.param('trl', marks=pytest.mark.slow)])
def test_a_killed_process(bucket, tmp_path, engine):
    "Kill -9 of either process at several places: the job ends in seconds and with words, the bucket verifies, the next start goes on, and the end is that of an undisturbed job, byte for byte"
    calm, settings, words, longest = bucket(engine=engine, lora_dropout=0.1), bucket(engine=engine, lora_dropout=0.1), [], 0.0
    for s in (calm, settings): submit(s, TRACES)
    finish(launch(drain, calm, str(tmp_path/'calm'), said=tmp_path/'said'))
    for n, (victim, commits) in enumerate([(1, 0), (1, 1), (0, 2), (1, 3)]):
        said = tmp_path/f'said-{n}'
        processes = launch(drain, settings, str(tmp_path/'out'), said=said)
        store, end = Session(load_config({}, **settings)).store, time.monotonic() + 60
        while len(store.list('commits')) < commits or (store.get('lease.json') is None and processes[0].is_alive()):
            assert time.monotonic() < end
            time.sleep(0.002)
        processes[victim].kill()
        begin = time.monotonic()
        codes = finish(processes, 20)
        longest = max(longest, time.monotonic() - begin)
        assert codes[victim] == -9 or codes == [0, 0]
        at = checkout(store)
        assert not at.passed_over and len(at.files) == len(at.commit.files)
        if codes[victim] == -9: words.append((victim, codes, said.read_text().strip().splitlines()[-1:]))
    print(f'{len(words)} kills, the others ended within {longest:.1f} s', *words, sep='\n')
    assert len(words) >= 2 and all('gone' in w[2][0] and 'goes on from it' in w[2][0] and w[1][1 - w[0]] == 1 for w in words)
    assert finish(launch(drain, settings, str(tmp_path/'out'), said=tmp_path/'said')) == [0, 0]
    assert outcome(settings) == outcome(calm)


def test_a_silent_process(bucket, tmp_path):
    "One that neither works nor dies is given up after a bounded time"
    settings = bucket()
    submit(settings, TRACES * 4)
    first, second = processes = launch(drain, settings, str(tmp_path/'out'), said=tmp_path/'said', patience=3)
    store, end = Session(load_config({}, **settings)).store, time.monotonic() + 60
    while len(store.list('commits')) < 2 and time.monotonic() < end: time.sleep(0.002)
    os.kill(second.pid, signal.SIGSTOP)
    begin = time.monotonic()
    first.join(30)
    took = time.monotonic() - begin
    os.kill(second.pid, signal.SIGCONT)
    assert finish(processes, 20) == [1, 1]
    print(f'given up after {took:.1f} s:', said := (tmp_path/'said').read_text().strip().splitlines()[0])
    assert took < 15 and 'gave no sign for 3 s' in said
    assert not checkout(store).passed_over and store.get('lease.json') is None


def broken(state, where):
    "Fails in one process only"
    everywhere(lambda: None)
    if where == int(os.environ['LATER_RANK']): raise ValueError('no room on this card')
    return everywhere(lambda: where)


def fail_and_go_on(out):
    import incremental_train.ranks as ranks
    together(set_rank, None)
    said = []
    for where in (1, 0):
        try: together(broken, None, where)
        except (RuntimeError, ValueError) as e: said.append(str(e))
    with open(out, 'w') as f: json.dump([said, together(broken, None, 7), ranks.world()], f)


def set_rank(state):
    from incremental_train.ranks import rank
    os.environ['LATER_RANK'] = str(rank())
    return {'rank': rank()}


def test_a_failure_in_one_process_is_one_in_all(tmp_path):
    "The others hear of it, in whatever exchange they are, and all are ready for what comes next"
    assert finish(launch(fail_and_go_on, str(tmp_path/'out'), said=tmp_path/'said')) == [0, 0]
    assert json.loads((tmp_path/'out').read_text()) == [['process 2 of 2: no room on this card', 'no room on this card'], [7, 7], 2]


TORCHRUN = ('-m', 'torch.distributed.run', '--standalone', '--nproc-per-node', '2')
ACCELERATE = ('-m', 'accelerate.commands.launch', '--multi_gpu', '--num_processes', '2', '--num_machines', '1', '--mixed_precision', 'no', '--dynamo_backend', 'no', '--main_process_port', '0')

FSDP = ('-m', 'accelerate.commands.launch', '--config_file', str(Path(__file__).parents[1]/'examples'/'fsdp.yaml'), '--main_process_port', '0')


def command(settings, launcher, *args, seconds=150):
    "A launcher's command: -> (exit code, standard output, standard error)"
    env = {**os.environ, 'OMP_NUM_THREADS': '1', **{k.upper(): str(v) for k, v in settings.items()}}
    process = subprocess.Popen([sys.executable, *launcher, '-m', 'incremental_train', *args], env=env, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, start_new_session=True)
    try: out, err = process.communicate(timeout=seconds)
    finally:
        if process.poll() is None: os.killpg(process.pid, 9)
    return process.returncode, out, err


@pytest.mark.parametrize('launcher', [TORCHRUN, *(pytest.param(launcher, marks=pytest.mark.slow) for launcher in (ACCELERATE, FSDP))], ids=['torchrun', 'accelerate', 'fsdp'])
def test_the_launchers(bucket, launcher):
    "One object on standard output"
    settings = bucket()
    submit(settings, TRACES[:1])
    code, out, err = command(settings, launcher, 'drain', '--json')
    assert code == 0, err
    assert json.loads(out)['jobs'][0]['steps'] == 2 and outcome(settings)[1] == 2
    assert Session(load_config({}, **settings)).experiment()['engine'] == ('trl' if launcher is FSDP else 'packed')


def cli(settings, *args):
    "The command itself"
    os.environ.update({k.upper(): str(v) for k, v in settings.items()})
    sys.argv = ['incremental-train', *args]
    from incremental_train.cli import main
    main()


def test_a_refusal(bucket, tmp_path):
    "It is said once, and ends all"
    settings = bucket()
    submit(settings, TRACES[:1]).drain()
    submit(settings, TRACES[1:2], first=1)
    assert finish(launch(cli, {**settings, 'lora_r': 4}, 'drain', said=tmp_path/'said')) == [2, 0]
    (line,) = (tmp_path/'said').read_text().splitlines()
    assert 'LORA_R is 4, but this experiment was begun with 8' in line


# a run file

def run(path, out):
    loaded = load_run(path, {})
    result = Session(loaded.config).run(loaded)
    with open(out, 'w') as f: json.dump({**result.summary, 'losses': result.receipt.losses, 'world': world()}, f)


@pytest.fixture
def run_file(toy, tmp_path):
    "Makes a run of 10 rows, 4 per step (so the last step of each of both epochs has two), with validations and checkpoints"
    def write(name, method, **train):
        for part, rows in (('train', MAKE[method](10)), ('val', MAKE[method](5, start=100))): (tmp_path/f'{part}.jsonl').write_text('\n'.join(map(json.dumps, rows)))
        keys = {'name': name, 'method': method, 'seed': 7, 'threads': 1, 'model': {'id': str(toy)}, 'data': {'train': 'train.jsonl', 'val': 'val.jsonl', 'max_tokens': 128}, 'lora': {'targets': ['q_proj', 'v_proj']},
                'train': {'learning_rate': 0.01, 'batch_size': 4, 'epochs': 2, 'eval_every': 3, 'checkpoint_every': 2, **train}}
        (tmp_path/f'{name}.toml').write_text(as_toml(keys))
        return tmp_path/f'{name}.toml'
    return write


@pytest.mark.slow
def test_a_run_file(run_file, tmp_path):
    "A KTO run on two processes has the single process's losses; killed, it goes on, to the same bytes"
    one, two, cut = (run_file(name, 'kto') for name in ('one', 'two', 'cut'))
    run(one, tmp_path/'1')
    assert finish(launch(run, two, tmp_path/'2', said=tmp_path/'said')) == [0, 0], (tmp_path/'said').read_text()
    a, b = (json.loads((tmp_path/n).read_text()) for n in '12')
    worst = max(abs(x - y) for x, y in zip([*a['losses'], a['final_val_loss']], [*b['losses'], b['final_val_loss']], strict=True))
    print(f"{b['steps']} steps and a validation within {worst:.1e}")
    assert (a['world'], b['world'], b['steps'], b['finished']) == (1, 2, 6, True) and worst < 1e-5
    processes, log, end = launch(run, cut, tmp_path/'3', said=tmp_path/'lost'), load_run(cut, {}).record/'log.jsonl', time.monotonic() + 60
    while not (log.exists() and '"step": 3' in log.read_text()) and time.monotonic() < end: time.sleep(0.002)
    processes[1].kill()
    assert finish(processes)[1] == -9 and 'goes on from it' in (tmp_path/'lost').read_text()
    assert finish(launch(run, cut, tmp_path/'3', said=tmp_path/'said')) == [0, 0]
    ends = [checkout(Session(load_run(path, {}).config).store) for path in (two, cut)]
    assert ends[0].commit.step == 6 and all(ends[0].files[k] == ends[1].files[k] for k in ('adapter_model.safetensors', 'optimizer.pt'))


# a base model in parts

def parts(settings, out):
    "A drain, and how much of the base model one process holds"
    session = Session(load_config({}, **settings))
    done = session.drain()
    weights = [p for p in session._state.model.get_base_model().get_decoder().layers.parameters() if not p.requires_grad]
    held = sum((p.to_local() if hasattr(p, 'to_local') else p).numel() for p in weights) / sum(p.numel() for p in weights)
    try: session.chat('Where is it?'); said = ''
    except ValueError as e: said = str(e)
    with open(out, 'w') as f: json.dump({'failed': done.failed, 'held': held, 'notices': done.notices, 'chat': said, 'engine': session.experiment()['engine']}, f)


@pytest.mark.slow
def test_a_base_model_in_parts(bucket, tmp_path):
    "FSDP with the engine trl on two CPU processes: half of the layers' weights in each, and the losses of one process"
    single, settings = bucket(engine='trl'), bucket()
    losses = [r.losses for r in submit(single, TRACES).drain().receipts]
    submit(settings, TRACES)
    processes = launch(parts, settings, str(tmp_path/'out'), said=tmp_path/'said', env={'ACCELERATE_USE_FSDP': 'true'})
    assert finish(processes) == [0, 0], (tmp_path/'said').read_text()
    found = json.loads((tmp_path/'out').read_text())
    worst = difference(losses, settings)
    print(f"{found['held']:.0%} of the layers' frozen weights in the first process; losses within {worst:.1e};", found['chat'], found['notices'])
    assert not found['failed'] and found['engine'] == 'trl' and 0.45 < found['held'] < 0.55 and worst < 1e-5 and 'with one process' in found['chat']
