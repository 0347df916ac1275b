"""Schedules rollouts: engines, data sets, group queues, workers and evaluation."""

import asyncio
import functools
import math
import pathlib
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from jaxrl.algorithms import requirements
from jaxrl.data.dataset import GlobalDataset
from jaxrl.data.seeds import base_seed
from jaxrl.device_thread import DeviceThread
from jaxrl.envs.env_registry import (
  EnvResultError,
  find_env,
  innermost,
  options_for_split,
)
from jaxrl.envs.graders.composite import make_grader
from jaxrl.envs.graders.grader_processes import GraderFailure
from jaxrl.envs.graders.rule_graders import GENERATION_PROMPT
from jaxrl.group_stats import GroupResult, SampleRows
from jaxrl.model_loading import LoadedModel
from jaxrl.options import ConfigError, Keywords, OptionValues
from jaxrl.rollout.engine.actor_proxy import maybe_await
from jaxrl.rollout.env_manager import EnvContext, EnvManager
from jaxrl.rollout.env_worker import make_env_manager, partition_envs
from jaxrl.rollout.episodes.rollout_cache import RolloutCache
from jaxrl.rollout.queue.group_allocation import allocate_groups
from jaxrl.rollout.queue.group_filters import GroupFilterChain, make_group_filter
from jaxrl.rollout.queue.group_queue import GroupQueue
from jaxrl.rollout.queue.group_state import FailureLog
from jaxrl.rollout.queue.reward_shaping import RewardShaper, make_reward_shaper
from jaxrl.rollout.weights.weight_sync import WeightSyncer
from jaxrl.training import staleness
from jaxrl.types import Group, StateDict
from jaxrl.user_code import describe_error, user_place
from launch.learner.learner_factory import copy_params
from launch.rollouts.env_datasets import RunDatasets
from launch.runtime.rollout_worker import RolloutWorker, make_env_context
from launch.runtime.runtime_base import Runtime, make_engines
from launch.settings.off_policy import max_staleness
from launch.settings.run_settings import RunSettings

NUM_TRIAL_TASKS = 8  # tasks that begin before the run does
TRIAL_REPLY = 'The answer is 1.'  # what graders are tried with


def tag_row_format(settings: RunSettings, tag: str) -> str:
  """Returns how episodes become rows: as the tag says, or else the algorithm."""
  own = settings.env[tag].row_format
  return requirements.row_format(settings.algorithm) if own == 'auto' else own


def make_filter_and_shaper(
  settings: RunSettings, tag: str
) -> tuple[GroupFilterChain | None, RewardShaper | None]:
  """Returns what drops groups of a tag, and what changes the rewards of the others."""
  group_filter = make_group_filter(
    settings.group_filters, settings.config, settings.env_manager_config(tag)
  )
  limits = {'max_length': settings.response_limit(tag)}
  return group_filter, make_reward_shaper(settings.reward_shapers, limits)


