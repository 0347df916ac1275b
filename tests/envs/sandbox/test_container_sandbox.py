"""Docker and podman: what they are asked, against a program that stands in for them."""

import json
import os
import sys

import pytest

from jaxrl.component_calls import ComponentCall
from jaxrl.envs.sandbox.container_sandbox import ContainerSandbox
from jaxrl.envs.sandbox.sandbox_api import MIB, SandboxError, SandboxLimits
from jaxrl.envs.sandbox.sandbox_backends import sandbox_factory
from jaxrl.types import Task
from tests.calls import env_factory
from tests.envs import swe_repos

STAND_IN = f"""#!{sys.executable}
import json, os, shutil, subprocess, sys
here = os.path.dirname(os.path.abspath(__file__))
arguments = sys.argv[1:]
os.chdir(here)
with open(here + '/asked', 'a') as file:
  file.write(json.dumps(arguments) + '\\n')
told = here + '/say-' + arguments[0]
if os.path.exists(told):
  sys.exit(open(told).read())
if arguments[0] == 'exec':
  while (flag := arguments[1]).startswith('--'):
    del arguments[1]
    if flag.startswith('--workdir='):
      os.chdir(flag.partition('=')[2])
  rest = arguments[1:]
  os.execvp(rest[1], rest[1:])
if arguments[0] == 'cp':
  target = arguments[2].partition(':')[2]
  shutil.copytree(arguments[1], target, dirs_exist_ok=True)
if arguments[0] == 'top':
  print('PID\\n7\\n8' + ('\\n9' if os.path.exists(here + '/busy') else ''))
"""


@pytest.fixture
def stand_in(tmp_path, monkeypatch):
  """Where the program lies; what it was asked is in its file `asked`."""
  folder = tmp_path / 'bin'
  folder.mkdir()
  for name in ('docker', 'podman'):
    (folder / name).write_text(STAND_IN)
    (folder / name).chmod(0o755)
  monkeypatch.setenv('PATH', f'{folder}:{os.environ["PATH"]}')
  return folder


def recorded_calls(folder):
  return [json.loads(line) for line in (folder / 'asked').read_text().splitlines()]


@pytest.mark.parametrize('program', ['docker', 'podman'])
def test_what_a_session_asks_for(stand_in, tmp_path, program):
  inside = f'{tmp_path}/inside'
  (tmp_path / 'given').mkdir()
  (tmp_path / 'given' / 'a').write_text('first')
  options = {'image': 'lab/{task}:1', 'memory_mb': 64, 'processes': 9}
  make = sandbox_factory(ComponentCall(program, options))
  sandbox = make(
    folders={inside: f'{tmp_path}/given'},
    workdir=inside,
    task='Acme__ledger-1',
    environment={'NAME': 'value'},
  )
  sandbox.start()
  run = recorded_calls(stand_in)[0]
  name = run[4].removeprefix('--name=')
  assert run == [
    *('run', '--detach', '--init', '--pull=never', f'--name={name}'),
    *('--label=jaxrl.sandbox', '--network=none'),
    *(f'--memory={64 * MIB}', f'--memory-swap={64 * MIB}', '--cpus=2.0'),
    *('--pids-limit=11', '--ulimit=nofile=1024:1024'),
    *('--security-opt=no-new-privileges', '--cap-drop=ALL'),
    *(f'--cap-add={c}' for c in ('CHOWN', 'DAC_OVERRIDE', 'FOWNER', 'KILL')),
    *('--cap-add=SETGID', '--cap-add=SETUID', '--env=NAME=value'),
    *('--entrypoint=sleep', 'lab/acme__ledger-1:1', '14400'),
  ]
  assert sandbox.read(f'{inside}/a') == b'first'
  sandbox.write(f'{inside}/deep/b', b'\0\xff')
  assert sandbox.read(f'{inside}/deep/b') == b'\0\xff'
  with pytest.raises(FileNotFoundError, match='No such file'):
    sandbox.read(f'{inside}/absent')
  result = sandbox.exec(['sh', '-c', 'cat; echo no >&2; exit 3'], stdin=b'in')
  assert (result.code, result.stdout, result.stderr) == (3, b'in', b'no\n')
  exec_asked, top_asked = recorded_calls(stand_in)[-2:]
  begins = ['exec', '--interactive', f'--workdir={inside}', name]
  assert exec_asked[:4] == begins
  top = ['pid'] if program == 'podman' else ['-eo', 'pid']
  assert top_asked == ['top', name, *top]
  sandbox.put(inside, None)
  assert os.listdir(inside) == []
  sandbox.stop()
  sandbox.stop()
  calls = recorded_calls(stand_in)
  assert calls[-1] == ['rm', '--force', '--volumes', name]
  assert sum(arguments[0] == 'rm' for arguments in calls) == 1
  assert not any('--privileged' in ' '.join(arguments) for arguments in calls)
  with pytest.raises(SandboxError, match='not started'):
    sandbox.exec(['true'])


