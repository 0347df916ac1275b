"""Assembles a run from settings that `preparation.check_run` has accepted."""

import asyncio
import logging
import pathlib
from collections.abc import Callable, Sequence

from jaxrl.device_thread import DeviceThread
from jaxrl.model_loading import LoadedModel
from jaxrl.training import batch_fields
from launch.learner.learner_factory import make_run_mesh
from launch.logging.metric_sinks import MultiSink
from launch.planning import memory_fit
from launch.rollouts import offline_data
from launch.rollouts.env_datasets import (
  RunDatasets,
  describe_seen,
  load_datasets,
)
from launch.rollouts.group_samplers import make_group_sampler
from launch.rollouts.group_sources import (
  FileGroups,
  GroupSource,
  PlayedGroups,
  Players,
)
from launch.rollouts.preparation import describe_run, load_policy, name_formats
from launch.rollouts.rollout_scheduler import RolloutScheduler
from launch.runtime.runtime_base import Runtime
from launch.runtime.runtime_factory import close_and_reraise, make_runtime
from launch.settings import off_policy
from launch.settings.engine_settings import check_model
from launch.settings.run_settings import RunSettings
from launch.trainer import RunParts, Trainer

log = logging.getLogger(__name__)


def build(
  settings: RunSettings,
  *,
  workdir: pathlib.Path,
  sink: MultiSink,
  stop: Callable[[], bool],
  trace_steps: Sequence[tuple[int, int]] = (),
) -> Trainer:
  """Assembles a training run.

  Args:
    settings: Settings of the run, which `preparation.check_run` has accepted.
    workdir: Folder of the run.
    sink: Takes the run's metrics and trajectories.
    stop: Returns True once the user asked to end.
    trace_steps: The first and the last step of each trace.

  Raises:
    ConfigError: For data and models that cannot be loaded, or do not fit the settings.
  """
  runtime, device_thread = make_runtime(settings), DeviceThread()
  source: GroupSource | None = None
  try:
    mesh = None if runtime.hosts_learner else make_run_mesh(settings.mesh)
    policy, rollouts = _build_rollouts(settings, runtime, device_thread, workdir)
    players = None
    if rollouts is not None:
      sleeps, learns_here = settings.placement.sleeps, not runtime.hosts_learner
      players = Players(rollouts, sleeps=sleeps, learns_here=learns_here)
    source = _make_source(settings, policy, players, workdir, stop)
    teachers = None
    if batch_fields.asks_other_models(settings.algorithm):
      # Imported here because only algorithms that distil have teachers.
      from launch.learner.teacher_set import load_teachers

      teachers = load_teachers(settings, policy)
    if mesh is None:
      learners = runtime.start_learners(
        settings, policy.folder, memory_fit.make_fitting_learners
      )
    else:
      parts = settings, policy, mesh, device_thread, teachers
      learners = memory_fit.make_fitting_learners(*parts, workdir)
  except Exception as error:
    if source is not None:
      asyncio.run(source.close())
    close_and_reraise(runtime, error)
    raise
  trainer = Trainer(
    RunParts(settings, workdir, sink, stop, runtime),
    policy=policy.without_params(),
    learners=learners,
    device_thread=device_thread,
    source=source,
    trace_steps=trace_steps,
  )
  sink.decode_with(policy.tokenizer.decode)
  _name_formats_in_dumps(sink, settings, policy)
  trainer.facts = describe_run(settings, policy, learners.describe())
  optional_facts = {
    'placement': runtime.description,
    'rollouts': off_policy.describe(settings),
    'evaluation': rollouts and describe_seen(rollouts.seen_shares),
    'teacher': teachers and teachers.describe(),
    'data': source.describe(),
  }
  trainer.facts |= {label: text for label, text in optional_facts.items() if text}
  trainer.closing['checkpoints'] = str(workdir / 'checkpoints')
  return trainer


def _build_rollouts(
  settings: RunSettings,
  runtime: Runtime,
  device_thread: DeviceThread,
  workdir: pathlib.Path,
) -> tuple[LoadedModel, RolloutScheduler | None]:
  """Returns the policy, and the rollout side if the run plays or evaluates."""
  plays = settings.plays and settings.experience_store is None
  plays = plays or settings.evaluates
  # Data sets come first: they are cheap to load.
  datasets = load_datasets(settings, runtime) if plays else RunDatasets({}, {}, {})
  critic = settings.algorithm.value_loss is not None
  policy = load_policy(settings, workdir, critic=critic)
  if not plays:
    return policy, None
  check_model(settings, policy.model.config)
  played = policy.without_params()  # the learner publishes them
  rollouts = RolloutScheduler(settings, played, runtime, device_thread, datasets)
  asyncio.run(rollouts.check_prompts())
  return policy, rollouts


def _make_source(
  settings: RunSettings,
  policy: LoadedModel,
  players: Players | None,
  workdir: pathlib.Path,
  stop: Callable[[], bool],
) -> GroupSource:
  """Returns the source of the run's groups: files, a store, or its own episodes."""
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
    from launch.rollouts.experience_store import StoredGroups

    return StoredGroups(settings, policy, players, workdir=workdir, stop=stop)
  assert players is not None
  sampler = make_group_sampler(settings, policy, players.rollouts)
  return PlayedGroups(settings, sampler, players)


def _name_formats_in_dumps(
  sink: MultiSink, settings: RunSettings, policy: LoadedModel
) -> None:
  if settings.trajectory_dump is None or not settings.trajectory_dump.path:
    return
  from launch.logging.trajectory_dump import TrajectoryDump  # few runs keep theirs

  for each in sink.sinks:
    if isinstance(each, TrajectoryDump):
      each.formats(name_formats(settings.chat, policy))
