"""A transport stores named bytes that publishers write and engines read.

`FolderTransport` uses a folder that all machines see, `SharedMemoryTransport` the
memory that the processes of one machine share. Ray's object store is a third, in the
Ray runtime.
"""

import contextlib
import dataclasses
import fcntl
import mmap
import os
import pathlib
import re
import secrets
import shutil
import socket
import tempfile
import time
import weakref
from typing import Protocol

from jaxrl.options import Options, option

Buffer = bytes | memoryview  # of bytes

_NAME_PATTERN = re.compile(r'[A-Za-z0-9][A-Za-z0-9._-]{0,199}')
_DRAFT_PREFIX = '.draft-'  # of files that are not finished
_DRAFT_MAX_AGE_S = 3600.0  # nobody is writing a draft any more after this time
_LOCK_FILE = '.owner'
_MEMORY_FOLDER = pathlib.Path('/dev/shm')


class WeightsError(RuntimeError):
  """Weights cannot be published or loaded; the message says which and why."""


class CorruptWeightsError(WeightsError):
  """Bytes are missing or differ from what was published; asking again may help."""


class Transport(Protocol):
  """Stores bytes under names. Any process may call; a name appears whole or not at all.

  Attributes:
    mapped: Views are of memory that all processes share and may be held for long.
      Receivers then keep what they have checked where it lies, and publishers write the
      full bytes of each region contiguously.
  """

  mapped: bool

  def put(self, name: str, *data: Buffer) -> None:
    """Stores a copy of `data`, joined, and replaces what had the name before."""
    ...

  def get(self, name: str) -> memoryview:
    """Returns the bytes, which are read-only and last as long as the view.

    Raises:
      KeyError: There is no such name.
    """
    ...

  def delete(self, name: str) -> None:
    """Deletes the name, if it exists. Views handed out before remain valid."""
    ...

  def names(self, prefix: str) -> list[str]:
    """Returns the names that begin with `prefix`."""
    ...

  def close(self) -> None:
    """Releases what this side holds; only the creator removes what was stored."""
    ...


@dataclasses.dataclass(frozen=True, kw_only=True)
class FolderOptions(Options):
  """Where a folder of versions is, and what may happen to it."""

  folder: str = option('', 'The folder.')
  durable: bool = option(
    True, 'Whether every file must have reached the disk before `put` returns.'
  )


class FolderTransport:
  """Stores each name as a file in a folder.

  Files are read by mapping them: their pages exist once, however many receivers there
  are. A file is written under another name and then renamed.

  Args:
    path: The folder.
    durable: As in `FolderOptions`.
    make: Whether to create the folder. Those who only join pass False.

  Raises:
    WeightsError: The folder does not exist, and `make` is False.
  """

  mapped = False  # a file that is deleted may take its pages with it, e.g. on NFS

  def __init__(
    self,
    path: str | os.PathLike[str],
    *,
    durable: bool = FolderOptions.durable,
    make: bool = True,
  ):
    self.path = pathlib.Path(path).absolute()
    self.durable = durable
    if make:
      self.path.mkdir(parents=True, exist_ok=True)
    elif not self.path.is_dir():
      raise WeightsError(
        f'{self.path}: {socket.gethostname()} has no such folder, so weights that are '
        'published there do not reach it. Choose one that all machines share'
      )
    for draft in self.path.glob(f'{_DRAFT_PREFIX}*'):
      with contextlib.suppress(OSError):
        if time.time() - draft.stat().st_mtime > _DRAFT_MAX_AGE_S:
          draft.unlink()

  def put(self, name: str, *data: Buffer) -> None:
    """Writes a file. An existing file is replaced, so what was mapped stays as it was.

    Raises:
      WeightsError: The bytes cannot be written.
    """
    target = self._file(name)
    draft = self.path / f'{_DRAFT_PREFIX}{secrets.token_hex(8)}'
    try:
      with open(draft, 'wb') as file:
        file.writelines(data)
        if self.durable:
          file.flush()
          os.fsync(file.fileno())
      os.replace(draft, target)
      if self.durable:
        self._sync_folder()
    except OSError as error:
      if not self.path.is_dir():
        raise WeightsError(f'{self.path}: nobody publishes weights there') from error
      draft.unlink(missing_ok=True)
      size = sum(map(len, data))
      raise WeightsError(
        f'{size:,} bytes of weights could not be written to {self.path}: '
        f'{error.strerror}. Free some space there or choose another place'
      ) from error

  def get(self, name: str) -> memoryview:
    """Maps a file. Raises KeyError when there is none."""
    try:
      with open(self._file(name), 'rb') as file:
        if not os.fstat(file.fileno()).st_size:
          return memoryview(b'')
        return memoryview(mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ))
    except FileNotFoundError:
      raise KeyError(name) from None

  def delete(self, name: str) -> None:
    """Deletes a file, if it exists."""
    self._file(name).unlink(missing_ok=True)

  def names(self, prefix: str) -> list[str]:
    """Returns the names that begin with `prefix`."""
    files = os.listdir(self.path)
    return [n for n in files if n.startswith(prefix) and not n.startswith('.')]

  def close(self) -> None:
    """Does nothing: the files stay."""

  def _file(self, name: str) -> pathlib.Path:
    if not _NAME_PATTERN.fullmatch(name):
      raise ValueError(f'{name!r} is not a name for weights')
    return self.path / name

  def _sync_folder(self) -> None:
    handle = os.open(self.path, os.O_RDONLY)
    try:
      os.fsync(handle)
    finally:
      os.close(handle)


