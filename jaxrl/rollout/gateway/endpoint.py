"""An endpoint on this machine for agents that are being trained, a key for each."""

import asyncio
import contextlib
import hashlib
import secrets

from jaxrl.data.chat import Chat
from jaxrl.rollout.gateway.choice import Seat, Terms
from jaxrl.rollout.gateway.gateway import Gateway
from jaxrl.rollout.group import Lease
from jaxrl.types import RolloutEngine

MODEL = 'policy'  # the model's name; agents may ask for any


class Endpoint:
  """A gateway on a free port, which listens to this machine alone.

  It is started when the first session is opened, in the event loop that opens it.
  """

  def __init__(self, engine: RolloutEngine, chat: Chat):
    self._engine, self._chat = engine, chat
    self._names: dict[str, str] = {}  # of sessions, by the hash of their key
    self._gateway: Gateway | None = None
    self._open = contextlib.AsyncExitStack()
    self._lock = asyncio.Lock()
    self.url = ''

  async def open(self, name: str, lease: Lease, seed: int, terms: Terms) -> str:
    """Opens the session `name`; returns the key that it is reached by."""
    async with self._lock:
      if self._gateway is None:
        await self._start()
    assert self._gateway is not None
    key = secrets.token_urlsafe(32)
    self._gateway.open(name, lease, seed, terms)
    self._names[_hash(key)] = name
    return key

  def end(self, key: str) -> Seat:
    """Ends a session, whatever is under way in it; its key is good for nothing then."""
    assert self._gateway is not None
    return self._gateway.end(self._names.pop(_hash(key)))

  async def close(self) -> None:
    """Listens no more, until another session is opened."""
    async with self._lock:
      self._gateway, self.url = None, ''
      await self._open.aclose()

  async def _start(self) -> None:
    from jaxrl.rollout.gateway.server import Server, serving

    own = {'model': MODEL, 'max_sessions': 2**31, 'guests': False}
    gateway = Gateway(self._engine, self._chat, **own)
    self._open.callback(gateway.close)
    server = Server(gateway, lambda key: self._names.get(_hash(key)), max_requests=4096)
    url = await self._open.enter_async_context(serving(server))
    self._gateway, self.url = gateway, f'{url}/v1'


def _hash(key: str) -> str:
  """Keys are found by their hash, so that the time a search takes tells nothing."""
  return hashlib.sha256(key.encode('utf-8', 'surrogateescape')).hexdigest()
