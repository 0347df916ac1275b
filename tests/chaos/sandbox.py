"""Hostile programs in the sandbox: none reaches the host, and all end."""

import os
import pathlib

from jaxrl.envs.sandbox import local_sandbox
from jaxrl.envs.sandbox.local_sandbox import PYTHON_PATH, LocalSandbox
from jaxrl.envs.sandbox.sandbox_api import SandboxLimits
from tests.chaos.trials import Trials

ESCAPED = 'ESC' + 'APED'  # so that no program holds the word itself
SECRET = 'CHAOS_SECRET_OF_THE_HOST'
SAY = 'print("ESC" + "APED")'
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
  'lists the home folders': (
    'from glob import glob\n'
    f'if glob("/root/.bash*") + glob("/root/.ssh") + glob("/home/*"): {SAY}'
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
  'reads the keyring of the user': (
    'import ctypes; c = ctypes.CDLL(None, use_errno=True)\n'
    'key = c.syscall(249, b"user", b"chaos", None, 0)\n'
    f'if key > 0: {SAY}'
  ),
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
  """Yields every hostile program, in random order."""
  if reason := local_sandbox.unsupported_reason():
    print(f'  no sandbox here: {reason}')
    return
  mark = folder / 'mark'
  mark.write_text('whole')
  os.environ[SECRET] = SECRET
  for name in rng.permutation(list(PROGRAMS)).tolist():
    yield name, lambda name=name: _attempt(PROGRAMS[name], mark)


def _attempt(code: str, mark: pathlib.Path) -> str:
  sandbox = LocalSandbox(limits=SandboxLimits())
  sandbox.start()
  try:
    result = sandbox.exec([PYTHON_PATH, '-I', '-c', code], seconds=5)
    if ESCAPED.encode() in result.stdout:
      return f'it got out: {result.stdout[-100:]!r}'
    again = sandbox.exec(['sh', '-c', 'echo ok'], seconds=5)
    if b'ok' not in again.stdout and again.code == 0:
      return 'the sandbox is of no use afterwards'
  finally:
    sandbox.stop()
  return '' if mark.read_text() == 'whole' else 'a file of the host has changed'
