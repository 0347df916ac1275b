"""The local sandbox: what it gives, and that what runs in it does not get out.

Every test runs with bubblewrap, where it is installed, and with this project's own
program.
"""

import os
import socket
import subprocess
import sys
import tempfile
import time
from pathlib import Path

import pytest

from jaxrl.envs.sandbox import local_sandbox
from jaxrl.envs.sandbox.local_sandbox import PYTHON_PATH, LocalSandbox
from jaxrl.envs.sandbox.sandbox_api import MIB, SandboxError, SandboxLimits

ROOT = str(Path(__file__).parents[3])


def isolations():
  """What can create a sandbox, for a fixture; what cannot here is skipped."""
  for name in ('bwrap', 'namespaces'):
    reason = local_sandbox.unsupported_reason(name)
    marks = pytest.mark.skipif(bool(reason), reason=f'{name}: {reason}')
    yield pytest.param(name, marks=marks)


@pytest.fixture(params=isolations())
def isolation(request):
  return request.param


@pytest.fixture
def make(isolation):
  sandboxes = []

  def start(**options):
    sandbox = LocalSandbox(isolation=isolation, **options)
    sandboxes.append(sandbox)
    sandbox.start()
    return sandbox

  yield start
  for sandbox in sandboxes:
    sandbox.stop()


def python(sandbox, code, **options):
  return sandbox.exec([PYTHON_PATH, '-I', '-S', '-c', code], **options)


def named(mark):
  """Live processes of this machine whose command line holds `mark`."""
  pids = []
  for folder in Path('/proc').iterdir():
    if folder.name.isdigit():
      try:
        if mark.encode() in (folder / 'cmdline').read_bytes():
          pids.append(int(folder.name))
      except OSError:
        continue
  return [pid for pid in pids if pid != os.getpid()]


def test_a_command_speaks_and_ends(make):
  sandbox = make()
  result = sandbox.exec(['sh', '-c', 'cat; echo no >&2; exit 3'], stdin=b'in')
  assert (result.code, result.stdout, result.stderr) == (3, b'in', b'no\n')
  assert result.limit == ''
  assert result.text == 'inno\n'
  assert sandbox.exec(['sh', '-c', 'kill -TERM $$']).code == 128 + 15
  assert sandbox.exec(['no-such-command']).code == 127
  assert sandbox.exec(['true'], stdin=bytes(3 * MIB)).code == 0  # read by nobody


def test_folders_are_copies_that_outlive_an_exec(make, tmp_path):
  (tmp_path / 'a').write_text('first')
  (tmp_path / 'link').symlink_to('/etc/shadow')
  sandbox = make(folders={'/work': str(tmp_path), '/tests': None})
  assert sandbox.exec(['sh', '-c', 'pwd; cat a; echo x >> a']).stdout == b'/work\nfirst'
  assert sandbox.read('a') == b'firstx\n'
  sandbox.write('/tests/deep/er', b'\0\xff')
  assert sandbox.read('/tests/deep/er') == b'\0\xff'
  assert (tmp_path / 'a').read_text() == 'first'
  with pytest.raises(FileNotFoundError):
    sandbox.read('link')
  with pytest.raises(SandboxError, match='cannot write /usr/x'):
    sandbox.write('/usr/x', b'')
  sandbox.exec(['sh', '-c', 'mkdir d; touch d/f; chmod 0 d'])
  state = sandbox._state
  assert state.exists()
  sandbox.stop()
  sandbox.stop()
  assert not state.exists()
  with pytest.raises(SandboxError, match='not started'):
    sandbox.exec(['true'])


def test_the_host_is_out_of_sight(make, tmp_path, monkeypatch):
  secret = tmp_path / 'secret'
  secret.write_text('hidden words')
  monkeypatch.setenv('API_KEY', 'hidden words')
  script = f"""
    cat {secret} {__file__} /etc/shadow /proc/1/environ /proc/1/root{secret}
    ls /home /root/.ssh /work /sys; env; cat /proc/*/environ; ls /proc/1/fd/
    id -u; echo x > /proc/sys/kernel/hostname; touch /usr/x /x
    mount -t tmpfs t /tmp; unshare -U true && echo unshared; ls /proc | grep -c '^[0-9]'
  """
  result = make().exec(['sh', '-c', script])
  assert b'hidden words' not in result.stdout + result.stderr
  assert b'unshared' not in result.stdout
  assert b'No such file' in result.stderr
  assert b'Read-only file system' in result.stderr
  assert int(result.stdout.split()[-1]) <= 4  # process 1, sh, ls, grep
  assert socket.gethostname() != 'x'


