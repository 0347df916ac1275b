"""Tests of the design's rules, read off the source."""

import ast
import collections
import os
import pathlib
import re
import subprocess
import sys

import pytest

from tests.mutation.faults import FAULTS
from tests.structure.imports import (
  PACKAGES,
  ROOT,
  first_party,
  imported,
  modules,
  nodes,
  tree,
)

SOURCE = {name: f for name, f in modules().items() if not name.startswith('tests')}

# A package may import from its own level and from the levels above it in this list.
LEVELS = [
  {'kernels'},
  {
    'jaxrl',
    'jaxrl.component_calls',
    'jaxrl.component_table',
    'jaxrl.config',
    'jaxrl.device_thread',
    'jaxrl.group_stats',
    'jaxrl.options',
    'jaxrl.spans',
    'jaxrl.types',
    'jaxrl.user_code',
  },
  {'jaxrl.functional'},
  {'jaxrl.algorithms'},
  {'jaxrl.models'},
  {'jaxrl.training'},
  {'jaxrl.data'},
  {'jaxrl.envs'},
  {'jaxrl.rollout'},
  {'jaxrl.loop', 'jaxrl.model_loading'},
  {'jaxrl.run_options'},
  {'configs'},
  {'launch'},
  {'examples', 'recipes'},
]
# The folders of `launch` in the same way; only commands import the last two.
FOLDERS = (
  'settings',
  'logging',
  'learner',
  'runtime',
  'rollouts',
  'planning',
  'report',
)
LEAVES = FOLDERS[-2:]
MAX_FILE_LINES = 600
# What a model, the authors of a data set, or vLLM have written; no settings.
READS_CODE = {
  'jaxrl.envs.coding.hidden_tests',
  'jaxrl.envs.reply_parsing',
  'jaxrl.envs.terminal.swe_env',
  'jaxrl.envs.tools.python_repl',
  'jaxrl.rollout.vllm.vllm_options',
}
MAX_FUNCTION_LINES = 60  # of the body, without its docstring
MAX_ENTRIES = 19  # of a directory, besides BUILD, __init__ and __main__
# One file for each entry.
CATALOGUES = {
  *('configs', 'jaxrl/algorithms/presets', 'jaxrl/models/families'),
  'recipes/catalogue',
}
# 8 of them know how templates write calls, 9 are for kernels in C.
MAX_MODULES_BEFORE_STEP_1 = 210
MAX_MODULES_OF_THE_EXAMPLE = 103  # that examples/grpo_minimal.py imports
MAX_RAW_CONFIG_FUNCTIONS = 12
MAX_LINES_WITH_ANY = 1300  # of the packages below `examples`

# Tell people or other programs the time of day, which may be set back meanwhile.
READS_WALL_CLOCK = {
  'jaxrl.rollout.gateway.http_server',
  'jaxrl.rollout.weights.transport',  # of files, which have no other time
  # What clients see, and what must hold beyond the process.
  'jaxrl.rollout.tinker.checkpoint_store',
  'jaxrl.rollout.tinker.sessions',
  'jaxrl.rollout.tinker.rest_routes',
  'jaxrl.rollout.tinker.training_service',
  'launch.logging.metric_sinks',
  'launch.logging.step_trace',  # of several machines
  'launch.report.run_folders',  # of files
}
GLOBAL_DRAWS = frozenset(
  'seed rand randn randint random choice shuffle permutation normal uniform'.split()
)


def package_of(name: str) -> str:
  parts = name.split('.')
  return '.'.join(parts[:2]) if parts[0] == 'jaxrl' else parts[0]


def level_of(name: str) -> int:
  for level, packages in enumerate(LEVELS):
    if package_of(name) in packages:
      return level
  raise AssertionError(f'{name}: give it a level in LEVELS')


def functions():
  for name, file in SOURCE.items():
    for node in nodes(file):
      if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef):
        yield name, node


def test_imports_point_downward():
  upward = [
    f'{name} imports {other}'
    for name, file in SOURCE.items()
    for other in first_party(file)
    if other.startswith('tests') or level_of(other) > level_of(name)
  ]
  assert not upward, upward


