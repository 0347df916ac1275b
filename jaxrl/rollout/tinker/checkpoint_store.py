"""Checkpoint store: training runs and their checkpoints, in files.

A checkpoint is a folder, and a small file beside it that names the folder. The file is
written last, under another name first, so that a checkpoint is either whole or not
there, whenever the process ends. Folders that no file names are removed at the start.

FOLDER/runs/RUN/run.json                    what the run trains
FOLDER/runs/RUN/KIND/NAME.json              one checkpoint, KIND as in its path
FOLDER/runs/RUN/KIND/NAME.HEX/tensors.safetensors
FOLDER/sessions/SESSION.json
"""

import contextlib
import datetime
import json
import os
import pathlib
import re
import shutil
import time
import uuid
from collections.abc import Iterator, Mapping

import numpy as np

from jaxrl.options import JsonObject
from jaxrl.rollout.tinker.pending_results import RequestError
from jaxrl.rollout.tinker.row_adapters import Adapters
from jaxrl.rollout.tinker.tenant_learner import TenantSnapshot

TRAINING, SAMPLER, EXTERNAL = 'weights', 'sampler_weights', 'external_weights'
KINDS = {TRAINING: 'training', SAMPLER: 'sampler', EXTERNAL: 'external'}
MAX_TTL = 10 * 365 * 24 * 3600  # ten years, as the API has it
_NAME = re.compile(r'[A-Za-z0-9][\w.\-=+]{0,127}', re.ASCII)
_TENSORS = 'tensors.safetensors'
_PARTS = 'adapters', 'mu', 'nu'


def check_name(name: str, what: str) -> str:
  """Returns a name that can be a file's.

  Args:
    name: The name.
    what: What it names.

  Raises:
    RequestError: If it cannot.
  """
  if not _NAME.fullmatch(name) or name.endswith('.json'):
    raise RequestError(
      f'{what} {name[:40]!r} must be 1 to 128 letters, digits and ._-=+, and '
      'begin with a letter or digit'
    )
  return name


def check_ttl(seconds: int | None) -> int | None:
  """Returns the seconds until a checkpoint expires.

  Args:
    seconds: What a client sent; None for never.

  Raises:
    RequestError: If they are too few or too many.
  """
  if seconds is not None and not 1 <= seconds <= MAX_TTL:
    raise RequestError(f'ttl_seconds={seconds} must be from 1 to {MAX_TTL}')
  return seconds


def _file_name(run_id: str) -> str:
  return run_id.replace(':', '~')


def parse_path(path: str) -> tuple[str, str, str]:
  """Splits a path `tinker://RUN/KIND/NAME`.

  Args:
    path: The path.

  Raises:
    RequestError: If it is none.
  """
  parts = path.removeprefix('tinker://').split('/')
  if not path.startswith('tinker://') or len(parts) != 3 or parts[1] not in KINDS:
    raise RequestError(
      f'{path[:80]!r} is not a checkpoint: tinker://RUN/weights/NAME is expected, or '
      'sampler_weights'
    )
  check_name(_file_name(parts[0]).replace('~', '-'), 'run')
  return parts[0], parts[1], check_name(parts[2], 'checkpoint')


