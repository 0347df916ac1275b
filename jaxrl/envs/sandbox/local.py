"""A sandbox on this machine: Linux namespaces, limits, a view of files of its own.

An exec sees no network but an empty loopback, no process but its own, no file but
what it is given: the system's programs and Python, to read; its folders, which are
copies, and an empty /tmp, to write. It runs without privileges; started by root, as
a user number that nothing else has.

What is not bounded: the CPU time of all processes together (each one's is, and the
wall clock), the sum of what is written to the folders (each file is), and memory
files that no process has mapped. When the machine runs out of memory, what runs in
here is the first to be killed.
"""

import contextlib
import functools
import json
import math
import os
import shutil
import subprocess
import sys
import time
import weakref
from collections.abc import Mapping, Sequence
from io import FileIO
from pathlib import Path, PurePosixPath
from typing import Any

from jaxrl.envs.sandbox import enter, places, streams
from jaxrl.envs.sandbox.base import (
  Limits,
  Result,
  SandboxError,
  read_file,
  write_file,
)

PYTHON = os.path.realpath(sys.executable)
SYSTEM = ('/usr', '/bin', '/sbin', '/lib', '/lib32', '/lib64', '/etc/alternatives')
SYSTEM = (*SYSTEM, '/etc/ld.so.cache', os.path.realpath(sys.base_prefix))
DEVICES = ('/dev/null', '/dev/zero', '/dev/full', '/dev/random', '/dev/urandom')
PATH = f'{os.path.dirname(PYTHON)}:/usr/local/bin:/usr/bin:/bin:/usr/sbin:/sbin'
ETC = {
  '/etc/passwd': 'root:x:0:0::/:/bin/sh\nuser:x:1000:1000::/tmp:/bin/sh\n',
  '/etc/group': 'root:x:0:\nuser:x:1000:\n',
  '/etc/hosts': '127.0.0.1 localhost sandbox\n',
}
_DYING = 5.0  # seconds for a killed exec to be gone


