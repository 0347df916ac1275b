"""A sandbox in a container of docker or podman, by their command line.

A container sees no network, has its memory, CPU and processes bounded, no new
privileges and few capabilities, and none of this machine's files. The image must be
there already: nothing is fetched or built.
"""

import contextlib
import os
import subprocess
import time
import uuid
import weakref
from collections.abc import Mapping, Sequence
from pathlib import PurePosixPath

from jaxrl.envs.sandbox import streams
from jaxrl.envs.sandbox.base import (
  Limits,
  Result,
  SandboxError,
  read_file,
  write_file,
)

CAPABILITIES = ('CHOWN', 'DAC_OVERRIDE', 'FOWNER', 'KILL', 'SETGID', 'SETUID')
LABEL = 'jaxrl.sandbox'
_TOP = {'docker': ('-eo', 'pid'), 'podman': ('pid',)}  # one line a process
_OWN = 3  # lines of `top` when nothing else runs: its title, init, sleep
_PATIENCE = 60.0  # seconds for docker's own work


class ContainerSandbox:
  """Runs commands in one container, as the user that its image names.

  program: docker or podman. image: its name. folders, workdir, environment: as
  `LocalSandbox` has them, but the last default for where commands start is the
  image's own; a folder's copy replaces what the image has there. cpus: as
  many as all its processes may use together. lifetime: seconds after which the
  container ends by itself, should its starter have been killed.

  Of `limits`, memory and processes hold for the container, and seconds and output for
  an exec; open_files for each process; file_size and tmp are not enforced.
  """

  def __init__(
    self,
    *,
    program: str,
    image: str,
    folders: Mapping[str, str | None] | None = None,
    workdir: str = '',
    environment: Mapping[str, str] | None = None,
    limits: Limits | None = None,
    cpus: float = 2.0,
    lifetime: int = 4 * 3600,
  ):
    self._program, self._image, self._cpus = program, image, cpus
    self._given, self._limits = dict(folders or {}), limits or Limits()
    self._workdir = workdir or next(iter(self._given), '')
    self._environment, self._lifetime = dict(environment or {}), lifetime
    self._name = ''

  def start(self) -> None:
    self.stop()
    self._name = f'jaxrl-{uuid.uuid4().hex}'
    self._gone = weakref.finalize(self, _remove, self._program, self._name)
    try:
      self._call(*self._run())
      for path, source in self._given.items():
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
      f'--pids-limit={limits.processes + 2}',  # init and sleep count, too
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
    plain = PurePosixPath(path)
    if not plain.is_absolute() or '..' in plain.parts or str(plain) == '/':
      raise SandboxError(f'folder {path!r} of the sandbox: give an absolute path')
    if source is not None and not os.path.isdir(source):
      raise SandboxError(f'folder {path!r} of the sandbox: {source!r} is no folder')
    afresh = 'rm -rf -- "$0" && mkdir -p -- "$0"'
    self._call('exec', '--user=0', self._started(), 'sh', '-c', afresh, str(plain))
    if source is not None:
      self._call('cp', os.path.join(source, '.'), f'{self._started()}:{plain}')

  def exec(
    self,
    command: Sequence[str],
    *,
    stdin: bytes = b'',
    seconds: float | None = None,
    output: int | None = None,
  ) -> Result:
    seconds = self._limits.seconds if seconds is None else seconds
    output = self._limits.output if output is None else output
    where = [f'--workdir={self._workdir}'] if self._workdir else []
    argv = [self._program, 'exec', '--interactive', *where, self._started(), *command]
    began = time.monotonic()
    report, report_in = os.pipe()
    os.close(report_in)  # docker reports nothing apart
    with _popen(argv) as process:
      try:
        limits = (began + seconds, output)
        out, err, _, limit = streams.collect(process, report, stdin, *limits)
        code = 137 if limit else process.wait(_PATIENCE)
      finally:
        process.kill()
        os.close(report)
    took = time.monotonic() - began
    self._still()
    return Result(code, out, err, limit, took)

  def _still(self) -> None:
    """Ends whatever still runs in there. What runs is asked of docker, from outside."""
    name = self._started()
    argv = [self._program, 'top', name, *_TOP[self._program]]
    top = subprocess.run(argv, capture_output=True, timeout=_PATIENCE, check=False)
    if top.returncode or len(top.stdout.split()) > _OWN:
      self._call('restart', '-t', '0', name)

  def read(self, path: str) -> bytes:
    return read_file(self, path)

  def write(self, path: str, data: bytes) -> None:
    write_file(self, path, data)

  def stop(self) -> None:
    name, self._name = self._name, ''
    if name:
      self._gone()

  def _started(self) -> str:
    if not self._name:
      raise SandboxError('the sandbox is not started: call start() first')
    return self._name

  def _call(self, *arguments: str) -> None:
    """A command of docker's own; SandboxError with its words when it fails."""
    argv = [self._program, *arguments]
    try:
      done = subprocess.run(argv, capture_output=True, timeout=_PATIENCE, check=False)
    except FileNotFoundError as error:
      raise SandboxError(f'there is no program {self._program!r} here') from error
    except subprocess.TimeoutExpired as error:
      raise SandboxError(
        f'{self._program} {arguments[0]} took over {_PATIENCE:.0f} s'
      ) from error
    if done.returncode:
      said = (done.stdout + done.stderr).decode('utf-8', 'replace').strip()[-500:]
      raise SandboxError(
        f'{self._program} {arguments[0]} ended with {done.returncode}: {said}'
      )


def _popen(argv: list[str]) -> subprocess.Popen[bytes]:
  pipe = subprocess.PIPE
  return subprocess.Popen(argv, stdin=pipe, stdout=pipe, stderr=pipe)


def _remove(program: str, name: str) -> None:
  argv = [program, 'rm', '--force', '--volumes', name]
  with contextlib.suppress(OSError, subprocess.TimeoutExpired):
    subprocess.run(argv, capture_output=True, timeout=_PATIENCE, check=False)
