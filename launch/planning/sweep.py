"""Ranks the meshes of a machine: compiles the most promising and lists the others."""

import contextlib
import dataclasses
import functools
import itertools
import math
from collections.abc import Iterator, Sequence
from typing import Any, NamedTuple

import jax
from jax.sharding import AbstractMesh

from jaxrl.algorithms import requirements
from jaxrl.models import lora
from jaxrl.options import ConfigError
from jaxrl.training import optimizers
from jaxrl.training.parallelism import sharding
from jaxrl.types import Params
from launch.learner.learner_factory import mesh_text
from launch.planning import cost, device_budget, planned_run
from launch.planning.compiled_program import bytes_per_device
from launch.planning.cost import RunCost
from launch.planning.planned_run import PlannedRun
from launch.planning.targets import GPUS_PER_NODE, Target

DEFAULT_MAX_COMPILES = 6  # meshes compiled by default
AXES = ('data', 'fsdp', 'tensor', 'expert')

MeshSizes = dict[str, int]  # the size of each axis


class MeshHeuristic(NamedTuple):
  """Holds the heuristic cost of a mesh; lower is better, compared field by field.

  Attributes:
    too_much: Whether the training state does not fit.
    seconds: Duration of a step.
    state_bytes: Bytes of the training state on each device.
  """

  too_much: bool
  seconds: float
  state_bytes: float


@dataclasses.dataclass(frozen=True)
class SweepEntry:
  """Holds a compiled mesh.

  Attributes:
    mesh: Size of each axis.
    cost: Memory and programs on this mesh.
    learn_seconds: Least and most seconds of the learner's part of a step.
  """

  mesh: MeshSizes
  cost: RunCost
  learn_seconds: tuple[float, float]


@dataclasses.dataclass(frozen=True)
class MeshSweep:
  """Holds the result of a sweep.

  Attributes:
    entries: Compiled meshes, best first.
    skipped: The reason why a mesh was not compiled, by mesh.
  """

  entries: tuple[SweepEntry, ...]
  skipped: dict[str, str]

  def to_json(self) -> dict[str, Any]:
    """Returns the sweep as plain data for JSON."""
    entries = [
      dataclasses.asdict(entry) | {'fits': entry.cost.fits, 'total': entry.cost.total}
      for entry in self.entries
    ]
    return {'entries': entries, 'skipped': self.skipped}


def sweep_meshes(
  run: PlannedRun,
  target: Target,
  devices: Sequence[Any],
  *,
  max_compiles: int = DEFAULT_MAX_COMPILES,
) -> MeshSweep:
  """Compiles the configured mesh and the most promising others, and ranks them.

  A heuristic orders the meshes: those whose training state does not fit come last, then
  the seconds of products, of padding rows and of communication count. After a mesh that
  does not fit, meshes with a smaller state are next.

  Args:
    run: The run.
    target: Machine to plan for.
    devices: Devices of the target.
    max_compiles: Number of meshes to compile at most.

  Returns:
    The ranked meshes.
  """
  entries, skipped, waiting, configured = [], {}, [], {}
  with contextlib.suppress(ConfigError):  # it need not be possible here
    configured = dict(planned_run.planned_mesh(run, devices).shape)
  for mesh in candidate_meshes(run, target):
    try:
      waiting.append((estimate_mesh(run, target, mesh), mesh))
    except ConfigError as error:
      skipped[mesh_text(mesh)] = _reason(error)
  waiting.sort(key=lambda one: (not one[1].items() <= configured.items(), one[0]))
  state_bound = math.inf
  while waiting and len(entries) < max_compiles:
    smaller = (one for one in waiting if one[0].state_bytes < state_bound)
    heuristic, mesh = candidate = next(smaller, waiting[0])
    waiting.remove(candidate)
    changed_run = run.with_overrides(
      {f'mesh.{axis}': size for axis, size in mesh.items()}
    )
    try:
      run_cost = cost.estimate_cost(changed_run, target, devices)
    except ConfigError as error:
      skipped[mesh_text(mesh)] = _reason(error)
      continue
    step = cost.estimate_step(changed_run, run_cost, target)
    entries.append(SweepEntry(mesh, run_cost, step.learn))
    if not run_cost.fits:
      state_bound = min(state_bound, heuristic.state_bytes)
  reason = f'not among the {max_compiles} that a simple rule finds best'
  skipped |= {mesh_text(mesh): reason for _, mesh in waiting}
  entries.sort(key=lambda one: (not one.cost.fits, sum(one.learn_seconds)))
  return MeshSweep(tuple(entries), skipped)


def _reason(error: ConfigError) -> str:
  return str(error).removeprefix('mesh: ')


