"""The whole divergence between two models' distributions, from their hidden states."""

import functools

import jax
import jax.numpy as jnp

from kernels.positions import ENTRIES, score_positions

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
  entries: int | None = ENTRIES,
) -> jax.Array:
  """KL(teacher ‖ student) of softmax(hidden · tableᵀ / temperature); `[B, T]` float32.

  hidden: `[B, T, D]`, table: `[V, D]`; the teacher's `[B, T, E]`, `[V, E]`: widths may
  differ, vocabularies not. reverse: KL(student ‖ teacher). The logits of at most
  `max_rows` positions (or of one in every row) are held at a time, and made anew in the
  backward pass. entries: as `score_positions` has it, which also says how far this is
  differentiable, in all four. Raises ValueError for two vocabularies.
  """
  if len(table) != len(teacher_table):
    raise ValueError(
      f'the student has {len(table)} tokens and the teacher {len(teacher_table)}: a '
      'divergence is over one vocabulary'
    )
  pairs = (hidden, table), (teacher_hidden, teacher_table)
  score = functools.partial(_divergence, reverse=reverse)
  temperature = jnp.asarray(temperature, jnp.float32)
  return score_positions(
    score, pairs, (), temperature, max_rows=max_rows, entries=entries
  )


def _divergence(
  logits: tuple[jax.Array, jax.Array],
  inputs: tuple[()],
  temperature: jax.Array,
  *,
  reverse: bool,
) -> jax.Array:
  mine, theirs = (jax.nn.log_softmax(x / temperature) for x in logits)
  p, q = (mine, theirs) if reverse else (theirs, mine)
  return (jnp.exp(p) * (p - q)).sum(-1)


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
  given = hidden, table, teacher_hidden, teacher_table
  return full_kl(
    *given, temperature=temperature, reverse=reverse, max_rows=hidden[..., 0].size
  )