def test_no_network(make):
  with socket.create_server(('127.0.0.1', 0)) as server:
    server.settimeout(0)
    code = f"""
import socket, os
for address in (('127.0.0.1', {server.getsockname()[1]}), ('1.1.1.1', 53)):
  try:
    socket.create_connection(address, 1)
    print('connected')
  except OSError as error:
    print(type(error).__name__)
with socket.create_server(('127.0.0.1', 0)) as mine:  # its own loopback works
  socket.create_connection(mine.getsockname())
  print('own')
"""
    result = python(make(), code)
    assert result.stdout.decode().split() == [
      'ConnectionRefusedError',
      'OSError',
      'own',
    ]
    with pytest.raises(BlockingIOError):
      server.accept()


def test_no_process_is_left_behind(make):
  sandbox = make()
  mark = f'97.{os.getpid()}'
  daemon = f'setsid sleep {mark} & (setsid sleep {mark} &) & echo started'
  assert sandbox.exec(['sh', '-c', daemon]).stdout == b'started\n'
  assert named(mark) == []
  result = sandbox.exec(['sh', '-c', f'{daemon}; trap "" TERM; sleep 97'], seconds=0.2)
  assert (result.limit, result.code) == ('time', 137)
  assert result.seconds < 10
  assert named(mark) == []


def test_parents_cannot_be_killed(make):
  code = """
import os, signal
for number in (signal.SIGSTOP, signal.SIGINT, signal.SIGTERM, signal.SIGKILL):
  os.kill(os.getppid(), number)
print(os.getppid(), 'alive', flush=True)
os.kill(-1, signal.SIGKILL)
"""
  result = python(make(), code)
  assert (result.stdout, result.limit) == (b'1 alive\n', '')


def test_a_fork_bomb_is_bounded(make):
  mark = f'bomb{os.getpid()}'
  sandbox = make(limits=SandboxLimits(seconds=2, processes=12))
  code = f"""
import os, time
'{mark}'
failed = 0
while True:
  try:
    if os.fork() == 0:
      time.sleep(60)
  except BlockingIOError:
    if not failed:
      print('full', flush=True)
    failed = 1
    time.sleep(.01)
"""
  result = python(sandbox, code)
  assert result.limit == 'time'
  assert result.stdout == b'full\n'
  assert result.seconds < 10
  assert named(mark) == []


def test_memory_is_bounded_at_once_and_bit_by_bit(make):
  sandbox = make(limits=SandboxLimits(memory=48 * MIB, tmp=2 * MIB, file_size=MIB))
  result = python(sandbox, 'bytearray(1 << 40)')
  assert b'MemoryError' in result.stderr
  grow = 'a = []\nwhile True: a.append(bytearray(b"x") * (1 << 20))'
  result = python(sandbox, grow)
  assert (result.limit, result.code) == ('memory', 137)
  shared = 'import os\nfor _ in range(3): os.fork()\n'
  hold = 'b = bytearray(b"x") * (12 << 20)\nimport time; time.sleep(9)'
  assert python(sandbox, shared + hold).limit == 'memory'
  mapped = 'import mmap\nb = mmap.mmap(-1, 96 << 20)\n'
  mapped += 'for _ in range(96): b.write(bytes(1 << 20))\n'
  mapped += 'import time; time.sleep(9)'
  assert python(sandbox, mapped).limit == 'memory'
  fill = "for n in range(9): open(f'/tmp/{n}', 'wb').write(bytes(1 << 19))"
  assert b'No space left' in python(sandbox, fill).stderr


def test_output_files_and_cpu_are_bounded(make):
  sandbox = make(
    limits=SandboxLimits(output=1000, file_size=MIB), folders={'/work': None}
  )
  result = sandbox.exec(['yes'])
  assert result.limit == 'output'
  assert result.stdout == b'y\n' * 500
  result = sandbox.exec(['sh', '-c', 'yes >&2'])
  assert (result.limit, len(result.stderr)) == ('output', 1000)
  huge = python(sandbox, "open('huge', 'wb').write(bytes(1 << 23))")
  assert huge.code in (1, 128 + 25)
  assert (sandbox._state / '0' / 'huge').stat().st_size == MIB
  assert python(sandbox, "open('huge2', 'wb').truncate(1 << 40)").code != 0
  spin = 'import resource; print(resource.getrlimit(resource.RLIMIT_CPU))'
  assert python(sandbox, spin, seconds=1.5).stdout == b'(2, 2)\n'


