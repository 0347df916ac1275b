"""CommandAgent is an agent that is a program: one process per episode."""

import contextlib
import json
import os
import selectors
import shutil
import signal
import subprocess
import tempfile
import threading
from collections.abc import Sequence
from typing import Any

from jaxrl.envs.graders.rule_graders import TaskItem

OUTPUT_TAIL_BYTES = 1 << 16  # bytes kept from the end of stdout and of stderr
_MAX_FINAL_READS = 64  # of remaining output when the program has ended
RESULT_KEYS = ('reward', 'metrics', 'given')  # the keys that an agent may return
_ULIMIT_SCRIPT = 'ulimit -v "$1" && shift && exec "$@"'


class CommandAgentError(RuntimeError):
  """Reports that the program ended with a status other than 0, or was killed."""


class CommandAgent:
  """Runs a program.

  Args:
    parts: The program and its arguments.
    memory_gib: The address space of each process; 0 means unlimited.

  Raises:
    ValueError: If the program does not exist.
  """

  def __init__(self, parts: Sequence[str], memory_gib: float = 0.0):
    if shutil.which(parts[0]) is None:
      raise ValueError(f'env_config.command: there is no program {parts[0]!r}')
    self._name = parts[0]
    self._parts = list(parts)
    if memory_gib:
      limit = str(int(memory_gib * 2**20))
      self._parts = ['sh', '-c', _ULIMIT_SCRIPT, 'sh', limit, *parts]
    self._lock = threading.Lock()
    self._process: subprocess.Popen[bytes] | None = None
    self._killed = False  # nothing more is started

  def __call__(self, task: TaskItem, base_url: str, api_key: str) -> Any:
    """Runs the program to its end.

    Args:
      task: The row of the task.
      base_url: The URL of the endpoint.
      api_key: The key of the session.

    Returns:
      The last line of output if it is an object as agents return it, else None.

    Raises:
      CommandAgentError: If the program failed; the error holds the end of its standard
        error.
    """
    with tempfile.TemporaryFile() as task_file:
      task_file.write(json.dumps(dict(task), default=str).encode())
      task_file.seek(0)
      with self._lock:
        if self._killed:
          raise CommandAgentError(f'{self._name} was cancelled before it started')
        process = self._process = subprocess.Popen(
          self._parts,
          stdin=task_file,
          stdout=subprocess.PIPE,
          stderr=subprocess.PIPE,
          env=_agent_environment(base_url, api_key),
          start_new_session=True,
        )
    try:
      out, errors = _read_tails(process)
    finally:
      self._finish(process)
    if process.returncode:
      text = errors.decode(errors='replace').strip()[-400:]
      status = f'{self._name} ended with status {process.returncode}'
      raise CommandAgentError(f'{status}: {text}' if text else status)
    return parse_last_line(out.decode(errors='replace'))

  def kill(self) -> None:
    """Ends the program for good, whether it runs or is about to start."""
    with self._lock:
      self._killed = True
      if self._process is not None:
        _kill(self._process)

  def _finish(self, process: subprocess.Popen[bytes]) -> None:
    """Kills what is left of the process group and reaps the process."""
    with self._lock:
      _kill(process)
      process.wait()
      self._process = None
    for pipe in (process.stdout, process.stderr):
      if pipe is not None:
        pipe.close()


def _kill(process: subprocess.Popen[bytes]) -> None:
  """Kills the process group. The id stays ours until someone waits for the process."""
  with contextlib.suppress(ProcessLookupError, PermissionError):
    os.killpg(process.pid, signal.SIGKILL)


def _read_tails(process: subprocess.Popen[bytes]) -> tuple[bytes, bytes]:
  """Waits for the process without reaping it; returns the ends of its outputs."""
  tails = {process.stdout: b'', process.stderr: b''}
  wait_options, reads_left = os.WEXITED | os.WNOWAIT, _MAX_FINAL_READS
  with selectors.DefaultSelector() as selector:
    for pipe in tails:
      selector.register(pipe, selectors.EVENT_READ)  # pyright: ignore
    while selector.get_map() and reads_left:
      ready = selector.select(timeout=0.1)
      for key, _ in ready:
        data = os.read(key.fd, OUTPUT_TAIL_BYTES)
        tails[key.fileobj] = (tails[key.fileobj] + data)[-OUTPUT_TAIL_BYTES:]  # pyright: ignore
        if not data:
          selector.unregister(key.fileobj)
      # Its children may keep its outputs open after it has ended.
      if os.waitid(os.P_PID, process.pid, wait_options | os.WNOHANG) is not None:
        reads_left = reads_left - 1 if ready else 0
  os.waitid(os.P_PID, process.pid, wait_options)
  return tails[process.stdout], tails[process.stderr]


def _agent_environment(base_url: str, api_key: str) -> dict[str, str]:
  no_proxy_hosts = [os.environ.get('NO_PROXY', ''), '127.0.0.1', 'localhost']
  proxies = ','.join(filter(None, no_proxy_hosts))
  endpoint = {
    'OPENAI_BASE_URL': base_url,
    'OPENAI_API_KEY': api_key,
    'ANTHROPIC_BASE_URL': base_url.removesuffix('/v1'),  # its clients append that
    'ANTHROPIC_API_KEY': api_key,
  }
  return {**os.environ, **endpoint, 'NO_PROXY': proxies, 'no_proxy': proxies}


def parse_last_line(text: str) -> Any:
  """Parses the last line of a program's output.

  Args:
    text: The output.

  Returns:
    The line as an object if it is one that an agent may return, else None.
  """
  lines = text.strip().splitlines()
  try:
    value = json.loads(lines[-1]) if lines else None
  except (ValueError, RecursionError):
    return None
  fits = isinstance(value, dict) and value and not value.keys() - set(RESULT_KEYS)
  return value if fits else None
