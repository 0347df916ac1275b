"""Meshes of a machine, ranked: the likeliest are compiled, the others only named."""

import dataclasses
import functools
import itertools
import math
from collections.abc import Iterator, Sequence
from typing import Any, NamedTuple

import jax
from jax.sharding import AbstractMesh

from jaxrl.algorithms import compose
from jaxrl.models import lora
from jaxrl.signature import ConfigError
from jaxrl.training import moments, optimizer, sharding
from jaxrl.types import Params
from launch.planning import abstract, changes, cost, room
from launch.planning.abstract import Run
from launch.planning.cost import Cost
from launch.planning.decode import Engine
from launch.planning.program import per_device
from launch.targets import NODE, Chip, Target

MOST = 6  # meshes compiled, unless told
AXES = ('data', 'fsdp', 'tensor', 'expert')

Mesh = dict[str, int]  # the size of each axis


class Guess(NamedTuple):
  """Of a mesh by hand: the smaller, the better.

  too_much: what is held does not fit. seconds: of a step. held: bytes of each device.
  """

  too_much: bool
  seconds: float
  held: float


@dataclasses.dataclass(frozen=True)
class Entry:
  """A mesh that was compiled. learn: seconds of a step, least and most."""

  mesh: Mesh
  cost: Cost
  learn: tuple[float, float]


@dataclasses.dataclass(frozen=True)
class Sweep:
  """entries: best first. skipped: mesh → why it was not compiled."""

  entries: tuple[Entry, ...]
  skipped: dict[str, str]

  def data(self) -> dict[str, Any]:
    """For JSON."""
    entries = [
      dataclasses.asdict(one) | {'fits': one.cost.fits, 'total': one.cost.total}
      for one in self.entries
    ]
    return {'entries': entries, 'skipped': self.skipped}


def sweep(
  run: Run,
  target: Target,
  devices: Sequence[Any],
  *,
  engine: Engine,
  most: int = MOST,
) -> Sweep:
  """Compiles the config's own mesh and, up to `most`, those that a simple rule finds
  best, and ranks them.

  The rule: what does not fit by its state alone comes last, then seconds of products,
  rows that only fill up, and what axes send, by hand. Where a mesh does not fit, those
  that hold less are next.
  """
  entries, skipped, waiting, own = [], {}, [], _own(run, devices)
  for mesh in meshes(run, target):
    try:
      waiting.append((guess(run, target, mesh), mesh))
    except ConfigError as error:
      skipped[cost.mesh_text(mesh)] = _reason(error)
  waiting.sort(key=lambda one: (not one[1].items() <= own.items(), one[0]))
  bound = math.inf
  while waiting and len(entries) < most:
    one = next((one for one in waiting if one[0].held < bound), waiting[0])
    waiting.remove(one)
    guessed, mesh = one
    there = changes.applied(run, {f'mesh.{axis}': size for axis, size in mesh.items()})
    try:
      found = cost.of(there, target, devices, engine=engine)
    except ConfigError as error:
      skipped[cost.mesh_text(mesh)] = _reason(error)
      continue
    step = cost.step(there, found, target, engine, None)
    entries.append(Entry(mesh, found, step.learn))
    if not found.fits:
      bound = min(bound, guessed.held)
  why = f'not among the {most} that a simple rule finds best'
  skipped |= {cost.mesh_text(mesh): why for _, mesh in waiting}
  entries.sort(key=lambda one: (not one.cost.fits, sum(one.learn)))
  return Sweep(tuple(entries), skipped)


def _own(run: Run, devices: Sequence[Any]) -> Mesh:
  """The config's, where it can be; else one that no mesh is part of."""
  try:
    return dict(abstract.mesh_of(run.config, devices).shape)
  except ConfigError:
    return {}


def _reason(error: ConfigError) -> str:
  return str(error).removeprefix('--config.mesh: ')


