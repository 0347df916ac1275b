"""Loads the data sets that environments take their tasks from, by environment tag."""

import functools
import pathlib
from collections.abc import Callable, Mapping
from typing import Any, NamedTuple

from jaxrl.component_calls import ComponentCall
from jaxrl.data.curricula import make_curriculum
from jaxrl.data.dataset import GlobalDataset, GlobalDatasetManager
from jaxrl.data.row_sources import RowSource, RowSources, describe_sources, load_rows
from jaxrl.data.rows import folder_splits
from jaxrl.data.seeds import fold_seed
from jaxrl.envs.env_registry import uses_dataset
from jaxrl.options import ConfigError, Keywords
from launch.runtime.runtime_base import Runtime
from launch.settings.run_settings import RunSettings

Datasets = dict[str, GlobalDataset | None]  # by tag; None for seeds
KeyOf = Callable[[str], str]  # the config key that sets a field of the tasks


class RunDatasets(NamedTuple):
  """Holds handles of a run's data sets; None for environments whose tasks are seeds.

  Attributes:
    train: For training, by tag.
    tests: For evaluation, by set.
    seen_shares: The share of a set's tasks that are training rows of its tag, by set,
      where it is above 0.
  """

  train: Datasets
  tests: Datasets
  seen_shares: Mapping[str, float]


def load_datasets(settings: RunSettings, runtime: Runtime) -> RunDatasets:
  """Loads the rows of tags and of evaluation sets. Those that are the same are shared.

  Raises:
    ConfigError: If an environment needs rows and no path is set.
  """
  manager = GlobalDatasetManager()
  fingerprints: dict[int, list[int]] = {}  # of tasks, by the identity of the handle

  def get(path: RowSources, mode: str, options: Keywords, key: KeyOf) -> GlobalDataset:
    options |= {'mode': mode, 'seed': fold_seed(settings.seed, 'dataset', mode)}
    load = functools.partial(_load, settings, runtime, key, fingerprints)
    return manager.get(path, load, **options)

  train: Datasets = dict.fromkeys(settings.training_tags)
  for tag in train:
    if _reads_rows(settings, tag):
      tasks = settings.tasks[tag]
      if not tasks.path:
        raise _missing_path(f'env.{tag}', tag)
      key = functools.partial(settings.task_key, tag)
      train[tag] = get(tasks.path, 'sample', tasks.task_options, key)
  tests: Datasets = dict.fromkeys(settings.active_evaluations)
  for name, evaluation in settings.active_evaluations.items():
    if _reads_rows(settings, evaluation.tag):
      path = evaluation_path(settings, name)
      options = {
        **settings.tasks[evaluation.tag].task_options,
        'split': evaluation.split,
        'limit': _evaluation_limit(settings, name, path),
        'question_key': evaluation.columns.question or '',
        'answer_key': evaluation.columns.answer or '',
      }
      key = functools.partial(settings.eval_task_key, name)
      tests[name] = get(path, 'traversal', options, key)
  shares = {
    name: _share_in(fingerprints[id(test)], fingerprints[id(trained)])
    for name, test in tests.items()
    if test is not None
    and (trained := train.get(settings.evaluations[name].tag)) is not None
  }
  return RunDatasets(train, tests, {k: share for k, share in shares.items() if share})


def _reads_rows(settings: RunSettings, tag: str) -> bool:
  env = settings.env[tag]
  return uses_dataset(env.env_type, env.env_config)


def evaluation_path(settings: RunSettings, name: str) -> RowSources:
  """Returns the source of an evaluation set's tasks.

  Raises:
    ConfigError: If there is none.
  """
  evaluation = settings.evaluations[name]
  path = settings.tasks[evaluation.tag].path
  path = evaluation.path or sibling_split_path(path, evaluation.split)
  if not path:
    what = f'the evaluation of env.{evaluation.tag}'
    raise _missing_path(what, evaluation.tag)
  return path


def _share_in(tasks: list[int], trained: list[int]) -> float:
  """Returns the share of tasks that are also trained on."""
  known = set(trained)
  return sum(one in known for one in tasks) / max(1, len(tasks))


def named_training_rows(settings: RunSettings) -> dict[str, float]:
  """Returns 1 for each evaluation set whose file is also named for training."""
  seen = {}
  for name, evaluation in settings.active_evaluations.items():
    if _reads_rows(settings, evaluation.tag):
      files = _files_alone(evaluation_path(settings, name))
      if {folder_splits.split_of_path(file) for file in files} == {'train'}:
        seen[name] = 1.0
  return seen


def describe_seen(shares: Mapping[str, float]) -> str:
  """Says which evaluation sets have tasks that are trained on, in one line."""
  return '; '.join(
    f'{name} is evaluated on training rows'
    + ('' if share == 1 else f' in {share:.0%} of its tasks')
    for name, share in shares.items()
  )


