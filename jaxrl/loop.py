"""The main loop: publish, collect, learn, report. Synchronous is async_ratio = 0."""

import asyncio
import dataclasses
from collections.abc import Awaitable, Callable, Iterable
from typing import Any, Protocol

from jaxrl.types import Group

Metrics = dict[str, float]
GRACE = 10.0  # seconds for groups to arrive after the last worker has ended


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

  publish(step): hands the learner's weights to the engines when their style of sync
  says so, and always before an evaluation.
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
  run at once, so that nothing waits for groups that no one plays. Who asks to stop
  waits for the step at hand at most, and for a checkpoint.
  """
  workers = list(workers)

  async def evaluation(step: int, last: bool) -> Metrics:
    await guarded(hooks.publish(step), workers)
    return await guarded(hooks.evaluate(step, last), workers)

  for step in range(learner.step, num_steps):
    evaluated = {} if hooks.stop() else await evaluation(step, False)
    if hooks.stop():
      await hooks.save(step, True)
      return False
    await guarded(hooks.advance(step), workers)
    groups = await played(sampler.next(step), workers)
    metrics = await learner.update(groups)
    hooks.record(step, {**metrics, **evaluated}, groups)
    await hooks.save(step + 1, False)
  if hooks.stop():
    await hooks.save(num_steps, True)
    return False
  evaluated = await evaluation(num_steps, True)
  if evaluated:
    hooks.record(num_steps, evaluated, [])
  await hooks.save(num_steps, True)
  return True


async def guarded(work: Awaitable[Any], workers: list[asyncio.Task]) -> Any:
  """Awaits `work`, but raises the error of any worker that dies meanwhile or has."""
  task = asyncio.ensure_future(work)
  try:
    while not task.done():
      alive = {worker for worker in workers if not worker.done()}
      for worker in workers:
        if worker not in alive:
          worker.result()
      await asyncio.wait({task, *alive}, return_when='FIRST_COMPLETED')
    return task.result()
  finally:
    task.cancel()


async def played(groups: Awaitable[list[Group]], workers: list[asyncio.Task]) -> Any:
  """Awaits a step's groups. Raises RuntimeError when no one is left to play them."""
  task = asyncio.ensure_future(groups)
  ended = asyncio.ensure_future(_ended(workers))
  try:
    await guarded(asyncio.wait({task, ended}, return_when='FIRST_COMPLETED'), workers)
    if not task.done():  # the last groups may still be on their way
      await asyncio.wait({task}, timeout=GRACE)
    if not task.done() or not task.result():
      raise RuntimeError(
        'there are no groups to learn from: every environment worker has ended, for '
        'the data set or the environment has no more tasks'
      )
    return task.result()
  finally:
    task.cancel()
    ended.cancel()


async def _ended(workers: list[asyncio.Task]) -> None:
  """Returns when all workers have ended; without any, never."""
  if not workers:
    await asyncio.Event().wait()
  await asyncio.wait(workers)
