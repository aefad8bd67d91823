"Write README.md from nbs/index.ipynb (`nbdev-readme` needs a quarto binary); with --check, only say whether it is up to date"
import json
import re
import sys
from pathlib import Path


def output(out):
    "The text of one cell output, markdown as it is, plain text in a fence"
    data = out.get('data', {})
    if 'text/markdown' in data: return ''.join(data['text/markdown'])
    text = ''.join(data.get('text/plain') or out.get('text', [])).rstrip()
    return f'```\n{text}\n```' if text else ''


def blocks(notebook):
    "Prose, code and outputs of the cells that are not hidden, as markdown"
    for cell in notebook['cells']:
        source = ''.join(cell['source'])
        if re.search(r'^#\|\s*hide\b', source, re.M): continue
        code = re.sub(r'^#\|.*\n?', '', source, flags=re.M).strip()
        if cell['cell_type'] == 'markdown': yield code
        elif code: yield f'```python\n{code}\n```'
        yield from filter(None, map(output, cell.get('outputs', [])))


if __name__ == '__main__':
    text = '\n\n'.join(filter(None, blocks(json.loads(Path('nbs/index.ipynb').read_text(encoding='utf-8'))))) + '\n'
    if sys.argv[1:] != ['--check']: Path('README.md').write_text(text, encoding='utf-8')
    elif Path('README.md').read_text(encoding='utf-8') != text: sys.exit('README.md is not what nbs/index.ipynb gives; run `python .ci/readme.py`')
