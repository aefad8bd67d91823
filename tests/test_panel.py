"The panel without a kernel: every control and state, the test is the clock; on ipywidgets 8 and, in a process of its own, on 7.7.1"
import asyncio
import html
import json
import os
import re
import subprocess
import sys
import threading
import time
from datetime import datetime
from pathlib import Path

import ipywidgets as W
import pytest
from front import every, fill, state_size
from rows import MAKE, chat, tickets

from incremental_train import ui
from incremental_train.course import work_of
from incremental_train.session import Session
from incremental_train.store import kept

WIDGETS = int(W.__version__.split('.')[0])


def at_once(work): work()


def jsonl(rows): return '\n'.join(map(json.dumps, rows))


@pytest.fixture
def panel(settings):
    "A panel on a bucket of this test, whose work is done where it is begun"
    return ui.Panel(Session(settings(grad_accum=2, queue_persist=False)), spawn=at_once)


def plain(text): return html.unescape(re.sub(r'<[^>]*>', ' ', text))


def submit(panel, rows, method='sft'):
    panel.submit.method.value = method
    panel.submit.text.value = jsonl(rows)
    panel.submit.submit.click()


def test_an_empty_panel_says_what_can_be_done(panel):
    assert panel.submit.submit.disabled and panel.submit.look.disabled and panel.queue.train.disabled and panel.queue.remove.disabled and panel.progress.stop.disabled and panel.history.undo.disabled
    assert 'No rows yet' in panel.submit.count.value and 'The queue is empty' in panel.queue.list.value and 'Nothing was trained' in panel.history.list.value and 'no adapter yet' in panel.history.where.value
    assert not panel.tick()


def test_rows_are_counted_while_they_are_typed_and_refused_by_line(panel):
    panel.submit.text.value = jsonl(tickets(5))
    assert '5 rows = 3 steps of 2 rows' in panel.submit.count.value and not panel.submit.submit.disabled
    panel.submit.text.value = jsonl(tickets(2)) + '\n{"messages": [{"role": "user", "content": "x"}]}\n{"text":'
    count = plain(panel.submit.count.value)
    assert 'line 3: has no assistant turn' in count and 'line 4: is not JSON' in count and panel.submit.submit.disabled
    panel.submit.method.value = 'dpo'
    assert 'Not usable as DPO' in panel.submit.count.value and 'line 1:' in panel.submit.count.value
    panel.submit.submit.click()
    assert not len(panel.session.queue) and 'Refused:' in panel.status.value and 'role="alert"' in panel.status.value and panel.submit.text.value, 'a click that came all the same is refused, and the text stays'


def test_pasted_text_that_is_no_trace_is_no_path(panel):
    panel.submit.text.value = '/etc/hostname'
    assert 'line 1: is not JSON' in panel.submit.count.value and 'hostname' not in panel.submit.count.value


@pytest.mark.parametrize('method', ['sft', 'dpo', 'kto'])
def test_look_shows_the_trained_tokens_and_the_plan_and_queues_nothing(panel, method):
    panel.submit.method.value = method
    panel.submit.text.value = jsonl(MAKE[method](5))
    panel.submit.row.value = 2
    panel.submit.look.click()
    ray, card = panel.submit.xray.value, plain(panel.submit.card.value)
    assert 'text-decoration:underline">⟦' in ray and 'between ⟦ and ⟧' in ray and not len(panel.session.queue)
    assert '5 rows · 3 steps · about' in card and 'MB free' in card and 'nothing will be shortened' in card and 'trainable:' in card
    panel.submit.row.value = 9
    panel.submit.look.click()
    assert 'row is 9; the trace has rows 1 to 5' in panel.status.value
    panel.submit.text.value += ' '
    assert panel.submit.xray.value == '' == panel.submit.card.value, 'what is shown belongs to what stands there'


def test_what_will_be_shortened_is_said_before(panel):
    panel.submit.text.value = jsonl([chat('Where is it? ' * 100, 'delivery')])
    panel.submit.look.click()
    assert '1 of 1 will be shortened to 256 tokens' in panel.submit.card.value and 'shortened to fit' in panel.submit.xray.value


