"""Experiments make the runs of recipes, one after another, and keep what they showed.

A run is `launch.train` with the arguments of its arm. What is kept of it is small: the
metrics that are drawn, and a digest of all numbers that the run reported. A run that is
kept is not made again until its config or the weights that it starts from change.
"""

import contextlib
import functools
import hashlib
import json
import pathlib
import platform
import shutil
import subprocess
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

from configs import base
from jaxrl.device_thread import cpu_count
from launch import train
from launch.logging.metric_sinks import read_metrics
from launch.logging.workdir import (
  flatten_keys,
  json_data,
  package_versions,
  write_atomically,
)
from launch.settings import command_line
from recipes.recipe import (
  BASES,
  ROOT,
  RUNS,
  Arm,
  Recipe,
  base_folder,
  find_recipe,
  recipe_names,
  run_arguments,
)

DATA = ROOT / 'recipes' / 'data'
QUIET = ('--config.logging.sinks=',)  # metrics.jsonl is written always
# What a rerun must reproduce to the last bit: neither times nor memory are among it.
DIGESTED = tuple('reward eval loss optimizer policy advantage kl value'.split())
CODE = ('jaxrl', 'kernels', 'configs', 'launch')  # what a run's numbers come from
DIGITS = 5  # of the numbers that are kept to be drawn


class RunError(RuntimeError):
  """Reports a run that did not reach its end."""


def data_path(name: str) -> pathlib.Path:
  """Returns the file that holds the runs of a recipe.

  Args:
    name: Name of the recipe.
  """
  return DATA / f'{name}.json'


def read_data(name: str) -> dict[str, Any]:
  """Returns what is kept of a recipe's runs.

  Args:
    name: Name of the recipe.

  Returns:
    `arms`, which maps labels to runs in the order of their seeds; no arms before the
    first run.
  """
  path = data_path(name)
  return json.loads(path.read_text()) if path.exists() else {'arms': {}}


def make_runs(name: str, seeds: Sequence[int], tell: Callable[[str], None]) -> None:
  """Makes the runs of a recipe that are not kept yet, seed by seed.

  Args:
    name: Name of the recipe.
    seeds: The seeds of each arm.
    tell: Takes a line about each run.
  """
  recipe = find_recipe(name)
  start = {needed: ensure_base(needed, tell) for needed in recipe.bases}
  for seed in seeds:
    for label, arm in recipe.arms.items():
      key = run_key(run_arguments(name, arm, seed), start)
      run = find_run(key, recipe)
      if run is None:
        run = make_run(name, arm, seed, start)
        final = [f'{h} {run["final"].get(m)}' for h, m in recipe.columns.items()]
        summary = f'{", ".join(final)} ({run["seconds"]} s)'
        tell(f'{name}: {label}, seed {seed}: {summary}')
      keep_run(name, label, run)


def run_key(arguments: Sequence[str], start: Mapping[str, str]) -> str:
  """Returns a name of a run: equal for equal options and equal weights at the start.

  Options at their defaults do not count, so that new ones do not make a run another.

  Args:
    arguments: The run's arguments for `launch.train`.
    start: The digests of the bases, by name.
  """
  command = command_line.parse(arguments)
  config: Any = command_line.load(command)
  usual: Any = base.get_config(config.algorithm.name)
  usual.logging = config.logging  # which changes nothing of what is learned
  for tag, env in config.env.items():
    usual.env[tag] = base.env_section(env.env_type)
  defaults = flatten_keys(json_data(usual.to_dict()))
  options = flatten_keys(json_data(config.to_dict())).items()
  changed = {key: value for key, value in options if defaults.get(key) != value}
  facts = [config.algorithm.name, changed, sorted(start.items())]
  text = json.dumps(facts, sort_keys=True)
  return hashlib.sha256(text.encode()).hexdigest()[:16]


def find_run(key: str, recipe: Recipe) -> dict[str, Any] | None:
  """Returns a kept run, of any recipe, that has what a recipe shows; None if none is.

  Args:
    key: The run's key.
    recipe: The recipe.
  """
  for name in recipe_names():
    for runs in read_data(name)['arms'].values():
      for run in runs:
        known = {*run['series'], *run['absent']}
        if run['key'] == key and known.issuperset(recipe.metrics):
          return run
  return None


def keep_run(name: str, label: str, run: dict[str, Any]) -> None:
  """Writes a run into the data of a recipe, in the place of an earlier one.

  Args:
    name: Name of the recipe.
    label: Label of the arm.
    run: The run.
  """
  recipe, data = find_recipe(name), read_data(name)
  metrics = [*recipe.metrics]
  run = run | {
    'series': {m: run['series'][m] for m in metrics if m in run['series']},
    'final': {m: run['final'][m] for m in metrics if m in run['final']},
    'absent': [m for m in metrics if m not in run['series']],
  }
  others = [r for r in data['arms'].get(label, []) if r['seed'] != run['seed']]
  runs = sorted([*others, run], key=lambda r: r['seed'])
  arms = data['arms'] | {label: runs}
  data['arms'] = {label: arms[label] for label in recipe.arms if label in arms}
  DATA.mkdir(exist_ok=True)
  write_atomically(data_path(name), compact_json(data))


def compact_json(data: Mapping[str, Any]) -> str:
  """Returns the text of a data file: a line for each run.

  Args:
    data: The data of a recipe.
  """
  arms = []
  for label, runs in data['arms'].items():
    lines = ',\n'.join(f'   {json.dumps(run)}' for run in runs)
    arms.append(f'  {json.dumps(label)}: [\n{lines}\n  ]')
  return '{\n "arms": {\n' + ',\n'.join(arms) + '\n }\n}\n'


