"""GraderProcessPool runs calls that may never return in child processes.

Each call has a time limit, after which its process is killed. This does not use
multiprocessing: an environment may itself be one of its daemon processes, which may
have no children, and its children import the parent's main module.
"""

import contextlib
import functools
import json
import os
import socket
import subprocess
import sys
import threading
from collections.abc import Sequence
from multiprocessing.connection import Connection
from typing import Any

from jaxrl.options import JsonObject, OptionValues

START_TIMEOUT_S = 120.0  # for a process to start and to import what a call needs
MAX_ANSWER_BYTES = 64 << 20  # of one answer; longer ones are errors


class GraderFailure(RuntimeError):
  """Reports that a grader gave no score because of what it had to grade."""


class GraderTimeout(GraderFailure):
  """Reports that a grader exceeded its time limit and was killed."""


class GraderCrashed(GraderFailure):
  """Reports that a grader's process ended, for instance for lack of memory."""


class GraderError(RuntimeError):
  """Reports that a grader raised an error or did not start; not the reply's fault.

  Attributes:
    raised: The type and message of the error that the grader raised; may be empty.
  """

  def __init__(self, message: str, raised: str = ''):
    super().__init__(message)
    self.raised = raised


def worker_environment() -> dict[str, str]:
  """Returns environment variables with which a child finds what this process imports.

  Returns:
    The variables.
  """
  path = os.pathsep.join(entry or os.getcwd() for entry in sys.path)
  return {**os.environ, 'PYTHONPATH': path}


class _Worker:
  """One child process, which serves one call at a time."""

  def __init__(self):
    parent_socket, child_socket = socket.socketpair()
    with child_socket:
      self._process = subprocess.Popen(
        [
          sys.executable,
          '-m',
          'jaxrl.envs.graders.grader_worker',
          str(child_socket.fileno()),
        ],
        stdin=subprocess.DEVNULL,
        stdout=subprocess.DEVNULL,  # answers come through the socket only
        env=worker_environment(),
        pass_fds=[child_socket.fileno()],
      )
    self._pipe = Connection(parent_socket.detach())

  @property
  def alive(self) -> bool:
    return self._process.poll() is None

  def call(self, request: JsonObject) -> JsonObject:
    target, limit, started = request['target'], request['limit'], False
    try:
      self._pipe.send_bytes(json.dumps(request, default=str).encode())
      if not self._pipe.poll(START_TIMEOUT_S):
        raise GraderError(
          f'the process of {target} did not start in {START_TIMEOUT_S:g} s'
        )
      answer = self._pipe.recv_bytes(MAX_ANSWER_BYTES)
      if answer == b'ready':
        started = True
        if not self._pipe.poll(limit):
          raise GraderTimeout(f'no answer within {limit:g} s')
        answer = self._pipe.recv_bytes(MAX_ANSWER_BYTES)
      return json.loads(answer)
    except (EOFError, OSError) as error:
      with contextlib.suppress(subprocess.TimeoutExpired):
        self._process.wait(timeout=1)
      code = f'exit code {self._process.poll()}'
      if started:
        raise GraderCrashed(f'the process of {target} ended with {code}') from error
      raise GraderError(f'the process of {target} did not start: {code}') from error

  def end(self) -> None:
    self._process.kill()
    self._pipe.close()
    with contextlib.suppress(subprocess.TimeoutExpired):
      self._process.wait(timeout=5)


class GraderProcessPool:
  """Holds at most `size` child processes, which are started on demand and reused.

  `call` may be used from many threads. A call that is killed costs its own process
  only: calls that wait for a process have not begun, so their time limit is not
  affected.

  Args:
    size: The maximum number of processes.
  """

  def __init__(self, size: int = 8):
    self._slots = threading.Semaphore(size)
    self._idle: list[_Worker] = []

  def call(
    self,
    target: str,
    *args: object,
    options: OptionValues | None = None,
    limit: float,
    needs: Sequence[str] = (),
  ) -> Any:
    """Calls a function in a child process.

    All arguments must be JSON values; anything else is passed as its text.

    Args:
      target: The function, as for `component_calls.resolve`.
      *args: Its positional arguments.
      options: Its keyword arguments.
      limit: The time limit in seconds, from when the call begins.
      needs: Modules that are imported before the clock starts.

    Returns:
      What the function returned.

    Raises:
      GraderTimeout: If the call exceeded its time limit.
      GraderCrashed: If the process ended.
      GraderError: If the function raised an error.
    """
    request = {'target': target, 'args': args, 'options': options or {}}
    request |= {'needs': needs, 'limit': limit}
    with self._slots:
      worker = self._take()
      try:
        answer = worker.call(request)
      except BaseException:
        worker.end()
        raise
      self._idle.append(worker)
    if 'error' in answer:
      place = f' ({answer["place"]})' if answer['place'] else ''
      raise GraderError(f'{target}: {answer["error"]}{place}', answer['error'])
    return answer['value']

  def _take(self) -> _Worker:
    with contextlib.suppress(IndexError):
      while True:
        worker = self._idle.pop()
        if worker.alive:
          return worker
        worker.end()
    return _Worker()

  def close(self) -> None:
    """Ends the idle processes."""
    while self._idle:
      self._idle.pop().end()


@functools.cache
def shared_grader_pool() -> GraderProcessPool:
  """Returns the pool that all environments of this process share.

  Returns:
    The pool.
  """
  return GraderProcessPool()