def upload(panel, data):
    "What the front end sends for a chosen file"
    file = panel.submit.file
    if WIDGETS == 7: file.set_state({'metadata': [{'name': 't.jsonl', 'size': len(data), 'type': '', 'lastModified': 0}], 'data': [memoryview(data)], '_counter': 1})
    else: file.value = ({'name': 't.jsonl', 'size': len(data), 'type': '', 'last_modified': datetime.now(), 'content': memoryview(data)},)


@pytest.mark.parametrize('way', ['text', 'file', 'path'])
def test_submitted_rows_leave_the_page(panel, tmp_path, way):
    rows = [chat('my secret order', 'delivery, high')] * 3
    (tmp_path/'t.jsonl').write_text(jsonl(rows))
    if way == 'text': panel.submit.text.value = jsonl(rows)
    if way == 'file': upload(panel, jsonl(rows).encode())
    if way == 'path': panel.submit.path.value = str(tmp_path/'t.jsonl')
    assert '3 rows = 2 steps' in panel.submit.count.value
    panel.submit.look.click()
    assert 'secret' in panel.submit.xray.value.replace('|', '')
    panel.submit.submit.click()
    assert 'Queued 3 rows' in panel.status.value and '2 steps, place 1' in panel.status.value and 'a restart of this process loses the job' in panel.status.value
    assert 'secret' not in str([w.get_state() for w in every(panel.box)]).replace('|', '') and 't.jsonl' not in str([w.get_state() for w in every(panel.box)])
    panel.submit.submit.click() # the second half of a double click, or of a nervous one
    assert len(panel.session.queue) == 1 and 'Queued 3 rows' in panel.status.value


def test_rows_given_twice_are_refused(panel):
    panel.submit.text.value = jsonl(tickets(1))
    panel.submit.path.value = 'somewhere.jsonl'
    assert 'given twice (text and path)' in panel.submit.count.value


def test_the_same_rows_wait_once(panel):
    submit(panel, tickets(2))
    submit(panel, tickets(2))
    assert len(panel.session.queue) == 1 and 'not queued twice' in panel.status.value


def test_the_queue_is_shown_in_draining_order_and_a_job_can_be_removed(settings):
    panel = ui.Panel(Session(settings(queue_persist=True)), spawn=at_once)
    for method in ('kto', 'dpo', 'sft'): submit(panel, MAKE[method](5), method)
    text = plain(panel.queue.list.value)
    assert text.index('SFT') < text.index('DPO') < text.index('KTO') and 'it survives a restart' in text and text.count('waiting') == 3 and re.search(r'\d{4}-\d\d-\d\d \d\d:\d\d', text)
    panel.queue.job.value = next(j.id for j in panel.session.queue if j.method == 'dpo')
    panel.queue.remove.click()
    assert 'DPO' not in panel.queue.list.value and 'was taken out' in panel.status.value and len(panel.queue.job.options) == 2
    again = ui.Panel(Session(settings(queue_persist=True)), spawn=at_once)
    assert 'SFT' in again.queue.list.value and 'DPO' not in again.queue.list.value and not again.queue.train.disabled


def test_the_queue_says_what_it_comes_to(panel):
    submit(panel, tickets(1))
    assert 'In all 1 job: 1 row, 1 step, for how long is known once' in panel.queue.list.value
    panel.queue.train.click()
    submit(panel, tickets(5, 20))
    assert re.search(r'In all 1 job: 5 rows, 3 steps, about \d+ s', panel.queue.list.value), 'at the pace of the first job'
    panel.submit.method.value, panel.submit.text.value = 'dpo', jsonl(MAKE['dpo'](3))
    panel.submit.look.click()
    assert panel.work.pace == {'dpo': panel.submit.planned.seconds / 3}
    panel.submit.submit.click()
    assert re.search(r'In all 2 jobs: 8 rows, 5 steps, about \d+ s', panel.queue.list.value)
    panel.queue.train.click()
    assert not panel.work.pace, 'what was measured is better'


def stepwise(panel, at_step):
    "Tick and call `at_step` at each event of a training, as a clock would between two steps"
    told = panel.work._watch
    def watch(event):
        told(event)
        assert panel.tick()
        at_step(event)
    panel.work._watch = watch