def make_run(
  name: str, arm: Arm, seed: int, start: Mapping[str, str]
) -> dict[str, Any]:
  """Makes a run of an arm.

  Args:
    name: Name of the recipe.
    arm: The arm.
    seed: Seed of the run.
    start: The digests of the bases, by name.

  Returns:
    The run's record, with all of its metrics.
  """
  arguments = run_arguments(name, arm, seed)
  key = run_key(arguments, start)
  folder = pathlib.Path(RUNS) / key
  seconds = train_in(folder, arguments)
  rows = [r for r in read_metrics(folder / 'metrics.jsonl') if r['phase'] == 'train']
  series = series_of(rows)
  record = {
    'seed': seed,
    'key': key,
    'digest': digest_of(rows),
    'commit': code_commit(),
    'machine': describe_machine(),
    'seconds': round(seconds, 1),
    'tokens': sum(int(row.get('tokens/generated', 0)) for row in rows),
    'start': dict(start),
    'arguments': arguments,
    'series': series,
    'final': {metric: values[-1] for metric, (_, values) in series.items()},
    'absent': [],
  }
  shutil.rmtree(folder)
  return record


def train_in(folder: pathlib.Path, arguments: Sequence[str]) -> float:
  """Trains in a folder of its own, which an earlier attempt may have left.

  Args:
    folder: The folder.
    arguments: The arguments of `launch.train`.

  Returns:
    The seconds that it took.

  Raises:
    RunError: The run did not reach its end.
  """
  shutil.rmtree(folder, ignore_errors=True)
  folder.parent.mkdir(parents=True, exist_ok=True)
  log = folder.with_suffix('.log')
  begin = time.perf_counter()
  with log.open('w') as out, contextlib.redirect_stdout(out):
    status = train.main([*arguments, *QUIET, f'--workdir={folder}'])
  if status:
    raise RunError(f'python -m launch.train {" ".join(arguments)} failed: see {log}')
  log.unlink()
  return time.perf_counter() - begin


def ensure_base(name: str, tell: Callable[[str], None]) -> str:
  """Trains a base if its weights are not there yet.

  Args:
    name: One of BASES.
    tell: Takes a line about it.

  Returns:
    The digest of its weights.
  """
  if name == 'teacher':
    ensure_base('sums', tell)
  weights = pathlib.Path(base_folder(name)) / 'model.safetensors'
  if not weights.exists():
    seconds = train_in(weights.parents[1], BASES[name])
    tell(f'base {name}: {seconds:.0f} s')
  return hashlib.sha256(weights.read_bytes()).hexdigest()[:16]


def series_of(
  rows: Sequence[Mapping[str, Any]],
) -> dict[str, tuple[list[int], list[float]]]:
  """Returns the steps and the rounded values of each metric.

  Args:
    rows: Rows of metrics.jsonl.
  """
  series: dict[str, tuple[list[int], list[float]]] = {}
  for row in rows:
    for metric, value in _numbers(row):
      steps, values = series.setdefault(metric, ([], []))
      steps.append(row['step'])
      values.append(float(f'{value:.{DIGITS}g}'))
  return series


def digest_of(rows: Sequence[Mapping[str, Any]]) -> str:
  """Returns a digest of all numbers of a run that follow from its config alone.

  Among them are the norms of parameters and gradients at every step, so a single bit
  that differs in the weights shows sooner or later.

  Args:
    rows: Rows of metrics.jsonl.
  """
  numbers = [
    [row['step'], sorted((m, v) for m, v in _numbers(row) if m.startswith(DIGESTED))]
    for row in rows
  ]
  return hashlib.sha256(json.dumps(numbers).encode()).hexdigest()[:16]


def _numbers(row: Mapping[str, Any]) -> Iterator[tuple[str, float]]:
  for metric, value in row.items():
    if '/' in metric and isinstance(value, int | float):
      yield metric, value


def code_commit() -> str:
  """Returns the last commit that changed what trains, with '+' if files differ."""
  git = functools.partial(
    subprocess.run, cwd=ROOT, capture_output=True, text=True, timeout=10
  )
  commit = git(['git', 'log', '-1', '--format=%H', '--', *CODE]).stdout.strip()
  changed = git(['git', 'status', '--porcelain', '--', *CODE]).stdout.strip()
  return commit + ('+' if changed else '')


def describe_machine() -> str:
  """Returns the processor and the versions that the bits of a run depend on."""
  versions = package_versions()
  return ', '.join(
    [
      processor(),
      f'{cpu_count()} cores',
      f'Python {platform.python_version()}',
      *(f'{name} {versions[name]}' for name in ('jax', 'jaxlib')),
    ]
  )


def processor() -> str:
  """Returns the name and the revision of this machine's processor."""
  try:
    text = pathlib.Path('/proc/cpuinfo').read_text()
  except OSError:
    return platform.processor() or platform.machine()
  lines = [line.partition(':') for line in text.partition('\n\n')[0].splitlines()]
  facts = {key.strip(): value.strip() for key, _, value in lines}
  name = facts.get('model name', platform.machine())
  numbers = [facts[key] for key in ('cpu family', 'model') if key in facts]
  return f'{name} ({"/".join(numbers)})' if numbers else name


def repeat_run(
  name: str, tell: Callable[[str], None]
) -> tuple[dict[str, Any], dict[str, Any]]:
  """Makes the run of a recipe's first arm and seed 0 again.

  Args:
    name: Name of the recipe.
    tell: Takes a line about each base that is trained for it.

  Returns:
    The run as it is now, and as it is kept.
  """
  recipe = find_recipe(name)
  label, arm = next(iter(recipe.arms.items()))
  (kept,) = [run for run in read_data(name)['arms'][label] if run['seed'] == 0]
  start = {needed: ensure_base(needed, tell) for needed in recipe.bases}
  return make_run(name, arm, 0, start), kept
