"""Losses on batches that hold both rollouts and rows written by an expert.

Each term is a mean over its own rows. Weights come from all rows, so a row's loss is
scaled by `term_scale`, from `aggregation.term_scale` over the whole optimizer batch.
"""

from typing import Any

import jax.numpy as jnp

from jaxrl.functional.aggregation import term_scale as scale_of
from jaxrl.functional.losses.clipped import ppo_clip
from jaxrl.functional.losses.plain import sft, sft_phi
from jaxrl.functional.marks import over_batch
from jaxrl.types import Array


def own_scale(mask: Array, expert_mask: Array, aggregation: str) -> dict[str, Any]:
  """The column `term_scale`, made from the whole optimizer batch."""
  return {'term_scale': scale_of(mask, expert_mask, mode=aggregation)}


@over_batch(own_scale)
def mix(
  logprobs: Array,
  old_logprobs: Array,
  advantages: Array,
  mask: Array,
  expert_mask: Array,
  term_scale: Array | None = None,
  *,
  mu: float = 0.1,
  clip_low: float = 0.2,
  clip_high: float = 0.2,
) -> tuple[Array, dict[str, Array]]:
  """(1−μ)·ppo_clip on rollout rows, μ·(−p) on an expert's rows (arXiv 2505.17826).

  Each term is a mean over its own rows.
  logprobs, old_logprobs, advantages, mask: `[B, T]`. expert_mask: `[B]` bool.
  term_scale: `[B]`; None makes it from these rows, right when they are all there are.
  """
  usual, metrics = ppo_clip(
    logprobs,
    old_logprobs,
    advantages,
    mask,
    clip_low=clip_low,
    clip_high=clip_high,
  )
  expert, _ = sft(logprobs, mask)
  loss = _join(usual, expert, mask, expert_mask, term_scale, mu)
  return loss, _of_rollouts(metrics, expert_mask)


@over_batch(own_scale)
def mix_chord(
  logprobs: Array,
  old_logprobs: Array,
  advantages: Array,
  mask: Array,
  expert_mask: Array,
  step: Array,
  term_scale: Array | None = None,
  *,
  warmup_steps: float = 0.0,
  decay_steps: float = 200.0,
  peak: float = 0.9,
  valley: float = 0.05,
  clip_low: float = 0.2,
  clip_high: float = 0.2,
) -> tuple[Array, dict[str, Array]]:
  """(1−μ)·ppo_clip on rollout rows, μ·sft_phi on an expert's (arXiv 2508.11408).

  CHORD: `mix` with a scheduled μ and SFT-φ, −sg(e^p(1−e^p))·p.
  step: the learner's step, a scalar or `[B]`, all alike; μ follows from it by
  `chord_mu`. The rest as in `mix`.
  """
  mu = chord_mu(
    step, warmup_steps=warmup_steps, decay_steps=decay_steps, peak=peak, valley=valley
  )
  usual, metrics = ppo_clip(
    logprobs,
    old_logprobs,
    advantages,
    mask,
    clip_low=clip_low,
    clip_high=clip_high,
  )
  expert, _ = sft_phi(logprobs, mask)
  mu = jnp.reshape(mu, (-1, 1))
  loss = _join(usual, expert, mask, expert_mask, term_scale, mu)
  return loss, _of_rollouts(metrics, expert_mask) | {'mu': jnp.mean(mu)}


def chord_mu(
  step: Array,
  *,
  warmup_steps: float,
  decay_steps: float,
  peak: float,
  valley: float,
) -> Array:
  """μ at `step`: linear from 0 to peak over warm-up, then cosine down to valley."""
  rise = peak * step / jnp.maximum(warmup_steps, 1)
  share = jnp.clip((step - warmup_steps) / jnp.maximum(decay_steps, 1), 0, 1)
  fall = valley + (peak - valley) * 0.5 * (1 + jnp.cos(jnp.pi * share))
  return jnp.where(step < warmup_steps, rise, fall)


def _join(usual, expert, mask, expert_mask, scale, mu) -> Array:
  if scale is None:
    scale = scale_of(mask, expert_mask)
  chosen = jnp.where(expert_mask[:, None], mu * expert, (1 - mu) * usual)
  return chosen * scale[:, None]


def _of_rollouts(metrics, expert_mask):
  return {k: jnp.where(expert_mask[:, None], 0, v) for k, v in metrics.items()}
