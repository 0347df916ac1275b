"""An environment in a process of its own, which can be killed when it hangs."""

import multiprocessing
import resource
import sys
from collections.abc import Mapping
from multiprocessing.connection import Connection
from multiprocessing.context import SpawnProcess
from typing import Any

from jaxrl import signature

_SPAWN = multiprocessing.get_context('spawn')  # a fork of a process with JAX may hang


class EnvProcessError(RuntimeError):
  """The environment raised an error in its process, or the process died."""


class ProcessEnv:
  """Plays an environment in a child process, which starts at first use.

  target: its class, 'package.module:Class' or 'file.py:Class'; options: its own.
  memory: bytes of data that the child may have; past them it meets MemoryError (on
  Linux; elsewhere there is no bound).

  Blocks like any environment; `kill` may be called from another thread, and ends a
  call that is under way with EnvProcessError. After it the next reset starts afresh.
  """

  def __init__(self, target: str, options: Mapping[str, Any], *, memory: int = 4 << 30):
    self._target, self._options, self._memory = target, dict(options), memory
    self._child: tuple[SpawnProcess, Connection] | None = None
    self._lives = 0  # that `kill` has ended

  def reset(self, *, seed: int, options: Mapping[str, Any] | None = None) -> Any:
    return self._ask('reset', {'seed': seed, 'options': options})

  def step(self, action: str) -> Any:
    return self._ask('step', {'action': action})

  def _ask(self, method: str, arguments: dict[str, Any]) -> Any:
    lives = self._lives
    process, pipe = self._child = self._child or self._start()
    if self._lives != lives:  # killed before there was a process to kill
      self.kill()
    try:
      pipe.send((method, arguments))
      fine, answer = pipe.recv()
    except (EOFError, OSError) as error:
      process.join(timeout=1)
      self.kill()
      raise EnvProcessError(
        f'the process of environment {self._target!r} ended in {method} with exit '
        f'code {process.exitcode}'
      ) from error
    if not fine:
      raise EnvProcessError(f'environment {self._target!r}, {method}: {answer}')
    return answer

  def _start(self) -> tuple[SpawnProcess, Connection]:
    ours, theirs = _SPAWN.Pipe()
    arguments = (theirs, self._target, self._options, self._memory)
    process = _SPAWN.Process(target=_serve, args=arguments, daemon=True)
    process.start()
    theirs.close()
    return process, ours

  def kill(self) -> None:
    """Ends the process at once, without waiting for its end."""
    self._lives += 1
    child, self._child = self._child, None
    if child is not None:
      child[0].kill()  # a call under way sees the end of its pipe

  close = kill


def _serve(pipe: Connection, target: str, options: dict[str, Any], memory: int) -> None:
  """The child: makes the environment and answers until the pipe closes."""
  if sys.platform == 'linux':  # elsewhere the kernel does not heed it
    _, most = resource.getrlimit(resource.RLIMIT_DATA)
    limit = memory if most == resource.RLIM_INFINITY else min(memory, most)
    resource.setrlimit(resource.RLIMIT_DATA, (limit, most))
  env: Any = None
  while True:
    try:
      method, arguments = pipe.recv()
    except (EOFError, KeyboardInterrupt):
      return
    try:
      env = env or signature.resolve(target)(**options)
      if method == 'step':
        answer = env.step(arguments['action'])
      else:
        answer = env.reset(**arguments)
      pipe.send((True, answer))
    except Exception as error:  # told to the parent, which knows what to do with it
      pipe.send((False, f'{type(error).__name__}: {error}'))