def test_folders_of_launch_import_each_other_in_one_direction():
  upward = []
  for name, file in SOURCE.items():
    folder = folder_of(name)
    if not folder:
      continue
    for other in sorted(first_party(file)):
      if not other.startswith('launch.') or folder_of(other) == folder:
        continue
      place = FOLDERS.index(folder_of(other)) if folder_of(other) else len(FOLDERS)
      if place > FOLDERS.index(folder) or folder_of(other) in LEAVES:
        upward.append(f'{name} imports {other}')
  assert not upward, upward


def folder_of(name: str) -> str:
  parts = name.split('.')
  return parts[1] if parts[0] == 'launch' and parts[1:2] and parts[1] in FOLDERS else ''


def test_there_are_no_import_cycles():
  """Not even of modules that name each other's types."""
  graph = {name: first_party(file) for name, file in SOURCE.items()}
  done: set[str] = set()

  def visit(name: str, path: tuple[str, ...]) -> None:
    assert name not in path, f'cycle: {" → ".join([*path, name])}'
    if name in done:
      return
    for other in sorted(graph[name]):
      visit(other, (*path, name))
    done.add(name)

  for name in graph:
    visit(name, ())


@pytest.mark.parametrize(
  ('package', 'home'),
  [
    ('ray', 'launch/runtime/'),
    ('vllm', 'jaxrl/rollout/vllm/'),
    ('torch', 'jaxrl/rollout/vllm/'),
  ],
)
def test_heavy_packages_are_imported_in_one_place(package, home):
  for name, file in SOURCE.items():
    heads = {other.split('.')[0] for other in imported(file)}
    place = file.relative_to(ROOT).as_posix()
    assert package not in heads or place.startswith(home), f'{name} imports {package}'


def test_no_kernel_goes_through_triton():
  """Which Pallas deprecates. A kernel that is lowered for a GPU may go through it."""
  for name, file in modules().items():
    for node in nodes(file):
      names = []
      if isinstance(node, ast.Import | ast.ImportFrom):
        module = f'{node.module}.' if isinstance(node, ast.ImportFrom) else ''
        names = [f'{module}{alias.name}' for alias in node.names]
      for full in names:
        short = full.removeprefix('jax.experimental.pallas.')
        gone = short.startswith(('triton', 'ops.gpu')) and short != full
        assert not gone, f'{name} imports {full}'
      calls = isinstance(node, ast.Attribute) and node.attr == 'pallas_call'
      assert not calls or file.stem.endswith('_tpu'), f'{name} calls pallas_call'


def test_the_library_imports_without_heavy_packages():
  code = (
    'import sys, jaxrl, jaxrl.loop, jaxrl.functional\n'
    "print([m for m in ('ray', 'vllm', 'torch') if m in sys.modules])"
  )
  done = subprocess.run([sys.executable, '-c', code], capture_output=True, text=True)
  assert done.stdout.strip() == '[]', done.stdout + done.stderr


def test_commands_are_imported_without_jax():
  """So that errors in a command line are told at once, and the tuning comes first."""
  commands = ('train', 'rollout', 'evaluate', 'play', 'serve', 'plan')
  code = (
    'import importlib, sys\n'
    f'for name in {commands}:\n'
    "  importlib.import_module(f'launch.{name}')\n"
    "  assert 'jax' not in sys.modules, name\n"
  )
  done = subprocess.run([sys.executable, '-c', code], capture_output=True, text=True)
  assert done.returncode == 0, done.stderr


def test_files_have_readable_sizes():
  lines = {name: file.read_text().count('\n') for name, file in SOURCE.items()}
  assert {n: c for n, c in lines.items() if c > MAX_FILE_LINES} == {}


def test_functions_have_readable_sizes():
  long = []
  for name, node in functions():
    body = node.body[1:] if ast.get_docstring(node) else node.body
    count = (node.end_lineno or 0) - body[0].lineno + 1 if body else 0
    if count > MAX_FUNCTION_LINES:
      long.append(f'{name}.{node.name}: {count} lines')
  assert not long, long