def test_where_namespaces_are_denied_it_refuses(make):
  code = """
import os
from jaxrl.envs.sandbox.local_sandbox import LocalSandbox
from jaxrl.envs.sandbox.sandbox_api import SandboxError
try:
  LocalSandbox(isolation='namespaces').start()
except SandboxError as error:
  print(error)
sandbox = LocalSandbox(
  isolation='namespaces', unsafe=True, folders={'/work': None}
)
sandbox.start()
sandbox.write('/work/a', b'written')
print(sandbox.read('a'))
print(sandbox.exec(['sh', '-c', 'pwd; sleep 98 & setsid sleep 98 & echo started']))
print(sandbox.exec(['sleep', '98'], seconds=.2).limit)
names = [f'/proc/{p}/cmdline' for p in os.listdir('/proc') if p.isdigit()]
print([name for name in names if open(name).read() == 'sleep\\x0098\\x00'])
"""
  sandbox = make(readonly=(ROOT,), environment={'PYTHONPATH': ROOT})
  inner = sandbox.exec([PYTHON_PATH, '-S', '-c', code])
  output = inner.text
  assert 'this machine allows no sandbox: ' in output
  assert 'unshare' in output
  assert 'unsafe=True' in output
  assert "b'written'" in output
  assert 'started' in output
  assert output.split()[-2:] == ['time', '[]']


def test_wrong_folders_are_told(tmp_path, monkeypatch):
  monkeypatch.setattr(tempfile, 'tempdir', str(tmp_path))
  with pytest.raises(SandboxError, match='absolute'):
    LocalSandbox(folders={'work': None})
  with pytest.raises(SandboxError, match='is not a folder'):
    LocalSandbox(folders={'/work': str(tmp_path / 'absent')}).start()
  assert not list(tmp_path.iterdir())


def test_its_starter_dies_and_so_does_all(tmp_path, isolation):
  code = f"""
import os, signal, threading, time
from jaxrl.envs.sandbox.local_sandbox import LocalSandbox
sandbox = LocalSandbox(isolation={isolation!r}); sandbox.start()
threading.Timer(.3, lambda: os.kill(os.getpid(), signal.SIGKILL)).start()
sandbox.exec(['sleep', '96.{os.getpid()}'])
"""
  env = os.environ | {'TMPDIR': str(tmp_path)}  # for what it leaves
  done = subprocess.run([sys.executable, '-c', code], cwd=ROOT, env=env, check=False)
  assert done.returncode == -9
  until = time.monotonic() + 3
  while named(f'96.{os.getpid()}') and time.monotonic() < until:
    time.sleep(0.02)
  assert named(f'96.{os.getpid()}') == []
  assert list(tmp_path.iterdir())
  code = 'from jaxrl.envs.sandbox import workdirs; import sys\n'
  code += 'place, _ = workdirs.make_workdir(); print(place.name)'
  done = subprocess.run(
    [sys.executable, '-c', code], cwd=ROOT, env=env, check=True, capture_output=True
  )
  (left,) = tmp_path.iterdir()  # the next who makes one removes it
  assert left.name == done.stdout.decode().strip()


def test_folders_are_put_in_place_of_others(make, tmp_path):
  (tmp_path / 'a').write_text('first')
  sandbox = make(folders={'/work': None})
  assert sandbox.exec(['ls', '/tests']).code == 2
  sandbox.put('/tests', str(tmp_path))
  sandbox.exec(['sh', '-c', 'echo more > /tests/b; mkdir /tests/c; chmod 0 /tests/c'])
  assert sandbox.exec(['ls', '/tests']).stdout == b'a\nb\nc\n'
  sandbox.put('/tests', str(tmp_path))
  assert sandbox.exec(['ls', '/tests']).stdout == b'a\n'
  sandbox.put('/work/inner', None)
  assert sandbox.exec(['touch', 'inner/x']).code == 0
  with pytest.raises(SandboxError, match='absolute'):
    sandbox.put('tests', None)
  with pytest.raises(SandboxError, match='is not a folder'):
    sandbox.put('/more', str(tmp_path / 'absent'))
  assert sorted(p.name for p in sandbox._state.iterdir()) == [
    *('0', '2', '3', 'lock', 'root')
  ]


