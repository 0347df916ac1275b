"""OpenEnvServer starts a server of OpenEnv on this machine and ends it."""

import contextlib
import os
import shlex
import shutil
import signal
import socket
import subprocess
import sys
import threading
import time
import urllib.error
import urllib.request
from collections.abc import Sequence

from jaxrl.envs.tools.mcp_tools import DEATH_SIGNAL_WRAPPER

_TAIL_BYTES = 1000  # bytes kept from the end of a server's outputs
_POLL_INTERVAL_S = 0.1
_HEALTH_TIMEOUT_S = 2.0


class OpenEnvServerError(RuntimeError):
  """Reports that a server did not start."""


def split_command(command: str) -> list[str]:
  """Splits the command that starts a server.

  Args:
    command: The command, which contains {port}.

  Returns:
    The program and its arguments.

  Raises:
    ValueError: If it names no program that exists, or has no {port}.
  """
  where = f'command={command!r}'
  try:
    parts = shlex.split(command)
  except ValueError as error:
    raise ValueError(f'{where}: {error}') from error
  if not parts or shutil.which(parts[0]) is None:
    raise ValueError(f'{where}: there is no program {parts[0] if parts else ""!r}')
  if '{port}' not in command:
    raise ValueError(f"{where}: must contain '{{port}}', as in --port {{port}}")
  return parts


class OpenEnvServer:
  """A server that runs until it is ended, or until this process ends.

  Args:
    parts: The program and its arguments, in which {port} stands for the port.
    start_timeout: Seconds until it must answer /health.

  Raises:
    OpenEnvServerError: If it ends or does not answer in this time.
  """

  def __init__(self, parts: Sequence[str], start_timeout: float):
    with socket.socket() as free:
      free.bind(('127.0.0.1', 0))
      port = free.getsockname()[1]
    self.url = f'http://127.0.0.1:{port}'
    argv = [part.replace('{port}', str(port)) for part in parts]
    if sys.platform == 'linux':  # it ends when this process does, however that ends
      argv = [sys.executable, '-c', DEATH_SIGNAL_WRAPPER, str(os.getpid()), *argv]
    self._process = subprocess.Popen(
      argv,
      stdin=subprocess.DEVNULL,
      stdout=subprocess.PIPE,
      stderr=subprocess.STDOUT,
      start_new_session=True,
    )
    self._tail = b''
    self._reader = threading.Thread(target=self._read_tail, daemon=True)
    self._reader.start()
    try:
      self._wait_until_healthy(parts[0], start_timeout)
    except BaseException:
      self.kill()
      raise

  @property
  def alive(self) -> bool:
    """Returns whether the server runs."""
    return self._process.poll() is None

  def has_ended(self, timeout: float) -> bool:
    """Waits for the end of the server.

    Args:
      timeout: Seconds to wait.

    Returns:
      Whether it has ended.
    """
    with contextlib.suppress(subprocess.TimeoutExpired):
      self._process.wait(timeout=timeout)
    return not self.alive

  def kill(self) -> None:
    """Kills the server and its process group."""
    with contextlib.suppress(ProcessLookupError, PermissionError):
      os.killpg(self._process.pid, signal.SIGKILL)
    self._process.wait()

  def _read_tail(self) -> None:
    assert self._process.stdout is not None
    with self._process.stdout as pipe:
      while data := os.read(pipe.fileno(), 1 << 16):
        self._tail = (self._tail + data)[-_TAIL_BYTES:]

  def _wait_until_healthy(self, name: str, start_timeout: float) -> None:
    deadline = time.monotonic() + start_timeout
    opener = urllib.request.build_opener(urllib.request.ProxyHandler({}))
    while time.monotonic() < deadline:
      if not self.alive:
        self._reader.join(timeout=1)
        text = self._tail.decode(errors='replace').strip()[-400:]
        raise OpenEnvServerError(
          f'the server {name} ended with status {self._process.returncode}: {text}'
        )
      try:
        with opener.open(f'{self.url}/health', timeout=_HEALTH_TIMEOUT_S):
          return
      except urllib.error.HTTPError:
        return  # it listens, and has no such path
      except OSError:
        time.sleep(_POLL_INTERVAL_S)
    raise OpenEnvServerError(
      f'the server {name} did not answer within start_timeout={start_timeout:g} seconds'
    )
