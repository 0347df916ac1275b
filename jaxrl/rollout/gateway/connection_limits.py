"""Connection limits keep silent or numerous clients from locking others out.

A connection that has no request in progress is closed after a while. When there are too
many connections, the one that has been silent for longest makes room for a new one.
"""

import asyncio
import contextlib
import dataclasses
from collections import Counter
from collections.abc import Callable, Iterator
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
  from aiohttp import web

LOOPBACK_HOSTS = ('127.0.0.1', '::1', 'localhost')
_BUSY_BODY = (
  b'{"error": {"message": "too many connections; try again later", '
  b'"type": "server_error", "param": null, "code": null}}'
)
BUSY = (
  b'HTTP/1.1 503 Service Unavailable\r\nContent-Type: application/json\r\n'
  b'Retry-After: 1\r\nConnection: close\r\nContent-Length: %d\r\n\r\n%s'
) % (len(_BUSY_BODY), _BUSY_BODY)


@dataclasses.dataclass(frozen=True)
class ConnectionLimits:
  """Limits on the connections of a server.

  Attributes:
    header_timeout: Seconds from connecting to the end of the first request's headers.
    idle_timeout: Seconds from a response to the end of the next request's headers.
    max_connections: Connections in total.
    max_per_client: Connections of one address.
    min_silence: Seconds for which a connection must have been silent before it makes
      room for another.
  """

  header_timeout: float = 10.0
  idle_timeout: float = 60.0
  max_connections: int = 1024
  max_per_client: int = 256
  min_silence: float = 1.0


class ConnectionTable:
  """Holds the open connections of a server, those that are silent for longest first."""

  def __init__(self, limits: ConnectionLimits):
    """Creates an empty table.

    Args:
      limits: The limits.
    """
    self.limits = limits
    self._connections: dict[LimitedConnection, None] = {}
    self._per_client: Counter[str] = Counter()

  def __len__(self) -> int:
    return len(self._connections)

  def add(self, connection: 'LimitedConnection') -> bool:
    """Adds a connection, and closes a silent one if there are too many.

    Args:
      connection: The new connection.

    Returns:
      False if there are too many, and none has been silent for long.
    """
    limits, client = self.limits, connection.client
    if self._per_client[client] >= limits.max_per_client and not self._close_silent(
      client
    ):
      return False
    if len(self) >= limits.max_connections and not self._close_silent(None):
      return False
    self._connections[connection] = None
    self._per_client[client] += 1
    return True

  def remove(self, connection: 'LimitedConnection') -> None:
    """Removes a connection, if it is there."""
    if connection in self._connections:
      del self._connections[connection]
      self._per_client[connection.client] -= 1
      if not self._per_client[connection.client]:
        del self._per_client[connection.client]

  def touch(self, connection: 'LimitedConnection') -> None:
    """Notes that a connection has just finished a request."""
    if connection in self._connections:
      del self._connections[connection]
      self._connections[connection] = None

  def _close_silent(self, client: str | None) -> bool:
    """Closes the connection that is silent for longest, of one client or of any."""
    now = asyncio.get_running_loop().time()
    for connection in self._connections:
      if not connection.num_requests and client in (None, connection.client):
        if now - connection.silent_since < self.limits.min_silence:
          return False  # and all others have been silent for less
        connection.close()
        return True
    return False


class LimitedConnection(asyncio.Protocol):
  """Passes a connection on to the protocol of an HTTP server, within limits.

  Attributes:
    client: The address of the other side.
    num_requests: Requests in progress.
    silent_since: The event loop's time of the last response, or of the beginning.
  """

  def __init__(self, inner: Any, table: ConnectionTable):
    """Creates a connection that is not made yet.

    Args:
      inner: The protocol that serves it.
      table: The connections of the server.
    """
    self._inner = inner
    self._table = table
    self._transport: Any = None
    self._timer: asyncio.TimerHandle | None = None
    self.client = ''
    self.num_requests = 0
    self.silent_since = asyncio.get_running_loop().time()
    self._is_served = False

  @contextlib.contextmanager
  def request(self) -> Iterator[None]:
    """Marks a request as in progress, from the end of its headers to its response."""
    self._cancel_timer()
    self.num_requests += 1
    try:
      yield
    finally:
      self.num_requests -= 1
      if not self.num_requests:
        self.silent_since = asyncio.get_running_loop().time()
        self._table.touch(self)
        self._start_timer(self._table.limits.idle_timeout)

  def close(self) -> None:
    """Closes the connection at once."""
    self._cancel_timer()
    self._table.remove(self)
    if self._transport is not None:
      self._transport.abort()

  def connection_made(self, transport: Any) -> None:
    """Serves the connection, or refuses it with status 503."""
    self._transport = transport
    peer = transport.get_extra_info('peername')
    self.client = str(peer[0]) if isinstance(peer, tuple) else ''
    if not self._table.add(self):
      transport.write(BUSY)
      transport.close()
      return
    self._is_served = True
    self._start_timer(self._table.limits.header_timeout)
    self._inner.connection_made(transport)

  def connection_lost(self, exc: Exception | None) -> None:
    """Forgets the connection."""
    self._cancel_timer()
    self._table.remove(self)
    if self._is_served:
      self._inner.connection_lost(exc)

  def data_received(self, data: bytes) -> None:
    """Passes bytes on."""
    if self._is_served:
      self._inner.data_received(data)

  def eof_received(self) -> bool | None:
    """Passes the end of what the client sends on."""
    return self._inner.eof_received() if self._is_served else None

  def pause_writing(self) -> None:
    """Passes on that the client reads too slowly."""
    self._inner.pause_writing()

  def resume_writing(self) -> None:
    """Passes on that the client has caught up."""
    self._inner.resume_writing()

  def _start_timer(self, seconds: float) -> None:
    self._cancel_timer()
    if self._transport is not None and not self._transport.is_closing():
      loop = asyncio.get_running_loop()
      self._timer = loop.call_later(seconds, self.close)

  def _cancel_timer(self) -> None:
    if self._timer is not None:
      self._timer.cancel()
      self._timer = None


def limit_connections(
  make_protocol: Callable[[], object], limits: ConnectionLimits
) -> Callable[[], LimitedConnection]:
  """Returns a protocol factory for `loop.create_server` that applies limits.

  Args:
    make_protocol: Makes the protocol that serves one connection.
    limits: The limits on all of them together.
  """
  table = ConnectionTable(limits)
  return lambda: LimitedConnection(make_protocol(), table)


@contextlib.contextmanager
def request_in_progress(request: 'web.BaseRequest') -> Iterator[None]:
  """Marks the connection of a request as busy, while entered.

  Args:
    request: The request.
  """
  connection = request.transport and request.transport.get_protocol()
  if not isinstance(connection, LimitedConnection):
    yield
    return
  with connection.request():
    yield
