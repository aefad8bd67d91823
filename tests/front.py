"A front end without a browser: widgets as a page has them, and a real kernel driven by raw comm messages"
import json
import os
import queue
import time

from ipywidgets.embed import dependency_state, embed_data
from jupyter_client.manager import start_new_kernel
from rows import tickets


def every(widget):
    "The widgets of a tree, in the order of the page"
    yield widget
    for child in getattr(widget, 'children', ()): yield from every(child)


def state_size(panel):
    "Characters of the state that a saved notebook holds, layouts and styles included, defaults left out as the front end does"
    return len(json.dumps(embed_data(views=[panel.box], state=dependency_state([panel.box]))))


def fill(panel, steps):
    "A panel as it is after a long day: something trained, something queued, something looked at, a long history and a log of many rows; its work is done where it is begun"
    for rows in (tickets(4), tickets(40, 50)):
        panel.submit.text.value = '\n'.join(map(json.dumps, rows))
        panel.submit.submit.click()
        if not panel.work.course: panel.queue.train.click()
    panel.submit.text.value = '\n'.join(map(json.dumps, tickets(4, 100)))
    panel.submit.look.click()
    panel.work.ledger[:] = panel.work.ledger * 500
    panel.work.course.train[:] = [(n, 2 + (n % 7) / 9) for n in range(1, steps + 1)]
    panel.work.course.val[:] = [(n, 2 + (n % 7) / 9) for n in range(50, steps + 1, 50)]


class Front:
    "Keeps the state of every widget that the kernel opens, and sends clicks and values"
    def __init__(self, cwd, **env):
        self.manager, self.client = start_new_kernel(kernel_name='python3', cwd=str(cwd), env={**os.environ, **{k: str(v) for k, v in env.items()}}, startup_timeout=60)
        self.models, self.shown, self.texts = {}, [], []

    def pump(self, seconds, until=lambda: True):
        "Take in what the kernel says until `until()` is true; asserts that it comes to that"
        end = time.monotonic() + seconds
        while not until():
            assert time.monotonic() < end, self.statuses()
            try: self._take(self.client.get_iopub_msg(timeout=0.02))
            except queue.Empty: pass

    def _take(self, message):
        kind, content = message['msg_type'], message['content']
        if kind == 'comm_open': self.models[content['comm_id']] = dict(content['data'].get('state', {}))
        elif kind == 'comm_msg' and content['data'].get('method') == 'update': self.models.setdefault(content['comm_id'], {}).update(content['data']['state'])
        elif kind in ('display_data', 'execute_result'): self.shown.append(content['data'].get('application/vnd.jupyter.widget-view+json', {}).get('model_id'))
        elif kind == 'stream': self.texts.append(content['text'])
        elif kind == 'error': raise RuntimeError('\n'.join(content['traceback']))

    def statuses(self): return {m['_dom_classes'][0]: m['value'][-400:] for m in self.models.values() if m.get('_dom_classes') and m['_dom_classes'][0] in ('it-status', 'it-progress', 'it-count')}
    def id(self, mark): return [i for i, m in self.models.items() if f'it-{mark}' in m.get('_dom_classes', ())][-1] # of the newest panel
    def state(self, mark): return self.models[self.id(mark)]
    def value(self, mark): return self.state(mark)['value']
    def execute(self, code): self.client.execute(code)

    def answer(self, expression):
        "Seconds until another cell has answered"
        n, begin = len(self.texts), time.monotonic()
        self.execute(f'print({expression})')
        self.pump(30, lambda: len(self.texts) > n)
        return time.monotonic() - begin

    def _send(self, mark, **data): self.client.shell_channel.send(self.client.session.msg('comm_msg', dict(comm_id=self.id(mark), data=data)))
    def click(self, mark): self._send(mark, method='custom', content={'event': 'click'})
    def set(self, mark, **state): self._send(mark, method='update', state=state, buffer_paths=[])

    def close(self):
        self.client.stop_channels()
        self.manager.shutdown_kernel(now=True)
