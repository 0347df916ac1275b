"""Meshes of a machine, ranked: the likeliest are compiled, the others only named."""

import dataclasses
import itertools
import math
from collections.abc import Iterator, Sequence
from typing import Any

import jax

from jaxrl.models import lora
from jaxrl.signature import ConfigError
from jaxrl.types import Params
from launch.planning import changes, cost, room
from launch.planning.abstract import Run
from launch.planning.cost import Cost
from launch.planning.decode import Engine
from launch.planning.program import per_device
from launch.targets import NODE, Target

MOST = 6  # meshes compiled, unless told
AXES = ('data', 'fsdp', 'tensor')
ADAM = 12  # bytes that a parameter that learns has beside: two moments, gradient


@dataclasses.dataclass(frozen=True)
class Entry:
  """A mesh that was compiled. learn: seconds of a step, least and most."""

  mesh: dict[str, int]
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
  """Compiles the `most` meshes that a simple rule finds best, and ranks those.

  The rule: what does not fit by its state alone comes last, then seconds of products,
  rows that only fill up, and what axes send, by hand.
  """
  for axis in ('context', 'expert'):
    if run.config.mesh[axis] < 1:
      raise ConfigError(
        f'--config.mesh.{axis}={run.config.mesh[axis]}: a sweep chooses data, fsdp and '
        f'tensor: give {axis} a number'
      )
  entries, skipped = [], {}
  kept = run.config.mesh.context * run.config.mesh.expert
  if target.size % kept:
    raise ConfigError(
      f'--config.mesh: context × expert, {kept}, does not divide the {target.size} '
      f'devices of {target.name}'
    )
  order = sorted(
    meshes(target, kept),
    key=lambda mesh: guess(run, target, mesh),
  )
  for mesh in order:
    name = cost.mesh_text(mesh)
    if len(entries) == most:
      skipped[name] = f'not among the {most} that a simple rule finds best'
      continue
    own = changes.applied(run, {f'mesh.{axis}': size for axis, size in mesh.items()})
    try:
      found = cost.of(own, target, devices, engine=engine)
    except ConfigError as error:
      skipped[name] = str(error).removeprefix('--config.mesh: ')
      continue
    step = cost.step(own, found, target, engine, None)
    entries.append(Entry(mesh, found, step.learn))
  entries.sort(key=lambda one: (not one.cost.fits, sum(one.learn)))
  return Sweep(tuple(entries), skipped)


def meshes(target: Target, kept: int = 1) -> Iterator[dict[str, int]]:
  """Every way to arrange all devices in data, fsdp and tensor; kept: shares beside."""
  size = target.size // kept
  sizes = [n for n in range(1, size + 1) if size % n == 0]
  for fsdp, tensor in itertools.product(sizes, sizes):
    if size % (fsdp * tensor) == 0:
      data = size // (fsdp * tensor)
      yield {'data': data, 'fsdp': fsdp, 'tensor': tensor}


def guess(run: Run, target: Target, mesh: dict[str, int]) -> tuple[bool, float]:
  """(whether its state alone is too much, seconds of a step), by hand."""
  params = run.policy(run.learned).params
  size, shape, chip = _count(params), run.shape, target.chip
  tensor, fsdp = mesh['tensor'], mesh['fsdp']
  shares = mesh['data'] * fsdp * run.config.mesh.expert
  state = per_device(params) + ADAM * _count(lora.trained(run.learned, params))
  held = state / (fsdp * tensor)
  batch = run.config.batch
  micro = batch.minibatches * batch.micro_batches
  rows = math.ceil(run.num_rows / micro / shares) * shares * micro
  tokens = rows * run.buckets[-1]
  compute = 8 * size * tokens / target.size / chip.flops
  gathered = 3 * 2 * size / tensor * (1 - 1 / fsdp) * micro
  reduced = 2 * 4 * size / (fsdp * tensor) * (1 - 1 / mesh['data'])
  passed = tokens / shares * shape.hidden_size * 2 * shape.num_layers
  split = 8 * passed * (1 - 1 / tensor)
  rate = chip.link
  if chip.between and target.size > NODE:
    rate = chip.between
  far = gathered + reduced
  near = split / (chip.link if tensor <= NODE else rate)
  return held > room.of(run.config, target).limit, compute + near + far / rate


def _count(params: Params) -> int:
  return sum(x.size for x in jax.tree.leaves(params))
