"""Log metrics: to metrics.jsonl, TensorBoard, wandb or trackio.

A `MetricLogger` takes what a run reports. The run holds a `MultiLogger`, which hands
every call to all loggers, turns NaN and infinity into nulls with a warning, and drops a
remote tracker that fails rather than the run.
"""

import importlib
import json
import math
import os
import pathlib
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import TYPE_CHECKING, Any

from jaxrl.call_strings import ConfigError
from launch.logging.workdir import write_atomically

if TYPE_CHECKING:  # a wrong command line is answered before JAX is imported
  from jaxrl.types import Group

Metrics = Mapping[str, float | None]
Decode = Callable[[list[int]], str]


class MetricLogger:
  """Takes what a run reports; a subclass overrides the methods it needs.

  `--config.logging.sinks='path/file.py:Name(option=1)'` names a user's own subclass,
  which is made by `Name(folder, config, **options)`.

  Attributes:
    required: whether a failure of this logger ends the run.
  """

  required = True

  def phase(self, name: str, total: int | None, start: int = 0) -> None:
    """Notes that a phase begins or goes on, see `MultiLogger.phase`."""

  def write(self, step: int, metrics: Metrics) -> None:
    """Writes the numbers of a step of the current phase.

    Args:
      step: the step.
      metrics: numbers by name; None where one was not finite.
    """

  def trajectories(
    self,
    step: int,
    groups: 'Sequence[Group]',
    advantages: Any = None,
    kind: str = 'train',
  ) -> None:
    """Takes what was played at a step, see `MultiLogger.trajectories`."""

  def decode_with(self, decode: Decode) -> None:
    """Takes the function that turns token ids into text."""

  def close(self, status: str) -> None:
    """Ends the log.

    Args:
      status: how the run ended: 'finished', 'stopped' or 'failed'.
    """


class MultiLogger:
  """Hands every call to all of its loggers.

  Attributes:
    sinks: the loggers.
  """

  def __init__(
    self, sinks: Iterable[MetricLogger], warn: Callable[[str], None] = print
  ):
    self.sinks = list(sinks)
    self._warn = warn
    self._warned: set[str] = set()
    self._phase = ''

  def phase(self, name: str, total: int | None, start: int = 0) -> None:
    """Begins a phase, or goes on with it.

    What an earlier process wrote of that phase at or after `start`, or of later
    phases, is dropped, so that every step appears once. Evaluations of the weights
    that the run goes on with (`eval/*` at `start`) stay. A phase that is over
    (`start == total`) leaves later ones alone.

    Args:
      name: name of the phase.
      total: its steps; None if unknown.
      start: the step that it begins at.
    """
    self._phase = name
    self._each('phase', name, total, start)

  def write(self, step: int, metrics: Mapping[str, Any]) -> None:
    """Writes the numbers of one step; a second call for the same step adds to it."""
    numbers = {name: float(value) for name, value in metrics.items()}
    bad = [name for name, value in numbers.items() if not math.isfinite(value)]
    for name in bad:
      if name not in self._warned:
        self._warned.add(name)
        self._warn(f'{name} is {numbers[name]} at {self._phase} step {step}')
    clean = {n: v if math.isfinite(v) else None for n, v in numbers.items()}
    self._each('write', int(step), clean)

  def trajectories(
    self,
    step: int,
    groups: 'Sequence[Group]',
    advantages: Any = None,
    kind: str = 'train',
  ) -> None:
    """Shows what was played at `step`.

    advantages: one row for each trajectory, in the order of `groups` laid end to end;
      `[B, T]` or a list of `[T]`. Row entries beyond a trajectory's length are padding.
    kind: 'train' or 'eval'.
    """
    self._each('trajectories', step, groups, advantages, kind)

  def decode_with(self, decode: Decode) -> None:
    """Takes the function that turns token ids into text, special tokens shown."""
    self._each('decode_with', decode)

  def close(self, status: str = 'finished') -> None:
    """Ends all loggers.

    Args:
      status: how the run ended: 'finished', 'stopped' or 'failed'.
    """
    self._each('close', status)

  def _each(self, method: str, *args: Any) -> None:
    for sink in list(self.sinks):
      try:
        getattr(sink, method)(*args)
      except Exception as error:
        if sink.required:
          raise
        self.sinks.remove(sink)
        name = type(sink).__name__
        self._warn(f'{name} failed and is left out from now on: {error}')


