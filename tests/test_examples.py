"The notebooks for rented machines, in a plain kernel: what is Colab's or Kaggle's own is passed over, everything else is run"
import json
from pathlib import Path

import nbformat
import pytest
from nbclient import NotebookClient

EXAMPLES = Path(__file__).parents[1]/'examples'


@pytest.mark.parametrize('name', ['colab', 'kaggle'])
def test_an_example_notebook_runs(toy, tmp_path, monkeypatch, name):
    for key, value in {'MODEL_ID': toy, 'BUCKET_ID': tmp_path/'bucket', 'THREADS': 1}.items(): monkeypatch.setenv(key, str(value))
    notebook = nbformat.read(EXAMPLES/f'{name}.ipynb', 4)
    assert not any(cell.get('outputs') for cell in notebook.cells)
    NotebookClient(notebook, timeout=120, kernel_name='python3', resources={'metadata': {'path': str(tmp_path)}}).execute()
    shown = [output for cell in notebook.cells for output in cell.get('outputs', ())]
    assert sum('application/vnd.jupyter.widget-view+json' in o.get('data', {}) for o in shown) == 1 and not any(o.output_type == 'error' for o in shown)
    assert '| trained |' in shown[-2]['data']['text/markdown'] and 'checkpoint-1-' in shown[-1]['data']['text/plain'], 'one row, one step'
    assert json.loads((tmp_path/'bucket'/'state.json').read_text())['global_step'] == 1
