"""Named bytes that a publisher leaves and receivers find: all that a transport is."""

import contextlib
import mmap
import os
import pathlib
import re
import secrets
import socket
import threading
import time
from typing import Protocol

from jaxrl.rollout.weights.errors import WeightsError

NAME = re.compile(r'[A-Za-z0-9][A-Za-z0-9._-]{0,199}')
Buffer = bytes | memoryview  # of bytes
DRAFT = '.draft-'  # how the files begin that are not finished
ABANDONED = 3600.0  # seconds after which nobody is writing a draft any more


class Transport(Protocol):
  """Where blobs lie. Any process may call; a name appears whole or not at all.

  mapped: views are of memory that all share and may be held for long: receivers then
  keep what they have checked where it lies, and publishers lay each region's full bytes
  in one run.
  """

  mapped: bool

  def put(self, name: str, *data: Buffer) -> None:
    """Stores a copy of `data`, joined, in the place of what bore the name before."""
    ...

  def get(self, name: str) -> memoryview:
    """The bytes, not to be written to; they last as long as the view.

    Raises KeyError when nothing bears the name.
    """
    ...

  def delete(self, name: str) -> None:
    """Frees the name, if it is taken. Views handed out before remain good."""
    ...

  def names(self, prefix: str) -> list[str]:
    """The names that begin with `prefix`."""
    ...

  def close(self) -> None:
    """Lets go of what this side holds; only its maker removes what was stored."""
    ...


class Memory:
  """Within one process, between its threads."""

  mapped = False

  def __init__(self) -> None:
    self._blobs: dict[str, bytes] = {}
    self._lock = threading.Lock()

  def put(self, name: str, *data: Buffer) -> None:
    with self._lock:
      self._blobs[name] = b''.join(data)

  def get(self, name: str) -> memoryview:
    with self._lock:
      return memoryview(self._blobs[name])

  def delete(self, name: str) -> None:
    with self._lock:
      self._blobs.pop(name, None)

  def names(self, prefix: str) -> list[str]:
    with self._lock:
      return [name for name in self._blobs if name.startswith(prefix)]

  def close(self) -> None:
    pass


class Folder:
  """Files in a folder, read by mapping them: the pages of a file exist once, however
  many receivers there are. A file is written under another name and renamed.

  durable: every file has reached the disk before `put` returns. make: False for who
  only joins: WeightsError where the folder is not there already.
  """

  mapped = False  # a file that is gone may take its pages with it, on NFS for one

  def __init__(
    self, path: str | os.PathLike[str], *, durable: bool = True, make: bool = True
  ):
    self.path, self.durable = pathlib.Path(path).absolute(), durable
    if make:
      self.path.mkdir(parents=True, exist_ok=True)
    elif not self.path.is_dir():
      raise WeightsError(
        f'{self.path}: {socket.gethostname()} has no such folder, so weights that are '
        'published there do not reach it. Choose one that all machines share'
      )
    for draft in self.path.glob(f'{DRAFT}*'):
      with contextlib.suppress(OSError):
        if time.time() - draft.stat().st_mtime > ABANDONED:
          draft.unlink()

  def put(self, name: str, *data: Buffer) -> None:
    """Raises WeightsError when the bytes cannot be written.

    A file that bears a name is never written to, so what was mapped stays as it was.
    """
    target = self._file(name)
    draft = self.path / f'{DRAFT}{secrets.token_hex(8)}'
    try:
      with open(draft, 'wb') as file:
        file.writelines(data)
        if self.durable:
          file.flush()
          os.fsync(file.fileno())
      os.replace(draft, target)
      if self.durable:
        self._sync()
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
    try:
      with open(self._file(name), 'rb') as file:
        if not os.fstat(file.fileno()).st_size:
          return memoryview(b'')
        return memoryview(mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ))
    except FileNotFoundError:
      raise KeyError(name) from None

  def delete(self, name: str) -> None:
    self._file(name).unlink(missing_ok=True)

  def names(self, prefix: str) -> list[str]:
    found = os.listdir(self.path)
    return [n for n in found if n.startswith(prefix) and not n.startswith('.')]

  def close(self) -> None:
    pass

  def _file(self, name: str) -> pathlib.Path:
    if not NAME.fullmatch(name):
      raise ValueError(f'{name!r} is no name for weights')
    return self.path / name

  def _sync(self) -> None:
    handle = os.open(self.path, os.O_RDONLY)
    try:
      os.fsync(handle)
    finally:
      os.close(handle)
