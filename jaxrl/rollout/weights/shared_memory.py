"""Weights in the memory that the processes of one machine share.

A folder of mapped files on the memory file system: what POSIX shared memory is, with
names that can be listed and replaced whole. (`multiprocessing.shared_memory` takes a
segment for the receiver's own, and unlinks it when the receiver ends.)
"""

import contextlib
import fcntl
import os
import pathlib
import secrets
import shutil
import tempfile
import weakref

from jaxrl.rollout.weights.errors import WeightsError
from jaxrl.rollout.weights.transport import Folder

LOCK = '.owner'
MEMORY = pathlib.Path('/dev/shm')


class SharedMemory(Folder):
  """A `Folder` in memory, under a random name that only this user may read.

  address: of one that is there already; by default this makes its own, and removes it
  in `close` or when the process ends. After a kill the memory stays until the next
  `SharedMemory` of this user is made, which removes those whose makers are dead. What
  is mapped outlasts all of this: the pages go with the last who has them.
  """

  mapped = True

  def __init__(self, address: str = ''):
    if address:
      if not pathlib.Path(address).is_dir():
        raise WeightsError(f'{address}: no weights are published there')
      self._end = None
      super().__init__(address, durable=False)
      return
    remove_abandoned()
    path, lock = _make(_root())
    self._end = weakref.finalize(self, _remove, path, lock, os.getpid())
    super().__init__(path, durable=False)

  @property
  def address(self) -> str:
    """What another process attaches by."""
    return str(self.path)

  def require(self, size: int) -> None:
    """Raises WeightsError unless so many bytes are free."""
    found = os.statvfs(self.path)
    free = found.f_bavail * found.f_frsize
    if free < size:
      raise WeightsError(
        f'{self.path.parent} has {free / 1e9:.2f} GB free, and the versions of the '
        f'weights that lie there at a time need {size / 1e9:.2f} GB: give it more (a '
        "container's --shm-size, say), or take --config.cluster.weights=object_store"
      )

  def close(self) -> None:
    if self._end is not None:
      self._end()


def attach(address: str) -> Folder:
  """A reader's end of a folder that is there, whether in memory or not."""
  if (pathlib.Path(address) / LOCK).is_file():
    return SharedMemory(address)
  return Folder(address, durable=False, make=False)


def remove_abandoned() -> list[pathlib.Path]:
  """Frees what makers that were killed have left; returns their folders."""
  gone = []
  for path in _root().glob(f'{_prefix()}*'):
    with contextlib.suppress(OSError):
      lock = os.open(path / LOCK, os.O_RDWR)
      try:
        # The kernel drops a lock with its process, so a free one has no owner.
        fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        shutil.rmtree(path)
        gone.append(path)
      finally:
        os.close(lock)
  return gone


def _root() -> pathlib.Path:
  return MEMORY if MEMORY.is_dir() else pathlib.Path(tempfile.gettempdir())


def _prefix() -> str:
  return f'jaxrl-weights-{os.getuid()}-'


def _make(root: pathlib.Path) -> tuple[pathlib.Path, int]:
  """A new folder and its lock, held. It bears its name only once it is locked."""
  token = secrets.token_hex(8)
  draft = root / f'.jaxrl-{token}'
  draft.mkdir(mode=0o700)
  lock = os.open(draft / LOCK, os.O_RDWR | os.O_CREAT, 0o600)
  fcntl.flock(lock, fcntl.LOCK_EX)
  path = root / f'{_prefix()}{token}'
  draft.rename(path)
  return path, lock


def _remove(path: pathlib.Path, lock: int, owner: int) -> None:
  if os.getpid() != owner:
    return  # a fork of the owner ends, not the owner
  shutil.rmtree(path, ignore_errors=True)
  os.close(lock)
