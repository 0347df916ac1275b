"""Several processes, each with devices of its own, as one JAX: the same program in all.

Every process calls the same functions in the same order, with the same host arrays.
"""

import functools
import socket
from typing import Any

import jax
import numpy as np
from jax._src import distributed, xla_bridge

from jaxrl.training import sharding


def free_address(host: str) -> str:
  """'host:port', where nothing listens yet."""
  with socket.socket(socket.AF_INET6 if ':' in host else socket.AF_INET) as found:
    found.bind((host, 0))
    name = f'[{host}]' if ':' in host else host
    return f'{name}:{found.getsockname()[1]}'


def join(coordinator: str, count: int, rank: int, *, address: str) -> None:
  """Makes this process number `rank` of `count`; before it has used any device.

  coordinator: 'host:port' where process 0 listens for the others. address: the one of
  this process, at which the others reach it. Nothing listens elsewhere.
  """
  jax.distributed.initialize(
    coordinator,
    count,
    rank,
    coordinator_bind_address=coordinator if rank == 0 else None,
    cluster_detection_method='deactivate',
  )
  # JAX itself would have gloo, which carries what CPU devices tell each other, listen
  # wherever the host's name leads, and has no public option for it.
  gloo = xla_bridge._jax.make_gloo_tcp_collectives(  # pyright: ignore
    distributed_client=distributed.global_state.client, hostname=address
  )
  client = functools.partial(xla_bridge.make_cpu_client, collectives=gloo)
  xla_bridge.register_backend_factory('cpu', client, priority=0, fail_quietly=False)


def to_host(tree: Any) -> Any:
  """Arrays as numpy, whole in every process; one array at a time is gathered."""

  def one(x: Any) -> np.ndarray:
    if isinstance(x, jax.Array) and not x.is_fully_addressable:
      x = jax.device_put(x, x.sharding.with_memory_kind('device'))  # if it rests
      mesh = x.sharding.mesh  # pyright: ignore
      x = jax.jit(lambda y: y, out_shardings=sharding.replicated(mesh))(x)
    return np.asarray(x)

  return jax.tree.map(one, tree)
