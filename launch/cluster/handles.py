"""Handles of actors, and what is told of those that are gone."""

from typing import Any

from jaxrl.rollout.handles import EngineGone

CREATION = 'creation task'  # in what Ray says of an actor whose `__init__` raised


class ActorError(OSError):
  """A part of the run that lived in a process of its own is gone."""


class EngineHandle:
  """An engine in an actor, as a `Remote`; whoever finds it lost meets `EngineGone`."""

  def __init__(self, actor: Any):
    self._actor = actor

  def __reduce__(self):
    return EngineHandle, (self._actor,)

  def become(self, actor: Any) -> None:
    """From now on it is this actor; None for none."""
    self._actor = actor

  def key(self) -> str:
    """Tells the actor from any that takes its place."""
    return self._actor._actor_id.hex()

  def __getattr__(self, name: str) -> Any:
    if name.startswith('_'):
      raise AttributeError(name)

    async def call(*args: Any, **options: Any) -> Any:
      from ray.exceptions import ActorUnavailableError, RayActorError

      if self._actor is None:
        raise EngineGone('it is being started anew')
      try:
        return await getattr(self._actor, name).remote(*args, **options)
      except RayActorError as error:
        if name == 'pull' and isinstance(error, ActorUnavailableError):
          _end(self._actor)  # it may come back, but with which weights?
        raise EngineGone(told(error)) from error

    return call


def _end(actor: Any) -> None:
  import ray

  ray.kill(actor)


async def awaited(reference: Any) -> Any:
  return await reference


def told(error: BaseException) -> str:
  """What an actor's error says, in a line."""
  said = str(error).strip().splitlines() or [type(error).__name__]
  if CREATION in said[0]:  # it ends in the error that was raised
    return said[-1]
  plain = ' '.join(line for line in said if not line.startswith('\t'))  # no numbers
  return plain.partition(' Some common causes')[0][:300]
