"""What is done to rewards, and to the weights of rows, before any advantage sees them.

Numpy arrays give numpy arrays, so that hosts shape what they play without a device.
"""

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

Column = Any  # `[B]`, numpy's or JAX's


def overlong_penalty(
  lengths: Column, *, max_length: float, cache: float = 0.0
) -> Column:
  """`[B]` DAPO's soft penalty on long answers (arXiv 2503.14476).

  0 up to L − c tokens, then linear down to −1 at L, and −1 beyond; L = max_length,
  c = cache. With c = 0 it is a step: 0 up to L, −1 beyond. lengths: `[B]`.
  """
  xp = _module(lengths)
  over = lengths - (max_length - cache)
  slope = xp.clip(over / xp.where(cache > 0, cache, 1), 0, 1)
  return -xp.where(cache > 0, slope, xp.where(over > 0, 1.0, 0.0))


def difficulty_weights(
  pass_rates: Column, *, easy: float = 0.5, hard: float = 2.0
) -> Column:
  """`[B]` weights linear in the pass rate: `hard` where none passes, `easy` where all.

  pass_rates: `[B]` in [0, 1], of each row's task.
  """
  return hard + (easy - hard) * pass_rates


def length_weights(
  lengths: Column, *, shortest: float = 1.0, longest: float = 0.5
) -> Column:
  """`[B]` weights linear in length over one group, scaled to a mean of 1.

  The shortest answer has `shortest` to the longest's `longest`; equal lengths have
  weight 1. lengths: `[B]` tokens.
  """
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
  """`[B]` ((scores + add − subtract) · multiply) / divide, each a number or `[B]`.

  A divisor within 1e-6 of 0 divides by 1: the z-score of equal scores is then 0.
  """
  xp = _module(scores)
  divisor = xp.where(xp.abs(xp.asarray(divide)) < 1e-6, 1.0, divide)
  return (scores + add - subtract) * multiply / divisor


def _module(array: Any) -> Any:
  """jax.numpy for what is JAX's, numpy for the rest."""
  return jnp if isinstance(array, jax.Array) else np
