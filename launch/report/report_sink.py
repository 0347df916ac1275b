"""Keeps report.html up to date during a run."""

import collections
import concurrent.futures
import functools
import json
import operator
import os
import pathlib
import time
from collections.abc import Callable, Mapping, Sequence
from typing import TYPE_CHECKING, Any

from jaxrl.options import ConfigError
from launch.logging.console import Console
from launch.logging.metric_sinks import (
  Decode,
  Metrics,
  MetricSink,
  is_trained,
  parse_row,
  rows_before,
)
from launch.logging.workdir import read_json, write_atomically
from launch.report import samples

if TYPE_CHECKING:
  from jaxrl.training.diagnosis import Finding
  from jaxrl.types import Group
  from launch.report.page import ReportData

RENDER_INTERVAL_S = 10.0  # seconds between two renderings of a running run
MAX_ROWS = 600  # of a phase that are kept, and as many with evaluations


class ReportSink(MetricSink):
  """Renders `folder`/report.html periodically from what the run has written there.

  Rendering happens on a separate thread and replaces the file atomically. A failure to
  render is reported and never ends the run.

  Attributes:
    folder: Folder of the run.
  """

  def __init__(self, folder: pathlib.Path):
    self.folder = folder
    self._decode: Decode | None = None
    self._path = folder / 'samples.json'
    self._snapshots = read_json(self._path) or []
    self._history = MetricHistory(folder / 'metrics.jsonl')
    self._pending: dict[str, Callable[[], dict[str, Any]]] = {}  # by kind
    self._phase, self._total = '', None
    self._rendered = 0.0
    self._pool = concurrent.futures.ThreadPoolExecutor(1, thread_name_prefix='report')
    self._job: concurrent.futures.Future | None = None

  def decode_with(self, decode: Decode) -> None:
    """Sets the function that turns token ids into text."""
    self._decode = decode

  def phase(self, name: str, total: int | None, start: int = 0) -> None:
    """Starts a phase and drops snapshots of steps that will be repeated."""
    self._take_snapshots()
    self._phase, self._total = name, total
    self._pool.submit(self._history.reset)  # its file may have been written anew
    self._snapshots = rows_before(self._snapshots, name, start, over=start == total)

  def trajectories(
    self,
    step: int,
    groups: 'Sequence[Group]',
    advantages: Any = None,
    kind: str = 'train',
    logprobs: Any = None,
  ) -> None:
    """Keeps a snapshot of the groups if one is due at this step."""
    if not groups:
      return
    self._pending[kind] = functools.partial(
      samples.make_snapshot,
      self._phase,
      step,
      groups,
      advantages,
      self._decode,
      kind,
      logprobs=logprobs,
    )
    if kind != 'train' or samples.is_snapshot_due(step, self._total):
      self._take_snapshots(kind)

  def write(self, step: int, metrics: Metrics) -> None:
    """Renders the page if the last rendering is RENDER_INTERVAL_S old."""
    if self._job and self._job.done():
      self._job.result()  # its error, if it had one
    idle = self._job is None or self._job.done()
    if idle and time.monotonic() - self._rendered > RENDER_INTERVAL_S:
      self._rendered = time.monotonic()
      self._job = self._pool.submit(write_report, self.folder, 'running', self._history)

  def close(self, status: str) -> None:
    """Renders the page a last time with the final status.

    A run that failed before its first step has nothing to show, and gets no page.
    """
    self._pool.shutdown(wait=True)
    self._take_snapshots()
    self._history.update()
    if status == 'failed' and not self._history.num_rows():
      return
    write_report(self.folder, status, self._history)

  def _take_snapshots(self, *kinds: str) -> None:
    """Takes the pending snapshots, so that the last rollout is always shown."""
    new = [self._pending.pop(kind)() for kind in kinds or tuple(self._pending)]
    if new:
      self._snapshots = samples.limit_snapshots([*self._snapshots, *new])
      write_atomically(self._path, json.dumps(self._snapshots, allow_nan=False))