def test_a_training_is_seen_and_stopped_and_goes_on(panel):
    seen = []
    def at_step(event):
        if type(event).__name__ != 'Step': return
        seen.append(plain(panel.progress.bar.value))
        assert panel.queue.train.disabled and not panel.progress.stop.disabled or panel.work.lane.stopping
        panel.queue.train.click() # a second trainer is not begun
        if panel.work.course.made == 2:
            panel.progress.stop.click()
            assert 'Stopping: the step that runs now is finished and saved' in panel.status.value and panel.progress.stop.disabled
    submit(panel, tickets(8))
    submit(panel, tickets(3, 100))
    stepwise(panel, at_step)
    panel.queue.train.click()
    assert re.search(r'queue: step 1 · 17% \[1/6 0:\d\d<0:\d\d\] · loss \d\.\d{4} · rate 0\.01 · [\d,]+ MB · last step 0 s ago', seen[0]), seen
    assert len(seen) == 2 and 'Stopped at step 2, saved; 2 waiting' in panel.status.value
    assert 'interrupted after 4 rows' in panel.queue.list.value and not panel.queue.train.disabled and panel.progress.stop.disabled
    assert '<progress max="6" value="2"' in panel.progress.bar.value and 'aria-label="training queue"' in panel.progress.bar.value
    del panel.work._watch
    panel.queue.train.click()
    assert 'Finished at step 6, saved; nothing waiting' in panel.status.value and '[4/4 ' in panel.progress.bar.value and 'The queue is empty' in panel.queue.list.value
    assert panel.work.ledger[0]['rows_trained_once'] and 'then' in panel.work.ledger[0]['continued'] and 'loss curves: queue: training loss' in panel.progress.curve.value
    assert panel.progress.notes.value.count('commit') >= 2


def test_stop_before_the_first_step_is_not_lost(panel):
    submit(panel, tickets(8))
    waiting = []
    panel.spawn = waiting.append # a thread that has not begun yet
    panel.queue.train.click()
    panel.progress.stop.click()
    waiting[0](); panel.tick()
    assert 'Stopped before the first step; nothing was changed' in panel.status.value and panel.work.standing['global_step'] == 0


def test_the_adapter_is_the_command_lines(settings, tmp_path):
    "Stopped and gone on with in the panel, drained whole on the command line: the same bytes"
    def adapter(config): return next(Path(config.bucket_id).glob('checkpoint-5-*/adapter_model.safetensors')).read_bytes()
    one = settings(grad_accum=2, bucket_id=str(tmp_path/'one'))
    panel = ui.Panel(Session(one), spawn=at_once)
    submit(panel, tickets(9))
    stepwise(panel, lambda event: panel.progress.stop.click() if type(event).__name__ == 'Step' else None)
    panel.queue.train.click()
    assert 'Stopped at step 1' in panel.status.value
    del panel.work._watch
    panel.queue.train.click()
    (tmp_path/'t.jsonl').write_text(jsonl(tickets(9)))
    environment = {**os.environ, 'MODEL_ID': one.model_id, 'BUCKET_ID': str(tmp_path/'two'), 'GRAD_ACCUM': '2', 'LEARNING_RATE': '0.01', 'THREADS': '1'}
    subprocess.run([sys.executable, '-m', 'incremental_train', 'drain', '--trace', str(tmp_path/'t.jsonl'), '--json'], env=environment, capture_output=True, check=True)
    assert adapter(one) == adapter(settings(bucket_id=str(tmp_path/'two')))


def test_a_job_that_fails_is_named_and_the_queue_goes_on(panel, monkeypatch):
    from incremental_train import drain
    whole = drain.encode_trace
    def fails(trace, *args):
        if trace.method == 'sft': raise RuntimeError('a <row> that this model cannot take')
        return whole(trace, *args)
    submit(panel, tickets(2))
    submit(panel, MAKE['dpo'](2), 'dpo')
    id = next(j.id for j in panel.session.queue if j.method == 'sft')
    monkeypatch.setattr(drain, 'encode_trace', fails)
    meanwhile = []
    stepwise(panel, lambda event: meanwhile.append((panel.status.value, panel.queue.list.value)) if type(event).__name__ == 'Step' else None)
    panel.queue.train.click()
    assert f'{id} failed and still waits: a &lt;row&gt; that this model cannot take' in panel.status.value and 'Failed:' in panel.status.value and 'failed: a &lt;row&gt;' in panel.queue.list.value
    assert [e['method'] for e in panel.work.ledger] == ['dpo'] and not panel.queue.train.disabled
    assert meanwhile and all('the others go on' in status and 'role="alert"' in status and 'failed: a &lt;row&gt;' in queue for status, queue in meanwhile), 'said at once, not when the queue is done'


