"""Supervision handles lost processes: why an actor died, and what is started again."""

import asyncio
import atexit
import logging
import os
import shutil
import subprocess
import sys
from collections.abc import Awaitable, Callable, Mapping, Sequence
from typing import Any

from jaxrl.rollout.engine.actor_proxy import ActorHandle
from launch.runtime.signal_handler import BEFORE_ABORT

log = logging.getLogger(__name__)

CREATION_FAILED = 'creation task'  # in Ray's message if an actor's `__init__` raised
# In errors of the devices that concern the process itself, not another one.
OWN_DEVICE_ERRORS = ('RESOURCE_EXHAUSTED', 'INVALID_ARGUMENT')
RESUME_HINT = 'the same command resumes from the last checkpoint'

# Runs in a process of its own: Ray's core ends the run's process within milliseconds
# when the raylet is gone, without a word, and waits a minute when the GCS is.
_WATCH = """
import os, select, signal, sys

run, *parts = sys.argv[1:]

def is_dead(pid):
  try:
    with open(f'/proc/{pid}/stat') as file:
      return file.read().rpartition(')')[2].split()[0] in 'ZX'
  except OSError:
    pass
  try:
    os.kill(int(pid), 0)
  except ProcessLookupError:
    return True
  return False

while True:
  told = bool(select.select([0], [], [], 0.5)[0])
  if told and os.read(0, 1):
    break  # the run ends Ray itself
  dead = [name for name, _, pid in (p.partition('=') for p in parts) if is_dead(pid)]
  if dead:
    line = f"error: Ray's {dead[0]} has died, and the run with it; HINT"
    print(line, file=sys.stderr, flush=True)
    if not told:
      os.kill(int(run), signal.SIGKILL)
  if dead or told:
    break
"""


class ActorError(OSError):
  """A part of the run that lived in a process of its own is gone."""


def error_summary(error: BaseException) -> str:
  """Returns what an actor's error says, in one line."""
  lines = str(error).strip().splitlines() or [type(error).__name__]
  if CREATION_FAILED in lines[0]:  # it ends in the error that was raised
    return lines[-1]
  text = ' '.join(line for line in lines if not line.startswith('\t'))  # no numbers
  return text.partition(' Some common causes')[0][:300]


async def run_worker_with_restart(
  start: Callable[[], tuple[ActorHandle, Awaitable[object]]],
  forget: Callable[[ActorHandle], None],
  name: str,
  *,
  host_is_lost: Callable[[ActorHandle], bool] = lambda actor: False,
  max_deaths: int = 2,
  max_failed_starts: int = 30,
  pause: float = 2.0,
) -> Any:
  """Runs a worker; one that dies is replaced.

  While Ray does not know yet that a machine is lost, it may send a new actor there,
  which dies without having run. The queue gives what a dead worker ran to whoever takes
  its place.

  Args:
    start: Makes an actor, and returns it with the reference that its `run` returns.
    forget: Is called with actors that have died.
    name: Of the worker, for log messages.
    host_is_lost: Returns whether an actor's host is to blame for its death, which then
      does not count.
    max_deaths: How often a worker that has run is replaced.
    max_failed_starts: How often in a row an actor may die without having run.
    pause: Seconds before another one is started.

  Returns:
    What the worker's `run` returns.
  """
  from ray.exceptions import ActorUnschedulableError, RayActorError, RayTaskError

  deaths = failed_starts = 0
  while True:
    actor, result = start()
    try:
      return await result
    except (RayActorError, ActorUnschedulableError) as error:
      if isinstance(error, RayTaskError):
        raise  # of another actor, which this one needs
      # The second one: its host has left between its choice and the start.
      if 'never ran' in str(error) or isinstance(error, ActorUnschedulableError):
        if failed_starts == max_failed_starts:
          raise
        failed_starts += 1
        log.warning(
          '%s could not be started (%d of at most %d times) and is being '
          'restarted (%s)',
          name,
          failed_starts,
          max_failed_starts,
          error_summary(error),
        )
      else:
        if not (excused := host_is_lost(actor)) and deaths == max_deaths:
          raise
        failed_starts = 0
        deaths += not excused
        log.warning(
          '%s was lost and is being restarted; its episodes are played again (%s)',
          name,
          error_summary(error),
        )
      forget(actor)
      await asyncio.sleep(pause)


def measure_memory(actor: object, name: str) -> int:
  """Returns the bytes of memory that this process, an actor's, takes."""
  import psutil

  return psutil.Process().memory_info().rss