class CheckpointStore:
  """Reads and writes runs, checkpoints and sessions below a folder.

  Attributes:
    folder: The folder.
  """

  def __init__(self, folder: pathlib.Path, max_checkpoints: int = 10_000):
    """Opens a folder, and removes what an earlier process left half written.

    Args:
      folder: The folder; it is made if it does not exist.
      max_checkpoints: Checkpoints that it may hold.
    """
    self.folder, self._max_checkpoints = folder, max_checkpoints
    for name in ('runs', 'sessions'):
      (folder / name).mkdir(parents=True, exist_ok=True)
    for kind in folder.glob('runs/*/*weights'):
      named = {json.loads(x.read_text())['folder'] for x in kind.glob('*.json')}
      for path in kind.iterdir():
        if path.is_dir() and path.name not in named:
          shutil.rmtree(path, ignore_errors=True)
    for path in folder.rglob('*.tmp'):
      path.unlink(missing_ok=True)

  def _run_folder(self, run_id: str) -> pathlib.Path:
    check_name(_file_name(run_id).replace('~', '-'), 'run')
    return self.folder / 'runs' / _file_name(run_id)

  # ---- runs and sessions

  def save_run(self, run_id: str, facts: JsonObject) -> None:
    """Writes what is known of a run.

    Args:
      run_id: The run.
      facts: What JSON can hold.
    """
    folder = self._run_folder(run_id)
    folder.mkdir(exist_ok=True)
    _write_json(folder / 'run.json', {**facts, 'run_id': run_id})

  def find_run(self, run_id: str) -> JsonObject | None:
    """Returns what is known of a run; None if there is no such run."""
    return _read_json(self._run_folder(run_id) / 'run.json')

  def runs(self) -> list[JsonObject]:
    """Returns what is known of all runs, the newest first."""
    found = [_read_json(path) for path in self.folder.glob('runs/*/run.json')]
    return sorted((x for x in found if x), key=lambda x: x['created'], reverse=True)

  def save_session(self, session_id: str, facts: JsonObject) -> None:
    """Writes what is known of a session."""
    path = self.folder / 'sessions' / f'{session_id}.json'
    _write_json(path, {**facts, 'session_id': session_id})

  def find_session(self, session_id: str) -> JsonObject | None:
    """Returns what is known of a session; None if there is no such session."""
    if not _NAME.fullmatch(session_id):
      return None
    return _read_json(self.folder / 'sessions' / f'{session_id}.json')

  def sessions(self) -> list[JsonObject]:
    """Returns what is known of all sessions, the newest first."""
    found = [_read_json(path) for path in self.folder.glob('sessions/*.json')]
    return sorted((x for x in found if x), key=lambda x: x['created'], reverse=True)

  # ---- checkpoints

  def save(
    self,
    run_id: str,
    kind: str,
    name: str,
    snapshot: TenantSnapshot | None,
    facts: JsonObject,
    *,
    overwrite: bool = False,
    ttl_seconds: int | None = None,
    files: Mapping[str, bytes] | None = None,
  ) -> str:
    """Writes a checkpoint.

    Args:
      run_id: The run.
      kind: TRAINING, SAMPLER or EXTERNAL.
      name: Its name.
      snapshot: What it holds.
      facts: What is known of it.
      overwrite: Whether it may replace one of its name.
      ttl_seconds: Seconds until it is removed; None for never.
      files: What it holds instead of a snapshot.

    Returns:
      Its path.

    Raises:
      RequestError: If there is one of that name, or there is no room.
    """
    check_ttl(ttl_seconds)
    folder = self._run_folder(run_id) / kind
    folder.mkdir(parents=True, exist_ok=True)
    pointer = folder / f'{check_name(name, "checkpoint")}.json'
    old = self._read(pointer)
    if old and not overwrite:
      raise RequestError(f'run {run_id} has a checkpoint {kind}/{name} already')
    self._check_room()
    data = folder / f'{name}.{uuid.uuid4().hex}'
    data.mkdir()
    try:
      for file_name, content in (files or {_TENSORS: _pack(snapshot)}).items():
        _write_bytes(data / file_name, content)
      _sync_folder(data)
      created = time.time()
      record = {
        **facts,
        'folder': data.name,
        'created': created,
        'expires': None if ttl_seconds is None else created + ttl_seconds,
        'size': sum(path.stat().st_size for path in data.iterdir()),
        'count': snapshot.count if snapshot else 0,
      }
      _write_json(pointer, record)
    except BaseException:
      shutil.rmtree(data, ignore_errors=True)
      raise
    if old:
      shutil.rmtree(folder / old['folder'], ignore_errors=True)
    return f'tinker://{run_id}/{kind}/{name}'

  def _check_room(self) -> None:
    if len(list(self.folder.glob('runs/*/*/*.json'))) >= self._max_checkpoints:
      raise RequestError(
        f'there are {self._max_checkpoints} checkpoints, and no more can be saved: '
        'delete some'
      )

  def copy(self, path: str, run_id: str, ttl_seconds: int | None = None) -> str:
    """Copies a checkpoint to another run; both share the bytes on the disk.

    Args:
      path: The checkpoint.
      run_id: The run that gets it, under the same kind and name.
      ttl_seconds: Seconds until the copy is removed; None for never.

    Returns:
      The copy's path.

    Raises:
      RequestError: If there is no such checkpoint, or no room.
    """
    record, (source_id, kind, name) = self.find(path), parse_path(path)
    self._check_room()
    source = self._run_folder(source_id) / kind / record['folder']
    folder = self._run_folder(run_id) / kind
    data = folder / f'{name}.{uuid.uuid4().hex}'
    data.mkdir(parents=True)
    try:
      for file in source.iterdir():
        _link(file, data / file.name)
      _sync_folder(data)
      now = time.time()
      expires = None if ttl_seconds is None else now + ttl_seconds
      facts = {'folder': data.name, 'created': now, 'expires': expires}
      _write_json(folder / f'{name}.json', {**record, **facts})
    except FileNotFoundError as error:
      shutil.rmtree(data, ignore_errors=True)
      raise RequestError(
        f'there is no checkpoint {path}: it has been deleted'
      ) from error
    except BaseException:
      shutil.rmtree(data, ignore_errors=True)
      raise
    return f'tinker://{run_id}/{kind}/{name}'

  def _read(self, pointer: pathlib.Path) -> JsonObject | None:
    record = _read_json(pointer)
    if record and record['expires'] is not None and record['expires'] < time.time():
      self._remove(pointer, record)
      return None
    return record

  def _remove(self, pointer: pathlib.Path, record: JsonObject) -> None:
    pointer.unlink(missing_ok=True)
    shutil.rmtree(pointer.parent / record['folder'], ignore_errors=True)

  def find(self, path: str) -> JsonObject:
    """Returns what is known of a checkpoint.

    Args:
      path: Its path.

    Raises:
      RequestError: If there is no such checkpoint.
    """
    run_id, kind, name = parse_path(path)
    record = self._read(self._run_folder(run_id) / kind / f'{name}.json')
    if record is None:
      raise RequestError(f'there is no checkpoint {path}, or it has expired')
    return record

  def load(self, path: str, *, moments: bool = False) -> TenantSnapshot:
    """Reads a checkpoint.

    Args:
      path: Its path.
      moments: Whether to read the optimizer's state too.

    Raises:
      RequestError: If there is no such checkpoint, or it has no such state.
    """
    from safetensors.numpy import load_file

    record, (run_id, kind, _) = self.find(path), parse_path(path)
    if kind == EXTERNAL:
      raise RequestError(f'{path} was saved for others and cannot be loaded here')
    tensors = load_file(self._run_folder(run_id) / kind / record['folder'] / _TENSORS)
    parts = {part: _unpack(tensors, part) for part in _PARTS}
    if not moments:
      return TenantSnapshot(parts['adapters'])
    if not parts['mu']:
      raise RequestError(f'{path} has no optimizer state; save_state() saves it')
    return TenantSnapshot(parts['adapters'], parts['mu'], parts['nu'], record['count'])

  def files(self, path: str) -> dict[str, pathlib.Path]:
    """Returns the files of a checkpoint by name."""
    record, (run_id, kind, _) = self.find(path), parse_path(path)
    folder = self._run_folder(run_id) / kind / record['folder']
    return {file.name: file for file in sorted(folder.iterdir())}

  def delete(self, path: str) -> None:
    """Removes a checkpoint.

    Args:
      path: Its path.

    Raises:
      RequestError: If there is no such checkpoint.
    """
    record, (run_id, kind, name) = self.find(path), parse_path(path)
    self._remove(self._run_folder(run_id) / kind / f'{name}.json', record)

  def update(self, path: str, **facts: object) -> None:
    """Changes what is known of a checkpoint.

    Args:
      path: Its path.
      **facts: What to change.
    """
    record, (run_id, kind, name) = self.find(path), parse_path(path)
    _write_json(self._run_folder(run_id) / kind / f'{name}.json', {**record, **facts})

  def checkpoints(self, run_id: str | None = None) -> list[JsonObject]:
    """Lists checkpoints as the API describes them, the newest first.

    Args:
      run_id: Those of one run; None for all.
    """
    runs = self.folder.glob('runs/*') if run_id is None else [self._run_folder(run_id)]
    found = []
    for run in runs:
      for pointer in run.glob('*weights/*.json'):
        if record := self._read(pointer):
          place = f'{run.name.replace("~", ":")}/{pointer.parent.name}/{pointer.stem}'
          found.append((record['created'], describe(f'tinker://{place}', record)))
    return [entry for _, entry in sorted(found, key=lambda x: x[0], reverse=True)]

  def remove_expired(self) -> None:
    """Removes checkpoints that have expired."""
    for pointer in self.folder.glob('runs/*/*weights/*.json'):
      self._read(pointer)


