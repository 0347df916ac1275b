"""Router: spreads requests over engines and moves them when an engine is lost."""

import asyncio
import contextlib
import time
from collections import Counter
from collections.abc import Awaitable, Callable, Sequence
from typing import Protocol

from jaxrl.rollout.engine.actor_proxy import EngineDeadError, maybe_await
from jaxrl.rollout.engine.engine_base import EngineTraits
from jaxrl.rollout.engine.load_balancer import LoadBalancer, RoutedRequest
from jaxrl.types import (
  Completion,
  MaybeAwaitable,
  Pixels,
  RolloutEngine,
  SamplingParams,
  Value,
)

COOLDOWN_S = 5.0  # before a failed engine is tried again, unless it is replaced
# Metrics that several engines have a mean of, beside times; others are summed.
MEAN_METRICS = {'rollout/busy_slots', 'rollout/tokens_per_dispatch'}
POLL_TIMEOUT_S = 10.0  # for an answer that no request depends on


class RoutedEngine(RolloutEngine, Protocol):
  """What a router needs of an engine, or of a handle of one, beside requests."""

  async def sleep(self) -> None:
    """Drains, and frees memory until `resume`."""
    ...

  async def warmup(self) -> None:
    """Prepares for requests, once weights are loaded."""
    ...

  def metrics(self) -> MaybeAwaitable[dict[str, float]]:
    """Returns metrics since the last call, by name."""
    ...


