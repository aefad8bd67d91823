"A sweep: Ray with two workers on this machine, workers killed with -9, runs that cannot be saved, and what is refused before anything starts"
import json
import os
import signal
import subprocess
import sys
import threading
import time

import psutil
import pytest
from test_run import stored, weights, written # the last is a fixture

from incremental_train.bucket import open_store
from incremental_train.cli import main
from incremental_train.config import Refused
from incremental_train.lease import holder
from incremental_train.runfile import load_run
from incremental_train.runs import Record
from incremental_train.sweep import import_ray, start_ray, sweep


@pytest.fixture(scope='module')
def fleet():
    "Ray with two workers of one CPU each"
    ray = import_ray(local=True)
    start_ray(ray, num_cpus=2)
    yield ray
    ray.shutdown()


def kill_worker(path, times=1, step=20, seconds=60):
    "In a thread: kill -9 the process that trains a run, once the log has `step`; `times` different ones. Gives the thread and the ids of those killed"
    run, killed = load_run(path, {}), []
    log, store = run.record/'log.jsonl', open_store(run.config.bucket_id, run.config.experiment)
    def work():
        end = time.monotonic() + seconds
        while len(killed) < times and time.monotonic() < end:
            other = holder(store, 60) if log.exists() and f'"step": {step}, "loss"' in log.read_text() else None
            if other and other['process'] not in killed:
                os.kill(other['process'], signal.SIGKILL)
                killed.append(other['process'])
            time.sleep(0.005)
    thread = threading.Thread(target=work)
    thread.start()
    return thread, killed


def test_four_runs_and_a_killed_worker(fleet, written, tmp_path):
    "Four runs on two workers, one of them killed at its 20th step: four records, one comparison, and the bytes of the run that was left in peace"
    rare = dict(eval_every=None, checkpoint_every=6)
    whole, hurt = written('whole', epochs=8, **rare), written('hurt', epochs=8, **rare)
    written('gentle', learning_rate=0.001, **rare); written('bold', learning_rate=0.1, **rare)
    killer, killed = kill_worker(hurt)
    told = []
    done = sweep(tmp_path, watch=lambda event: told.append(str(event)))
    killer.join()
    assert len(killed) == 1 and done.failed == {} and {name: end['tries'] for name, end in done.runs.items()} == {'bold': 1, 'gentle': 1, 'hurt': 2, 'whole': 1}
    assert any(line.startswith('hurt: its worker was killed; try 2 of 4 goes on from step ') for line in told)
    assert [r.name for r in done.comparison.records] == ['bold', 'gentle', 'hurt', 'whole'] and all(r.summary['finished'] for r in done.comparison.records)
    log = [json.loads(line) for line in (load_run(hurt, {}).record/'log.jsonl').read_text().splitlines()]
    resumed = [row['resumed'] for row in log if 'resumed' in row]
    assert len(resumed) == 1 and 18 <= resumed[0] <= 48 and [k for k, _ in Record(load_run(hurt, {}).record).train] == list(range(1, 49))
    assert weights(hurt) == weights(whole) and stored(hurt).commit.step == 48
    assert 'hurt finished after 2 tries' in str(done) and len(done.summary()['comparison']['runs']) == 4


def test_runs_that_cannot_be_saved(fleet, written, tmp_path, monkeypatch, capsys):
    "A run whose every worker dies ends after its tries, one that diverges at once; both are named, the third goes on, the exit status is 1"
    unlucky = written('unlucky', epochs=200, eval_every=None, checkpoint_every=50)
    written('diverges', spike=0.01); written('fine')
    killer, killed = kill_worker(unlucky, times=2)
    monkeypatch.setattr(sys, 'argv', ['incremental-train', 'sweep', str(tmp_path), '--retries', '1', '--json'])
    with pytest.raises(SystemExit) as exit: main()
    killer.join()
    done = json.loads(capsys.readouterr().out)
    assert exit.value.code == 1 and len(killed) == 2
    assert done['runs']['fine'] == {'tries': 1, 'failed': ''} and done['failed']['unlucky'] == 'its worker was killed' and done['runs']['unlucky']['tries'] == 2
    assert done['runs']['diverges']['tries'] == 1 and 'the loss of step 6 is' in done['failed']['diverges']
    assert {run['run']: run.get('state', 'finished')[:8] for run in done['comparison']['runs']} == {'diverges': 'the loss', 'fine': 'finished', 'unlucky': 'not fini'}