class MetricHistory:
  """Follows a metrics.jsonl that grows, and keeps a bounded number of its rows.

  `update` reads only what is new. Of a long phase every second, fourth, … row is kept,
  and the last one; rows with evaluations are thinned by themselves.

  Attributes:
    position: Where the last row begins in the file.
    last: The last row; None before any.
    varying: (phase, name) of each metric that has had two values.
    non_finite: Names of metrics that were not finite at some step.
  """

  def __init__(self, path: pathlib.Path):
    self._path = path
    self.reset()

  def reset(self) -> None:
    """Forgets what was read; the file may be another one."""
    self._file: tuple[int, int] | None = None
    self.last: dict[str, Any] | None = None  # a later write may still replace it
    self.position = 0
    self._kept: dict[tuple[str, bool], _SpacedRows] = {}
    self._first: dict[tuple[str, str], Any] = {}
    self._num_rows = 0  # before the last
    self._num_trained: collections.Counter[str] = collections.Counter()
    self.varying: set[tuple[str, str]] = set()
    self.non_finite: set[str] = set()

  def update(self) -> None:
    """Reads the rows that were written since the last call.

    Raises:
      ConfigError: For a line before the last that is not a row.
    """
    try:
      file = self._path.open('rb')
    except FileNotFoundError:
      self.reset()
      return
    with file:
      stat = os.fstat(file.fileno())
      if (stat.st_dev, stat.st_ino) != self._file or stat.st_size < self.position:
        self.reset()
        self._file = stat.st_dev, stat.st_ino
      file.seek(self.position)
      position = self.position
      for line in file:
        new = self.last is None or position > self.position
        number = self._num_rows + 1 + (new and self.last is not None)
        try:
          row = parse_row(line, self._path, number)
        except ConfigError:
          if file.read(1):
            raise
          break  # the last line, which is being written
        if new and self.last is not None:
          self._keep(self.last)
        self.last, self.position = row, position
        self._note(row)
        position += len(line)

  def rows(self) -> list[dict[str, Any]]:
    """Returns the rows that are kept, in the order of the file."""
    kept = [pair for spaced in self._kept.values() for pair in spaced.all()]
    last = [] if self.last is None else [self.last]
    return [row for _, row in sorted(kept, key=operator.itemgetter(0))] + last

  def num_rows(self) -> int:
    """Returns how many rows the file has."""
    return self._num_rows + (self.last is not None)

  def num_trained(self) -> dict[str, int]:
    """Returns the number of training steps by phase."""
    last = self.last or {}
    last_count = {last['phase']: 1} if is_trained(last) else {}
    return dict(self._num_trained + collections.Counter(last_count))

  def _keep(self, row: dict[str, Any]) -> None:
    """Counts a row that is complete, and keeps it for now."""
    evaluates = any(name.startswith('eval/') for name in row)
    spaced = self._kept.setdefault((row['phase'], evaluates), _SpacedRows())
    spaced.add(self._num_rows, row)
    self._num_rows += 1
    self._num_trained[row['phase']] += is_trained(row)

  def _note(self, row: Mapping[str, Any]) -> None:
    for name, value in row.items():
      if value is None:
        self.non_finite.add(name)
      key = row['phase'], name
      if key not in self.varying and self._first.setdefault(key, value) != value:
        self.varying.add(key)


class _SpacedRows:
  """Keeps at most MAX_ROWS rows, evenly spaced, and the last one."""

  def __init__(self):
    self._rows: list[tuple[int, dict[str, Any]]] = []
    self._last: tuple[int, dict[str, Any]] | None = None
    self._count, self._stride = 0, 1

  def add(self, number: int, row: dict[str, Any]) -> None:
    self._last = number, row
    if self._count % self._stride == 0:
      self._rows.append(self._last)
    self._count += 1
    if len(self._rows) > MAX_ROWS:
      self._rows, self._stride = self._rows[::2], self._stride * 2

  def all(self) -> list[tuple[int, dict[str, Any]]]:
    tail = [] if self._last is None or self._last in self._rows[-1:] else [self._last]
    return self._rows + tail


def find_causes(history: MetricHistory) -> 'list[Finding]':
  """Names what is known about why the newest phase of a run did not learn.

  Returns:
    The findings; none if it learned.
  """
  from jaxrl.training.diagnosis import diagnose  # a run needs it at its end only

  rows = [row for row in history.rows() if is_trained(row)]
  return diagnose([row for row in rows if row['phase'] == rows[-1]['phase']])


def write_report(
  folder: pathlib.Path, status: str, history: MetricHistory | None = None
) -> pathlib.Path:
  """Renders report.html from metrics.jsonl, config.json and samples.json.

  Args:
    folder: Folder of the run.
    status: 'running', 'finished', 'stopped' or 'failed'.
    history: What earlier pages have read of metrics.jsonl; None reads it all.

  Returns:
    Path of the page.
  """
  # Imported here because the page is first laid out after step 1.
  from launch.report.page import render_page

  history = history or MetricHistory(folder / 'metrics.jsonl')
  history.update()
  file = folder / 'config.json'
  record = json.loads(file.read_text()) if file.exists() else {}
  run = collect_report(folder, history, record, status)
  path = folder / 'report.html'
  write_atomically(path, render_page(run))
  return path


def collect_report(
  folder: pathlib.Path,
  history: MetricHistory,
  record: Mapping[str, Any],
  status: str,
) -> 'ReportData':
  """Returns what the page of a run shows."""
  from launch.report.page import ReportData

  warnings = [
    f'{name} was not a finite number at some steps'
    for name in sorted(history.non_finite)
  ]
  if status != 'running':
    warnings += map(str, find_causes(history))
  return ReportData(
    name=folder.resolve().name,
    rows=history.rows(),
    record=record,
    snapshots=read_json(folder / 'samples.json') or [],
    status=status,
    warnings=warnings,
    num_trained=history.num_trained(),
    varying=history.varying,
  )


def tell_why_nothing_was_learned(workdir: pathlib.Path, console: Console) -> None:
  """Ends with what is known about why a run did not learn, if that is so."""
  history = MetricHistory(workdir / 'metrics.jsonl')
  try:
    history.update()
  except ConfigError:  # the sinks have said that the file is damaged
    return
  findings = find_causes(history)
  if findings:
    console.say()
    console.say('This run did not learn:', style='bold')
  for finding in findings:
    console.warn(str(finding))
