"""The nearest change of a config that fits a machine, found by compiling it."""

import copy
import dataclasses
import math
from collections.abc import Iterator, Sequence
from typing import Any

from jaxrl.signature import ConfigError
from launch.planning import cost as costs
from launch.planning.abstract import Run
from launch.planning.cost import Cost
from launch.planning.decode import Engine
from launch.targets import Target

TRIES = 4  # compilations, at most
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
    return ' '.join(f'--config.{key}={value}' for key, value in self.overrides.items())


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
  batch, model = run.config.batch, run.config.model
  passing = found.memory['temporaries'] + found.memory['gradients']
  held = found.total - passing if passing < math.inf else 0.0
  micro: list[Override] = []
  # Packed micro-batches are of so many tokens, not a part of the rows.
  rows = 1 if batch.packing else found.micro_rows
  shares = math.prod(found.mesh.get(axis, 1) for axis in ('data', 'fsdp', 'expert'))
  factor = 2
  while rows % factor == 0 and rows // factor >= shares and factor <= 64:
    micro.append({'batch.micro_batches': batch.micro_batches * factor})
    factor *= 2
  remat: list[Override] = [] if model.remat == 'full' else [{'model.remat': 'full'}]
  spread = meshes_with_more_shares(found.mesh)
  if held < found.limit:
    yield from remat
    yield from micro[:1]
    yield from [r | m for r in remat for m in micro[-1:]] or micro[-1:]
  yield from spread
  for more in spread[:1]:
    yield from [more | r | m for r in remat or [{}] for m in micro[-1:] or [{}]]


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
