"""Load the data sets that environments take their tasks from, by environment tag."""

import functools
import pathlib
from typing import Any

from jaxrl.call_strings import ComponentCall, ConfigError
from jaxrl.data.dataset import GlobalDataset, GlobalDatasetManager
from jaxrl.data.row_sources import RowSource, RowSources, load_rows
from jaxrl.data.seeds import fold_seed
from jaxrl.envs.env_registry import unwrapped
from launch.runtime.runtime_interface import Runtime
from launch.settings.run_settings import RunSettings

Datasets = dict[str, Any]  # by tag


def load_datasets(settings: RunSettings, runtime: Runtime) -> tuple[Datasets, Datasets]:
  """Loads each tag's rows. Tags that ask for the same rows share them.

  Args:
    settings: settings of the run.
    runtime: where the data sets are to live.

  Returns:
    Handles for training and for evaluation, by tag; None for environments whose tasks
    are seeds.

  Raises:
    ConfigError: if an environment needs rows and no path is set.
  """
  manager = GlobalDatasetManager()
  train = {
    tag: _load_tag(settings, runtime, manager, tag, 'sample') for tag in settings.env
  }
  tests: Datasets = dict.fromkeys(settings.env)
  if settings.eval.interval:
    tests = {
      tag: _load_tag(settings, runtime, manager, tag, 'traversal')
      for tag in settings.env
    }
  return train, tests


def _load_tag(
  settings: RunSettings,
  runtime: Runtime,
  manager: GlobalDatasetManager,
  tag: str,
  mode: str,
) -> Any:
  """Returns the tag's data set, None if its tasks are seeds."""
  env = settings.env[tag]
  if not getattr(unwrapped(env.env_type, env.env_config), 'uses_dataset', True):
    return None
  options, path = settings.dataset.task_options, settings.dataset.path
  if mode == 'traversal':
    num_tasks = settings.eval.num_tasks
    options['limit'] = None if num_tasks < 0 else num_tasks
    options['split'] = settings.eval.split
    path = settings.eval.path or sibling_split_path(path, settings.eval.split)
  if not path:
    raise ConfigError(
      f'env.{tag} takes its tasks from a data set: set --config.dataset.path=…'
    )
  options.update(mode=mode, seed=fold_seed(settings.seed, 'dataset', mode))
  return manager.get(path, functools.partial(_load, runtime), **options)


def _load(runtime: Runtime, path: RowSources, **options: Any) -> Any:
  # Read here, so that an error in it is raised at once, wherever it will live.
  rows = load_rows(path, options['split'], options['limit'])
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
