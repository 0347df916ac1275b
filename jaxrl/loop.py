"""The main loop: publish, collect, learn, report. Synchronous is async_ratio = 0."""

import asyncio
import dataclasses
from collections.abc import Awaitable, Callable, Iterable
from typing import Any, Protocol

from jaxrl.types import Group

Metrics = dict[str, float]


class Learner(Protocol):
  step: int

  @property
  def params(self) -> Any: ...

  async def update(self, groups: list[Group]) -> Metrics: ...


class Sampler(Protocol):
  async def next(self, step: int) -> list[Group]: ...


@dataclasses.dataclass(frozen=True)
class Hooks:
  """What surrounds a step; each is awaited or called in the order of the loop.

  publish(step): hands the learner's weights to every engine.
  advance(step): tells the queue of groups which step is being collected.
  evaluate(step, last): metrics of an evaluation when one is due, else {}.
  record(step, metrics, groups): writes what happened.
  save(step, last): checkpoints when due. stop(): True when asked to end early.
  """

  publish: Callable[[int], Awaitable[None]]
  advance: Callable[[int], Awaitable[None]]
  evaluate: Callable[[int, bool], Awaitable[Metrics]]
  record: Callable[[int, Metrics, list[Group]], None]
  save: Callable[[int, bool], Awaitable[None]]
  stop: Callable[[], bool]


async def train(
  learner: Learner,
  sampler: Sampler,
  hooks: Hooks,
  *,
  num_steps: int,
  workers: Iterable[asyncio.Task] = (),
) -> bool:
  """Trains from `learner.step` to `num_steps`; True unless stopped early.

  `workers` are the tasks that play episodes; the error of any of them ends the
  run at once, so that nothing waits for groups that no one plays.
  """
  workers = list(workers)
  for step in range(learner.step, num_steps):
    await hooks.publish(step)
    evaluation = await guarded(hooks.evaluate(step, False), workers)
    await hooks.advance(step)
    groups = await guarded(sampler.next(step), workers)
    metrics = await learner.update(groups)
    hooks.record(step, {**metrics, **evaluation}, groups)
    stopped = hooks.stop()
    await hooks.save(step + 1, stopped)
    if stopped:
      return False
  await hooks.publish(num_steps)
  evaluation = await guarded(hooks.evaluate(num_steps, True), workers)
  if evaluation:
    hooks.record(num_steps, evaluation, [])
  await hooks.save(num_steps, True)
  return True


async def guarded(work: Awaitable[Any], workers: list[asyncio.Task]) -> Any:
  """Awaits `work`, but raises the error of any worker that dies meanwhile."""
  task = asyncio.ensure_future(work)
  try:
    while not task.done():
      alive = {worker for worker in workers if not worker.done()}
      done, _ = await asyncio.wait({task, *alive}, return_when='FIRST_COMPLETED')
      for worker in done - {task}:
        worker.result()
      if not alive and not task.done() and workers:
        await asyncio.wait({task}, timeout=60)
        if not task.done():
          raise RuntimeError(
            'every environment worker has ended, yet groups are still awaited: '
            'the dataset is traversed or too small for batch.num_groups'
          )
    return task.result()
  finally:
    if not task.done():
      task.cancel()