def test_one_trainer_only(settings):
    "Two panels, many clicks at once, real threads: every row is trained once, both panels say the same"
    session = Session(settings(grad_accum=1, queue_persist=False))
    panels = [ui.Panel(session) for _ in range(2)]
    submit(panels[0], tickets(30))
    while panels[0].tick(): time.sleep(0.01)
    clicks = [threading.Thread(target=panels[i % 2].queue.train.click) for i in range(8)]
    for c in clicks: c.start()
    for c in clicks: c.join()
    submit(panels[1], tickets(3, 200)) # during training
    while any([p.tick() for p in panels]): time.sleep(0.02)
    if len(session.queue): # the three came when the thirty were done
        panels[1].queue.train.click()
        while any([p.tick() for p in panels]): time.sleep(0.02)
    assert all('saved; nothing waiting' in p.status.value and '<progress' in p.progress.bar.value for p in panels)
    assert [(e['rows'], e['rows_trained_once']) for e in session.history()] == [(30, True), (3, True)]
    assert panels[0].history.list.value == panels[1].history.list.value and panels[0].work is panels[1].work is work_of(session)


def test_a_model_in_use_by_another_cell_is_waited_for(panel):
    submit(panel, tickets(2))
    held, done = threading.Event(), threading.Event()
    def cell():
        with panel.session.lock: held.set(); done.wait(10)
    threading.Thread(target=cell).start()
    held.wait(10)
    panel.spawn = ui.in_thread
    panel.queue.train.click()
    until = time.monotonic() + 10
    while 'another cell uses the model' not in panel.progress.notes.value and time.monotonic() < until: panel.tick(); time.sleep(0.02)
    assert 'another cell uses the model' in panel.progress.notes.value
    done.set()
    while panel.tick(): time.sleep(0.02)
    assert 'Finished at step 1' in panel.status.value


def test_history_undo_and_the_next_kernel(panel, settings):
    submit(panel, tickets(4))
    panel.queue.train.click()
    submit(panel, tickets(2, 50))
    panel.queue.train.click()
    text = plain(panel.history.list.value)
    assert text.index('trained') and text.count(' trained ') == 2 and 'loss before' in text and 'PeftModel.from_pretrained(base' in panel.history.where.value and 'checkpoint-3-' in panel.history.where.value
    panel.history.undo.click()
    assert 'Went from step 3 to step 2; undone: sft-' in panel.status.value and 'checkpoint-2-' in panel.history.where.value and 'undone' in panel.history.list.value
    panel.history.version.value = 3
    panel.history.undo.click()
    assert 'Went from step 2 to step 3' in panel.status.value
    submit(panel, tickets(2, 90))
    later = ui.Panel(Session(panel.session.config), spawn=at_once) # memory is gone, the bucket is not
    assert later.history.list.value == panel.history.list.value and 'The queue is empty' in later.queue.list.value and 'step 3' in later.title.value
    submit(later, tickets(2, 95))
    later.queue.train.click()
    assert 'Finished at step 4' in later.status.value and 'continued exactly from step 3' in later.work.ledger[-1]['continued']


def test_a_version_is_kept(panel):
    for n in range(3):
        submit(panel, tickets(2, 10 * n))
        panel.queue.train.click()
    panel.history.keep.click()
    assert 'Kept whatever happens: the version of step 3;' in panel.status.value
    panel.history.version.value = 1
    panel.history.keep.click()
    assert 'Kept whatever happens: the versions of step 1, 3;' in panel.status.value and sorted(v['step'] for v in kept(panel.session.store).values()) == [1, 3]
    panel.history.version.value = 0
    panel.history.keep.click()
    assert 'needs no keeping' in panel.status.value and 'Refused:' in panel.status.value


def test_what_has_to_wait_for_a_training_says_why(panel):
    submit(panel, tickets(4))
    panel.queue.train.click()
    seen = []
    def at_step(event):
        if type(event).__name__ == 'Step': seen.append([(b.disabled, text.value) for b, text in controls])
    controls = (panel.queue.train, panel.queue.list), (panel.history.undo, panel.history.list), (panel.runs.start, panel.runs.card), (panel.attempt.ask, panel.attempt.answers)
    stepwise(panel, at_step)
    submit(panel, tickets(2, 50))
    panel.queue.train.click()
    assert len(seen) == 1 and all(off and 'possible again when this has ended: Training the queue (Stop ends it)' in text for off, text in seen[0])
    assert all(not b.disabled and 'possible again' not in text.value for b, text in controls[1:])


