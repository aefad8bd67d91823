"The panel in a real kernel, driven by raw comm messages: no browser, no server"
import json
import re
import time

import pytest
from front import Front
from rows import tickets

CELL = 'from incremental_train.ui import Panel\npanel = Panel()\npanel'


@pytest.fixture
def kernel(toy, tmp_path):
    "Makes a kernel on the bucket of this test, with the panel shown"
    fronts = []
    def start(**settings):
        front = Front(tmp_path, **{'MODEL_ID': toy, 'BUCKET_ID': tmp_path/'bucket', 'GRAD_ACCUM': 1, 'THREADS': 1, 'LEARNING_RATE': 0.01, 'QUEUE_PERSIST': 'true', **settings})
        fronts.append(front)
        front.execute(CELL)
        front.pump(60, lambda: front.shown)
        front.pump(30, lambda: any('it-status' in m.get('_dom_classes', ()) for m in front.models.values()))
        return front
    yield start
    for front in fronts: front.close()


def submit(front, rows):
    front.set('text', value='\n'.join(map(json.dumps, rows)))
    front.pump(20, lambda: f'{len(rows):,} row' in front.value('count'))
    front.click('submit')
    front.pump(60, lambda: 'Queued' in front.value('status') and front.value('text') == '')


def test_while_it_trains_other_cells_answer_stop_is_acknowledged_and_a_new_kernel_goes_on(kernel):
    front = kernel()
    front.set('text', value='{"messages": [}')
    front.pump(20, lambda: 'line 1: is not JSON' in front.value('count'))
    submit(front, tickets(2000))
    front.click('train'); front.click('train')
    front.pump(60, lambda: re.search(r'step [1-9]\d* ·', front.value('progress')))
    steps = lambda: int(re.search(r'\[(\d+)/2000', front.value('progress'))[1])
    before = steps()
    answers = sorted(front.answer('6 * 7') for _ in range(5))
    front.pump(10, lambda: steps() > before)
    shown = len(front.shown)
    front.execute('panel') # the page was reloaded, and the cell is run again
    front.pump(10, lambda: len(front.shown) > shown)
    assert front.shown[-1] == front.shown[0]
    front.execute('again = Panel()\nassert again.session is panel.session and again.work is panel.work')
    front.pump(30, lambda: len([m for m in front.models.values() if 'it-status' in m.get('_dom_classes', ())]) == 2)
    front.pump(10, lambda: 'step' in front.value('progress')) # the second panel shows the training of the first
    begin = time.monotonic()
    front.click('stop')
    front.pump(10, lambda: re.search('Stopping|Stopped at', front.value('status')))
    acknowledged = time.monotonic() - begin
    front.pump(30, lambda: 'Stopped at step' in front.value('status'))
    print(f'another cell answers in {answers[2]:.3f} s (slowest {answers[-1]:.3f}), Stop is acknowledged in {acknowledged:.3f} s and done in {time.monotonic() - begin:.3f} s')
    stopped = int(re.search(r'Stopped at step (\d+), saved', front.value('status'))[1])
    assert 0 < stopped < 2000
    front.close()
    later = kernel()
    assert f'step {stopped}' in later.value('title') and f'interrupted after {stopped} rows' in later.value('queue') and 'survives a restart' in later.value('queue') and f'checkpoint-{stopped}-' in later.value('where')
    later.click('remove')
    later.pump(10, lambda: 'The queue is empty' in later.value('queue'))
    submit(later, tickets(3, 5000))
    later.click('train')
    later.pump(60, lambda: 'Finished at step' in later.value('status'))
    assert f'Finished at step {stopped + 3}, saved; nothing waiting' in later.value('status') and later.value('history').count('trained') >= 2
    later.execute('rows = [(e["trained_rows"], e["status"]) for e in panel.session.history()]; print(rows)')
    later.pump(10, lambda: any("(3, 'trained')" in t and f"({stopped}, 'trained in part')" in t for t in later.texts))
