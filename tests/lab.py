"JupyterLab on the loopback address, and Debian's Chromium, driven by Playwright"
import json
import os
import shutil
import socket
import subprocess
import sys
import time
import urllib.request
from contextlib import contextmanager
from pathlib import Path

from playwright.sync_api import sync_playwright

QUIET = {'@jupyterlab/apputils-extension:notification': {'fetchNews': 'false', 'checkForUpdates': False, 'doNotDisturbMode': True}}
DARK = {'@jupyterlab/apputils-extension:themes': {'theme': 'JupyterLab Dark'}}
FLAGS = ['--no-sandbox', '--disable-gpu', '--disable-background-networking', '--disable-component-update', '--disable-sync', '--no-first-run', '--disable-dev-shm-usage']


def free_port():
    with socket.socket() as s:
        s.bind(('127.0.0.1', 0))
        return s.getsockname()[1]


@contextmanager
def lab(root, scratch, settings=(), **env):
    "A server on the folder `root`; its own settings, nothing of the user's is read or written"
    port, log = free_port(), scratch/'lab.log'
    for plugin, values in {**QUIET, **dict(settings)}.items():
        file = scratch/'settings'/(plugin.replace(':', '/') + '.jupyterlab-settings')
        file.parent.mkdir(parents=True, exist_ok=True)
        file.write_text(json.dumps(values))
    folders = {'JUPYTER_CONFIG_DIR': 'config', 'JUPYTER_DATA_DIR': 'data', 'JUPYTER_RUNTIME_DIR': 'run', 'JUPYTERLAB_SETTINGS_DIR': 'settings', 'JUPYTERLAB_WORKSPACES_DIR': 'workspaces', 'IPYTHONDIR': 'ipython'}
    command = [Path(sys.executable).parent/'jupyter-lab', '--no-browser', '--allow-root', '--ip=127.0.0.1', f'--port={port}', '--ServerApp.port_retries=0', '--IdentityProvider.token=', '--ServerApp.password=',
               '--ServerApp.disable_check_xsrf=True', f'--ServerApp.root_dir={root}', '--expose-app-in-browser', '--LabApp.extension_manager=readonly']
    with open(log, 'wb') as out:
        server = subprocess.Popen([str(c) for c in command], cwd=root, stdout=out, stderr=out, env={**os.environ, **{k: str(scratch/v) for k, v in folders.items()}, **{k: str(v) for k, v in env.items()}})
        try:
            _wait(f'http://127.0.0.1:{port}/api/status', server, log)
            yield f'http://127.0.0.1:{port}'
        finally:
            server.terminate()
            try: server.wait(15)
            except subprocess.TimeoutExpired: server.kill()


def _wait(url, server, log, seconds=60):
    end = time.monotonic() + seconds
    while True:
        try: return urllib.request.urlopen(url, timeout=1).close()
        except OSError:
            if server.poll() is not None or time.monotonic() > end: raise RuntimeError(log.read_text()[-3000:]) from None
            time.sleep(0.1)


@contextmanager
def chromium():
    "The browser; a missing one is a failure with the way out, never a skipped test"
    path = shutil.which('chromium')
    if path is None: raise RuntimeError('chromium is missing; the browser test needs it: apt-get install -y chromium')
    with sync_playwright() as playwright:
        browser = playwright.chromium.launch(executable_path=path, args=FLAGS)
        try: yield browser
        finally: browser.close()


def open_notebook(page, url, name):
    "Open a notebook and wait for its kernel; the idle circle shows before it is connected"
    page.goto(f'{url}/lab/tree/{name}?reset')
    page.wait_for_selector('.jp-NotebookPanel:not(.lm-mod-hidden) .jp-Cell', timeout=60_000)
    page.evaluate("""async () => { const app = window.jupyterapp; await app.restored; const w = app.shell.currentWidget;
        await w.context.ready; await w.sessionContext.ready; await w.sessionContext.session.kernel.info; }""")


def command(page, name): page.evaluate(f"window.jupyterapp.commands.execute('{name}')")


def save_notebook(folder, *sources, name='panel.ipynb'):
    "A notebook of code cells"
    cells = [{'cell_type': 'code', 'id': f'c{n}', 'metadata': {}, 'execution_count': None, 'outputs': [], 'source': s} for n, s in enumerate(sources)]
    (folder/name).write_text(json.dumps({'cells': cells, 'metadata': {'kernelspec': {'name': 'python3', 'display_name': 'Python 3', 'language': 'python'}}, 'nbformat': 4, 'nbformat_minor': 5}))