@pytest.mark.parametrize('trick', ['ln -s /home in', 'ln -s /nowhere in', 'touch in'])
def test_what_a_command_left_stands_in_no_folders_way(make, trick):
  sandbox = make(folders={'/work': None, '/home': None})
  forge = 'echo 1 > /home/reward; chmod 444 /home/reward; chmod 555 /home'
  assert sandbox.exec(['sh', '-c', f'{trick} && {forge}']).code == 0
  sandbox.put('/work/in', None)
  score = 'echo 0 > /work/in/reward; cat /work/in/reward; cat /home/reward'
  assert sandbox.exec(['sh', '-c', score]).text == '0\n1\n'


def test_output_of_one_command_may_be_more(make):
  sandbox = make(limits=SandboxLimits(output=1000))
  many = ['head', '-c', '5000', '/dev/zero']
  assert sandbox.exec(many).limit == 'output'
  assert len(sandbox.exec(many, output=9000).stdout) == 5000


def test_a_sandbox_nobody_holds_any_more_is_removed(isolation):
  sandbox = LocalSandbox(folders={'/work': None}, isolation=isolation)
  sandbox.start()
  state = sandbox._state
  assert state.exists()
  del sandbox
  assert not state.exists()


def test_where_the_callers_own_limits_are_lower_they_hold(isolation):
  code = f"""
import resource
from jaxrl.envs.sandbox.local_sandbox import LocalSandbox
resource.setrlimit(resource.RLIMIT_NOFILE, (99, 99))
sandbox = LocalSandbox(isolation={isolation!r}); sandbox.start()
print(sandbox.exec(['sh', '-c', 'ulimit -n']).text)
sandbox.stop()
"""
  done = subprocess.run(
    [sys.executable, '-c', code], cwd=ROOT, capture_output=True, check=True
  )
  assert done.stdout.split() == [b'99']


@pytest.fixture
def forgotten():
  """What this machine can do is found out anew, in the test and after it."""
  local_sandbox.unsupported_reason.cache_clear()
  local_sandbox._default_isolation.cache_clear()
  yield
  local_sandbox.unsupported_reason.cache_clear()
  local_sandbox._default_isolation.cache_clear()


@pytest.mark.parametrize(
  ('program', 'words'), [('', 'not installed'), ('echo no way >&2; exit 1', 'no way')]
)
def test_without_bubblewrap_its_own_program_stands_in_and_says_so_once(
  program, words, monkeypatch, caplog, forgotten
):
  with tempfile.TemporaryDirectory() as folder:
    os.chmod(folder, 0o755)  # the sandbox's user runs it
    if program:
      (Path(folder) / 'bwrap').write_text(f'#!/bin/sh\n{program}\n')
      (Path(folder) / 'bwrap').chmod(0o755)
    monkeypatch.setenv('PATH', folder)
    caplog.set_level('INFO')
    for _ in range(2):
      assert local_sandbox.choose_isolation('auto') == 'namespaces'
      sandbox = LocalSandbox()
      sandbox.start()
      assert sandbox.exec(['/bin/echo', 'ok']).stdout == b'ok\n'
      sandbox.stop()
    (record,) = [r for r in caplog.records if r.name == local_sandbox.__name__]
    assert "this project's own program" in record.message and words in record.message
    with pytest.raises(SandboxError, match=f'allows no sandbox: .*{words}'):
      LocalSandbox(isolation='bwrap').start()


def test_bubblewrap_is_the_default_where_it_works():
  reason = local_sandbox.unsupported_reason('bwrap')
  if reason:
    pytest.skip(reason)
  assert local_sandbox.choose_isolation('auto') == 'bwrap'
  sandbox = LocalSandbox()
  sandbox.start()
  assert b'/run/namespaces.py' in sandbox.exec(['cat', '/proc/1/cmdline']).stdout
  sandbox.stop()


def test_an_isolation_that_there_is_not_is_told():
  with pytest.raises(SandboxError, match='auto, bwrap, namespaces'):
    LocalSandbox(isolation='docker')  # type: ignore[arg-type]
