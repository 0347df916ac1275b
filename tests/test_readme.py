"""Every code block of README.md is run, as a newcomer would type it.

Its tables, links and figures are compared with what they speak of.
"""

import ast
import pathlib
import re
import shlex
import sys

import pytest

from jaxrl.algorithms import registry
from jaxrl.component_calls import parse_calls
from jaxrl.data.curricula import CURRICULA
from jaxrl.data.samplers import SAMPLERS
from jaxrl.options import check_options
from jaxrl.rollout.engine.jax_engine import JaxEngine
from jaxrl.rollout.queue.group_filters import GROUP_FILTERS
from jaxrl.rollout.queue.reward_shaping import REWARD_SHAPERS
from jaxrl.rollout.vllm import vllm_options
from jaxrl.rollout.weights import weight_sync
from jaxrl.rollout.weights.publisher import ObjectStoreOptions
from jaxrl.training import staleness
from jaxrl.user_code import import_object
from launch.settings.cluster_settings import PLACEMENTS
from tests.docs.blocks import BLOCK, check_make, lay_out, run
from tests.structure import readme_tables

ROOT = pathlib.Path(__file__).resolve().parents[1]
README = (ROOT / 'README.md').read_text()
BLOCKS = BLOCK.findall(README)


@pytest.fixture(scope='module')
def place(tmp_path_factory):
  """A folder like a checkout's, into which the files of the README are written."""
  folder = tmp_path_factory.mktemp('readme')
  lay_out(folder, BLOCKS)
  return folder


def lines(kind: str) -> list[str]:
  texts = [text for block_kind, text in BLOCKS if block_kind == kind]
  return [line for text in texts for line in text.strip().splitlines()]


def test_every_block_is_of_a_kind_that_is_tested():
  assert {kind for kind, _ in BLOCKS} == {'sh', 'python', 'mermaid', ''}


def in_test_all(line):
  """Returns whether a command or block takes long, so that `make test-all` runs it."""
  return any(name in line for name in ('launch.train', 'launch.play', 'DeviceThread'))


@pytest.mark.parametrize(
  'line',
  [
    pytest.param(line, marks=pytest.mark.slow if in_test_all(line) else ())
    for line in lines('sh')
  ],
)
def test_command(line, place):
  words = shlex.split(line)
  if words[0] == 'make':
    check_make(words)
    return
  if words[0] == 'source':
    assert words[1:] == ['.venv/bin/activate']  # what `make env` creates
    return
  assert words[0] == 'python'
  if words[1].startswith('examples/'):  # the test of that name runs this command
    assert (ROOT / 'tests/examples' / f'test_{pathlib.Path(words[1]).name}').exists()
    return
  assert words[1] == '-m'
  if words[-1] == '--config=configs/smollm2.py':  # which needs the Hub
    assert words[-1] in (ROOT / 'tests/launch/test_real_models.py').read_text()
    return
  out = run([sys.executable, *words[1:]], place)
  if 'launch.train' in line:
    assert 'Finished.' in out


@pytest.mark.parametrize(
  'text',
  [
    pytest.param(t, marks=pytest.mark.slow if in_test_all(t) else ())
    for kind, t in BLOCKS
    if kind == 'python' and not t.startswith('# ')
  ],
)
def test_python_block_runs(text, place):
  assert run([sys.executable, '-c', text], place).strip()


def listed_calls(heading):
  """Names and options of the calls in the table below a heading."""
  section = README.partition(f'## {heading}')[2]
  table = section.partition('| key |')[2].partition('\n\n')[0]
  calls = re.findall(r"`'(.*?)'`", table)
  return [call for text in calls for call in parse_calls(text)]


def test_the_call_strings_of_algorithms_name_what_there_is():
  modules = dict.fromkeys(registry.COMPONENT_MODULES.values())
  known = {
    k: v for module in modules for k, v in registry.components_in(module).items()
  }
  known |= {**SAMPLERS, **GROUP_FILTERS, **REWARD_SHAPERS, **CURRICULA}
  calls = listed_calls('Algorithms')
  for call in calls:
    name, options = call.name, call.options
    part = known[name]
    if isinstance(part, str):  # where it is, so that only its file is imported
      part = import_object(part)
    check_options(part, options, name)
  assert len(calls) > 12


def test_the_call_strings_of_processes_name_what_there_is():
  known = {**PLACEMENTS, **weight_sync.SYNC_POLICIES, **staleness.STALENESS_POLICIES}
  known |= {'jax': JaxEngine, 'object_store': ObjectStoreOptions}
  calls = listed_calls('Scaling')
  for call in calls:
    name, options = call.name, call.options
    if name == 'vllm':  # which need not be installed here
      vllm_options.check_vllm_options(options, name)
    else:
      check_options(known[name], options, name)
  assert len(calls) == 6


def test_the_tree_in_the_readme_is_the_tree():
  (listing,) = [text for kind, text in BLOCKS if kind == '']
  for name in re.findall(r'([\w/]+(?:/|\.py))(?=\s)', listing):
    assert (ROOT / name).exists(), name


def test_the_generated_tables_are_those_of_the_code():
  """`python -m tests.structure.readme_tables` writes them."""
  assert readme_tables.generated(README) == README


def test_every_link_leads_somewhere():
  for name in ('README.md', 'CONTRIBUTING.md', 'AGENTS.md', 'docs/concepts.md'):
    file = ROOT / name
    for target in re.findall(r'\]\((?!https?:)([^)#]+)', file.read_text()):
      assert (file.parent / target).exists(), f'{name}: {target}'


def test_every_page_is_in_the_index():
  index = README.partition('## Documentation')[2]
  for page in (ROOT / 'docs').glob('*.md'):
    assert f'(docs/{page.name})' in index, page.name


def test_every_extra_is_listed():
  tree = ast.parse((ROOT / 'setup.py').read_text())
  (extras,) = [
    ast.literal_eval(node.value)
    for node in tree.body
    if isinstance(node, ast.Assign) and ast.unparse(node.targets[0]) == 'EXTRAS'
  ]
  table = README.partition('| extra |')[2].partition('\n\n')[0]
  rows = [line.split('|')[1] for line in table.splitlines()[2:]]
  assert {name for row in rows for name in re.findall(r'`([^`]+)`', row)} == set(extras)


def test_every_config_is_listed():
  table = README.partition('| config |')[2].partition('\n\n')[0]
  files = [path.name for path in (ROOT / 'configs').glob('[a-z]*.py')]
  for name in set(files) - {'base.py'}:
    short = re.sub(r'^qwen3(?!_0)(\w+)\.py', r'\1', name)
    assert f'`{short}`' in table, name


def test_benchmark_figures_are_those_of_the_measurement():
  section = README.partition('## Benchmarks')[2].partition('\n## ')[0]
  rows = [line for line in section.splitlines() if line.startswith('|')]
  measured = (ROOT / 'docs' / 'performance.md').read_text().splitlines()
  assert len(rows) > 4
  assert set(rows) <= set(measured)
