"""ContainerSandbox runs commands in a container of docker or podman.

A container has no network, limited memory, CPU and processes, no new privileges, few
capabilities, and none of this machine's files. The image must already exist: nothing is
fetched or built.
"""

import contextlib
import os
import subprocess
import time
import uuid
import weakref
from collections.abc import Mapping, Sequence
from pathlib import PurePosixPath

from jaxrl.envs.sandbox import process_io
from jaxrl.envs.sandbox.sandbox_api import (
  ExecResult,
  SandboxError,
  SandboxLimits,
  read_file,
  write_file,
)

CAPABILITIES = ('CHOWN', 'DAC_OVERRIDE', 'FOWNER', 'KILL', 'SETGID', 'SETUID')
LABEL = 'jaxrl.sandbox'
_TOP_OPTIONS = {'docker': ('-eo', 'pid'), 'podman': ('pid',)}  # one line a process
_IDLE_TOP_LINES = 3  # lines of `top` when nothing else runs: its title, init, sleep
_DOCKER_TIMEOUT_S = 60.0  # seconds for docker's own work


class ContainerSandbox:
  """Runs commands in one container, as the user that its image names.

  Of `limits`, memory and processes apply to the container, and seconds and output to an
  exec; open_files applies to each process; file_size and tmp are not enforced.

  Args:
    program: 'docker' or 'podman'.
    image: The name of the image.
    folders: As for `LocalSandbox`; a folder's copy replaces what the image has there.
    workdir: Where commands start; by default the first folder, else the image's own.
    environment: Additional environment variables.
    limits: The resource limits.
    cpus: The number of CPUs that all processes may use together.
    lifetime: Seconds after which the container ends by itself, in case its starter was
      killed.
  """

  def __init__(
    self,
    *,
    program: str,
    image: str,
    folders: Mapping[str, str | None] | None = None,
    workdir: str = '',
    environment: Mapping[str, str] | None = None,
    limits: SandboxLimits | None = None,
    cpus: float = 2.0,
    lifetime: int = 4 * 3600,
  ):
    self._program = program
    self._image = image
    self._cpus = cpus
    self._initial_folders = dict(folders or {})
    self._limits = limits or SandboxLimits()
    self._workdir = workdir or next(iter(self._initial_folders), '')
    self._environment = dict(environment or {})
    self._lifetime = lifetime
    self._name = ''

  def start(self) -> None:
    """Starts the container and copies the folders into it."""
    self.stop()
    self._name = f'jaxrl-{uuid.uuid4().hex}'
    self._finalizer = weakref.finalize(self, _remove, self._program, self._name)
    try:
      self._call(*self._run())
      for path, source in self._initial_folders.items():
        self.put(path, source)
    except BaseException:
      self.stop()
      raise

  def _run(self) -> list[str]:
    limits, memory = self._limits, str(self._limits.memory)
    variables = [f'--env={k}={v}' for k, v in self._environment.items()]
    return [
      'run',
      '--detach',
      '--init',
      '--pull=never',
      f'--name={self._name}',
      f'--label={LABEL}',
      '--network=none',
      f'--memory={memory}',
      f'--memory-swap={memory}',
      f'--cpus={self._cpus}',
      f'--pids-limit={limits.processes + 2}',  # init and sleep count as well
      f'--ulimit=nofile={limits.open_files}:{limits.open_files}',
      '--security-opt=no-new-privileges',
      '--cap-drop=ALL',
      *(f'--cap-add={name}' for name in CAPABILITIES),
      *variables,
      '--entrypoint=sleep',
      self._image,
      str(self._lifetime),
    ]

  def put(self, path: str, source: str | None) -> None:
    """Replaces a folder of the container."""
    folder = PurePosixPath(path)
    if not folder.is_absolute() or '..' in folder.parts or str(folder) == '/':
      raise SandboxError(f'folder {path!r} of the sandbox: give an absolute path')
    if source is not None and not os.path.isdir(source):
      raise SandboxError(f'folder {path!r} of the sandbox: {source!r} is not a folder')
    script = 'rm -rf -- "$0" && mkdir -p -- "$0"'
    self._call(
      'exec', '--user=0', self._started_name(), 'sh', '-c', script, str(folder)
    )
    if source is not None:
      self._call('cp', os.path.join(source, '.'), f'{self._started_name()}:{folder}')

  def exec(
    self,
    command: Sequence[str],
    *,
    stdin: bytes = b'',
    seconds: float | None = None,
    output: int | None = None,
  ) -> ExecResult:
    """Runs a command in the container."""
    seconds = self._limits.seconds if seconds is None else seconds
    output = self._limits.output if output is None else output
    workdir_option = [f'--workdir={self._workdir}'] if self._workdir else []
    argv = [
      self._program,
      'exec',
      '--interactive',
      *workdir_option,
      self._started_name(),
      *command,
    ]
    start_time = time.monotonic()
    report, report_in = os.pipe()
    os.close(report_in)  # docker has no separate report
    with _popen(argv) as process:
      try:
        limits = (start_time + seconds, output)
        out, err, _, limit = process_io.communicate(process, report, stdin, *limits)
        code = 137 if limit else process.wait(_DOCKER_TIMEOUT_S)
      finally:
        process.kill()
        os.close(report)
    elapsed = time.monotonic() - start_time
    self._end_leftovers()
    return ExecResult(code, out, err, limit, elapsed)

  def _end_leftovers(self) -> None:
    """Ends whatever still runs in the container, as seen by docker from outside."""
    name = self._started_name()
    argv = [self._program, 'top', name, *_TOP_OPTIONS[self._program]]
    top = subprocess.run(
      argv, capture_output=True, timeout=_DOCKER_TIMEOUT_S, check=False
    )
    if top.returncode or len(top.stdout.split()) > _IDLE_TOP_LINES:
      self._call('restart', '-t', '0', name)

  def read(self, path: str) -> bytes:
    """Reads a file."""
    return read_file(self, path)

  def write(self, path: str, data: bytes) -> None:
    """Writes a file."""
    write_file(self, path, data)

  def stop(self) -> None:
    """Removes the container."""
    name, self._name = self._name, ''
    if name:
      self._finalizer()

  def _started_name(self) -> str:
    if not self._name:
      raise SandboxError('the sandbox is not started: call start() first')
    return self._name

  def _call(self, *arguments: str) -> None:
    """Runs one of docker's own commands; raises SandboxError if it fails."""
    argv = [self._program, *arguments]
    try:
      result = subprocess.run(
        argv, capture_output=True, timeout=_DOCKER_TIMEOUT_S, check=False
      )
    except FileNotFoundError as error:
      raise SandboxError(
        f'there is no program {self._program!r} on this machine: install it, or '
        'use another sandbox'
      ) from error
    except subprocess.TimeoutExpired as error:
      raise SandboxError(
        f'{self._program} {arguments[0]} took over {_DOCKER_TIMEOUT_S:.0f} s'
      ) from error
    if result.returncode:
      message = (
        (result.stdout + result.stderr).decode('utf-8', 'replace').strip()[-500:]
      )
      raise SandboxError(
        f'{self._program} {arguments[0]} ended with {result.returncode}: {message}'
      )


def _popen(argv: list[str]) -> subprocess.Popen[bytes]:
  pipe = subprocess.PIPE
  return subprocess.Popen(argv, stdin=pipe, stdout=pipe, stderr=pipe)


def _remove(program: str, name: str) -> None:
  argv = [program, 'rm', '--force', '--volumes', name]
  with contextlib.suppress(OSError, subprocess.TimeoutExpired):
    subprocess.run(argv, capture_output=True, timeout=_DOCKER_TIMEOUT_S, check=False)
