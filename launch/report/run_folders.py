"""Finds the runs below a folder, and reads their records and metrics as they grow."""

import dataclasses
import itertools
import json
import os
import pathlib
import threading
import time
from collections.abc import Mapping, Sequence
from typing import Any

from jaxrl.options import ConfigError
from launch.logging.metric_sinks import parse_row
from launch.logging.workdir import flatten_keys, read_json
from launch.report.page import ReportData, metric_rank, run_seconds, short_number
from launch.report.report_sink import MetricHistory, collect_report

MAX_DEPTH = 5  # of folders below the one that is shown
MAX_FOLDERS = 20_000  # that are looked into
QUIET_S = 60.0  # a run without a lock that wrote since then counts as running
RESCAN_S = 2.0  # seconds between two searches for runs
MAX_NEW_BYTES = 16 << 20  # of metrics.jsonl that one answer reads
LOCKS = pathlib.Path('/proc/locks')
MAX_SPARK_POINTS = 40
# Keys that say where a run is rather than what it learns; runs that differ in no
# others are repetitions.
REPEATED = ('seed', 'trajectory_dump.path')


@dataclasses.dataclass
class RunFolder:
  """Holds what is known of one run.

  Attributes:
    name: The path of its folder, relative to the folder that is shown.
    folder: Its folder.
    history: What was read of its metrics.jsonl.
  """

  name: str
  folder: pathlib.Path

  def __post_init__(self):
    self.history = MetricHistory(self.folder / 'metrics.jsonl')
    self._lock = threading.RLock()

  def record(self) -> dict[str, Any]:
    """Returns the content of config.json; {} if it is absent or damaged."""
    record = read_json(self.folder / 'config.json')
    return record if isinstance(record, dict) else {}

  def status(self, record: Mapping[str, Any]) -> str:
    """Returns 'running', 'finished', 'stopped' or 'failed'.

    It is 'ended' if its process is gone and did not say how.
    """
    launches = record.get('launches') or [{}]
    if _is_locked(self.folder / '.lock'):
      return 'running'
    if ended := launches[-1].get('status'):
      return str(ended)
    try:
      changed = (self.folder / 'metrics.jsonl').stat().st_mtime
    except OSError:
      changed = 0.0
    # The lock of another container or machine cannot be seen.
    if time.time() - changed < QUIET_S:
      return 'running'
    last = self.history.last or {}
    total = (record.get('config') or {}).get('num_steps')
    is_over = total and last.get('phase') == 'train' and last['step'] + 1 >= total
    return 'finished' if is_over else 'ended'

  def rows(self) -> tuple[list[dict[str, Any]], str]:
    """Returns the rows of metrics.jsonl that are kept, and what is wrong with it."""
    with self._lock:
      try:
        self.history.update()
      except (ConfigError, OSError) as error:
        return self.history.rows(), str(error)
      return self.history.rows(), ''

  def report(self) -> ReportData:
    """Returns what the page of the run shows."""
    record = self.record()
    with self._lock:
      _, problem = self.rows()
      run = collect_report(self.folder, self.history, record, self.status(record))
    name = run.name if self.name == '.' else self.name
    warnings = [problem, *run.warnings] if problem else run.warnings
    return dataclasses.replace(run, name=name, warnings=warnings)

  def overview(self) -> dict[str, Any]:
    """Returns one line of the table of runs."""
    rows, problem = self.rows()
    record = self.record()
    config = record.get('config') or {}
    launches = record.get('launches') or [{}]
    last = rows[-1] if rows else {}
    rewards = [
      (row['step'], short_number(row['reward/mean']))
      for row in rows
      if row.get('reward/mean') is not None and row['phase'] == last['phase']
    ]
    stride = max(1, len(rewards) // MAX_SPARK_POINTS)
    walls = [row['time/wall'] for row in rows[-1:] if 'time/wall' in row]
    return {
      'name': self.name,
      'status': self.status(record),
      # Only launch.rollout, which trains nothing, keeps a ledger.
      'algorithm': 'rollouts only'
      if (self.folder / 'ledger').exists()
      else (config.get('algorithm') or {}).get('name', ''),
      'seed': config.get('seed'),
      'phase': last.get('phase', ''),
      'step': last.get('step'),
      'total': _phase_steps(config, last.get('phase', '')),
      'reward': rewards[-1][1] if rewards else None,
      'spark': rewards[::stride],
      'seconds': run_seconds(rows),
      'changed': walls[-1] if walls else None,
      'started': str(launches[0].get('time', '')),
      'repeats': repetition_key(config),
      'problem': problem,
    }

  def metrics(self, since: int, file: str) -> dict[str, Any]:
    """Returns metrics by name, those that are new after a position in the file.

    Args:
      since: Position up to which the reader knows the file; 0 asks for all, thinned.
      file: Which file the reader knows; another one is sent whole.

    Returns:
      `file` and `position` for the next call, whether this is `all` of it, `phase`,
      `step` and `wall` of each row, and `metrics`: for each name a value for each row,
      None where the row has none, and 'nan' where it was not finite.
    """
    path = self.folder / 'metrics.jsonl'
    try:
      stat = path.stat()
    except OSError:
      return {**_columns([]), 'file': '', 'position': 0, 'all': True}
    now = f'{stat.st_dev}-{stat.st_ino}'
    is_all = file != now or since <= 0 or stat.st_size < since
    if is_all:
      (rows, _), position = self.rows(), self.history.position
    else:
      rows, position = _rows_after(path, since)
    return {**_columns(rows), 'file': now, 'position': position, 'all': is_all}


def _phase_steps(config: Mapping[str, Any], phase: str) -> int | None:
  """Returns how many steps a phase has by the config; None if it does not say."""
  if phase == 'sft' and config.get('sft'):
    return config['sft'].get('num_steps') or None
  return None if config.get('num_epochs') else config.get('num_steps')


def _rows_after(path: pathlib.Path, since: int) -> tuple[list[dict[str, Any]], int]:
  """Returns the rows from a position on, and the position of the last of them."""
  rows: list[dict[str, Any]] = []
  position = start = since
  with path.open('rb') as file:
    file.seek(since)
    for line in file:
      try:
        rows.append(parse_row(line, path, number=0))
      except ConfigError:
        break  # it is being written
      position, start = start, start + len(line)
      if start - since > MAX_NEW_BYTES:
        break
  return rows, position


def _columns(rows: Sequence[Mapping[str, Any]]) -> dict[str, Any]:
  names = {name for row in rows for name in row} - {'phase', 'step', 'time/wall'}
  return {
    'phase': [row['phase'] for row in rows],
    'step': [row['step'] for row in rows],
    'wall': [row.get('time/wall') for row in rows],
    'metrics': {
      name: [_cell(row, name) for row in rows]
      for name in sorted(names, key=metric_rank)
    },
  }


def _cell(row: Mapping[str, Any], name: str) -> Any:
  number = short_number(row.get(name))
  return 'nan' if name in row and number is None else number


def repetition_key(config: Mapping[str, Any]) -> str:
  """Returns a text that is equal for runs that differ in their seed alone."""
  values = {k: v for k, v in flatten_keys(config).items() if k not in REPEATED}
  return json.dumps(values, sort_keys=True, default=str)


def diff_configs(
  first: Mapping[str, Any], second: Mapping[str, Any]
) -> list[list[Any]]:
  """Returns [key, first value, second value] of the keys in which two configs differ.

  Args:
    first: A config.
    second: Another one. A key that a config does not have is None there.
  """
  a, b = flatten_keys(first), flatten_keys(second)
  return [
    [key, a.get(key), b.get(key)]
    for key in sorted({*a, *b})
    if a.get(key) != b.get(key)
  ]


def _is_locked(path: pathlib.Path) -> bool:
  """Returns whether a process holds the lock of a run, without trying to take it."""
  try:
    inode = path.stat().st_ino
    lines = LOCKS.read_text().splitlines()
  except OSError:
    return False
  return any(
    len(words) > 5 and 'FLOCK' in words and words[-3].rpartition(':')[2] == str(inode)
    for words in map(str.split, lines)
  )


class RunCatalogue:
  """Knows the runs below a folder.

  Attributes:
    root: The folder.
  """

  def __init__(self, root: pathlib.Path):
    self.root = root
    self._runs: dict[str, RunFolder] = {}
    self._scanned = float('-inf')
    self._lock = threading.Lock()

  def runs(self) -> list[RunFolder]:
    """Returns all runs, by name."""
    with self._lock:
      if time.monotonic() - self._scanned > RESCAN_S:
        folders = {f.relative_to(self.root).as_posix(): f for f in find_runs(self.root)}
        self._runs = {
          name: self._runs.get(name) or RunFolder(name, folder)
          for name, folder in sorted(folders.items())
        }
        self._scanned = time.monotonic()
      return list(self._runs.values())

  def run(self, name: str) -> RunFolder:
    """Returns a run by its name.

    Raises:
      KeyError: If there is none.
    """
    return {run.name: run for run in self.runs()}[name]


def find_runs(root: pathlib.Path) -> list[pathlib.Path]:
  """Returns the folders of runs at or below a folder; runs have no runs inside.

  Args:
    root: The folder. It may be a run itself.
  """
  runs = []
  for folder, folders, files in itertools.islice(os.walk(root), MAX_FOLDERS):
    path = pathlib.Path(folder)
    if 'metrics.jsonl' in files or {'config.json', '.lock'} <= set(files):
      runs.append(path)
      folders.clear()
    is_deep = len(path.relative_to(root).parts) >= MAX_DEPTH
    folders[:] = [n for n in folders if not is_deep and not n.startswith('.')]
  return runs
