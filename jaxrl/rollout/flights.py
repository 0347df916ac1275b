"""A decode dispatch from departure to landing: what runs on the device thread."""

import dataclasses
import time
from typing import Any

import jax
import numpy as np

from jaxrl.models.cache import Cache
from jaxrl.rollout.lanes import Lanes
from jaxrl.rollout.programs import Rows
from jaxrl.rollout.slots import Admission, Request
from jaxrl.types import Params

State = tuple[list[Cache], list[Rows]]  # by lane


@dataclasses.dataclass(frozen=True)
class Plan:
  """One dispatch, as the event loop decided it.

  where `[S]` bool and rows: the slots to overwrite, or None. wait: someone is in line
  for a slot, so the results are needed before the next dispatch.
  """

  version: int
  params: Params
  admission: Admission
  owners: list[Request | None]
  where: np.ndarray | None
  rows: Rows | None
  wait: bool


@dataclasses.dataclass
class Flight:
  """A dispatch on its way, or landed: then tokens and logprobs are numpy `[D, S]`.

  routed: the experts taken, then `[D, S, L, k]` or None. These three are lists by lane
  on the way. seated: requests that began with it, with the experts of the tokens in
  their slot, `[C, L, k]`.
  """

  owners: list[Request | None]
  version: int
  tokens: Any
  logprobs: Any
  departed: float
  routed: Any = None
  seated: list[tuple[Request, Any]] = dataclasses.field(default_factory=list)


class Meter:
  """Adds up what the device did, until `report` starts afresh."""

  def __init__(self, num_slots: int):
    self._slots = num_slots
    self._landed = 0.0
    self._clear()

  def _clear(self) -> None:
    self.prefill = self.decode = 0.0
    self.generated = self.steps = self.prefilled = self.reused = 0

  def shared(self, admission: Admission) -> None:
    prompts = sum(len(request.prompt) for _, request in admission.seats)
    computed = sum(len(prompt) for _, prompt in admission.prefill)
    self.prefilled += computed
    self.reused += prompts - computed

  def landing(self, flight: Flight) -> None:
    now = time.perf_counter()
    self.decode += now - max(flight.departed, self._landed)
    self._landed = now
    busy = flight.tokens >= 0
    self.generated += int(busy.sum())
    self.steps += int(busy.any(axis=1).sum())

  def report(self) -> dict[str, float]:
    seconds = self.prefill + self.decode
    figures = {
      'tokens/generated': self.generated,
      'tokens/prefilled': self.prefilled,
      'tokens/prompt_reused': self.reused,
      'tokens/per_second': self.generated / seconds if seconds else 0.0,
      'time/prefill': self.prefill,
      'time/decode': self.decode,
      'rollout/decode_steps': self.steps,
      'rollout/busy_slots': self.generated / max(self.steps * self._slots, 1),
    }
    self._clear()
    return {name: float(value) for name, value in figures.items()}


def fly(lanes: Lanes, state: State, plan: Plan, meter: Meter) -> tuple[State, Flight]:
  """Seats the admitted requests and starts decoding; does not wait for the end."""
  caches, rows = state
  if plan.admission.prefill or plan.admission.copies:
    jax.block_until_ready(caches)
    start = time.perf_counter()
    caches = lanes.prefill(plan.params, caches, plan.admission.prefill)
    caches = lanes.copy(caches, plan.admission.copies)
    jax.block_until_ready(caches)
    meter.prefill += time.perf_counter() - start
  if plan.where is not None and plan.rows is not None:
    rows = lanes.place(rows, plan.where, plan.rows)
  seats = [(own, lanes.experts(caches, slot)) for slot, own in plan.admission.seats]
  departed = time.perf_counter()
  caches, rows, tokens, logprobs, routed = lanes.decode(plan.params, caches, rows)
  lanes.programs.tell_late(f'version {plan.version}')
  flight = Flight(plan.owners, plan.version, tokens, logprobs, departed, routed)
  flight.seated = [] if routed[0] is None else seats
  return (caches, rows), flight


def land(flight: Flight, meter: Meter) -> Flight:
  """Waits for the dispatch and brings its tokens to the host."""
  flight.tokens = np.concatenate(flight.tokens, axis=1)
  flight.logprobs = np.concatenate(flight.logprobs, axis=1)
  none = flight.routed[0] is None
  flight.routed = None if none else np.concatenate(flight.routed, axis=1)
  for request, routed in flight.seated:
    request.routed = [np.asarray(routed)[: len(request.prompt) - 1]]
  meter.landing(flight)
  return flight
