"""Pending results: what clients poll for until a request has ended.

A result is kept for a while after it was fetched, because the answer may be lost on its
way. A process knows the results of its own life only: `LOST` tells of others.
"""

import asyncio
import collections
import dataclasses
import json
import logging
import time
from collections.abc import Callable

from jaxrl.options import JsonObject

log = logging.getLogger(__name__)
USER, SERVER = 'user', 'server'  # whose fault an error is
LOST = (
  'this server does not know the request: it was restarted, or the result was given up '
  'after {minutes:g} minutes. What was not saved is lost: create a client from the '
  'last saved state'
)


class RequestError(Exception):
  """A request failed, through its client's fault or the server's.

  Attributes:
    category: USER or SERVER.
  """

  def __init__(self, message: str, category: str = USER):
    """Creates an error.

    Args:
      message: What went wrong.
      category: USER or SERVER.
    """
    super().__init__(message)
    self.category = category


class TooManyRequestsError(Exception):
  """There is no room for more; the client tries again later."""


@dataclasses.dataclass
class PendingResult:
  """One request and, once it has ended, its result.

  Attributes:
    request_id: Its id.
    owner: The session that sent it.
    answer: What the client gets besides the id, at once.
    body: The result, bytes of JSON or protobuf.
    is_proto: Whether it is protobuf.
    failed: Whether the result is an error.
    done: Set once the request has ended.
    ended: When it ended, on `time.monotonic`.
  """

  request_id: str
  owner: str
  answer: JsonObject = dataclasses.field(default_factory=dict)
  body: bytes = b''
  is_proto: bool = False
  failed: bool = False
  done: asyncio.Event = dataclasses.field(default_factory=asyncio.Event)
  ended: float = 0.0

  def succeed(self, result: JsonObject | bytes) -> None:
    """Ends the request with a result, unless it has ended.

    Args:
      result: The fields of a JSON object, or a protobuf message.
    """
    is_proto = isinstance(result, bytes)
    body = result if isinstance(result, bytes) else json.dumps(result).encode()
    self._end(body, is_proto=is_proto, failed=False)

  def fail(self, error: BaseException) -> None:
    """Ends the request with an error, unless it has ended.

    Args:
      error: Its text is shown; what is no `RequestError` is the server's fault.
    """
    if self.done.is_set():
      return
    category, text = SERVER, f'the server failed: {type(error).__name__}: {error}'
    if isinstance(error, RequestError):
      category, text = error.category, str(error)
      log.info('request %s failed: %.200r', self.request_id, text)
    else:
      log.error('request %s failed', self.request_id, exc_info=error)
    body = {'error': text[:2000], 'category': category}
    self._end(json.dumps(body).encode(), is_proto=False, failed=True)

  def _end(self, body: bytes, *, is_proto: bool, failed: bool) -> None:
    if self.done.is_set():
      return
    self.body, self.is_proto, self.failed = body, is_proto, failed
    self.ended = time.monotonic()
    self.done.set()


class PendingResults:
  """Holds the requests of all sessions, within limits.

  Attributes:
    keep_seconds: How long a result is kept.
  """

  def __init__(
    self,
    *,
    max_pending: int,
    keep_seconds: float,
    max_kept_bytes: int,
    clock: Callable[[], float] = time.monotonic,
  ):
    """Creates an empty table.

    Args:
      max_pending: Requests that have not ended.
      keep_seconds: Seconds for which a result is kept.
      max_kept_bytes: Bytes of results; beyond it the oldest are dropped.
      clock: Tells the seconds.
    """
    self.keep_seconds = keep_seconds
    self._max_pending, self._max_kept_bytes = max_pending, max_kept_bytes
    self._clock = clock
    self._results: collections.OrderedDict[str, PendingResult] = (
      collections.OrderedDict()
    )

  @property
  def num_pending(self) -> int:
    """Returns how many requests have not ended."""
    return sum(not result.done.is_set() for result in self._results.values())

  def find(self, request_id: str) -> PendingResult | None:
    """Returns a request by its id; None for one that is not known."""
    return self._results.get(request_id)

  def add(self, request_id: str, owner: str, **answer: object) -> PendingResult:
    """Adds a request.

    Args:
      request_id: Its id; it must be new.
      owner: The session that sent it.
      **answer: What the client gets besides the id, at once.

    Raises:
      TooManyRequestsError: If too many have not ended.
    """
    self._drop_old()
    if self.num_pending >= self._max_pending:
      raise TooManyRequestsError(
        f'{self._max_pending} requests are waiting; try again later'
      )
    result = self._results[request_id] = PendingResult(request_id, owner, dict(answer))
    return result

  def fail_owner(self, owner: str, error: BaseException) -> None:
    """Ends all requests of a session that have not ended.

    Args:
      owner: The session.
      error: Why.
    """
    for result in self._results.values():
      if result.owner == owner:
        result.fail(error)

  def _drop_old(self) -> None:
    oldest = self._clock() - self.keep_seconds
    ended = sorted(
      (r for r in self._results.values() if r.done.is_set()), key=lambda r: r.ended
    )
    kept = sum(len(result.body) for result in ended)
    for result in ended:
      if result.ended > oldest and kept <= self._max_kept_bytes:
        break
      kept -= len(result.body)
      del self._results[result.request_id]

  def lost_message(self) -> str:
    """Returns what is said of a request that is not known."""
    return LOST.format(minutes=self.keep_seconds / 60)
