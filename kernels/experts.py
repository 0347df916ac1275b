"""Experts compute a mixture: y_n = Σ_j w_nj · down_e(silu(gate_e x_n) · up_e x_n).

Here e = chosen[n, j]; GATINGS has other ways to combine gate and up. Gate and up may
have a bias. All implementations have the same signature:

- `ragged` sorts the tokens by expert and computes a grouped matmul. On TPU, XLA does
  only the work that the router chose. On CPU and GPU it expands a grouped matmul (as of
  jax 0.12) to every expert for all N · k rows, which is k times the work of `dense`.
- `grouped` is `ragged` with `kernels.grouped_matmul`, for GPU. All experts do the work
  of the one that was chosen most.
- `dense` is the reference: it computes every expert for every token and gives the
  others weight 0. It is faster if there are so few tokens that reading the experts'
  weights takes longer than the products. A token's result is the same bit for bit
  whatever other tokens are in the batch.
"""

import functools
from collections.abc import Callable
from typing import NamedTuple

import jax
import jax.numpy as jnp

Array = jax.Array


class Adapted(NamedTuple):
  """The matrix kernel + a b of a LoRA layer; the product a b is never materialized.

  All three arrays have the same dtype.

  Attributes:
    kernel: Base matrix `[…, D, O]`.
    a: First factor of the adapter, `[…, D, r]`.
    b: Second factor of the adapter, `[…, r, O]`.
  """

  kernel: Array
  a: Array
  b: Array

  @property
  def shape(self) -> tuple[int, ...]:
    """Returns the shape of the kernel."""
    return self.kernel.shape


class Biased(NamedTuple):
  """A matrix per expert, with a bias that is added to the product.

  Attributes:
    matrix: Matrices `[E, D, O]`.
    bias: Biases `[E, O]`.
  """

  matrix: Array | Adapted
  bias: Array

  @property
  def shape(self) -> tuple[int, ...]:
    """Returns the shape of the matrix."""
    return self.matrix.shape


def _gate_silu(gate: Array, up: Array) -> Array:
  return jax.nn.silu(gate) * up


def _gate_clamped(gate: Array, up: Array) -> Array:
  """Computes GPT-OSS's (up + 1) · gate · σ(1.702 gate), with gate ≤ 7 and |up| ≤ 7."""
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
    dot: Product of two arrays.
    rows: Left factor.
    matrix: Right factor.
    first: Product with the adapter's a; None for `dot`.
    last: Product with the adapter's b; None for `dot`.
    spread: Maps a bias `[E, O]` to the shape of the product; None adds it as it is.
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
  """Computes every expert for every token: E / k times the work, without sorting.

  Args:
    x: Tokens `[N, D]`.
    chosen: Ids of the experts of each token, `[N, k]` int. An id outside [0, E) adds
      nothing.
    weights: Weights of these experts, `[N, k]` float32.
    gate: Gate matrices `[E, D, I]`.
    up: Up matrices `[E, D, I]`.
    down: Down matrices `[E, I, D]`, without a bias.
    gating: Name in GATINGS.

  Returns:
    Output `[N, D]` in the dtype of x, summed in float32.
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
  """Sorts tokens by expert and computes a grouped matmul per matrix; drops no token.

  Args:
    x: Tokens `[N, D]`.
    chosen: Ids of the experts of each token, `[N, k]` int. An id outside [0, E) adds
      nothing.
    weights: Weights of these experts, `[N, k]` float32.
    gate: Gate matrices `[E, D, I]`.
    up: Up matrices `[E, D, I]`.
    down: Down matrices `[E, I, D]`, without a bias.
    gating: Name in GATINGS.
    dot: Grouped matmul, with the signature of `jax.lax.ragged_dot`.

  Returns:
    Output `[N, D]` in the dtype of x, summed in float32.
  """
  (tokens, picks), experts = chosen.shape, gate.shape[0]
  ids = jnp.where((chosen >= 0) & (chosen < experts), chosen, experts).reshape(-1)
  order = jnp.argsort(ids, stable=True)  # rows without an expert come last
  sizes = jnp.bincount(ids, length=experts + 1)[:experts].astype(jnp.int32)
  has_expert = (jnp.arange(tokens * picks) < sizes.sum())[:, None]

  # `index` is a permutation, so the gradient needs no scatter-add.
  def pick(rows: Array, index: Array) -> Array:
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
  # The rows after the last group of a grouped matmul are not guaranteed to be 0.
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
  """Computes `ragged` with a grouped matmul for GPUs.

  Args:
    x: Tokens `[N, D]`.
    chosen: Ids of the experts of each token, `[N, k]` int. An id outside [0, E) adds
      nothing.
    weights: Weights of these experts, `[N, k]` float32.
    gate: Gate matrices `[E, D, I]`.
    up: Up matrices `[E, D, I]`.
    down: Down matrices `[E, I, D]`, without a bias.
    gating: Name in GATINGS.

  Returns:
    Output `[N, D]` in the dtype of x, summed in float32.
  """
  from kernels.grouped_matmul import grouped_dot  # only GPUs need it

  options = {'gating': gating, 'dot': grouped_dot}
  return ragged(x, chosen, weights, gate, up, down, **options)
