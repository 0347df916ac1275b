"""Assemble a run from its settings; all errors in them are raised here, before work."""

import asyncio
import logging
import os
import pathlib
import shutil
from collections.abc import Callable, Sequence
from typing import Any

import jax

from jaxrl import hub
from jaxrl import model_loading as policies
from jaxrl.algorithms import requirements
from jaxrl.call_strings import ConfigError, join_calls
from jaxrl.data.chat_tokenizer import ChatTokenizer
from jaxrl.data.seeds import fold_seed
from jaxrl.device_thread import DeviceThread
from jaxrl.functional.components import call_string
from jaxrl.model_loading import LoadedModel
from jaxrl.training import batch_fields
from launch.components import offline_data
from launch.components.env_datasets import (
  RunDatasets,
  describe_seen,
  describe_tasks,
  load_datasets,
)
from launch.components.group_sources import GroupSource, Players, make_group_source
from launch.components.learner_factory import (
  LearnerFactory,
  make_run_mesh,
)
from launch.components.rollout_scheduler import RolloutScheduler
from launch.logging.metric_loggers import MultiLogger
from launch.planning import memory_fit
from launch.runtime import placement
from launch.runtime.local_runtime import LocalRuntime
from launch.runtime.runtime_interface import Runtime
from launch.settings import off_policy
from launch.settings.engine_settings import check_model
from launch.settings.run_settings import RunSettings
from launch.settings.validation import validate, validate_training
from launch.trainer import RunParts, Trainer

log = logging.getLogger(__name__)


def build(
  settings: RunSettings,
  *,
  workdir: pathlib.Path,
  writers: MultiLogger,
  stop: Callable[[], bool],
  trace_steps: Sequence[tuple[int, int]] = (),
) -> Trainer:
  """Assembles a training run.

  Args:
    settings: settings of the run.
    workdir: folder of the run.
    writers: takes the run's metrics and trajectories.
    stop: returns True once the user asked to end.
    trace_steps: the first and the last step of each trace.

  Raises:
    ConfigError: for settings that cannot be, or data and models that cannot be loaded.
  """
  validate_run(settings)
  validate_training(settings)
  runtime, device_thread = make_runtime(settings), DeviceThread()
  source: GroupSource | None = None
  try:
    mesh = None if runtime.hosts_learner else make_run_mesh(settings)
    policy, rollouts = _build_rollouts(settings, runtime, device_thread, workdir)
    players = None
    if rollouts is not None:
      players = Players(settings, rollouts, learns_here=not runtime.hosts_learner)
    source = make_group_source(settings, policy, players, workdir=workdir, stop=stop)
    teachers = None
    if batch_fields.teacher_fields(settings.algorithm):
      # Imported here because only algorithms that distil have teachers.
      from launch.components.teacher_set import load_teachers

      teachers = load_teachers(settings, policy)
    if mesh is None:
      learners = runtime.start_learners(settings, policy.folder)
    else:
      parts = settings, policy, mesh, device_thread, teachers
      learners = memory_fit.make_fitting_learners(*parts, workdir)
  except Exception as error:
    if source is not None:
      asyncio.run(source.close())
    close_and_reraise(runtime, error)
    raise
  trainer = Trainer(
    RunParts(settings, workdir, writers, stop, runtime),
    policy=policy.without_params(),
    learners=learners,
    device_thread=device_thread,
    source=source,
    trace_steps=trace_steps,
  )
  writers.decode_with(policy.tokenizer.decode)
  _name_formats_in_dumps(writers, settings, policy)
  trainer.facts = _describe_run(settings, policy, learners)
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


def validate_run(settings: RunSettings) -> None:
  """Checks the settings of any run that plays or trains.

  Raises:
    ConfigError: for settings that cannot be.
  """
  validate(settings)
  if settings.rollout.rewards:
    # Imported here because most rewards are the environments' own.
    from launch.components.reward_terms import validate_rewards

    validate_rewards(settings)


def close_and_reraise(runtime: Runtime, error: Exception) -> None:
  """Closes the runtime after an error; raises the error's root cause if it has one."""
  cause = (
    error if isinstance(error, ConfigError) else asyncio.run(runtime.root_cause(error))
  )
  asyncio.run(runtime.close())
  if cause is not error:
    raise cause from error


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


