"""Work directories of sandboxes on this machine; none is left behind.

A work directory is a folder in the temporary directory that holds a locked file `lock`.
Its holder's death unlocks it, and the next process that creates a work directory
removes it.
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


def make_workdir() -> tuple[Path, int]:
  """Creates a work directory, after removing deserted ones.

  Returns:
    The folder, and the descriptor of the lock by which it is the caller's.
  """
  _remove_deserted()
  workdir = Path(tempfile.mkdtemp(prefix=_PREFIX))
  return workdir, _lock_workdir(workdir)


@contextlib.contextmanager
def scratch_workdir() -> Iterator[Path]:
  """Creates a work directory for as long as the block lasts.

  Yields:
    The folder.
  """
  workdir, lock = make_workdir()
  try:
    yield workdir
  finally:
    remove_workdir(workdir, lock)


def _lock_workdir(workdir: Path) -> int:
  """Marks a work directory as owned, until its holder dies, by a locked file."""
  lock = os.open(workdir / 'new', os.O_CREAT | os.O_RDWR, 0o600)
  fcntl.flock(lock, fcntl.LOCK_EX)
  # Renamed only now, so that nobody ever sees an unlocked `lock`.
  os.rename(workdir / 'new', workdir / 'lock')
  return lock


@functools.cache
def _remove_deserted() -> None:
  """Removes the work directories of killed processes; runs once per process."""
  for workdir in Path(tempfile.gettempdir()).glob(f'{_PREFIX}*'):
    with contextlib.suppress(OSError):
      if workdir.lstat().st_uid != os.geteuid() or workdir.is_symlink():
        continue
      lock = os.open(workdir / 'lock', os.O_RDWR | os.O_NOFOLLOW)
      try:
        fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
      except OSError:
        os.close(lock)
      else:
        remove_workdir(workdir, lock)


def change_owner(folder: Path, uid: int) -> None:
  """Makes `uid` the owner of a folder and everything in it; follows no link.

  Args:
    folder: The folder.
    uid: The user and group id.
  """
  os.chown(folder, uid, uid)
  for parent, folders, files in os.walk(folder):
    for name in (*folders, *files):
      os.chown(os.path.join(parent, name), uid, uid, follow_symlinks=False)


def remove_workdir(workdir: Path, lock: int) -> None:
  """Removes a work directory, even if its owner has locked folders in it.

  Args:
    workdir: The folder.
    lock: The descriptor of its lock; -1 for none.
  """
  unlock_folders(workdir)
  shutil.rmtree(workdir, ignore_errors=True)
  if lock >= 0:
    os.close(lock)


def unlock_folders(tree: Path) -> None:
  """Makes all folders of a tree accessible to its owner.

  Args:
    tree: The tree.
  """
  for parent, folders, _ in os.walk(tree):
    for name in folders:
      path = os.path.join(parent, name)
      if not os.path.islink(path):
        with contextlib.suppress(OSError):
          os.chmod(path, 0o700)
