"""Keeps report.html up to date while a run runs."""

import concurrent.futures
import functools
import json
import pathlib
import time
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any

from launch.report import samples
from launch.report.page import Run, render
from launch.workdir import write_atomically
from launch.writers import Decode, Metrics, Sink, keep, read_metrics

if TYPE_CHECKING:
  from jaxrl.types import Group

EVERY = 10.0  # seconds between two renderings of a running run


class Report(Sink):
  """Writes `folder`/report.html from what the run has written there, now and then.

  Rendering happens on a thread of its own, whole files replace whole files, and a
  failure to render is told and never ends the run.
  """

  required = False

  def __init__(self, folder: pathlib.Path):
    self.folder = folder
    self._decode: Decode | None = None
    self._path = folder / 'samples.json'
    self._kept = load_samples(self._path)
    self._last: dict[str, Callable[[], dict[str, Any]]] = {}  # by kind
    self._phase, self._total = '', None
    self._rendered = 0.0
    self._pool = concurrent.futures.ThreadPoolExecutor(1, thread_name_prefix='report')
    self._job: concurrent.futures.Future | None = None

  def decode_with(self, decode: Decode) -> None:
    self._decode = decode

  def phase(self, name: str, total: int | None, start: int = 0) -> None:
    self._settle()
    self._phase, self._total = name, total
    self._kept = keep(self._kept, name, start, over=start == total)

  def trajectories(
    self,
    step: int,
    groups: 'Sequence[Group]',
    advantages: Any = None,
    kind: str = 'train',
  ) -> None:
    if not groups:
      return
    phase, decode = self._phase, self._decode
    take = functools.partial(samples.snapshot, phase, step, groups, advantages, decode)
    self._last[kind] = functools.partial(take, kind)
    if kind != 'train' or samples.due(step, self._total):
      self._settle(kind)

  def write(self, step: int, metrics: Metrics) -> None:
    if self._job and self._job.done():
      self._job.result()  # its error, if it had one
    idle = self._job is None or self._job.done()
    if idle and time.monotonic() - self._rendered > EVERY:
      self._rendered = time.monotonic()
      self._job = self._pool.submit(write_report, self.folder, 'running')

  def close(self, status: str) -> None:
    self._settle()
    self._pool.shutdown(wait=True)
    write_report(self.folder, status)

  def _settle(self, *kinds: str) -> None:
    """Keeps the snapshots at hand: the last one played is always shown."""
    new = [self._last.pop(kind)() for kind in kinds or tuple(self._last)]
    if new:
      self._kept = samples.bounded([*self._kept, *new])
      write_atomically(self._path, json.dumps(self._kept, allow_nan=False))


def load_samples(path: pathlib.Path) -> list[dict[str, Any]]:
  """The kept snapshots; none when the file is absent or not whole."""
  try:
    return json.loads(path.read_text(encoding='utf-8'))
  except (OSError, ValueError):
    return []


def write_report(folder: pathlib.Path, status: str) -> pathlib.Path:
  """Renders report.html from metrics.jsonl, config.json and samples.json."""
  rows = read_metrics(folder / 'metrics.jsonl')
  record = folder / 'config.json'
  lost = sorted({k for row in rows for k, v in row.items() if v is None})
  run = Run(
    name=folder.resolve().name,
    rows=rows,
    record=json.loads(record.read_text()) if record.exists() else {},
    snapshots=load_samples(folder / 'samples.json'),
    status=status,
    warnings=[f'{name} was not a finite number at some steps' for name in lost],
  )
  path = folder / 'report.html'
  write_atomically(path, render(run))
  return path
