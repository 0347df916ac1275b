"""Experts that each token mixes: y_n = Σ_j w_nj · down_e(silu(gate_e x_n) · up_e x_n).

Here e = chosen[n, j]. Ways of the same signature. `ragged` sorts tokens by expert and
multiplies groups of unequal size. For TPUs XLA does the work that was chosen and no
more; for CPU and GPU it expands a grouped product (as of jax 0.10) to every expert for
all N · k rows, k times the work of `dense`, so `grouped` has GPUs do it by a kernel of
`kernels.grouped_gpu`. `dense` is the reference: every expert for every token, the
unchosen ones weighed 0; it is also the faster one where reading the experts takes
longer than using them (few tokens). In it a token's result has the same bits whatever
tokens stand beside it.

x: `[N, D]`. chosen: `[N, k]` int; an id outside [0, E) is nobody's and adds nothing.
weights: `[N, k]` float32. gate, up: `[E, D, I]`, down: `[E, I, D]`, of x's dtype; each
may be `Adapted`, with low-rank matrices (LoRA) beside it, an own pair an expert.
Returns `[N, D]` of x's dtype, summed in float32.
"""

import functools
from collections.abc import Callable
from typing import NamedTuple

import jax
import jax.numpy as jnp

from kernels.grouped_gpu import grouped_dot

Array = jax.Array


class Adapted(NamedTuple):
  """kernel + a b, of which no product is made.

  kernel: `[…, D, O]`, a: `[…, D, r]`, b: `[…, r, O]`, all of one dtype.
  """

  kernel: Array
  a: Array
  b: Array

  @property
  def shape(self) -> tuple[int, ...]:
    return self.kernel.shape


Matrix = Array | Adapted
Dot = Callable[[Array, Array], Array]


def times(
  dot: Dot,
  rows: Array,
  matrix: Matrix,
  first: Dot | None = None,
  last: Dot | None = None,
) -> Array:
  """dot(rows, matrix). first, last: what multiplies by a and then by b, if not dot."""
  if not isinstance(matrix, Adapted):
    return dot(rows, matrix)
  inner = (first or dot)(rows, matrix.a)
  return dot(rows, matrix.kernel) + (last or dot)(inner, matrix.b)


def dense(
  x: Array, chosen: Array, weights: Array, gate: Matrix, up: Matrix, down: Matrix
) -> Array:
  """Every expert for every token: E / k times the work, no sorting."""
  experts = gate.shape[0]
  picked = chosen[:, :, None] == jnp.arange(experts)
  share = jnp.where(picked, weights[:, :, None], 0).sum(1)  # [N, E]
  each = functools.partial(jnp.einsum, 'eni,eio->eno')
  spread = functools.partial(jnp.einsum, 'nd,edi->eni')
  join = functools.partial(
    jnp.einsum, 'eni,eid->nd', preferred_element_type=jnp.float32
  )
  inner = jax.nn.silu(times(spread, x, gate, last=each))
  inner = inner * times(spread, x, up, last=each) * share.T[:, :, None].astype(x.dtype)
  return times(join, inner, down, first=each).astype(x.dtype)


def ragged(
  x: Array,
  chosen: Array,
  weights: Array,
  gate: Matrix,
  up: Matrix,
  down: Matrix,
  *,
  dot: Callable[[Array, Array, Array], Array] = jax.lax.ragged_dot,
) -> Array:
  """Tokens sorted by expert, one grouped product a matrix; no token is dropped.

  dot: what multiplies; of the signature of `jax.lax.ragged_dot`.
  """
  (tokens, picks), experts = chosen.shape, gate.shape[0]
  ids = jnp.where((chosen >= 0) & (chosen < experts), chosen, experts).reshape(-1)
  order = jnp.argsort(ids, stable=True)  # those of nobody come last
  sizes = jnp.bincount(ids, length=experts + 1)[:experts].astype(jnp.int32)
  there = (jnp.arange(tokens * picks) < sizes.sum())[:, None]

  def pick(rows: Array, index: Array) -> Array:  # a permutation: no sum in its gradient
    return rows.at[index].get(unique_indices=True, mode='promise_in_bounds')

  spread = jnp.broadcast_to(x[:, None], (tokens, picks, x.shape[1]))
  rows = jnp.where(there, pick(spread.reshape(tokens * picks, -1), order), 0)
  product = functools.partial(times, lambda rows, matrix: dot(rows, matrix, sizes))
  inner = jax.nn.silu(product(rows, gate))
  out = product(inner * product(rows, up), down)
  # What a grouped product leaves behind its last group is not said to be 0.
  out = pick(jnp.where(there, out, 0), jnp.argsort(order))
  out = out.reshape(tokens, picks, -1).astype(jnp.float32)
  return (out * weights[:, :, None]).sum(1).astype(x.dtype)


grouped = functools.partial(ragged, dot=grouped_dot)
