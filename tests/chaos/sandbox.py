"""Hostile programs in the sandbox: none reaches the host, and all end."""

import ctypes
import os
import pathlib
import platform

from jaxrl.envs.sandbox import local_sandbox
from jaxrl.envs.sandbox.local_sandbox import PYTHON_PATH, LocalSandbox
from jaxrl.envs.sandbox.sandbox_api import SandboxLimits
from tests.chaos.trials import Trials

ESCAPED = 'ESC' + 'APED'  # so that no program holds the word itself
SECRET = 'CHAOS_SECRET_OF_THE_HOST'
KEY = b'chaos-secret'  # the name of a key in the caller's session keyring
ADD_KEY, REQUEST_KEY, KEYCTL = {
  'x86_64': (248, 249, 250),
  'aarch64': (217, 218, 219),
}[platform.machine()]
SAY = 'print("ESC" + "APED")'
# `call` makes a system call of i386, by machine code; only on x86-64.
I386 = """
import ctypes, mmap, platform, struct, sys
if platform.machine() != 'x86_64': sys.exit()
page = mmap.mmap(-1, 4096, flags=0x62, prot=7)  # private, anonymous, below 2 GiB
address = ctypes.addressof(ctypes.c_char.from_buffer(page))
page[:12] = struct.pack('III', 40, 1, 0)
def call(number, one, two, three):
  code = b'\\x53\\xb8%b\\xbb%b\\xb9%b\\xba%b\\xcd\\x80\\x5b\\xc3'
  numbers = (struct.pack('I', n) for n in (number, one, two, three))
  code %= tuple(numbers)
  page[64 : 64 + len(code)] = code
  return ctypes.CFUNCTYPE(ctypes.c_int)(address + 64)()
"""
PROGRAMS = {
  'reads the shadow file': f'open("/etc/shadow").read(); {SAY}',
  'reads the secret in the environment': (
    f'import os\nif {SECRET!r} in str(dict(os.environ)): {SAY}'
  ),
  'reads the secret in /proc': (
    'import glob\nfor p in glob.glob("/proc/*/environ"):\n'
    f'  try:\n    if {SECRET!r}.encode() in open(p, "rb").read(): {SAY}\n'
    '  except OSError: pass'
  ),
  'lists the home folders': (  # Python itself, which may be read, may be in one
    'import os, sys\nfor folder in ("/root", "/home"):\n'
    '  for name in os.listdir(folder) if os.path.exists(folder) else ():\n'
    f'    if not sys.base_prefix.startswith(f"{{folder}}/{{name}}"): {SAY}'
  ),
  'reads the folder of the tests': f'open({__file__!r}).read(); {SAY}',
  'connects to this machine': (
    'import socket\nfor port in (22, 80, 443, 8000, 6379):\n'
    f'  s = socket.socket(); s.settimeout(1)\n  s.connect(("127.0.0.1", port)); {SAY}'
  ),
  'asks a name server': f'import socket; socket.gethostbyname("example.com"); {SAY}',
  'opens a raw socket': (
    f'import socket; socket.socket(socket.AF_PACKET, socket.SOCK_RAW); {SAY}'
  ),
  'opens a vsock': f'import socket; socket.socket(40, socket.SOCK_STREAM); {SAY}',
  'opens a socket of any other family': (
    'import socket\nfor family in range(64):\n  for kind in (1, 2, 3):\n    try:\n'
    '      socket.socket(family, kind)\n    except OSError: continue\n'
    f'    if family not in (1, 2, 10, 16): {SAY}'
  ),
  'opens a vsock by a call of i386': f'{I386}\nif call(359, 40, 1, 0) >= 0: {SAY}',
  'opens a vsock by socketcall of i386': (
    f'{I386}\nif call(102, 1, address, 0) >= 0: {SAY}'
  ),
  'opens a vsock by a call of x32': (
    f'import ctypes\nif ctypes.CDLL(None).syscall(0x40000029, 40, 1, 0) >= 0: {SAY}'
  ),
  'sets up an io_uring': (
    f'import ctypes\nif ctypes.CDLL(None).syscall(425, 4, bytes(120)) >= 0: {SAY}'
  ),
  'asks for a key of the user': (
    'import ctypes\n'
    f'if ctypes.CDLL(None).syscall({REQUEST_KEY}, b"user", {KEY}, None, 0) > 0: {SAY}'
  ),
  'reads every key': (
    'import ctypes\nc, b = ctypes.CDLL(None), ctypes.create_string_buffer(99)\n'
    'keys = [int(line.split()[0], 16) for line in open("/proc/keys")]\n'
    'for key in [*keys, -1, -2, -3, -4, -5]:\n'
    f'  if c.syscall({KEYCTL}, 11, key, b, 99) > 0: {SAY}'
  ),
  'lists the names of keys': f'if {KEY} in open("/proc/keys", "rb").read(): {SAY}',
  'kills everybody': f'import os\nos.kill(-1, 9); {SAY}',
  'kills its parents': (
    'import os\nfor p in range(1, 400):\n  try:\n    os.kill(p, 9) if p != os.getpid() '
    'else None\n  except OSError: pass'
  ),
  'traces process 1': (
    f'import ctypes\nif ctypes.CDLL(None).ptrace(16, 1, 0, 0) == 0: {SAY}'
  ),
  'mounts a file system': (
    'import ctypes\nmount = ctypes.CDLL(None).mount\n'
    f'if mount(b"proc", b"/mnt", b"proc", 0, None) == 0: {SAY}'
  ),
  'makes a device': (
    f'import os, stat; os.mknod("/tmp/sda", 0o600 | stat.S_IFBLK, 2048); {SAY}'
  ),
  'sets its user': f'import os; os.setuid(12345); {SAY}',
  'leaves by chroot': (
    'import os\nos.mkdir("x"); os.chroot("x"); os.chdir("../" * 20); os.chroot(".")\n'
    f'if os.path.exists({__file__!r}): {SAY}'
  ),
  'writes to the kernel': f'open("/proc/sysrq-trigger", "w").write("h"); {SAY}',
  'forks without end': 'import os\nwhile True:\n  os.fork()',
  'takes memory without end': 'x = []\nwhile True:\n  x.append(bytearray(1 << 24))',
  'writes without end': (
    'f = open("/tmp/f", "wb")\nwhile True:\n  f.write(bytes(1 << 20)); f.flush()'
  ),
  'prints without end': 'while True:\n  print("x" * 100_000)',
  'runs without end': 'while True: pass',
  'ignores all signals': (
    'import signal\nfor n in range(1, 32):\n  try: signal.signal(n, signal.SIG_IGN)\n'
    '  except (OSError, ValueError): pass\nwhile True: pass'
  ),
  'leaves a daemon': (
    'import os, time\nif os.fork() == 0:\n  os.setsid()\n  if os.fork() == 0:\n'
    '    time.sleep(1000)'
  ),
  'makes many files': (
    'import itertools\nfor i in itertools.count():\n  open(f"/tmp/{i}", "w").close()'
  ),
  'makes deep folders': ('import os\nwhile True:\n  os.mkdir("d"); os.chdir("d")'),
}


