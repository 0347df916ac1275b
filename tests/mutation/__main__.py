"""Runs the mutation check: plants each fault in a copy of the tree and runs tests.

    python -m tests.mutation [--only=TEXT] [--whole] [--jobs=2] [--json=FILE]

A fault is caught when a test fails. The test file that is named beside the fault runs
first, then the fast tests of its area; with `--whole`, a fault that they miss is shown
to the rest of the fast suite as well. The last lines list the faults that survived.
Takes about six minutes on two cores; it is not part of the gate.
"""

import argparse
import concurrent.futures
import json
import os
import pathlib
import queue
import shutil
import subprocess
import sys
import tempfile
import time

from tests.mutation.faults import FAULTS, Fault

ROOT = pathlib.Path(__file__).resolve().parents[2]
COPIED = (
  'jaxrl',
  'kernels',
  'configs',
  'launch',
  'examples',
  'recipes',
  'tests',
  'docs',
)
FAST = ['-m', 'not slow and not ray and not targets and not vllm', '--timeout=300']
AREA_TESTS = {
  'functional': ['tests/functional', 'tests/algorithms'],
  'training': ['tests/training'],
  'rollout': ['tests/rollout'],
  'weights': ['tests/rollout/weights', 'tests/launch/test_weights.py'],
  'data': ['tests/data', 'tests/launch/test_samplers.py'],
}
LIMIT_S = 900  # seconds that one run of pytest may take


def copy_tree(folder: pathlib.Path) -> None:
  """Copies what the tests need to `folder`."""
  for name in COPIED:
    if (ROOT / name).exists():
      ignored = shutil.ignore_patterns('__pycache__')
      shutil.copytree(ROOT / name, folder / name, ignore=ignored)
  for path in ROOT.iterdir():
    if path.is_file():
      shutil.copy2(path, folder / path.name)


def find_line(root: pathlib.Path, fault: Fault) -> pathlib.Path:
  """Returns the one file that holds the fault's line.

  Raises:
    LookupError: If the text occurs nowhere, or more than once.
  """
  matches = [
    (path, path.read_text().count(fault.before))
    for path in sorted((root / 'jaxrl').rglob('*.py'))
    if fault.before in path.read_text()
  ]
  if len(matches) != 1 or matches[0][1] != 1:
    places = ', '.join(f'{path.relative_to(root)} ({n}×)' for path, n in matches)
    raise LookupError(f'{fault.before!r} must occur once; found: {places or "nowhere"}')
  return matches[0][0]


def run_tests(root: pathlib.Path, tests: list[str]) -> tuple[bool, str]:
  """Runs pytest until the first failure; returns (failed, the failing test)."""
  command = [sys.executable, '-m', 'pytest', '-x', '-q', *FAST, *tests]
  env = {**os.environ, 'PYTHONPATH': str(root), 'PYTHONDONTWRITEBYTECODE': '1'}
  try:
    done = subprocess.run(
      command, cwd=root, env=env, capture_output=True, text=True, timeout=LIMIT_S
    )
  except subprocess.TimeoutExpired:
    return True, 'timeout'
  lines = done.stdout.splitlines()
  failed = [line for line in lines if line.startswith(('FAILED ', 'ERROR '))]
  if done.returncode not in (0, 1, 2, 5):
    return True, f'exit {done.returncode}'
  if done.returncode in (0, 5):
    return False, ''
  return True, failed[0].split(' ')[1] if failed else 'collection'


def check(root: pathlib.Path, fault: Fault, whole: bool) -> tuple[bool, str]:
  """Plants `fault` in the copy at `root`, tests, and takes it out again."""
  path = find_line(root, fault)
  text = path.read_text()
  names = {file.stem: file for file in (root / 'tests').rglob('test_*.py')}
  tests = [str(names[name].relative_to(root)) for name in fault.tests if name in names]
  path.write_text(text.replace(fault.before, fault.after))
  try:
    caught, by = run_tests(root, tests) if tests else (False, '')
    if not caught:
      caught, by = run_tests(root, AREA_TESTS[fault.area])
    if not caught and whole:
      caught, by = run_tests(root, ['tests'])
    return caught, by
  finally:
    path.write_text(text)


def main() -> int:
  """Runs the check; returns 1 when a fault survived."""
  parser = argparse.ArgumentParser(description=__doc__)
  parser.add_argument('--only', default='', help='faults whose area or text has this')
  parser.add_argument('--again', default='', help='results: only what survived there')
  parser.add_argument(
    '--whole', action='store_true', help='show survivors to all tests'
  )
  parser.add_argument('--jobs', type=int, default=2, help='copies tested side by side')
  parser.add_argument('--json', default='', help='file to write the results to')
  options = parser.parse_args()
  chosen = [f for f in FAULTS if options.only in f.area or options.only in f.before]
  if options.again:
    rows = json.loads(pathlib.Path(options.again).read_text())
    survived = {row['before'] for row in rows if not row['caught']}
    chosen = [fault for fault in chosen if fault.before in survived]
  for fault in chosen:
    find_line(ROOT, fault)
  results, begun = [], time.monotonic()
  with tempfile.TemporaryDirectory(prefix='mutation-') as folder:
    cache = os.environ.setdefault('JAX_COMPILATION_CACHE_DIR', f'{folder}/xla')
    pathlib.Path(cache).mkdir(parents=True, exist_ok=True)
    os.environ.setdefault('JAX_PERSISTENT_CACHE_MIN_COMPILE_TIME_SECS', '0')
    copies: queue.Queue[pathlib.Path] = queue.Queue()
    for i in range(options.jobs):
      copy = pathlib.Path(folder) / str(i)
      copy.mkdir()
      copy_tree(copy)
      copies.put(copy)

    def work(fault: Fault) -> dict:
      copy = copies.get()
      try:
        caught, by = check(copy, fault, options.whole)
      finally:
        copies.put(copy)
      row = {'area': fault.area, 'before': fault.before, 'caught': caught, 'by': by}
      results.append(row)
      minutes = (time.monotonic() - begun) / 60
      verdict = f'caught by {by}' if caught else 'SURVIVED'
      print(
        f'[{len(results)}/{len(chosen)}, {minutes:.1f} min] {fault.area}: '
        f'{fault.before.strip()[:70]}: {verdict}',
        flush=True,
      )
      return row

    with concurrent.futures.ThreadPoolExecutor(options.jobs) as pool:
      rows = list(pool.map(work, chosen))
  if options.json:
    pathlib.Path(options.json).write_text(json.dumps(rows, indent=1))
  survived = [row for row in rows if not row['caught']]
  print(f'{len(rows) - len(survived)} of {len(rows)} faults caught.')
  for row in survived:
    print(f'survived ({row["area"]}): {row["before"].strip()}')
  return 1 if survived else 0


if __name__ == '__main__':
  sys.exit(main())
