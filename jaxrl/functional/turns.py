"""Turns within a row: the unbroken stretches of action tokens."""

import jax
import jax.numpy as jnp

from jaxrl.types import Array


def turn_ids(mask: Array) -> Array:
  """`[B, T]` int32: the number of each action token's turn in its row; −1 elsewhere."""
  mask = jnp.asarray(mask, bool)
  before = jnp.pad(mask[:, :-1], ((0, 0), (1, 0)))
  return jnp.where(mask, jnp.cumsum(mask & ~before, axis=1) - 1, -1)


def turn_sum(x: Array, mask: Array) -> Array:
  """`[B, T]` Σ of x over the turn of each token; 0 where the mask is not set."""
  rows, tokens = mask.shape
  ids = turn_ids(mask)
  flat = jnp.where(ids < 0, rows * tokens, ids + tokens * jnp.arange(rows)[:, None])
  sums = jax.ops.segment_sum(jnp.ravel(x), jnp.ravel(flat), rows * tokens + 1)
  return jnp.where(mask, sums[flat], 0)


def turn_mean(x: Array, mask: Array) -> Array:
  """`[B, T]` mean of x over the turn of each token; 0 where the mask is not set."""
  return turn_sum(x, mask) / jnp.maximum(turn_sum(jnp.ones_like(x), mask), 1)