def describe(path: str, record: JsonObject) -> JsonObject:
  """Returns a checkpoint as the API describes it.

  Args:
    path: Its path.
    record: What is known of it.
  """
  _, kind, name = parse_path(path)
  expires = record['expires']
  return {
    'checkpoint_id': f'{kind}/{name}',
    'checkpoint_type': KINDS[kind],
    'time': time_text(record['created']),
    'tinker_path': path,
    'size_bytes': record['size'],
    'public': bool(record.get('public')),
    'user_metadata': record.get('user_metadata'),
    'expires_at': None if expires is None else time_text(expires),
  }


def time_text(seconds: float) -> str:
  """Returns a time, in seconds since 1970, as the API writes it."""
  return datetime.datetime.fromtimestamp(seconds, datetime.UTC).isoformat()


def _pack(snapshot: TenantSnapshot | None) -> bytes:
  from safetensors.numpy import save

  assert snapshot is not None
  tensors = {}
  for part in _PARTS:
    for layer, pair in (getattr(snapshot, part) or {}).items():
      for letter, array in zip('ab', pair, strict=True):
        tensors[f'{part}.{layer}.{letter}'] = np.ascontiguousarray(array)
  return save(tensors)


def _unpack(tensors: Mapping[str, np.ndarray], part: str) -> Adapters:
  layers = dict.fromkeys(
    key.split('.')[1] for key in tensors if key.startswith(f'{part}.')
  )
  return {
    layer: (tensors[f'{part}.{layer}.a'], tensors[f'{part}.{layer}.b'])
    for layer in layers
  }


