"""Group source: gives a phase of training its groups, and plays its evaluations."""

import asyncio
import contextlib
import pathlib
import time
from collections.abc import Callable, Mapping, Sequence
from typing import TYPE_CHECKING, Any, Protocol

from jaxrl import spans
from jaxrl.algorithms import requirements
from jaxrl.data.file_sampler import FileSampler
from jaxrl.data.samplers import Sampler
from jaxrl.model_loading import LoadedModel
from jaxrl.options import ConfigError
from jaxrl.rollout.engine.actor_proxy import maybe_await
from jaxrl.types import Group
from launch.learner.learner_factory import LearnerHandle
from launch.rollouts import offline_data
from launch.rollouts.group_samplers import make_group_sampler
from launch.rollouts.rollout_scheduler import RolloutScheduler
from launch.settings.run_settings import RunSettings

if TYPE_CHECKING:
  from launch.rollouts.experience_store import StoredGroupSampler

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


class GroupSource(Protocol):
  """Protocol: provides the groups of a phase of training, and plays its evaluations.

  Attributes:
    num_rows: The most rows of a step.
    num_steps: The steps of the phase.
  """

  num_rows: int
  num_steps: int

  def describe(self) -> str:
    """Describes groups that are not played, in one line; '' for those that are."""
    ...

  async def start(self, step: int, state: Mapping[str, Any]) -> list[asyncio.Task]:
    """Restores what a checkpoint holds, and starts playing.

    Args:
      step: The step to go on with.
      state: What `state` gave; empty without a checkpoint.

    Returns:
      The tasks of the workers that play.

    Raises:
      ConfigError: For a checkpoint of a run with another source.
    """
    ...

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
    ...

  async def advance(self, step: int) -> None:
    """Tells those that play which step is collected."""
    ...

  async def next(self, step: int) -> list[Group]:
    """Waits for the groups of a step."""
    ...

  async def metrics(self, step: int) -> Metrics:
    """Returns the metrics of a step's groups; those of engines start anew."""
    ...

  async def yield_devices(self, learner: LearnerHandle) -> None:
    """Gives the learner the memory that it shares with engines, until `publish`."""
    ...

  async def evaluate(self, names: Sequence[str]) -> tuple[Metrics, list[Group]]:
    """Plays evaluation sets; returns their metrics and groups."""
    ...

  async def state(self) -> dict[str, Any]:
    """Returns what a checkpoint keeps."""
    ...

  async def saved(self, step: int) -> None:
    """Notes that the checkpoint of a step is on disk."""
    ...

  async def close(self) -> None:
    """Ends what it has started."""
    ...


class Players:
  """The rollout side of a run, as its sources of groups use it."""

  def __init__(
    self, settings: RunSettings, rollouts: RolloutScheduler, *, learns_here: bool
  ):
    """Takes the rollout side.

    Args:
      settings: Settings of the run.
      rollouts: Plays.
      learns_here: Whether the learner is in this process.
    """
    self.rollouts = rollouts
    self._sleeps = settings.placement.sleeps
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

  async def evaluate(self, names: Sequence[str]) -> tuple[Metrics, list[Group]]:
    """Plays evaluation sets."""
    return await self.rollouts.evaluate(names=names)

  async def close(self) -> None:
    """Ends the rollout side."""
    with contextlib.suppress(Exception):  # a dead actor cannot be told to stop
      await self.rollouts.close()


class PlayedGroups:
  """Groups that the run plays."""

  def __init__(self, settings: RunSettings, sampler: Sampler, players: Players):
    """Takes what plays and what samples.

    Args:
      settings: Settings of the run.
      sampler: Takes groups from those that are played.
      players: Plays them.
    """
    rows_per_group = requirements.rows_per_group(settings.algorithm)
    self.num_rows = settings.batch.num_groups * rows_per_group
    self.num_steps = settings.num_steps
    self._sampler = sampler
    self._players = players
    self._rollouts = players.rollouts
    self.yield_devices = players.yield_devices
    self.evaluate = players.evaluate
    self.close = players.close

  def describe(self) -> str:
    """Returns ''."""
    return ''

  async def start(self, step: int, state: Mapping[str, Any]) -> list[asyncio.Task]:
    """Restores the sampler and the queues, and starts the workers."""
    if state:
      _check_state(state['sampler'])
      self._sampler.load_state_dict(state['sampler'])
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

  async def next(self, step: int) -> list[Group]:
    """Waits for the sampler's groups."""
    return await self._sampler.next(step)

  async def metrics(self, step: int) -> Metrics:
    """Returns those of the engines, queues and sampler."""
    played = await self._rollouts.metrics()
    synced = self._rollouts.weight_syncer.metrics(step)
    return {**played, **synced, **self._sampler.metrics()}

  async def state(self) -> dict[str, Any]:
    """Returns the sampler's and the queues' states."""
    return {
      'sampler': self._sampler.state_dict(),
      'queues': await self._rollouts.state_dict(),
    }

  async def saved(self, step: int) -> None:
    """Needs to note nothing."""


