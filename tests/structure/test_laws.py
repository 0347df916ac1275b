"""The laws of the house, read off the source."""

import ast
import statistics

import pytest

from tests.structure.imports import HOUSES, ROOT, first_party, imported, modules, tree

SOURCE = {n: f for n, f in modules().items() if not n.startswith('tests')}

# A room may import from its own floor's row and from those below it.
FLOORS = [
  {'kernels'},
  {'jaxrl', 'jaxrl.types', 'jaxrl.dispatch', 'jaxrl.signature', 'jaxrl.config'}
  | {'jaxrl.processors'},
  {'jaxrl.functional', 'jaxrl.data', 'jaxrl.envs', 'jaxrl.models'},
  {'jaxrl.algorithms', 'jaxrl.rollout'},
  {'jaxrl.training'},
  {'jaxrl.loop'},
  {'configs'},
  {'launch'},
]


GLOBAL_DRAWS = frozenset(
  'seed rand randn randint random choice shuffle permutation normal uniform'.split()
)


def room(name: str) -> str:
  parts = name.split('.')
  return '.'.join(parts[:2]) if parts[0] == 'jaxrl' else parts[0]


def floor(name: str) -> int:
  for level, rooms in enumerate(FLOORS):
    if room(name) in rooms:
      return level
  raise AssertionError(f'{name}: give it a floor in FLOORS')


def test_imports_run_downward():
  upward = [
    f'{name} imports {other}'
    for name, file in SOURCE.items()
    for other in first_party(file)
    if other.startswith('tests')
    or floor(other) > floor(name)
    or (floor(other) == floor(name) and floor(name) > 1 and room(other) != room(name))
  ]
  allowed = {('jaxrl.envs', 'jaxrl.data'), ('jaxrl.rollout', 'jaxrl.algorithms')}
  pairs = [line for line in upward if not _allowed(line, allowed)]
  assert not pairs, pairs


def _allowed(line: str, allowed: set[tuple[str, str]]) -> bool:
  name, other = line.split(' imports ')
  return (room(name), room(other)) in allowed


def test_no_import_circles():
  graph = {name: first_party(file) for name, file in SOURCE.items()}
  done: set[str] = set()

  def visit(name: str, path: tuple[str, ...]) -> None:
    assert name not in path, f'circle: {" → ".join([*path, name])}'
    if name in done:
      return
    for other in sorted(graph[name]):
      visit(other, (*path, name))
    done.add(name)

  for name in graph:
    visit(name, ())


@pytest.mark.parametrize(
  'package, home',
  [
    ('ray', 'launch/cluster/'),
    ('vllm', 'jaxrl/rollout/vllm/'),
    ('torch', 'jaxrl/rollout/vllm/'),
  ],
)
def test_heavy_packages_stay_in_one_place(package, home):
  for name, file in SOURCE.items():
    heads = {other.split('.')[0] for other in imported(file)}
    place = file.relative_to(ROOT).as_posix()
    assert package not in heads or place.startswith(home), f'{name} imports {package}'


def test_rooms_are_small():
  lines = {name: file.read_text().count('\n') for name, file in SOURCE.items()}
  assert {n: c for n, c in lines.items() if c > 400} == {}
  assert statistics.median(c for c in lines.values() if c > 1) <= 150


def test_functions_are_short():
  long = []
  for name, file in SOURCE.items():
    for node in ast.walk(tree(file)):
      if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef):
        count = (node.end_lineno or 0) - node.lineno + 1
        if count > 60:
          long.append(f'{name}.{node.name}: {count} lines')
  assert not long, long


def test_no_global_random_numbers():
  """Nothing draws from numpy's or Python's process-wide generators."""
  bad = []
  for name, file in SOURCE.items():
    for node in ast.walk(tree(file)):
      if isinstance(node, ast.Call):
        call = ast.unparse(node.func)
        numpys = call.startswith(('np.random.', 'numpy.random.'))
        if numpys and call.split('.')[2] in GLOBAL_DRAWS:
          bad.append(f'{name}:{node.lineno} {call}')
        if call.startswith('random.') and call != 'random.Random':
          bad.append(f'{name}:{node.lineno} {call}')
  assert not bad, bad


def test_only_listed_houses_hold_code():
  strays = [
    file.relative_to(ROOT)
    for file in ROOT.glob('*/*.py')
    if file.parent.name not in (*HOUSES, 'build')
  ]
  assert not strays, strays
