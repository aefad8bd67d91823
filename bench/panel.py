"What the panel costs: training with it and without, in turn; how soon other cells and Stop are answered while it trains; its tick over a long log and the size of its state"
import argparse
import json
import os
import re
import statistics
import sys
import tempfile
import time
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parents[1]/'tests'))
from front import Front, fill, state_size
from rows import tickets

from incremental_train import ui
from incremental_train.config import load_config
from incremental_train.model import EMBEDDED
from incremental_train.plan import n_steps
from incremental_train.session import Session
from incremental_train.toy import toy_model

DRAIN = '''import time
before = time.perf_counter()
session.drain(watch=lambda event: None)
print(time.perf_counter() - before)'''


def kernel(folder, model, grad_accum): # -> Front
    "A kernel with the model loaded and the panel shown"
    front = Front(folder, MODEL_ID=model, BUCKET_ID=folder/'bucket', GRAD_ACCUM=grad_accum, LORA_TARGET_MODULES='q_proj,v_proj', LEARNING_RATE=1e-3)
    front.execute('from incremental_train.ui import Panel\npanel = Panel()\nsession = panel.session\npanel')
    front.pump(120, lambda: front.shown and any('it-status' in m.get('_dom_classes', ()) for m in front.models.values()))
    queue_rows(front, 1, 0)
    without_panel(front, 1)
    return front


def cell(front, code, seconds=500) -> str: # its last line
    "Run a cell that prints"
    n = len(front.texts)
    front.execute(code)
    front.pump(seconds, lambda: ''.join(front.texts[n:]).endswith('\n'))
    return ''.join(front.texts[n:]).splitlines()[-1]


def queue_rows(front, rows, start): cell(front, f'print(session.submit({json.dumps(tickets(rows, start))!r}))')


def cpu(front) -> float: return float(cell(front, 'import time; print(time.process_time())')) # seconds of the kernel's process, which other work on the machine hardly changes


def without_panel(front, step) -> float: # seconds
    "Drain in a cell"
    return float(cell(front, DRAIN))


def with_panel(front, step) -> float: # seconds
    "Drain with the button, the page painted meanwhile"
    front.click('train')
    front.pump(500, lambda: f'Finished at step {step},' in front.value('status'))
    return float(cell(front, 'print(panel.work.course.elapsed)'))


def answers(front, times) -> tuple[list, float, float]: # seconds: of each cell, until Stop was acknowledged, until it was done
    "While a training goes on"
    front.click('train')
    front.pump(120, lambda: 'last step' in front.value('progress'))
    cells = []
    for _ in range(times):
        cells.append(front.answer('6 * 7'))
        time.sleep(0.3)
    clicked = time.monotonic()
    front.click('stop')
    front.pump(30, lambda: re.search('Stopping|Stopped at', front.value('status')))
    acknowledged = time.monotonic() - clicked
    front.pump(120, lambda: 'Stopped at step' in front.value('status'))
    return cells, acknowledged, time.monotonic() - clicked


def painting(folder, steps) -> dict:
    "A panel after a long day: seconds of a tick that finds new rows, and of one that finds none; characters of its state"
    panel = ui.Panel(Session(load_config({}, model_id=str(toy_model(folder/'toy')), bucket_id=str(folder/'toys'), threads=1)), spawn=lambda work: work())
    fill(panel, steps)
    times = []
    for n in range(7):
        panel.work.course.train.append((steps + 1 + n, 2.0))
        panel.progress.drawn = None, 0, 0, False # as if a second had gone by
        before = time.perf_counter()
        panel.tick()
        after = time.perf_counter()
        panel.tick()
        times.append((after - before, time.perf_counter() - after))
    return dict(log_rows=steps, tick_ms=round(1000 * statistics.median(t for t, _ in times), 1), idle_tick_ms=round(1000 * statistics.median(t for _, t in times), 1), state_kb=round(state_size(panel) / 1000, 1))


def cost(pairs) -> dict: # of (seconds, CPU seconds) without and with
    "The panel's share, as the median of each round's ratio"
    walls, cpus = ([[side[n] for side in pair] for pair in pairs] for n in (0, 1))
    percent = lambda sides: round(100 * (statistics.median(b / a for a, b in sides) - 1), 1)
    return dict(seconds=[[round(s, 1) for s in sides] for sides in walls], cpu_seconds=[[round(s, 1) for s in sides] for sides in cpus], cost_percent=percent(walls), cpu_cost_percent=percent(cpus))


if __name__ == '__main__':
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument('--model', default=next(iter(EMBEDDED)), help='MODEL_ID, or toy')
    parser.add_argument('--rows', type=int, default=40, help='of each measured drain')
    parser.add_argument('--rounds', type=int, default=3)
    parser.add_argument('--grad-accum', type=int, default=4)
    args = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder:
        folder = Path(folder)
        front = kernel(folder, toy_model(folder/'model') if args.model == 'toy' else args.model, args.grad_accum)
        try:
            pairs, step = [], 1
            for n in range(args.rounds):
                pair = []
                for way in (without_panel, with_panel):
                    queue_rows(front, args.rows, 1000 * (1 + n)) # the same rows in both
                    step += n_steps(args.rows, args.grad_accum)
                    before = cpu(front)
                    pair.append((way(front, step), cpu(front) - before))
                pairs.append(pair)
            queue_rows(front, 20 * args.rows, 500_000)
            cells, acknowledged, stopped = answers(front, 9)
        finally: front.close()
        print(json.dumps({'model': args.model, 'rows': args.rows, 'threads': os.environ.get('OMP_NUM_THREADS', 'all'), 'rounds': args.rounds, **cost(pairs),
                          'cell_answers_s': round(statistics.median(cells), 3), 'slowest_s': round(max(cells), 3),
                          'stop_acknowledged_s': round(acknowledged, 3), 'stopped_s': round(stopped, 2), **painting(folder, 10_000)}))
