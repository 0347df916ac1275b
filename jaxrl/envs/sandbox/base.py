"""What a sandbox is: start, exec, read, write, stop; and what it may use."""

import dataclasses
from collections.abc import Sequence
from typing import Literal, Protocol

MIB = 1 << 20

Limit = Literal['', 'time', 'memory', 'output']


class SandboxError(RuntimeError):
  """The sandbox itself failed, or refused; never the program that ran in it."""


@dataclasses.dataclass(frozen=True, kw_only=True)
class Limits:
  """Bounds on one exec and all that it starts. Sizes are bytes.

  seconds: wall clock, after which everything it started is killed; also the CPU
  seconds of each process, rounded up. memory: of all its processes together, what
  they share counted for each; the address space of one is four times that.
  file_size: of one file. tmp: of all that lies in /tmp. processes: at a time, threads
  counted. output: of stdout and stderr together; more ends the exec.
  """

  seconds: float = 10.0
  memory: int = 512 * MIB
  file_size: int = 64 * MIB
  tmp: int = 64 * MIB
  processes: int = 64
  open_files: int = 256
  output: int = MIB


@dataclasses.dataclass(frozen=True)
class Result:
  """How an exec ended. code: 128 + n when signal n ended it, 127 when the command
  was not found. limit: which limit ended it, '' when none did.
  """

  code: int
  stdout: bytes
  stderr: bytes
  limit: Limit = ''
  seconds: float = 0.0

  @property
  def text(self) -> str:
    """stdout, then stderr, as text; what is not UTF-8 is replaced."""
    return (self.stdout + self.stderr).decode('utf-8', 'replace')


class Sandbox(Protocol):
  """A session: files outlive an exec, processes do not. All calls block.

  `stop` may come from another thread: an exec under way then ends with SandboxError.
  """

  def start(self) -> None:
    """Makes the place. SandboxError where that cannot be done."""
    ...

  def exec(
    self,
    command: Sequence[str],
    *,
    stdin: bytes = b'',
    seconds: float | None = None,
    output: int | None = None,
  ) -> Result:
    """Runs a command to its end.

    seconds, output (bytes): in place of the sandbox's own limits. When it returns,
    nothing that the command started is alive.
    """
    ...

  def put(self, path: str, source: str | None) -> None:
    """Puts a copy of the folder `source`, or an empty one, in place of `path`."""
    ...

  def read(self, path: str) -> bytes:
    """A file's content. FileNotFoundError when it cannot be read in the sandbox."""
    ...

  def write(self, path: str, data: bytes) -> None:
    """Makes or replaces a file, and the folders on the way to it."""
    ...

  def stop(self) -> None:
    """Removes the place; may be called at any time, more than once."""
    ...


def read_file(sandbox: Sandbox, path: str) -> bytes:
  """`Sandbox.read` by way of `exec`, within the limits on its time and output."""
  result = sandbox.exec(['cat', '--', path])
  if result.limit:
    raise SandboxError(f'{path} in the sandbox is too large to read: {result.limit}')
  if result.code:
    raise FileNotFoundError(f'{path} in the sandbox: {result.text.strip()}')
  return result.stdout


def write_file(sandbox: Sandbox, path: str, data: bytes) -> None:
  """`Sandbox.write` by way of `exec`."""
  script = 'mkdir -p -- "$(dirname -- "$0")" && cat > "$0"'
  result = sandbox.exec(['sh', '-c', script, path], stdin=data)
  if result.code:
    raise SandboxError(f'cannot write {path} in the sandbox: {result.text.strip()}')