class EngineRouter:
  """Serves requests with several engines and survives the loss of any of them.

  A set of engines has one router. Every request passes through it, so its own counts
  are the engines' loads. Request ids are `tag/group/episode/…`. A request goes to the
  engine that served its group last, whose cache holds the prefix, unless that engine is
  clearly busier than others. All other requests go to the least loaded engine. The
  choice of the engine changes no token.

  If its engine fails, a request continues on another one from the tokens that it had
  when the engine was last polled. Keys are drawn by seed and token index, so the tokens
  are the same. A request fails with a RuntimeError if it finds no living engine for
  `no_engine_timeout` seconds or meets more than `max_retries` other errors. Errors of
  the request itself (ValueError) or of the weights (FloatingPointError) are raised at
  once.
  """

  def __init__(
    self,
    engines: Sequence[RoutedEngine],
    *,
    affinity_slack: int = 16,
    poll_interval: float = 1.0,
    max_retries: int = 3,
    no_engine_timeout: float = 1800.0,
  ):
    """Initializes a router without requests.

    Args:
      engines: Engines, or handles of engines.
      affinity_slack: A group stays on its engine while that one serves at most this
        many requests more than the least loaded engine.
      poll_interval: Seconds between two polls of what requests have generated.
      max_retries: Errors after which a request is given up.
      no_engine_timeout: Seconds without a living engine after which a request is given
        up.

    Raises:
      ValueError: If there are no engines.
    """
    if not engines:
      raise ValueError('a router needs at least one engine')
    self._engines = list(engines)
    self._poll_interval = poll_interval
    self._max_retries = max_retries
    self._no_engine_timeout = no_engine_timeout
    self._balancer = LoadBalancer(len(self._engines), affinity_slack)
    self._requests: dict[str, RoutedRequest] = {}
    self._changed = asyncio.Event()  # replaced each time that something changes
    self._is_paused = False
    self._poll_task: asyncio.Task[None] | None = None
    self._polled_engines: set[int] = set()  # engines that have not answered yet
    self._background_tasks: set[asyncio.Task[None]] = set()
    self._counts: Counter[str] = Counter()

  @property
  def traits(self) -> EngineTraits:
    """Returns the engines' traits; the default ones if the engines are elsewhere."""
    traits = getattr(self._engines[0], 'traits', None)
    return traits if isinstance(traits, EngineTraits) else EngineTraits()

  # ---- requests

  async def generate(
    self,
    request_id: str,
    token_ids: Sequence[int],
    sampling: SamplingParams,
    images: Sequence[Pixels] = (),
  ) -> Completion:
    """Generates a completion of `token_ids`, as an engine does.

    If a request with the same id, prompt, images and sampling parameters is being
    served, the call joins it. If the last waiting caller is cancelled, the request is
    aborted.

    Args:
      request_id: `tag/group/episode/…`; identifies the request until it has ended.
      token_ids: The prompt.
      sampling: How tokens are drawn.
      images: The prompt's images, in the order of their runs of placeholders.

    Returns:
      The completion.

    Raises:
      ValueError: If the request is invalid.
      FloatingPointError: If the weights give logits that are not finite.
      RuntimeError: If no engine could serve the request.
    """
    prompt = list(token_ids)
    request = self._requests.get(request_id)
    arguments = prompt, sampling, [image.digest for image in images]
    if request is None:
      request = RoutedRequest(request_id, prompt, sampling, tuple(images))
      self._requests[request_id] = request
      request.task = asyncio.create_task(self._serve(request))
    elif (request.prompt, request.sampling, request.digests) != arguments:
      raise ValueError(
        f'request {request_id!r} is being served with another prompt or other '
        'sampling parameters; use a different id for this request'
      )
    assert request.task is not None
    request.num_waiters += 1
    try:
      return await asyncio.shield(request.task)
    finally:
      request.num_waiters -= 1
      if not request.num_waiters:
        request.task.cancel()
        self._remove(request)

  async def abort(self, request_id: str) -> None:
    """Ends a request with the tokens it has so far; ignores unknown ids.

    Args:
      request_id: The id that was passed to `generate`.
    """
    request = self._requests.get(request_id)
    if request is not None:
      request.is_aborted = True
      self._notify()
      if request.engine is not None:
        with contextlib.suppress(EngineDeadError):
          await maybe_await(self._engines[request.engine].abort(request_id))

  async def _serve(self, request: RoutedRequest) -> Completion:
    """Tries engines until the request is complete or has failed for good."""
    num_errors = 0
    engineless_since = 0.0
    try:
      while (finish_reason := request.finished_reason()) is None:
        engine = self._balancer.pick(request)
        if engine is None:
          await self._wait_change(self._balancer.seconds_until_available())
          continue
        start = time.monotonic()
        try:
          request.parts.append(await self._run_on_engine(request, engine))
          return request.completion()
        except (ValueError, FloatingPointError):
          raise
        except Exception as error:
          is_dead, now = isinstance(error, EngineDeadError), time.monotonic()
          self._on_failure(request, engine, is_dead)
          num_errors += not is_dead
          if not engineless_since or now - start >= COOLDOWN_S:
            engineless_since = now
          is_timeout = now - engineless_since > self._no_engine_timeout
          if num_errors > self._max_retries or is_timeout:
            raise RuntimeError(
              f'request {request.request_id!r} failed {request.attempt} times; the '
              f'last error: {error}'
            ) from error
      return request.completion(finish_reason)
    finally:
      self._remove(request)

  async def _run_on_engine(self, request: RoutedRequest, index: int) -> Completion:
    """Generates the rest of `request` on one engine; aborts it there if cancelled."""
    engine = self._engines[index]
    if self._poll_task is None or self._poll_task.done():
      self._poll_task = asyncio.create_task(self._poll_loop())
    try:
      completion = await maybe_await(
        engine.generate(request.request_id, *request.remaining())
      )
      request.partial = None
      return completion
    except asyncio.CancelledError:
      self._background(maybe_await(engine.abort(request.request_id)))
      raise
    finally:
      self._balancer.running[index].discard(request)

  def _on_failure(self, request: RoutedRequest, engine: int, is_dead: bool) -> None:
    """Takes a request off a failed engine, which then cools down."""
    num_kept = len(request.generated_ids)
    request.fail_over()
    is_only_engine = len(self._engines) == 1 and not is_dead
    self._balancer.cool_down(engine, COOLDOWN_S / 50 if is_only_engine else COOLDOWN_S)
    self._counts['rollout/requests_moved'] += 1
    self._counts['rollout/tokens_kept'] += len(request.generated_ids) - num_kept

  def _remove(self, request: RoutedRequest) -> None:
    if self._requests.get(request.request_id) is request:
      del self._requests[request.request_id]

  # ---- what running requests have generated

  async def progress(self, request_ids: Sequence[str]) -> dict[str, Completion]:
    """Returns what requests have generated so far.

    Args:
      request_ids: The requests to look up.

    Returns:
      A partial completion for each of the requests that is being served.
    """
    requests = [
      self._requests[request_id]
      for request_id in request_ids
      if request_id in self._requests
    ]
    engines = {request.engine for request in requests if request.engine is not None}
    await asyncio.gather(*map(self._poll_engine, engines))
    return {request.request_id: request.completion('abort') for request in requests}

  async def _poll_loop(self) -> None:
    """Polls all busy engines regularly, so that little is lost with one of them.

    An answer has all tokens of all requests, at 12 bytes a token: 0.8 MB a second for
    64 requests of 1,000 tokens.
    """
    while True:
      await asyncio.sleep(self._poll_interval)
      if not self._balancer.busy_engines:
        return
      for engine in self._balancer.busy_engines:
        if engine not in self._polled_engines:
          self._background(self._poll_engine(engine))

  async def _poll_engine(self, engine: int) -> None:
    """Records what an engine's requests have generated so far."""
    self._polled_engines.add(engine)
    polled = {
      request.request_id: (request, request.attempt)
      for request in self._balancer.running[engine]
    }
    try:
      answer = maybe_await(self._engines[engine].progress(list(polled)))
      async with asyncio.timeout(POLL_TIMEOUT_S):
        partials = await answer
    except Exception:
      return  # the requests that wait for the engine will get the error
    finally:
      self._polled_engines.discard(engine)
    for request_id, partial in partials.items():
      request, attempt = polled[request_id]
      if request.attempt == attempt and request in self._balancer.running[engine]:
        request.partial = partial

  # ---- all engines

  async def replace(self, index: int, engine: RoutedEngine) -> None:
    """Puts a new engine in the place of a lost one.

    Args:
      index: The lost engine's index.
      engine: The new engine or its handle.
    """
    if self._is_paused:
      await maybe_await(engine.pause())
    self._engines[index] = engine
    self._counts['rollout/engines_replaced'] += 1
    self._balancer.reset(index)
    self._notify()

  async def pause(self) -> None:
    """Stops decoding and keeps every request; returns when the devices are idle."""
    self._is_paused = True
    await self._call_all(lambda engine: engine.pause())

  async def resume(self) -> None:
    """Ends a pause, a drain or a sleep."""
    self._is_paused = False
    await self._call_all(lambda engine: engine.resume())

  async def drain(self) -> None:
    """Finishes the requests that are being decoded, and pauses; all others wait."""
    self._is_paused = True
    await self._call_all(lambda engine: engine.drain())

  async def sleep(self) -> None:
    """Drains, and frees the memory of the engines' caches until `resume`."""
    self._is_paused = True
    await self._call_all(lambda engine: engine.sleep())

  async def warmup(self) -> None:
    """Compiles every program of every engine."""
    await self._call_all(lambda engine: engine.warmup())

  async def metrics(self) -> dict[str, float]:
    """Returns sums of the engines' counts and rates, and means of times and shares."""
    reports = await self._call_all(lambda engine: engine.metrics())
    totals = {name: float(count) for name, count in self._counts.items()}
    self._counts.clear()
    for name in {name for report in reports for name in report}:
      values = [report[name] for report in reports if name in report]
      is_mean = name.startswith('time/') or name in MEAN_METRICS
      totals[name] = sum(values) / (len(values) if is_mean else 1)
    return totals

  async def _call_all(
    self, call: Callable[[RoutedEngine], MaybeAwaitable[Value]]
  ) -> list[Value]:
    """Calls all engines at once and returns the results of those that are alive."""

    async def call_one(engine: RoutedEngine) -> list[Value]:
      try:
        return [await maybe_await(call(engine))]
      except EngineDeadError:
        return []

    results = await asyncio.gather(*map(call_one, self._engines))
    return [result for if_alive in results for result in if_alive]

  # ---- waiting

  def _notify(self) -> None:
    """Wakes everyone who waits for a change."""
    self._changed.set()
    self._changed = asyncio.Event()

  async def _wait_change(self, timeout: float) -> None:
    """Waits until something changes, `timeout` seconds at most."""
    with contextlib.suppress(TimeoutError):
      async with asyncio.timeout(timeout):
        await self._changed.wait()

  def _background(self, work: Awaitable[object]) -> None:
    """Runs `work` in the background and ignores its errors."""

    async def run() -> None:
      with contextlib.suppress(Exception):
        await work

    task = asyncio.create_task(run())
    self._background_tasks.add(task)
    task.add_done_callback(self._background_tasks.discard)