def test_directories_have_few_entries():
  entries = collections.defaultdict(set)
  for file in SOURCE.values():
    parts = file.relative_to(ROOT).parts
    for depth in range(1, len(parts)):
      if parts[depth] not in ('__init__.py', '__main__.py'):
        entries['/'.join(parts[:depth])].add(parts[depth])
  crowded = {
    folder: len(names)
    for folder, names in entries.items()
    if len(names) > MAX_ENTRIES and folder not in CATALOGUES
  }
  assert not crowded, crowded


def test_module_names_are_unique():
  stems = collections.defaultdict(list)
  for file in SOURCE.values():
    place = file.relative_to(ROOT).as_posix()
    is_special = file.stem in ('__init__', '__main__')
    if not is_special and not place.startswith(tuple(CATALOGUES)):
      stems[file.stem].append(place)
  assert {k: v for k, v in stems.items() if len(v) > 1} == {}


def test_class_names_are_unique():
  places = collections.defaultdict(list)
  for name, file in SOURCE.items():
    for node in tree(file).body:
      if isinstance(node, ast.ClassDef) and not node.name.startswith('_'):
        places[node.name].append(name)
  assert {k: v for k, v in places.items() if len(v) > 1} == {}


def test_few_functions_take_a_raw_config():
  config_functions = []
  for name, node in functions():
    arguments = [*node.args.args, *node.args.kwonlyargs]
    kinds = [ast.unparse(a.annotation) for a in arguments if a.annotation is not None]
    raw = {'Config', 'ConfigDict'} & set(kinds)
    untyped = [a for a in arguments if a.arg == 'config' and a.annotation is not None]
    raw |= {a.arg for a in untyped if ast.unparse(a.annotation) == 'Any'}
    if raw and name.startswith('launch'):
      config_functions.append(f'{name}.{node.name}')
  assert len(config_functions) <= MAX_RAW_CONFIG_FUNCTIONS, config_functions


def test_few_lines_say_any():
  """A class, a protocol or an alias says more, and `object` is checked."""
  packages = ('kernels', 'jaxrl', 'configs', 'launch')
  count = sum(
    len(re.findall(r'^.*\bAny\b.*$', file.read_text(), re.M))
    for name, file in SOURCE.items()
    if name.startswith(packages)
  )
  assert count <= MAX_LINES_WITH_ANY


def test_calls_are_read_in_one_module():
  bad = []
  for name, file in SOURCE.items():
    if name in ('jaxrl.component_calls', 'launch.settings.command_line', *READS_CODE):
      continue
    calls = [n.func for n in nodes(file) if isinstance(n, ast.Call)]
    readers = {'eval', 'literal_eval', 'ast.literal_eval', 'ast.parse'}
    bad += [f'{name}: {text}' for text in map(ast.unparse, calls) if text in readers]
  assert not bad


def test_the_library_knows_no_command_line():
  """Its errors name options: `launch` writes them as flags."""
  flag = re.compile(r'--(?:config|workdir|group_size)\b')
  for name, file in SOURCE.items():
    if name.startswith('jaxrl.'):
      lines = file.read_text().splitlines()
      # An option of a program that a sandbox runs.
      found = [x for x in lines if flag.search(x) and 'workdir={' not in x]
      assert not found, (name, found)


def test_docstrings_of_functions_begin_with_a_verb():
  """In the third person, as in 'Returns'; properties are named as what they are."""
  bad = []
  for name, node in functions():
    text, marks = ast.get_docstring(node), map(ast.unparse, node.decorator_list)
    if not text or any('property' in mark for mark in marks):
      continue
    if not re.match(r'[A-Z][a-z-]+s\b', text):
      bad.append(f'{name}.{node.name}: {text.splitlines()[0]}')
  assert not bad, bad


