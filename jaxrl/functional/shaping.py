"""Shaping functions change rewards and row weights before any advantage sees them.

Numpy arrays give numpy arrays, so that hosts shape rewards without a device.
"""

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

Column = Any  # `[B]`, numpy's or JAX's


def overlong_penalty(
  lengths: Column, *, max_length: float, cache: float = 0.0
) -> Column:
  """Computes DAPO's soft penalty on long answers (arXiv 2503.14476).

  It is 0 up to L − c tokens, then falls linearly to −1 at L, and is −1 beyond. With c =
  0 it is a step: 0 up to L, −1 beyond.

  Args:
    lengths: `[B]` tokens.
    max_length: L.
    cache: c.

  Returns:
    `[B]`.
  """
  xp = _module(lengths)
  over = lengths - (max_length - cache)
  slope = xp.clip(over / xp.where(cache > 0, cache, 1), 0, 1)
  return -xp.where(cache > 0, slope, xp.where(over > 0, 1.0, 0.0))


def difficulty_weights(
  pass_rates: Column, *, easy: float = 0.5, hard: float = 2.0
) -> Column:
  """Computes weights linear in the pass rate.

  Args:
    pass_rates: `[B]` in [0, 1], of each row's task.
    easy: The weight where all pass.
    hard: The weight where none passes.

  Returns:
    `[B]`.
  """
  return hard + (easy - hard) * pass_rates


def length_weights(
  lengths: Column, *, shortest: float = 1.0, longest: float = 0.5
) -> Column:
  """Computes weights linear in length over one group, scaled to a mean of 1.

  Args:
    lengths: `[B]` tokens.
    shortest: The weight of the shortest answer, before scaling.
    longest: The weight of the longest answer, before scaling.

  Returns:
    `[B]`; 1 where all lengths are equal.

  Raises:
    ValueError: If both weights are 0, since their mean cannot be scaled to 1.
  """
  if shortest == longest == 0:
    raise ValueError('shortest and longest are both 0: make one of them positive')
  xp = _module(lengths)
  low, high = xp.min(lengths), xp.max(lengths)
  place = (lengths - low) / xp.where(high > low, high - low, 1)
  weights = xp.where(high > low, shortest + (longest - shortest) * place, 1.0)
  return weights / xp.mean(weights)


def rescale(
  scores: Column,
  *,
  add: Any = 0.0,
  subtract: Any = 0.0,
  multiply: Any = 1.0,
  divide: Any = 1.0,
) -> Column:
  """Computes ((scores + add − subtract) · multiply) / divide.

  Args:
    scores: `[B]`.
    add: A number or `[B]`, as the others.
    subtract: What is subtracted.
    multiply: The factor.
    divide: The divisor; one within 1e-6 of 0 counts as 1, so that the z-score of equal
      scores is 0.

  Returns:
    `[B]`.
  """
  xp = _module(scores)
  divisor = xp.where(xp.abs(xp.asarray(divide)) < 1e-6, 1.0, divide)
  return (scores + add - subtract) * multiply / divisor


def _module(array: object) -> Any:
  """Returns jax.numpy for a JAX array, and numpy for any other."""
  return jnp if isinstance(array, jax.Array) else np
