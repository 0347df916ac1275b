"""LocalSandbox runs commands on this machine in Linux namespaces.

An exec has no network but an empty loopback, no processes but its own, and no files but
what it is given: the system's programs and Python, to read; its folders, which are
copies, and an empty /tmp, to write. It runs without privileges; started by root, as a
user id that nothing else has. A filter refuses system calls that lead out of the
namespaces.

bubblewrap (bwrap) creates the namespaces and the view of files if it is on the PATH and
works here, else `namespaces.py` does.

Not limited are the CPU time of all processes together (each one's is, and the wall
clock), the sum of what is written to the folders (each file is), and memory files that
no process has mapped. When the machine runs out of memory, what runs in here is killed
first.
"""

import contextlib
import functools
import json
import logging
import math
import os
import platform
import shutil
import subprocess
import sys
import threading
import time
import weakref
from collections.abc import Mapping, Sequence
from io import FileIO
from pathlib import Path, PurePosixPath
from typing import Literal, get_args

from jaxrl.envs.sandbox import namespaces, process_io, seccomp_filter, workdirs
from jaxrl.envs.sandbox.sandbox_api import (
  ExecResult,
  SandboxError,
  SandboxLimits,
  read_file,
  write_file,
)

log = logging.getLogger(__name__)

Isolation = Literal['auto', 'bwrap', 'namespaces']
PYTHON_PATH = os.path.realpath(sys.executable)
SYSTEM_PATHS = (
  '/usr',
  '/bin',
  '/sbin',
  '/lib',
  '/lib32',
  '/lib64',
  '/etc/alternatives',
)
SYSTEM_PATHS = (*SYSTEM_PATHS, '/etc/ld.so.cache', os.path.realpath(sys.base_prefix))
DEVICES = ('/dev/null', '/dev/zero', '/dev/full', '/dev/random', '/dev/urandom')
DEFAULT_PATH = (
  f'{os.path.dirname(PYTHON_PATH)}:/usr/local/bin:/usr/bin:/bin:/usr/sbin:/sbin'
)
ETC_FILES = {
  '/etc/passwd': 'root:x:0:0::/:/bin/sh\nuser:x:1000:1000::/tmp:/bin/sh\n',
  '/etc/group': 'root:x:0:\nuser:x:1000:\n',
  '/etc/hosts': '127.0.0.1 localhost sandbox\n',
}
_KILL_TIMEOUT_S = 5.0  # seconds for a killed exec to end


