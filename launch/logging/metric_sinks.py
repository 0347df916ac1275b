"""Logs metrics: to metrics.jsonl, TensorBoard, wandb, trackio or Prometheus.

A `MetricSink` takes what a run reports. The run holds a `MultiSink`, which hands
every call to all sinks and turns NaN and infinity into nulls with a warning. A sink
that fails is reported once and tried again later; it does not end the run.
"""

import contextlib
import dataclasses
import errno
import importlib
import itertools
import json
import logging
import math
import os
import pathlib
import re
import sys
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import TYPE_CHECKING, Any

from jaxrl.options import ConfigError, require_package
from launch.logging.workdir import write_atomically

if TYPE_CHECKING:  # a wrong command line is answered before JAX is imported
  from jaxrl.types import Group

Metrics = Mapping[str, float | None]
Decode = Callable[[list[int]], str]
REPORT_INTERVAL_S = 600.0  # seconds between two reports that the same sink failed
PROMETHEUS_HOST = '127.0.0.1'
_NOT_IN_PROMETHEUS = re.compile(r'[^a-zA-Z0-9_:]')
MAX_UNWRITTEN = 10_000  # rows of metrics.jsonl that wait for a disk that is full

log = logging.getLogger(__name__)


class MetricSink:
  """Takes what a run reports; a subclass overrides the methods it needs.

  `--config.logging.sinks='path/file.py:Name(option=1)'` names a user's own subclass,
  which is made by `Name(folder, config, **options)`.

  Attributes:
    required: Whether a failure of this sink ends the run.
    retry_interval: Seconds until it is tried again after a failure.
  """

  required = False
  retry_interval = 10.0

  def phase(self, name: str, total: int | None, start: int = 0) -> None:
    """Notes that a phase begins or goes on, see `MultiSink.phase`."""

  def write(self, step: int, metrics: Metrics) -> None:
    """Writes the numbers of a step of the current phase.

    Args:
      step: The step.
      metrics: Numbers by name; None where one was not finite.
    """

  def trajectories(
    self,
    step: int,
    groups: 'Sequence[Group]',
    advantages: Any = None,
    kind: str = 'train',
    logprobs: Any = None,
  ) -> None:
    """Takes what was played at a step.

    Args:
      step: The step.
      groups: What was played.
      advantages: One row for each trajectory, in the order of `groups` laid end to end;
        `[B, T]` or a list of `[T]`. Entries beyond a trajectory's length are padding.
      kind: 'train' or 'eval'.
      logprobs: The learner's log-probs, as `advantages`; None if they were not scored.
    """

  def decode_with(self, decode: Decode) -> None:
    """Takes the function that turns token ids into text."""

  def close(self, status: str) -> None:
    """Ends the log.

    Args:
      status: How the run ended: 'finished', 'stopped' or 'failed'.
    """