class _UnplayedGroups:
  """Plays evaluations alone, if the run has any."""

  def __init__(self, players: Players | None):
    self._players = players

  async def publish(
    self, step: int, learner: LearnerHandle, times: StepTimes, *, evaluates: bool
  ) -> None:
    """Hands weights over before an evaluation."""
    if evaluates and self._players is not None:
      await self._players.publish(step, learner, times, at_once=True)

  async def advance(self, step: int) -> None:
    """Has nobody to tell."""

  async def yield_devices(self, learner: LearnerHandle) -> None:
    """Leaves the memory as it is."""

  async def evaluate(self, names: Sequence[str]) -> tuple[Metrics, list[Group]]:
    """Plays evaluation sets, if the run has any."""
    return ({}, []) if self._players is None else await self._players.evaluate(names)

  async def _drop_counts(self) -> None:
    """Has the engines count anew, as what they count belongs to no step."""
    if self._players is not None:
      await self._players.rollouts.metrics()

  async def close(self) -> None:
    """Ends the rollout side."""
    if self._players is not None:
      await self._players.close()


class FileGroups(_UnplayedGroups):
  """Groups from the rows of files."""

  def __init__(
    self,
    sampler: FileSampler,
    num_steps: int,
    *,
    description: str = '',
    players: Players | None = None,
  ):
    """Takes what reads the rows.

    Args:
      sampler: Reads them.
      num_steps: The steps of the phase.
      description: Of the rows, in one line.
      players: Play the evaluations; None without any.
    """
    super().__init__(players)
    self.num_rows, self.num_steps = sampler.num_rows, num_steps
    self._sampler = sampler
    self._description = description

  def describe(self) -> str:
    """Describes the rows."""
    return self._description

  async def start(self, step: int, state: Mapping[str, Any]) -> list[asyncio.Task]:
    """Restores the position in the files."""
    if state:
      _check_state(state['sampler'])
      self._sampler.load_state_dict(state['sampler'])
    return []

  async def next(self, step: int) -> list[Group]:
    """Returns the rows of a step."""
    return await self._sampler.next(step)

  async def metrics(self, step: int) -> Metrics:
    """Returns the sampler's."""
    await self._drop_counts()
    return self._sampler.metrics()

  async def state(self) -> dict[str, Any]:
    """Returns the position in the files."""
    return {'sampler': self._sampler.state_dict()}

  async def saved(self, step: int) -> None:
    """Needs to note nothing."""


class StoredGroups(_UnplayedGroups):
  """Groups that other runs have played, from a store."""

  def __init__(
    self, settings: RunSettings, store: 'StoredGroupSampler', players: Players | None
  ):
    """Takes the store.

    Args:
      settings: Settings of the run.
      store: Samples from it.
      players: Play the evaluations; None without any.
    """
    super().__init__(players)
    self.num_rows, self.num_steps = store.num_rows, settings.num_steps
    self._store = store

  def describe(self) -> str:
    """Describes the store."""
    return self._store.describe()

  async def start(self, step: int, state: Mapping[str, Any]) -> list[asyncio.Task]:
    """Restores the position in the store."""
    self._store.start(step, state.get('sampler'))
    return []

  async def next(self, step: int) -> list[Group]:
    """Waits for groups in the store."""
    return await self._store.next(step)

  async def metrics(self, step: int) -> Metrics:
    """Returns the sampler's and what the store's reader has counted."""
    await self._drop_counts()
    return self._store.metrics() | await self._store.counts()

  async def state(self) -> dict[str, Any]:
    """Returns the position in the store."""
    return {'sampler': self._store.state_dict()}

  async def saved(self, step: int) -> None:
    """Lets the store forget what no resumed run will read again."""
    await asyncio.to_thread(self._store.saved, step)

  async def close(self) -> None:
    """Closes the store."""
    await super().close()
    self._store.close()


def make_group_source(
  settings: RunSettings,
  policy: LoadedModel,
  players: Players | None,
  *,
  workdir: pathlib.Path,
  stop: Callable[[], bool],
) -> GroupSource:
  """Returns the source of a run's groups.

  Args:
    settings: Settings of the run.
    policy: The model that trains, with its tokenizer.
    players: The rollout side; None for a run that neither plays nor evaluates.
    workdir: Folder of the run.
    stop: Returns True once the user asked to end.

  Raises:
    ConfigError: For data that cannot be read, or a sampler that does not fit.
  """
  if not settings.plays:
    sampler = offline_data.make_offline_sampler(settings, policy.tokenizer)
    return FileGroups(
      sampler,
      offline_data.count_steps(settings, sampler),
      description=offline_data.describe(settings, sampler),
      players=players,
    )
  if settings.experience_store is not None:
    # Imported here because most runs play what they learn from.
    from launch.rollouts.experience_store import make_stored_sampler

    store = make_stored_sampler(settings, policy, workdir=workdir, stop=stop)
    return StoredGroups(settings, store, players)
  assert players is not None
  sampler = make_group_sampler(settings, policy, players.rollouts)
  return PlayedGroups(settings, sampler, players)


def _check_state(state: Mapping[str, Any]) -> None:
  """Raises ConfigError for a sampler's state of a run that learned from a store."""
  if 'store' in state:
    raise ConfigError(
      "--config.dataset.experience_store='': the run in this --workdir "
      'trains from a store: set the key again, or name another --workdir'
    )