def measure_disk(actor: object) -> tuple[str, int, int]:
  """Returns where Ray keeps its files on this host; free and all bytes of that disk."""
  from ray._private import worker

  node: Any = worker._global_node  # an actor's process has one
  folder = node.get_session_dir_path()
  usage = shutil.disk_usage(folder)
  return folder, usage.free, usage.total


async def death_reason(actor: ActorHandle, timeout: float) -> Exception | None:
  """Returns why an actor is dead; None if it lives, or is too busy to answer."""
  try:
    async with asyncio.timeout(timeout):
      await actor.__ray_ready__.remote()
  except TimeoutError:
    return None
  except Exception as error:
    return error
  return None


async def root_cause(
  error: Exception,
  actors: Callable[[], Sequence[tuple[str, ActorHandle]]],
  *,
  timeout: float = 2.0,
  several_learners: bool = True,
  max_checks: int = 20,
  few_checks: int = 2,
) -> Exception:
  """Returns the error that caused one that an actor raised.

  A process that loses another one during a collective operation fails before Ray knows
  of the death, so after an error of the devices the actors are checked several times.

  Args:
    error: The error.
    actors: Returns (name, actor) of all actors of the run.
    timeout: Seconds that an actor has to answer, and between two checks.
    several_learners: Whether the learner has other processes to lose.
    max_checks: Number of checks after an error of the devices.
    few_checks: Number of checks if there are no other processes, or if the error is the
      process's own, such as a lack of memory.

  Returns:
    The cause; an `ActorError` if an actor has died.
  """
  from ray import exceptions

  while isinstance(error, exceptions.RayTaskError) and error.cause is not None:
    error = error.cause
  num_checks = 1
  if type(error).__name__ in ('JaxRuntimeError', 'XlaRuntimeError'):
    is_own = any(word in str(error) for word in OWN_DEVICE_ERRORS)
    num_checks = few_checks if is_own or not several_learners else max_checks
  for check in range(num_checks):
    if check:
      await asyncio.sleep(timeout)
    known = list(actors())
    reasons = await asyncio.gather(*(death_reason(a, timeout) for _, a in known))
    for (name, _), reason in zip(known, reasons, strict=True):
      if reason is not None:
        return ActorError(
          f'the Ray actor {name} has died, and the run with it; {RESUME_HINT} '
          f'({error_summary(reason)})'
        )
  if isinstance(error, exceptions.RayActorError):
    return ActorError(
      f'a Ray actor cannot be reached; {RESUME_HINT} ({error_summary(error)})'
    )
  return error


class ClusterWatch:
  """Watches the processes of a Ray that this process has started.

  When one dies, the run ends with one line: this process cannot go on without them.

  Args:
    pids: The process ids to watch, by the names that the user sees.
  """

  def __init__(self, pids: Mapping[str, int]):
    code = _WATCH.replace('HINT', RESUME_HINT)
    parts = [f'{name}={pid}' for name, pid in pids.items()]
    self._process = subprocess.Popen(
      [sys.executable, '-I', '-S', '-c', code, str(os.getpid()), *parts],
      stdin=subprocess.PIPE,
      start_new_session=True,  # Ctrl-C is for the run
    )
    atexit.register(self.close)  # before Ray's own, which ends what is watched
    BEFORE_ABORT.append(self.close)

  def close(self) -> None:
    """Ends the watch; call it before Ray is shut down."""
    atexit.unregister(self.close)
    if self.close in BEFORE_ABORT:
      BEFORE_ABORT.remove(self.close)
    if self._process.poll() is None:
      self._process.communicate(b'.')


def watch_cluster() -> ClusterWatch:
  """Watches the raylet and the GCS of the Ray that this process has started."""
  from ray._private import worker

  started = worker._global_node.all_processes  # pyright: ignore
  # The first that is dead is named. When the raylet dies, the GCS soon does too.
  names = {'raylet': 'raylet', 'gcs_server': 'GCS'}
  pids = {names[k]: started[k][0].process.pid for k in names if started.get(k)}
  return ClusterWatch(pids)


def shorten_ray_messages() -> None:
  """Makes Ray report a lost process in one line, not with a page of its logs."""
  from ray._private import worker

  def tell(data: Mapping[str, list[str]], **_: object) -> None:
    for message in data['lines']:
      first = message.strip().partition('\n')[0].partition(' Possible reasons')[0]
      log.warning('Ray: %s', first[:300])

  worker.print_to_stdstream = tell
