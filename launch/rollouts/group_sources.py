"""Group source: gives a phase of training its groups, and plays its evaluations."""

import asyncio
import contextlib
import time
from collections.abc import Mapping, Sequence

from jaxrl import spans
from jaxrl.algorithms import requirements
from jaxrl.data.file_sampler import FileSampler
from jaxrl.data.samplers import Sampler
from jaxrl.options import ConfigError
from jaxrl.rollout.engine.actor_proxy import maybe_await
from jaxrl.types import Group, StateDict
from launch.learner.learner_factory import LearnerHandle
from launch.rollouts.rollout_scheduler import RolloutScheduler
from launch.settings.run_settings import RunSettings

Metrics = dict[str, float]


class StepTimes:
  """Collects the metrics of a step, among them the times of its parts."""

  def __init__(self):
    self._metrics: Metrics = {}

  def add(self, metrics: Mapping[str, float]) -> None:
    """Adds metrics."""
    self._metrics |= metrics

  def end(self, part: str, name: str, start: float, step: int) -> float:
    """Adds the metric time/NAME of what has just ended, and its span.

    Args:
      part: The part of the run that did it.
      name: Its name.
      start: When it began, by `time.perf_counter`.
      step: The training step.

    Returns:
      How many seconds it took.
    """
    end = time.perf_counter()
    self._metrics[f'time/{name}'] = end - start
    spans.record(part, name, name, start, end, step=step)
    return end - start

  def take(self) -> Metrics:
    """Returns the metrics, which start anew."""
    metrics, self._metrics = self._metrics, {}
    return metrics


class Players:
  """The rollout side of a run, as its sources of groups use it.

  Attributes:
    rollouts: Plays.
  """

  def __init__(self, rollouts: RolloutScheduler, *, sleeps: bool, learns_here: bool):
    """Takes the rollout side.

    Args:
      rollouts: Plays.
      sleeps: Whether the engine gives up its cache while the learner trains.
      learns_here: Whether the learner is in this process.
    """
    self.rollouts = rollouts
    self._sleeps = sleeps
    # A learner elsewhere has to leave its memory to the engine while it generates.
    self._learner_sleeps = self._sleeps and not learns_here
    self._are_warm = False

  async def publish(
    self, step: int, learner: LearnerHandle, times: StepTimes, *, at_once: bool
  ) -> None:
    """Hands weights over; if not `at_once`, when the policy of the run says so."""
    start, syncer = time.perf_counter(), self.rollouts.weight_syncer
    hand_over = syncer.sync_now if at_once else syncer.maybe_sync
    await hand_over(step, learner.inference_params)
    times.end('weights', 'publish', start, step)
    times.add(self.rollouts.weights.metrics())
    if self._sleeps:
      if self._learner_sleeps:
        await learner.offload()
      await maybe_await(self.rollouts.engine.resume())
    if not self._are_warm:
      self._are_warm = True
      await maybe_await(self.rollouts.engine.warmup())

  async def yield_devices(self, learner: LearnerHandle) -> None:
    """Lets the engine sleep where it shares the learner's devices."""
    if self._sleeps:
      await maybe_await(self.rollouts.engine.sleep())
      if self._learner_sleeps:
        await learner.reload()


