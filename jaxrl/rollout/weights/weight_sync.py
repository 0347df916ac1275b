"""Weight synchronization decides when engines get new weights: `weight_sync.policy`.

Every policy hands over weights at the start of a step at the earliest, on the one loop.
Without `drain`, requests keep running and go on with the new weights, so a sequence may
contain tokens of two versions. With `drain`, engines first finish their requests.
"""

import asyncio
import contextlib
import math
from collections.abc import Awaitable, Callable
from typing import NamedTuple, Protocol

from jaxrl import spans
from jaxrl.component_table import ComponentTable
from jaxrl.rollout.engine.actor_proxy import maybe_await
from jaxrl.rollout.weights.weight_store import WeightStore
from jaxrl.types import Params

GetParams = Callable[[], Awaitable[Params]]


class SyncPolicy(NamedTuple):
  """When engines get new weights, and what waits for it.

  Attributes:
    interval: Number of steps between two versions; if `rollout_driven`, the number of
      steps' worth of groups.
    rollout_driven: Sync after the rollout side has finished `interval` steps' worth of
      groups, instead of after `interval` steps.
    wait_for: The version that all engines must have before a step goes on: 'current',
      'previous' or 'none'.
    drain: Whether engines finish their requests before they take new weights.
  """

  interval: int
  rollout_driven: bool
  wait_for: str
  drain: bool

  def max_lag(self, ahead: float) -> int | None:
    """Returns the most steps that engines' weights are behind the learner's.

    Args:
      ahead: Number of steps that rollouts may run ahead, `rollout.async_ratio`.

    Returns:
      The number of steps; None if nothing bounds it.
    """
    if self.wait_for == 'none':
      return None
    if self.rollout_driven:
      # At most (1 + ahead) steps' worth of groups are finished with one version; that
      # many steps later and `interval` more, the rollout side has finished its share.
      return self.interval + math.ceil(ahead)
    if self.wait_for == 'current':
      return self.interval - 1
    return 2 * self.interval - 1


def fixed(*, interval: int = 1, drain: bool = False) -> SyncPolicy:
  """Syncs every `interval` steps; the step waits until all engines have the weights.

  Args:
    interval: Steps between two versions of the weights.
    drain: Whether requests that run are finished first.
  """
  return SyncPolicy(interval, rollout_driven=False, wait_for='current', drain=drain)


def explorer(*, interval: int = 1, drain: bool = False) -> SyncPolicy:
  """Syncs when the rollout side has finished `interval` steps' worth of groups.

  Args:
    interval: Steps whose groups are finished between two versions.
    drain: Whether requests that run are finished first.
  """
  return SyncPolicy(interval, rollout_driven=True, wait_for='current', drain=drain)


def trainer(*, interval: int = 1) -> SyncPolicy:
  """Pushes every `interval` steps without waiting; engines load while they generate.

  The trainer waits only if the previous push has not arrived. This costs one copy of
  the weights.

  Args:
    interval: Steps between two versions of the weights.
  """
  return SyncPolicy(interval, rollout_driven=False, wait_for='previous', drain=False)


def asynchronous(*, interval: int = 1) -> SyncPolicy:
  """Pushes like `trainer`, but never waits: the newest is pushed, others are skipped.

  Nothing bounds how far engines fall behind, so `rollout.staleness_policy` must.

  Args:
    interval: Steps between two versions of the weights.
  """
  return SyncPolicy(interval, rollout_driven=False, wait_for='none', drain=False)


SYNC_POLICIES: ComponentTable[Callable[..., SyncPolicy]] = ComponentTable(
  'style',
  'weight_sync.policy',
  {
    'fixed': fixed,
    'explorer': explorer,
    'trainer': trainer,
    'asynchronous': asynchronous,
  },
)


class DrainableEngines(Protocol):
  """All engines of a run as one object, such as an `EngineRouter`."""

  async def drain(self) -> None:
    """Returns when no request runs; new requests wait for `resume`."""
    ...

  async def resume(self) -> None:
    """Lets requests run again."""
    ...


