"""Every code block of README.md is run, as a newcomer would type it."""

import os
import pathlib
import re
import shlex
import subprocess
import sys

import pytest

from jaxrl import signature
from jaxrl.algorithms import compose
from jaxrl.data import staleness
from jaxrl.data.curricula import CURRICULA
from jaxrl.data.samplers import SAMPLERS
from jaxrl.rollout import sync
from jaxrl.rollout.filters import FILTERS
from jaxrl.rollout.jax_engine import JaxEngine
from jaxrl.rollout.shapers import SHAPERS
from jaxrl.rollout.vllm import arguments
from jaxrl.rollout.weights.broadcast import BroadcastWeights
from launch import placement

ROOT = pathlib.Path(__file__).resolve().parents[1]
BLOCK = re.compile(r'^```(\w*)\n(.*?)^```', re.MULTILINE | re.DOTALL)
BLOCKS = [
  (kind, text) for kind, text in BLOCK.findall((ROOT / 'README.md').read_text())
]


@pytest.fixture(scope='module')
def place(tmp_path_factory):
  """A folder like a checkout's, into which the files of the README are written."""
  folder = tmp_path_factory.mktemp('readme')
  (folder / 'configs').symlink_to(ROOT / 'configs')
  for kind, text in BLOCKS:
    name = re.match(r'# (\w+\.py)\n', text)
    if kind == 'python' and name:
      (folder / name[1]).write_text(text)
  return folder


def run(command: list[str], folder: pathlib.Path) -> str:
  path = os.pathsep.join([str(ROOT), str(folder)])
  env = {**os.environ, 'PYTHONPATH': path, 'XLA_FLAGS': ''}
  done = subprocess.run(
    command, cwd=folder, env=env, capture_output=True, text=True, timeout=280
  )
  assert done.returncode == 0, f'{shlex.join(command)}\n{done.stdout}\n{done.stderr}'
  return done.stdout


def lines(kind: str) -> list[str]:
  texts = [text for found, text in BLOCKS if found == kind]
  return [line for text in texts for line in text.strip().splitlines()]


def test_every_block_is_of_a_kind_that_is_tested():
  assert {kind for kind, _ in BLOCKS} == {'sh', 'python', ''}


@pytest.mark.parametrize('line', lines('sh'))
def test_command(line, place):
  words = shlex.split(line)
  if words[0] == 'make':  # that they work is what running this suite, and .ci, shows
    done = subprocess.run(['make', '-n', *words[1:]], cwd=ROOT, capture_output=True)
    assert done.returncode == 0, done.stderr
    return
  assert words[:2] == ['python', '-m']
  out = run([sys.executable, *words[1:]], place)
  if 'launch.train' in line:
    assert 'Finished.' in out


@pytest.mark.parametrize(
  'text', [t for kind, t in BLOCKS if kind == 'python' and not t.startswith('# ')]
)
def test_python_block_runs(text, place):
  assert run([sys.executable, '-c', text], place).strip()


def call_strings(heading):
  """Those of the table below a heading: names and options."""
  section = (ROOT / 'README.md').read_text().partition(f'## {heading}')[2]
  table = section.partition('| key |')[2].partition('\n\n')[0]
  calls = re.findall(r"`'(.*?)'`", table)
  return [call for text in calls for call in signature.parse_calls(text)]


def test_the_call_strings_of_algorithms_name_what_there_is():
  modules = dict.fromkeys(compose.PARTS.values())
  known = {k: v for module in modules for k, v in compose.parts_of(module).items()}
  known |= {**SAMPLERS, **FILTERS, **SHAPERS, **CURRICULA}
  calls = call_strings('Algorithms')
  for name, options in calls:
    signature.check_options(known[name], options, name)
  assert len(calls) > 12


def test_the_call_strings_of_processes_name_what_there_is():
  known = {**placement.KINDS, **sync.STYLES, **staleness.BOUNDS}
  known |= {'jax': JaxEngine, 'object_store': BroadcastWeights}
  calls = call_strings('Many processes')
  for name, options in calls:
    if name == 'vllm':  # which need not be installed here
      arguments.check(options, name)
    else:
      signature.check_options(known[name], options, name)
  assert len(calls) == 6


def test_the_tree_in_the_readme_is_the_tree():
  (listing,) = [text for kind, text in BLOCKS if kind == '']
  for name in re.findall(r'([\w/]+(?:/|\.py))(?=\s)', listing):
    assert (ROOT / name).exists(), name