def programs(rng, folder) -> Trials:
  """Yields every hostile program in every kind of sandbox, in random order."""
  mark = folder / 'mark'
  mark.write_text('whole')
  plant_secrets()
  for isolation in ('bwrap', 'namespaces'):
    if reason := local_sandbox.unsupported_reason(isolation):
      print(f'  no sandbox of {isolation} here: {reason}')
      continue
    for name in rng.permutation(list(PROGRAMS)).tolist():
      yield (
        f'{name} ({isolation})',
        lambda name=name, isolation=isolation: attempt(PROGRAMS[name], mark, isolation),
      )


def plant_secrets() -> None:
  """Puts a secret into the environment and one into the session's keyring."""
  os.environ[SECRET] = SECRET
  session = -3
  ctypes.CDLL(None).syscall(ADD_KEY, b'user', KEY, b'secret', 6, session)


def attempt(
  code: str,
  mark: pathlib.Path,
  isolation: local_sandbox.Isolation,
  seconds: float = 5.0,
) -> str:
  """Runs a program in a sandbox; returns '' if it did not get out.

  Args:
    code: The program.
    mark: A file of the host, which must stay as it is.
    isolation: What creates the sandbox.
    seconds: The program's time limit.
  """
  sandbox = LocalSandbox(limits=SandboxLimits(), isolation=isolation)
  sandbox.start()
  try:
    result = sandbox.exec([PYTHON_PATH, '-I', '-c', code], seconds=seconds)
    if ESCAPED.encode() in result.stdout:
      before = result.stdout.partition(ESCAPED.encode())[0]
      return f'it got out: {before[-100:]!r}'
    again = sandbox.exec(['sh', '-c', 'echo ok'], seconds=5)
    if b'ok' not in again.stdout and again.code == 0:
      return 'the sandbox is of no use afterwards'
  finally:
    sandbox.stop()
  return '' if mark.read_text() == 'whole' else 'a file of the host has changed'
