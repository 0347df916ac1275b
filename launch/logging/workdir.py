"""Manages a run's folder: who may use it, its config, and how it was launched."""

import contextlib
import datetime
import errno
import fcntl
import fnmatch
import importlib.metadata
import json
import os
import pathlib
import platform
import shlex
import subprocess
import sys
import time
from collections.abc import Mapping, Sequence
from typing import Any

from jaxrl.options import ConfigError

# Keys that may differ when a run resumes; all others decide what the run is.
FREE = (
  'num_steps',
  'num_epochs',
  'checkpoint.*',
  'eval.*',
  'logging.*',
  'trajectory_dump.save_arrays',
  'mesh.*',
  'cluster.*',
  'dataset.experience_store',
  'weight_sync.transport',
  'rollout.max_num_seqs',
  'rollout.episode_timeout',
  'batch.logprob_mismatch_warn',
)
ERROR_FILE = 'error.txt'  # the traceback that ended the run
RECORD_TYPES = {'config': dict, 'launches': list}
PACKAGES = (
  'jaxrl jax jaxlib flax optax orbax-checkpoint transformers tokenizers numpy ray'
).split()


class Workdir:
  """The open folder of one run; `close` lets others have it.

  Attributes:
    path: The folder.
    resumed: Whether it held this run already.
    day: When the run began, as in 2026-01-31.
    changes: Lines on what differs from its last launch.
  """

  def __init__(self, path: str | os.PathLike[str], config: Mapping[str, Any]):
    """Makes or opens the folder and checks it. Raises ConfigError, touching nothing.

    A folder that another process holds, or that holds a run of another config, is
    refused.
    """
    self.path = pathlib.Path(path)
    self.file = self.path / 'config.json'
    try:
      self.path.mkdir(parents=True, exist_ok=True)
      if not os.access(self.path, os.W_OK | os.X_OK):  # whatever the lock's file allows
        raise PermissionError(errno.EACCES, os.strerror(errno.EACCES))
      self._lock = open(self.path / '.lock', 'w')  # noqa: SIM115 held while open
    except OSError as error:
      reason = error.strerror or error
      raise ConfigError(f'--workdir={path}: cannot write there: {reason}') from error
    try:
      fcntl.flock(self._lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except OSError:
      self._lock.close()
      raise ConfigError(
        f'--workdir={path}: another process is running there; '
        'wait for it, or name another folder'
      ) from None
    self.config = json_data(config)
    self._is_recorded = False
    try:
      self._record = self._read()
      self.changes = self._compare()
    except ConfigError:
      self.close()
      raise
    self.resumed = bool(self._record['launches'])
    self.day = _first_day(self._record['launches'])

  def _read(self) -> dict[str, Any]:
    if not self.file.exists():
      return {'config': self.config, 'launches': []}
    try:
      record = json.loads(self.file.read_text())
      record = {key: type_(record[key]) for key, type_ in RECORD_TYPES.items()}
    except (ValueError, KeyError, TypeError, RecursionError) as error:
      raise ConfigError(
        f'{self.file}: not a record of a run ({error}); name another --workdir'
      ) from error
    return record

  def _compare(self) -> list[str]:
    old, new = flatten_keys(self._record['config']), flatten_keys(self.config)
    # An earlier version did not have all keys of this one, which are off unless set.
    old = {key: value for key, value in new.items() if not value} | old

    def shown(values: Mapping[str, Any], key: str) -> str:
      return repr(values[key]) if key in values else '(absent)'

    lines = {
      key: f'{key} {shown(old, key)} → {shown(new, key)}'
      for key in sorted({*old, *new})
      if (key in old, old.get(key)) != (key in new, new.get(key))
    }
    fixed = [
      line
      for key, line in lines.items()
      if not any(fnmatch.fnmatch(key, pattern) for pattern in FREE)
    ]
    if fixed:
      raise ConfigError(
        f'--workdir={self.path} holds a run with another config: {"; ".join(fixed)}. '
        'Set these back to resume it, or name another --workdir.'
      )
    return list(lines.values())

  def record(self, **facts: Any) -> None:
    """Writes config.json: the config, and this launch with `facts` added."""
    launch = {**launch_record(), **facts}
    self._record['config'] = self.config
    self._record['launches'].append(launch)
    self._is_recorded = True
    self._write()

  def end(self, status: str) -> None:
    """Notes in config.json how this launch ended, if it was recorded.

    Args:
      status: 'finished', 'stopped' or 'failed'.
    """
    if self._is_recorded:
      self._record['launches'][-1]['status'] = status
      with contextlib.suppress(OSError):  # a full disk must not fail a finished run
        self._write()

  def _write(self) -> None:
    write_atomically(self.file, json.dumps(self._record, indent=2, default=str) + '\n')

  def close(self) -> None:
    """Releases the lock of the folder."""
    self._lock.close()


def json_data(config: Mapping[str, Any]) -> dict[str, Any]:
  """Returns a config as it is read back from JSON."""
  return json.loads(json.dumps(config, default=str))


def flatten_keys(tree: Mapping[str, Any], prefix: str = '') -> dict[str, Any]:
  """Flattens nested sections into dotted keys."""
  leaves: dict[str, Any] = {}
  for key, value in tree.items():
    if isinstance(value, Mapping):
      leaves.update(flatten_keys(value, f'{prefix}{key}.'))
    else:
      leaves[f'{prefix}{key}'] = value
  return leaves


def _first_day(launches: Sequence[Any]) -> str:
  """Returns the day of the first launch, of what a record says; today without one."""
  with contextlib.suppress(LookupError, TypeError, ValueError):
    return datetime.date.fromisoformat(launches[0]['time'][:10]).isoformat()
  return time.strftime('%Y-%m-%d', time.gmtime())


def default_path(config_file: str, algorithm: str | None) -> pathlib.Path:
  """Returns runs/NAME[-ALGORITHM]: the same command finds the same folder."""
  name = pathlib.Path(config_file).stem
  if algorithm:
    name += '-' + pathlib.Path(algorithm.replace(':', '/')).name
  return pathlib.Path('runs') / name


def launch_record() -> dict[str, Any]:
  """Returns how this process was launched, as far as that is known without JAX."""
  return {
    'command': shlex.join(['python', *sys.orig_argv[1:]]),
    'time': time.strftime('%Y-%m-%dT%H:%M:%SZ', time.gmtime()),
    'commit': git_commit(),
    'python': platform.python_version(),
    'system': f'{platform.system()} {platform.machine()}, {os.cpu_count()} cores',
    'versions': package_versions(),
  }


def package_versions() -> dict[str, str]:
  """Returns the versions of the installed packages that matter for a run."""
  versions = {}
  for package in PACKAGES:
    try:
      versions[package] = importlib.metadata.version(package)
    except importlib.metadata.PackageNotFoundError:
      continue
  return versions


def git_commit() -> str | None:
  """Returns the code's git commit, with '+' if files differ; None outside git."""
  root = pathlib.Path(__file__).resolve().parents[2]
  if not (root / '.git').exists():
    return None
  try:
    options = {'cwd': root, 'capture_output': True, 'text': True, 'timeout': 5}
    head = subprocess.run(['git', 'rev-parse', 'HEAD'], **options)
    state = subprocess.run(['git', 'status', '--porcelain', '-uno'], **options)
  except (OSError, subprocess.SubprocessError):
    return None
  if head.returncode:
    return None
  return head.stdout.strip() + ('+' if state.stdout.strip() else '')


def read_json(path: pathlib.Path) -> Any:
  """Returns what a JSON file holds; None if it is absent or damaged."""
  try:
    return json.loads(path.read_text(encoding='utf-8'))
  except (OSError, ValueError, RecursionError):
    return None


def write_atomically(path: pathlib.Path, text: str) -> None:
  """Replaces a file at once: a reader sees the old text or the new, never a part."""
  part = path.with_name(f'.{path.name}.part')
  try:
    part.write_text(text, encoding='utf-8')
    os.replace(part, path)
  except OSError:
    with contextlib.suppress(OSError):
      part.unlink(missing_ok=True)  # a full disk needs its space
    raise
