"What the tests share: a toy model in a folder, and settings for a bucket beside it"
import os

import pytest

if 'PYTEST_XDIST_WORKER' in os.environ: os.environ.setdefault('OMP_NUM_THREADS', '1') # a core for each process; read when torch is imported
os.environ.update(HF_HUB_OFFLINE='1', HF_HUB_DISABLE_TELEMETRY='1', TOKENIZERS_PARALLELISM='false')

from incremental_train.config import load_config
from incremental_train.toy import toy_model


@pytest.fixture(scope='session')
def toy(tmp_path_factory):
    "The folder of a seeded tiny model"
    return toy_model(tmp_path_factory.mktemp('toy'))


@pytest.fixture
def settings(toy, tmp_path):
    "Makes a `Config` for a bucket of this test"
    defaults = dict(model_id=str(toy), bucket_id=str(tmp_path/'bucket'), learning_rate=1e-2, queue_persist=True, threads=1)
    return lambda **changes: load_config({}, **{**defaults, **changes})
