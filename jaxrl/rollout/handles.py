"""One way to call a thing that may be local, or an actor on another machine."""

import inspect
from typing import Any


class EngineGone(ConnectionError):
  """The process of an engine has died, or cannot be reached."""


async def settle(value: Any) -> Any:
  """Awaits what can be awaited and passes on the rest."""
  return await value if inspect.isawaitable(value) else value


class Remote:
  """Makes an actor handle look like the object it hosts.

  `Remote(actor).put(x)` calls `actor.put.remote(x)` and returns its awaitable. Any
  object whose methods have a `remote` attribute will do.
  """

  def __init__(self, actor: Any):
    self._actor = actor

  def __reduce__(self):
    return Remote, (self._actor,)

  def __getattr__(self, name: str) -> Any:
    if name.startswith('_'):
      raise AttributeError(name)
    return getattr(self._actor, name).remote