def started(**options):
  sandbox = ContainerSandbox(program='docker', image='lab', **options)
  sandbox.start()
  return sandbox


def test_what_outlives_a_command_is_ended(stand_in):
  sandbox = started(limits=SandboxLimits(output=1000))
  sandbox.exec(['true'])
  assert 'restart' not in [arguments[0] for arguments in recorded_calls(stand_in)]
  (stand_in / 'busy').touch()
  result = sandbox.exec(['sleep', '60'], seconds=0.2)
  assert (result.limit, result.code) == ('time', 137)
  assert recorded_calls(stand_in)[-1] == ['restart', '-t', '0', sandbox._name]
  result = sandbox.exec(['yes'])
  assert (result.limit, len(result.stdout)) == ('output', 1000)
  assert len(sandbox.exec(['head', '-c', '5000', '/dev/zero'], output=9000).stdout) == (
    5000
  )
  (stand_in / 'say-restart').write_text('it is gone')
  with pytest.raises(SandboxError, match='docker restart ended with 1: it is gone'):
    sandbox.exec(['true'])
  sandbox.stop()


def test_a_container_that_cannot_start_is_told_and_removed(stand_in, monkeypatch):
  (stand_in / 'say-run').write_text('No such image: lab')
  with pytest.raises(SandboxError, match='docker run ended with 1: No such image: lab'):
    started()
  assert [arguments[0] for arguments in recorded_calls(stand_in)] == ['run', 'rm']
  with pytest.raises(SandboxError, match='absolute'):
    (stand_in / 'say-run').unlink()
    started(folders={'work': None})
  monkeypatch.setenv('PATH', str(stand_in.parent))
  with pytest.raises(SandboxError, match="no program 'docker' on this machine"):
    started()


def test_a_container_nobody_holds_any_more_is_removed(stand_in):
  sandbox = started()
  name = sandbox._name
  del sandbox
  assert recorded_calls(stand_in)[-1] == ['rm', '--force', '--volumes', name]


def test_an_episode_in_a_repository(stand_in, tmp_path, monkeypatch):
  monkeypatch.setenv('PYTEST_DISABLE_PLUGIN_AUTOLOAD', '1')
  python_folder = os.path.dirname(sys.executable)  # where pytest is
  monkeypatch.setenv('PATH', f'{stand_in}:{python_folder}:{os.environ["PATH"]}')
  row = swe_repos.ledger(tmp_path / 'repos')
  options = {
    'repos': f'{tmp_path}/repos',
    'sandbox': "docker(image='lab/{task}')",
    'workdir': f'{tmp_path}/inside',
  }
  env = env_factory('swe', options)()
  env.reset(seed=0, options={'task': Task(seed=0, index=0, item=row)})
  env.step(f"```\ngit apply - <<'EOF'\n{row['patch']}EOF\n```")
  assert env.step('```\nsubmit\n```')[1] == 1
  calls = recorded_calls(stand_in)
  runs = [arguments for arguments in calls if arguments[0] == 'run']
  assert [arguments[-2] for arguments in runs] == ['lab/acme__ledger-1'] * 2
  names = {arguments[4] for arguments in runs}
  removed = {f'--name={arguments[-1]}' for arguments in calls if arguments[0] == 'rm'}
  assert names == removed
