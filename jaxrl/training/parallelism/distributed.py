"""Distributed training joins several processes into one JAX program.

Each process has devices of its own. All of them call the same functions in the same
order, with the same host arrays.
"""

import functools
import socket

import jax
import numpy as np
from jax.extend import backend

from jaxrl.training.parallelism import sharding
from jaxrl.types import AnyArray, PyTree


def find_free_address(host: str) -> str:
  """Returns 'host:port' where nothing listens yet."""
  family = socket.AF_INET6 if ':' in host else socket.AF_INET
  with socket.socket(family) as listener:
    listener.bind((host, 0))
    name = f'[{host}]' if ':' in host else host
    return f'{name}:{listener.getsockname()[1]}'


def initialize(coordinator: str, count: int, rank: int, *, address: str) -> None:
  """Joins this process to the others; call it before any device is used.

  Args:
    coordinator: 'host:port' where process 0 listens for the others.
    count: The number of processes.
    rank: The number of this process, from 0.
    address: The address at which the others reach this process; nothing listens
      elsewhere.
  """
  jax.distributed.initialize(
    coordinator,
    count,
    rank,
    coordinator_bind_address=coordinator if rank == 0 else None,
    cluster_detection_method='deactivate',
  )
  _bind_gloo(address)


def _bind_gloo(address: str) -> None:
  """Lets gloo, which carries the traffic of CPU devices, listen at `address` alone.

  JAX by itself lets it listen wherever the host's name leads. As of 0.12 it has no
  public option for that, and no public way to the client of `jax.distributed` or to
  gloo: of what is needed, only the registration of a backend is public. These private
  names are the same from 0.10 to 0.12. Where they move, learners of several processes
  do not start, and all others run as before.
  """
  from jax._src import distributed, xla_bridge

  gloo = xla_bridge._jax.make_gloo_tcp_collectives(  # pyright: ignore
    distributed_client=distributed.global_state.client, hostname=address
  )
  client = functools.partial(xla_bridge.make_cpu_client, collectives=gloo)
  backend.register_backend_factory('cpu', client, priority=0, fail_quietly=False)


def gather_to_host(tree: PyTree) -> PyTree:
  """Copies whole arrays to the host, in every process.

  Args:
    tree: Arrays on the devices of all processes; one array at a time is gathered.

  Returns:
    The tree with numpy arrays.
  """

  def gather(x: AnyArray) -> np.ndarray:
    if isinstance(x, jax.Array) and not x.is_fully_addressable:
      # It may be offloaded to host memory.
      x = jax.device_put(x, x.sharding.with_memory_kind('device'))
      mesh = x.sharding.mesh  # pyright: ignore
      x = jax.jit(lambda y: y, out_shardings=sharding.replicated(mesh))(x)
    return np.asarray(x)

  return jax.tree.map(gather, tree)
