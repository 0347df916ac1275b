"""Several engines as one: requests go where they are served best, and do not get lost
with the engine that serves them.
"""

import asyncio
import contextlib
import time
from collections import Counter
from collections.abc import Awaitable, Callable, Iterable, Sequence
from typing import Any

from jaxrl.rollout.balance import Balance
from jaxrl.rollout.calls import Call
from jaxrl.rollout.handles import EngineGone, settle
from jaxrl.types import Completion, SamplingParams

REST = 5.0  # seconds before an engine that failed is tried again, unless replaced
SILENCE = 10.0  # seconds to wait for an answer that nothing hangs on


class EngineRouter:
  """Serves requests with whichever engine is best, and goes on when one is lost.

  There is one router to a set of engines: every request passes it, so that its own
  counts are the engines' loads. Ids are `tag/group/episode/…`. A request goes to the
  engine that served its group last, whose cache holds the prefix, unless that one
  serves more than `slack` requests above the least loaded; all others go to the least
  loaded. Which engine serves a request changes no token.

  A request whose engine fails goes on with another from the tokens it had when the
  engine was last asked, every `poll` seconds; keys are drawn by seed and place, so the
  tokens are the same. Who has found no engine that lives for `patience` seconds, or met
  more than `retries` other errors, gets a RuntimeError. What is wrong with the request
  itself (ValueError) or with the weights (FloatingPointError) is told at once.
  """

  def __init__(
    self,
    engines: Sequence[Any],
    *,
    slack: int = 16,
    poll: float = 1.0,
    retries: int = 3,
    patience: float = 1800.0,
  ):
    if not engines:
      raise ValueError('a router needs at least one engine')
    self._engines = list(engines)
    self._poll, self._retries, self._patience = poll, retries, patience
    self._balance = Balance(len(self._engines), slack)
    self._calls: dict[str, Call] = {}
    self._news = asyncio.Event()  # renewed each time something changed
    self._paused = False
    self._poller: asyncio.Task | None = None
    self._asked: set[int] = set()  # engines that owe the poller an answer
    self._errands: set[asyncio.Task] = set()
    self._counts: Counter[str] = Counter()

  # ---- requests

  async def generate(
    self, request_id: str, token_ids: Sequence[int], sampling: SamplingParams
  ) -> Completion:
    """As an engine's. An id that is being served joins the running request."""
    prompt, call = list(token_ids), self._calls.get(request_id)
    if call is None:
      call = self._calls[request_id] = Call(request_id, prompt, sampling)
      call.task = asyncio.create_task(self._serve(call))
    elif (call.prompt, call.sampling) != (prompt, sampling):
      raise ValueError(
        f'request {request_id!r} is being served with another prompt or other '
        'sampling parameters; give this one an id of its own'
      )
    assert call.task is not None
    call.waiters += 1
    try:
      return await asyncio.shield(call.task)
    finally:
      call.waiters -= 1
      if not call.waiters:
        call.task.cancel()
        self._forget(call)

  async def _serve(self, call: Call) -> Completion:
    errors, lost = 0, 0.0  # lost: since when it has had no engine
    try:
      while (reason := call.over()) is None:
        engine = self._balance.choose(call)
        if engine is None:
          await self._change(self._balance.wait())
          continue
        begun = time.monotonic()
        try:
          call.parts.append(await self._attempt(call, engine))
          return call.whole()
        except (ValueError, FloatingPointError):
          raise
        except Exception as error:
          gone, now = isinstance(error, EngineGone), time.monotonic()
          self._left(call, engine, error)
          errors += not gone
          lost = lost if lost and now - begun < REST else now
          if errors > self._retries or now - lost > self._patience:
            told = f'request {call.name!r} was given up after {call.attempt} attempts'
            raise RuntimeError(f'{told}, the last of which: {error}') from error
      return call.whole(reason)
    finally:
      self._forget(call)

  def _forget(self, call: Call) -> None:
    if self._calls.get(call.name) is call:
      del self._calls[call.name]

  async def _attempt(self, call: Call, number: int) -> Completion:
    """The rest of `call`, from one engine; it is told when nobody waits any more."""
    engine = self._engines[number]
    if self._poller is None or self._poller.done():
      self._poller = asyncio.create_task(self._keep_polling())
    try:
      done = await settle(engine.generate(call.name, *call.rest()))
      call.seen = None
      return done
    except asyncio.CancelledError:
      self._errand(settle(engine.abort(call.name)))
      raise
    finally:
      self._balance.serving[number].discard(call)

  def _left(self, call: Call, engine: int, error: Exception) -> None:
    """`call` goes on without `engine`, from what is known of it."""
    kept = len(call.emitted)
    call.lose()
    alone = len(self._engines) == 1 and not isinstance(error, EngineGone)
    self._balance.leave(engine, REST / 50 if alone else REST)
    self._counts['rollout/requests_moved'] += 1
    self._counts['rollout/tokens_kept'] += len(call.emitted) - kept

  async def abort(self, request_id: str) -> None:
    """Ends a request with the tokens it has; unknown ids are ignored."""
    call = self._calls.get(request_id)
    if call is not None:
      call.aborted = True
      self._tell()
      if call.engine is not None:
        with contextlib.suppress(EngineGone):
          await settle(self._engines[call.engine].abort(request_id))

  # ---- what running requests have emitted

  async def progress(self, request_ids: Sequence[str]) -> dict[str, Completion]:
    """What these requests have emitted so far, but for those not being served."""
    calls = [self._calls[name] for name in request_ids if name in self._calls]
    engines = {call.engine for call in calls if call.engine is not None}
    await asyncio.gather(*map(self._look, engines))
    return {call.name: call.whole('abort') for call in calls}

  async def _keep_polling(self) -> None:
    """Asks every engine at work what it has, so that little is lost with it.

    An answer holds all tokens of all requests, at 12 bytes a token: 0.8 MB a second
    for 64 requests of 1,000 tokens.
    """
    while True:
      await asyncio.sleep(self._poll)
      if not self._balance.busy:
        return
      for engine in self._balance.busy:
        if engine not in self._asked:
          self._errand(self._look(engine))

  async def _look(self, engine: int) -> None:
    self._asked.add(engine)
    asked = {call.name: (call, call.attempt) for call in self._balance.serving[engine]}
    try:
      answer = settle(self._engines[engine].progress(list(asked)))
      found = await asyncio.wait_for(answer, SILENCE)
    except Exception:
      return  # those who wait for the engine will be told
    finally:
      self._asked.discard(engine)
    for name, emitted in found.items():
      call, attempt = asked[name]
      if call.attempt == attempt and call in self._balance.serving[engine]:
        call.seen = emitted

  # ---- all engines

  async def replace(self, number: int, engine: Any) -> None:
    """Puts a new engine in the place of one that is gone."""
    if self._paused:
      await settle(engine.pause())
    self._engines[number] = engine
    self._balance.welcome(number)
    self._tell()

  async def pause(self) -> None:
    """Stops decoding and keeps every request; returns when the devices are quiet."""
    self._paused = True
    await self._all(lambda engine: engine.pause())

  async def resume(self) -> None:
    """Ends a pause or a drain."""
    self._paused = False
    await self._all(lambda engine: engine.resume())

  async def drain(self) -> None:
    """Ends the requests that sit in slots, and pauses; all others wait."""
    self._paused = True
    await self._all(lambda engine: engine.drain())

  async def sleep(self) -> None:
    """Drains, and has the engines give up their caches, until `resume`."""
    self._paused = True
    await self._all(lambda engine: engine.sleep())

  async def warmup(self) -> None:
    await self._all(lambda engine: engine.warmup())

  async def metrics(self) -> dict[str, float]:
    """Sums of the engines' counts and rates, means of times and shares."""
    reports = await self._all(lambda engine: engine.metrics())
    total = {name: float(count) for name, count in self._counts.items()}
    self._counts.clear()
    for name in {name for report in reports for name in report}:
      values = [report[name] for report in reports if name in report]
      mean = name.startswith('time/') or name == 'rollout/busy_slots'
      total[name] = sum(values) / (len(values) if mean else 1)
    return total

  async def _all(self, ask: Callable[[Any], Any]) -> list[Any]:
    """The answers of all engines that live."""

    async def one(engine: Any) -> list[Any]:
      try:
        return [await settle(ask(engine))]
      except EngineGone:
        return []

    answers: Iterable[list] = await asyncio.gather(*map(one, self._engines))
    return [answer for found in answers for answer in found]

  # ---- waiting

  def _tell(self) -> None:
    self._news.set()
    self._news = asyncio.Event()

  async def _change(self, seconds: float) -> None:
    """Waits until something changed, `seconds` at most."""
    with contextlib.suppress(TimeoutError):
      await asyncio.wait_for(self._news.wait(), seconds)

  def _errand(self, work: Awaitable[Any]) -> None:
    """Does `work` on the side, whatever comes of it."""

    async def do() -> None:
      with contextlib.suppress(Exception):
        await work

    task = asyncio.create_task(do())
    self._errands.add(task)
    task.add_done_callback(self._errands.discard)
