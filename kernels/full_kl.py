"""The whole divergence between two models' distributions, from their hidden states."""

import jax
import jax.numpy as jnp

from kernels.token_logprobs import scan_positions

MAX_ROWS = 128  # positions whose logits, of both models, are held at a time


def full_kl(
  hidden: jax.Array,
  table: jax.Array,
  teacher_hidden: jax.Array,
  teacher_table: jax.Array,
  *,
  temperature: jax.Array | float = 1.0,
  reverse: bool = False,
  max_rows: int = MAX_ROWS,
) -> jax.Array:
  """KL(teacher ‖ student) of softmax(hidden · tableᵀ / temperature); `[B, T]` float32.

  hidden: `[B, T, D]`, table: `[V, D]`; the teacher's `[B, T, E]`, `[V, E]`: widths may
  differ, vocabularies not. reverse: KL(student ‖ teacher). Differentiable in all four.
  The logits of at most `max_rows` positions (or of one in every row) are held at a
  time, and made anew in the backward pass. Raises ValueError for two vocabularies.
  """
  if len(table) != len(teacher_table):
    raise ValueError(
      f'the student has {len(table)} tokens and the teacher {len(teacher_table)}: a '
      'divergence is over one vocabulary'
    )

  def score(hidden, teacher_hidden):
    own = {'temperature': temperature, 'reverse': reverse}
    return reference(hidden, table, teacher_hidden, teacher_table, **own)

  batch, length = hidden.shape[:2]
  size = max(1, min(length, max_rows // batch))
  return scan_positions(score, (hidden, teacher_hidden), length, size)


def reference(
  hidden: jax.Array,
  table: jax.Array,
  teacher_hidden: jax.Array,
  teacher_table: jax.Array,
  *,
  temperature: jax.Array | float = 1.0,
  reverse: bool = False,
) -> jax.Array:
  """As `full_kl`, all logits at once."""
  mine = _logprobs(hidden, table, temperature)
  theirs = _logprobs(teacher_hidden, teacher_table, temperature)
  p, q = (mine, theirs) if reverse else (theirs, mine)
  return (jnp.exp(p) * (p - q)).sum(-1)


def _logprobs(
  hidden: jax.Array, table: jax.Array, temperature: jax.Array | float
) -> jax.Array:
  logits = jnp.einsum(
    'btd,vd->btv',
    hidden,
    table.astype(hidden.dtype),
    preferred_element_type=jnp.float32,
  )
  return jax.nn.log_softmax(logits / temperature)
