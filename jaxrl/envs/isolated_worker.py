"""The worker process of `isolated_env` runs an environment, with a supervisor above it.

It is started with a socket's descriptor and the id of the process that starts it. The
first process forks the one that runs the environment and then only supervises. When
the environment's process ends, when the supervisor receives SIGTERM, or when the
process that started it is gone, the supervisor kills all that the environment has
started, even if it hangs.
"""

import contextlib
import os
import signal
import sys
import time
from multiprocessing.connection import Connection
from multiprocessing.reduction import ForkingPickler
from typing import Any

from jaxrl.user_code import describe_error, import_object

# Characters of one observation, of which the rest is left out: more than any model's
# window holds.
MAX_OBSERVATION_CHARS = 8 << 20
_CHECK_INTERVAL_S = 1.0  # between looks at whether the starter is gone
_SIGNALS = (signal.SIGCHLD, signal.SIGTERM)
_IS_LINUX = sys.platform == 'linux'


def serve(pipe: Connection) -> None:
  """Builds the environment and answers requests until the pipe closes.

  Args:
    pipe: The connection to the process that steps the environment. The first message
      is (target, options, memory), as for `IsolatedEnv`.
  """
  from jaxrl.data.seeds import starting

  target, options, memory = pipe.recv()
  _limit_memory(memory)
  env: Any = None
  while True:
    try:
      method, arguments, episode = pipe.recv()
    except EOFError:
      return
    try:
      env = env or import_object(target)(**options)
      if method == 'step':
        answer = env.step(arguments['action'])
      else:
        with starting(episode):
          answer = getattr(env, method)(**arguments)
      message = encode_answer(answer)
    except Exception as error:  # reported to the parent, which knows what to do with it
      message = ForkingPickler.dumps((False, describe_error(error)))
    pipe.send_bytes(message)


def encode_answer(answer: object) -> Any:
  """Encodes what a method of an environment returned, with a cut observation.

  Args:
    answer: What the method returned.

  Returns:
    The pickled pair (True, answer).

  Raises:
    ValueError: If it is too large.
  """
  from jaxrl.envs.env_registry import cut_observation
  from jaxrl.envs.graders.grader_processes import MAX_ANSWER_BYTES

  if isinstance(answer, tuple) and answer:
    answer = (cut_observation(answer[0], MAX_OBSERVATION_CHARS), *answer[1:])
  message = ForkingPickler.dumps((True, answer))
  if len(message) > MAX_ANSWER_BYTES:
    raise ValueError(
      f'it returned {len(message)} bytes besides a long observation; at most '
      f'{MAX_ANSWER_BYTES} can be passed on'
    )
  return message


def _limit_memory(memory: int) -> None:
  import resource

  if _IS_LINUX:  # elsewhere the kernel ignores it
    _, hard_limit = resource.getrlimit(resource.RLIMIT_DATA)
    limit = memory if hard_limit == resource.RLIM_INFINITY else min(memory, hard_limit)
    resource.setrlimit(resource.RLIMIT_DATA, (limit, hard_limit))


def supervise(child: int, parent: int) -> int:
  """Waits for the end of the environment's process, and ends what it left running.

  Args:
    child: The environment's process, whose id is also that of its process group.
    parent: The process that started this one.

  Returns:
    The exit code of the environment's process; 128 + n if signal n ended it.
  """
  code = None
  while code is None and os.getppid() == parent:
    if _wait_for_signal() == signal.SIGTERM:
      break
    code = _reap(child)
  with contextlib.suppress(ProcessLookupError, PermissionError):
    os.killpg(child, signal.SIGKILL)
  if _IS_LINUX:
    from jaxrl.envs.sandbox.namespaces import kill_children

    with contextlib.suppress(FileNotFoundError):  # a kernel that lists no children
      kill_children()  # those that have left the process group, too
  if code is None:
    code = -signal.SIGKILL
  return code if code >= 0 else 128 - code


def _wait_for_signal() -> int | None:
  """Returns the signal that has come within `_CHECK_INTERVAL_S`, or None."""
  if hasattr(signal, 'sigtimedwait'):
    info = signal.sigtimedwait(_SIGNALS, _CHECK_INTERVAL_S)
    return info.si_signo if info is not None else None
  time.sleep(_CHECK_INTERVAL_S)  # macOS
  pending = signal.sigpending()
  return signal.SIGTERM if signal.SIGTERM in pending else None


def _reap(child: int) -> int | None:
  """Reaps what has ended; returns the exit code of `child` if that has."""
  code = None
  with contextlib.suppress(ChildProcessError):
    while True:
      pid, status = os.waitpid(-1, os.WNOHANG)
      if pid == child:
        code = os.waitstatus_to_exitcode(status)
      if not pid:
        break
  return code


def main() -> None:
  """Forks the environment's process; exits with its exit code."""
  descriptor, parent = int(sys.argv[1]), int(sys.argv[2])
  signal.pthread_sigmask(signal.SIG_BLOCK, _SIGNALS)
  supervisor = os.getpid()
  if _IS_LINUX:
    from jaxrl.envs.sandbox import namespaces

    namespaces.call_libc('prctl', namespaces.SUBREAPER, 1, 0, 0, 0)
  child = os.fork()
  if child:
    with contextlib.suppress(OSError):  # it may have done so, and ended, itself
      os.setpgid(child, child)
    os.close(descriptor)
    os._exit(supervise(child, parent))
  os.setpgid(0, 0)
  if _IS_LINUX:
    namespaces.call_libc('prctl', namespaces.PDEATHSIG, signal.SIGKILL, 0, 0, 0)
    if os.getppid() != supervisor:
      os._exit(1)
  signal.pthread_sigmask(signal.SIG_UNBLOCK, _SIGNALS)
  serve(Connection(descriptor))


if __name__ == '__main__':
  main()
