"""Dumps what is played during training, to `--config.trajectory_dump.path`."""

import dataclasses
import pathlib
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np

from jaxrl.data.trajectory_writers.dump_columns import STANDARD_COLUMNS
from jaxrl.data.trajectory_writers.writer import merge_columns, open_dump
from jaxrl.envs.env_registry import unwrapped
from jaxrl.options import ConfigError
from jaxrl.rollout.custom_env_manager import ENV_MANAGERS
from jaxrl.types import Group, Trajectory
from launch.logging.metric_sinks import MetricSink, read_metrics
from launch.settings.run_settings import RunSettings

MARK = '.dumped'  # in a run's folder: it has begun to write


def env_columns(settings: RunSettings) -> dict[str, str]:
  """Returns the types of the columns of environments and their managers, by name.

  A user's manager may set any column, so those that the config asks for are among them,
  with the type that it gives.
  """
  parts = [unwrapped(env.env_type, env.env_config) for env in settings.env.values()]
  managers = [env.manager for env in settings.env.values() if env.manager is not None]
  parts += [ENV_MANAGERS.find(call)[1] for call in managers]
  declared = merge_columns(getattr(part, 'columns', {}) for part in parts)
  dump = settings.trajectory_dump
  if not managers or dump is None:
    return declared
  asked = [
    str(pair[0]) for pair in dump.columns if isinstance(pair, list | tuple) and pair
  ]
  others = {n: '' for n in asked if n not in STANDARD_COLUMNS and n not in declared}
  return declared | others


def has_begun(folder: pathlib.Path) -> bool:
  """Returns whether the run in `folder` may have written trajectories.

  An evaluation's are written before its numbers, which are those of a whole step.
  """
  return (folder / MARK).exists() or bool(read_metrics(folder / 'metrics.jsonl'))


class TrajectoryDump(MetricSink):
  """Writes each step's trajectories, a part for each tag and mode.

  A step that is done again after a crash replaces its part. Parts are written before
  the step's checkpoint, so that none is missing after one. A run whose trajectories
  cannot be written therefore ends, and repeats the step when it is started again.
  """

  required = True

  def __init__(self, settings: RunSettings, folder: pathlib.Path, *, fresh: bool):
    """Opens the dump.

    Args:
      settings: Settings of the run, whose `dump` says where to write.
      folder: Folder of the run.
      fresh: Whether the run has written nothing yet.

    Raises:
      ConfigError: If nothing can be written there.
    """
    dump = settings.trajectory_dump
    assert dump is not None
    if dump.store is not None:
      raise ConfigError(
        f'--config.trajectory_dump.path={dump.path}: only launch.rollout writes '
        'experience stores: name a folder, a file or a table'
      )
    columns = env_columns(settings)
    self._sinks = {}
    self._mark = folder / MARK
    for mode in ('train', 'val'):
      self._columns, sink = open_dump(mode, folder.absolute(), dump, columns)
      sink.check(fresh=fresh)
      self._sinks[mode] = sink
    self._model = settings.model.name
    self._save_arrays = dump.save_arrays

  def formats(self, names: Mapping[str, str]) -> None:
    """Takes the names of how the model writes tool calls and thoughts."""
    self._columns.formats = dict(names)

  def trajectories(
    self,
    step: int,
    groups: Sequence[Group],
    advantages: Any = None,
    kind: str = 'train',
    logprobs: Any = None,
  ) -> None:
    """Writes the played trajectories of a step, one file per environment tag.

    With arrays, the extras of what was trained on have its `advantages`, and the
    learner's `old_logprobs` if it scored them.
    """
    mode = 'val' if kind == 'eval' else 'train'
    self._mark.touch()
    if kind == 'train' and self._save_arrays:
      rows = {'advantages': advantages, 'old_logprobs': logprobs}
      groups = _with_rows(groups, rows)
    for tag, played in _by_tag(groups).items():
      rows = [
        row
        for group in played
        for row in self._columns.rows(
          group, step=step, model_name=self._model, mode=mode
        )
      ]
      self._sinks[mode].write(f'{tag}-step{step:06d}', rows)


def _with_rows(groups: Sequence[Group], rows: Mapping[str, Any]) -> list[Group]:
  """Adds numbers to the extras of each trajectory, one for each of its tokens.

  Args:
    groups: The groups.
    rows: By name, rows in the order of `groups` laid end to end, which may be longer
      than their trajectories; or None.
  """
  known = {
    # What is an array has been on a device until now.
    name: iter(np.asarray(values) if hasattr(values, '__array__') else values)
    for name, values in rows.items()
    if values is not None
  }

  def add(one: Trajectory) -> Trajectory:
    token_values = {
      name: np.asarray(next(row), np.float32)[: len(one.tokens)]
      for name, row in known.items()
    }
    return dataclasses.replace(one, extras={**one.extras, **token_values})

  return [[add(one) for one in group] for group in groups] if known else list(groups)


def _by_tag(groups: Sequence[Group]) -> Mapping[str, list[Group]]:
  """Returns the groups that were played, by tag, without what experts wrote."""
  groups_by_tag: dict[str, list[Group]] = {}
  for group in groups:
    if played := [row for row in group if not row.is_expert]:
      groups_by_tag.setdefault(played[0].tag, []).append(played)
  return groups_by_tag
