"""The nearest change of a config that fits a machine, found by compiling it."""

import copy
import dataclasses
import math
import shlex
from collections.abc import Iterator, Sequence
from typing import Any

from jaxrl.signature import ConfigError, parse_call
from jaxrl.training import minibatches, packing
from launch.planning import cost as costs
from launch.planning.abstract import Run
from launch.planning.cost import Cost
from launch.planning.decode import Engine
from launch.targets import Target

TRIES = 4  # compilations, at most
FACTORS = (2, 4, 8, 16, 32, 64)  # by which micro-batches may shrink
Override = dict[str, Any]


@dataclasses.dataclass(frozen=True)
class Change:
  """overrides: keys of the config and their values; empty where nothing fits. total:
  the memory that it then takes; tried: how many were compiled. why: for people.
  """

  overrides: Override
  total: float
  tried: int
  why: str

  def __str__(self) -> str:
    return ' '.join(
      f'--config.{key}={shlex.quote(str(value))}'
      for key, value in self.overrides.items()
    )


def applied(run: Run, overrides: Override) -> Run:
  """The run with some keys of its config set."""
  config = copy.deepcopy(run.config)
  with config.unlocked():
    for key, value in overrides.items():
      section, _, name = key.rpartition('.')
      node = config
      for part in section.split('.'):
        node = node[part]
      node[name] = value
  return dataclasses.replace(run, config=config)


def nearest(
  run: Run, target: Target, devices: Sequence[Any], *, engine: Engine, cost: Cost
) -> Change:
  """Tries candidates, those that cost least time first, until one fits."""
  tried, last = 0, math.inf
  for overrides in candidates(run, target, cost):
    if tried == TRIES:
      break
    try:
      found = of(run, overrides, target, devices, engine)
    except ConfigError:  # a mesh that does not divide this model
      continue
    tried, last = tried + 1, min(last, found.total)
    if found.fits:
      return Change(overrides, found.total, tried, 'compiled, and fits')
  return Change({}, last, tried, _hint(target, cost))


def of(
  run: Run, overrides: Override, target: Target, devices: Sequence[Any], engine: Engine
) -> Cost:
  return costs.of(applied(run, overrides), target, devices, engine=engine)


def candidates(run: Run, target: Target, found: Cost) -> Iterator[Override]:
  """Changes that may fit, the cheapest in time first.

  Smaller micro-batches and recomputation shrink temporaries alone: where what is held
  all the time is too much by itself, only further shares of it are of use.
  """
  passing = found.memory['temporaries'] + found.memory['gradients']
  held = found.total - passing if passing < math.inf else 0.0
  alone = target.chip.platform == 'cpu' and math.prod(found.mesh.values()) == 1
  micro = smaller_micro_batches(run, found, alone=alone)
  full = run.config.model.remat == 'full'
  remat: list[Override] = [] if full else [{'model.remat': 'full'}]
  spread = meshes_with_more_shares(found.mesh)
  if held < found.limit:
    if found.abreast > 1:
      yield one_by_one(run)
    yield from remat
    yield from micro[:1]
    yield from [r | m for r in remat for m in micro[-1:]] or micro[-1:]
  yield from spread
  for more in spread[:1]:
    yield from [more | r | m for r in remat or [{}] for m in micro[-1:] or [{}]]


def one_by_one(run: Run) -> Override:
  """Packed micro-batches one after the other, where a CPU has several at once."""
  name, options = parse_call(run.config.batch.packing)
  return {'batch.packing': _call(name, options | {'abreast': 1})}


def smaller_micro_batches(
  run: Run, found: Cost, *, alone: bool = False
) -> list[Override]:
  """Of a half of the rows or, where they are packed, of the tokens, a quarter and so
  on: what a mesh of as many shares of the rows can take, the largest first.

  alone: on one CPU device packed ones are then done one at a time: two smaller ones at
  once may take more than a larger one.
  """
  shares = math.prod(found.mesh.get(axis, 1) for axis in ('data', 'fsdp', 'expert'))
  batch, made = run.config.batch, []
  packed = packing.parse(batch.packing)
  for factor in FACTORS:
    if packed is None:
      if found.micro_rows % factor or found.micro_rows // factor < shares:
        break
      made.append({'batch.micro_batches': batch.micro_batches * factor})
      continue
    atom = minibatches.atom_size(run.algorithm)
    few = packed.sequences and max(atom, packed.sequences // factor)
    less = dataclasses.replace(packed, tokens=packed.tokens // factor, sequences=few)
    try:
      packing.usual_rows(less, run.buckets[-1], atom, shares)
    except ConfigError:
      break
    name, options = parse_call(batch.packing)
    options |= {'tokens': less.tokens} | ({'sequences': few} if few else {})
    options |= {'abreast': 1} if alone else {}
    made.append({'batch.packing': _call(name, options)})
  return made


def _call(name: str, options: Override) -> str:
  return f'{name}({", ".join(f"{key}={value!r}" for key, value in options.items())})'


def meshes_with_more_shares(mesh: dict[str, int]) -> list[Override]:
  """What is replicated over `data` shared over fsdp instead."""
  if mesh.get('data', 1) == 1:
    return []
  found = {'mesh.data': 1, 'mesh.fsdp': mesh['fsdp'] * mesh['data']}
  return [found]


def _hint(target: Target, found: Cost) -> str:
  held = sum(
    found.memory[name] for name in ('parameters', 'optimizer state', 'reference')
  )
  if held * math.prod(found.mesh.values()) > found.limit * target.size:
    return (
      'parameters, optimizer state and reference are more than all devices together '
      'hold: take more of them'
    )
  return 'nothing that was tried fits: take more devices, or shorter rows'
