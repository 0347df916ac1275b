"""Runs one command in its own Linux namespaces; a program of the standard library only.

It is started as `python -I -S namespaces.py LIFE REPORT`, with two file descriptors. A
JSON line from LIFE says what to run; its end means that the caller is gone, and ends
everything. The outcome is written to REPORT as one JSON object: `error`, or `code` and
`limit`.

The first process creates the namespaces and the view of files, or becomes bubblewrap
(bwrap), which does. Its child is process 1 in them, which drops all privileges and
starts the command. When process 1 ends, the kernel kills all others in the namespaces.
"""

import contextlib
import ctypes
import fcntl
import json
import os
import resource
import select
import signal
import socket
import struct
import sys
from typing import Any

NEWNS, NEWCGROUP, NEWUTS, NEWIPC = 0x20000, 0x2000000, 0x4000000, 0x8000000
NEWUSER, NEWPID, NEWNET = 0x10000000, 0x20000000, 0x40000000
ALL = NEWNS | NEWCGROUP | NEWUTS | NEWIPC | NEWPID | NEWNET
NOSUID, NODEV, NOEXEC, REMOUNT, BIND = 2, 4, 8, 0x20, 0x1000
REC, PRIVATE = 0x4000, 0x40000
MOUNT_SETATTR, RDONLY, RECURSIVE = 442, 1, 0x8000  # 442 on every architecture
DETACH = 2
PDEATHSIG, DUMPABLE, SECCOMP, SUBREAPER, NO_NEW_PRIVS = 1, 4, 22, 36, 38
SECCOMP_FILTER, JOIN_SESSION_KEYRING = 2, 1
PROGRAM = '/run/namespaces.py'  # where this file is inside bwrap
DEVICE_LINKS = {
  '/dev/fd': '/proc/self/fd',
  '/dev/stdin': '/proc/self/fd/0',
  '/dev/stdout': '/proc/self/fd/1',
  '/dev/stderr': '/proc/self/fd/2',
  '/dev/shm': '/tmp',
}
USER = 1000  # the user id of the command, inside
TICK = 0.02  # seconds between checks of the memory

Spec = dict[str, Any]  # what the line from LIFE says
_libc = ctypes.CDLL(None, use_errno=True)


def call_libc(name: str, *arguments: object) -> None:
  """Calls a function of the C library.

  Args:
    name: The function's name.
    *arguments: Its arguments.

  Raises:
    OSError: If the function returns a negative number; the error names the call.
  """
  encoded = [a.encode() if isinstance(a, str) else a for a in arguments]
  if getattr(_libc, name)(*encoded) < 0:
    code = ctypes.get_errno()
    arguments_text = ', '.join(str(a) for a in arguments if isinstance(a, str | int))
    raise OSError(code, f'{name}({arguments_text}): {os.strerror(code)}')


def mount(source: str, target: str, kind: str, flags: int, options: str = '') -> None:
  """Mounts a file system.

  Args:
    source: The device or folder.
    target: The mount point.
    kind: The type of file system; '' for a bind mount.
    flags: The mount flags.
    options: The options of the file system.
  """
  call_libc('mount', source, target, kind, ctypes.c_ulong(flags), options)


def restrict(path: str, flags: int, recursive: int = RECURSIVE) -> None:
  """Sets mount flags (RDONLY, NOSUID, NODEV), by default recursively.

  Args:
    path: The mount point.
    flags: The mount flags to set.
    recursive: RECURSIVE, or 0 for this mount only.
  """
  attributes = struct.pack('QQQQ', flags, 0, 0, 0)
  call_libc('syscall', MOUNT_SETATTR, -100, path, recursive, attributes, 32)


def bind(source: str, target: str, writable: bool) -> None:
  """Makes `source` visible at `target`; a link stays a link.

  Args:
    source: A path of the host.
    target: The path below the new root.
    writable: Whether it may be written to.
  """
  os.makedirs(os.path.dirname(target), exist_ok=True)
  if os.path.islink(source):
    os.symlink(os.readlink(source), target)
    return
  if os.path.isdir(source):
    os.makedirs(target, exist_ok=True)
  else:
    with open(target, 'w'):
      pass
  mount(source, target, '', BIND | REC)
  flags = NOSUID if source.startswith('/dev/') else NOSUID | NODEV
  restrict(target, flags if writable else flags | RDONLY)


