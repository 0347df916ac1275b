"""What is played while training goes on, kept: `--config.dump.path`."""

import pathlib
from collections.abc import Mapping, Sequence
from typing import Any

from jaxrl.config import Config
from jaxrl.data.sinks.dump import merge, open_dump
from jaxrl.data.store.options import names_store
from jaxrl.envs.base import core
from jaxrl.signature import ConfigError
from jaxrl.types import Group
from launch.writers import Sink, read_metrics

MARK = '.dumped'  # in a run's folder: it has begun to write


def env_columns(config: Config) -> dict[str, str]:
  """The columns that the run's environments have of their own, name → type."""
  envs = [core(env.env_type, env.env_config) for env in config.env.values()]
  return merge(getattr(env, 'columns', {}) for env in envs)


def begun(folder: pathlib.Path) -> bool:
  """Whether the run in `folder` may have written trajectories.

  An evaluation's are written before its numbers, which are those of a whole step.
  """
  return (folder / MARK).exists() or bool(read_metrics(folder / 'metrics.jsonl'))


class Dump(Sink):
  """Writes each step's trajectories, a part for each tag and mode.

  config: of the run; `config.dump` says where to. folder: the run's. fresh: it has
  written nothing yet. A step that is done again after a crash replaces its part. Parts
  are written before the step's checkpoint, so that none is missing after one.

  Raises ConfigError where nothing can be written, before any episode.
  """

  def __init__(self, config: Config, folder: pathlib.Path, *, fresh: bool):
    if names_store(config.dump.path):
      raise ConfigError(
        f'--config.dump.path={config.dump.path}: training keeps what it played in '
        'files or a table; launch.rollout writes experience stores'
      )
    own, self._sinks = env_columns(config), {}
    self._mark = folder / MARK
    for mode in ('train', 'val'):
      self._columns, sink = open_dump(mode, folder.absolute(), own, **config.dump)
      sink.check(fresh=fresh)
      self._sinks[mode] = sink
    self._model = config.model.checkpoint or 'random'

  def trajectories(
    self,
    step: int,
    groups: Sequence[Group],
    advantages: Any = None,
    kind: str = 'train',
  ) -> None:
    mode = 'val' if kind == 'eval' else 'train'
    self._mark.touch()
    for tag, played in _by_tag(groups).items():
      rows = [
        row
        for group in played
        for row in self._columns.rows(group, model_name=self._model, mode=mode)
      ]
      self._sinks[mode].write(f'{tag}-step{step:06d}', rows)


def _by_tag(groups: Sequence[Group]) -> Mapping[str, list[Group]]:
  """The groups that were played, by tag; what experts wrote is left out."""
  found: dict[str, list[Group]] = {}
  for group in groups:
    played = [row for row in group if not row.is_expert]
    if played:
      found.setdefault(played[0].tag, []).append(played)
  return found