class LocalSandbox:
  """Runs commands on this machine, apart from it.

  folders: path inside → a folder whose copy is put there, or None for an empty one;
  they may be written to and last until `stop`. workdir: where commands start; by
  default the first folder, else /tmp, which is empty at each exec. readonly: more
  folders or files of this machine that may be read, at the same path. environment:
  more variables. unsafe: where the kernel allows no namespaces, run without them: then
  only the limits hold (as root, not the one on processes; none on memory in sum), and
  the command can read this machine's files, use its network and kill its processes.

  SandboxError from `start` where there are no namespaces and `unsafe` is not set.
  """

  def __init__(
    self,
    *,
    folders: Mapping[str, str | None] | None = None,
    workdir: str = '',
    readonly: Sequence[str] = (),
    environment: Mapping[str, str] | None = None,
    limits: Limits | None = None,
    unsafe: bool = False,
  ):
    self._given = {_absolute(path): source for path, source in (folders or {}).items()}
    self._workdir = workdir or next(iter(self._given), '/tmp')
    self._readonly = tuple(os.path.abspath(path) for path in readonly)
    self._environment = dict(environment or {})
    self._limits, self._unsafe = limits or Limits(), unsafe
    self._state: Path | None = None
    self._folders: dict[str, int] = {}  # path inside → its number in the state
    self._puts = 0
    self._lives: set[FileIO] = set()  # of execs under way; what is closed dies
    self._namespaces = True

  def start(self) -> None:
    self.stop()
    reason = missing()
    if reason and not self._unsafe:
      raise SandboxError(
        f'this machine allows no sandbox: {reason}. Allow user namespaces (sysctl '
        'kernel.unprivileged_userns_clone, user.max_user_namespaces), or set '
        'unsafe=True to run without: then what runs can do all that you can.'
      )
    self._namespaces = not reason
    try:
      self._make()
    except BaseException:
      self.stop()
      raise

  def _make(self) -> None:
    state, lock = places.make()
    self._gone = weakref.finalize(self, places.remove, state, lock)
    self._state = state
    (state / 'root').mkdir()
    self._folders, self._puts = {}, 0
    for path, source in self._given.items():
      self.put(path, source)

  def put(self, path: str, source: str | None) -> None:
    path = _absolute(path)
    if self._state is None:
      raise SandboxError('the sandbox is not started: call start() first')
    folder = self._state / str(self._puts)
    self._puts += 1
    if source is None:
      folder.mkdir()
    elif os.path.isdir(source):
      shutil.copytree(source, folder, symlinks=True)
    else:
      raise SandboxError(f'folder {path!r} of the sandbox: {source!r} is no folder')
    if self._namespaces and os.geteuid() == 0:
      places.give(folder, self._uid)
    former = self._folders.get(path)
    self._folders[path] = int(folder.name)
    if former is not None:
      places.unlock(self._state / str(former))
      shutil.rmtree(self._state / str(former), ignore_errors=True)

  @property
  def _uid(self) -> int:
    """A user number that no other living sandbox has, nor anybody else."""
    assert self._state is not None
    return 0x70000000 + self._state.stat().st_ino % (1 << 24)

  def exec(
    self,
    command: Sequence[str],
    *,
    stdin: bytes = b'',
    seconds: float | None = None,
    output: int | None = None,
  ) -> Result:
    state = self._state
    if state is None:
      raise SandboxError('the sandbox is not started: call start() first')
    seconds = self._limits.seconds if seconds is None else seconds
    output = self._limits.output if output is None else output
    began = time.monotonic()
    process, life, report = _enter()
    self._lives.add(life)
    try:
      with contextlib.suppress(BrokenPipeError, ValueError):
        life.write(json.dumps(self._spec(command, seconds)).encode() + b'\n')
      limits = (began + seconds, output)
      out, err, told, limit = streams.collect(process, report, stdin, *limits)
    finally:
      _end(process, life, report)
      self._lives.discard(life)
    if self._state is not state:  # stopped meanwhile; the dying may have left files
      places.remove(state, -1)
      raise SandboxError(f'the sandbox was stopped while it ran {command[0]!r}')
    took = time.monotonic() - began
    if limit:
      return Result(137, out, err, limit, took)
    if not told:
      raise SandboxError(f'the sandbox of {command[0]!r} died without a word')
    answer = json.loads(told.splitlines()[0])
    if 'error' in answer:
      raise SandboxError(f'the sandbox could not run {command[0]!r}: {answer["error"]}')
    return Result(answer['code'], out, err, answer['limit'], took)

  def _spec(self, command: Sequence[str], seconds: float) -> dict[str, Any]:
    """What `enter.py` needs to know."""
    state, limits, inside = self._state, self._limits, self._namespaces
    cpu = math.ceil(seconds)
    rlimits = {
      'RLIMIT_CPU': cpu,
      'RLIMIT_AS': limits.memory * (4 if inside else 1),
      'RLIMIT_FSIZE': limits.file_size,
      'RLIMIT_NPROC': limits.processes + 1,  # process 1 counts, too
      'RLIMIT_NOFILE': limits.open_files,
      'RLIMIT_CORE': 0,
    }
    if not inside:
      del rlimits['RLIMIT_NPROC']  # it would count all that its user runs
    env = {'PATH': PATH, 'HOME': '/tmp', 'LANG': 'C.UTF-8', 'OMP_NUM_THREADS': '1'}
    return {
      'command': list(command),
      'env': env | {'OPENBLAS_NUM_THREADS': '1'} | self._environment,
      'cwd': self._workdir if inside else str(self._on_host(self._workdir)),
      'namespaces': inside,
      'root': f'{state}/root',
      'uid': self._uid,
      'binds': self._binds(),
      'files': ETC,
      'tmp': limits.tmp,
      'memory': limits.memory,
      'rlimits': rlimits,
    }

  def _binds(self) -> list[tuple[str, str, bool]]:
    """(path on this machine, path inside, may be written to), outer ones first."""
    seen: list[tuple[str, str, bool]] = []
    for path in sorted({*SYSTEM, *self._readonly}):
      under = any(path.startswith(f'{other}/') for other, _, _ in seen)
      if os.path.lexists(path) and not under:
        seen.append((path, path, False))
    seen += [(path, path, False) for path in DEVICES]
    mine = [(f'{self._state}/{n}', p, True) for p, n in self._folders.items()]
    return seen + sorted(mine, key=lambda bind: bind[1])

  def _on_host(self, path: str) -> Path:
    """Where a path inside lies on this machine, for use without namespaces."""
    assert self._state is not None
    for folder, number in self._folders.items():
      if PurePosixPath(path).is_relative_to(folder):
        return self._state / str(number) / PurePosixPath(path).relative_to(folder)
    return self._state / 'root'

  def read(self, path: str) -> bytes:
    return read_file(self, self._path(path))

  def write(self, path: str, data: bytes) -> None:
    write_file(self, self._path(path), data)

  def _path(self, path: str) -> str:
    path = str(PurePosixPath(self._workdir) / path)
    return path if self._namespaces else str(self._on_host(path))

  def stop(self) -> None:
    state, self._state = self._state, None
    for life in list(self._lives):
      life.close()
    if state is not None:
      self._gone()


@functools.cache
def missing() -> str:
  """Why this machine allows no sandbox; '' when it does. Found out by making one."""
  if sys.platform != 'linux':
    return f'namespaces are a thing of Linux, and this is {sys.platform}'
  sandbox = LocalSandbox()
  sandbox._make()
  try:
    result = sandbox.exec(['true'])
  except (SandboxError, OSError) as error:
    return str(error)
  finally:
    sandbox.stop()
  return '' if result.code == 0 else f'true ended with {result.code}: {result.text}'


def _enter() -> tuple[subprocess.Popen[bytes], FileIO, int]:
  """Starts `enter.py`: it, the end of its life, and where it reports."""
  life_out, life = os.pipe()
  report, report_in = os.pipe()
  process = subprocess.Popen(
    [PYTHON, '-I', '-S', enter.__file__, str(life_out), str(report_in)],
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


def _end(process: subprocess.Popen[bytes], life: FileIO, report: int) -> None:
  """Lets go of an exec and waits until all of it is dead."""
  life.close()
  try:
    process.wait(_DYING)
  except subprocess.TimeoutExpired:
    process.kill()
    process.wait()
  os.close(report)
  for stream in (process.stdin, process.stdout, process.stderr):
    if stream is not None:
      with contextlib.suppress(OSError):
        stream.close()


def _absolute(path: str) -> str:
  """A path inside, in its plain form; SandboxError if it does not start at the root."""
  plain = PurePosixPath(path)
  if not plain.is_absolute() or '..' in plain.parts or str(plain) == '/':
    raise SandboxError(f'folder {path!r} of the sandbox: give an absolute path')
  return str(plain)