def clear_path(root: str, path: str) -> None:
  """Removes links and files that are in the way of a folder.

  A former command may have put them there, and a link would lead to the host's files,
  which are still in view.

  Args:
    root: The new root.
    path: The path of the folder below it.
  """
  for name in path.strip('/').split('/'):
    root = f'{root}/{name}'
    if os.path.islink(root) or (os.path.exists(root) and not os.path.isdir(root)):
      os.unlink(root)


def tmp_options(spec: Spec) -> str:
  """Returns the mount options of /tmp.

  Args:
    spec: What to run.
  """
  return f'mode=1777,size={spec["tmp"]},nr_inodes=16384'


def build_root(spec: Spec) -> None:
  """Builds the view of files and enters it: nothing of the host but what is named.

  Args:
    spec: What to run; see `LocalSandbox`.
  """
  mount('', '/', '', REC | PRIVATE)
  root = spec['root']
  mount('tmpfs', root, 'tmpfs', NOSUID | NODEV, 'mode=755,size=1m')
  for name in ('proc', 'tmp', 'dev', 'etc'):
    os.mkdir(f'{root}/{name}')
  mount('proc', f'{root}/proc', 'proc', NOSUID | NODEV | NOEXEC)
  mount('tmpfs', f'{root}/tmp', 'tmpfs', NOSUID | NODEV, tmp_options(spec))
  for name, text in spec['files'].items():
    with open(root + name, 'w') as file:
      file.write(text)
  for source, target, writable in spec['binds']:
    if writable:
      clear_path(root, target)
    bind(source, root + target, writable)
  for path, target in DEVICE_LINKS.items():
    os.symlink(target, root + path)
  os.chdir(root)
  call_libc('pivot_root', '.', '.')
  call_libc('umount2', '.', DETACH)  # the host's files, below the new root
  hide_keys()
  restrict('/', RDONLY | NOSUID | NODEV, 0)
  call_libc('sethostname', 'sandbox', 7)
  with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as any_socket:
    # Its own loopback, which is isolated.
    interface_up = struct.pack('16sH14x', b'lo', 1)
    fcntl.ioctl(any_socket, 0x8914, interface_up)


def map_user(process: str, uid: int, gid: int) -> None:
  """Maps USER inside the process's user namespace to ids outside.

  Args:
    process: The process id, or 'self'.
    uid: The user id outside.
    gid: The group id outside.
  """
  if os.geteuid() != 0:
    with open(f'/proc/{process}/setgroups', 'w') as file:
      file.write('deny')
  for name, number in (('uid_map', uid), ('gid_map', gid)):
    with open(f'/proc/{process}/{name}', 'w') as file:
      file.write(f'{USER} {number} 1')


def hide_keys() -> None:
  """Hides the names of the keys that the user has outside."""
  if os.path.exists('/proc/keys'):
    mount('/dev/null', '/proc/keys', '', BIND)


