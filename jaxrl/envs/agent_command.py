"""An agent that is a program: a process for each episode, ended with all its own."""

import contextlib
import json
import os
import selectors
import shutil
import signal
import subprocess
import tempfile
import threading
from collections.abc import Mapping, Sequence
from typing import Any

from jaxrl.signature import ConfigError

KEPT = 1 << 16  # bytes at the end of each of its outputs that are kept
_LAST_READS = 64  # of what is still to come when the program has ended
KEYS = ('reward', 'metrics', 'given')  # of what an agent may return
_LIMITED = 'ulimit -v "$1" && shift && exec "$@"'


class CommandFailed(RuntimeError):
  """The program ended with another status than 0, or was ended."""


class Command:
  """Runs the program `parts`. Raises ConfigError if it is not there.

  memory_gib: address space of each process, 0 = any.
  """

  def __init__(self, parts: Sequence[str], memory_gib: float = 0.0):
    if shutil.which(parts[0]) is None:
      raise ConfigError(f'env_config.command: there is no program {parts[0]!r}')
    self._name, self._parts = parts[0], list(parts)
    if memory_gib:
      limit = str(int(memory_gib * 2**20))
      self._parts = ['sh', '-c', _LIMITED, 'sh', limit, *parts]
    self._lock = threading.Lock()
    self._process: subprocess.Popen[bytes] | None = None
    self._over = False  # killed: nothing more is started

  def __call__(self, task: Mapping[str, Any], base_url: str, api_key: str) -> Any:
    """Its last line of output if that is an object as agents return it, else None.

    Raises CommandFailed with the end of what it wrote to its standard error.
    """
    with tempfile.TemporaryFile() as given:
      given.write(json.dumps(dict(task), default=str).encode())
      given.seek(0)
      with self._lock:
        if self._over:
          raise CommandFailed(f'{self._name} was given up before it began')
        process = self._process = subprocess.Popen(
          self._parts,
          stdin=given,
          stdout=subprocess.PIPE,
          stderr=subprocess.PIPE,
          env=_environment(base_url, api_key),
          start_new_session=True,
        )
    try:
      out, errors = _ends_of(process)
    finally:
      self._end(process)
    if process.returncode:
      text = errors.decode(errors='replace').strip()[-400:]
      status = f'{self._name} ended with status {process.returncode}'
      raise CommandFailed(f'{status}: {text}' if text else status)
    return last_object(out.decode(errors='replace'))

  def kill(self) -> None:
    """Ends it for good, whether it runs or is about to."""
    with self._lock:
      self._over = True
      if self._process is not None:
        _kill(self._process)

  def _end(self, process: subprocess.Popen[bytes]) -> None:
    """Ends what is left of its group, and takes leave of it."""
    with self._lock:
      _kill(process)
      process.wait()
      self._process = None
    for pipe in (process.stdout, process.stderr):
      if pipe is not None:
        pipe.close()


def _kill(process: subprocess.Popen[bytes]) -> None:
  """Kills its group. Until someone waits for the process the number is its own."""
  with contextlib.suppress(ProcessLookupError, PermissionError):
    os.killpg(process.pid, signal.SIGKILL)


def _ends_of(process: subprocess.Popen[bytes]) -> tuple[bytes, bytes]:
  """Waits until it is over, without taking its status; the ends of its outputs."""
  kept = {process.stdout: b'', process.stderr: b''}
  over, left = os.WEXITED | os.WNOWAIT, _LAST_READS
  with selectors.DefaultSelector() as selector:
    for pipe in kept:
      selector.register(pipe, selectors.EVENT_READ)  # pyright: ignore
    while selector.get_map() and left:
      ready = selector.select(timeout=0.1)
      for key, _ in ready:
        data = os.read(key.fd, KEPT)
        kept[key.fileobj] = (kept[key.fileobj] + data)[-KEPT:]  # pyright: ignore
        if not data:
          selector.unregister(key.fileobj)
      # What it started may hold its outputs open when it has gone.
      if os.waitid(os.P_PID, process.pid, over | os.WNOHANG) is not None:
        left = left - 1 if ready else 0
  os.waitid(os.P_PID, process.pid, over)
  return kept[process.stdout], kept[process.stderr]


def _environment(base_url: str, api_key: str) -> dict[str, str]:
  direct = [os.environ.get('NO_PROXY', ''), '127.0.0.1', 'localhost']
  proxies = ','.join(filter(None, direct))
  own = {'OPENAI_BASE_URL': base_url, 'OPENAI_API_KEY': api_key}
  return {**os.environ, **own, 'NO_PROXY': proxies, 'no_proxy': proxies}


def last_object(text: str) -> Any:
  """The last line if it is a JSON object of what an agent may return, else None."""
  lines = text.strip().splitlines()
  try:
    value = json.loads(lines[-1]) if lines else None
  except (ValueError, RecursionError):
    return None
  fits = isinstance(value, dict) and value and not value.keys() - set(KEYS)
  return value if fits else None
