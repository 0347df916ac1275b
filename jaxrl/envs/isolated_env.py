"""IsolatedEnv runs an environment in a process that can be killed if it hangs."""

import multiprocessing
import resource
import sys
from collections.abc import Mapping
from multiprocessing.connection import Connection
from multiprocessing.context import SpawnProcess
from typing import Any

from jaxrl import call_strings
from jaxrl.call_strings import describe_error

_SPAWN = multiprocessing.get_context('spawn')  # a fork of a process with JAX may hang


class EnvProcessError(RuntimeError):
  """Reports that an environment's process raised an error or died."""


class IsolatedEnv:
  """Plays an environment in a child process, which starts at first use.

  It blocks like any environment. `kill` may be called from another thread and ends a
  running call with EnvProcessError; the next reset starts a new process.

  Args:
    target: The class, 'package.module:Class' or 'file.py:Class'.
    options: The options of the class.
    memory: Bytes of data that the child may have; beyond them it gets MemoryError (on
      Linux; elsewhere there is no bound).
  """

  def __init__(self, target: str, options: Mapping[str, Any], *, memory: int = 4 << 30):
    self._target = target
    self._options = dict(options)
    self._memory = memory
    self._child: tuple[SpawnProcess, Connection] | None = None
    self._num_kills = 0

  def reset(self, *, seed: int, options: Mapping[str, Any] | None = None) -> Any:
    """Resets the environment in the child process."""
    return self._request('reset', {'seed': seed, 'options': options})

  def step(self, action: str) -> Any:
    """Steps the environment in the child process."""
    return self._request('step', {'action': action})

  def apply_solution(self) -> str | None:
    """Carries out the task's reference solution in the child process."""
    return self._request('apply_solution', {})

  def _request(self, method: str, arguments: dict[str, Any]) -> Any:
    kills_before = self._num_kills
    process, pipe = self._child = self._child or self._start()
    if self._num_kills != kills_before:  # killed before there was a process to kill
      self.kill()
    try:
      pipe.send((method, arguments))
      ok, answer = pipe.recv()
    except (EOFError, OSError) as error:
      process.join(timeout=1)
      self.kill()
      raise EnvProcessError(
        f'the process of environment {self._target!r} ended in {method} with exit '
        f'code {process.exitcode}'
      ) from error
    if not ok:
      raise EnvProcessError(f'environment {self._target!r}, {method}: {answer}')
    return answer

  def _start(self) -> tuple[SpawnProcess, Connection]:
    parent_pipe, child_pipe = _SPAWN.Pipe()
    arguments = (child_pipe, self._target, self._options, self._memory)
    process = _SPAWN.Process(target=_serve, args=arguments, daemon=True)
    process.start()
    child_pipe.close()
    return process, parent_pipe

  def kill(self) -> None:
    """Kills the process at once, without waiting for its end."""
    self._num_kills += 1
    child, self._child = self._child, None
    if child is not None:
      child[0].kill()  # a call under way sees the end of its pipe

  close = kill


def _serve(pipe: Connection, target: str, options: dict[str, Any], memory: int) -> None:
  """Runs in the child: builds the environment and answers until the pipe closes."""
  if sys.platform == 'linux':  # elsewhere the kernel does not heed it
    _, hard_limit = resource.getrlimit(resource.RLIMIT_DATA)
    limit = memory if hard_limit == resource.RLIM_INFINITY else min(memory, hard_limit)
    resource.setrlimit(resource.RLIMIT_DATA, (limit, hard_limit))
  env: Any = None
  while True:
    try:
      method, arguments = pipe.recv()
    except (EOFError, KeyboardInterrupt):
      return
    try:
      env = env or call_strings.resolve(target)(**options)
      if method == 'step':
        answer = env.step(arguments['action'])
      else:
        answer = getattr(env, method)(**arguments)
      pipe.send((True, answer))
    except Exception as error:  # told to the parent, which knows what to do with it
      pipe.send((False, describe_error(error)))
