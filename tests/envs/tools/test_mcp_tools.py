"""Tools of a real server, a process of its own."""

import importlib.util
import pathlib
import shlex
import subprocess
import sys
import textwrap

import pytest

from jaxrl.envs.tools import mcp_tools
from jaxrl.envs.tools.mcp_tools import McpStartError, McpTools
from jaxrl.envs.tools.tool_api import ToolError
from tests.processes import wait_for_end

pytestmark = pytest.mark.skipif(
  importlib.util.find_spec('mcp') is None, reason='needs the package mcp'
)
SERVER = pathlib.Path(__file__).with_name('server.py')
COMMAND = shlex.join([sys.executable, str(SERVER)])


@pytest.fixture(scope='module')
def shared():
  """A server for all tests that leave it as it is."""
  tool = McpTools(command=COMMAND, per='process')
  yield tool, {schema['function']['name']: schema for schema in tool.start()}
  for server in mcp_tools._SHARED.values():
    server.close()
  mcp_tools._SHARED.clear()


def call(tool, name, seconds=60, **arguments):
  return tool.call(name, arguments, seconds=seconds)


def fault(tool, name, seconds=60, **arguments):
  with pytest.raises(ToolError) as caught:
    call(tool, name, seconds, **arguments)
  return caught.value.kind, str(caught.value)


def test_its_tools_and_their_results(shared):
  tool, schemas = shared
  parameters = schemas['add']['function']['parameters']
  assert schemas['add']['function']['description'] == 'Adds two numbers.'
  assert parameters['required'] == ['x', 'y']
  assert call(tool, 'add', x=1, y=2) == '3'


def test_errors_are_told(shared):
  tool, _ = shared
  why, message = fault(tool, 'add', x='one')
  assert why == 'failed' and 'x' in message and 'valid integer' in message
  assert fault(tool, 'fail')[0] == 'failed'
  assert fault(tool, 'nothing')[0] == 'failed'
  why, message = 'timeout', 'sleep gave no answer in 0.2 s'
  with pytest.raises(ToolError) as caught:
    tool.call('sleep', {'seconds': 60}, seconds=0.2)
  assert (caught.value.kind, str(caught.value)) == (why, message)
  assert call(tool, 'add', x=1, y=2) == '3'


def test_a_server_of_the_process_is_one_for_all(shared):
  tool, _ = shared
  other = McpTools(command=COMMAND, per='process', only=('add', 'remember'))
  names = [schema['function']['name'] for schema in other.start()]
  assert sorted(names) == ['add', 'remember']
  assert call(tool, 'remember', word='a') == 'a'
  assert call(other, 'remember', word='b') == 'a b'
  other.close()
  assert call(tool, 'remember', word='c') == 'a b c'
  with pytest.raises(ValueError, match=r"no tool 'ad'.*add"):
    McpTools(command=COMMAND, per='process', only=('ad',)).start()


@pytest.mark.slow
def test_servers_of_environments_and_of_episodes(tmp_path, monkeypatch):
  """Each has its own state, is replaced when it died, and ends when it is closed."""
  monkeypatch.setenv('MY_SECRET', 'x')
  count = tmp_path / 'count'
  options = {'command': COMMAND, 'env': {'COUNT': str(count)}}
  mine, other = McpTools(**options), McpTools(per='episode', **options)
  mine.start()
  call(mine, 'remember', word='a')
  mine.start()
  assert call(mine, 'remember', word='b') == 'a b'
  names = call(mine, 'environment').split()
  assert 'COUNT' in names and 'MY_SECRET' not in names
  for _ in range(2):
    other.start()
    assert call(other, 'remember', word='c') == 'c'
  assert fault(mine, 'end')[0] == 'failed'
  assert fault(mine, 'add', x=1, y=2)[0] == 'failed'
  mine.start()
  assert call(mine, 'remember', word='d') == 'd'
  mine.close()
  assert fault(mine, 'add', x=1, y=2)[0] == 'failed'
  del other  # as an environment that is dropped
  pids = count.read_text().split()
  assert len(pids) == 4
  for pid in pids:
    wait_for_end(pid)


@pytest.mark.slow
@pytest.mark.skipif(sys.platform != 'linux', reason='the kernel has no such signal')
def test_a_server_dies_with_who_started_it(tmp_path):
  count = tmp_path / 'count'
  program = textwrap.dedent(f"""
    import os, signal
    from jaxrl.envs.tools.mcp_tools import McpTools
    tool = McpTools(command={COMMAND!r}, env={{'COUNT': {str(count)!r}}})
    tool.start()
    os.kill(os.getpid(), signal.SIGKILL)
  """)
  root = SERVER.parents[3]
  subprocess.run([sys.executable, '-c', program], cwd=root, timeout=120)
  (pid,) = count.read_text().split()
  wait_for_end(pid)


def test_a_server_that_does_not_start():
  with pytest.raises(McpStartError, match='no luck today'):
    McpTools(command=f'{COMMAND} broken').start()
  with pytest.raises(McpStartError, match=r'no answer within 0\.5 s'):
    McpTools(command=f'{COMMAND} silent', start_timeout=0.5).start()


def test_wrong_options():
  for options in ({}, {'command': 'no-such-command-here'}):
    with pytest.raises(ValueError, match='command'):
      McpTools(**options)
