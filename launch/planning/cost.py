"""Estimates a run's memory by part and its time by phase on a machine."""

import dataclasses
import math
import operator
from collections.abc import Mapping, Sequence
from typing import Any

import jax

from jaxrl.models import lora
from jaxrl.training import staleness
from jaxrl.training.batching.batch_builder import BatchShape
from jaxrl.training.learner import Learner
from launch.planning import compiled_program, device_budget, engine_decode, planned_run
from launch.planning.compiled_program import (
  CompiledProgram,
  TimeEstimate,
  bytes_per_device,
)
from launch.planning.planned_run import PlannedRun
from launch.planning.publish_memory import PublishMemory
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


def estimate_cost(run: PlannedRun, target: Target, devices: Sequence[Any]) -> RunCost:
  """Compiles the learner's programs for the longest rows and adds up their costs.

  Args:
    run: The run.
    target: Machine to plan for.
    devices: Devices of the target, as `target_devices` returns them.

  Returns:
    The memory and the programs of the run.

  Raises:
    ConfigError: If the mesh does not divide the model or the batch.
  """
  mesh = planned_run.planned_mesh(run, devices)
  learner = planned_run.make_learner(run, mesh)
  shape, traced = learner.trace(run.buckets[-1])
  scored = learner.teachers.trace(shape.rows, shape.length) if learner.teachers else {}
  traced = scored | traced | PublishMemory(run, learner).trace_merge()
  compiled = {
    name: compiled_program.compile_program(
      name, one, target, _packed_micro_batches(shape, name)
    )
    for name, one in traced.items()
  }
  phases = phase_memory(run, learner, compiled, shape.num_parallel)
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
    num_parallel=shape.num_parallel,
    in_trees=shape.pack is not None and shape.pack.tree,
    scorings_per_teacher=_scorings_per_teacher(learner, shape.rows, len(scored)),
    num_small_programs=_num_small_programs(learner, has_teachers=bool(scored)),
  )


