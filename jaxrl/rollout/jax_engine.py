"""A continuous-batching generator in JAX, behind the `RolloutEngine` protocol.

Requests wait in line, sit in a slot of the cache while they are decoded together, and
leave when they end; whoever waits takes the slot at the next dispatch. One asyncio
task drives it and lives only while there is work. All device work goes through the
`Dispatcher`, so the event loop is never held.
"""

import asyncio
import collections
import dataclasses
import logging
import time
from collections.abc import Sequence
from typing import Any

import jax
import numpy as np

from jaxrl.dispatch import Dispatcher
from jaxrl.models.exact import Exact
from jaxrl.models.model import Model
from jaxrl.rollout.desk import Desk
from jaxrl.rollout.flights import Flight, Meter, Plan, State, fly, land
from jaxrl.rollout.lanes import Lanes, count_lanes, refuses
from jaxrl.rollout.programs import Programs, Rows
from jaxrl.rollout.slots import Request, SlotTable
from jaxrl.rollout.stopping import stop_index
from jaxrl.types import Params, SamplingParams

log = logging.getLogger(__name__)


class JaxEngine(Desk):
  """Generates tokens for many requests at once.

  A request's tokens and log-probs depend on its prompt, its sampling parameters and
  the weights alone, bit for bit: not on its slot, its neighbours or when it came.
  Weights loaded while it runs take effect at the next dispatch; the keys and values it
  already has stay as the old weights made them, and `Completion.versions` says which
  token came from which.

  tokenizer: needed for stop strings only. max_length: the window, prompt and
  completion together. lanes: threads that decode num_slots / lanes slots each
  (`jaxrl.rollout.lanes`); 0: as many as suit the device and its processors. Bits are
  those of a number of lanes: set it where runs on unlike machines are to be the same.
  decode_steps: tokens a dispatch; weights, aborts and new requests wait for at most one
  dispatch (two when no one waits for a slot).
  prompt_buckets: padded prompt lengths, by default powers of two from 32 to the
  window. exact: log-probs of untruncated draws have the bits that a learner in exact
  mode finds, at the price of speed. router_replay: a completion brings the experts that
  every token took, for the learner to take them too (https://arxiv.org/abs/2510.11370).
  sharding: where weights and cache lie, by default on the first device.
  """

  def __init__(
    self,
    model: Model,
    tokenizer: Any = None,
    *,
    dispatcher: Dispatcher,
    num_slots: int = 64,
    lanes: int = 0,
    max_length: int = 1024,
    decode_steps: int = 8,
    prompt_buckets: Sequence[int] | None = None,
    prefill_tokens: int = 256,
    max_stop_ids: int = 8,
    exact: bool = False,
    router_replay: bool = False,
    sharding: jax.sharding.Sharding | None = None,
  ):
    vocab = model.config.vocab_size
    super().__init__(tokenizer, window=max_length, vocab_size=vocab)
    self._dispatcher = dispatcher
    self._sharding = sharding or jax.sharding.SingleDeviceSharding(jax.devices()[0])
    platform = next(iter(self._sharding.device_set)).platform
    model = dataclasses.replace(model, platform=platform)
    if exact:
      model = dataclasses.replace(model, exact=Exact.for_slots(num_slots))
    if router_replay:
      model = dataclasses.replace(model, router_replay=True)
    devices = self._sharding.num_devices
    lanes = lanes or count_lanes(num_slots, platform, devices, exact)
    if why := refuses(lanes, num_slots, exact=exact, devices=devices):
      raise ValueError(why)
    if lanes > 1:
      log.info('%d slots are decoded in %d lanes', num_slots, lanes)
    self._programs = Programs(
      model,
      sharding=self._sharding,
      num_slots=num_slots // lanes,
      max_length=max_length,
      decode_steps=decode_steps,
      prompt_buckets=prompt_buckets or default_buckets(max_length),
      prefill_tokens=-(-prefill_tokens // lanes),
      max_stop_ids=max_stop_ids,
    )
    self._lanes = Lanes(self._programs, lanes)
    self._weights: tuple[int, Params] | None = None
    self._waiting: collections.deque[Request] = collections.deque()
    self._meter = Meter(num_slots)
    self._paused, self._admits = False, True
    self._begun = 0.0  # when the dispatch at hand was
    self._task: asyncio.Task | None = None
    self._forget()

  @property
  def version(self) -> int | None:
    """The version that the next dispatch serves; None before the first `load`."""
    return self._weights and self._weights[0]

  @property
  def compile_count(self) -> int:
    """Programs compiled so far; constant after `warmup`."""
    return self._programs.compile_count

  @property
  def stalled(self) -> float:
    """Seconds that the dispatch at hand has taken so far; 0 without one."""
    return time.monotonic() - self._begun if self._begun else 0.0

  def metrics(self) -> dict[str, float]:
    """Figures since the last call: tokens, seconds, tokens a second, busy share."""
    return self._meter.report()

  async def warmup(self) -> None:
    """Compiles every program, so that no later request waits for a compiler."""
    weights = self._loaded()[1]
    await self._dispatcher.run(self._programs.warmup, weights)

  async def load(self, version: int, params: Params) -> None:
    """Serves `params` as `version` from the next dispatch on.

    Arrays that lie where the engine wants them are used as they are: the caller must
    not donate them afterwards (`WeightStore` hands out copies).
    """
    placed = await self._dispatcher.run(self._programs.adopt, params)
    self._weights = version, placed

  async def pause(self) -> None:
    """Stops decoding and keeps every request; returns when the device is quiet."""
    self._paused = True
    if self._task is not None and not self._task.done():
      await asyncio.wait({self._task})

  async def drain(self) -> None:
    """Seats no more requests, and pauses once those in slots have ended.

    Whoever waits for a slot waits on, until `resume`.
    """
    self._admits = False
    while running := {r.future for r in self._table.owner if r is not None}:
      await asyncio.wait(running)
    if not self._admits:  # else `resume` came first
      await self.pause()

  async def sleep(self) -> None:
    """Drains, and gives up the cache and its memory, until `resume`."""
    await self.drain()
    if not self._admits:  # else `resume` came first
      self._forget()

  async def resume(self) -> None:
    self._paused, self._admits = False, True
    self._wake()

  def _begin(self, request: Request) -> None:
    self._waiting.append(request)
    self._wake()

  def _refuse(self, prompt: np.ndarray, sampling: SamplingParams) -> str:
    longest, most = max(self._programs.buckets), self._programs.max_stop_ids
    if len(prompt) - 1 > longest:
      return (
        f'its prompt of {len(prompt)} tokens exceeds the largest prompt bucket, '
        f'{longest}'
      )
    if len(sampling.stop_token_ids) > most:
      return (
        f'{len(sampling.stop_token_ids)} stop token ids are more than the '
        f'max_stop_ids={most} the engine was built with'
      )
    return ''

  def _loaded(self) -> tuple[int, Params]:
    if self._weights is None:
      raise RuntimeError('the engine has no weights yet: call load(version, params)')
    return self._weights

  def _wake(self) -> None:
    idle = self._task is None or self._task.done()
    if self._requests and idle and not self._paused:
      self._task = asyncio.get_running_loop().create_task(self._run())

  async def _run(self) -> None:
    """Dispatches until there is nothing to do; an error goes to every request."""
    try:
      while self._requests and not (self._paused and self._flight is None):
        if self._paused:
          flight, self._flight = self._flight, None
          self._absorb([await self._dispatcher.run(land, flight, self._meter)])
        else:
          await self._turn()
      self._flight = None  # nobody waits for it
    except BaseException as error:
      stranded = list(self._requests.values())
      self._requests.clear()
      self._waiting.clear()
      self._forget()
      for request in stranded:
        request.fail(error)
      if not isinstance(error, Exception):
        raise

  def _forget(self) -> None:
    """Drops slots and device state: the next turn starts from an empty cache."""
    self._table = SlotTable(self._lanes.num_slots, self._lanes.count)
    self._state: State | None = None
    self._flight: Flight | None = None
    self._halted: set[int] = set()

  async def _turn(self) -> None:
    """One dispatch. With no one in line it is not waited for: its results are read
    while the next one runs.
    """
    plan = self._plan()
    self._begun = time.monotonic()
    try:
      departed = self._dispatcher.run(self._depart, plan, self._flight)
      self._flight, landed = await departed
    finally:
      self._begun = 0.0
    self._absorb(landed)

  def _plan(self) -> Plan:
    version, params = self._loaded()
    seats = self._lanes.num_slots - self._table.busy if self._admits else 0
    chosen = [self._waiting.popleft() for _ in range(min(seats, len(self._waiting)))]
    admission = self._table.admit(chosen, version)
    rows = where = None
    if admission.seats or self._halted:
      rows = Rows.empty(self._lanes.num_slots, self._programs.max_stop_ids)
      where = np.zeros(self._lanes.num_slots, bool)
      where[list(self._halted)] = True
      for slot, request in admission.seats:
        where[slot] = True
        rows.seat(slot, request)
      self._halted.clear()
    self._meter.shared(admission)
    owners = list(self._table.owner)
    return Plan(version, params, admission, owners, where, rows, bool(self._waiting))

  def _depart(self, plan: Plan, before: Flight | None) -> tuple[Flight | None, list]:
    """On the device thread: start this dispatch, then read what has arrived."""
    if self._state is None:
      self._state = self._lanes.fresh()
    self._state, flight = fly(self._lanes, self._state, plan, self._meter)
    landed = [land(before, self._meter)] if before is not None else []
    if plan.wait:
      return None, [*landed, land(flight, self._meter)]
    return flight, landed

  def _absorb(self, landed: list[Flight]) -> None:
    for flight in landed:
      for slot, request in enumerate(flight.owners):
        if request is not None and not request.future.done():
          self._deliver(slot, request, flight)

  def _deliver(self, slot: int, request: Request, flight: Flight) -> None:
    """Gives `request` its new tokens and ends it where it must end."""
    column = flight.tokens[:, slot]
    count = int(np.sum(column >= 0))
    logprobs = flight.logprobs[:count, slot]
    if not np.isfinite(logprobs).all():
      # The cache may hold such numbers too: the whole engine starts afresh.
      raise FloatingPointError(
        f'request {request.name!r}: logits are not finite at token '
        f'{len(request.tokens)}, weights version {flight.version}'
      )
    tokens = column[:count].tolist()
    request.extend(tokens, logprobs.tolist(), flight.version)
    if flight.routed is not None:
      request.routed.append(flight.routed[:count, slot])
    rules = request.sampling
    cut = stop_index(self._tokenizer, request.written, count, rules.stop)
    if cut is not None:
      request.cut(cut - rules.first)
      self._end(request, 'stop', slot)
    elif tokens and tokens[-1] in rules.stop_token_ids:
      self._end(request, 'stop', slot)
    elif len(request.tokens) >= request.budget:
      self._end(request, 'length', slot)

  def _end(self, request: Request, reason: str, slot: int | None = None) -> None:
    self._release(request, self._table.find(request) if slot is None else slot)
    request.finish(reason)

  def _release(self, request: Request, slot: int | None) -> None:
    """Takes the request out of the line or its slot; the device row goes idle."""
    self._requests.pop(request.name, None)
    if slot is None:
      self._waiting.remove(request)
    else:
      self._table.free(slot)
      self._halted.add(slot)


def default_buckets(max_length: int) -> list[int]:
  """Powers of two from 32, and the window itself."""
  sizes = [32 << i for i in range(max_length.bit_length()) if 32 << i < max_length]
  return [*sizes, max_length]
