"""Plays a data set to its end, or so many tasks, and keeps the trajectories."""

import asyncio
import dataclasses
import itertools
import math
from collections.abc import Callable, Collection

import numpy as np

from jaxrl import group_stats
from jaxrl.data.trajectory_writers.dump_columns import DumpColumns
from jaxrl.data.trajectory_writers.dump_journal import DumpJournal
from jaxrl.device_thread import DeviceThread
from jaxrl.loop import await_unless_stopped
from jaxrl.model_loading import LoadedModel
from jaxrl.options import Keywords
from jaxrl.rollout.engine.actor_proxy import maybe_await
from jaxrl.rollout.queue.group_pipeline import StopRequested
from jaxrl.rollout.queue.group_queue import GroupQueue, QueueOptions
from jaxrl.types import Group, StateDict
from launch.rollouts.env_datasets import Datasets, RunDatasets
from launch.rollouts.rollout_scheduler import RolloutScheduler
from launch.runtime.runtime_base import Runtime
from launch.settings.run_settings import RunSettings

GroupCallback = Callable[[Group], None]


class DatasetRollout(RolloutScheduler):
  """Plays each task once; groups stay complete, and none is filtered or shaped.

  Attributes:
    mode: 'train' or 'val', which tasks it plays.
  """

  def __init__(
    self,
    settings: RunSettings,
    policy: LoadedModel,
    runtime: Runtime,
    device_thread: DeviceThread,
    datasets: Datasets,
    *,
    mode: str,
  ):
    """Makes the engines.

    `settings` have an evaluation set for each tag, of its name, that says what is
    played; `datasets` are in traversal, by tag.
    """
    self.mode = mode
    self._sets = settings.evaluations
    (group_size,) = {evaluation.group_size for evaluation in self._sets.values()}
    algorithm = dataclasses.replace(settings.algorithm, group_size=group_size)
    settings = dataclasses.replace(settings, algorithm=algorithm)
    datasets_of_run = RunDatasets(datasets, datasets, {})
    super().__init__(settings, policy, runtime, device_thread, datasets_of_run)

  def _manager_options(self, tag: str, **changes: object) -> Keywords:
    temperature = self._sets[tag].temperature
    return super()._manager_options(tag, temperature=temperature, **changes)

  def _replay_options(self, tag: str) -> Keywords:
    return {}  # each task is played once

  def _num_tasks(self, tag: str) -> int:
    """Returns the most tasks to play; 0 for all rows of the data set."""
    return max(self._sets[tag].num_tasks, 0)

  def _num_parallel_groups(self, tag: str) -> int:
    return max(
      1, math.ceil(self._num_busy_episodes() / (len(self.tags) * self._group_size))
    )

  def _queue(self, tag: str) -> GroupQueue:
    return self._runtime.spawn(GroupQueue, None, None, **self._queue_options(tag))

  def _queue_options(self, tag: str) -> Keywords:
    rollout = self._settings.rollout
    return {
      'num_groups': -1,
      'group_size': self._group_size,
      'num_env_groups': self._num_parallel_groups(tag),
      'keep_failed': True,
      'options': QueueOptions(
        max_retries=rollout.max_retries, episode_timeout=rollout.episode_timeout
      ),
      'total': self._num_tasks(tag),
      'in_order': False,
      'failures': self._failures,
    }

  async def sizes(self) -> dict[str, int]:
    """Counts the tasks of each tag."""
    sizes = {}
    for tag in self.tags:
      data, limit = self.datasets[tag], self._num_tasks(tag)
      size = limit if data is None else await maybe_await(data.get_size())
      sizes[tag] = min(size, limit or size)
    return sizes

  async def play(
    self,
    ledger: DumpJournal,
    columns: DumpColumns,
    *,
    model_name: str,
    on_group: GroupCallback,
    stop: Callable[[], bool],
  ) -> bool:
    """Plays every task that the ledger does not hold yet.

    Args:
      ledger: Keeps what was played.
      columns: Turns groups into rows.
      model_name: Name of the model in these rows.
      on_group: Called with each group once it is kept.
      stop: Returns True once the user asked to end.

    Returns:
      False if it was stopped before the end.
    """
    lock = asyncio.Lock()  # of the ledger

    async def collect(tag: str, queue: GroupQueue) -> None:
      base = self._base_seed(tag)
      while groups := await maybe_await(queue.get_batch(1)):
        await self._log_failures(queue)
        for group in groups:
          number = complete_group(group, tag, base)
          rows = columns.rows(group, number, model_name=model_name, mode=self.mode)
          async with lock:
            ledger.add(tag, number, rows)
            await asyncio.to_thread(ledger.flush)
          on_group(group)

    jobs = []
    for tag in self.tags:
      queue = self.queues[tag] = self._queue(tag)
      played, ahead = ledger.played_items(tag), self._num_parallel_groups(tag)
      await maybe_await(
        queue.load_state_dict(
          remaining_tasks_state(played, ahead, self._num_tasks(tag))
        )
      )
      data = {'seed': self._base_seed(tag)}
      jobs += [
        self._runtime.run_worker(work, data) for work in self._workers(tag, queue)
      ]
      jobs.append(collect(tag, queue))
    try:
      await await_unless_stopped(asyncio.gather(*jobs), stop)
    except StopRequested:
      return False
    await asyncio.to_thread(ledger.flush, all_played=True)
    return True


def remaining_tasks_state(played: Collection[int], ahead: int, total: int) -> StateDict:
  """Returns the state of a queue that has all tasks but those `played` to come.

  Args:
    played: Numbers of the tasks that were played before.
    ahead: Groups that play at once.
    total: Number of tasks; 0 where the data set says it.
  """
  top = max(played, default=-1) + 1
  next_numbers = [
    next(n for n in itertools.count(top) if n % ahead == g) for g in range(ahead)
  ]
  return {
    'step': 0,
    'pending': [n for n in range(min(top, total or top)) if n not in played],
    'numbers': {'next': next_numbers, 'end': total or None},
    'results': [],
  }


def complete_group(group: Group, tag: str, base: int) -> int:
  """Completes a group for dumping.

  Names the rows that stand for samples that never came back, and gives failed samples
  the score 0.

  Args:
    group: The group.
    tag: Its environment tag.
    base: Seed of the first task.

  Returns:
    The task's number.
  """
  number = group[0].env_group + group[0].episode_id
  for rows in group_stats.rows_by_sample(group).values():
    for row in rows:
      row.tag, row.episode_seed = tag, base + number
      if any(r.failed for r in rows):
        row.rewards = np.zeros_like(row.rewards)
  return number