class MultiSink:
  """Hands every call to all of its sinks.

  Attributes:
    sinks: The sinks.
  """

  def __init__(self, sinks: Iterable[MetricSink], warn: Callable[[str], None] = print):
    self.sinks = list(sinks)
    self._warn = warn
    self._warned: set[str] = set()
    self._phase = ''
    self._failures: dict[int, _Failure] = {}  # by position in `sinks`
    self._reported: dict[int, float] = {}  # when a failure was reported

  def phase(self, name: str, total: int | None, start: int = 0) -> None:
    """Begins a phase, or goes on with it.

    What an earlier process wrote of that phase at or after `start`, or of later
    phases, is dropped, so that every step appears once. Evaluations of the weights
    that the run goes on with (`eval/*` at `start`) stay. A phase that is over
    (`start == total`) leaves later ones alone.

    Args:
      name: Name of the phase.
      total: Its steps; None if unknown.
      start: The step that it begins at.
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
    logprobs: Any = None,
  ) -> None:
    """Shows what was played at a step, see `MetricSink.trajectories`."""
    self._each('trajectories', step, groups, advantages, kind, logprobs)

  def decode_with(self, decode: Decode) -> None:
    """Takes the function that turns token ids into text, special tokens shown."""
    self._each('decode_with', decode)

  def close(self, status: str = 'finished') -> None:
    """Ends all sinks, also those after one that fails.

    Args:
      status: How the run ended: 'finished', 'stopped' or 'failed'. After 'failed' no
        sink raises an error, which would hide the one that ended the run.
    """
    errors = []
    for number, sink in enumerate(self.sinks):
      try:
        sink.close(status)
      except Exception as error:
        if sink.required and status != 'failed':
          errors.append(error)
        elif number not in self._failures:
          self._report(f'{type(sink).__name__} could not be closed: {error}')
    if errors:
      raise errors[0]

  def _each(self, method: str, *args: Any) -> None:
    for number, sink in enumerate(self.sinks):
      failure = self._failures.get(number)
      waits = failure is not None and time.monotonic() < failure.retry_at
      if waits and method in ('write', 'trajectories'):
        continue
      try:
        if method != 'phase' and failure and failure.phase:
          sink.phase(*failure.phase)
          failure.phase = ()
        getattr(sink, method)(*args)
      except Exception as error:
        if sink.required:
          raise
        if failure is None:
          now = time.monotonic()
          is_due = now - self._reported.get(number, -math.inf) > REPORT_INTERVAL_S
          failure = self._failures[number] = _Failure(method, reported=is_due)
          if is_due:
            self._reported[number] = now
            name = type(sink).__name__
            self._report(f'{name} failed and is tried again later: {error}')
        failure.retry_at = time.monotonic() + sink.retry_interval
        if method == 'phase':
          failure.phase = args
      else:
        if failure and method == failure.method:
          del self._failures[number]
          if failure.reported:
            self._report(f'{type(sink).__name__} works again')

  def _report(self, text: str) -> None:
    with contextlib.suppress(OSError):  # the terminal may be a file on the full disk
      self._warn(text)


@dataclasses.dataclass
class _Failure:
  """Says which call failed, when to repeat it, and which phase has not begun yet."""

  method: str
  reported: bool
  retry_at: float = 0.0
  phase: tuple[Any, ...] = ()


class JsonLines(MetricSink):
  """Writes metrics.jsonl: one object per step, in the order of time.

  Each has `phase`, `step`, `time/wall` (seconds since 1970) and the step's metrics.
  A line is on disk when `write` returns, and is written by one system call, so a
  killed run leaves whole lines. Rows that cannot be written, as on a full disk, are
  kept in memory and written as soon as that is possible.
  """

  retry_interval = 0.0

  def __init__(self, path: pathlib.Path):
    self.path = path
    self._phase = ''
    self._fd = -1
    self._unwritten: list[bytes] = []
    rows = read_metrics(path)
    self._rewrite(rows)  # mends a torn last line
    self._last: dict[str, Any] = rows[-1] if rows else {}

  def phase(self, name: str, total: int | None, start: int = 0) -> None:
    """Starts a phase and removes the rows of steps that will be repeated."""
    self._phase = name
    with contextlib.suppress(OSError):
      self._flush()
    rows = read_metrics(self.path)
    kept = rows_before(rows, name, start, over=start == total)
    if kept != rows:
      self._rewrite(kept)
    if not self._unwritten:
      self._last = kept[-1] if kept else {}

  def write(self, step: int, metrics: Metrics) -> None:
    """Appends a row, or replaces the last one if it belongs to the same step."""
    row = {'phase': self._phase, 'step': step}
    same = all(self._last.get(key) == value for key, value in row.items())
    row = {**(self._last if same else row), 'time/wall': round(time.time(), 3)}
    row.update(metrics)
    line = (json.dumps(row, allow_nan=False) + '\n').encode()
    if same and self._unwritten:
      self._unwritten.pop()
    elif same:
      self._end = self._start
    self._unwritten = [*self._unwritten, line][-MAX_UNWRITTEN:]
    self._last = row
    self._flush()

  def close(self, status: str) -> None:
    """Closes the file; removes it if the run failed before it had anything to write."""
    try:
      self._flush()
    finally:
      if self._fd >= 0:
        os.close(self._fd)
        self._fd = -1
    if status == 'failed' and not self._last:
      self.path.unlink(missing_ok=True)

  def _flush(self) -> None:
    """Writes the rows that wait; an error leaves whole lines in the file."""
    while self._unwritten:
      line = self._unwritten[0]
      try:
        if os.pwrite(self._fd, line, self._end) < len(line):
          raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC), str(self.path))
        os.ftruncate(self._fd, self._end + len(line))
      except OSError:
        os.ftruncate(self._fd, self._end)
        raise
      self._start, self._end = self._end, self._end + len(line)
      del self._unwritten[0]

  def _rewrite(self, rows: list[dict[str, Any]]) -> None:
    lines = [json.dumps(row, allow_nan=False) + '\n' for row in rows]
    write_atomically(self.path, ''.join(lines))
    if self._fd >= 0:
      os.close(self._fd)
    self._fd = os.open(self.path, os.O_RDWR)
    self._start = sum(len(line.encode()) for line in lines[:-1])
    self._end = os.fstat(self._fd).st_size


def read_metrics(path: pathlib.Path) -> list[dict[str, Any]]:
  """Reads the rows of a metrics.jsonl; leaves out a torn last row.

  Returns:
    The rows; none if there is no such file.

  Raises:
    ConfigError: For a line in the middle that is not a row.
  """
  rows = []
  lines = path.read_bytes().rstrip(b'\n').split(b'\n') if path.exists() else []
  for number, line in enumerate(lines, 1):
    try:
      rows.append(parse_row(line, path, number))
    except ConfigError:
      if number < len(lines):
        raise
  return rows


def parse_row(line: bytes, path: pathlib.Path, number: int) -> dict[str, Any]:
  """Parses a line of a metrics.jsonl.

  Args:
    line: The line.
    path: The file, for the error.
    number: Number of the line, from 1.

  Raises:
    ConfigError: If the line is not JSON, or not the metrics of a step.
  """
  try:
    row = json.loads(line, object_pairs_hook=_interned)
  except (ValueError, RecursionError) as error:
    problem = f'not JSON: {error}'
  else:
    if (
      isinstance(row, dict)
      and isinstance(row.get('phase'), str)
      and isinstance(row.get('step'), int)
    ):
      return row
    problem = 'not the metrics of a step, which have a phase and a step'
  raise ConfigError(
    f'{path}, line {number}: {problem}; delete this line, or restore the file'
  )


def _interned(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
  """Makes the dict of a JSON object; rows share the text of their keys."""
  return {sys.intern(name): value for name, value in pairs}


def is_trained(row: Mapping[str, Any]) -> bool:
  """Returns whether a row is of a training step, rather than an evaluation alone."""
  return any(name.startswith(('loss/', 'reward/')) for name in row)


def rows_before(
  rows: list[dict[str, Any]], name: str, step: int, *, over: bool = False
) -> list[dict[str, Any]]:
  """Returns the rows before a step of a phase, with that step's evaluations.

  Args:
    rows: All rows.
    name: The phase.
    step: The step.
    over: The phase ends at that step, so later phases' rows stay.
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