def _evaluation_limit(settings: RunSettings, name: str, path: RowSources) -> int | None:
  """Returns how many rows of `path` an evaluation set plays at most.

  What limits the rows of training limits those of an evaluation too if they are the
  same rows, and never those that are held out.
  """
  evaluation = settings.evaluations[name]
  tasks = settings.env[evaluation.tag].dataset
  limits = [evaluation.num_tasks] if evaluation.num_tasks >= 0 else []
  if tasks.limit is not None and is_trained_on(settings, name, path):
    limits.append(tasks.limit)
  return min(limits, default=None)


def is_trained_on(settings: RunSettings, name: str, path: RowSources = '') -> bool:
  """Returns whether an evaluation set plays the rows that its tag is trained on.

  Args:
    settings: Settings of the run.
    name: Name of the evaluation set.
    path: Where its rows come from, if that is known.
  """
  evaluation = settings.evaluations[name]
  tasks = settings.env[evaluation.tag].dataset
  path = path or evaluation.path or sibling_split_path(tasks.path, evaluation.split)
  if path != tasks.path:
    return False
  return evaluation.split == tasks.split or bool(_files_alone(path))


def _files_alone(path: RowSources) -> list[str]:
  """Returns the files of a source that consists of files alone, without splits."""
  sources = path if isinstance(path, tuple) else (path,)
  files = [s for s in sources if isinstance(s, str) and pathlib.Path(s).is_file()]
  return files if len(files) == len(sources) else []


def check_limit(settings: RunSettings, overrides: Mapping[str, str | None]) -> None:
  """Raises ConfigError if a limit of the command line limits no evaluation.

  Args:
    settings: Settings of a command that evaluates and does not train.
    overrides: Texts of the keys that the command line sets, by key.
  """
  active = settings.active_evaluations
  for key in overrides:
    tags = [
      t for t in settings.env if key in ('dataset.limit', f'env.{t}.dataset.limit')
    ]
    names = [name for name in active if active[name].tag in tags]
    if names and not any(is_trained_on(settings, name) for name in names):
      raise ConfigError(
        f'--config.{key}={overrides[key]}: limits the rows of training, and an '
        'evaluation plays others: set --config.eval.num_tasks instead'
      )


def describe_tasks(settings: RunSettings) -> str:
  """Names where the tasks of the run come from, in one line."""
  reading = [tag for tag in settings.env if _reads_rows(settings, tag)]
  shared = ''
  if reading or not settings.env:
    shared = describe_sources(settings.dataset.path)
  tag_sources = [
    f'{tag} {describe_sources(settings.tasks[tag].path)}'
    for tag in reading
    if settings.tasks[tag].path != settings.dataset.path
  ]
  return '; '.join(filter(None, [shared, *tag_sources])) or 'seeds'


def _missing_path(what: str, tag: str) -> ConfigError:
  return ConfigError(
    f'{what} takes its tasks from a data set: set --config.dataset.path=…, or '
    f'--config.env.{tag}.dataset.path=… for this tag alone'
  )


def _load(
  settings: RunSettings,
  runtime: Runtime,
  key: KeyOf,
  fingerprints: dict[int, list[int]],
  path: RowSources,
  **options: Any,
) -> GlobalDataset:
  # Read here, so that an error in it is raised at once, wherever it will live.
  with settings.naming(key('path')):
    rows = load_rows(path, options['split'], options['limit'])
  if options['mode'] == 'sample':
    with settings.naming(key('curriculum')):
      make_curriculum(options['curriculum'], rows, options['seed'])
  with settings.naming(key('path')):
    data = GlobalDataset(rows, path=path, **options)
  handle = runtime.spawn(GlobalDataset, rows, path=path, **options)
  fingerprints[id(handle)] = data.fingerprints() if settings.active_evaluations else []
  return handle


def sibling_split_path(path: RowSources, split: str) -> RowSources:
  """Returns the file of another split next to `path`: test.jsonl for train.jsonl.

  Args:
    path: A data set's source, or several.
    split: Name of the other split.

  Returns:
    The other sources; a source itself where there is no such file.
  """
  if isinstance(path, tuple):
    others = [_sibling_split(source, split) for source in path]
    sources = tuple(dict.fromkeys(others))  # which two may share
    return sources if len(sources) > 1 else others[0]
  return _sibling_split(path, split)


def _sibling_split(path: RowSource, split: str) -> RowSource:
  if isinstance(path, ComponentCall):
    return path
  if not pathlib.Path(path).is_file():
    return path  # a folder, or a name on the Hub, has its splits inside
  others = folder_splits.sibling_paths(pathlib.Path(path).as_posix(), split)
  return next((other for other in others if pathlib.Path(other).is_file()), path)