class SharedMemoryTransport(FolderTransport):
  """A `FolderTransport` in memory, with a random name that only this user may read.

  It is a folder on the memory file system: what POSIX shared memory is, with names that
  can be listed and replaced as a whole. (`multiprocessing.shared_memory` treats a
  segment as the receiver's own, and unlinks it when the receiver ends.)

  The creator removes the folder in `close` or when its process ends. After a kill the
  memory stays until this user next creates a `SharedMemoryTransport`, which removes
  folders whose creators are dead. Mapped memory outlasts all of this: its pages are
  freed with the last process that has them.

  Args:
    address: Of an existing folder to join; by default a new one is created.

  Raises:
    WeightsError: There is nothing at `address`.
  """

  mapped = True

  def __init__(self, address: str = ''):
    if address:
      if not pathlib.Path(address).is_dir():
        raise WeightsError(f'{address}: no weights are published there')
      self._finalizer = None
      super().__init__(address, durable=False)
      return
    remove_abandoned()
    path, lock = _make_locked_folder(_memory_root())
    self._finalizer = weakref.finalize(self, _remove_folder, path, lock, os.getpid())
    super().__init__(path, durable=False)

  @property
  def address(self) -> str:
    """Returns the address by which other processes join."""
    return str(self.path)

  def require(self, size: int) -> None:
    """Raises WeightsError unless `size` bytes are free."""
    stats = os.statvfs(self.path)
    free = stats.f_bavail * stats.f_frsize
    if free < size:
      raise WeightsError(
        f'{self.path.parent} has {free / 1e9:.2f} GB free, and the versions of the '
        f'weights that are kept there at a time need {size / 1e9:.2f} GB: give it more '
        "(by a container's --shm-size, for instance), or use "
        'weight_sync.transport=object_store'
      )

  def close(self) -> None:
    """Removes the folder if this object created it."""
    if self._finalizer is not None:
      self._finalizer()


def join_folder(address: str) -> FolderTransport:
  """Returns a reader's end of an existing folder, whether it is in memory or not."""
  if (pathlib.Path(address) / _LOCK_FILE).is_file():
    return SharedMemoryTransport(address)
  return FolderTransport(address, durable=False, make=False)


def remove_abandoned() -> list[pathlib.Path]:
  """Removes folders in memory whose creators were killed, and returns their paths."""
  removed = []
  for path in _memory_root().glob(f'{_memory_prefix()}*'):
    with contextlib.suppress(OSError):
      lock = os.open(path / _LOCK_FILE, os.O_RDWR)
      try:
        # The kernel releases a lock with its process, so a free one has no owner.
        fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        shutil.rmtree(path)
        removed.append(path)
      finally:
        os.close(lock)
  return removed


def _memory_root() -> pathlib.Path:
  if _MEMORY_FOLDER.is_dir():
    return _MEMORY_FOLDER
  return pathlib.Path(tempfile.gettempdir())


def _memory_prefix() -> str:
  return f'jaxrl-weights-{os.getuid()}-'


def _make_locked_folder(root: pathlib.Path) -> tuple[pathlib.Path, int]:
  """Returns a new folder and its held lock. It gets its name only once it is locked."""
  token = secrets.token_hex(8)
  draft = root / f'.jaxrl-{token}'
  draft.mkdir(mode=0o700)
  lock = os.open(draft / _LOCK_FILE, os.O_RDWR | os.O_CREAT, 0o600)
  fcntl.flock(lock, fcntl.LOCK_EX)
  path = root / f'{_memory_prefix()}{token}'
  draft.rename(path)
  return path, lock


def _remove_folder(path: pathlib.Path, lock: int, owner: int) -> None:
  if os.getpid() != owner:
    return  # a fork of the owner ends, not the owner
  shutil.rmtree(path, ignore_errors=True)
  os.close(lock)
