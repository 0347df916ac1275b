"""A grader that hangs, dies or raises costs its own call, and says which it was."""

import json
import multiprocessing
import os
import signal
import socket
import subprocess
import sys
import threading
import time
from multiprocessing.connection import Connection

import pytest

from jaxrl.envs.graders.grader_processes import (
  GraderCrashed,
  GraderError,
  GraderProcessPool,
  GraderTimeout,
)

ACT = 'tests.envs.graders.slow:act'


@pytest.fixture
def processes():
  pool = GraderProcessPool(2)
  yield pool
  pool.close()


def test_faults_are_told_apart_and_cost_one_call(processes):
  first = processes.call(ACT, 'go', limit=5)
  assert first != os.getpid()
  assert processes.call(ACT, 'print', limit=5) == first  # the same process again
  with pytest.raises(GraderError, match="act: KeyError: 'broken'"):
    processes.call(ACT, 'raise', limit=5)
  with pytest.raises(GraderError, match=r'\(.*slow\.py, line \d+\)$'):
    processes.call(ACT, 'raise', limit=5)
  with pytest.raises(GraderError, match='returned more than 67108864 bytes'):
    processes.call(ACT, 'fill', limit=20)
  assert processes.call(ACT, 'go', limit=5) == first
  with pytest.raises(GraderCrashed, match='exit code 7'):
    processes.call(ACT, 'die', limit=5)
  second = processes.call(ACT, 'go', limit=5)
  assert second != first
  with pytest.raises(GraderTimeout, match=r'no answer within 0\.2 s'):
    processes.call(ACT, 'hang', limit=0.2)
  with pytest.raises(ProcessLookupError):  # it is gone, not left to run
    os.kill(int(second), 0)
  with pytest.raises(GraderCrashed, match='exit code 137'):
    processes.call(ACT, 'eat', limit=5)


def test_a_process_that_is_killed_while_idle_is_replaced(processes):
  first = int(processes.call(ACT, 'go', limit=5))
  os.kill(first, signal.SIGKILL)
  os.waitid(os.P_PID, first, os.WEXITED | os.WNOWAIT)
  assert processes.call(ACT, 'go', limit=5) != first


def test_a_process_that_does_not_start_is_no_fault_of_the_reply(processes, monkeypatch):
  monkeypatch.setattr(sys, 'executable', '/bin/false')
  with pytest.raises(GraderError, match='did not start: exit code 1'):
    processes.call(ACT, 'go', limit=5)
  monkeypatch.undo()
  with pytest.raises(GraderError, match=r"no module 'tests\.none'"):
    processes.call('tests.none:fn', limit=5)


def test_stuck_calls_do_not_block_or_fail_those_behind_them(processes):
  begun, outcomes = time.monotonic(), []

  def ask(reply):
    try:
      outcomes.append(processes.call(ACT, reply, limit=0.5))
    except GraderTimeout:
      outcomes.append('timeout')

  # Two places, four calls that hang: the others wait for longer than their limit.
  threads = [
    threading.Thread(target=ask, args=(reply,))
    for reply in ['hang', 'hang', 'hang', 'hang', 'go', 'go']
  ]
  for thread in threads:
    thread.start()
  for thread in threads:
    thread.join(timeout=60)
  assert time.monotonic() - begun > 1  # two rounds of two
  assert outcomes.count('timeout') == 4
  assert len([x for x in outcomes if isinstance(x, float)]) == 2


def test_a_process_whose_parent_is_gone_ends_itself():
  ours, theirs = socket.socketpair()
  with theirs:
    command = [
      sys.executable,
      '-m',
      'jaxrl.envs.graders.grader_worker',
      str(theirs.fileno()),
    ]
    child = subprocess.Popen(command, pass_fds=[theirs.fileno()])
  pipe = Connection(ours.detach())
  request = {'target': ACT, 'args': ['hang'], 'options': {}, 'needs': [], 'limit': 0.1}
  pipe.send_bytes(json.dumps(request).encode())
  assert pipe.poll(60)
  assert pipe.recv_bytes() == b'ready'
  pipe.close()  # no one is there to kill it
  assert child.wait(60) == -signal.SIGALRM


def _inside(pipe):
  processes = GraderProcessPool(1)
  pipe.send(processes.call(ACT, 'go', limit=5))
  processes.close()


def test_it_works_within_a_daemon_process():
  """As in an environment that has a process of its own."""
  context = multiprocessing.get_context('spawn')
  ours, theirs = context.Pipe()
  process = context.Process(target=_inside, args=(theirs,), daemon=True)
  process.start()
  assert ours.poll(60)
  assert ours.recv() != process.pid
  process.join(10)
