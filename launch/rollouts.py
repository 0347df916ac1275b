"""The rollout side of a run: engines, data sets, queues, workers, evaluation."""

import asyncio
import functools
import math
import pathlib
from collections.abc import Callable, Mapping
from typing import Any

from jaxrl.algorithms import compose
from jaxrl.config import Config
from jaxrl.data import staleness
from jaxrl.data.curricula import Result
from jaxrl.data.seeds import base_seed
from jaxrl.dispatch import Dispatcher
from jaxrl.envs.base import at_split
from jaxrl.rollout import sync
from jaxrl.rollout.agents import make_manager
from jaxrl.rollout.env_manager import EnvManager
from jaxrl.rollout.evaluation import evaluate
from jaxrl.rollout.filters import make_filter
from jaxrl.rollout.group import Lease
from jaxrl.rollout.group_queue import GroupQueue
from jaxrl.rollout.handles import settle
from jaxrl.rollout.members import Rows
from jaxrl.rollout.shapers import make_shaper
from jaxrl.rollout.shares import share_groups
from jaxrl.rollout.sync import Swaps
from jaxrl.rollout.worker import share_out
from jaxrl.signature import ConfigError
from jaxrl.training.policy import Policy
from jaxrl.types import Algorithm, Group
from launch import off_policy
from launch.algorithm import response_limit
from launch.datasets import Datasets
from launch.learners import lasting
from launch.rewards import make as make_rewards
from launch.spawn import Host, Worker, make_engines, make_world

# Of a tag's section; the rest is EnvManager's.
OURS = ('env_type', 'env_config', 'share', 'concurrency')
SAMPLE = 8  # tasks that are begun before the run is


