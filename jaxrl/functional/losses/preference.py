"""Preference losses on pairs of answers: a value per pair, on both of its rows.

Both rows of a pair have the same id in pair_ids; the one with the greater total reward
is the chosen one. Weight them with `aggregation.pair_weights`. In the formulas h = Σ_t
(p − q) over a row's action tokens and Δ = h_chosen − h_rejected.
"""

import jax
import jax.numpy as jnp
import numpy as np
from jax.core import Tracer

from jaxrl.functional import reductions
from jaxrl.functional.components import component
from jaxrl.types import Array


def check_pairs(pair_ids, rewards) -> None:
  """Checks on the host that every pair is two rows with unequal rewards.

  Args:
    pair_ids: `[B]` int32, equal for the two rows of a pair; −1 at padding rows.
    rewards: `[B, T]`.

  Raises:
    ValueError: If it is not.
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
  """Computes chosen minus rejected score of each row's pair, `[B]`; 0 for padding."""
  if not isinstance(pair_ids, Tracer) and not isinstance(rewards, Tracer):
    check_pairs(pair_ids, rewards)
  total = jnp.sum(rewards, axis=-1)
  other = reductions.gather(reductions.segment_sum(total, pair_ids), pair_ids) - total
  signed = jnp.sign(total - other) * score
  return reductions.gather(reductions.segment_sum(signed, pair_ids), pair_ids)


def _pair_loss(loss: Array, margin: Array, pair_ids: Array):
  is_row = pair_ids >= 0
  metrics = {'margin': margin, 'accuracy': 1.0 * (margin > 0)}
  return jnp.where(is_row, loss, 0), metrics


@component()
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
  """Computes −(1−ls)·log σ(βΔ) − ls·log σ(−βΔ) (DPO, arXiv 2305.18290).

  Args:
    logprobs: `[B, T]` the policy's log-probs p, with gradient.
    ref_logprobs: `[B, T]` the reference's log-probs q.
    mask: `[B, T]` bool, True at action tokens.
    rewards: `[B, T]` rewards; the row with the greater sum is the chosen one.
    pair_ids: `[B]` int32, equal for the two rows of a pair; −1 at padding rows.
    beta: The strength β.
    label_smoothing: ls; above 0 it is conservative DPO.

  Returns:
    Loss `[B]` and the metrics 'margin' and 'accuracy'.
  """
  score = reductions.row_sum(logprobs - ref_logprobs, mask)
  x = beta * _margin(score, rewards, pair_ids)
  loss = -(1 - label_smoothing) * jax.nn.log_sigmoid(x)
  loss = loss - label_smoothing * jax.nn.log_sigmoid(-x)
  return _pair_loss(loss, x, pair_ids)


@component()
def ipo(
  logprobs: Array,
  ref_logprobs: Array,
  mask: Array,
  rewards: Array,
  pair_ids: Array,
  *,
  beta: float = 0.1,
) -> tuple[Array, dict[str, Array]]:
  """Computes (Δ̄ − 1/(2β))², Δ̄ of means over tokens (IPO, arXiv 2310.12036).

  Equation 17 of the paper has the log-probs of whole answers. Means over their tokens,
  as in TRL, keep the target independent of the length of an answer.

  Args:
    logprobs: `[B, T]` the policy's log-probs p, with gradient.
    ref_logprobs: `[B, T]` the reference's log-probs q.
    mask: `[B, T]` bool, True at action tokens.
    rewards: `[B, T]` rewards; the row with the greater sum is the chosen one.
    pair_ids: `[B]` int32, equal for the two rows of a pair; −1 at padding rows.
    beta: The strength β.

  Returns:
    Loss `[B]` and the metrics 'margin' and 'accuracy'.
  """
  score = reductions.row_mean(logprobs - ref_logprobs, mask)
  x = _margin(score, rewards, pair_ids)
  return _pair_loss(jnp.square(x - 1 / (2 * beta)), x, pair_ids)


@component()
def hinge(
  logprobs: Array,
  ref_logprobs: Array,
  mask: Array,
  rewards: Array,
  pair_ids: Array,
  *,
  beta: float = 0.1,
) -> tuple[Array, dict[str, Array]]:
  """Computes max(0, 1 − βΔ) (SLiC, arXiv 2305.10425).

  Args:
    logprobs: `[B, T]` the policy's log-probs p, with gradient.
    ref_logprobs: `[B, T]` the reference's log-probs q.
    mask: `[B, T]` bool, True at action tokens.
    rewards: `[B, T]` rewards; the row with the greater sum is the chosen one.
    pair_ids: `[B]` int32, equal for the two rows of a pair; −1 at padding rows.
    beta: The strength β.

  Returns:
    Loss `[B]` and the metrics 'margin' and 'accuracy'.
  """
  score = reductions.row_sum(logprobs - ref_logprobs, mask)
  x = beta * _margin(score, rewards, pair_ids)
  return _pair_loss(jnp.maximum(0, 1 - x), x, pair_ids)