def _link(source: pathlib.Path, target: pathlib.Path) -> None:
  try:
    os.link(source, target)
  except FileNotFoundError:
    raise
  except OSError:  # a file system without links
    shutil.copyfile(source, target)


def _write_bytes(path: pathlib.Path, content: bytes) -> None:
  with path.open('wb') as file:
    file.write(content)
    file.flush()
    os.fsync(file.fileno())


def _write_json(path: pathlib.Path, value: Mapping[str, object]) -> None:
  """Writes a file that is whole at any moment: under another name first."""
  draft = path.with_name(f'{path.name}.{uuid.uuid4().hex}.tmp')
  try:
    _write_bytes(draft, json.dumps(value).encode())
    os.replace(draft, path)
    _sync_folder(path.parent)
  except BaseException:
    draft.unlink(missing_ok=True)
    raise


def _sync_folder(folder: pathlib.Path) -> None:
  with _opened(folder) as number:
    os.fsync(number)


@contextlib.contextmanager
def _opened(folder: pathlib.Path) -> Iterator[int]:
  number = os.open(folder, os.O_RDONLY)
  try:
    yield number
  finally:
    os.close(number)


def _read_json(path: pathlib.Path) -> JsonObject | None:
  try:
    return json.loads(path.read_text())
  except (FileNotFoundError, NotADirectoryError):
    return None
