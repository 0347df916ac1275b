"""Device memory says how much of it programs may fill, as far as devices tell."""

import jax
import numpy as np
from jax.sharding import Mesh

from kernels.token_logprobs import kept_bytes_of


def read_limit(mesh: Mesh) -> float:
  """Returns the bytes that JAX may take of the mesh's device that has the least.

  Args:
    mesh: The devices. Of those of several processes, only this process's are asked.

  Returns:
    The bytes, or 0 if no device says: CPUs do not, nor devices that are not here.
  """
  local = [x for x in mesh.devices.flat if x.process_index == jax.process_index()]
  try:
    limits = [(device.memory_stats() or {}).get('bytes_limit', 0) for device in local]
  except jax.errors.JaxRuntimeError:  # a topology's devices only compile
    limits = []
  return float(min(limits, default=0))


def read_kept_bytes(mesh: Mesh) -> int | None:
  """Returns how much of each GPU a softmax may take that is kept for a backward pass.

  Args:
    mesh: The devices. All processes get the same, so that their programs are the same.

  Returns:
    The bytes; None if the devices are no GPUs, or do not say what they have.
  """
  if mesh.devices.flat[0].platform != 'gpu':
    return None
  limit = read_limit(mesh)
  if limit and jax.process_count() > 1:
    from jax.experimental import multihost_utils  # few runs have several processes

    limits = multihost_utils.process_allgather(np.float64(limit).astype(np.float32))
    limit = float(np.min(limits))
  return kept_bytes_of(limit) if limit else None
