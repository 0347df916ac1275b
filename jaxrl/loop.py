"""The training loop moves data from tasks to weights, step by step.

  GlobalDataset → EnvManager → GroupQueue → Sampler → Learner → WeightStore ⟲

- GlobalDataset (jaxrl/data/dataset.py) hands out tasks.
- EnvManager (jaxrl/rollout/env_manager.py) plays episodes with a RolloutEngine.
- GroupQueue (jaxrl/rollout/queue/group_queue.py) collects samples into groups.
- Sampler (jaxrl/data/samplers/) takes the groups that a step learns from.
- Learner (jaxrl/training/learner.py) updates the parameters from them.
- WeightStore (jaxrl/rollout/weights/weight_store.py) publishes them to the engines.

Environment workers run beside the loop. Synchronous training is asynchronous training
with `async_ratio=0`: there is one loop.
"""

import asyncio
import contextlib
import dataclasses
from collections.abc import Awaitable, Callable, Iterable
from typing import Protocol

from jaxrl.rollout.queue.group_pipeline import StopRequested
from jaxrl.types import Group, Params, Value

Metrics = dict[str, float]
Workers = list[asyncio.Task[int]]  # the tasks that play episodes
DRAIN_TIMEOUT_S = 10.0  # for groups to arrive after the last worker has ended
STOP_POLL_S = 0.2  # until work that takes long notices that the run should end


class TrainsOnGroups(Protocol):
  """What the loop needs of a learner.

  Attributes:
    step: The number of updates so far.
  """

  step: int

  @property
  def params(self) -> Params:
    """Returns the newest parameters."""
    ...

  async def update(self, groups: list[Group]) -> Metrics:
    """Learns from groups, increments the step, and returns metrics."""
    ...


class SamplesGroups(Protocol):
  """What the loop needs of a sampler."""

  async def next(self, step: int) -> list[Group]:
    """Returns the groups that a step learns from."""
    ...


@dataclasses.dataclass(frozen=True)
class Hooks:
  """What surrounds a step, in the order of the loop.

  Attributes:
    publish: `publish(step)` hands the learner's weights to the engines if their sync
      policy says so, and always before an evaluation.
    advance: `advance(step)` tells the group queue which step is being collected.
    evaluate: `evaluate(step, last)` returns metrics of an evaluation if one is due,
      otherwise {}.
    record: `record(step, metrics, groups)` writes what happened.
    save: `save(step, last)` writes a checkpoint if one is due.
    stop: `stop()` returns whether the run should end early.
  """

  publish: Callable[[int], Awaitable[None]]
  advance: Callable[[int], Awaitable[None]]
  evaluate: Callable[[int, bool], Awaitable[Metrics]]
  record: Callable[[int, Metrics, list[Group]], None]
  save: Callable[[int, bool], Awaitable[None]]
  stop: Callable[[], bool]


async def train(
  learner: TrainsOnGroups,
  sampler: SamplesGroups,
  hooks: Hooks,
  *,
  num_steps: int,
  workers: Iterable[asyncio.Task[int]] = (),
) -> bool:
  """Trains from `learner.step` to `num_steps`.

  An error of any worker ends the run at once, so that nothing waits for groups that
  nobody samples. A run that is asked to stop ends after the current step and a
  checkpoint.

  Args:
    learner: Learns from groups.
    sampler: Takes groups from the queue.
    hooks: What surrounds a step.
    num_steps: The step to train to.
    workers: The tasks that play episodes.

  Returns:
    True unless it was stopped early.
  """
  workers = list(workers)

  async def publish_and_evaluate(step: int, last: bool) -> Metrics:
    await await_or_fail(hooks.publish(step), workers)
    return await await_or_fail(hooks.evaluate(step, last), workers)

  for step in range(learner.step, num_steps):
    eval_metrics = {} if hooks.stop() else await publish_and_evaluate(step, False)
    if hooks.stop():
      await hooks.save(step, True)
      return False
    await await_or_fail(hooks.advance(step), workers)
    groups = await await_groups(sampler.next(step), workers)
    metrics = await learner.update(groups)
    hooks.record(step, {**metrics, **eval_metrics}, groups)
    await hooks.save(step + 1, False)
  if hooks.stop():
    await hooks.save(num_steps, True)
    return False
  eval_metrics = await publish_and_evaluate(num_steps, True)
  if eval_metrics:
    hooks.record(num_steps, eval_metrics, [])
  await hooks.save(num_steps, True)
  return True


async def await_or_fail(awaitable: Awaitable[Value], workers: Workers) -> Value:
  """Awaits something, but raises the error of any worker that fails.

  Args:
    awaitable: What to await; it is cancelled if a worker fails.
    workers: The tasks that play episodes.

  Returns:
    The result of `awaitable`.
  """
  task = asyncio.ensure_future(awaitable)
  try:
    while not task.done():
      running = {worker for worker in workers if not worker.done()}
      for worker in workers:
        if worker not in running:
          worker.result()
      await asyncio.wait({task, *running}, return_when='FIRST_COMPLETED')
    return task.result()
  finally:
    task.cancel()


async def await_unless_stopped(
  awaitable: Awaitable[Value], stop: Callable[[], bool]
) -> Value:
  """Awaits something that may take minutes, unless the user asks to stop.

  Args:
    awaitable: What to await; it is cancelled once `stop()`.
    stop: Returns whether the run should end early.

  Returns:
    The result of `awaitable`.

  Raises:
    StopRequested: The user asked to stop before its end.
  """
  task = asyncio.ensure_future(awaitable)
  try:
    while not task.done():
      await asyncio.wait({task}, timeout=STOP_POLL_S)
      if stop() and not task.done():
        raise StopRequested
    return task.result()
  finally:
    if not task.done():  # awaiting it again would cut an error's traceback off
      task.cancel()
      with contextlib.suppress(asyncio.CancelledError, Exception):
        await task


async def await_groups(groups: Awaitable[list[Group]], workers: Workers) -> list[Group]:
  """Awaits the groups of a step.

  Args:
    groups: What the sampler returns.
    workers: The tasks that play episodes.

  Returns:
    The groups.

  Raises:
    RuntimeError: All workers have ended, and no groups arrive.
  """
  task = asyncio.ensure_future(groups)
  all_ended = asyncio.ensure_future(_wait_all_ended(workers))
  try:
    await await_or_fail(
      asyncio.wait({task, all_ended}, return_when='FIRST_COMPLETED'), workers
    )
    if not task.done():  # the last groups may still be on their way
      await asyncio.wait({task}, timeout=DRAIN_TIMEOUT_S)
    if not task.done() or not task.result():
      raise RuntimeError(
        'there are no groups to learn from: every environment worker has ended, for '
        'the data set or the environment has no more tasks'
      )
    return task.result()
  finally:
    task.cancel()
    all_ended.cancel()


async def _wait_all_ended(workers: Workers) -> None:
  """Returns when all workers have ended; never if there are none."""
  if not workers:
    await asyncio.Event().wait()
  await asyncio.wait(workers)
