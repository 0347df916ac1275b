"""Experts that each token mixes: y_n = Σ_j w_nj · down_e(silu(gate_e x_n) · up_e x_n).

Here e = chosen[n, j], and GATINGS has other ways to join gate and up. Gate and up may
have a bias. Implementations have the same signature. `ragged` sorts tokens by
expert and multiplies groups of unequal size. For TPUs XLA does just the work that was
chosen; for CPU and GPU it expands a grouped product (as of jax 0.10) to every expert
for all N · k rows, k times the work of `dense`, so `grouped` has GPUs do it by
`kernels.grouped_matmul_gpu`. `dense` is the reference: every expert for every token,
the others weighted 0. It is also faster where reading the experts takes longer than
using them (few tokens), and a token's result has the same bits whatever tokens stand
beside it.
"""

import functools
from collections.abc import Callable
from typing import NamedTuple

import jax
import jax.numpy as jnp

Array = jax.Array


class Adapted(NamedTuple):
  """The matrix kernel + a b, whose product a b is never formed.

  Attributes:
    kernel: `[…, D, O]`.
    a: `[…, D, r]`.
    b: `[…, r, O]`; all of one dtype.
  """

  kernel: Array
  a: Array
  b: Array

  @property
  def shape(self) -> tuple[int, ...]:
    """Returns the kernel's shape."""
    return self.kernel.shape


class Biased(NamedTuple):
  """A matrix whose product gets a bias.

  Attributes:
    matrix: `[E, D, O]`.
    bias: `[E, O]`.
  """

  matrix: Array | Adapted
  bias: Array

  @property
  def shape(self) -> tuple[int, ...]:
    """Returns the matrix's shape."""
    return self.matrix.shape


def _gate_silu(gate: Array, up: Array) -> Array:
  return jax.nn.silu(gate) * up


def _gate_clamped(gate: Array, up: Array) -> Array:
  """GPT-OSS's: (up + 1) · gate · σ(1.702 gate), both within 7, gate only from above."""
  gate, up = jnp.minimum(gate, 7.0), jnp.clip(up, -7.0, 7.0)
  return (up + 1) * (gate * jax.nn.sigmoid(1.702 * gate))


def _gate_gelu(gate: Array, up: Array) -> Array:
  return jax.nn.gelu(gate) * up


GATINGS: dict[str, Callable[[Array, Array], Array]] = {
  'silu': _gate_silu,
  'clamped': _gate_clamped,
  'gelu_tanh': _gate_gelu,
}
Matrix = Array | Adapted | Biased
Dot = Callable[[Array, Array], Array]


def times(
  dot: Dot,
  rows: Array,
  matrix: Matrix,
  first: Dot | None = None,
  last: Dot | None = None,
  spread: Callable[[Array], Array] | None = None,
) -> Array:
  """Computes dot(rows, matrix), with adapters and a bias if the matrix has them.

  Args:
    dot: What multiplies.
    rows: The left factor.
    matrix: The right factor.
    first: What multiplies by a, if not dot.
    last: What multiplies by b, if not dot.
    spread: Makes of a bias `[E, O]` what is added to the product.
  """
  if isinstance(matrix, Biased):
    bias = matrix.bias if spread is None else spread(matrix.bias)
    return times(dot, rows, matrix.matrix, first, last) + bias
  if not isinstance(matrix, Adapted):
    return dot(rows, matrix)
  inner = (first or dot)(rows, matrix.a)
  return dot(rows, matrix.kernel) + (last or dot)(inner, matrix.b)