class LocalSandbox:
  """Runs commands on this machine, isolated from it.

  Args:
    folders: Paths inside, mapped to folders whose copy is put there, or to None for an
      empty one. They are writable and last until `stop`.
    workdir: Where commands start; by default the first folder, else /tmp, which is
      empty at each exec.
    readonly: Further folders or files of this machine that may be read, at the same
      path.
    environment: Additional environment variables.
    limits: The resource limits.
    isolation: What creates the namespaces: 'bwrap', 'namespaces' (this project's own
      program), or 'auto' for bwrap if it is on the PATH and works, else the other.
    unsafe: Where the kernel allows no namespaces, run without them. Then only the
      limits apply (as root not the one on processes, and none on memory in total), and
      the command can read this machine's files, use its network and kill its processes.
  """

  def __init__(
    self,
    *,
    folders: Mapping[str, str | None] | None = None,
    workdir: str = '',
    readonly: Sequence[str] = (),
    environment: Mapping[str, str] | None = None,
    limits: SandboxLimits | None = None,
    isolation: Isolation = 'auto',
    unsafe: bool = False,
  ):
    if isolation not in get_args(Isolation):
      raise SandboxError(
        f'isolation={isolation!r}; there are {", ".join(get_args(Isolation))}'
      )
    self._initial_folders = {
      _normalize(path): source for path, source in (folders or {}).items()
    }
    self._workdir = workdir or next(iter(self._initial_folders), '/tmp')
    self._readonly = tuple(os.path.abspath(path) for path in readonly)
    self._environment = dict(environment or {})
    self._limits = limits or SandboxLimits()
    self._unsafe = unsafe
    self._isolation: Isolation = isolation
    self._active_isolation = 'none'  # since `start`: without namespaces
    self._state: Path | None = None
    self._folders: dict[str, int] = {}  # path inside → its number in the state
    self._num_puts = 0
    self._life_files: set[FileIO] = set()  # closing one kills its exec

  def start(self) -> None:
    """Creates the sandbox.

    Raises:
      SandboxError: If there are no namespaces and `unsafe` is not set.
    """
    self.stop()
    reason = unsupported_reason(self._isolation)
    if reason and not self._unsafe:
      raise SandboxError(
        f'this machine allows no sandbox: {reason}. Allow user namespaces (sysctl '
        'kernel.unprivileged_userns_clone, user.max_user_namespaces), or set '
        'unsafe=True to run without: then what runs can do everything that you can.'
      )
    try:
      self._create('none' if reason else choose_isolation(self._isolation))
    except BaseException:
      self.stop()
      raise

  def _create(self, isolation: str) -> None:
    self._active_isolation = isolation
    state, lock = workdirs.make_workdir()
    self._finalizer = weakref.finalize(self, workdirs.remove_workdir, state, lock)
    self._state = state
    (state / 'root').mkdir()
    self._folders = {}
    self._num_puts = 0
    for path, source in self._initial_folders.items():
      self.put(path, source)

  def put(self, path: str, source: str | None) -> None:
    """Replaces a folder by a copy of another, or by an empty one."""
    path = _normalize(path)
    if self._state is None:
      raise SandboxError('the sandbox is not started: call start() first')
    folder = self._state / str(self._num_puts)
    self._num_puts += 1
    if source is None:
      folder.mkdir()
    elif os.path.isdir(source):
      shutil.copytree(source, folder, symlinks=True)
    else:
      raise SandboxError(f'folder {path!r} of the sandbox: {source!r} is not a folder')
    if self._active_isolation != 'none' and os.geteuid() == 0:
      workdirs.change_owner(folder, self._uid)
    previous = self._folders.get(path)
    self._folders[path] = int(folder.name)
    if previous is not None:
      workdirs.unlock_folders(self._state / str(previous))
      shutil.rmtree(self._state / str(previous), ignore_errors=True)

  @property
  def _uid(self) -> int:
    """Returns a user id that nobody else has, nor any other living sandbox."""
    assert self._state is not None
    return 0x70000000 + self._state.stat().st_ino % (1 << 24)

  def exec(
    self,
    command: Sequence[str],
    *,
    stdin: bytes = b'',
    seconds: float | None = None,
    output: int | None = None,
  ) -> ExecResult:
    """Runs a command in new namespaces."""
    state = self._state
    if state is None:
      raise SandboxError('the sandbox is not started: call start() first')
    seconds = self._limits.seconds if seconds is None else seconds
    output = self._limits.output if output is None else output
    start_time = time.monotonic()
    process, life, report = _start_namespaces()
    self._life_files.add(life)
    try:
      with contextlib.suppress(BrokenPipeError, ValueError):
        life.write(json.dumps(self._build_spec(command, seconds)).encode() + b'\n')
      limits = (start_time + seconds, output)
      out, err, report_lines, limit = process_io.communicate(
        process, report, stdin, *limits
      )
    finally:
      _finish_exec(process, life, report)
      self._life_files.discard(life)
    if self._state is not state:
      # It was stopped meanwhile, and dying processes may have left files.
      workdirs.remove_workdir(state, -1)
      raise SandboxError(f'the sandbox was stopped while it ran {command[0]!r}')
    elapsed = time.monotonic() - start_time
    if limit:
      return ExecResult(137, out, err, limit, elapsed)
    if not report_lines:
      message = err.decode('utf-8', 'replace').strip()[-300:]
      raise SandboxError(
        f'the sandbox of {command[0]!r} ended without reporting a result: {message}'
      )
    answer = json.loads(report_lines.splitlines()[0])
    if 'error' in answer:
      raise SandboxError(f'the sandbox could not run {command[0]!r}: {answer["error"]}')
    return ExecResult(answer['code'], out, err, answer['limit'], elapsed)

  def _build_spec(self, command: Sequence[str], seconds: float) -> dict[str, object]:
    """Returns what `namespaces.py` needs to know."""
    state, limits, isolation = self._state, self._limits, self._active_isolation
    use_namespaces = isolation != 'none'
    cpu = math.ceil(seconds)
    rlimits = {
      'RLIMIT_CPU': cpu,
      'RLIMIT_AS': limits.memory * (4 if use_namespaces else 1),
      'RLIMIT_FSIZE': limits.file_size,
      'RLIMIT_NPROC': limits.processes + 1,  # process 1 counts as well
      'RLIMIT_NOFILE': limits.open_files,
      'RLIMIT_CORE': 0,
    }
    if not use_namespaces:
      del rlimits['RLIMIT_NPROC']  # it would count all processes of the user
    env = {
      'PATH': DEFAULT_PATH,
      'HOME': '/tmp',
      'LANG': 'C.UTF-8',
      'OMP_NUM_THREADS': '1',
    }
    return {
      'command': list(command),
      'env': env | {'OPENBLAS_NUM_THREADS': '1'} | self._environment,
      'cwd': self._workdir if use_namespaces else str(self._on_host(self._workdir)),
      'isolation': isolation,
      'bwrap': shutil.which('bwrap') if isolation == 'bwrap' else '',
      'seccomp': seccomp_filter.seccomp_program().hex(),
      'keyctl': seccomp_filter.KEYCTL.get(platform.machine(), -1),
      'root': f'{state}/root',
      'uid': self._uid,
      'binds': self._bind_mounts(),
      'files': ETC_FILES,
      'tmp': limits.tmp,
      'memory': limits.memory,
      'rlimits': rlimits,
    }

  def _bind_mounts(self) -> list[tuple[str, str, bool]]:
    """Returns (path on this machine, path inside, writable), outer paths first."""
    binds: list[tuple[str, str, bool]] = []
    for path in sorted({*SYSTEM_PATHS, *self._readonly}):
      is_covered = any(path.startswith(f'{other}/') for other, _, _ in binds)
      if os.path.lexists(path) and not is_covered:
        binds.append((path, path, False))
    binds += [(path, path, False) for path in DEVICES]
    if self._active_isolation == 'bwrap':
      binds.append((namespaces.__file__, namespaces.PROGRAM, False))
    own_folders = [(f'{self._state}/{n}', p, True) for p, n in self._folders.items()]
    return binds + sorted(own_folders, key=lambda mount: mount[1])

  def _on_host(self, path: str) -> Path:
    """Returns where a path inside lies on this machine, for use without namespaces."""
    assert self._state is not None
    for folder, number in self._folders.items():
      if PurePosixPath(path).is_relative_to(folder):
        return self._state / str(number) / PurePosixPath(path).relative_to(folder)
    return self._state / 'root'

  def read(self, path: str) -> bytes:
    """Reads a file."""
    return read_file(self, self._path(path))

  def write(self, path: str, data: bytes) -> None:
    """Writes a file."""
    write_file(self, self._path(path), data)

  def _path(self, path: str) -> str:
    path = str(PurePosixPath(self._workdir) / path)
    is_inside = self._active_isolation != 'none'
    return path if is_inside else str(self._on_host(path))

  def stop(self) -> None:
    """Ends running execs and removes the sandbox."""
    state, self._state = self._state, None
    for life in list(self._life_files):
      life.close()
    if state is not None:
      self._finalizer()