class TensorBoard(MetricSink):
  """Writes TensorBoard events below a folder, one TensorBoard run per phase.

  Events are written by the caller: tensorboardX's own thread would end with the first
  error, such as a full disk, and then block whoever adds to its queue.
  """

  def __init__(self, folder: pathlib.Path):
    self.folder = folder
    self._writer: Any = None  # None until a write opens the phase's next file
    self._phase, self._purge_step = '', None
    self._num_files = 0

  def phase(self, name: str, total: int | None, start: int = 0) -> None:
    """Ends the events of the last phase; steps from `start` on replace older ones."""
    self._close()
    self._phase = name
    self._purge_step = start if (self.folder / name).exists() else None

  def write(self, step: int, metrics: Metrics) -> None:
    """Writes the metrics of a step as scalars."""
    from tensorboardX.proto.summary_pb2 import Summary  # pyright: ignore

    values = [
      Summary.Value(tag=name, simple_value=value)
      for name, value in metrics.items()
      if value is not None
    ]
    try:
      if self._writer is None:
        self._open()
      self._add(step=step, summary=Summary(value=values))
      self._writer.flush()  # pyright: ignore
    except OSError:  # a file with a torn event is not continued
      with contextlib.suppress(OSError):
        self._close()
      self._writer = None
      raise

  def close(self, status: str) -> None:
    """Closes the TensorBoard run."""
    self._close()

  def _open(self) -> None:
    from tensorboardX.event_file_writer import EventsWriter
    from tensorboardX.proto.event_pb2 import SessionLog  # pyright: ignore

    place = self.folder / self._phase
    place.mkdir(parents=True, exist_ok=True)
    self._num_files += 1
    suffix = f'.{os.getpid()}.{self._num_files}'  # two may begin in one second
    self._writer = EventsWriter(str(place / 'events'), suffix)
    if self._purge_step is not None:
      log = SessionLog(status=SessionLog.START)
      self._add(step=self._purge_step, file_version='brain.Event:2')
      self._add(step=self._purge_step, session_log=log)

  def _add(self, **fields: Any) -> None:
    from tensorboardX.proto.event_pb2 import Event  # pyright: ignore

    self._writer.write_event(Event(wall_time=time.time(), **fields))

  def _close(self) -> None:
    writer, self._writer = self._writer, None
    if writer:
      writer.close()


