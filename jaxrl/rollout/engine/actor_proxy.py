"""Actor proxy: calls objects in this process and actors elsewhere in the same way."""

import inspect
from collections.abc import Awaitable
from typing import Any, Protocol, overload

from jaxrl.types import MaybeAwaitable, Value


class EngineDeadError(ConnectionError):
  """An engine's process has died or cannot be reached."""


@overload
async def maybe_await(value: Awaitable[Value]) -> Value: ...
@overload
async def maybe_await(value: MaybeAwaitable[Value]) -> Value: ...
async def maybe_await(value: MaybeAwaitable[Value]) -> Value:
  """Awaits `value` if it can be awaited, and returns the result or `value` itself."""
  result: Any = await value if inspect.isawaitable(value) else value
  return result


class RemoteMethod(Protocol):
  """A method of an actor."""

  def remote(self, *args: object, **options: object) -> Awaitable[Any]:
    """Calls the method; returns what can be awaited."""
    ...


class ActorHandle(Protocol):
  """A handle of an actor, such as Ray's: each of its attributes is a method."""

  def __getattr__(self, name: str) -> RemoteMethod: ...


class ActorProxy:
  """Makes an actor handle look like the object that the actor hosts.

  `ActorProxy(actor).put(x)` calls `actor.put.remote(x)` and returns its awaitable. Any
  object whose methods have a `remote` attribute will do.
  """

  def __init__(self, actor: ActorHandle):
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