class JsonLines(MetricLogger):
  """Writes metrics.jsonl: one object per step, in the order of time.

  Each has `phase`, `step`, `time/wall` (seconds since 1970) and the step's metrics.
  A line is on disk when `write` returns, and is written by one system call, so a
  killed run leaves whole lines.
  """

  def __init__(self, path: pathlib.Path):
    self.path = path
    self._phase = ''
    rows = read_metrics(path)
    self._rewrite(rows)  # mends a torn last line
    self._last: dict[str, Any] = rows[-1] if rows else {}

  def phase(self, name: str, total: int | None, start: int = 0) -> None:
    """Starts a phase and removes the rows of steps that will be repeated."""
    self._phase = name
    rows = read_metrics(self.path)
    kept = rows_before(rows, name, start, over=start == total)
    if kept != rows:
      self._rewrite(kept)
    self._last = kept[-1] if kept else {}

  def write(self, step: int, metrics: Metrics) -> None:
    """Appends a row, or replaces the last one if it belongs to the same step."""
    row = {'phase': self._phase, 'step': step}
    same = all(self._last.get(key) == value for key, value in row.items())
    row = {**(self._last if same else row), 'time/wall': round(time.time(), 3)}
    row.update(metrics)
    line = (json.dumps(row, allow_nan=False) + '\n').encode()
    if same:
      os.pwrite(self._fd, line, self._start)
      os.ftruncate(self._fd, self._start + len(line))
    else:
      self._start = os.lseek(self._fd, 0, os.SEEK_END)
      os.write(self._fd, line)
    self._last = row

  def close(self, status: str) -> None:
    """Closes the file; removes it if the run failed before it had anything to write."""
    if self._fd >= 0:
      os.close(self._fd)
      self._fd = -1
    if status == 'failed' and not self._last:
      self.path.unlink(missing_ok=True)

  def _rewrite(self, rows: list[dict[str, Any]]) -> None:
    lines = [json.dumps(row, allow_nan=False) + '\n' for row in rows]
    write_atomically(self.path, ''.join(lines))
    if getattr(self, '_fd', -1) >= 0:
      os.close(self._fd)
    self._fd = os.open(self.path, os.O_RDWR)
    self._start = sum(len(line.encode()) for line in lines[:-1])


def read_metrics(path: pathlib.Path) -> list[dict[str, Any]]:
  """Reads the rows of a metrics.jsonl; leaves out a torn last row.

  Returns:
    The rows; none if there is no such file.

  Raises:
    ValueError: for a line in the middle that is not JSON.
  """
  if not path.exists():
    return []
  rows = []
  lines = path.read_text(encoding='utf-8', errors='replace').splitlines()
  for number, line in enumerate(lines, 1):
    try:
      rows.append(json.loads(line))
    except ValueError as error:
      if number < len(lines):
        raise ValueError(f'{path}, line {number}: not JSON: {error}') from error
  return rows


def rows_before(
  rows: list[dict[str, Any]], name: str, step: int, *, over: bool = False
) -> list[dict[str, Any]]:
  """Returns the rows before a step of a phase, with that step's evaluations.

  Args:
    rows: all rows.
    name: the phase.
    step: the step.
    over: the phase ends at that step, so later phases' rows stay.
  """
  order = list(dict.fromkeys(row['phase'] for row in rows))
  if name not in order:
    return rows
  kept = []
  for row in rows:
    behind = order.index(row['phase']) - order.index(name)
    ends = row['step'] < step + over  # what followed the last step stays whole
    if behind < 0 or (behind > 0 and over) or (behind == 0 and ends):
      kept.append(row)
    elif behind == 0 and row['step'] == step:
      evals = {k: v for k, v in row.items() if k.startswith('eval/')}
      head = {k: row[k] for k in ('phase', 'step', 'time/wall') if k in row}
      kept += [{**head, **evals}] if evals else []
  return kept


class TensorBoard(MetricLogger):
  """Writes TensorBoard events below a folder, one TensorBoard run per phase."""

  def __init__(self, folder: pathlib.Path):
    self.folder = folder
    self._writer: Any = None

  def phase(self, name: str, total: int | None, start: int = 0) -> None:
    """Opens the TensorBoard run of a phase."""
    from tensorboardX import SummaryWriter

    if self._writer:
      self._writer.close()
    place = self.folder / name
    resumed = place.exists()
    self._writer = SummaryWriter(str(place), purge_step=start if resumed else None)

  def write(self, step: int, metrics: Metrics) -> None:
    """Writes the metrics of a step as scalars."""
    for name, value in metrics.items():
      if value is not None and self._writer:
        self._writer.add_scalar(name, value, step)

  def close(self, status: str) -> None:
    """Closes the TensorBoard run."""
    if self._writer:
      self._writer.close()


class Tracker(MetricLogger):
  """Logs to wandb or trackio, which share the functions init, log and finish.

  The id of the tracked run is stored in the folder, so that a resumed run continues it.
  """

  required = False

  def __init__(
    self,
    service: str,
    folder: pathlib.Path,
    config: Mapping[str, Any],
    *,
    project: str = 'jaxrl',
  ):
    """Starts or continues the tracked run.

    Args:
      service: 'wandb' or 'trackio'.
      folder: folder of the run.
      config: the config to record.
      project: the service's project.

    Raises:
      ConfigError: if the service's package is not installed.
    """
    try:
      self._service = importlib.import_module(service)
    except ImportError as error:
      raise ConfigError(
        f'--config.logging.sinks={service}: the package is not installed: '
        f"pip install 'jaxrl[{service}]'"
      ) from error
    mark = folder / 'tracker.json'
    record = json.loads(mark.read_text()) if mark.exists() else {}
    name = record.get(service) or f'{folder.resolve().name}-{int(time.time())}'
    write_atomically(mark, json.dumps({**record, service: name}) + '\n')
    options = {'id': name, 'dir': str(folder)} if service == 'wandb' else {}
    self._service.init(
      project=project, name=name, config=dict(config), resume='allow', **options
    )
    self._phase = ''

  def phase(self, name: str, total: int | None, start: int = 0) -> None:
    """Sets the phase, which prefixes the names of metrics."""
    self._phase = name

  def write(self, step: int, metrics: Metrics) -> None:
    """Logs the metrics of a step."""
    numbers = {f'{self._phase}/{n}': v for n, v in metrics.items() if v is not None}
    self._service.log({**numbers, f'{self._phase}/step': step})

  def close(self, status: str) -> None:
    """Finishes the tracked run."""
    self._service.finish()
