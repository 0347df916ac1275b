"""InteractiveProcess is a command in a sandbox that answers requests while it lives."""

import contextlib
import json
import os
import select
import selectors
import subprocess
import threading
import time
from collections.abc import Callable, Sequence

from jaxrl.envs.sandbox import process_io
from jaxrl.envs.sandbox.local_sandbox import (
  LocalSandbox,
  _finish_exec,
  _start_namespaces,
)
from jaxrl.envs.sandbox.sandbox_api import ExceededLimit, SandboxError


class InteractiveProcessEnded(Exception):
  """Reports that the command gave no answer; it has ended, or must.

  Attributes:
    output: What the command wrote.
    limit: Why it was ended; '' if it ended by itself.
  """

  def __init__(self, output: bytes, limit: ExceededLimit):
    super().__init__(limit or 'ended')
    self.output: bytes = output
    self.limit: ExceededLimit = limit


class InteractiveProcess:
  """Sends requests to a running command, one after the other.

  Args:
    process: The process of an exec.
    report: The descriptor where the exec reports how it ended.
    end: Ends everything.
  """

  def __init__(
    self, process: subprocess.Popen[bytes], report: int, end: Callable[[], None]
  ):
    self._process = process
    self._report = report
    self._end_process = end
    self._lock = threading.Lock()
    self._closed = False

  def ask(
    self, data: bytes, *, end_mark: bytes, seconds: float, max_bytes: int
  ) -> bytes:
    """Sends a request and returns the answer.

    Args:
      data: What to write.
      end_mark: What ends the answer.
      seconds: The time limit.
      max_bytes: The maximum number of bytes of the answer.

    Returns:
      What the command wrote up to the mark.

    Raises:
      InteractiveProcessEnded: If the mark does not come; the process is closed then.
    """
    with self._lock:
      if self._closed:
        raise InteractiveProcessEnded(b'', '')
      output, limit, mark_position = self._listen(
        data, end_mark, time.monotonic() + seconds, max_bytes
      )
      if mark_position < 0 and not limit:
        limit = self._reported_limit()
    if mark_position < 0:
      self.close()
      raise InteractiveProcessEnded(bytes(output[:max_bytes]), limit)
    return bytes(output[:mark_position])

  def _listen(
    self, data: bytes, end_mark: bytes, deadline: float, max_bytes: int
  ) -> tuple[bytearray, ExceededLimit, int]:
    """Returns the output, the exceeded limit, and the mark's position (−1: none)."""
    process, output, unwritten = self._process, bytearray(), memoryview(data)
    stdin, stdout, stderr = process.stdin, process.stdout, process.stderr
    assert stdin is not None
    assert stdout is not None
    assert stderr is not None
    limit: ExceededLimit = ''
    mark_position, num_open = -1, 2
    with selectors.DefaultSelector() as selector:
      os.set_blocking(stdin.fileno(), False)
      selector.register(stdin, selectors.EVENT_WRITE)
      selector.register(stdout, selectors.EVENT_READ)
      selector.register(stderr, selectors.EVENT_READ)
      while mark_position < 0 and num_open and not limit:
        for key, _ in selector.select(max(0.0, deadline - time.monotonic())):
          if key.fileobj is stdin:
            unwritten = process_io.write_available(key.fd, unwritten)
            if not unwritten:
              selector.unregister(stdin)
            continue
          chunk = os.read(key.fd, process_io.CHUNK_BYTES)
          output += chunk
          if not chunk:
            selector.unregister(key.fileobj)
            num_open -= 1
        mark_position = output.find(end_mark)
        if mark_position < 0 and len(output) > max_bytes:
          limit = 'output'
        elif mark_position < 0 and time.monotonic() >= deadline:
          limit = 'time'
    return output, limit, mark_position

  def _reported_limit(self) -> ExceededLimit:
    """Returns the limit that ended the command, from its report."""
    if not select.select([self._report], [], [], 1.0)[0]:
      return ''
    lines = os.read(self._report, process_io.CHUNK_BYTES).splitlines()
    with contextlib.suppress(ValueError, IndexError):
      return json.loads(lines[0]).get('limit', '')
    return ''

  def close(self) -> None:
    """Ends the command and waits until everything that it started is dead."""
    with self._lock:
      closed, self._closed = self._closed, True
      if not closed:
        self._end_process()


class InteractiveSandbox(LocalSandbox):
  """A `LocalSandbox` that can also keep a command running and talk to it."""

  def start_process(
    self, command: Sequence[str], *, seconds: float
  ) -> InteractiveProcess:
    """Starts a command that answers requests; the caller closes it.

    Args:
      command: The program and its arguments.
      seconds: CPU time of each of its processes, over all requests.

    Returns:
      The running command.

    Raises:
      SandboxError: If the command cannot be started.
    """
    if self._state is None:
      raise SandboxError('the sandbox is not started: call start() first')
    process, life, report = _start_namespaces()
    self._life_files.add(life)

    def end() -> None:
      _finish_exec(process, life, report)
      self._life_files.discard(life)

    try:
      life.write(json.dumps(self._build_spec(command, seconds)).encode() + b'\n')
    except (BrokenPipeError, ValueError) as error:
      end()
      raise SandboxError(f'the sandbox could not start {command[0]!r}') from error
    return InteractiveProcess(process, report, end)