def _scorings_per_teacher(learner: Learner, rows: int, num_teachers: int) -> int:
  """Returns how often each teacher scores, assuming that all get equally many rows."""
  if not num_teachers or learner.teachers is None:
    return 0
  return -(-rows // (num_teachers * learner.teachers.chunk_rows))


def _num_small_programs(learner: Learner, *, has_teachers: bool) -> int:
  """Counts the programs of staleness and teacher fields, as `Learner._warm_up` does."""
  scored = 'old_logprobs' in learner._spec.scored_fields
  limit_programs = staleness.num_limit_programs(learner._staleness_limit, scored=scored)
  sizes = {(shape.rows, shape.length) for shape in learner.warmup_shapes}
  return (limit_programs + has_teachers) * len(sizes)


def _packed_micro_batches(shape: BatchShape, name: str) -> int:
  """Returns how many packed micro-batches of full rows a program loops over."""
  if shape.pack is None or name not in ('prepare', 'train'):
    return 1
  rows = shape.rows if name == 'prepare' else shape.micro_rows
  return -(-rows // (shape.pack.rows * (shape.pack.length // shape.length)))


def phase_memory(
  run: PlannedRun,
  learner: Learner,
  programs: Mapping[str, CompiledProgram],
  num_parallel: int,
  *,
  warm_start: bool = False,
) -> dict[str, dict[str, float]]:
  """Adds up the device memory in use in each phase of a step.

  Args:
    run: The run.
    learner: Its learner, built from shapes.
    programs: The compiled programs of the phases, and 'merge' if there is one.
    num_parallel: Micro-batches that an update processes at the same time.
    warm_start: Whether the learner is that of the warm start, which publishes nothing,
      and after which the next phase may begin with the parameters as loaded.

  Returns:
    Bytes of the fullest device by part; for each program, and for 'publish'.
  """
  resident = resident_memory(run, learner)
  if warm_start:
    resident['parameters as loaded'] = resident['parameters']
  trained = lora.trainable_params(learner.model.config, learner.params)
  gradients = bytes_per_device(trained)
  phases = {
    name: program_memory(resident, program, gradients)
    for name, program in programs.items()
    if name != 'merge'
  }
  for part in ('gradients', 'temporaries'):  # of each micro-batch that is done at once
    phases['train'][part] *= num_parallel
  if run.settings.plays and not warm_start:
    published = PublishMemory(run, learner).publishing(programs.get('merge'))
    phases['publish'] = {**resident, **published}
  return phases


def resident_memory(run: PlannedRun, learner: Learner) -> dict[str, float]:
  """Computes the memory that is in use in every phase.

  An engine in the learner's process is on one device, which is the fullest.

  Args:
    run: The run.
    learner: The run's learner, built from shapes.

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
  if run.settings.plays:
    memory |= PublishMemory(run, learner).pending()
    if not run.settings.cluster.ray:  # it lives in the learner's process
      memory |= engine_memory(run, learner.mesh.devices.flat[0].platform)
  return memory


def engine_memory(run: PlannedRun, platform: str) -> dict[str, float]:
  """Computes the memory of an engine.

  Args:
    run: The run.
    platform: Platform of the engine's devices: 'cpu', 'gpu' or 'tpu'.

  Returns:
    Bytes of each of the engine's devices, by part.
  """
  engine = run.settings.engine
  params = planned_run.served_params(run, run.weights_dtype)
  params = planned_run.encoded_shapes(params, engine.weights_format)
  model = dataclasses.replace(engine_decode.engine_model(run), platform=platform)
  cache, num_devices = engine_decode.engine_cache(run, model), engine.num_devices
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
    rollout = self.rollout or TimeEstimate(0.0, 0.0, 0.0)
    combine = max if self.overlapped else operator.add
    least, most = self.learn
    return combine(least, rollout.least), combine(most, rollout.most)


def estimate_step(
  run: PlannedRun,
  cost: RunCost,
  target: Target,
  decode: CompiledProgram | None = None,
) -> StepEstimate:
  """Estimates the time of one training step.

  Args:
    run: The run.
    cost: Its compiled programs.
    target: Machine to plan for.
    decode: The compiled decode step, None if the run plays nothing.

  Returns:
    Seconds by phase, and how often each program runs.
  """
  settings = run.settings
  batch, dtype = settings.batch, settings.model.dtype
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
    num_slots = settings.rollout.max_num_seqs * run.num_engines
    runs['decode'] = math.ceil(run.num_rows / num_slots) * run.max_response_tokens
    num_devices = settings.engine.num_devices
    one = compiled_program.estimate_time(decode, target, num_devices, run.engine_dtype)
    rollout = one * runs['decode']
  own_devices = (
    settings.cluster.ray and not device_budget.memory_budget(settings, target).engine
  )
  overlapped = settings.rollout.async_ratio > 0 and own_devices
  return StepEstimate(runs, times, rollout, cost.rows * cost.length, overlapped)


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


def estimate_publish(run: PlannedRun, target: Target) -> PublishEstimate:
  """Estimates the cost of publishing the weights to the engines.

  A full version is counted; where only adapters are sent, any version but the first.

  Args:
    run: The run.
    target: Machine to plan for.

  Returns:
    Bytes and seconds of one version.
  """
  transport, engine = run.settings.transport, run.settings.engine
  chip = target.chip
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
  elif transport.name == 'shared_memory':  # written to the host's, and read again
    rate = CPU_MEMORY_RATE / 2
  else:
    rate = chip.network * engine.num_devices
  size = bytes_per_device(shapes)
  names = {x.dtype.name for x in jax.tree.leaves(shapes)}
  description = f'{transport.name}, {prefix}{" and ".join(sorted(names))}'
  return PublishEstimate(size, description, size / rate)


def count_programs(run: PlannedRun, cost: RunCost) -> dict[str, int]:
  """Counts the programs that a run compiles before its first step.

  Args:
    run: The run.
    cost: Its compiled programs.

  Returns:
    The number of programs by part, 'learner' and 'engine'.
  """
  count = cost.num_shapes * cost.programs_per_shape + cost.num_small_programs
  counts = {'learner': count + ('merge' in cost.programs)}
  if cost.num_shapes and cost.num_parallel > 1:
    # The update is three programs, two of them of all shapes.
    counts['learner'] += 2
  if run.plays and run.settings.engine.kind == 'jax':
    # One prefill for each bucket of prompts; decode, place, copy, the weights' layout.
    counts['engine'] = len(run.prompt_buckets) + 4
  return counts
