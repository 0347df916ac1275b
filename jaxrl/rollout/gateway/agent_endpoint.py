"""AgentEndpoint serves the model to agents on this machine, with a key for each."""

import asyncio
import contextlib
import hashlib
import secrets

from jaxrl.data.chat_tokenizer import ChatTokenizer
from jaxrl.rollout.gateway.choice_runner import SessionLimits, SessionState
from jaxrl.rollout.gateway.gateway import Gateway
from jaxrl.rollout.queue.group_state import EpisodeLease
from jaxrl.types import TokenGenerator

MODEL_NAME = 'policy'  # agents may ask for any name


class AgentEndpoint:
  """Runs a gateway on a free port that only this machine can reach.

  It starts when the first session is opened, in the event loop that opens it.

  Attributes:
    url: The base URL with `/v1`; '' while it is not running.
  """

  def __init__(self, engine: TokenGenerator, chat: ChatTokenizer):
    """Creates an endpoint that is not running.

    Args:
      engine: Generates the replies.
      chat: The chat tokenizer of the engine's model.
    """
    self._engine = engine
    self._chat = chat
    self._session_names: dict[str, str] = {}  # by the hash of their key
    self._gateway: Gateway | None = None
    self._resources = contextlib.AsyncExitStack()
    self._lock = asyncio.Lock()
    self.url = ''

  async def open_session(
    self, name: str, lease: EpisodeLease, seed: int, limits: SessionLimits
  ) -> str:
    """Opens a session and starts the endpoint if it is not running.

    Args:
      name: The session's name.
      lease: Which sample of which group the agent plays.
      seed: The episode seed.
      limits: The session's limits and sampling.

    Returns:
      The key by which the session is reached.
    """
    async with self._lock:
      if self._gateway is None:
        await self._start()
    assert self._gateway is not None
    key = secrets.token_urlsafe(32)
    self._gateway.open_session(name, lease, seed, limits)
    self._session_names[_hash(key)] = name
    return key

  def close_session(self, key: str) -> SessionState:
    """Ends a session and cancels its running replies; its key is no longer valid.

    Args:
      key: The session's key.

    Returns:
      The session's final state.
    """
    assert self._gateway is not None
    return self._gateway.close_session(self._session_names.pop(_hash(key)))

  async def close(self) -> None:
    """Stops listening until another session is opened."""
    async with self._lock:
      self._gateway, self.url = None, ''
      await self._resources.aclose()

  async def _start(self) -> None:
    from jaxrl.rollout.gateway.connection_limits import ConnectionLimits
    from jaxrl.rollout.gateway.http_server import GatewayServer, serve_gateway

    gateway = Gateway(
      self._engine,
      self._chat,
      model=MODEL_NAME,
      max_sessions=2**31,
      allow_new_sessions=False,
    )
    self._resources.callback(gateway.close)
    # All agents are of this machine, so there is one client.
    limits = ConnectionLimits(max_connections=8192, max_per_client=8192)
    server = GatewayServer(
      gateway,
      lambda key: self._session_names.get(_hash(key)),
      max_requests=4096,
      connections=limits,
    )
    url = await self._resources.enter_async_context(serve_gateway(server))
    self._gateway, self.url = gateway, f'{url}/v1'


def _hash(key: str) -> str:
  """Hashes a key, so that the time of a lookup says nothing about the keys."""
  return hashlib.sha256(key.encode('utf-8', 'surrogateescape')).hexdigest()
