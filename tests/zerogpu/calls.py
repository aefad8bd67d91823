"A process with the stand-in on its path. Reads scenarios (settings, traces by id, limits) and drains a session whose queue is in memory, once per limit, the card being lent; prints what came of each"
import json
import sys

import torch

from incremental_train.config import Refused, load_config
from incremental_train.session import Session


def drained(session, limit):
    "What came of one drain of at most `limit` seconds"
    told = []
    try: done = session.drain(limit, watch=lambda event: told.append(str(event))).summary()
    except Refused as e: done = {'refused': str(e)}
    return done | {'told': told, 'queue': [job.id for job in session.queue], 'status': session.status()}


def played(settings, traces, limits):
    "One scenario"
    session = Session(load_config({}, **settings))
    for id, rows in traces.items(): session.submit(rows, id=id)
    return [drained(session, limit) for limit in limits] + [{'loaded': session._state is not None, 'cuda': torch.cuda.is_initialized()}]


torch.set_num_threads(2)
torch.randn(1000, 1000) @ torch.randn(1000, 1000) # OpenMP's threads are there, and will not be in a fork
print(json.dumps([played(*scenario) for scenario in json.load(sys.stdin)]))
