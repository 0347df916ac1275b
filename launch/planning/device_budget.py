"""Computes the learner's share of a device's memory, as the run will divide it."""

import dataclasses

from jax.sharding import Mesh

from jaxrl.training.parallelism import device_memory
from kernels.token_logprobs import kept_bytes_of
from launch.planning.targets import CHIPS, GPUS_PER_NODE, Target
from launch.runtime import placement
from launch.settings.cluster_settings import ColocatedOptions, SplitOptions
from launch.settings.run_settings import RunSettings

PREALLOCATED_FRACTION = 0.75  # of a GPU's memory, what JAX takes by default


@dataclasses.dataclass(frozen=True)
class MemoryBudget:
  """Holds how a device's memory is shared between learner and engine.

  Attributes:
    limit: Bytes of each device that the learner's process may take.
    engine: Bytes of the same device that an engine in another process has; 0 if the
      engine has devices of its own or lives in the learner's process.
    description: The reason, for people; '' where the learner has all the memory.
  """

  limit: float
  engine: float = 0.0
  description: str = ''


def memory_budget(settings: RunSettings, target: Target) -> MemoryBudget:
  """Computes the memory budget of a target whose devices all belong to the learner.

  Where a run would split its devices, the engines have additional ones.

  Args:
    settings: Settings of the run.
    target: Machine to plan for.

  Returns:
    The learner's and the engine's share of each device.

  Raises:
    ConfigError: For a placement that is not possible on the target.
  """
  memory = target.chip.memory
  if target.chip.platform != 'cuda':
    return MemoryBudget(memory)
  options = settings.placement
  if not settings.cluster.ray:
    if isinstance(options, ColocatedOptions):
      return MemoryBudget(memory * options.memory)
    description = (
      "JAX's own share, unless --config.cluster.placement='colocated(memory=.9)'"
    )
    return MemoryBudget(memory * PREALLOCATED_FRACTION, 0.0, description)
  if isinstance(options, SplitOptions) or (options.name == 'auto' and target.size > 1):
    share = getattr(options, 'memory', SplitOptions.memory)
    return MemoryBudget(memory * share, 0.0, 'engines have devices of their own')
  count = min(target.size, GPUS_PER_NODE)
  plan = placement.plan_placement(
    settings, [placement.ClusterNode(count)] * (target.size // count)
  )
  learner, engine = plan.learners[0].memory, plan.engines[0].memory
  return MemoryBudget(memory * learner, memory * engine, plan.description)


def kept_bytes(settings: RunSettings, mesh: Mesh) -> int | None:
  """Returns how much of each GPU a softmax may take that the learner keeps.

  Args:
    settings: Settings of the run.
    mesh: Devices of the learner, which need not be here.

  Returns:
    The bytes, as the run will have them; None where the devices are no GPUs, or unknown
    ones that are not here.

  Raises:
    ConfigError: For a placement that is not possible on the devices.
  """
  device, kept = mesh.devices.flat[0], device_memory.read_kept_bytes(mesh)
  if kept is not None or device.platform != 'gpu':
    return kept
  for name, chip in CHIPS.items():
    if chip.kind == device.device_kind:
      target = Target(f'{name}:{mesh.size}', chip, (mesh.size,))
      return kept_bytes_of(memory_budget(settings, target).limit)
  return None
