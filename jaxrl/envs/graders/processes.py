"""Calls that may never return, each in a child process that is killed in time.

Not multiprocessing: an environment may itself be a daemon process of it, which may
have no children; and its children import the parent's main module.
"""

import contextlib
import functools
import json
import os
import socket
import subprocess
import sys
import threading
from collections.abc import Mapping, Sequence
from multiprocessing.connection import Connection
from typing import Any

START = 120.0  # seconds for a process to start and to import what a call needs


class GraderFault(RuntimeError):
  """A grader gave no score, through what it was given to grade."""


class GraderTimeout(GraderFault):
  """It took longer than it may, and was killed."""


class GraderDied(GraderFault):
  """Its process ended, for instance for want of memory."""


class GraderError(RuntimeError):
  """No score, and not the reply's fault: it raised an error, or did not start."""


class _Worker:
  """One child process; serves one call at a time."""

  def __init__(self):
    ours, theirs = socket.socketpair()
    path = os.pathsep.join(entry or os.getcwd() for entry in sys.path)
    with theirs:
      self._process = subprocess.Popen(
        [sys.executable, '-m', 'jaxrl.envs.graders.child', str(theirs.fileno())],
        stdin=subprocess.DEVNULL,
        stdout=subprocess.DEVNULL,  # what code prints is no answer
        env={**os.environ, 'PYTHONPATH': path},
        pass_fds=[theirs.fileno()],
      )
    self._pipe = Connection(ours.detach())

  @property
  def alive(self) -> bool:
    return self._process.poll() is None

  def call(self, request: dict[str, Any]) -> dict[str, Any]:
    target, limit, ready = request['target'], request['limit'], False
    try:
      self._pipe.send_bytes(json.dumps(request, default=str).encode())
      if not self._pipe.poll(START):
        raise GraderError(f'the process of {target} did not start in {START:g} s')
      answer = self._pipe.recv_bytes()
      if answer == b'ready':
        ready = True
        if not self._pipe.poll(limit):
          raise GraderTimeout(f'no answer within {limit:g} s')
        answer = self._pipe.recv_bytes()
      return json.loads(answer)
    except (EOFError, OSError) as error:
      with contextlib.suppress(subprocess.TimeoutExpired):
        self._process.wait(timeout=1)
      code = f'exit code {self._process.poll()}'
      if ready:
        raise GraderDied(f'the process of {target} ended with {code}') from error
      raise GraderError(f'the process of {target} did not start: {code}') from error

  def end(self) -> None:
    self._process.kill()
    self._pipe.close()
    with contextlib.suppress(subprocess.TimeoutExpired):
      self._process.wait(timeout=5)


class Processes:
  """At most `size` child processes, started when first needed and used again.

  `call` may be used from many threads. A call that is killed costs its process, not
  the others: those that wait for a place have not begun, and lose no time of theirs.
  """

  def __init__(self, size: int = 8):
    self._places = threading.Semaphore(size)
    self._idle: list[_Worker] = []

  def call(
    self,
    target: str,
    *args: Any,
    options: Mapping[str, Any] | None = None,
    limit: float,
    needs: Sequence[str] = (),
  ) -> Any:
    """What the function `target`, as in signature.resolve, returns for args, options.

    All of them are JSON values; of what is none the function sees the text. limit:
    seconds from when the call begins. needs: modules that are imported before.
    Raises GraderTimeout, GraderDied, and GraderError for what the function raises.
    """
    request = {'target': target, 'args': args, 'options': options or {}}
    request |= {'needs': needs, 'limit': limit}
    with self._places:
      worker = self._take()
      try:
        answer = worker.call(request)
      except BaseException:
        worker.end()
        raise
      self._idle.append(worker)
    if 'error' in answer:
      raise GraderError(f'{target}: {answer["error"]}')
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
    """Ends the processes that are idle."""
    while self._idle:
      self._idle.pop().end()


@functools.cache
def shared() -> Processes:
  """The processes that all environments of this process share."""
  return Processes()
