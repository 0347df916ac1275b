"""The data sets of a run, by environment tag."""

import functools
import pathlib
from typing import Any

from jaxrl import signature
from jaxrl.config import Config
from jaxrl.data.dataset import GlobalDataset, GlobalDatasetManager
from jaxrl.data.seeds import fold
from jaxrl.data.sources import load_rows
from jaxrl.envs.base import core
from jaxrl.signature import ConfigError
from launch.spawn import Host

Datasets = dict[str, Any]  # by tag


def load_datasets(config: Config, host: Host) -> tuple[Datasets, Datasets]:
  """Each tag's rows for training and for evaluation; None for games.

  Tags that ask for the same rows share them.
  """
  made = GlobalDatasetManager()
  given = config, host, made
  train = {tag: _dataset(*given, tag, 'sample') for tag in config.env}
  tests: Datasets = dict.fromkeys(config.env)
  if config.eval.every:
    tests = {tag: _dataset(*given, tag, 'traversal') for tag in config.env}
  return train, tests


def _dataset(
  config: Config, host: Host, made: GlobalDatasetManager, tag: str, mode: str
) -> Any:
  """The tag's handle, None for games, whose tasks are seeds."""
  env = config.env[tag]
  if not getattr(core(env.env_type, env.env_config), 'uses_dataset', True):
    return None
  options = dict(config.dataset)
  path = options.pop('path')
  if mode == 'traversal':
    wanted = config.eval.num_tasks
    options['limit'] = None if wanted < 0 else wanted
    options['split'] = config.eval.split
    path = config.eval.path or beside(path, config.eval.split)
  if not path:
    raise ConfigError(
      f'env.{tag} takes its tasks from a data set: set --config.dataset.path=…'
    )
  options.update(mode=mode, seed=fold(config.seed, 'dataset', mode))
  return made.get(path, functools.partial(_load, host), **options)


def _load(host: Host, path: str, **options: Any) -> Any:
  # Read here, so that what is wrong with it is told at once, wherever it will live.
  rows = load_rows(path, options['split'], options['limit'])
  GlobalDataset(rows, path=path, **options)
  return host.spawn(GlobalDataset, rows, path=path, **options)


def beside(path: str, split: str) -> str:
  """The file of another split next to `path`: test.jsonl for train.jsonl.

  Of several sources, each one's.
  """
  terms = signature.split(path, ' + ')
  if len(terms) > 1:
    others = (beside(term, split) for term in terms)
    return ' + '.join(dict.fromkeys(others))  # which two may share
  file = pathlib.Path(path)
  other = file.with_name(file.name.replace('train', split))
  return str(other) if file.is_file() and other.is_file() else path
