"""Folders of sandboxes on this machine: each somebody's, none left behind.

A place is a folder in the temporary directory that holds a locked file `lock`. Its
holder's death unlocks it, and the next process that makes a place removes it.
"""

import contextlib
import fcntl
import functools
import os
import shutil
import tempfile
from collections.abc import Iterator
from pathlib import Path

_PREFIX = 'sandbox-'


def make() -> tuple[Path, int]:
  """A new place, and the lock by which it is the caller's. Removes deserted ones."""
  _sweep()
  place = Path(tempfile.mkdtemp(prefix=_PREFIX))
  return place, _hold(place)


@contextlib.contextmanager
def scratch() -> Iterator[Path]:
  """A place for as long as the block lasts."""
  place, lock = make()
  try:
    yield place
  finally:
    remove(place, lock)


def _hold(place: Path) -> int:
  """Marks a place as somebody's: a locked file, which its holder's death unlocks."""
  lock = os.open(place / 'new', os.O_CREAT | os.O_RDWR, 0o600)
  fcntl.flock(lock, fcntl.LOCK_EX)
  os.rename(place / 'new', place / 'lock')  # so that no `lock` is ever seen unlocked
  return lock


@functools.cache
def _sweep() -> None:
  """Removes the places of those who were killed before they could; once a process."""
  for place in Path(tempfile.gettempdir()).glob(f'{_PREFIX}*'):
    with contextlib.suppress(OSError):
      if place.lstat().st_uid != os.geteuid() or place.is_symlink():
        continue
      lock = os.open(place / 'lock', os.O_RDWR | os.O_NOFOLLOW)
      try:
        fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
      except OSError:
        os.close(lock)
      else:
        remove(place, lock)


def give(folder: Path, uid: int) -> None:
  """Makes `uid` the owner of a folder and of all in it; follows no link."""
  os.chown(folder, uid, uid)
  for parent, folders, files in os.walk(folder):
    for name in (*folders, *files):
      os.chown(os.path.join(parent, name), uid, uid, follow_symlinks=False)


def remove(place: Path, lock: int) -> None:
  """Removes a place, also where its owner has locked folders in it."""
  unlock(place)
  shutil.rmtree(place, ignore_errors=True)
  if lock >= 0:
    os.close(lock)


def unlock(tree: Path) -> None:
  """Opens all folders of a tree to its owner."""
  for parent, folders, _ in os.walk(tree):
    for name in folders:
      path = os.path.join(parent, name)
      if not os.path.islink(path):
        with contextlib.suppress(OSError):
          os.chmod(path, 0o700)