class Tracker(MetricSink):
  """Logs to wandb or trackio, which share the functions init, log and finish.

  The id of the tracked run is stored in the folder, so that a resumed run continues it.
  """

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
      folder: Folder of the run.
      config: The config to record.
      project: The service's project.

    Raises:
      ConfigError: If the service's package is not installed.
    """
    try:
      self._service = importlib.import_module(service)
    except ImportError as error:
      raise ConfigError(
        f'--config.logging.sinks={service}: the package is not installed: '
        f"pip install -e '.[{service}]'"
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


class Prometheus(MetricSink):
  """Serves `/metrics` in Prometheus' text format.

  `reward/mean` is the gauge `jaxrl_reward_mean`. The labels are `run`, the name of the
  run's folder, and `phase`. A metric that a step does not report keeps its last value;
  one that was not finite is absent until it is finite again. `jaxrl_step` is the step
  of the latest values.
  """

  def __init__(self, folder: pathlib.Path, *, port: int = 0):
    """Starts the server.

    Args:
      folder: Folder of the run.
      port: Port on 127.0.0.1; 0 takes any port that is free.

    Raises:
      ConfigError: If the package is not installed, or the port cannot be used.
    """
    where = '--config.logging.sinks: prometheus'
    require_package('prometheus_client', where, 'prometheus')
    import prometheus_client

    if not 0 <= port < 2**16:
      raise ConfigError(f'{where}(port={port}): a port is a number from 0 to 65535')
    self._gauge_class = prometheus_client.Gauge
    self._registry = prometheus_client.CollectorRegistry()
    self._gauges: dict[str, Any] = {}
    self._public_names: set[str] = set()
    self._run, self._phase = folder.resolve().name, ''
    try:
      self._server, self._thread = prometheus_client.start_http_server(
        port, PROMETHEUS_HOST, self._registry
      )
    except OSError as error:
      reason = 'is in use' if error.errno == errno.EADDRINUSE else f'failed: {error}'
      raise ConfigError(
        f'{where}(port={port}): the port {reason}; choose another one, or port=0'
      ) from error
    self.url = f'http://{PROMETHEUS_HOST}:{self._server.server_port}/metrics'
    log.info('metrics for Prometheus at %s', self.url)

  def phase(self, name: str, total: int | None, start: int = 0) -> None:
    """Begins a phase, whose values have its name as a label."""
    self._phase = name

  def write(self, step: int, metrics: Metrics) -> None:
    """Replaces the values that are served."""
    for name, value in {'step': step, **metrics}.items():
      labels = (self._run, self._phase)
      if value is not None:
        self._gauge(name).labels(*labels).set(value)
      elif name in self._gauges:
        self._gauges[name].remove(*labels)

  def close(self, status: str) -> None:
    """Ends the server and frees its port."""
    self._server.shutdown()
    self._server.server_close()
    self._thread.join()

  def _gauge(self, name: str) -> Any:
    """Returns the gauge of a metric; names that differ in signs alone get numbers."""
    if name not in self._gauges:
      base = 'jaxrl_' + _NOT_IN_PROMETHEUS.sub('_', name)
      names = (base if n == 1 else f'{base}{n}' for n in itertools.count(1))
      public = next(n for n in names if n not in self._public_names)
      self._public_names.add(public)
      self._gauges[name] = self._gauge_class(
        public, f'{name}, of the latest step', ('run', 'phase'), registry=self._registry
      )
    return self._gauges[name]