class GroupSource:
  """Gives a phase of training its groups, and plays its evaluations.

  A subclass says where groups come from. Unless it says otherwise, a sampler knows
  them, and only evaluations are played, if the run has any.

  Attributes:
    num_rows: The most rows of a step.
    num_steps: The steps of the phase.
  """

  num_rows: int
  num_steps: int

  def __init__(self, sampler: Sampler | FileSampler, players: Players | None):
    self._sampler = sampler
    self._players = players

  def describe(self) -> str:
    """Describes groups that are not played, in one line; '' for those that are."""
    return ''

  async def start(self, step: int, state: StateDict) -> list[asyncio.Task]:
    """Restores what a checkpoint holds, and starts playing.

    Args:
      step: The step to go on with.
      state: What `state` gave; empty without a checkpoint.

    Returns:
      The tasks of the workers that play.

    Raises:
      ConfigError: For a checkpoint of a run with another source.
    """
    if state:
      if 'store' in state['sampler']:
        raise ConfigError(
          "--config.dataset.experience_store='': the run in this --workdir "
          'trains from a store: set the key again, or name another --workdir'
        )
      self._sampler.load_state_dict(state['sampler'])
    return []

  async def publish(
    self, step: int, learner: LearnerHandle, times: StepTimes, *, evaluates: bool
  ) -> None:
    """Hands the learner's weights to the engines, if something will be played.

    Args:
      step: The training step.
      learner: Has the weights.
      times: Takes how long it took.
      evaluates: Whether an evaluation follows, which needs the newest weights.
    """
    if evaluates and self._players is not None:
      await self._players.publish(step, learner, times, at_once=True)

  async def advance(self, step: int) -> None:
    """Tells those that play which step is collected."""

  async def next(self, step: int) -> list[Group]:
    """Waits for the groups of a step."""
    return await self._sampler.next(step)

  async def metrics(self, step: int) -> Metrics:
    """Returns the metrics of a step's groups; those of engines start anew."""
    if self._players is not None:  # what evaluations counted belongs to no step
      await self._players.rollouts.metrics()
    return self._sampler.metrics()

  async def yield_devices(self, learner: LearnerHandle) -> None:
    """Gives the learner the memory that it shares with engines, until `publish`."""

  async def evaluate(self, names: Sequence[str]) -> tuple[Metrics, list[Group]]:
    """Plays evaluation sets; returns their metrics and groups."""
    if self._players is None:
      return {}, []
    return await self._players.rollouts.evaluate(names=names)

  async def state(self) -> StateDict:
    """Returns what a checkpoint keeps."""
    return {'sampler': self._sampler.state_dict()}

  async def saved(self, step: int) -> None:
    """Notes that the checkpoint of a step is on disk."""

  async def close(self) -> None:
    """Ends what it has started."""
    if self._players is not None:
      with contextlib.suppress(Exception):  # a dead actor cannot be told to stop
        await self._players.rollouts.close()


class PlayedGroups(GroupSource):
  """Groups that the run plays."""

  def __init__(self, settings: RunSettings, sampler: Sampler, players: Players):
    super().__init__(sampler, players)
    rows_per_group = requirements.rows_per_group(settings.algorithm)
    self.num_rows = settings.batch.num_groups * rows_per_group
    self.num_steps = settings.num_steps
    self._sampler: Sampler = sampler
    self._players: Players = players
    self._rollouts = players.rollouts
    self.yield_devices = players.yield_devices

  async def start(self, step: int, state: StateDict) -> list[asyncio.Task]:
    """Restores the sampler and the queues, and starts the workers."""
    await super().start(step, state)
    return await self._rollouts.start(
      state.get('queues', {}), self._sampler.groups_from_queue
    )

  async def publish(
    self, step: int, learner: LearnerHandle, times: StepTimes, *, evaluates: bool
  ) -> None:
    """Hands weights over if the step is played or evaluated."""
    if evaluates or self._sampler.plays(step):
      await self._players.publish(step, learner, times, at_once=evaluates)

  async def advance(self, step: int) -> None:
    """Tells the queues which step is collected."""
    if self._sampler.plays(step):
      await self._rollouts.advance(step)

  async def metrics(self, step: int) -> Metrics:
    """Returns those of the engines, queues and sampler."""
    played = await self._rollouts.metrics()
    synced = self._rollouts.weight_syncer.metrics(step)
    return {**played, **synced, **self._sampler.metrics()}

  async def state(self) -> StateDict:
    """Returns the sampler's and the queues' states."""
    return {**await super().state(), 'queues': await self._rollouts.state_dict()}


class FileGroups(GroupSource):
  """Groups from the rows of files.

  Args:
    sampler: Reads them.
    num_steps: The steps of the phase.
    description: Of the rows, in one line.
    players: Play the evaluations; None without any.
  """

  def __init__(
    self,
    sampler: FileSampler,
    num_steps: int,
    *,
    description: str = '',
    players: Players | None = None,
  ):
    super().__init__(sampler, players)
    self.num_rows, self.num_steps = sampler.num_rows, num_steps
    self._description = description

  def describe(self) -> str:
    """Describes the rows."""
    return self._description