class WeightSyncer:
  """Hands the learner's weights to the engines according to a policy.

  Args:
    policy: When to do so.
    store: Where versions are published.
    engines: All engines; only used by policies with `drain`.
    copy: Makes a copy of parameters that the learner will not donate.
    finished_groups: Returns the number of groups finished since the run began.
    num_groups: Groups of a step.

  Attributes:
    num_groups: Groups of a step; may be changed before training starts.
    version: The version that all engines have; None before the first.
  """

  def __init__(
    self,
    policy: SyncPolicy,
    store: WeightStore,
    engines: DrainableEngines,
    *,
    copy: Callable[[Params], Awaitable[Params]],
    finished_groups: Callable[[], Awaitable[float]],
    num_groups: int,
  ):
    self.num_groups = num_groups
    self.version: int | None = None
    self._policy = policy
    self._store = store
    self._engines = engines
    self._copy = copy
    self._finished_groups = finished_groups
    self._pending: tuple[int, Params] | None = None  # to be pushed next
    self._push_task: asyncio.Task | None = None
    self._groups_at_sync = 0.0  # groups finished when the engines got their weights
    self._last_step = -1
    self._last_synced_step = -1

  async def maybe_sync(self, step: int, get_params: GetParams) -> None:
    """Hands the learner's weights to the engines before a step, if it is time.

    Call it before every step that uses rollouts. After steps that did not, it waits for
    the weights whatever the policy: rollouts made meanwhile would be older than the
    policy allows by that number of steps.

    Args:
      step: The step that is about to begin.
      get_params: Returns the learner's weights; only called if they are needed.
    """
    self._raise_push_error()
    steps_skipped = step > self._last_step + 1
    self._last_step = step
    if self.version is None:  # no rollout can start before
      await self.sync_now(step, get_params)
    elif not await self._is_due(step, steps_skipped):
      return
    elif steps_skipped or self._policy.wait_for == 'current':
      await self.sync_now(step, get_params)
    else:
      if self._policy.wait_for == 'previous':
        await self._wait_for_push()
      self._pending = None  # released before another copy is made
      self._pending = step, await self._copy(await get_params())
      self._last_synced_step = step
      self._raise_push_error()
      if self._push_task is None:
        self._push_task = asyncio.ensure_future(self._push())

  async def sync_now(self, step: int, get_params: GetParams) -> None:
    """Returns when every engine serves the weights of `step`.

    No engine gets another version until `maybe_sync` is called, so an evaluation that
    follows uses a single version.

    Args:
      step: The step that the weights belong to.
      get_params: Returns the learner's weights; only called if they are needed.
    """
    self._last_step = self._last_synced_step = step
    self._pending = None  # older weights need not be sent any more
    await self._wait_for_push()
    if self.version != step:
      await self._publish(step, await get_params())

  async def close(self) -> None:
    """Cancels a push in progress."""
    if self._push_task is not None:
      self._push_task.cancel()
      with contextlib.suppress(BaseException):
        await self._push_task

  def metrics(self, step: int) -> dict[str, float]:
    """Returns sync/lag, the number of steps the engines are behind `step`."""
    return {} if self.version is None else {'sync/lag': float(step - self.version)}

  async def _is_due(self, step: int, steps_skipped: bool) -> bool:
    interval = self._policy.interval
    if self._policy.rollout_driven:
      num_finished = await self._finished_groups() - self._groups_at_sync
      return steps_skipped or num_finished >= interval * self.num_groups
    # Not step % interval: the step where it is 0 may not have used rollouts.
    return step // interval > self._last_synced_step // interval

  async def _publish(self, step: int, params: Params) -> None:
    if self._policy.drain and self.version is not None:
      await maybe_await(self._engines.drain())
      try:
        await self._send(step, params)
      finally:
        await maybe_await(self._engines.resume())
    else:
      await self._send(step, params)
    self.version = step
    if self._policy.rollout_driven:
      self._groups_at_sync = await self._finished_groups()

  async def _send(self, step: int, params: Params) -> None:
    with spans.span('weights', 'versions', 'send', detail=f'version {step}'):
      await self._store.publish(step, params)

  async def _push(self) -> None:
    while self._pending is not None:
      (step, params), self._pending = self._pending, None
      await self._send(step, params)
      self.version = step

  async def _wait_for_push(self) -> None:
    if self._push_task is not None:
      await asyncio.wait({self._push_task})
      self._raise_push_error()

  def _raise_push_error(self) -> None:
    """Drops a push that has ended, and raises its error if it failed."""
    if self._push_task is not None and self._push_task.done():
      finished, self._push_task = self._push_task, None
      finished.result()
