"""Names on the Hub, asked by the real client of a stand-in on loopback."""

import json

import pytest

from jaxrl.data.hub import HubName, parse_name
from tests.hub_stub import TOKEN, HubRepository, commit_of, serve_hub

LOAD_ROWS = """
import sys
from jaxrl.component_calls import ConfigError
from jaxrl.data.row_sources import describe_row, load_rows
for source in sys.argv[1:]:
  name, _, split = source.partition(' ')
  try:
    rows = load_rows(name, split or 'train')
    print([row['n'] for row in rows], describe_row(rows, 0, ''))
  except ConfigError as error:
    print(error)
"""
FIND = """
import os, sys
from jaxrl.component_calls import ConfigError
from jaxrl.data.hub import find_checkpoint
for name in sys.argv[1:]:
  try:
    folder = find_checkpoint(name.strip('!'), only_config=name.endswith('!'))
    found = [os.path.join(at, f) for at, _, files in os.walk(folder) for f in files]
    print(sorted(os.path.relpath(file, folder) for file in found))
  except ConfigError as error:
    print(error)
"""


def rows(*numbers):
  return '\n'.join(json.dumps({'n': n}) for n in numbers).encode()


@pytest.fixture
def hub(tmp_path):
  with serve_hub(tmp_path / 'cache') as stub:
    readme = b'---\nconfigs:\n'
    for config in ('main', 'socratic'):
      readme += f'- config_name: {config}\n  data_files:\n'.encode()
      for split in ('train', 'test'):
        readme += f'  - split: {split}\n    path: {config}/{split}-*\n'.encode()
    files = {
      'README.md': readme + b'---\n',
      'main/train-0.jsonl': rows(1, 2),
      'main/test-0.jsonl': rows(3),
      'socratic/train-0.jsonl': rows(4),
      'socratic/test-0.jsonl': rows(5),
    }
    old = {'train.jsonl': rows(0)}
    stub.datasets['openai/gsm8k'] = HubRepository(files, {'v1': old, 'refs/pr/1': old})
    stub.datasets['me/secret'] = HubRepository({'data.csv': b'n\n7\n'}, is_private=True)
    stub.datasets['me/gated'] = HubRepository({'data.csv': b'n\n8\n'}, is_gated=True)
    stub.datasets['old/script'] = HubRepository({'script.py': b'', 'README.md': b''})
    yield stub


@pytest.mark.parametrize(
  ('text', 'name'),
  [
    ('Qwen/Qwen3-0.6B', HubName('Qwen/Qwen3-0.6B')),
    ('openai/gsm8k:main', HubName('openai/gsm8k', '', 'main')),
    ('a/b@v1.0:c/d', HubName('a/b', 'v1.0', 'c/d')),
    ('a/b@refs/convert/parquet', HubName('a/b', 'refs/convert/parquet')),
    ('https://huggingface.co/Qwen/Qwen3-0.6B', HubName('Qwen/Qwen3-0.6B')),
    ('https://huggingface.co/datasets/openai/gsm8k', HubName('openai/gsm8k')),
    ('data/train.jsonl', None),
    ('data/train.JSONL.gz', None),
    ('./a/b', None),
    ('/a/b', None),
    ('~/a', None),
    ('../a/b', None),
    ('a/b/c', None),
    ('gpt2', None),
    ('', None),
  ],
)
def test_what_may_be_a_name(text, name):
  assert parse_name(text) == name


def outputs(stub, code, *arguments, **env):
  done = stub.run('-c', code, *arguments, **env)
  assert done.returncode == 0, done.stderr
  return done.stdout.splitlines()


def test_rows_by_name_split_configuration_and_revision(hub):
  found = outputs(
    hub,
    LOAD_ROWS,
    *('openai/gsm8k:main', 'openai/gsm8k:main test', 'openai/gsm8k:socratic test'),
    *('openai/gsm8k@v1', 'openai/gsm8k@refs/pr/1'),
    f'openai/gsm8k@{commit_of(hub.datasets["openai/gsm8k"].tags["v1"])}',
    'https://huggingface.co/datasets/openai/gsm8k:main',
  )
  assert found == [
    '[1, 2] openai/gsm8k/main/train-0.jsonl, row 0',
    '[3] openai/gsm8k/main/test-0.jsonl, row 0',
    '[5] openai/gsm8k/socratic/test-0.jsonl, row 0',
    '[0] openai/gsm8k@v1/train.jsonl, row 0',
    '[0] openai/gsm8k@refs/pr/1/train.jsonl, row 0',
    found[5],
    '[1, 2] openai/gsm8k/main/train-0.jsonl, row 0',
  ]
  assert found[5].startswith('[0] openai/gsm8k@')
  assert 'socratic/train-0.jsonl' not in hub.downloads  # which nobody asked for


