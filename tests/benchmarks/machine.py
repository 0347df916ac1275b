"""What this machine can do at most, measured in the run that is judged by it."""

import resource
import sys
import time

import jax
import jax.numpy as jnp


def matmul_peak(size: int = 2048, repeats: int = 3) -> float:
  """FLOP/s of float32 products of two `[size, size]` matrices through JAX."""
  x = jnp.ones((size, size))
  _product(x, x).block_until_ready()
  start = time.perf_counter()
  for _ in range(repeats):
    _product(x, x).block_until_ready()
  return repeats * 2 * size**3 / (time.perf_counter() - start)


_product = jax.jit(jnp.matmul)


def memory_rate(mebibytes: int = 128, repeats: int = 5) -> float:
  """Bytes a second that are read and written, all cores at work; the best.

  In place: a new array would be faulted in, page by page, which takes far longer.
  """
  x = jnp.ones((mebibytes << 18,), jnp.float32)
  negate = jax.jit(lambda x: -x, donate_argnums=0)
  times = []
  for _ in range(1 + repeats):
    start = time.perf_counter()
    x = negate(x).block_until_ready()
    times.append(time.perf_counter() - start)
  return 2 * x.nbytes / min(times)


def peak_mebibytes() -> float:
  """The largest resident set of this process so far."""
  peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
  return peak / (2**20 if sys.platform == 'darwin' else 2**10)