def test_no_global_random_numbers():
  """Nothing draws from numpy's or Python's process-wide generators."""
  bad = []
  for name, file in SOURCE.items():
    for node in nodes(file):
      if isinstance(node, ast.Call):
        call = ast.unparse(node.func)
        numpys = call.startswith(('np.random.', 'numpy.random.'))
        if numpys and call.split('.')[2] in GLOBAL_DRAWS:
          bad.append(f'{name}:{node.lineno} {call}')
        if call.startswith('random.') and call != 'random.Random':
          bad.append(f'{name}:{node.lineno} {call}')
  assert not bad, bad


def test_waits_and_durations_use_a_clock_that_is_never_set():
  clocks = ('time.time', 'time.time_ns', 'now', 'utcnow', 'today')
  readers = {
    name
    for name, file in SOURCE.items()
    for node in nodes(file)
    if isinstance(node, ast.Attribute) and isinstance(node.ctx, ast.Load)
    if ast.unparse(node) in clocks or node.attr in clocks
  }
  assert readers == READS_WALL_CLOCK


def test_cancellation_is_never_lost():
  """Timeouts use `asyncio.timeout`: 3.11's `wait_for` swallows cancellations."""
  bad = [
    f'{name}:{node.lineno}'
    for name, file in SOURCE.items()
    for node in nodes(file)
    if isinstance(node, ast.Attribute) and node.attr == 'wait_for'
    if ast.unparse(node.value) == 'asyncio'
  ]
  assert not bad, bad


def test_every_fault_of_the_mutation_check_can_be_planted():
  files = {name: file.read_text() for name, file in SOURCE.items()}
  code = '\0'.join(text for name, text in files.items() if name.startswith('jaxrl'))
  counts = {fault.before: code.count(fault.before) for fault in FAULTS}
  assert {before: n for before, n in counts.items() if n != 1} == {}
  named = {f'{stem}.py' for fault in FAULTS for stem in fault.tests}
  assert named <= {path.name for path in (ROOT / 'tests').rglob('test_*.py')}


def test_only_listed_houses_hold_code():
  strays = [
    file.relative_to(ROOT)
    for file in ROOT.glob('*/*.py')
    if file.parent.name not in (*PACKAGES, 'build')
  ]
  assert not strays, strays


COUNT_MODULES = """
import sys
from jaxrl import loop
from launch import train

def count(*arguments, **options):
  names = ('jaxrl', 'kernels', 'launch', 'configs')
  print('modules', sum(name.split('.')[0] in names for name in sys.modules))
  print('torch', 'torch' in sys.modules)
  raise SystemExit

loop.train = count
train.main(sys.argv[1:])
"""


def test_the_minimal_example_imports_few_modules():
  code = (
    'import sys\n'
    'from examples import grpo_minimal\n'
    "names = ('jaxrl', 'kernels', 'launch', 'configs')\n"
    "print(sum(name.split('.')[0] in names for name in sys.modules))"
  )
  done = subprocess.run(
    [sys.executable, '-c', code], cwd=ROOT, capture_output=True, text=True
  )
  assert done.returncode == 0, done.stderr
  assert int(done.stdout) <= MAX_MODULES_OF_THE_EXAMPLE


@pytest.mark.slow
def test_few_modules_are_imported_before_the_first_step(tmp_path: pathlib.Path):
  """What one process with one device imports for GRPO, up to the loop's first step."""
  done = subprocess.run(
    [
      sys.executable,
      '-c',
      COUNT_MODULES,
      '--config=configs/debug.py',
      '--config.sft.num_steps=0',
      f'--workdir={tmp_path / "run"}',
    ],
    cwd=ROOT,
    env={**os.environ, 'PYTHONPATH': str(ROOT), 'XLA_FLAGS': ''},
    capture_output=True,
    text=True,
  )
  lines = [line for line in done.stdout.splitlines() if line.startswith('modules ')]
  assert lines, done.stdout + done.stderr
  assert int(lines[0].split()[1]) <= MAX_MODULES_BEFORE_STEP_1
  assert 'torch False' in done.stdout.splitlines()
