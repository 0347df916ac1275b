"""What a run needs and takes on a machine: memory by part, time by phase."""

import dataclasses
from collections.abc import Sequence
from typing import Any

import jax
from jax.sharding import Mesh

from jaxrl.models import lora
from jaxrl.training import stale
from jaxrl.training.learner import Learner
from jaxrl.training.programs import Shape
from launch import algorithm as algorithms
from launch import weights
from launch.planning import abstract, decode, handover, program, room
from launch.planning.abstract import Run
from launch.planning.decode import Engine
from launch.planning.program import Program, Time, per_device
from launch.targets import CPU_MEMORY_RATE, Target


@dataclasses.dataclass(frozen=True)
class Cost:
  """A run on a mesh of a target. rows, length: of the batch that programs take.

  shapes: of usual batches, each compiled for. programs: by name. memory: bytes of the
  fullest device, by part. phase: the fullest one, 'publish' or that of a program.
  abreast: micro-batches that an update does at once. taught: how often in a step each
  teacher scores some rows. small: programs compiled beside these, that take nothing.
  """

  mesh: dict[str, int]
  rows: int
  length: int
  micro_rows: int
  shapes: int
  programs: dict[str, Program]
  memory: dict[str, float]
  limit: float
  phase: str
  abreast: int = 1
  taught: int = 0
  small: int = 0

  @property
  def total(self) -> float:
    return sum(self.memory.values())

  @property
  def fits(self) -> bool:
    refused = any(one.too_large for one in self.programs.values())
    return self.total <= self.limit and not refused


def of(run: Run, target: Target, devices: Sequence[Any], *, engine: Engine) -> Cost:
  """Compiles the learner's programs for the longest rows and adds up what they take."""
  mesh = abstract.mesh_of(run.config, devices)
  learner = abstract.make_learner(run, mesh)
  shape, traced = learner.traced(run.buckets[-1])
  taught = learner.teachers.traced(shape.rows, shape.length) if learner.teachers else {}
  traced = taught | traced
  made = {
    name: program.build(name, one, target, _rounds(shape, name))
    for name, one in (traced | handover.traced(run, learner)).items()
  }
  kept = resident(run, learner, engine)
  learned = per_device(lora.trained(learner.model.config, learner.params))
  phases = {name: _memory(kept, made[name], learned) for name in traced}
  ways = 1 if shape.pack is None else shape.pack.abreast
  for name in ('gradients', 'temporaries'):  # of each micro-batch that is done at once
    phases['train'][name] *= ways
  if run.sends:
    merge = made.get('merge')
    phases['publish'] = {**kept, **handover.passing(run, learner, merge)}
  phase = max(phases, key=lambda name: sum(phases[name].values()))
  return Cost(
    mesh=dict(mesh.shape),
    rows=shape.rows,
    length=shape.length,
    micro_rows=shape.micro_rows,
    shapes=len(learner.shapes),
    programs=made,
    memory=phases[phase],
    limit=room.of(run.config, target).limit,
    phase=phase,
    abreast=ways,
    taught=_times_taught(learner, shape.rows, len(taught)),
    small=_small(learner, len(taught)),
  )