def meshes(run: Run, target: Target) -> Iterator[Mesh]:
  """Every way to arrange all devices in data, fsdp and tensor, and in `expert` if the
  model has any; the other axes stay as they are. Raises ConfigError where they cannot.
  """
  axes = AXES if run.shape.num_experts else AXES[:-1]
  kept = {axis: size for axis, size in run.config.mesh.items() if axis not in axes}
  for axis, size in kept.items():
    if size < 1:
      raise ConfigError(
        f'--config.mesh.{axis}={size}: a sweep chooses {", ".join(axes)}: give {axis} '
        'a number'
      )
  size, left = math.prod(kept.values()), target.size
  if left % size:
    raise ConfigError(
      f'--config.mesh: {" × ".join(kept)}, {size}, does not divide the {left} devices '
      f'of {target.name}'
    )
  sizes = [n for n in range(1, left + 1) if left % n == 0]
  for shares in itertools.product(sizes, repeat=len(axes) - 1):
    data, rest = divmod(left // size, math.prod(shares))
    if data and not rest:
      yield dict(zip(axes, (data, *shares), strict=True))


def guess(run: Run, target: Target, mesh: Mesh) -> Guess:
  """Raises ConfigError where the mesh does not divide the model."""
  sizes = run.config.mesh.to_dict() | mesh
  data, fsdp, tensor, expert = (sizes[axis] for axis in AXES)
  shape, chip, batch = run.shape, target.chip, run.config.batch
  shares = data * fsdp * expert
  micro = batch.minibatches * batch.micro_batches
  rows = math.ceil(run.num_rows / micro / shares) * shares * micro
  tokens = rows * run.buckets[-1]
  params = run.policy(run.learned).params
  (rest, experts), (rest_learns, experts_learn) = (
    _counts(tree) for tree in (params, lora.trained(run.learned, params))
  )
  used = rest + experts * _share_used(run, chip)
  compute = 8 * used * tokens / target.size / chip.flops
  far = 0.0
  for count, learns, split, copies in (
    (rest, rest_learns, 1, data * expert),
    (experts, experts_learn, expert, data),
  ):
    far += 3 * 2 * count / tensor / split * (1 - 1 / fsdp) * micro  # gathered
    far += 2 * 4 * learns / tensor / split / fsdp * (1 - 1 / copies)  # reduced
  passed = tokens / shares * shape.hidden_size * 2 * shape.num_layers
  near = 8 * passed * (1 - 1 / tensor)
  near += 4 * passed * (expert - 1)  # there and back, forwards and backwards
  rate = chip.link
  if chip.between and target.size > NODE:
    rate = chip.between
  near /= chip.link if tensor * expert <= NODE else rate
  state = held(run, mesh)
  too_much = state > room.of(run.config, target).limit
  return Guess(too_much, compute + near + far / rate, state)


def held(run: Run, mesh: Mesh) -> float:
  """Bytes of each device that parameters, moments, gradients and, if there is one, the
  reference take, as they lie on such a mesh. Moments lie as what they are of.
  """
  sizes, policy = run.config.mesh.to_dict() | mesh, run.policy(run.learned)
  devices = AbstractMesh(tuple(sizes.values()), tuple(sizes))
  axes = policy.model.logical_axes(policy.params)
  layouts = sharding.params_sharding(devices, axes, policy.params)
  lying = jax.tree.map(
    lambda x, layout: jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=layout),
    policy.params,
    layouts,
  )
  learned = abstract.cast(lora.trained(run.learned, lying), 'float32')
  memory = moments.parse(run.config.optimizer.kind).memory
  init = functools.partial(optimizer.init, memory=memory)
  copies = 1 + per_device(jax.eval_shape(init, learned)) / (4 * sum(_counts(learned)))
  copies += 'ref_logprobs' in compose.needs(run.algorithm)
  return per_device(lying) + copies * per_device(learned)


def _share_used(run: Run, chip: Chip) -> float:
  """Of the experts, those that compute for a token: on a CPU all do."""
  shape = run.shape
  if not shape.num_experts or chip.platform == 'cpu':
    return 1.0
  return shape.num_experts_per_token / shape.num_experts


def _counts(params: Params) -> tuple[int, int]:
  """Of all but the experts' matrices, and of those."""
  experts = params.get('layers', {}).get('mlp', {}).get('experts', {})
  size = lambda tree: sum(x.size for x in jax.tree.leaves(tree))  # noqa: E731
  return size(params) - size(experts), size(experts)
