"""Keeps report.html up to date during a run."""

import concurrent.futures
import functools
import json
import pathlib
import time
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any

from launch.logging.metric_loggers import (
  Decode,
  MetricLogger,
  Metrics,
  read_metrics,
  rows_before,
)
from launch.logging.workdir import write_atomically
from launch.report import samples

if TYPE_CHECKING:
  from jaxrl.types import Group

RENDER_INTERVAL_S = 10.0  # seconds between two renderings of a running run


class ReportLogger(MetricLogger):
  """Renders `folder`/report.html periodically from what the run has written there.

  Rendering happens on a separate thread and replaces the file atomically. A failure to
  render is reported and never ends the run.

  Attributes:
    folder: folder of the run.
  """

  def __init__(self, folder: pathlib.Path):
    self.folder = folder
    self._decode: Decode | None = None
    self._path = folder / 'samples.json'
    self._snapshots = load_samples(self._path)
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
    self._snapshots = rows_before(self._snapshots, name, start, over=start == total)

  def trajectories(
    self,
    step: int,
    groups: 'Sequence[Group]',
    advantages: Any = None,
    kind: str = 'train',
  ) -> None:
    """Keeps a snapshot of the groups if one is due at this step."""
    if not groups:
      return
    phase, decode = self._phase, self._decode
    take_snapshot = functools.partial(
      samples.make_snapshot, phase, step, groups, advantages, decode
    )
    self._pending[kind] = functools.partial(take_snapshot, kind)
    if kind != 'train' or samples.is_snapshot_due(step, self._total):
      self._take_snapshots(kind)

  def write(self, step: int, metrics: Metrics) -> None:
    """Renders the page if the last rendering is RENDER_INTERVAL_S old."""
    if self._job and self._job.done():
      self._job.result()  # its error, if it had one
    idle = self._job is None or self._job.done()
    if idle and time.monotonic() - self._rendered > RENDER_INTERVAL_S:
      self._rendered = time.monotonic()
      self._job = self._pool.submit(write_report, self.folder, 'running')

  def close(self, status: str) -> None:
    """Renders the page a last time with the final status.

    A run that failed before its first step has nothing to show, and gets no page.
    """
    self._take_snapshots()
    self._pool.shutdown(wait=True)
    if status == 'failed' and not read_metrics(self.folder / 'metrics.jsonl'):
      return
    write_report(self.folder, status)

  def _take_snapshots(self, *kinds: str) -> None:
    """Takes the pending snapshots, so that the last rollout is always shown."""
    new = [self._pending.pop(kind)() for kind in kinds or tuple(self._pending)]
    if new:
      self._snapshots = samples.limit_snapshots([*self._snapshots, *new])
      write_atomically(self._path, json.dumps(self._snapshots, allow_nan=False))


def load_samples(path: pathlib.Path) -> list[dict[str, Any]]:
  """Returns the saved snapshots, none if the file is absent or incomplete."""
  try:
    return json.loads(path.read_text(encoding='utf-8'))
  except (OSError, ValueError):
    return []


def write_report(folder: pathlib.Path, status: str) -> pathlib.Path:
  """Renders report.html from metrics.jsonl, config.json and samples.json.

  Args:
    folder: folder of the run.
    status: 'running', 'finished', 'stopped' or 'failed'.

  Returns:
    Path of the page.
  """
  # Imported here because the page is first laid out after step 1.
  from launch.report.page import ReportData, render_page

  rows = read_metrics(folder / 'metrics.jsonl')
  record = folder / 'config.json'
  non_finite = sorted({k for row in rows for k, v in row.items() if v is None})
  run = ReportData(
    name=folder.resolve().name,
    rows=rows,
    record=json.loads(record.read_text()) if record.exists() else {},
    snapshots=load_samples(folder / 'samples.json'),
    status=status,
    warnings=[f'{name} was not a finite number at some steps' for name in non_finite],
  )
  path = folder / 'report.html'
  write_atomically(path, render_page(run))
  return path
