"""Estimates a run's memory by part and its time by phase on a machine."""

import dataclasses
import math
from collections.abc import Sequence
from typing import Any

import jax
from jax.sharding import Mesh

from jaxrl.models import lora
from jaxrl.training import staleness
from jaxrl.training.batching.batch_builder import BatchShape
from jaxrl.training.learner import Learner
from launch.planning import (
  compiled_program,
  device_budget,
  engine_decode,
  planned_run,
  publish_memory,
)
from launch.planning.compiled_program import (
  CompiledProgram,
  TimeEstimate,
  bytes_per_device,
)
from launch.planning.engine_decode import PlannedEngine
from launch.planning.planned_run import PlannedRun
from launch.planning.targets import CPU_MEMORY_RATE, Target


@dataclasses.dataclass(frozen=True)
class RunCost:
  """Holds the memory and the programs of a run on one mesh of a target.

  Attributes:
    mesh: Size of each mesh axis.
    rows: Rows of the batch that the programs take.
    length: Tokens of each row of that batch.
    micro_rows: Rows of a micro-batch.
    num_shapes: Number of batch shapes that are compiled ahead; 0 for a model that sees
      images, whose programs are compiled with the batches.
    programs: Compiled programs by name.
    memory: Bytes of the fullest device, by part.
    limit: Bytes of each device that the learner may use.
    phase: The phase with the highest peak: 'publish' or the name of a program.
    num_parallel: Micro-batches that an update processes at the same time.
    in_trees: Whether packed rows share tokens in trees.
    scorings_per_teacher: How often a step runs each teacher's program.
    num_small_programs: Programs compiled in addition, whose costs are negligible.
    peaks: Bytes of the fullest device, by phase.
  """

  mesh: dict[str, int]
  rows: int
  length: int
  micro_rows: int
  num_shapes: int
  programs: dict[str, CompiledProgram]
  memory: dict[str, float]
  limit: float
  phase: str
  num_parallel: int = 1
  in_trees: bool = False
  scorings_per_teacher: int = 0
  num_small_programs: int = 0
  peaks: dict[str, float] = dataclasses.field(default_factory=dict)

  @property
  def total(self) -> float:
    """Bytes of the fullest device in the phase with the highest peak."""
    return sum(self.memory.values())

  @property
  def programs_per_shape(self) -> int:
    """Number of the learner's programs for each shape of batches."""
    return len(self.programs.keys() - {'merge'})

  @property
  def fits(self) -> bool:
    """Whether the run fits the limit and the compiler accepted every program."""
    refused = any(program.too_large for program in self.programs.values())
    return self.total <= self.limit and not refused


def estimate_cost(
  run: PlannedRun, target: Target, devices: Sequence[Any], *, engine: PlannedEngine
) -> RunCost:
  """Compiles the learner's programs for the longest rows and adds up their costs.

  Args:
    run: The run.
    target: Machine to plan for.
    devices: Devices of the target, as `target_devices` returns them.
    engine: The run's rollout engine.

  Returns:
    The memory and the programs of the run.

  Raises:
    ConfigError: If the mesh does not divide the model or the batch.
  """
  mesh = planned_run.planned_mesh(run, devices)
  learner = planned_run.make_learner(run, mesh)
  shape, traced = learner.trace(run.buckets[-1])
  teacher_programs = (
    learner.teachers.trace(shape.rows, shape.length) if learner.teachers else {}
  )
  traced = teacher_programs | traced
  compiled = {
    name: compiled_program.compile_program(
      name, one, target, _packed_micro_batches(shape, name)
    )
    for name, one in (traced | publish_memory.trace_merge(run, learner)).items()
  }
  resident_bytes = resident_memory(run, learner, engine)
  gradient_bytes = bytes_per_device(
    lora.trainable_params(learner.model.config, learner.params)
  )
  phases = {
    name: program_memory(resident_bytes, compiled[name], gradient_bytes)
    for name in traced
  }
  num_parallel = 1 if shape.pack is None else shape.pack.num_parallel
  for name in ('gradients', 'temporaries'):  # of each micro-batch that is done at once
    phases['train'][name] *= num_parallel
  if run.publishes_weights:
    merge = compiled.get('merge')
    phases['publish'] = {
      **resident_bytes,
      **publish_memory.publishing_memory(run, learner, merge),
    }
  peaks = {name: sum(parts.values()) for name, parts in phases.items()}
  phase = max(peaks, key=peaks.__getitem__)
  return RunCost(
    mesh=dict(mesh.shape),
    rows=shape.rows,
    length=shape.length,
    micro_rows=shape.micro_rows,
    num_shapes=len(learner.warmup_shapes),
    programs=compiled,
    memory=phases[phase],
    limit=device_budget.memory_budget(run.settings, target).limit,
    phase=phase,
    peaks=peaks,
    num_parallel=num_parallel,
    in_trees=shape.pack is not None and shape.pack.tree,
    scorings_per_teacher=_scorings_per_teacher(
      learner, shape.rows, len(teacher_programs)
    ),
    num_small_programs=_num_small_programs(learner, len(teacher_programs)),
  )


