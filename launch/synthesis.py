"""Plays a data set to its end, or so many tasks, and keeps the trajectories."""

import asyncio
import contextlib
import dataclasses
import itertools
import math
from collections.abc import Callable, Collection, Mapping
from typing import Any

import numpy as np

from jaxrl.config import Config
from jaxrl.data.seeds import base_seed
from jaxrl.data.sinks.columns import Columns
from jaxrl.data.sinks.ledger import Ledger
from jaxrl.dispatch import Dispatcher
from jaxrl.envs.base import at_split, core
from jaxrl.rollout import members
from jaxrl.rollout.group_queue import GroupQueue
from jaxrl.rollout.handles import settle
from jaxrl.signature import ConfigError
from jaxrl.training.policy import Policy
from jaxrl.types import Algorithm, Group
from launch.datasets import Datasets
from launch.rollouts import Rollouts
from launch.spawn import Host

MODES = ('train', 'val')
Told = Callable[[Group], None]


def prepare(config: Config, *, mode: str, num_tasks: int, group_size: int) -> None:
  """Changes a training config into one of what is to be played.

  mode: 'train' plays the rows of dataset.path as training samples; 'val' those that
  evaluations play, at their temperature. num_tasks: −1 plays them all. group_size:
  attempts at each. What was asked for is kept as `config.synthesis`. Raises
  ConfigError.
  """
  if mode not in MODES:
    raise ConfigError(f'--mode={mode}: must be one of {", ".join(MODES)}')
  if num_tasks == 0 or num_tasks < -1:
    raise ConfigError(f'--num_tasks={num_tasks}: must be positive, or -1 for all')
  if group_size < 1:
    raise ConfigError(f'--group_size={group_size}: must be at least 1')
  if config.data.source:
    raise ConfigError('--config.data.source: is where training reads; set dump.path')
  if not config.get('env', {}):
    raise ConfigError('this config has no environment: there is nothing to play')
  tests, data = config.eval, config.dataset
  with config.unlocked():
    if mode == 'train':
      tests.update(path=data.path, split=data.split, num_tasks=data.limit or -1)
      tests.temperature = config.rollout.temperature
    config.rollout.update(temperature=tests.temperature, redundancy=0)
    for env in config.env.values():
      if mode == 'val':
        own = env.env_config.to_dict()
        env.env_config.update(at_split(env.env_type, own, tests.split))
    limits = [n for n in (tests.num_tasks, num_tasks) if n > 0]
    tests.update(every=1, num_tasks=min(limits, default=-1), group_size=group_size)
    config.synthesis = {'mode': mode, **tests.to_dict()}
  for tag, env in config.env.items():
    plays = core(env.env_type, env.env_config)
    if tests.num_tasks < 0 and not getattr(plays, 'uses_dataset', True):
      raise ConfigError(f'env.{tag} plays seeds, which have no end: set --num_tasks=…')


class Synthesis(Rollouts):
  """The rollout side alone: each task once, groups whole, none filtered or shaped.

  config: as `prepare` left it. tests: the data sets, in traversal.
  """

  def __init__(
    self,
    config: Config,
    policy: Policy,
    host: Host,
    dispatcher: Dispatcher,
    tests: Datasets,
    *,
    algorithm: Algorithm,
  ):
    self.mode: str = config.synthesis.mode
    self._total = max(config.eval.num_tasks, 0)
    size = config.eval.group_size
    algorithm = dataclasses.replace(algorithm, group_size=size)
    data = tests, tests
    super().__init__(config, policy, host, dispatcher, data, algorithm=algorithm)

  def _first(self, tag: str) -> int:
    return 0 if self.datasets[tag] is not None else self._base(tag)

  def _base(self, tag: str) -> int:
    return base_seed(self._config.seed, self.mode, tag)

  def _ahead(self, tag: str) -> int:
    return max(1, math.ceil(self._busy() / (len(self.tags) * self._group_size)))

  def _queue(self, tag: str) -> Any:
    return self._host.spawn(GroupQueue, None, None, **self._queue_options(tag))

  def _queue_options(self, tag: str) -> dict[str, Any]:
    return {
      'num_groups': -1,
      'group_size': self._group_size,
      'num_env_groups': self._ahead(tag),
      'retries': self._config.rollout.retries,
      'keep_failed': True,
      'lease_timeout': self._config.rollout.lease_timeout,
      'total': self._total,
      'in_order': False,
    }

  async def sizes(self) -> dict[str, int]:
    """How many tasks each tag has."""
    found = {}
    for tag in self.tags:
      data = self.datasets[tag]
      size = self._total if data is None else await settle(data.get_size())
      found[tag] = min(size, self._total or size)
    return found

  async def play(
    self,
    ledger: Ledger,
    columns: Columns,
    *,
    model_name: str,
    told: Told,
    stop: Callable[[], bool],
  ) -> bool:
    """Plays what the ledger does not hold; False if it was asked to stop before.

    told: hears of each group once it is kept.
    """
    lock = asyncio.Lock()  # the ledger is one

    async def collect(tag: str, queue: Any) -> None:
      base = self._base(tag)
      while groups := await settle(queue.get_batch(1)):
        for group in groups:
          number = complete(group, tag, base)
          facts = {'model_name': model_name, 'mode': self.mode}
          rows = columns.rows(group, number, **facts)
          async with lock:
            ledger.add(tag, number, rows)
            await asyncio.to_thread(ledger.seal)
          told(group)

    jobs = []
    for tag in self.tags:
      queue = self.queues[tag] = self._queue(tag)
      played, ahead = ledger.played(tag), self._ahead(tag)
      await settle(queue.load_state_dict(remaining(played, ahead, self._total)))
      data = {'seed': self._base(tag)}
      jobs += [self._host.play(work, data) for work in self._workers(tag, queue)]
      jobs.append(collect(tag, queue))
    finished = await _until(stop, jobs)
    if finished:
      await asyncio.to_thread(ledger.seal, all_played=True)
    return finished


async def _until(stop: Callable[[], bool], jobs: list[Any]) -> bool:
  """Awaits all jobs; False, and they are cancelled, if `stop()` before their end."""
  work = asyncio.gather(*jobs)
  try:
    while not work.done():
      await asyncio.wait([work], timeout=0.2)
      if stop() and not work.done():
        return False
    work.result()
    return True
  finally:
    work.cancel()
    with contextlib.suppress(asyncio.CancelledError, Exception):
      await work


def remaining(played: Collection[int], ahead: int, total: int) -> Mapping[str, Any]:
  """The state of a queue of `ahead` env groups that has all but `played` to come.

  total: how many there are, 0 where the data says so.
  """
  top = max(played, default=-1) + 1
  lines = [
    next(n for n in itertools.count(top) if n % ahead == g) for g in range(ahead)
  ]
  return {
    'step': 0,
    'pending': [n for n in range(min(top, total or top)) if n not in played],
    'numbers': {'next': lines, 'end': total or None},
    'results': [],
  }


def complete(group: Group, tag: str, base: int) -> int:
  """Names the rows that stand for attempts that never came back, and scores those
  that failed 0; returns the task's number.
  """
  number = group[0].group_id + group[0].episode_id
  for rows in members.members(group).values():
    for row in rows:
      row.tag, row.episode_seed = tag, base + number
      if any(r.failed for r in rows):
        row.rewards = np.zeros_like(row.rewards)
  return number
