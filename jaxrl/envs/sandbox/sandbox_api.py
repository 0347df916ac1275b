"""Sandbox is the protocol of a sandbox; SandboxLimits are its resource limits."""

import dataclasses
from collections.abc import Sequence
from typing import Literal, Protocol

MIB = 1 << 20

ExceededLimit = Literal['', 'time', 'memory', 'output']


class SandboxError(RuntimeError):
  """Reports that the sandbox itself failed, not the program that ran in it."""


@dataclasses.dataclass(frozen=True, kw_only=True)
class SandboxLimits:
  """Limits on one exec and everything that it starts. Sizes are in bytes.

  Attributes:
    seconds: Wall-clock seconds after which everything that it started is killed; also
      the CPU seconds of each process, rounded up.
    memory: The memory of all its processes together, counting shared memory for each;
      the address space of one process is limited to four times that.
    file_size: The size of one file.
    tmp: The size of everything in /tmp.
    processes: The number of concurrent processes, including threads.
    open_files: The number of open files of a process.
    output: The size of stdout and stderr together; more ends the exec.
  """

  seconds: float = 10.0
  memory: int = 512 * MIB
  file_size: int = 64 * MIB
  tmp: int = 64 * MIB
  processes: int = 64
  open_files: int = 256
  output: int = MIB


@dataclasses.dataclass(frozen=True)
class ExecResult:
  """The result of an exec.

  Attributes:
    code: The exit code; 128 + n if signal n ended it, 127 if the command was not found.
    stdout: The standard output.
    stderr: The standard error.
    limit: The limit that ended it; '' if none did.
    seconds: Wall-clock seconds that it took.
  """

  code: int
  stdout: bytes
  stderr: bytes
  limit: ExceededLimit = ''
  seconds: float = 0.0

  @property
  def text(self) -> str:
    """Returns stdout followed by stderr as text, replacing what is not UTF-8."""
    return (self.stdout + self.stderr).decode('utf-8', 'replace')


class Sandbox(Protocol):
  """Protocol of a session: files outlive an exec, processes do not. All calls block.

  `stop` may come from another thread: a running exec then ends with SandboxError.
  """

  def start(self) -> None:
    """Creates the sandbox.

    Raises:
      SandboxError: If that is not possible.
    """
    ...

  def exec(
    self,
    command: Sequence[str],
    *,
    stdin: bytes = b'',
    seconds: float | None = None,
    output: int | None = None,
  ) -> ExecResult:
    """Runs a command to its end; afterwards nothing that it started is alive.

    Args:
      command: The program and its arguments.
      stdin: The standard input.
      seconds: The time limit, in place of the sandbox's own.
      output: The limit of the output in bytes, in place of the sandbox's own.

    Returns:
      The result.
    """
    ...

  def put(self, path: str, source: str | None) -> None:
    """Replaces a folder by a copy of another, or by an empty one.

    Args:
      path: The folder in the sandbox.
      source: The folder on this machine; None for an empty one.
    """
    ...

  def read(self, path: str) -> bytes:
    """Reads a file.

    Args:
      path: The path in the sandbox.

    Returns:
      The content.

    Raises:
      FileNotFoundError: If the file cannot be read in the sandbox.
    """
    ...

  def write(self, path: str, data: bytes) -> None:
    """Creates or replaces a file and the folders above it.

    Args:
      path: The path in the sandbox.
      data: The content.
    """
    ...

  def stop(self) -> None:
    """Removes the sandbox; may be called at any time and repeatedly."""
    ...


def read_file(sandbox: Sandbox, path: str) -> bytes:
  """Implements `Sandbox.read` by `exec`, within its limits on time and output.

  Args:
    sandbox: The sandbox.
    path: The path in the sandbox.

  Returns:
    The content.

  Raises:
    SandboxError: If the file is too large.
    FileNotFoundError: If the file cannot be read in the sandbox.
  """
  result = sandbox.exec(['cat', '--', path])
  if result.limit:
    raise SandboxError(f'{path} in the sandbox is too large to read: {result.limit}')
  if result.code:
    raise FileNotFoundError(f'{path} in the sandbox: {result.text.strip()}')
  return result.stdout


def write_file(sandbox: Sandbox, path: str, data: bytes) -> None:
  """Implements `Sandbox.write` by `exec`.

  Args:
    sandbox: The sandbox.
    path: The path in the sandbox.
    data: The content.

  Raises:
    SandboxError: If the file cannot be written.
  """
  script = 'mkdir -p -- "$(dirname -- "$0")" && cat > "$0"'
  result = sandbox.exec(['sh', '-c', script, path], stdin=data)
  if result.code:
    raise SandboxError(f'cannot write {path} in the sandbox: {result.text.strip()}')


def keep_tail(text: str, max_chars: int) -> str:
  """Shortens a text to its last characters.

  Args:
    text: The text.
    max_chars: The maximum number of characters.

  Returns:
    The text, with a note in place of what was left out.
  """
  left_out = len(text) - max_chars
  if left_out <= 0:
    return text
  return f'[{left_out} characters left out]\n{text[left_out:]}'
