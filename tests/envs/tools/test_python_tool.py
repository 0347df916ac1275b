"""The interpreter: what it returns, what it keeps, what stops it."""

import os
import pathlib
import threading
import time

import pytest

from jaxrl.envs.sandbox import local_sandbox
from jaxrl.envs.sandbox.sandbox_api import SandboxError
from jaxrl.envs.tools.python_tool import PythonTool
from jaxrl.envs.tools.tool_api import ToolError
from tests.marks import SANDBOXED, slow


@pytest.fixture
def interpreter():
  tools = []

  def make(**options):
    tool = PythonTool(**options)
    tools.append(tool)
    tool.start()
    return lambda code, seconds=60: tool.call('python', {'code': code}, seconds=seconds)

  yield make
  for tool in tools:
    tool.close()


def fault(run, code, seconds=60):
  with pytest.raises(ToolError) as caught:
    run(code, seconds)
  return caught.value.kind, str(caught.value)


@SANDBOXED
@pytest.mark.parametrize('keep', [False, True])
def test_what_it_prints_and_the_last_value(interpreter, keep):
  run = interpreter(keep=keep)
  assert run('print("a")\nimport sys\nprint("b", file=sys.stderr)\n[1] * 2') == (
    'a\nb\n[1, 1]'
  )
  assert run('x = 1') == '(it printed nothing)'
  assert run('print("\\ud800")') == '\\ud800'
  trace = run('def f():\n  return 1 / 0\nf()')
  assert trace.splitlines()[1] == '  File "<code>", line 3, in <module>'
  assert trace.endswith('ZeroDivisionError: division by zero')
  assert 'SyntaxError' in run('def f(:')
  assert 'EOFError' in run('input()')
  assert 'SystemExit' in run('import sys; sys.exit()')
  assert run('import os\nos.fork()\nprint("once")').count('once') <= 2
  assert run('import subprocess\n_ = subprocess.run(["echo", "child"])') == 'child'


@SANDBOXED
def test_variables_are_kept_by_option_and_within_an_episode():
  kept, fresh = PythonTool(keep=True), PythonTool()
  try:
    for tool in (kept, fresh):
      tool.start()
      tool.call('python', {'code': 'x = 3\nopen("/tmp/f", "w").write("4")'}, seconds=60)
    code = {'code': 'x, open("/tmp/f").read()'}
    assert kept.call('python', code, seconds=60) == "(3, '4')"
    assert 'NameError' in fresh.call('python', code, seconds=60)
    kept.start()  # the next episode
    assert 'NameError' in kept.call('python', code, seconds=60)
  finally:
    kept.close()
    fresh.close()


@SANDBOXED
@pytest.mark.parametrize('keep', [slow(False), True])
def test_limits(interpreter, keep):
  run = interpreter(keep=keep, memory_mb=128, timeout=60)
  lost = '; all variables are lost' * keep
  # The time is for a machine that has other things to do, too; sleep costs it none.
  endless = 'print("so far", flush=True)\nimport time\nwhile True: time.sleep(9)'
  why, message = fault(run, endless, seconds=3)
  assert (why, message) == ('timeout', f'so far\n[it was stopped after 3 s{lost}]')
  why, message = fault(run, 'a = b"x" * (200 << 20)\nimport time; time.sleep(60)')
  assert why == 'failed' and 'too much memory' in message
  why, message = fault(run, 'print("x" * 10**7)')
  assert why == 'failed' and 'printed too much' in message
  why, message = fault(run, 'import os; os._exit(3)')
  assert why == 'failed' and 'the interpreter ended' in message
  assert run('1 + 1') == '2'


@SANDBOXED
def test_neither_network_nor_the_hosts_files(interpreter, tmp_path):
  secret = tmp_path / 'secret'
  secret.write_text('here')
  run = interpreter()
  assert 'FileNotFoundError' in run(f'open({str(secret)!r})')
  assert 'OSError' in run(
    'import socket\nsocket.create_connection(("1.1.1.1", 53), timeout=2)'
  )


@SANDBOXED
@pytest.mark.parametrize('code', [3, None, ['x']])
def test_code_is_text(interpreter, code):
  assert fault(interpreter(), code)[0] == 'arguments'


@SANDBOXED
def test_close_ends_a_call_and_all_it_started():
  tool = PythonTool(keep=True, timeout=60)
  tool.start()
  tool.call('python', {'code': 'x = 1'}, seconds=60)
  ended = []

  def call():
    try:
      tool.call('python', {'code': 'import time; time.sleep(60)'}, seconds=60)
    except ToolError as error:
      ended.append(error.kind)

  thread = threading.Thread(target=call)
  thread.start()
  time.sleep(0.2)
  tool.close()
  thread.join(30)
  assert ended == ['failed']
  me = os.getpid()
  for child in pathlib.Path(f'/proc/{me}/task/{me}/children').read_text().split():
    assert 'enter.py' not in pathlib.Path(f'/proc/{child}/cmdline').read_text()


def test_it_refuses_where_there_is_no_sandbox(monkeypatch):
  monkeypatch.setattr(local_sandbox, 'unsupported_reason', lambda *_: 'no namespaces')
  with pytest.raises(SandboxError, match='no namespaces'):
    PythonTool().start()
  tool = PythonTool(unsafe=True)
  tool.start()
  try:
    assert tool.call('python', {'code': '6 * 7'}, seconds=60) == '42'
  finally:
    tool.close()
