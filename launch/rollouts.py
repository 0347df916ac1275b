"""The rollout side of a run: engines, data sets, queues, workers, evaluation."""

import asyncio
import math
import pathlib
from collections.abc import Mapping
from typing import Any

from jaxrl.config import Config
from jaxrl.data.dataset import GlobalDataset
from jaxrl.data.samplers import FifoSampler
from jaxrl.data.seeds import base_seed, fold
from jaxrl.data.sources import load_rows
from jaxrl.dispatch import Dispatcher
from jaxrl.envs.base import find
from jaxrl.rollout.env_manager import EnvManager
from jaxrl.rollout.evaluation import evaluate
from jaxrl.rollout.filters import make_filter
from jaxrl.rollout.group import Lease
from jaxrl.rollout.group_queue import GroupQueue
from jaxrl.rollout.handles import settle
from jaxrl.rollout.router import EngineRouter
from jaxrl.rollout.worker import share_out
from jaxrl.signature import ConfigError
from jaxrl.training.policy import Policy
from jaxrl.types import Group
from launch.spawn import Host, Worker, make_world

Datasets = dict[str, Any]  # by tag
SAMPLE = 8  # tasks that are begun before the run is


def load_datasets(config: Config, host: Host) -> tuple[Datasets, Datasets]:
  """Each tag's rows for training and for evaluation; None for games."""
  train = {tag: _dataset(config, host, tag, 'sample') for tag in config.env}
  tests: Datasets = dict.fromkeys(config.env)
  if config.eval.every:
    tests = {tag: _dataset(config, host, tag, 'traversal') for tag in config.env}
  return train, tests


def _dataset(config: Config, host: Host, tag: str, mode: str) -> Any:
  """The tag's handle, None for games, whose tasks are seeds."""
  if not getattr(find(config.env[tag].env_type), 'uses_dataset', True):
    return None
  options = dict(config.dataset)
  path = options.pop('path')
  if mode == 'traversal':
    wanted = config.eval.num_tasks
    options['limit'] = None if wanted < 0 else wanted
    options['split'] = config.eval.split
    path = config.eval.path or beside(path, config.eval.split)
  if not path:
    raise ConfigError(
      f'env.{tag} takes its tasks from a data set: set --config.dataset.path=…'
    )
  options.update(path=path, mode=mode, seed=fold(config.seed, 'dataset', mode))
  # Read here, so that what is wrong with it is told at once, wherever it will live.
  rows = load_rows(path, options['split'], options['limit'])
  GlobalDataset(rows, **options)
  return host.spawn(GlobalDataset, rows, **options)


