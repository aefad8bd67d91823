"""A stand-in for the package `spaces` of ZeroGPU (0.51), with its manners: a call runs in a forked process, in a thread of it; arguments and result are
pickled; of an exception only the name of the class comes back; a call that outlives its duration is killed. Here a process has the card, which the CPU
plays, from the fork until its call has returned, and is then killed, so that nothing can go on with it. Outside of a call CUDA looks as if it were
there, as it does on ZeroGPU, and cannot be initialised. Each call is a line in the file that ZEROGPU_LOG names."""
import functools
import json
import multiprocessing
import os
import pickle
import threading
import time
from datetime import timedelta

import torch

fork = multiprocessing.get_context('fork')
available, initialise = torch.cuda.is_available, torch.cuda._lazy_init


def no_card(): raise RuntimeError('CUDA was touched outside of a call')


torch.cuda.is_available, torch.cuda._lazy_init = lambda: True, no_card


class Error(Exception):
    "As `gradio.Error`"


def GPU(task=None, *, duration=None, size=None):
    "Decorator, bare or with arguments; `duration` is seconds, a timedelta, or a function of the arguments that gives one"
    if task is None: return functools.partial(_gpu, duration=duration)
    return _gpu(task, duration) if callable(task) else functools.partial(_gpu, duration=task)


def _gpu(task, duration):
    @functools.wraps(task)
    def call(*args, **kwargs):
        asked = duration(*args, **kwargs) if callable(duration) else duration
        asked = asked.total_seconds() if isinstance(asked, timedelta) else 60 if asked is None else asked
        begin, (here, there) = time.monotonic(), fork.Pipe()
        process = fork.Process(target=_work, args=(task, pickle.dumps((args, kwargs)), there), daemon=True)
        process.start()
        there.close()
        answer = ('late', None)
        try:
            if here.poll(asked): answer = pickle.loads(here.recv_bytes())
        except EOFError: answer = ('dead', None)
        _log(task=task.__name__, asked=asked, seconds=time.monotonic() - begin, end=answer[0], pid=process.pid)
        process.kill()
        process.join()
        if answer[0] in ('late', 'dead'): raise Error('GPU task aborted')
        if answer[0] == 'error': raise Error(answer[1])
        return answer[1]
    return call


def _work(task, arguments, there):
    "In the forked process"
    torch.cuda.is_available, torch.cuda._lazy_init = available, initialise
    def run():
        args, kwargs = pickle.loads(arguments)
        try: answer = ('returned', task(*args, **kwargs))
        except Exception as e: answer = ('error', type(e).__name__)
        there.send_bytes(pickle.dumps(answer))
    thread = threading.Thread(target=run)
    thread.start()
    thread.join()
    time.sleep(60) # a worker stays for the next call, until it is killed


def _log(**call):
    if path := os.environ.get('ZEROGPU_LOG'):
        with open(path, 'a') as f: f.write(json.dumps(call) + '\n')
