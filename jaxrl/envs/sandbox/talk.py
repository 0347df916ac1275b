"""A command in a sandbox that is asked, again and again, as long as it lives."""

import contextlib
import json
import os
import select
import selectors
import subprocess
import threading
import time
from collections.abc import Callable, Sequence

from jaxrl.envs.sandbox import streams
from jaxrl.envs.sandbox.base import Limit, SandboxError
from jaxrl.envs.sandbox.local import LocalSandbox, _end, _enter


class TalkEnded(Exception):
  """The command gave no answer; `said` is what it wrote. It has ended, or must.

  limit: why it was ended, '' when it ended by itself.
  """

  def __init__(self, said: bytes, limit: Limit):
    super().__init__(limit or 'ended')
    self.said: bytes = said
    self.limit: Limit = limit


class Talk:
  """Questions to a running command, one after the other.

  process, report: of an exec, and where it tells how it ended. end: ends it all.
  """

  def __init__(
    self, process: subprocess.Popen[bytes], report: int, end: Callable[[], None]
  ):
    self._process, self._report, self._end = process, report, end
    self._lock = threading.Lock()
    self._closed = False

  def ask(self, data: bytes, *, mark: bytes, seconds: float, most: int) -> bytes:
    """Writes `data`; what the command writes from then on, up to `mark`.

    most: bytes. Raises TalkEnded when the mark does not come; the talk is closed then.
    """
    with self._lock:
      if self._closed:
        raise TalkEnded(b'', '')
      said, limit, at = self._listen(data, mark, time.monotonic() + seconds, most)
      if at < 0 and not limit:
        limit = self._told()
    if at < 0:
      self.close()
      raise TalkEnded(bytes(said[:most]), limit)
    return bytes(said[:at])

  def _listen(
    self, data: bytes, mark: bytes, deadline: float, most: int
  ) -> tuple[bytearray, Limit, int]:
    """What came, the limit that it broke, and where the mark is, −1 for nowhere."""
    process, said, rest = self._process, bytearray(), memoryview(data)
    stdin, stdout, stderr = process.stdin, process.stdout, process.stderr
    assert stdin is not None
    assert stdout is not None
    assert stderr is not None
    limit: Limit = ''
    at, reading = -1, 2
    with selectors.DefaultSelector() as waiting:
      os.set_blocking(stdin.fileno(), False)
      waiting.register(stdin, selectors.EVENT_WRITE)
      waiting.register(stdout, selectors.EVENT_READ)
      waiting.register(stderr, selectors.EVENT_READ)
      while at < 0 and reading and not limit:
        for key, _ in waiting.select(max(0.0, deadline - time.monotonic())):
          if key.fileobj is stdin:
            rest = streams.feed(key.fd, rest)
            if not rest:
              waiting.unregister(stdin)
            continue
          piece = os.read(key.fd, streams.PIECE)
          said += piece
          if not piece:
            waiting.unregister(key.fileobj)
            reading -= 1
        at = said.find(mark)
        if at < 0 and len(said) > most:
          limit = 'output'
        elif at < 0 and time.monotonic() >= deadline:
          limit = 'time'
    return said, limit, at

  def _told(self) -> Limit:
    """The limit that ended it, as its report has it."""
    if not select.select([self._report], [], [], 1.0)[0]:
      return ''
    lines = os.read(self._report, streams.PIECE).splitlines()
    with contextlib.suppress(ValueError, IndexError):
      return json.loads(lines[0]).get('limit', '')
    return ''

  def close(self) -> None:
    """Ends the command and waits until all that it started is dead."""
    with self._lock:
      closed, self._closed = self._closed, True
      if not closed:
        self._end()


class TalkSandbox(LocalSandbox):
  """A `LocalSandbox` whose commands may also be spoken with."""

  def talk(self, command: Sequence[str], *, seconds: float) -> Talk:
    """Starts a command that is then asked, and closed by whoever started it.

    seconds: CPU time of each of its processes, over all questions.
    """
    if self._state is None:
      raise SandboxError('the sandbox is not started: call start() first')
    process, life, report = _enter()
    self._lives.add(life)

    def end() -> None:
      _end(process, life, report)
      self._lives.discard(life)

    try:
      life.write(json.dumps(self._spec(command, seconds)).encode() + b'\n')
    except (BrokenPipeError, ValueError) as error:
      end()
      raise SandboxError(f'the sandbox could not start {command[0]!r}') from error
    return Talk(process, report, end)