class Rollouts:
  """Plays the episodes of a run, for training and for evaluation.

  datasets: as `load_datasets` gives them. algorithm: whose group size and formulation
  training plays by.
  """

  def __init__(
    self,
    config: Config,
    policy: Policy,
    host: Host,
    dispatcher: Dispatcher,
    datasets: tuple[Datasets, Datasets],
    *,
    algorithm: Algorithm,
  ):
    self._config, self._policy, self._host = config, policy, host
    self._algorithm, self._group_size = algorithm, algorithm.group_size
    self._greedy = 'greedy_mask' in compose.needs(algorithm)
    self._formulation = compose.formulation(algorithm)
    made = make_engines(config, policy, host, dispatcher)
    self.engines, self.engine, self.weights = made
    self.swaps = Swaps(
      sync.parse(config.rollout.sync),
      self.weights,
      self.engine,
      copy=functools.partial(lasting, dispatcher),
      played=self._played,
      num_groups=config.batch.num_groups,
    )
    self.tags = list(config.env)
    self._num_groups = config.batch.num_groups  # of a step, all tags together
    self.datasets, self._tests = datasets
    self._rewards = make_rewards(config, host, dispatcher)
    self._check_options()
    self.queues: dict[str, Any] = {}

  def _busy(self) -> int:
    """How many episodes keep all engines at work, while some wait for environments."""
    return 2 * self._config.rollout.num_slots * len(self.engines)

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
      first = self._first(tag)
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

  def _first(self, tag: str) -> int:
    """The episode from which the sample is taken."""
    return base_seed(self._config.seed, 'train', tag)

  # ---- training

  def _share(self, tag: str) -> int:
    """The tag's groups of each step."""
    shares = {name: env.share for name, env in self._config.env.items()}
    return share_groups(self._num_groups, shares)[tag]

  def _env_options(self, tag: str, **changes: Any) -> dict[str, Any]:
    own = self._config.env[tag].to_dict()
    own = {k: v for k, v in own.items() if k not in OURS}
    if own['formulation'] == 'auto':
      own['formulation'] = self._formulation
    rollout = self._config.rollout
    shared = {k: rollout[k] for k in ('temperature', 'top_p', 'top_k')}
    window = self._config.batch.max_length
    return {**own, **shared, 'tag': tag, 'max_length': window, **changes}

  async def start(
    self, states: Mapping[str, Any], num_groups: int
  ) -> list[asyncio.Task]:
    """Starts playing `num_groups` groups for each step of training.

    states: what `state_dict` gave, from a checkpoint; empty without one.
    """
    self._num_groups = self.swaps.num_groups = num_groups
    tasks = []
    for tag in self.tags:
      queue = self.queues[tag] = self._queue(tag)
      if tag in states:
        await self._restore(tag, states[tag])
      data = {'seed': base_seed(self._config.seed, 'train', tag)}
      for worker in self._workers(tag, queue):
        tasks.append(asyncio.ensure_future(self._host.play(worker, data)))
    return tasks

  def _ahead(self, tag: str) -> int:
    """How many groups of a tag play at once."""
    return math.ceil((1 + self._config.rollout.async_ratio) * self._share(tag))

  def _queue(self, tag: str) -> Any:
    rollout, env = self._config.rollout, self._config.env[tag]
    filters = joined(self._algorithm.filters, rollout.group_filter)
    drop = make_filter(filters, self._config.to_dict(), env)
    limits = {'max_length': response_limit(self._config, tag)}
    shaper = make_shaper(joined(self._algorithm.shapers, rollout.shapers), limits)
    return self._host.spawn(GroupQueue, drop, shaper, **self._queue_options(tag))

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
      'expires': not rollout.staleness,
      'max_lost': rollout.max_lost,
      'greedy': self._greedy,
    }

  def _workers(self, tag: str, queue: Any) -> list[functools.partial[Worker]]:
    """What makes the workers of a tag, where they are to live."""
    env, size = self._config.env[tag], self._group_size
    count = self._host.workers(self._config.cluster.num_workers)
    size += self._config.rollout.redundancy + self._greedy
    places = share_out(self._ahead(tag), size, count)
    return [
      functools.partial(
        Worker,
        env.env_type,
        env.env_config.to_dict(),
        pathlib.Path(self._policy.folder).absolute(),
        part,
        self._env_options(tag),
        engine=self.engine,
        queue=queue,
        dataset=self.datasets[tag],
        concurrency=env.concurrency,
        rewards=self._rewards,
      )
      for part in places
      if part
    ]

  async def advance(self, step: int) -> None:
    """Tells curricula how the last groups fared, then lets those of `step` begin."""
    told: dict[int, tuple[Any, list[Result]]] = {}  # tags may share a data set
    for tag, queue in self.queues.items():
      results, data = await settle(queue.results()), self.datasets[tag]
      if data is not None:
        told.setdefault(id(data), (data, []))[1].extend(results)
    for data, results in told.values():
      await settle(data.report(results))
    for queue in self.queues.values():
      await settle(queue.advance_step(step))

  async def take(self, step: int, min_version: int | None = None) -> list[Group]:
    """Waits for the groups of a step, tag after tag, each tag's first come first.

    min_version: groups with a token of older weights are lost and replaced, as are
    those past the run's own bound on staleness.
    """
    most = off_policy.most(self._config)
    if most is not None:
      min_version = max(step - most, -1 if min_version is None else min_version)
    batches = await asyncio.gather(
      *(
        settle(queue.get_batch(self._share(tag), step, min_version))
        for tag, queue in self.queues.items()
      )
    )
    groups = [group for batch in batches for group in batch]
    if most is not None:
      staleness.check(groups, step, most)
    return groups

  async def _played(self) -> float:
    """Whole groups since the process began, taken or not."""
    return (await self.counts()).get('queue/whole', 0.0)

  async def metrics(self) -> dict[str, float]:
    """What the engines and the queues count."""
    return await self.engine.metrics() | await self.counts()

  async def counts(self) -> dict[str, float]:
    """What the queues have counted since they began, all tags together."""
    total: dict[str, float] = {}
    for queue in self.queues.values():
      for name, value in (await settle(queue.metrics())).items():
        total[name] = total.get(name, 0.0) + value
    return total

  async def state_dict(self) -> dict[str, Any]:
    """The queues' and the data sets', by tag."""
    state = {}
    for tag, queue in self.queues.items():
      data = self.datasets[tag]
      state[tag] = {
        'queue': await settle(queue.state_dict()),
        'dataset': data and await settle(data.state_dict()),
      }
    return state

  async def _restore(self, tag: str, state: Mapping[str, Any]) -> None:
    await settle(self.queues[tag].load_state_dict(state['queue']))
    if self.datasets[tag] is not None:
      await settle(self.datasets[tag].load_state_dict(state['dataset']))

  async def close(self) -> None:
    await self.swaps.close()
    for queue in self.queues.values():
      await settle(queue.shutdown())

  # ---- evaluation

  def manager(self, tag: str, mode: str, **changes: Any) -> EnvManager:
    """A manager of its own, outside any queue. mode: 'sample' or 'traversal'."""
    env = self._config.env[tag]
    own, tests = env.env_config.to_dict(), mode == 'traversal'
    if tests:
      own = at_split(env.env_type, own, self._config.eval.split)
    data = (self._tests if tests else self.datasets)[tag]
    folder = self._policy.folder
    given = env.env_type, own, folder, self.engine, None, data
    shared = {'concurrency': env.concurrency, 'rewards': self._rewards}
    world = make_world(*given, **shared)
    return make_manager(world, **self._env_options(tag, **changes))

  async def evaluate(
    self, progress: Callable[[str, Rows, int], None] | None = None
  ) -> tuple[dict[str, float], list[Group]]:
    """Scores every tag on the weights that the engines serve.

    progress: called with the tag, an attempt's rows, and how many attempts it plays.
    """
    metrics, groups = {}, []
    settings = self._config.eval
    for tag in self.tags:
      if self._tests[tag] is not None:
        await settle(self._tests[tag].reset())
      first = self.manager(tag, 'traversal', temperature=settings.temperature)
      options = self._env_options(tag, temperature=settings.temperature)
      found, played = await evaluate(
        lambda i, world=first.world, options=options: make_manager(world, **options),
        base_seed(self._config.seed, 'val', tag),
        tag=tag,
        num_tasks=settings.num_tasks,
        group_size=settings.group_size,
        concurrency=self._busy(),
        progress=progress and functools.partial(progress, tag),
      )
      await first.world.close()
      metrics |= found
      groups += played
    return metrics, groups


def joined(*specs: str) -> str:
  """Call strings as one."""
  return ' + '.join(spec for spec in specs if spec.strip())