class RolloutScheduler:
  """Plays the episodes of a run, for training and for evaluation.

  Attributes:
    mode: 'train' or 'val', which tasks it plays outside evaluations.
    engines: The engines themselves.
    engine: The router to all of them.
    weights: Brings the engines their weights.
    weight_syncer: Decides when they get them.
    tags: Environment tags that training plays.
    datasets: Data sets for training by tag; None for tags whose tasks are seeds.
    seen_shares: See `RunDatasets`.
    queues: Group queues by tag, once training has started.
  """

  mode = 'train'

  def __init__(
    self,
    settings: RunSettings,
    policy: LoadedModel,
    runtime: Runtime,
    device_thread: DeviceThread,
    datasets: RunDatasets,
  ):
    """Makes the engines, and checks the environments' options.

    Args:
      settings: Settings of the run.
      policy: The model that plays, with its tokenizer.
      runtime: Where engines, queues and workers are to live.
      device_thread: The thread of this process's devices.
      datasets: Data sets for training by tag, and for evaluation by set.

    Raises:
      ConfigError: For options that an environment or a queue refuses.
    """
    self._settings = settings
    self._policy = policy
    self._runtime = runtime
    self._group_size = settings.algorithm.group_size
    self._greedy = 'greedy_mask' in requirements.needs(settings.algorithm)
    self.engines, self.engine, self.weights = make_engines(
      settings, policy, runtime, device_thread
    )
    self.weight_syncer = WeightSyncer(
      settings.weight_sync.sync_policy,
      self.weights,
      self.engine,
      copy=functools.partial(copy_params, device_thread),
      finished_groups=self._played,
      num_groups=settings.batch.num_groups,
    )
    self.tags = settings.training_tags
    self._num_groups = settings.batch.num_groups  # of a step, all tags together
    self.datasets, self._tests = datasets.train, datasets.tests
    self.seen_shares = datasets.seen_shares
    self._failures = FailureLog()  # what it logs in `check_prompts` is not repeated
    self._rewards = None
    if settings.rewards:
      # Imported here because most rewards are the environments' own.
      from launch.rollouts.reward_terms import make_reward_pipeline

      self._rewards = make_reward_pipeline(settings, runtime, device_thread)
    self._opponents: dict[str, Any] = {}
    if any(env.opponent is not None for env in settings.env.values()):
      # Imported here because few environments have several players.
      from launch.rollouts.opponent_models import make_opponents

      self._opponents = make_opponents(settings, runtime, device_thread)
    self._check_options()
    self.queues: dict[str, GroupQueue] = {}

  def _num_busy_episodes(self) -> int:
    """Returns how many episodes keep all engines busy while others wait."""
    return 2 * self._settings.rollout.max_num_seqs * len(self.engines)

  # ---- checks

  def _check_options(self) -> None:
    """Raises ConfigError for options that a manager or a queue refuses."""
    for tag, (make, _) in self._example_managers().items():
      try:
        make().context.pool.close()
        if tag in self.tags:
          GroupQueue(**self._queue_options(tag))
      except ValueError as error:
        place = user_place(error)
        text = f'{error} ({place})' if place else str(error)
        raise ConfigError(f'env.{tag} or rollout: {text}') from error

  def _base_seed(self, tag: str) -> int:
    """Returns the seed of a tag's first task."""
    return base_seed(self._settings.seed, self.mode, tag)

  def _example_managers(self) -> dict[str, tuple[Callable[[], EnvManager], int]]:
    """Returns for each tag what makes one of its managers, and its first task's seed.

    A manager plays training tasks; if its tag is only evaluated, those of its first
    evaluation set.
    """
    makers: dict[str, tuple[Callable[[], EnvManager], int]] = {
      tag: (functools.partial(self.manager, tag), self._base_seed(tag))
      for tag in self.tags
    }
    for name, evaluation in self._settings.active_evaluations.items():
      make = functools.partial(self._evaluation_manager, name)
      seed = base_seed(self._settings.seed, 'val', name)
      makers.setdefault(evaluation.tag, (make, seed))
    return makers

  async def check_prompts(self) -> None:
    """Begins a few tasks of each tag, before any work is done.

    Single tasks that fail, or do not fit, only cost an episode each later on. A user's
    own environment also makes a step, and graders grade a made-up reply to the task. A
    manager that is not derived from `EnvManager` is left out, as it only has a loop.

    Raises:
      ConfigError: If none of a tag's tasks can be begun or graded, an environment has
        no method `step`, or a step returns something that cannot be used.
    """
    for tag, (make, first_seed) in self._example_managers().items():
      manager = make()
      if not isinstance(manager, EnvManager):
        manager.context.pool.close()
        continue
      reasons = []
      for number in range(NUM_TRIAL_TASKS):
        cache = await manager.try_reset(number, base_seed=first_seed)
        if cache is None or cache.done:
          error = cache.extras.get('error', cache.stop_reason) if cache else 'no task'
          reasons.append(('started', error))
        elif error := await asyncio.to_thread(self._try_graders, tag, cache):
          reasons.append(('graded', error))
        else:
          await self._try_step(tag, manager, cache)
          break
      manager.context.pool.close()
      if len(reasons) == NUM_TRIAL_TASKS:
        what, error = reasons[-1]
        raise ConfigError(
          f'env.{tag}: none of the first {NUM_TRIAL_TASKS} tasks can be {what}; '
          f'the last one failed with: {error}'
        )

  def _try_graders(self, tag: str, cache: RolloutCache) -> str:
    """Grades a made-up reply to a task; returns what a grader raises, or ''.

    Without it, a grader that raises for every reply would end a run only after
    `rollout.max_consecutive_drops` groups.
    """
    env = self._settings.env[tag]
    _, options = innermost(env.env_type, env.env_config)
    item = {GENERATION_PROMPT: '', **((cache.task.item if cache.task else None) or {})}
    try:
      if options.get('grader'):
        make_grader(options['grader'])(TRIAL_REPLY, item)
      if self._rewards is not None:
        # Imported here because most rewards are the environments' own.
        from jaxrl.rollout.rewards.reward_pipeline import GraderReward

        for term in self._rewards.terms.values():
          if isinstance(term.function, GraderReward):
            term.function.grade(TRIAL_REPLY, item)
    except GraderFailure:  # it is told of in the metrics
      return ''
    except Exception as error:
      return describe_error(error)
    return ''

  async def _try_step(self, tag: str, manager: EnvManager, cache: RolloutCache) -> None:
    """Lets a user's own environment make a step with an empty reply.

    A user's own manager may play environments in its own way, without `step`.
    """
    env = self._settings.env[tag]
    name, _ = innermost(env.env_type, env.env_config)
    inner = find_env(name)
    if ':' not in name or getattr(inner, 'played_by_agent', False):
      return
    if not hasattr(inner if isinstance(inner, type) else cache.env, 'step'):
      if type(manager).step is not EnvManager.step:
        return
      class_name = getattr(inner, '__name__', type(cache.env).__name__)
      raise ConfigError(f'env.{tag}: {class_name} in {name} has no method step')
    try:
      await manager.try_step(cache)
    except EnvResultError as error:
      raise ConfigError(f'env.{tag}: {error}') from error
    except Exception as error:  # it may have good reasons not to take such a reply
      what = 'a trial step with an empty reply raised'
      self._failures.record(tag, what, describe_error(error))

  # ---- training

  def _groups_per_step(self, tag: str) -> int:
    shares = {name: self._settings.env[name].weight for name in self.tags}
    return allocate_groups(self._num_groups, shares)[tag]

  def _manager_options(self, tag: str, **changes: object) -> Keywords:
    settings = self._settings
    options = {
      **settings.env[tag].episode,
      'row_format': tag_row_format(settings, tag),
      **settings.rollout.sampling,
      'tag': tag,
      'max_length': settings.batch.max_length,
      **changes,
    }
    if (teacher := settings.algorithm.self_teacher) is not None:
      from jaxrl.rollout.queue import teacher_contexts  # few algorithms have one

      options = {'task_keys': teacher_contexts.task_keys(teacher.context), **options}
    return options

  async def start(
    self, states: Mapping[str, StateDict], num_groups: int
  ) -> list[asyncio.Task]:
    """Starts playing for training.

    Args:
      states: What `state_dict` gave, from a checkpoint; empty without one.
      num_groups: Groups of each step.

    Returns:
      The tasks of the workers.
    """
    self._num_groups = self.weight_syncer.num_groups = num_groups
    tasks = []
    for tag in self.tags:
      queue = self.queues[tag] = self._queue(tag)
      if tag in states:
        await self._restore(tag, states[tag])
      data = {'seed': self._base_seed(tag)}
      for worker in self._workers(tag, queue):
        tasks.append(asyncio.ensure_future(self._runtime.run_worker(worker, data)))
    return tasks

  def _num_parallel_groups(self, tag: str) -> int:
    """Returns how many groups of a tag play at once."""
    return math.ceil(
      (1 + self._settings.rollout.async_ratio) * self._groups_per_step(tag)
    )

  def _queue(self, tag: str) -> GroupQueue:
    group_filter, shaper = make_filter_and_shaper(self._settings, tag)
    if (teacher := self._settings.algorithm.self_teacher) is not None:
      from launch.rollouts.self_teachers import add_prompts  # few algorithms have one

      shaper = add_prompts(teacher, self._settings.chat, self._policy.folder, shaper)
    options, prefixes = self._queue_options(tag), self._settings.env[tag].prefixes
    if prefixes is not None:
      # Imported here because few runs replay anything.
      from jaxrl.rollout.queue.prefix_queue import PrefixGroupQueue

      options['prefixes'] = prefixes
      return self._runtime.spawn(PrefixGroupQueue, group_filter, shaper, **options)
    return self._runtime.spawn(GroupQueue, group_filter, shaper, **options)

  def _queue_options(self, tag: str) -> Keywords:
    rollout = self._settings.rollout
    return {
      'num_groups': self._groups_per_step(tag),
      'group_size': self._group_size,
      'num_env_groups': self._num_parallel_groups(tag),
      'options': rollout,
      'in_order': rollout.async_ratio == 0,
      'expires': rollout.staleness_policy is None,
      'greedy': self._greedy,
      'failures': self._failures,
    }

  def _workers(
    self, tag: str, queue: GroupQueue
  ) -> list[functools.partial[RolloutWorker]]:
    """Returns functions that make the workers of a tag where they are to live."""
    settings, env = self._settings, self._settings.env[tag]
    num_workers = self._runtime.num_workers(settings.cluster.num_workers)
    group_size = self._group_size + settings.rollout.extra_samples + self._greedy
    parts = partition_envs(self._num_parallel_groups(tag), group_size, num_workers)
    context = self._env_context(tag, env.env_config, queue, self.datasets[tag])
    options = self._manager_options(tag) | self._replay_options(tag)
    return [
      functools.partial(RolloutWorker, context, part, options, env.manager)
      for part in parts
      if part
    ]

  def _replay_options(self, tag: str) -> Keywords:
    """Returns a manager's options for tasks and episodes to which training returns."""
    env = self._settings.env[tag]
    chosen = {'num_seeds': env.num_seeds, 'replays': env.prefixes is not None}
    return {name: value for name, value in chosen.items() if value}

  def _env_context(
    self,
    tag: str,
    env_config: OptionValues,
    queue: GroupQueue | None,
    dataset: GlobalDataset | None,
  ) -> functools.partial[EnvContext]:
    """Returns a function that makes what a tag's environments share, in any process."""
    env = self._settings.env[tag]
    return functools.partial(
      make_env_context,
      env.env_type,
      env_config,
      pathlib.Path(self._policy.folder).absolute(),
      self.engine,
      queue,
      dataset,
      concurrency=env.max_concurrency,
      rewards=self._rewards,
      chat=self._settings.chat,
      opponent=self._opponents.get(tag),
      policy_role=env.policy_role,
    )

  async def advance(self, step: int) -> None:
    """Reports the last results to curricula, then lets the groups of `step` begin."""
    reports: dict[
      int, tuple[GlobalDataset, list[GroupResult]]
    ] = {}  # tags may share a data set
    for tag, queue in self.queues.items():
      results, data = await maybe_await(queue.results()), self.datasets[tag]
      if data is not None:
        reports.setdefault(id(data), (data, []))[1].extend(results)
    for data, results in reports.values():
      await maybe_await(data.report(results))
    for queue in self.queues.values():
      await maybe_await(queue.advance_step(step))

  async def take(self, step: int, min_version: int | None = None) -> list[Group]:
    """Waits for the groups of a step.

    Args:
      step: The step.
      min_version: Groups with a token of older weights are dropped and replaced, as
        are those past the run's own limit on staleness.

    Returns:
      The groups, tag after tag, each in the order in which they were finished.
    """
    limit = max_staleness(self._settings)
    if limit is not None:
      min_version = max(step - limit, -1 if min_version is None else min_version)
    batches = await asyncio.gather(
      *(
        maybe_await(queue.get_batch(self._groups_per_step(tag), step, min_version))
        for tag, queue in self.queues.items()
      )
    )
    groups = [group for batch in batches for group in batch]
    if limit is not None:
      staleness.check_groups(groups, step, limit)
    return groups

  async def _played(self) -> float:
    """Counts the complete groups since the run began, taken or not."""
    return (await self.counts()).get('queue/whole', 0.0)

  async def metrics(self) -> dict[str, float]:
    """Returns what the engines and the queues count; logs new failures."""
    for queue in self.queues.values():
      await self._log_failures(queue)
    return await self.engine.metrics() | await self.counts()

  async def _log_failures(self, queue: GroupQueue) -> None:
    """Logs here what a queue in another process has logged."""
    for failure in await maybe_await(queue.take_failures()):
      self._failures.record(*failure)

  async def counts(self) -> dict[str, float]:
    """Returns what the queues counted since they began, all tags together."""
    total: dict[str, float] = {}
    for queue in self.queues.values():
      for name, value in (await maybe_await(queue.metrics())).items():
        total[name] = total.get(name, 0.0) + value
    return total

  async def state_dict(self) -> StateDict:
    """Returns the state of the queues and of the data sets, by tag."""
    state = {}
    for tag, queue in self.queues.items():
      data = self.datasets[tag]
      state[tag] = {
        'queue': await maybe_await(queue.state_dict()),
        'dataset': data and await maybe_await(data.state_dict()),
      }
    return state

  async def _restore(self, tag: str, state: StateDict) -> None:
    await maybe_await(self.queues[tag].load_state_dict(state['queue']))
    if (data := self.datasets[tag]) is not None:
      await maybe_await(data.load_state_dict(state['dataset']))

  async def close(self) -> None:
    """Stops handing over weights, and shuts the queues."""
    await self.weight_syncer.close()
    for queue in self.queues.values():
      await maybe_await(queue.shutdown())

  # ---- evaluation

  def manager(self, tag: str) -> EnvManager:
    """Makes a manager of training tasks outside any queue."""
    env_config = self._settings.env[tag].env_config
    options, dataset = self._manager_options(tag), self.datasets[tag]
    return self._make_manager(tag, env_config, options, dataset)

  def _evaluation_manager(self, name: str) -> EnvManager:
    """Makes a manager of the tasks of an evaluation set."""
    evaluation = self._settings.evaluations[name]
    env = self._settings.env[evaluation.tag]
    env_config = options_for_split(env.env_type, env.env_config, evaluation.split)
    options, dataset = self._evaluation_options(name), self._tests[name]
    return self._make_manager(evaluation.tag, env_config, options, dataset)

  def _evaluation_options(self, name: str) -> Keywords:
    evaluation = self._settings.evaluations[name]
    options = self._manager_options(evaluation.tag, temperature=evaluation.temperature)
    return {**options, 'tag': name}

  def _make_manager(
    self,
    tag: str,
    env_config: OptionValues,
    options: OptionValues,
    dataset: GlobalDataset | None,
  ) -> EnvManager:
    context = self._env_context(tag, env_config, None, dataset)()
    manager = self._settings.env[tag].manager
    return make_env_manager(context, manager=manager, **options)

  async def evaluate(
    self,
    progress: Callable[[str, SampleRows, int], None] | None = None,
    names: Sequence[str] | None = None,
  ) -> tuple[dict[str, float], list[Group]]:
    """Scores evaluation sets on the weights that the engines serve.

    Args:
      progress: Called with the set's name, a sample's rows, and how many samples the
        set plays.
      names: The sets; None for all that are evaluated.

    Returns:
      The metrics and the groups of all sets. Rows have the set's name as their tag.
    """
    # Imported here because only runs that evaluate need it.
    from jaxrl.rollout.evaluation import derived_metrics, evaluate

    metrics, groups = {}, []
    for name in self._settings.active_evaluations if names is None else names:
      evaluation = self._settings.evaluations[name]
      if (data := self._tests[name]) is not None:
        await maybe_await(data.reset())
      first = self._evaluation_manager(name)
      options = self._evaluation_options(name)
      options['manager'] = self._settings.env[evaluation.tag].manager
      try:
        set_metrics, set_groups = await evaluate(
          lambda i, context=first.context, options=options: make_env_manager(
            context, **options
          ),
          base_seed(self._settings.seed, 'val', name),
          tag=name,
          num_tasks=evaluation.num_tasks,
          group_size=evaluation.group_size,
          concurrency=self._num_busy_episodes(),
          progress=progress and functools.partial(progress, name),
          failures=self._failures,
        )
      finally:  # it may be stopped
        await first.context.close()
      env = self._settings.env[evaluation.tag]
      metrics |= set_metrics
      metrics |= derived_metrics(env.env_type, env.env_config, name, set_metrics)
      if share := self.seen_shares.get(name):
        metrics[f'eval/{name}/training_rows'] = share
      groups += set_groups
    return metrics, groups
