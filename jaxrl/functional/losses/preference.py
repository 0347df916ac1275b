"""Losses on pairs of answers, one preferred: a value per pair, on both of its rows.

Both rows of a pair share an id in pair_ids; the one with the greater total reward is
the chosen one. Weigh them with `aggregation.pair_weights`. h = Σ_t (p − q) over a
row's action tokens, Δ = h_chosen − h_rejected.
"""

import jax
import jax.numpy as jnp
import numpy as np
from jax.core import Tracer

from jaxrl.functional import groups
from jaxrl.types import Array


def check_pairs(pair_ids, rewards) -> None:
  """Raises ValueError unless every pair is two rows with unequal rewards (on host).

  pair_ids: `[B]`, −1 at padding rows. rewards: `[B, T]`.
  """
  ids, totals = np.asarray(pair_ids), np.asarray(rewards).sum(axis=-1)
  for pair in np.unique(ids[ids >= 0]):
    rows = np.flatnonzero(ids == pair)
    if len(rows) != 2:
      raise ValueError(f'pair {pair} has {len(rows)} rows, {rows.tolist()}; it needs 2')
    if totals[rows[0]] == totals[rows[1]]:
      raise ValueError(
        f'pair {pair}, rows {rows.tolist()}: both have reward {totals[rows[0]]}; '
        'the chosen answer needs the greater one'
      )


def _margin(score: Array, rewards: Array, pair_ids: Array) -> Array:
  """`[B]` chosen less rejected of each row's pair; 0 for padding."""
  if not isinstance(pair_ids, Tracer) and not isinstance(rewards, Tracer):
    check_pairs(pair_ids, rewards)
  own = jnp.sum(rewards, axis=-1)
  other = groups.spread(groups.total(own, pair_ids), pair_ids) - own
  signed = jnp.sign(own - other) * score
  return groups.spread(groups.total(signed, pair_ids), pair_ids)


def _pair_loss(loss: Array, margin: Array, pair_ids: Array):
  there = pair_ids >= 0
  metrics = {'margin': margin, 'accuracy': 1.0 * (margin > 0)}
  return jnp.where(there, loss, 0), metrics


def dpo(
  logprobs: Array,
  ref_logprobs: Array,
  mask: Array,
  rewards: Array,
  pair_ids: Array,
  *,
  beta: float = 0.1,
  label_smoothing: float = 0.0,
) -> tuple[Array, dict[str, Array]]:
  """−(1−ls)·log σ(βΔ) − ls·log σ(−βΔ) (arXiv 2305.18290).

  ls: label smoothing; with ls > 0 it is conservative DPO. Δ = h_chosen − h_rejected,
  h = Σ_t (p − q) over a row's action tokens.

  logprobs, ref_logprobs, mask, rewards: `[B, T]`. pair_ids: `[B]`. Returns `[B]`.
  """
  score = groups.row_sum(logprobs - ref_logprobs, mask)
  x = beta * _margin(score, rewards, pair_ids)
  loss = -(1 - label_smoothing) * jax.nn.log_sigmoid(x)
  loss = loss - label_smoothing * jax.nn.log_sigmoid(-x)
  return _pair_loss(loss, x, pair_ids)


def ipo(
  logprobs: Array,
  ref_logprobs: Array,
  mask: Array,
  rewards: Array,
  pair_ids: Array,
  *,
  beta: float = 0.1,
) -> tuple[Array, dict[str, Array]]:
  """(Δ̄ − 1/(2β))², Δ̄ from means over each row's tokens (arXiv 2310.12036).

  logprobs, ref_logprobs, mask, rewards: `[B, T]`. pair_ids: `[B]`. Returns `[B]`.
  """
  score = groups.row_mean(logprobs - ref_logprobs, mask)
  x = _margin(score, rewards, pair_ids)
  return _pair_loss(jnp.square(x - 1 / (2 * beta)), x, pair_ids)


def hinge(
  logprobs: Array,
  ref_logprobs: Array,
  mask: Array,
  rewards: Array,
  pair_ids: Array,
  *,
  beta: float = 0.1,
) -> tuple[Array, dict[str, Array]]:
  """max(0, 1 − βΔ) (arXiv 2305.10425).

  logprobs, ref_logprobs, mask, rewards: `[B, T]`. pair_ids: `[B]`. Returns `[B]`.
  """
  score = groups.row_sum(logprobs - ref_logprobs, mask)
  x = beta * _margin(score, rewards, pair_ids)
  return _pair_loss(jnp.maximum(0, 1 - x), x, pair_ids)
