"""IsolatedEnv runs an environment in a process that can be killed if it hangs."""

import contextlib
import os
import pickle
import socket
import subprocess
import sys
import threading
from multiprocessing.connection import Connection
from typing import Any

from jaxrl.data.seeds import StartingEpisode, starting_episode
from jaxrl.envs.graders.grader_processes import MAX_ANSWER_BYTES, worker_environment
from jaxrl.options import Keywords, OptionValues
from jaxrl.user_code import import_object

_ended: list[subprocess.Popen] = []  # that nobody has waited for yet
_ended_lock = threading.Lock()


class EnvProcessError(RuntimeError):
  """Reports that an environment's process raised an error or died."""


class IsolatedEnv:
  """Plays an environment in a child process, which starts at first use.

  It blocks like any environment. `kill` may be called from another thread and ends a
  running call with EnvProcessError; the next reset starts a new process. The child and
  all that it starts end with this process, however this process ends.

  An observation is cut after `isolated_worker.MAX_OBSERVATION_CHARS`, and an answer of
  more than `MAX_ANSWER_BYTES` is an error. A hung or broken environment is kept away
  from this process, but not a hostile one: it has the same user and files, and its
  answers are unpickled.

  Args:
    target: The class, 'package.module:Class' or 'file.py:Class'.
    options: The options of the class.
    memory: Bytes of data that the child may have; beyond them it gets MemoryError (on
      Linux; elsewhere there is no bound).
  """

  def __init__(self, target: str, options: OptionValues, *, memory: int = 4 << 30):
    self._target = target
    self._options = dict(options)
    self._memory = memory
    self._child: tuple[subprocess.Popen, Connection] | None = None
    self._num_kills = 0

  @classmethod
  def check(cls, **options: Any) -> None:
    """Checks the options of a subclass, which its constructor does.

    Raises:
      ValueError: If they are wrong, or a package is missing.
    """
    cls(**options)

  @property
  def isolated_class(self) -> Any:
    """Returns the class that the child process builds; errors name it, not this one."""
    return import_object(self._target)

  def reset(self, *, seed: int, options: OptionValues | None = None) -> Any:
    """Resets the environment in the child process."""
    arguments = {'seed': seed, 'options': options}
    return self._request('reset', arguments, starting_episode())

  def step(self, action: str) -> Any:
    """Steps the environment in the child process."""
    return self._request('step', {'action': action})

  def apply_solution(self) -> str | None:
    """Carries out the task's reference solution in the child process."""
    return self._request('apply_solution', {})

  def _request(
    self,
    method: str,
    arguments: Keywords,
    episode: StartingEpisode | None = None,
  ) -> Any:
    kills_before = self._num_kills
    process, pipe = self._child = self._child or self._start()
    if self._num_kills != kills_before:  # killed before there was a process to kill
      self.kill()
    try:
      pipe.send((method, arguments, episode))
      ok, answer = pickle.loads(pipe.recv_bytes(MAX_ANSWER_BYTES))
    except (EOFError, OSError) as error:
      if not pipe.closed and not pipe.readable:  # what remains of a longer answer
        self.kill()
        raise EnvProcessError(
          f'environment {self._target!r}, {method}: its process sent more than '
          f'{MAX_ANSWER_BYTES} bytes'
        ) from error
      with contextlib.suppress(subprocess.TimeoutExpired):
        process.wait(timeout=1)
      self.kill()
      raise EnvProcessError(
        f'the process of environment {self._target!r} ended in {method} with exit '
        f'code {process.returncode}'
      ) from error
    if not ok:
      raise EnvProcessError(f'environment {self._target!r}, {method}: {answer}')
    return answer

  def _start(self) -> tuple[subprocess.Popen, Connection]:
    # Not by multiprocessing: its children import the parent's main module, and those
    # of a process that hangs outlive it.
    _reap_ended()
    parent_socket, child_socket = socket.socketpair()
    with child_socket:
      descriptor = child_socket.fileno()
      module = 'jaxrl.envs.isolated_worker'
      process = subprocess.Popen(
        [sys.executable, '-m', module, str(descriptor), str(os.getpid())],
        stdin=subprocess.DEVNULL,
        env=worker_environment(),
        pass_fds=[descriptor],
        start_new_session=True,  # this process decides what Ctrl-C ends
      )
    pipe = Connection(parent_socket.detach())
    with contextlib.suppress(OSError):  # it has ended: the request will find out
      pipe.send((self._target, self._options, self._memory))
    return process, pipe

  def kill(self) -> None:
    """Kills the process and all that it started, without waiting for their end."""
    self._num_kills += 1
    child, self._child = self._child, None
    if child is not None:
      child[0].terminate()  # the supervisor; a call under way sees the end of its pipe
      with _ended_lock:
        _ended.append(child[0])

  close = kill


def _reap_ended() -> None:
  with _ended_lock:
    _ended[:] = [process for process in _ended if process.poll() is None]