def _scorings_per_teacher(learner: Learner, rows: int, num_teachers: int) -> int:
  """Returns how often each teacher scores, assuming that all get equally many rows."""
  if not num_teachers or learner.teachers is None:
    return 0
  return -(-rows // (num_teachers * learner.teachers.chunk_rows))


def _num_small_programs(learner: Learner, num_teachers: int) -> int:
  """Counts the programs of staleness and teacher fields, as `Learner._warm_up` does."""
  scored = 'old_logprobs' in learner._spec.scored_fields
  per_shape = staleness.num_limit_programs(
    learner._staleness_limit, scored=scored
  ) + bool(num_teachers)
  return per_shape * len(
    {(shape.rows, shape.length) for shape in learner.warmup_shapes}
  )


def _packed_micro_batches(shape: BatchShape, name: str) -> int:
  """Returns how many packed micro-batches of full rows a program loops over."""
  if shape.pack is None or name not in ('prepare', 'train'):
    return 1
  rows = shape.rows if name == 'prepare' else shape.micro_rows
  return -(-rows // (shape.pack.rows * (shape.pack.length // shape.length)))


def resident_memory(
  run: PlannedRun, learner: Learner, engine: PlannedEngine
) -> dict[str, float]:
  """Computes the memory that is in use in every phase.

  An engine in the learner's process is on one device, which is the fullest.

  Args:
    run: The run.
    learner: The run's learner, built from shapes.
    engine: The run's rollout engine.

  Returns:
    Bytes of each device, by part.
  """
  arrays = learner.device_arrays
  state = arrays['state']
  memory = {
    'parameters': bytes_per_device(state.params),
    'optimizer state': bytes_per_device(state.opt_state),
    'algorithm state': bytes_per_device(state.algorithm_state),
    'reference': bytes_per_device(arrays.get('reference')),
    'teachers': bytes_per_device(arrays.get('teachers')),
  }
  if run.publishes_weights:
    memory |= publish_memory.pending_memory(run, learner)
    if not engine.own_process:
      platform = learner.mesh.devices.flat[0].platform
      memory |= engine_memory(run, engine, platform)
  return memory


def engine_memory(
  run: PlannedRun, engine: PlannedEngine, platform: str
) -> dict[str, float]:
  """Computes the memory of an engine.

  Args:
    run: The run.
    engine: The run's rollout engine.
    platform: Platform of the engine's devices: 'cpu', 'gpu' or 'tpu'.

  Returns:
    Bytes of each of the engine's devices, by part.
  """
  params = planned_run.served_params(run, engine.weights_dtype)
  params = planned_run.encoded_shapes(params, engine.weights_format)
  model = dataclasses.replace(
    engine_decode.engine_model(run, engine), platform=platform
  )
  cache = jax.eval_shape(
    lambda: model.init_cache(engine.max_num_seqs, engine.max_length)
  )
  num_devices = engine.num_devices
  return {
    "engine's weights": bytes_per_device(params) / num_devices,
    'cache': bytes_per_device(cache) / num_devices,
  }


def program_memory(
  resident: dict[str, float], program: CompiledProgram, gradient_bytes: float
) -> dict[str, float]:
  """Returns the device memory in use while a program runs, by part, in bytes."""
  is_update = program.name == 'train'
  resident_arguments = ('parameters', 'algorithm state')
  resident_arguments += ('optimizer state',) if is_update else ('reference',)
  resident_argument_bytes = sum(resident[name] for name in resident_arguments)
  if program.name.startswith('teacher'):
    own = resident['parameters'] + resident['reference']  # of its own teacher
    resident_argument_bytes = resident['teachers'] or own
  gradients = min(program.temporaries, gradient_bytes) if is_update else 0.0
  return {
    **resident,
    'batch': max(0.0, program.arguments - resident_argument_bytes),
    'gradients': gradients,
    'temporaries': program.temporaries - gradients,
    'outputs': program.outputs,
  }


@dataclasses.dataclass(frozen=True)
class StepEstimate:
  """Holds the time of one training step, by phase.

  Attributes:
    runs: How often each program runs in a step, by name.
    times: Time of each program of the learner in a step, by name.
    rollout: Time of the rollouts, None if the run plays none.
    tokens: Tokens of a batch.
    overlapped: Whether rollouts run while the learner updates.
  """

  runs: dict[str, int]
  times: dict[str, TimeEstimate]
  rollout: TimeEstimate | None
  tokens: int
  overlapped: bool

  @property
  def learn(self) -> tuple[float, float]:
    """Least and most seconds of the learner."""
    times = self.times.values()
    return sum(t.least for t in times), sum(t.most for t in times)

  @property
  def step(self) -> tuple[float, float]:
    """Least and most seconds of a step; overlapped rollouts run beside the learner."""
    rollout = (self.rollout.least, self.rollout.most) if self.rollout else (0.0, 0.0)
    combine = max if self.overlapped else (lambda a, b: a + b)
    return combine(self.learn[0], rollout[0]), combine(self.learn[1], rollout[1])


def estimate_step(
  run: PlannedRun,
  cost: RunCost,
  target: Target,
  engine: PlannedEngine,
  decode: CompiledProgram | None,
) -> StepEstimate:
  """Estimates the time of one training step.

  Args:
    run: The run.
    cost: Its compiled programs.
    target: Machine to plan for.
    engine: The run's rollout engine.
    decode: The compiled decode step, None if the run plays nothing.

  Returns:
    Seconds by phase, and how often each program runs.
  """
  batch, dtype = run.settings.batch, run.settings.model.dtype
  runs = dict.fromkeys(cost.programs, 1)
  runs['train'] = batch.num_minibatches * batch.ppo_epochs
  runs |= {
    name: cost.scorings_per_teacher for name in runs if name.startswith('teacher')
  }
  times = {
    name: compiled_program.estimate_time(program, target, target.size, dtype)
    * runs[name]
    for name, program in cost.programs.items()
  }
  rollout = None
  if decode is not None:
    num_slots = engine.max_num_seqs * num_engines(run)
    runs['decode'] = math.ceil(run.num_rows / num_slots) * max_response_tokens(run)
    one = compiled_program.estimate_time(
      decode, target, engine.num_devices, engine.dtype
    )
    rollout = one * runs['decode']
  own_devices = (
    engine.own_process and not device_budget.memory_budget(run.settings, target).engine
  )
  overlapped = run.settings.rollout.async_ratio > 0 and own_devices
  return StepEstimate(runs, times, rollout, cost.rows * cost.length, overlapped)


def num_engines(run: PlannedRun) -> int:
  """Returns the number of rollout engines."""
  return max(1, run.settings.cluster.num_engines)


def max_response_tokens(run: PlannedRun) -> int:
  """Returns the largest number of tokens that a response may have."""
  settings = run.settings
  limits = [settings.response_limit(tag) for tag in settings.training_tags]
  return min([settings.batch.max_length - 1, *limits])


@dataclasses.dataclass(frozen=True)
class PublishEstimate:
  """Holds the cost of publishing one version of the weights.

  Attributes:
    bytes: Size of the version.
    description: Transport and dtypes, for people.
    seconds: Time at the stated rates.
  """

  bytes: float
  description: str
  seconds: float


def estimate_publish(
  run: PlannedRun, target: Target, engine: PlannedEngine
) -> PublishEstimate:
  """Estimates the cost of publishing the weights to the engines.

  A full version is counted; where only adapters are sent, any version but the first.

  Args:
    run: The run.
    target: Machine to plan for.
    engine: The run's rollout engine.

  Returns:
    Bytes and seconds of one version.
  """
  transport, chip = run.settings.transport, target.chip
  shapes, prefix = planned_run.served_params(run, transport.options.dtype), ''
  adapters = run.trained_shape.lora
  if adapters and adapters.transfer == 'adapters' and transport.name != 'inprocess':
    params = run.policy(run.trained_shape).params
    shapes, prefix = lora.trainable_params(run.trained_shape, params), 'adapters in '
  else:
    shapes = planned_run.encoded_shapes(shapes, engine.weights_format)
  if transport.name == 'inprocess':  # read, and written
    rate = chip.memory_rate / 2
  elif transport.direct:
    rate = chip.inter_node_link or chip.link
  elif (
    transport.name == 'shared_memory'
  ):  # written to the host's memory, and read again
    rate = CPU_MEMORY_RATE / 2
  else:
    rate = chip.network * engine.num_devices
  size = bytes_per_device(shapes)
  names = {x.dtype.name for x in jax.tree.leaves(shapes)}
  description = f'{transport.name}, {prefix}{" and ".join(sorted(names))}'
  return PublishEstimate(size, description, size / rate)


def count_programs(
  run: PlannedRun, cost: RunCost, engine: PlannedEngine, plays: bool
) -> dict[str, int]:
  """Counts the programs that a run compiles before its first step.

  Args:
    run: The run.
    cost: Its compiled programs.
    engine: The run's rollout engine.
    plays: Whether the run generates rollouts.

  Returns:
    The number of programs by part, 'learner' and 'engine'.
  """
  num_learner_programs = (
    cost.num_shapes * cost.programs_per_shape
    + cost.num_small_programs
    + ('merge' in cost.programs)
  )
  counts = {'learner': num_learner_programs}
  if cost.num_shapes and cost.num_parallel > 1:
    # The update is three programs, two of them of all shapes.
    counts['learner'] += 2
  if plays and engine.kind == 'jax':
    # One prefill for each bucket of prompts; decode, place, copy, the weights' layout.
    counts['engine'] = len(engine.buckets) + 4
  return counts


def mesh_text(mesh: Mesh | dict[str, int]) -> str:
  """Formats the mesh axes that are larger than 1, as in 'data 2 × fsdp 4'."""
  sizes = dict(mesh.shape) if isinstance(mesh, Mesh) else mesh
  axes = [f'{name} {size}' for name, size in sizes.items() if size > 1]
  return ' × '.join(axes) or 'one device'