class Rollouts:
  """Plays the episodes of a run, for training and for evaluation.

  datasets: as `load_datasets` gives them. group_size: attempts at each task in
  training.
  """

  def __init__(
    self,
    config: Config,
    policy: Policy,
    host: Host,
    dispatcher: Dispatcher,
    datasets: tuple[Datasets, Datasets],
    *,
    group_size: int,
  ):
    self._config, self._policy, self._host = config, policy, host
    self._group_size = group_size
    options = {
      'num_slots': config.rollout.num_slots,
      'decode_steps': config.rollout.decode_steps,
      'max_length': config.batch.max_length,
    }
    self.engines = self._engines(dispatcher, options)
    self.engine = EngineRouter(self.engines)
    self.weights = host.weights(self.engines, dispatcher)
    self.tags = list(config.env)
    self.datasets, self._tests = datasets
    self._check_options()
    self.queues: dict[str, Any] = {}

  def _engines(self, dispatcher: Dispatcher, options: Mapping[str, Any]) -> list[Any]:
    count, policy = self._config.cluster.num_engines, self._policy
    return self._host.engines(policy.model, policy.folder, dispatcher, count, options)

  # ---- checks

  def _check_options(self) -> None:
    """Raises ConfigError for options that the parts themselves refuse."""
    for tag in self.tags:
      try:
        self.manager(tag, 'sample').world.pool.close()
        GroupQueue(**self._queue_options(tag))
      except ValueError as error:
        raise ConfigError(f'env.{tag} or rollout: {error}') from error

  async def check_prompts(self) -> None:
    """Raises ConfigError when no task of a tag can be begun, before any work is done.

    A sample is looked at. Single tasks that fail, or do not fit, cost an episode each.
    """
    for tag in self.tags:
      manager = self.manager(tag, 'sample')
      first = base_seed(self._config.seed, 'train', tag)
      reasons = []
      for number in range(SAMPLE):
        cache = await manager.reset(Lease(0, first + number, 0, 0, 0))
        if cache is not None and not cache.done:
          break
        said = cache.extras.get('error', cache.stop_reason) if cache else 'no task'
        reasons.append(said)
      manager.world.pool.close()
      if len(reasons) == SAMPLE:
        raise ConfigError(
          f'env.{tag}: none of {SAMPLE} tasks can be begun; the last because: '
          f'{reasons[-1]}'
        )

  # ---- training

  def _share(self, tag: str) -> int:
    """The tag's groups of each step."""
    index, count = self.tags.index(tag), self._config.batch.num_groups
    return count // len(self.tags) + (index < count % len(self.tags))

  def _env_options(self, tag: str, **changes: Any) -> dict[str, Any]:
    own = self._config.env[tag].to_dict()
    own = {k: v for k, v in own.items() if k not in ('env_type', 'env_config')}
    rollout = self._config.rollout
    shared = {k: rollout[k] for k in ('temperature', 'top_p', 'top_k')}
    window = self._config.batch.max_length
    return {**own, **shared, 'tag': tag, 'max_length': window, **changes}

  async def start(self, states: Mapping[str, Any]) -> list[asyncio.Task]:
    """Starts playing for training; `states` are the queues' from a checkpoint."""
    tasks = []
    for tag in self.tags:
      queue = self.queues[tag] = self._queue(tag)
      if tag in states:
        await settle(queue.load_state_dict(states[tag]))
      data = {'seed': base_seed(self._config.seed, 'train', tag)}
      for worker in self._workers(tag, queue):
        tasks.append(asyncio.ensure_future(settle(worker.run(data))))
    return tasks

  def _ahead(self, tag: str) -> int:
    """How many groups of a tag play at once."""
    return math.ceil((1 + self._config.rollout.async_ratio) * self._share(tag))

  def _queue(self, tag: str) -> Any:
    rollout, env = self._config.rollout, self._config.env[tag]
    drop = make_filter(rollout.group_filter, self._config.to_dict(), env)
    return self._host.spawn(GroupQueue, drop, **self._queue_options(tag))

  def _queue_options(self, tag: str) -> dict[str, Any]:
    rollout = self._config.rollout
    return {
      'num_groups': self._share(tag),
      'group_size': self._group_size,
      'num_env_groups': self._ahead(tag),
      'async_ratio': rollout.async_ratio,
      'redundancy': rollout.redundancy,
      'retries': rollout.retries,
      'min_members': rollout.min_members,
      'lease_timeout': rollout.lease_timeout,
      'in_order': rollout.async_ratio == 0,
    }

  def _workers(self, tag: str, queue: Any) -> list[Any]:
    env, size = self._config.env[tag], self._group_size
    count = self._host.workers(self._config.cluster.num_workers)
    places = share_out(self._ahead(tag), size + self._config.rollout.redundancy, count)
    return [
      self._host.spawn(
        Worker,
        env.env_type,
        env.env_config.to_dict(),
        pathlib.Path(self._policy.folder).absolute(),
        part,
        self._env_options(tag),
        engine=self.engine,
        queue=queue,
        dataset=self.datasets[tag],
      )
      for part in places
      if part
    ]

  async def advance(self, step: int) -> None:
    for queue in self.queues.values():
      await settle(queue.advance_step(step))

  async def next(self, step: int) -> list[Group]:
    """The groups of a step, tag after tag, each tag's first come first."""
    samplers = [FifoSampler(q, self._share(tag)) for tag, q in self.queues.items()]
    batches = await asyncio.gather(*(sampler.next(step) for sampler in samplers))
    return [group for batch in batches for group in batch]

  async def metrics(self) -> dict[str, float]:
    """What the engines and the queues count."""
    total = await self.engine.metrics()
    for queue in self.queues.values():
      for name, value in (await settle(queue.metrics())).items():
        total[name] = total.get(name, 0.0) + value
    return total

  async def state_dict(self) -> dict[str, Any]:
    return {tag: await settle(q.state_dict()) for tag, q in self.queues.items()}

  async def close(self) -> None:
    for queue in self.queues.values():
      await settle(queue.shutdown())

  # ---- evaluation

  def manager(self, tag: str, mode: str, **changes: Any) -> EnvManager:
    """A manager of its own, outside any queue. mode: 'sample' or 'traversal'."""
    env = self._config.env[tag]
    own, tests = env.env_config.to_dict(), mode == 'traversal'
    if tests and 'split' in own:
      own['split'] = self._config.eval.split
    data = (self._tests if tests else self.datasets)[tag]
    folder = self._policy.folder
    world = make_world(env.env_type, own, folder, self.engine, None, data)
    return EnvManager(world, **self._env_options(tag, **changes))

  async def evaluate(self) -> tuple[dict[str, float], list[Group]]:
    """Scores every tag on the weights that the engines serve."""
    metrics, groups = {}, []
    settings = self._config.eval
    for tag in self.tags:
      if self._tests[tag] is not None:
        await settle(self._tests[tag].reset())
      first = self.manager(tag, 'traversal', temperature=settings.temperature)
      options = self._env_options(tag, temperature=settings.temperature)
      found, played = await evaluate(
        lambda i, world=first.world, options=options: EnvManager(world, **options),
        base_seed(self._config.seed, 'val', tag),
        tag=tag,
        num_tasks=settings.num_tasks,
        group_size=settings.group_size,
        concurrency=2 * self._config.rollout.num_slots,
      )
      first.world.pool.close()
      metrics |= found
      groups += played
    return metrics, groups


def beside(path: str, split: str) -> str:
  """The file of another split next to `path`: test.jsonl for train.jsonl."""
  file = pathlib.Path(path)
  other = file.with_name(file.name.replace('train', split))
  return str(other) if file.is_file() and other.is_file() else path
