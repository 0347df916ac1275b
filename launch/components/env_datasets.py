"""Load the data sets that environments take their tasks from, by environment tag."""

import functools
import pathlib
from collections.abc import Callable
from typing import Any

from jaxrl.call_strings import ComponentCall, ConfigError
from jaxrl.data.curricula import make_curriculum
from jaxrl.data.dataset import GlobalDataset, GlobalDatasetManager
from jaxrl.data.row_sources import RowSource, RowSources, describe_sources, load_rows
from jaxrl.data.seeds import fold_seed
from jaxrl.envs.env_registry import uses_dataset
from launch.runtime.runtime_interface import Runtime
from launch.settings.run_settings import RunSettings

Datasets = dict[str, Any]  # by tag
KeyOf = Callable[[str], str]  # the config key that sets a field of the tasks


def load_datasets(settings: RunSettings, runtime: Runtime) -> tuple[Datasets, Datasets]:
  """Loads the rows of tags and of evaluation sets. Those that are the same are shared.

  Args:
    settings: settings of the run.
    runtime: where the data sets are to live.

  Returns:
    Handles for training by tag, and for evaluation by set; None for environments whose
    tasks are seeds.

  Raises:
    ConfigError: if an environment needs rows and no path is set.
  """
  manager = GlobalDatasetManager()

  def get(path: RowSources, mode: str, options: dict[str, Any], key: KeyOf) -> Any:
    options |= {'mode': mode, 'seed': fold_seed(settings.seed, 'dataset', mode)}
    load = functools.partial(_load, settings, runtime, key)
    return manager.get(path, load, **options)

  train: Datasets = dict.fromkeys(settings.training_tags)
  for tag in train:
    env = settings.env[tag]
    if uses_dataset(env.env_type, env.env_config):
      tasks = env.dataset
      if not tasks.path:
        raise _missing_path(f'env.{tag}', tag)
      key = functools.partial(settings.task_key, tag)
      train[tag] = get(tasks.path, 'sample', tasks.options, key)
  tests: Datasets = dict.fromkeys(settings.eval.active)
  for name, evaluation in settings.eval.active.items():
    tag = evaluation.tag
    env = settings.env[tag]
    if uses_dataset(env.env_type, env.env_config):
      tasks = env.dataset
      path = evaluation.path or sibling_split_path(tasks.path, evaluation.split)
      if not path:
        raise _missing_path(f'the evaluation of env.{tag}', tag)
      num_tasks = evaluation.num_tasks
      options = {
        **tasks.options,
        'split': evaluation.split,
        'limit': None if num_tasks < 0 else num_tasks,
        'question_key': evaluation.question_key,
        'answer_key': evaluation.answer_key,
      }
      key = functools.partial(settings.eval_task_key, name)
      tests[name] = get(path, 'traversal', options, key)
  return train, tests


def describe_tasks(settings: RunSettings) -> str:
  """Names where the tasks of the run come from, in one line."""
  reading = {
    tag: env
    for tag, env in settings.env.items()
    if uses_dataset(env.env_type, env.env_config)
  }
  shared = ''
  if reading or not settings.env:
    shared = describe_sources(settings.dataset.path)
  tag_sources = [
    f'{tag} {describe_sources(env.dataset.path)}'
    for tag, env in reading.items()
    if env.dataset.path != settings.dataset.path
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
  path: RowSources,
  **options: Any,
) -> Any:
  # Read here, so that an error in it is raised at once, wherever it will live.
  with settings.naming(key('path')):
    rows = load_rows(path, options['split'], options['limit'])
  if options['mode'] == 'sample':
    with settings.naming(key('curriculum')):
      make_curriculum(options['curriculum'], rows, options['seed'])
  with settings.naming(key('keys')):
    GlobalDataset(rows, path=path, **options)
  return runtime.spawn(GlobalDataset, rows, path=path, **options)


def sibling_split_path(path: RowSources, split: str) -> RowSources:
  """Returns the file of another split next to `path`: test.jsonl for train.jsonl.

  Args:
    path: a data set's source, or several.
    split: name of the other split.

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
  file = pathlib.Path(path)
  other = file.with_name(file.name.replace('train', split))
  return str(other) if file.is_file() and other.is_file() else path
