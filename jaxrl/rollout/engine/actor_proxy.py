"""Actor proxy: calls objects in this process and actors elsewhere in the same way."""

import inspect
from typing import Any

from jaxrl.types import MaybeAwaitable, Value


class EngineDeadError(ConnectionError):
  """An engine's process has died or cannot be reached."""


async def maybe_await(value: MaybeAwaitable[Value]) -> Value:
  """Awaits `value` if it can be awaited, and returns the result or `value` itself."""
  result: Any = await value if inspect.isawaitable(value) else value
  return result


class ActorProxy:
  """Makes an actor handle look like the object that the actor hosts.

  `ActorProxy(actor).put(x)` calls `actor.put.remote(x)` and returns its awaitable. Any
  object whose methods have a `remote` attribute will do.
  """

  def __init__(self, actor: Any):
    """Wraps `actor`, a handle whose methods have a `remote` attribute."""
    self._actor = actor

  def __reduce__(self):
    """Pickles the handle."""
    return ActorProxy, (self._actor,)

  def __getattr__(self, name: str) -> Any:
    """Returns the remote method called `name`."""
    if name.startswith('_'):
      raise AttributeError(name)
    return getattr(self._actor, name).remote
