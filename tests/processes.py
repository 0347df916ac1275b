"""Processes that tests start: whether they have ended, and what they may do."""

import contextlib
import ctypes
import os
import resource
import signal
import socket
import sys
import time


def is_running(pid: int) -> bool:
  """False for a process that has ended, even if nobody has waited for it yet."""
  try:
    with open(f'/proc/{pid}/stat') as file:
      return file.read().rpartition(')')[2].split()[0] != 'Z'
  except (FileNotFoundError, ProcessLookupError):  # the latter ended while we read
    return False


def wait_for_end(pid: int, seconds: float = 60):
  """Waits until a process has ended; fails the test if that takes over `seconds`."""
  end = time.monotonic() + seconds
  while is_running(pid):
    assert time.monotonic() < end, f'process {pid} still runs after {seconds} s'
    time.sleep(0.02)


def free_port() -> int:
  """A port of loopback on which nothing listens just now."""
  with socket.socket() as listener:
    listener.bind(('127.0.0.1', 0))
    return listener.getsockname()[1]


def obeying_modes(command):
  """Returns a command that runs another, for which modes of files hold, even as root.

  It fails where root may not give up the capability to override them.
  """
  return [sys.executable, '-m', 'tests.processes', *command]


if __name__ == '__main__':
  drop_from_bounding_set, dac_override = (
    24,
    1,
  )  # of <linux/prctl.h>, <linux/capability.h>
  if os.getuid() == 0 and ctypes.CDLL(None).prctl(
    drop_from_bounding_set, dac_override, 0, 0, 0
  ):
    raise PermissionError('the capability to override modes cannot be dropped')
  os.execv(sys.argv[1], sys.argv[1:])


@contextlib.contextmanager
def full_disk(size):
  """Makes writes beyond `size` bytes of any file fail, as a full disk does.

  Python writes no bytecode meanwhile: it would take a file cut short for whole, and no
  later process could import that module.
  """
  limits = resource.getrlimit(resource.RLIMIT_FSIZE)
  handler = signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
  writes_bytecode, sys.dont_write_bytecode = not sys.dont_write_bytecode, True
  resource.setrlimit(resource.RLIMIT_FSIZE, (size, limits[1]))
  try:
    yield
  finally:
    resource.setrlimit(resource.RLIMIT_FSIZE, limits)
    sys.dont_write_bytecode = not writes_bytecode
    signal.signal(signal.SIGXFSZ, handler)