def _times_taught(learner: Learner, rows: int, teachers: int) -> int:
  """Each teacher has its part of the rows, all alike: which have which is not known."""
  if not teachers or learner.teachers is None:
    return 0
  return -(-rows // (teachers * learner.teachers.chunk_rows))


def _small(learner: Learner, teachers: int) -> int:
  """Programs of staleness and of teachers' columns, as `Learner._warm_up` has them."""
  scored = 'old_logprobs' in learner._spec.needs
  each = stale.num_programs(learner._bound, scored=scored) + bool(teachers)
  return each * len({(shape.rows, shape.length) for shape in learner.shapes})


def _rounds(shape: Shape, name: str) -> int:
  """Packed micro-batches that a program goes through, of rows that are all full."""
  if shape.pack is None or name not in ('prepare', 'train'):
    return 1
  rows = shape.rows if name == 'prepare' else shape.micro_rows
  return -(-rows // (shape.pack.rows * (shape.pack.length // shape.length)))


def resident(run: Run, learner: Learner, engine: Engine) -> dict[str, float]:
  """Bytes of each device that are there in every phase, by part.

  An engine in the learner's process is on one device, which is the fullest.
  """
  arrays = learner.resident
  state = arrays['state']
  found = {
    'parameters': per_device(state.params),
    'optimizer state': per_device(state.opt_state),
    'algorithm state': per_device(state.algorithm_state),
    'reference': per_device(arrays.get('reference')),
    'teachers': per_device(arrays.get('teachers')),
  }
  if run.sends:
    found |= handover.held(run, learner)
    if not engine.alone:
      platform = learner.mesh.devices.flat[0].platform
      found |= engine_memory(run, engine, platform)
  return found


def engine_memory(run: Run, engine: Engine, platform: str) -> dict[str, float]:
  """Bytes that an engine holds on each of its devices, of a platform, by part."""
  inside = weights.plan(run.config).name == 'inprocess'
  copies = 2 if inside else 1  # as published, and as decode reads them
  given = abstract.served(run, engine.weights)
  model = dataclasses.replace(decode.model_of(run, engine), platform=platform)
  cache = jax.eval_shape(lambda: model.init_cache(engine.num_slots, engine.max_length))
  share = engine.devices
  return {
    "engine's weights": copies * per_device(given) / share,
    'cache': per_device(cache) / share,
  }


def _memory(kept: dict[str, float], made: Program, learned: float) -> dict[str, float]:
  """What the devices hold while a program runs, by part. learned: bytes of what has
  gradients.
  """
  train = made.name == 'train'
  own = ('parameters', 'algorithm state')
  own += ('optimizer state',) if train else ('reference',)
  taken = sum(kept[name] for name in own)
  if made.name.startswith('teacher'):
    taken = kept['teachers']
  gradients = min(made.temporaries, learned) if train else 0.0
  return {
    **kept,
    'batch': max(0.0, made.arguments - taken),
    'gradients': gradients,
    'temporaries': made.temporaries - gradients,
    'outputs': made.outputs,
  }


@dataclasses.dataclass(frozen=True)
class Step:
  """Seconds of a step of a run, by phase, and how often each program runs in it."""

  runs: dict[str, int]
  times: dict[str, Time]
  rollout: Time | None
  tokens: int
  together: bool

  @property
  def learn(self) -> tuple[float, float]:
    times = self.times.values()
    return sum(t.least for t in times), sum(t.most for t in times)

  @property
  def step(self) -> tuple[float, float]:
    """Least and most. Rollouts that run ahead take their time beside the learner's."""
    play = (self.rollout.least, self.rollout.most) if self.rollout else (0.0, 0.0)
    join = max if self.together else (lambda a, b: a + b)
    return join(self.learn[0], play[0]), join(self.learn[1], play[1])


def step(
  run: Run, cost: Cost, target: Target, engine: Engine, one: Program | None
) -> Step:
  """one: the decode step, if the run plays."""
  batch, dtype = run.config.batch, run.config.model.dtype
  runs = dict.fromkeys(cost.programs, 1)
  runs['train'] = batch.minibatches * batch.epochs
  runs |= {name: cost.taught for name in runs if name.startswith('teacher')}
  times = {
    name: program.seconds(made, target, target.size, dtype) * runs[name]
    for name, made in cost.programs.items()
  }
  rollout = None
  if one is not None:
    rounds = -(-run.num_rows // (engine.num_slots * engines(run))) * response(run)
    rollout = program.seconds(one, target, engine.devices, engine.dtype) * rounds
    runs['decode'] = rounds
  apart = engine.alone and not room.of(run.config, target).engine
  ahead = run.config.rollout.async_ratio > 0 and apart
  return Step(runs, times, rollout, cost.rows * cost.length, ahead)


def engines(run: Run) -> int:
  return max(1, run.config.cluster.num_engines)


def response(run: Run) -> int:
  """Tokens that the longest response may have."""
  config = run.config
  limits = [algorithms.response_limit(config, tag) for tag in config.env]
  return min([config.batch.max_length - 1, *limits])


@dataclasses.dataclass(frozen=True)
class Broadcast:
  """Bytes of one version of the weights, the way they go, and the seconds at best."""

  bytes: float
  way: str
  seconds: float


def broadcast(run: Run, target: Target, engine: Engine) -> Broadcast:
  """Of a version in full; where adapters are sent, of one that is not the first."""
  plan, chip = weights.plan(run.config), target.chip
  shapes, what = abstract.served(run, plan.options.get('dtype')), ''
  own = run.learned.lora
  if own is not None and own.send == 'adapters' and plan.name != 'inprocess':
    shapes = lora.trained(run.learned, run.policy(run.learned).params)
    what = 'adapters in '
  size = per_device(shapes)
  names = sorted({x.dtype.name for x in jax.tree.leaves(shapes)})
  dtype = what + ' and '.join(names)
  if plan.name == 'inprocess':
    return Broadcast(size, f'{plan.name}, {dtype}', 2 * size / chip.memory_rate)
  if plan.direct:
    rate = chip.between or chip.link
    return Broadcast(size, f'{plan.name}, {dtype}', size / rate)
  if plan.name == 'shared_memory':  # written to the host's memory, and read again
    return Broadcast(size, f'{plan.name}, {dtype}', 2 * size / CPU_MEMORY_RATE)
  rate = chip.network * engine.devices
  return Broadcast(size, f'{plan.name}, {dtype}', size / rate)


def num_programs(run: Run, cost: Cost, engine: Engine, plays: bool) -> dict[str, int]:
  """How many the run compiles before its first step, by part."""
  bound = cost.programs.keys() - {'merge'}  # to a shape of batches
  own = cost.shapes * len(bound) + cost.small + ('merge' in cost.programs)
  found = {'learner': own}
  if cost.abreast > 1:  # the update is three programs, two of them of all shapes
    found['learner'] += 2
  if plays and engine.kind == 'jax':
    # A prefill a bucket of prompts, and decode, place, copy and the weights' layout.
    found['engine'] = len(engine.buckets) + 4
  return found


def mesh_text(mesh: Mesh | dict[str, int]) -> str:
  sizes = dict(mesh.shape) if isinstance(mesh, Mesh) else mesh
  told = [f'{name} {size}' for name, size in sizes.items() if size > 1]
  return ' × '.join(told) or 'one device'