def test_each_failure_is_one_line(hub):
  wrong = {
    'openai/gsm8k': ['several data sets (main, socratic)', 'openai/gsm8k:main'],
    'openai/gsm8k:mian': ["no part 'mian'", 'main, socratic'],
    'openai/gsm8k:main validation': ["no split 'validation'", 'test, train'],
    'openai/gsm9k': ['there is no file or folder openai/gsm9k', 'no such dataset'],
    'openai/gsm8k@v9': ["has no revision 'v9'"],
    'me/secret': ['no such dataset', 'HF_TOKEN'],
    'me/gated': ['is gated', '/datasets/me/gated', 'HF_TOKEN'],
    'old/script': ['loading script is not run', 'old/script@refs/convert/parquet'],
  }
  lines = outputs(hub, LOAD_ROWS, *wrong)
  assert len(lines) == len(wrong)
  for line, words in zip(lines, wrong.values(), strict=True):
    for word in words:
      assert word in line


def test_a_token_opens_what_is_private_or_gated(hub):
  found = outputs(hub, LOAD_ROWS, 'me/secret', 'me/gated', HF_TOKEN=TOKEN)
  assert found == ["['7'] me/secret/data.csv, row 0", "['8'] me/gated/data.csv, row 0"]


@pytest.mark.slow
def test_without_a_connection_the_cache_is_used(hub):
  names = ('openai/gsm8k:main', 'openai/gsm8k@v1')
  first = outputs(hub, LOAD_ROWS, *names)
  hub.downloads.clear()
  assert outputs(hub, LOAD_ROWS, *names) == first
  assert not hub.downloads
  offline = outputs(hub, LOAD_ROWS, *names, HF_HUB_OFFLINE='1')
  assert offline == first
  nowhere = outputs(hub, LOAD_ROWS, *names, HF_ENDPOINT='http://127.0.0.1:9')
  assert nowhere == first
  (line,) = outputs(hub, LOAD_ROWS, 'a/b', HF_HUB_OFFLINE='1')
  assert 'not in the cache, and HF_HUB_OFFLINE is set' in line
  (line,) = outputs(hub, LOAD_ROWS, 'a/b', HF_ENDPOINT='http://127.0.0.1:9')
  assert 'http://127.0.0.1:9 cannot be reached' in line
  (line,) = outputs(hub, LOAD_ROWS, 'openai/gsm8k:main test', HF_HUB_OFFLINE='1')
  assert 'the Hub cannot be reached' in line
  hub.status = 503
  (line,) = outputs(hub, LOAD_ROWS, 'a/b')
  assert 'it answers 503' in line


def test_a_folder_of_the_same_name_goes_first(hub, tmp_path):
  folder = tmp_path / 'openai' / 'gsm8k'
  folder.mkdir(parents=True)
  (folder / 'train.jsonl').write_bytes(rows(9))
  code = f'import os; os.chdir({str(tmp_path)!r})\n' + LOAD_ROWS
  assert outputs(hub, code, 'openai/gsm8k') == ['[9] openai/gsm8k/train.jsonl, row 0']


def model_files(**more):
  names = ('config.json', 'tokenizer.json', 'tokenizer_config.json', 'README.md')
  names += ('generation_config.json', 'chat_template.jinja', 'onnx/model.onnx')
  return {**dict.fromkeys(names, b'{}'), 'pytorch_model.bin': b'x', **more}


def test_only_what_is_needed_of_a_model_is_downloaded(hub):
  index = json.dumps({'weight_map': {'a': 'model-1.safetensors', 'b': 'x.safetensors'}})
  whole = dict.fromkeys(('model.safetensors', 'original/model.safetensors'), b'w')
  names = ('model-1.safetensors', 'x.safetensors', 'y.safetensors')
  parts = {'model.safetensors.index.json': index.encode(), **dict.fromkeys(names, b'')}
  hub.models['a/whole'] = HubRepository(model_files(**whole))
  hub.models['a/parts'] = HubRepository(model_files(**parts))
  hub.models['a/bin'] = HubRepository(model_files())
  hub.models['a/none'] = HubRepository({'README.md': b''})
  names = ('a/whole!', 'a/whole', 'a/parts', 'a/bin', 'a/none', 'a/absent')
  config, whole, parts, only_bin, none, absent = outputs(hub, FIND, *names)
  small = [
    *('chat_template.jinja', 'config.json', 'generation_config.json'),
    *('tokenizer.json', 'tokenizer_config.json'),
  ]
  assert config == "['config.json']"
  assert eval(whole) == sorted([*small, 'model.safetensors'])
  index = 'model.safetensors.index.json'
  assert eval(parts) == sorted([*small, 'model-1.safetensors', index, 'x.safetensors'])
  assert 'no model.safetensors, but pytorch_model.bin' in only_bin
  assert 'a/none on the Hub holds no config.json' in none
  assert 'there is no folder a/absent' in absent and 'no such model' in absent