def candidate_meshes(run: PlannedRun, target: Target) -> Iterator[MeshSizes]:
  """Yields every arrangement of all devices over the axes of a sweep.

  The axes are data, fsdp and tensor, and expert if the model has experts; all others
  stay as configured.

  Args:
    run: The run.
    target: Machine to plan for.

  Yields:
    The size of each axis.

  Raises:
    ConfigError: If the fixed axes do not divide the number of devices.
  """
  axes = AXES if run.shape.num_experts else AXES[:-1]
  fixed = {
    axis: size for axis, size in run.settings.mesh.as_dict().items() if axis not in axes
  }
  for axis, size in fixed.items():
    if size < 1:
      raise ConfigError(
        f'--config.mesh: {axis}={size}: --sweep only chooses {", ".join(axes)}: '
        f'give {axis} a number'
      )
  size, num_devices = math.prod(fixed.values()), target.size
  if num_devices % size:
    raise ConfigError(
      f'--config.mesh: {" × ".join(fixed)}, {size}, does not divide the '
      f'{num_devices} devices of {target.name}'
    )
  sizes = [n for n in range(1, num_devices + 1) if num_devices % n == 0]
  for shares in itertools.product(sizes, repeat=len(axes) - 1):
    data, remainder = divmod(num_devices // size, math.prod(shares))
    if data and not remainder:
      yield dict(zip(axes, (data, *shares), strict=True))


def estimate_mesh(run: PlannedRun, target: Target, mesh: MeshSizes) -> MeshHeuristic:
  """Computes the heuristic cost of a mesh without compiling anything.

  Args:
    run: The run.
    target: Machine to plan for.
    mesh: Size of each axis.

  Returns:
    The heuristic cost.

  Raises:
    ConfigError: If the mesh does not divide the model.
  """
  sizes = run.settings.mesh.as_dict() | mesh
  data, fsdp, tensor, expert = (sizes[axis] for axis in AXES)
  shape, chip, batch = run.shape, target.chip, run.settings.batch
  shares = data * fsdp * expert
  micro = batch.num_minibatches * max(1, batch.num_micro_batches)
  rows = math.ceil(run.num_rows / micro / shares) * shares * micro
  tokens = rows * run.buckets[-1]
  params = run.policy(run.trained_shape).params
  (rest, experts), (rest_learns, experts_learn) = (
    _counts(tree) for tree in (params, lora.trainable_params(run.trained_shape, params))
  )
  share = 1.0  # of the experts, which compute for a token
  if shape.num_experts and chip.platform != 'cpu':
    share = shape.num_experts_per_token / shape.num_experts
  active_params = rest + experts * share
  compute = 8 * active_params * tokens / target.size / chip.flops
  sharding_bytes = 0.0
  for count, num_trained, split, copies in (
    (rest, rest_learns, 1, data * expert),
    (experts, experts_learn, expert, data),
  ):
    # Gathered, and then reduced.
    sharding_bytes += 3 * 2 * count / tensor / split * (1 - 1 / fsdp) * micro
    sharding_bytes += 2 * 4 * num_trained / tensor / split / fsdp * (1 - 1 / copies)
  hidden_bytes = tokens / shares * shape.hidden_size * 2 * shape.num_layers
  activation_bytes = 8 * hidden_bytes * (1 - 1 / tensor)
  activation_bytes += 4 * hidden_bytes * (expert - 1)  # to experts and back, twice
  rate = chip.link
  if chip.inter_node_link and target.size > GPUS_PER_NODE:
    rate = chip.inter_node_link
  activation_bytes /= chip.link if tensor * expert <= GPUS_PER_NODE else rate
  seconds = compute + activation_bytes + sharding_bytes / rate
  state_bytes = state_memory(run, mesh)
  too_much = state_bytes > device_budget.memory_budget(run.settings, target).limit
  return MeshHeuristic(too_much, seconds, state_bytes)


def state_memory(run: PlannedRun, mesh: MeshSizes) -> float:
  """Computes the memory of the training state on a mesh.

  Args:
    run: The run.
    mesh: Size of each axis.

  Returns:
    Bytes of each device for parameters, moments, gradients and the reference, if the
    algorithm needs one. Moments are sharded like their parameters.
  """
  sizes, policy = run.settings.mesh.as_dict() | mesh, run.policy(run.trained_shape)
  devices = AbstractMesh(tuple(sizes.values()), tuple(sizes))
  axes = policy.model.logical_axes()
  layouts = sharding.params_sharding(devices, axes, policy.params)
  sharded = jax.tree.map(
    lambda x, layout: jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=layout),
    policy.params,
    layouts,
  )
  trained = planned_run.cast_shapes(
    lora.trainable_params(run.trained_shape, sharded), 'float32'
  )
  state_spec = optimizers.make_optimizer_spec(run.settings.optimizer.name).state_spec
  init = functools.partial(optimizers.init_optimizer_state, state_spec=state_spec)
  copies = 1 + bytes_per_device(jax.eval_shape(init, trained)) / (
    4 * sum(_counts(trained))
  )
  copies += 'ref_logprobs' in requirements.needs(run.settings.algorithm)
  return bytes_per_device(sharded) + copies * bytes_per_device(trained)


def _counts(params: Params) -> tuple[int, int]:
  """Counts the elements outside and inside the matrices of experts."""
  inside = outside = 0
  for path, x in jax.tree_util.tree_leaves_with_path(params):
    is_expert = any(key.key == 'experts' for key in path)
    inside, outside = inside + x.size * is_expert, outside + x.size * (not is_expert)
  return outside, inside
