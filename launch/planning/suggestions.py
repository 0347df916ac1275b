"""Finds the nearest change of a config that fits a machine, by compiling candidates."""

import dataclasses
import math
import shlex
from collections.abc import Iterator, Sequence
from typing import Any

from jaxrl.component_calls import parse_call
from jaxrl.options import ConfigError
from jaxrl.training.batching import batch_builder, packing_plan
from launch.planning import cost as costs
from launch.planning.cost import RunCost
from launch.planning.planned_run import PlannedRun
from launch.planning.targets import Target

MAX_TRIES = 4  # compilations, at most
FACTORS = (2, 4, 8, 16, 32, 64)  # by which micro-batches may shrink
Override = dict[str, Any]


@dataclasses.dataclass(frozen=True)
class Suggestion:
  """Holds a change of the config.

  Attributes:
    overrides: Config keys and their new values; empty where nothing fits.
    total: Bytes of the fullest device after the change.
    num_tried: Number of changes that were compiled.
    reason: Explanation for people.
  """

  overrides: Override
  total: float
  num_tried: int
  reason: str

  def __str__(self) -> str:
    return ' '.join(
      f'--config.{key}={shlex.quote(str(value))}'
      for key, value in self.overrides.items()
    )


def nearest_fitting_change(
  run: PlannedRun,
  target: Target,
  devices: Sequence[Any],
  cost: RunCost,
) -> Suggestion:
  """Tries changes, those that cost the least time first, until one fits.

  Args:
    run: The run.
    target: Machine to plan for.
    devices: Devices of the target.
    cost: Cost of the unchanged run.

  Returns:
    The first change that fits, or one without overrides.
  """
  num_tried, smallest_total = 0, math.inf
  for overrides in candidate_changes(run, target, cost):
    if num_tried == MAX_TRIES:
      break
    try:
      changed = run.with_overrides(overrides)
      changed_cost = costs.estimate_cost(changed, target, devices)
    except ConfigError:  # a mesh that does not divide this model
      continue
    num_tried, smallest_total = num_tried + 1, min(smallest_total, changed_cost.total)
    if changed_cost.fits:
      return Suggestion(overrides, changed_cost.total, num_tried, 'compiled, and fits')
  return Suggestion({}, smallest_total, num_tried, _hint(target, cost))


def candidate_changes(
  run: PlannedRun, target: Target, run_cost: RunCost
) -> Iterator[Override]:
  """Yields changes that may fit, the cheapest in time first.

  Smaller micro-batches and recomputation shrink temporaries only. Where the resident
  memory alone exceeds the limit, only more shards help.

  Args:
    run: The run.
    target: Machine to plan for.
    run_cost: Cost of the unchanged run.

  Yields:
    Config keys and their new values.
  """
  transient_bytes = run_cost.memory['temporaries'] + run_cost.memory['gradients']
  resident_bytes = (
    run_cost.total - transient_bytes if transient_bytes < math.inf else 0.0
  )
  one_cpu = target.chip.platform == 'cpu' and math.prod(run_cost.mesh.values()) == 1
  micro = smaller_micro_batches(run, run_cost, one_cpu=one_cpu)
  full = run.settings.model.remat.name == 'full'
  remat: list[Override] = [] if full else [{'model.remat': 'full'}]
  sharded: list[Override] = []
  if (data := run_cost.mesh.get('data', 1)) > 1:  # shard what is replicated over it
    sizes = run_cost.mesh | {'data': 1, 'fsdp': run_cost.mesh['fsdp'] * data}
    sharded = [{f'mesh.{axis}': size for axis, size in sizes.items()}]
  if resident_bytes < run_cost.limit:
    if run_cost.num_parallel > 1:  # one after the other
      yield _repacked(run, num_parallel=1)
    yield from remat
    yield from micro[:1]
    yield from [r | m for r in remat for m in micro[-1:]] or micro[-1:]
  yield from sharded
  for mesh_change in sharded[:1]:
    yield from [mesh_change | r | m for r in remat or [{}] for m in micro[-1:] or [{}]]


def _repacked(run: PlannedRun, **options: int) -> Override:
  """Returns the override that changes options of `batch.packing`."""
  text = run.settings.text('batch.packing')
  return {'batch.packing': str(parse_call(text).with_options(**options))}


def smaller_micro_batches(
  run: PlannedRun, run_cost: RunCost, *, one_cpu: bool = False
) -> list[Override]:
  """Lists overrides that make micro-batches smaller, the largest micro-batch first.

  Args:
    run: The run.
    run_cost: Cost of the unchanged run.
    one_cpu: Whether the run is on one CPU device, where packed micro-batches then run
      one at a time: two small ones at once may need more memory than a large one.

  Returns:
    Overrides for micro-batches of a half, a quarter and so on of the rows (of the
    tokens if they are packed), as far as the mesh can divide them.
  """
  shares = math.prod(run_cost.mesh.get(axis, 1) for axis in ('data', 'fsdp', 'expert'))
  batch, overrides = run.settings.batch, []
  packed = batch.packing_plan
  for factor in FACTORS:
    if packed is None:
      if run_cost.micro_rows % factor or run_cost.micro_rows // factor < shares:
        break
      count = max(1, batch.num_micro_batches) * factor
      overrides.append({'batch.num_micro_batches': count})
      continue
    unit_size = batch_builder.batch_unit_size(run.settings.algorithm)
    max_sequences = packed.sequences and max(unit_size, packed.sequences // factor)
    smaller = dataclasses.replace(
      packed, tokens=packed.tokens // factor, sequences=max_sequences
    )
    try:
      packing_plan.usual_packed_rows(smaller, run.buckets[-1], unit_size, shares)
    except ConfigError:
      break
    options = {'tokens': smaller.tokens} | (
      {'sequences': max_sequences} if max_sequences else {}
    )
    options |= {'num_parallel': 1} if one_cpu else {}
    overrides.append(_repacked(run, **options))
  return overrides


def _hint(target: Target, run_cost: RunCost) -> str:
  state_bytes = sum(
    run_cost.memory[name] for name in ('parameters', 'optimizer state', 'reference')
  )
  if state_bytes * math.prod(run_cost.mesh.values()) > run_cost.limit * target.size:
    return (
      'parameters, optimizer state and reference are more than all devices together '
      'hold: take more of them'
    )
  return 'nothing that was tried fits: take more devices, or shorter rows'