RUN = 'name = "{name}"\nseed = 1\nthreads = 1\n[data]\ntrain = "train.jsonl"\nval = "val.jsonl"\n[lora]\nrank = 4\n[train]\nlearning_rate = {rate}\nbatch_size = 2\nepochs = 2\neval_every = 2\n[model]\nid = "{model}"\n'


def test_runs_are_planned_trained_stopped_and_compared(panel, toy, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv('BUCKET_ID', str(tmp_path/'runs-bucket'))
    (tmp_path/'pyproject.toml').write_text('')
    (tmp_path/'train.jsonl').write_text(jsonl(tickets(6))); (tmp_path/'val.jsonl').write_text(jsonl(tickets(2, 50)))
    for name, rate in (('slow', 0.001), ('fast', 0.02)): (tmp_path/f'{name}.toml').write_text(RUN.format(name=name, rate=rate, model=toy))
    runs = ui.Panel(panel.session, spawn=at_once).runs
    panel = runs.panel
    assert list(runs.file.options) == ['fast.toml', 'slow.toml']
    runs.start.click()
    assert 'no run file is chosen' in panel.status.value
    runs.file.value = 'slow.toml'
    runs.plan.click()
    assert '6 rows · 6 steps' in runs.card.value
    stepwise(panel, lambda event: panel.progress.stop.click() if panel.work.course.step == 2 and not panel.work.lane.stopping else None)
    runs.start.click()
    assert 'stopped after step 2, saved' in panel.status.value, panel.status.value
    del panel.work._watch
    runs.start.click()
    assert '[6/6 ' in panel.progress.bar.value and 'finished at step 6' in panel.status.value and panel.progress.validations.value.count('<tr>') == 4
    runs.file.value = 'fast.toml'
    runs.start.click()
    assert list(runs.records.options) == ['slow', 'fast']
    runs.records.value = ('slow', 'fast')
    runs.compare.click()
    table = plain(runs.differences.value)
    assert 'learning_rate' in table and '0.001' in table and '0.02' in table and 'rank' not in table and 'fast: training loss' in runs.curves.value
    (tmp_path/'fast.toml').write_text(RUN.format(name='fast', rate=2e4, model=toy))
    runs.start.click()
    assert 'learning_rate must be between 0 and 1' in panel.status.value and 'Refused:' in panel.status.value


def test_both_answer_the_same_question(panel):
    panel.attempt.ask.click()
    assert 'the question is empty' in panel.status.value
    panel.attempt.prompt.value, panel.attempt.length.value = 'Where is it?', 5
    panel.attempt.ask.click()
    assert 'nothing was trained yet' in panel.status.value
    submit(panel, tickets(4))
    panel.queue.train.click()
    panel.attempt.ask.click()
    answers = panel.attempt.answers.value
    assert 'it-answer-base' in answers and 'it-answer-adapter' in answers and 'greedy, at most 5 new tokens, adapter of step 2' in answers and 'Where is it?' in answers
    stepwise(panel, lambda event: None)
    submit(panel, tickets(4, 50))
    states = []
    told = panel.work._watch
    panel.work._watch = lambda event: (told(event), states.append(panel.attempt.ask.disabled))
    panel.queue.train.click()
    assert all(states) and not panel.attempt.ask.disabled


def test_no_fault_is_swallowed(panel, monkeypatch):
    monkeypatch.setattr(panel.session, 'submit', lambda *a: 1 / 0, raising=False)
    submit(panel, tickets(1))
    assert 'Failed:' in panel.status.value and 'ZeroDivisionError' in panel.status.value and 'Traceback' in panel.status.value and panel.submit.text.value
    monkeypatch.setattr(panel.queue, 'paint', lambda: [][0])
    panel.tick()
    assert 'IndexError' in panel.status.value


def test_texts_from_outside_are_escaped(panel):
    panel.submit.text.value = jsonl([chat('<img src=x onerror=alert(1)>', '</pre><script>x</script>')])
    panel.submit.look.click()
    assert not any('<img' in w.value or '<script' in w.value for w in every(panel.box) if isinstance(w, W.HTML)) and '&lt;img' in panel.submit.xray.value.replace('|', '')


def test_every_control_has_a_name_and_none_is_told_by_colour_alone(panel):
    controls = [w for w in every(panel.box) if isinstance(w, W.Button | W.FileUpload | W.Text | W.Textarea | W.Dropdown | W.SelectMultiple | W.BoundedIntText | W.ToggleButtons)]
    assert len(controls) >= 20 and all(w.description for w in controls) and all(w.tooltip for w in controls if type(w) is W.Button)
    marks = [c for w in every(panel.box) for c in w._dom_classes]
    assert len(marks) == len(set(marks)) and [m for m in marks if m in ('it-section', 'it-method', 'it-text', 'it-look', 'it-submit', 'it-train', 'it-stop')] == ['it-section', 'it-method', 'it-text', 'it-look', 'it-submit', 'it-train', 'it-stop']
    assert len(list(every(panel.box))) < 80
    panel.section.value = 'History'
    assert [name for name, box in panel.sections.items() if box.layout.display != 'none'] == ['History'] and 'role="heading"' in panel.heading.value and '<b>History</b>' in panel.heading.value, 'which section is open is told in words'


def test_a_tick_is_quick_quiet_and_small(panel):
    "Over 10,000 rows of a log; a tick that finds nothing new sends nothing"
    fill(panel, 10_000)
    begin = time.perf_counter()
    panel.tick()
    first, sent = time.perf_counter() - begin, []
    for w in every(panel.box): w.observe(sent.append)
    begin = time.perf_counter()
    panel.tick()
    print(f'tick with 10,000 new rows {first * 1000:.0f} ms, with none {(time.perf_counter() - begin) * 1000:.0f} ms; widget state {state_size(panel):,} characters')
    assert not sent and state_size(panel) < 55_000 and 'at step 10000' in panel.progress.curve.value


def test_watch_paints_from_a_cell_and_interrupting_it_is_stop(panel, monkeypatch):
    submit(panel, tickets(40))
    panel.spawn = ui.in_thread
    panel.queue.train.click()
    ticks = []
    def sleep(seconds):
        threading.Event().wait(0.01)
        ticks.append(seconds)
        if panel.work.course and panel.work.course.made >= 1 and not panel.work.lane.stopping: raise KeyboardInterrupt
    monkeypatch.setattr(ui.time, 'sleep', sleep)
    panel.watch()
    assert re.search(r'Stopped at step \d+, saved', panel.status.value), panel.status.value


def test_the_clock_is_the_kernels_loop(settings):
    "Buttons are pressed in another thread, as JupyterLab does it; the panel is painted in the loop, and comes back live when it is shown again"
    async def notebook():
        panel = ui.Panel(Session(settings(queue_persist=False)), clock=ui.LoopClock(0.01))
        panel.submit.text.value = jsonl(tickets(12))
        for click, done in ((panel.submit.submit.click, 'Queued 12 rows'), (panel.queue.train.click, 'Finished at step 3')):
            await asyncio.to_thread(click)
            for _ in range(2000):
                if done in panel.status.value: break
                await asyncio.sleep(0.01)
            assert done in panel.status.value
        await asyncio.sleep(0.05)
        assert panel.clock.task.done()
    asyncio.run(notebook())


@pytest.mark.slow
@pytest.mark.skipif(WIDGETS == 7, reason='this is the other line')
def test_all_of_this_on_ipywidgets_7(tmp_path):
    subprocess.run([sys.executable, '-m', 'pip', 'install', '-q', '--no-deps', '--target', str(tmp_path/'overlay'), 'ipywidgets==7.7.1', 'ipython_genutils==0.2.0'], check=True, capture_output=True)
    path = os.pathsep.join([str(tmp_path/'overlay'), *filter(None, [os.environ.get('PYTHONPATH')])])
    done = subprocess.run([sys.executable, '-m', 'pytest', '-q', '-p', 'no:cacheprovider', __file__], env={**os.environ, 'PYTHONPATH': path}, capture_output=True, text=True)
    print(done.stdout[-300:])
    assert done.returncode == 0, done.stdout[-4000:] + done.stderr[-1000:]
