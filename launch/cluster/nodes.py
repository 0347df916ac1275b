"""What goes on when a machine or a process of the cluster is lost."""

import asyncio
import logging
from collections.abc import Callable, Sequence
from typing import Any

from launch.cluster.handles import ActorError, awaited, told

log = logging.getLogger(__name__)
# In errors of the devices that tell of the process itself, not of another one.
OWN = ('RESOURCE_EXHAUSTED', 'INVALID_ARGUMENT')
RESUMES = 'the same command resumes from the last checkpoint'


async def keep_playing(
  start: Callable[[], Any],
  forget: Callable[[Any], None],
  name: str,
  *,
  deaths: int = 2,
  misses: int = 30,
  pause: float = 2.0,
) -> Any:
  """What a worker's `run` returns; a worker that dies is replaced, `deaths` times.

  start: makes an actor, and returns it with what its `run` gives. forget: is told of
  the dead. pause: seconds before another is started, and again where Ray, which does
  not know yet that a machine is lost, sent that one there: it died without having run.
  misses: how often in a row that may be. The queue gives what a dead worker played to
  whoever takes its places.
  """
  from ray.exceptions import RayActorError, RayTaskError

  lost = missed = 0
  while True:
    actor, played = start()
    try:
      return await played
    except RayActorError as error:
      if isinstance(error, RayTaskError):
        raise  # another actor, that this one needs
      if 'never ran' in str(error):
        if missed == misses:
          raise
        forget(actor)
        missed += 1
        log.warning(
          '%s could not be started (%d of at most %d times): another one is being '
          'started (%s)',
          name,
          missed,
          misses,
          told(error),
        )
        await asyncio.sleep(pause)
        continue
      if lost == deaths:
        raise
      forget(actor)
      missed, lost = 0, lost + 1
      log.warning(
        '%s was lost: another one is being started, and plays its episodes again (%s)',
        name,
        told(error),
      )
      await asyncio.sleep(pause)


async def gone(actor: Any, patience: float) -> Exception | None:
  """Why an actor is no more; None while it lives, or is too busy to say."""
  try:
    await asyncio.wait_for(awaited(actor.__ray_ready__.remote()), patience)
  except TimeoutError:
    return None
  except Exception as error:
    return error
  return None


async def explain(
  error: Exception,
  actors: Callable[[], Sequence[tuple[str, Any]]],
  *,
  patience: float = 2.0,
  several: bool = True,
  rounds: int = 20,
  few: int = 2,
) -> Exception:
  """The error behind one that an actor raised; ActorError when an actor is gone.

  A process that loses another one in the middle of a sum says so before Ray knows of
  the death, so after an error of the devices there are several `rounds` of questions.
  several: whether the learner has other processes to lose; without, and for an error
  that is a process's own, such as a lack of memory, there are but a `few`.
  """
  from ray import exceptions

  while isinstance(error, exceptions.RayTaskError) and error.cause is not None:
    error = error.cause
  asked = 1
  if type(error).__name__ in ('JaxRuntimeError', 'XlaRuntimeError'):
    own = not several or any(word in str(error) for word in OWN)
    asked = few if own else rounds
  for turn in range(asked):
    if turn:
      await asyncio.sleep(patience)
    known = list(actors())
    found = await asyncio.gather(*(gone(actor, patience) for _, actor in known))
    for (name, _), reason in zip(known, found, strict=True):
      if reason is not None:
        return ActorError(
          f'the Ray actor {name} has died, and the run with it; {RESUMES} '
          f'({told(reason)})'
        )
  if isinstance(error, exceptions.RayActorError):
    return ActorError(f'a Ray actor cannot be reached; {RESUMES} ({told(error)})')
  return error