@pytest.mark.parametrize('fault,message', [('row', 'line 2'), ('name', 'both named'), ('cpus', 'asks for 99 CPUs'), ('empty', 'holds no run file')])
def test_refused_as_a_whole(fleet, written, tmp_path, fault, message):
    "One bad row, one name twice, more CPUs than any machine has, no run file: nothing is begun, not even of the runs that are in order"
    if fault != 'empty': written('good'); written('other')
    if fault == 'row': (tmp_path/'sft-val.jsonl').write_text('{"text": "fine"}\n{"text": 7}')
    if fault == 'name': (tmp_path/'again.toml').write_text((tmp_path/'good.toml').read_text())
    with pytest.raises(Refused, match=message): sweep(tmp_path, cpus=99 if fault == 'cpus' else None)
    assert not (tmp_path/'runs').exists() and not (tmp_path/'bucket').exists()


def test_without_the_extra(written, tmp_path, monkeypatch, capsys):
    "One line that says what to install"
    written('good')
    monkeypatch.setitem(sys.modules, 'ray', None)
    monkeypatch.setattr(sys, 'argv', ['incremental-train', 'sweep', str(tmp_path)])
    with pytest.raises(SystemExit) as exit: main()
    said = capsys.readouterr()
    assert exit.value.code == 2 and said.out == '' and said.err == "incremental-train: a sweep needs Ray, which is not installed: pip install 'incremental-train[ray]'\n"


@pytest.mark.slow
def test_at_an_address(fleet, written, tmp_path):
    "The command in a process of its own, on the cluster that this one has started; no mark is left in the shared folders"
    written('one'); written('two', learning_rate=0.1)
    command = [sys.executable, '-m', 'incremental_train', 'sweep', str(tmp_path), '--json', '--ray', fleet.get_runtime_context().gcs_address]
    done = subprocess.run(command, capture_output=True, text=True, timeout=120)
    assert done.returncode == 0 and done.stderr == '' and json.loads(done.stdout)['failed'] == {}
    assert [p.name for folder in ('runs', 'bucket') for p in (tmp_path/folder).glob('.sweep*')] == []
    nobody = subprocess.run(command[:-1] + ['127.0.0.1:9'], capture_output=True, text=True, timeout=120)
    assert nobody.returncode == 2 and nobody.stdout == '' and nobody.stderr.startswith('incremental-train: no Ray cluster at 127.0.0.1:9 ') and nobody.stderr.count('\n') == 1


@pytest.mark.slow
def test_ray_of_its_own(written, tmp_path):
    "Without an address Ray is started for the sweep, listens on the loopback only, and is gone afterwards"
    for n in range(3): written(f'run-{n}', learning_rate=0.01 * (n + 1))
    process = subprocess.Popen([sys.executable, '-m', 'incremental_train', 'sweep', str(tmp_path), '--json'], stdout=subprocess.PIPE, stderr=subprocess.PIPE, env={k: v for k, v in os.environ.items() if not k.startswith('RAY_')})
    addresses, family = set(), {}
    while process.poll() is None:
        try: family |= {p.pid: p for p in psutil.Process(process.pid).children(recursive=True)}
        except psutil.NoSuchProcess: pass
        addresses |= {c.laddr.ip for c in psutil.net_connections('tcp') if c.status == 'LISTEN' and c.pid in family}
        time.sleep(0.2)
    out, err = process.communicate()
    assert process.returncode == 0 and err == b'' and len(json.loads(out)['comparison']['runs']) == 3
    assert addresses and all(ip.removeprefix('::ffff:') == '127.0.0.1' for ip in addresses)
    psutil.wait_procs(family.values(), timeout=10)
    assert not [p for p in family.values() if p.is_running() and p.status() != psutil.STATUS_ZOMBIE]