def choose_isolation(isolation: Isolation) -> Isolation:
  """Returns what creates the namespaces of a sandbox.

  Args:
    isolation: The option of `LocalSandbox`.

  Returns:
    'bwrap' or 'namespaces'.
  """
  if isolation != 'auto':
    return isolation
  with _CHOICE:
    return _default_isolation()


_CHOICE = threading.Lock()  # threads of a cached function may all call it at first


@functools.cache
def _default_isolation() -> Isolation:
  reason = unsupported_reason('bwrap')
  if not reason:
    return 'bwrap'
  log.info("sandboxes are made by this project's own program: %s", reason)
  return 'namespaces'


@functools.cache
def unsupported_reason(isolation: Isolation = 'auto') -> str:
  """Returns why this machine allows no sandbox, by trying to create one.

  Args:
    isolation: The option of `LocalSandbox`.

  Returns:
    The reason, or '' if it does.
  """
  if sys.platform != 'linux':
    return f'namespaces exist only on Linux, and this is {sys.platform}'
  if not seccomp_filter.seccomp_program():
    return f'no filter of system calls is known for a machine of {platform.machine()}'
  if isolation == 'auto':
    return unsupported_reason(choose_isolation(isolation))
  if isolation == 'bwrap' and shutil.which('bwrap') is None:
    return 'bubblewrap is not installed: there is no bwrap on the PATH'
  sandbox = LocalSandbox(isolation=isolation)
  sandbox._create(isolation)
  try:
    result = sandbox.exec(['true'])
  except (SandboxError, OSError) as error:
    return str(error)
  finally:
    sandbox.stop()
  return '' if result.code == 0 else f'true ended with {result.code}: {result.text}'


def _start_namespaces() -> tuple[subprocess.Popen[bytes], FileIO, int]:
  """Starts `namespaces.py`; returns the process and its life and report descriptors."""
  life_out, life = os.pipe()
  report, report_in = os.pipe()
  process = subprocess.Popen(
    [PYTHON_PATH, '-I', '-S', namespaces.__file__, str(life_out), str(report_in)],
    stdin=subprocess.PIPE,
    stdout=subprocess.PIPE,
    stderr=subprocess.PIPE,
    pass_fds=(life_out, report_in),
    env={},
    cwd='/',
    start_new_session=True,
  )
  os.close(life_out)
  os.close(report_in)
  return process, FileIO(life, 'wb'), report


def _finish_exec(process: subprocess.Popen[bytes], life: FileIO, report: int) -> None:
  """Closes an exec and waits until everything in it is dead."""
  life.close()
  try:
    process.wait(_KILL_TIMEOUT_S)
  except subprocess.TimeoutExpired:
    process.kill()
    process.wait()
  os.close(report)
  for stream in (process.stdin, process.stdout, process.stderr):
    if stream is not None:
      with contextlib.suppress(OSError):
        stream.close()


def _normalize(path: str) -> str:
  """Normalizes a path inside; raises SandboxError if it is not absolute."""
  normalized = PurePosixPath(path)
  if not normalized.is_absolute() or '..' in normalized.parts or str(normalized) == '/':
    raise SandboxError(f'folder {path!r} of the sandbox: give an absolute path')
  return str(normalized)