def drop_privileges(seccomp: str) -> None:
  """Drops all privileges for good, and filters system calls.

  Args:
    seccomp: The filter, as `seccomp_filter.seccomp_program` returns it, in hexadecimal.
  """
  with open('/proc/sys/user/max_user_namespaces', 'w') as file:
    file.write('0')  # of this namespace: the command makes none within it
  call_libc('prctl', NO_NEW_PRIVS, 1, 0, 0, 0)
  call_libc('capset', struct.pack('Ii', 0x20080522, 0), bytes(24))
  call_libc('prctl', DUMPABLE, 0, 0, 0, 0)  # the command cannot trace process 1
  program = bytes.fromhex(seccomp)
  buffer = ctypes.create_string_buffer(program, len(program))
  header = struct.pack('HP', len(program) // 8, ctypes.addressof(buffer))
  call_libc('prctl', SECCOMP, SECCOMP_FILTER, header, 0, 0)


def leave_session_keyring(keyctl: int) -> None:
  """Joins a new session keyring, as the caller's may hold secrets.

  Args:
    keyctl: The number of the system call of this name.
  """
  with contextlib.suppress(OSError):  # the kernel has no keyrings, or refuses them
    call_libc('syscall', keyctl, JOIN_SESSION_KEYRING, None)


def run_in_namespaces(spec: Spec, life: int, report: int) -> int:
  """Creates the namespaces and process 1; returns when that has ended.

  Args:
    spec: What to run.
    life: The descriptor whose end means that the caller is gone.
    report: The descriptor for the outcome.

  Returns:
    The exit code.
  """
  uid, gid, privileged = os.geteuid(), os.getegid(), os.geteuid() == 0
  if privileged:
    call_libc('unshare', ALL)
  else:
    call_libc('unshare', ALL | NEWUSER)
    map_user('self', uid, gid)
  ready, ready_in = os.pipe()
  mapped, mapped_in = os.pipe()
  first = os.fork()
  if first == 0:
    os.close(ready)
    os.close(mapped_in)
    exit_with_report(
      lambda: _first(spec, life, report, privileged, ready_in, mapped), report
    )
  os.close(ready_in)
  os.close(mapped)
  if os.read(ready, 1) and privileged:  # not the host's root but an unused user
    map_user('1', spec['uid'], spec['uid'])  # /proc is the new one here, too
    os.write(mapped_in, b'.')
  os.waitpid(first, 0)
  return 0


def _first(
  spec: Spec,
  life: int,
  report: int,
  privileged: bool,
  ready: int,
  mapped: int,
) -> int:
  build_root(spec)
  if privileged:
    call_libc('unshare', NEWUSER)
  os.write(ready, b'.')
  if privileged:
    os.read(mapped, 1)
    os.setgroups([])
    os.setresgid(USER, USER, USER)
    os.setresuid(USER, USER, USER)
  drop_privileges(spec['seccomp'])
  call_libc('prctl', PDEATHSIG, signal.SIGKILL, 0, 0, 0)
  return supervise(spec, life, report)


def run_in_bwrap(spec: Spec, life: int, report: int) -> int:
  """Becomes bwrap, in which this program is process 1; see `run_as_process_1`.

  Root becomes the unused user first, so that bwrap has no privileges outside.

  Args:
    spec: What to run.
    life: The descriptor whose end means that the caller is gone.
    report: The descriptor for the outcome.
  """
  for source, outer, writable in spec['binds']:
    for _, inner, _ in spec['binds'] if writable else ():
      if inner.startswith(f'{outer}/'):
        clear_path(source, inner.removeprefix(outer))
  sources = [source for source, _, _ in spec['binds']]
  if os.geteuid() == 0:
    call_libc('unshare', NEWNS)
    sources = stage_sources(spec)
    os.setgroups([])
    os.setresgid(spec['uid'], spec['uid'], spec['uid'])
    os.setresuid(spec['uid'], spec['uid'], spec['uid'])
  for descriptor in (life, report):
    os.set_inheritable(descriptor, True)
  arguments = bwrap_arguments(spec, sources)
  arguments += [sys.executable, '-I', '-S', PROGRAM, str(life), str(report)]
  os.execve(spec['bwrap'], [*arguments, str(memory_file(json.dumps(spec)))], {})


def stage_sources(spec: Spec) -> list[str]:
  """Makes what is bound reachable for a user who may not enter the folders above it.

  Args:
    spec: What to run.

  Returns:
    Paths of the sources that anyone can reach, in this mount namespace.
  """
  mount('', '/', '', REC | PRIVATE)
  root, sources = spec['root'], []
  stage = next(path for path in ('/mnt', '/srv', '/tmp') if os.path.isdir(path))
  mount('tmpfs', root, 'tmpfs', NOSUID | NODEV, 'mode=755,size=1m')
  for number, (source, _, writable) in enumerate(spec['binds']):
    bind(source, f'{root}/{number}', writable)
    sources.append(f'{stage}/{number}')
  mount(root, stage, '', BIND | REC)
  return sources


def bwrap_arguments(spec: Spec, sources: list[str]) -> list[str]:
  """Returns the options with which bwrap builds what `build_root` builds.

  Args:
    spec: What to run.
    sources: The paths of what is bound.

  Returns:
    The beginning of bwrap's command line.
  """
  arguments = ['bwrap', '--unshare-user', '--unshare-ipc', '--unshare-pid']
  arguments += ['--unshare-net', '--unshare-uts', '--unshare-cgroup-try', '--as-pid-1']
  arguments += ['--uid', str(USER), '--gid', str(USER), '--hostname', 'sandbox']
  arguments += ['--cap-add', 'ALL', '--proc', '/proc']  # process 1 drops them
  arguments += ['--tmpfs', '/tmp']  # which process 1 bounds
  for path in ('/dev', '/etc', '/run'):
    arguments += ['--dir', path]
  for name, text in spec['files'].items():
    arguments += ['--file', str(memory_file(text)), name]
  for source, (_, target, writable) in zip(sources, spec['binds'], strict=True):
    if os.path.islink(source):
      arguments += ['--symlink', os.readlink(source), target]
    elif target.startswith('/dev/'):
      arguments += ['--dev-bind', source, target]
    else:
      arguments += ['--bind' if writable else '--ro-bind', source, target]
  for path, target in DEVICE_LINKS.items():
    arguments += ['--symlink', target, path]
  return [*arguments, '--remount-ro', '/', '--chdir', '/', '--']


def memory_file(text: str) -> int:
  """Returns the inheritable descriptor of a file in memory.

  Args:
    text: What the file holds.

  Returns:
    The descriptor, at the file's beginning.
  """
  descriptor = os.memfd_create('sandbox', 0)
  with open(descriptor, 'w', closefd=False) as file:
    file.write(text)
  os.lseek(descriptor, 0, os.SEEK_SET)
  return descriptor


def run_as_process_1(spec: Spec, life: int, report: int) -> int:
  """Runs the command in the namespaces that bwrap has created.

  Args:
    spec: What to run.
    life: The descriptor whose end means that the caller is gone.
    report: The descriptor for the outcome.

  Returns:
    The exit code.
  """
  mount('', '/tmp', '', REMOUNT | NOSUID | NODEV, tmp_options(spec))
  os.chmod('/tmp', 0o1777)
  hide_keys()
  drop_privileges(spec['seccomp'])
  call_libc('prctl', PDEATHSIG, signal.SIGKILL, 0, 0, 0)
  return supervise(spec, life, report)


def supervise(spec: Spec, life: int, report: int) -> int:
  """Starts the command and waits for its end, the caller's end, or too much memory.

  Args:
    spec: What to run.
    life: The descriptor whose end means that the caller is gone.
    report: The descriptor for the outcome.

  Returns:
    The exit code.
  """
  signal.signal(signal.SIGINT, signal.SIG_IGN)
  command = os.fork()
  if command == 0:
    exec_command(spec)
  handle = os.pidfd_open(command)
  while True:
    ready = select.select([life, handle], [], [], TICK)[0]
    if handle in ready:
      status = os.waitpid(command, 0)[1]
      code = os.waitstatus_to_exitcode(status)
      report_outcome(report, {'code': code if code >= 0 else 128 - code, 'limit': ''})
      return 0
    if life in ready:
      return 0
    if spec['isolation'] != 'none' and memory_used() > spec['memory']:
      report_outcome(report, {'code': 137, 'limit': 'memory'})
      return 0
    reap_orphans(command)


def reap_orphans(command: int) -> None:
  """Reaps orphans that have ended, except the command itself.

  Args:
    command: The process id of the command.
  """
  options = os.WEXITED | os.WNOHANG
  while True:
    ended = os.waitid(os.P_ALL, 0, options | os.WNOWAIT)
    if ended is None or ended.si_pid == command:
      return
    os.waitpid(ended.si_pid, 0)


def memory_used() -> int:
  """Returns the anonymous memory of all processes except process 1.

  Returns:
    The number of bytes.
  """
  kilobytes = 0
  for name in os.listdir('/proc'):
    if name.isdigit() and name != '1':
      try:
        with open(f'/proc/{name}/status') as file:
          rows = [line.split() for line in file]
      except OSError:  # it has just ended
        continue
      kilobytes += sum(int(r[1]) for r in rows if r[0] in ('RssAnon:', 'RssShmem:'))
  return kilobytes << 10


def exec_command(spec: Spec) -> None:
  """Becomes the command, under its limits.

  Args:
    spec: What to run.
  """
  try:
    os.setsid()
    os.closerange(3, 1 << 16)
    os.chdir(spec['cwd'])
    for number in (signal.SIGINT, signal.SIGPIPE, signal.SIGXFSZ):
      signal.signal(number, signal.SIG_DFL)
    for name, value in spec['rlimits'].items():
      which = getattr(resource, name)
      hard = resource.getrlimit(which)[1]  # the caller's own limit may be lower
      value = value if hard == resource.RLIM_INFINITY else min(value, hard)
      resource.setrlimit(which, (value, value))
    os.execvpe(spec['command'][0], spec['command'], spec['env'])
  except (OSError, ValueError) as error:
    os.write(2, f'{spec["command"][0]}: {error}\n'.encode())
  os._exit(127)


def kill_children() -> None:
  """Kills all descendants, however often they fork; for use without namespaces."""
  while True:
    try:
      with open('/proc/thread-self/children') as file:
        for child in file.read().split():
          os.kill(int(child), signal.SIGKILL)
      os.waitpid(-1, 0)
    except ProcessLookupError:
      continue
    except ChildProcessError:
      return


def run_without_namespaces(spec: Spec, life: int, report: int) -> int:
  """Runs the command without namespaces.

  Args:
    spec: What to run.
    life: The descriptor whose end means that the caller is gone.
    report: The descriptor for the outcome.

  Returns:
    The exit code.
  """
  call_libc('prctl', SUBREAPER, 1, 0, 0, 0)
  try:
    return supervise(spec, life, report)
  finally:
    kill_children()


def report_outcome(report: int, what: dict[str, object]) -> None:
  """Writes one JSON line to the report.

  Args:
    report: The descriptor for the outcome.
    what: The object to write.
  """
  os.write(report, json.dumps(what).encode() + b'\n')


def exit_with_report(work: Any, report: int) -> None:
  """Ends the process with the result of `work`; a failure is reported first.

  Args:
    work: A function that returns an exit code.
    report: The descriptor for the outcome.
  """
  try:
    code = work()
  except Exception as error:
    report_outcome(report, {'error': f'{type(error).__name__}: {error}'})
    code = 125
  os._exit(code)


def main() -> int:
  """Reads what to run and runs it.

  Returns:
    The exit code.
  """
  life, report = int(sys.argv[1]), int(sys.argv[2])
  for descriptor in (life, report):
    os.set_inheritable(descriptor, False)
  if len(sys.argv) > 3:  # inside bwrap
    with open(int(sys.argv[3])) as file:
      return run_as_process_1(json.load(file), life, report)
  os.umask(0o022)
  with open('/proc/self/oom_score_adj', 'w') as file:
    file.write('1000')  # when the machine runs out of memory, this goes first
  line = b''
  while not line.endswith(b'\n'):
    piece = os.read(life, 1 << 16)
    if not piece:
      return 0
    line += piece
  spec = json.loads(line)
  leave_session_keyring(spec['keyctl'])
  run = {
    'none': run_without_namespaces,
    'namespaces': run_in_namespaces,
    'bwrap': run_in_bwrap,
  }[spec['isolation']]
  return run(spec, life, report)


if __name__ == '__main__':
  exit_with_report(main, int(sys.argv[2]))