def dense(
  x: Array,
  chosen: Array,
  weights: Array,
  gate: Matrix,
  up: Matrix,
  down: Matrix,
  *,
  gating: str = 'silu',
) -> Array:
  """Computes every expert for every token: E / k times the work, no sorting.

  Args:
    x: `[N, D]`.
    chosen: `[N, k]` int; an id outside [0, E) adds nothing.
    weights: `[N, k]` float32.
    gate: `[E, D, I]`.
    up: `[E, D, I]`.
    down: `[E, I, D]`, without a bias.
    gating: A name in GATINGS.

  Returns:
    `[N, D]` of x's dtype, summed in float32.
  """
  experts = gate.shape[0]
  picked = chosen[:, :, None] == jnp.arange(experts)
  share = jnp.where(picked, weights[:, :, None], 0).sum(1)  # [N, E]
  each = functools.partial(jnp.einsum, 'eni,eio->eno')
  spread = functools.partial(jnp.einsum, 'nd,edi->eni')
  join = functools.partial(
    jnp.einsum, 'eni,eid->nd', preferred_element_type=jnp.float32
  )
  product = functools.partial(times, spread, x, last=each, spread=lambda b: b[:, None])
  inner = GATINGS[gating](product(gate), product(up))
  inner = inner * share.T[:, :, None].astype(x.dtype)
  return times(join, inner, down, first=each).astype(x.dtype)


def ragged(
  x: Array,
  chosen: Array,
  weights: Array,
  gate: Matrix,
  up: Matrix,
  down: Matrix,
  *,
  gating: str = 'silu',
  dot: Callable[[Array, Array, Array], Array] = jax.lax.ragged_dot,
) -> Array:
  """Computes one grouped product per matrix, tokens sorted by expert; none is dropped.

  Args:
    x: `[N, D]`.
    chosen: `[N, k]` int; an id outside [0, E) adds nothing.
    weights: `[N, k]` float32.
    gate: `[E, D, I]`.
    up: `[E, D, I]`.
    down: `[E, I, D]`, without a bias.
    gating: A name in GATINGS.
    dot: What multiplies; of the signature of `jax.lax.ragged_dot`.

  Returns:
    `[N, D]` of x's dtype, summed in float32.
  """
  (tokens, picks), experts = chosen.shape, gate.shape[0]
  ids = jnp.where((chosen >= 0) & (chosen < experts), chosen, experts).reshape(-1)
  order = jnp.argsort(ids, stable=True)  # those of nobody come last
  sizes = jnp.bincount(ids, length=experts + 1)[:experts].astype(jnp.int32)
  has_expert = (jnp.arange(tokens * picks) < sizes.sum())[:, None]

  def pick(rows: Array, index: Array) -> Array:  # a permutation: no sum in its gradient
    return rows.at[index].get(unique_indices=True, mode='promise_in_bounds')

  spread = jnp.broadcast_to(x[:, None], (tokens, picks, x.shape[1]))
  rows = jnp.where(has_expert, pick(spread.reshape(tokens * picks, -1), order), 0)
  row_experts = jnp.minimum(ids[order], experts - 1)
  product = functools.partial(
    times,
    lambda rows, matrix: dot(rows, matrix, sizes),
    spread=lambda bias: bias[row_experts],
  )
  out = product(GATINGS[gating](product(rows, gate), product(rows, up)), down)
  # What a grouped product leaves behind its last group is not said to be 0.
  out = pick(jnp.where(has_expert, out, 0), jnp.argsort(order))
  out = out.reshape(tokens, picks, -1).astype(jnp.float32)
  return (out * weights[:, :, None]).sum(1).astype(x.dtype)


def grouped(
  x: Array,
  chosen: Array,
  weights: Array,
  gate: Matrix,
  up: Matrix,
  down: Matrix,
  *,
  gating: str = 'silu',
) -> Array:
  """Computes what `ragged` does, with grouped products for GPUs.

  Args:
    x: `[N, D]`.
    chosen: `[N, k]` int; an id outside [0, E) adds nothing.
    weights: `[N, k]` float32.
    gate: `[E, D, I]`.
    up: `[E, D, I]`.
    down: `[E, I, D]`, without a bias.
    gating: A name in GATINGS.

  Returns:
    `[N, D]` of x's dtype, summed in float32.
  """
  from kernels.grouped_matmul_gpu import grouped_dot  # only GPUs need it

  options = {'gating': gating, 'dot': grouped_dot}
  return ragged(x, chosen, weights, gate, up, down, **options)
