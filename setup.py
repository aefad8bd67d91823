"Package metadata, read from settings.ini (the one place that holds it)"
from configparser import ConfigParser
from pathlib import Path

from setuptools import setup

ini = ConfigParser(delimiters=['='])
ini.read('settings.ini', encoding='utf-8')
s = ini['DEFAULT']

setup(name=s['lib_name'], description=s['description'], keywords=s['keywords'],
      author=s['author'], author_email=s['author_email'], url=s['git_url'], license='Apache-2.0',
      python_requires=f">={s['min_python']}", packages=[s['lib_path']],
      install_requires=s['requirements'].split(), extras_require={'dev': f"{s['dev_requirements']} {s['ray_requirements']}".split(), 'ray': s['ray_requirements'].split()},
      classifiers=['Programming Language :: Python :: 3'],
      long_description=Path('README.md').read_text(encoding='utf-8'), long_description_content_type='text/markdown',
      entry_points={'console_scripts': s['console_scripts'].splitlines(),
                    'nbdev': [f"{s['lib_path']}={s['lib_path']}._modidx:d"]})
