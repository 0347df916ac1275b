"""What the card can do at most, measured in the run that is judged by it."""

import functools
import inspect
import statistics
import time
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp


def describe() -> dict[str, Any]:
  """The card and the versions of what drives it."""
  import flax
  import optax

  card = jax.devices()[0]
  stats = card.memory_stats() or {}
  versions = {'jax': jax.__version__, 'flax': flax.__version__}
  return {
    'card': card.device_kind,
    'platform': card.platform,
    'limit_gib': stats.get('bytes_limit', 0) / 2**30,
    **versions,
    'optax': optax.__version__,
  }


def seconds(run: Callable[[], Any], *, repeats: int = 5, inner: int = 1) -> float:
  """Median seconds of a call of `run`, which is warm after one more.

  inner: calls dispatched between two waits, so that starting a program is hidden.
  """
  jax.block_until_ready(run())
  times = []
  for _ in range(repeats):
    start = time.perf_counter()
    for _ in range(inner):
      out = run()
    jax.block_until_ready(out)
    times.append((time.perf_counter() - start) / inner)
  return statistics.median(times)


def matmul_rate(size: int) -> float:
  """FLOP/s of bfloat16 products of two random `[size, size]` matrices, f32 sums."""
  x = jax.random.normal(jax.random.key(0), (size, size), jnp.bfloat16)
  product = jax.jit(lambda x, y: x @ y)
  return 2 * size**3 / seconds(lambda: product(x, x), inner=8)


def memory_rate(mebibytes: int) -> float:
  """Bytes a second that a copy reads and writes."""
  x = jnp.ones((mebibytes << 18,), jnp.float32)
  copy = jax.jit(lambda x: -x)
  return 2 * x.nbytes / seconds(lambda: copy(x), inner=4)


def rates(tiny: bool) -> dict[str, float]:
  """flops: of bfloat16 products; bytes: of memory; a second each."""
  flops = matmul_rate(256 if tiny else 8192)
  return {'flops': flops, 'bytes': memory_rate(8 if tiny else 1024)}


def cost(function: Callable[..., Any], *arguments: Any) -> dict[str, Any]:
  """Compiles it: 'ms' a call, 'mib' beside arguments and results; or 'failed': why."""
  try:
    program = jax.jit(function).lower(*arguments).compile()
    memory = program.memory_analysis()
    mebibytes = memory.temp_size_in_bytes / 2**20 if memory else float('nan')
    return {'ms': 1e3 * seconds(lambda: program(*arguments)), 'mib': mebibytes}
  except Exception as error:  # whatever one library raises, the others are measured
    return {'failed': f'{type(error).__name__}: {str(error).strip()[:160]}'}


def reference(function: Callable[..., Any]) -> Callable[..., Any] | str:
  """`function` with kernels off, or why there is nothing to turn off."""
  if 'kernels' in inspect.signature(function).parameters:
    return functools.partial(function, kernels='reference')
  return 'is what runs anyway: there is no other'


def both(
  function: Callable[..., Any], differentiated: tuple[int, ...], *arguments: Any
) -> dict[str, Any]:
  """Costs of the value, and of value and gradient of its sum: 'forward', 'both'."""

  def total(*inputs):
    return jnp.sum(function(*inputs).astype(jnp.float32))

  whole = jax.value_and_grad(total, differentiated)
  return {'forward': cost(function, *arguments), 'both': cost(whole, *arguments)}