def make_runtime(settings: RunSettings, *, learns: bool = True) -> Runtime:
  """Returns the runtime of the run's parts: this process, or Ray.

  Args:
    settings: settings of the run.
    learns: whether there is a learner, which needs devices too.

  Raises:
    ConfigError: for parts that do not fit on the devices.
  """
  cluster = settings.cluster
  if not cluster.ray:
    os.environ.update(placement.single_process_env(settings))
    return LocalRuntime(settings.weight_sync.transport)
  from launch.runtime.ray_runtime import RayRuntime  # Ray: seconds

  runtime = RayRuntime(cluster.address, settings.weight_sync.transport)
  try:
    hides = runtime.reserve(settings, has_learner=learns).others.env
  except Exception:
    asyncio.run(runtime.close())
    raise
  if hides:  # the actors have the devices; this process must not take their memory
    jax.config.update('jax_platforms', hides['JAX_PLATFORMS'])
  return runtime


def load_policy(
  settings: RunSettings, workdir: pathlib.Path, *, critic: bool
) -> LoadedModel:
  """Loads the checkpoint's policy, or makes a random one.

  A random policy has its teacher's tokenizer if the run has a teacher, and else one
  that is trained on the run's texts.

  Args:
    settings: settings of the run.
    workdir: folder of the run, where a random policy is saved.
    critic: whether the policy has a value head.

  Raises:
    ConfigError: for a folder that holds no model, or a run without texts.
  """
  model = settings.model
  options: dict[str, Any] = {
    **model.compute_options,
    'value_head': critic,
    'chat': model.chat,
  }
  if model.checkpoint:
    return policies.load_model(model.checkpoint, **options)
  if not (workdir / 'config.json').exists():  # a start that failed may have left one
    shutil.rmtree(workdir / 'model', ignore_errors=True)
  key = jax.random.key(fold_seed(settings.seed, 'model'))
  shape = model.random
  assert shape is not None
  if settings.teacher.folders:
    # Imported here because only algorithms that distil have teachers.
    from launch.components.teacher_set import teacher_vocabulary

    options['tokenizer'], vocab_size = teacher_vocabulary(settings)
    shape = shape.replace(vocab_size=vocab_size)
    texts = ()
  else:
    texts = offline_data.tokenizer_texts(settings)
  return policies.create_model(workdir / 'model', shape, texts, key, **options)


def _describe_replies(settings: RunSettings, policy: LoadedModel) -> str:
  """Says which tokens end a reply, and warns if that is doubtful."""
  if policy.tokenizer.chat_template is None:
    return 'no chat template: the model learns texts alone'
  chat = ChatTokenizer(policy.tokenizer, settings.model.chat)
  if chat.turn_end.doubt:
    log.warning('--config.model.checkpoint: %s', chat.turn_end.doubt)
  return chat.describe()


def name_formats(settings: RunSettings, policy: LoadedModel) -> dict[str, str]:
  """Returns the names of how the policy writes tool calls and thoughts."""
  if policy.tokenizer.chat_template is None:
    return {}
  return ChatTokenizer(policy.tokenizer, settings.model.chat).format_names


def _name_formats_in_dumps(
  writers: MultiLogger, settings: RunSettings, policy: LoadedModel
) -> None:
  if settings.trajectory_dump is None or not settings.trajectory_dump.path:
    return
  from launch.logging.trajectory_dump import TrajectoryDump  # few runs keep theirs

  for sink in writers.sinks:
    if isinstance(sink, TrajectoryDump):
      sink.formats(name_formats(settings, policy))


def _describe_run(
  settings: RunSettings, policy: LoadedModel, learners: LearnerFactory
) -> dict[str, str]:
  """Describes the run, a line for each part of it."""
  shape, algorithm = policy.model.config, settings.algorithm
  count = sum(x.size for x in jax.tree.leaves(policy.params))
  components = {
    slot: call_string(component)
    for slot, component in requirements.components_of(algorithm).items()
  }
  components['aggregation'] = str(algorithm.aggregation)
  for key in ('filters', 'shapers'):
    if calls := getattr(algorithm, key):
      components[key] = join_calls(calls)
  if algorithm.batch_unit == 'pair':  # its loss is a mean over pairs, whatever is set
    components['aggregation'] = 'mean over pairs'
  listing = ', '.join(f'{slot}={text}' for slot, text in components.items())
  origin = hub.describe_checkpoint(settings.model.checkpoint) or 'scratch'
  return {
    'model': f'{shape.family}, {count:,} parameters, {shape.num_layers} layers, '
    f'vocabulary {shape.vocab_size}, from {origin}',
    'replies': _describe_replies(settings, policy),
    'devices': learners.describe(),
    'data': describe_tasks(settings),
    'algorithm': f'{settings.algorithm_name}: {listing}',
  }
