"""Losses on batches that contain both rollouts and rows written by an expert.

Each term is a mean over its own rows. The aggregation weights come from all rows, so a
row's loss is multiplied by `term_scale`, from `aggregation.term_scale` over the whole
optimizer batch.
"""

import jax.numpy as jnp

from jaxrl.functional.aggregation import term_scale as scale_of
from jaxrl.functional.aggregation import term_scale_field
from jaxrl.functional.components import component
from jaxrl.functional.losses.clipped import ppo_clip
from jaxrl.functional.losses.likelihood import sft, sft_phi
from jaxrl.types import Array


@component(precompute=term_scale_field, on_policy=True)
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
  """Computes (1−μ)·ppo_clip on rollouts, μ·(−p) on an expert's rows (arXiv 2505.17826).

  Each term is a mean over its own rows.

  Args:
    logprobs: `[B, T]` the policy's log-probs p, with gradient.
    old_logprobs: `[B, T]` the old log-probs o.
    advantages: `[B, T]` the advantages A.
    mask: `[B, T]` bool, True at action tokens.
    expert_mask: `[B]` bool, True on an expert's rows.
    term_scale: `[B]` from `aggregation.term_scale` over the whole optimizer batch; None
      computes it from these rows, right when they are all there are.
    mu: The weight μ of the expert term.
    clip_low: ε_low.
    clip_high: ε_high.

  Returns:
    Loss `[B, T]` and the metrics of `ppo_clip`, over rollout rows.
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


@component(precompute=term_scale_field, on_policy=True)
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
  """Computes `mix` with a scheduled μ and SFT-φ (CHORD, arXiv 2508.11408).

  The expert term is −sg(e^p(1−e^p))·p.

  Args:
    logprobs: `[B, T]` the policy's log-probs p, with gradient.
    old_logprobs: `[B, T]` the old log-probs o.
    advantages: `[B, T]` the advantages A.
    mask: `[B, T]` bool, True at action tokens.
    expert_mask: `[B]` bool, True on an expert's rows.
    step: The learner's step, a scalar or `[B]`, all alike; μ follows from it by
      `chord_mu`.
    term_scale: `[B]` from `aggregation.term_scale` over the whole optimizer batch; None
      computes it from these rows, right when they are all there are.
    warmup_steps: Steps in which μ rises to `peak`.
    decay_steps: Further steps in which μ falls to `valley`.
    peak: The largest μ.
    valley: The last μ.
    clip_low: ε_low.
    clip_high: ε_high.

  Returns:
    Loss `[B, T]` and the metrics of `ppo_clip`, over rollout rows, and 'mu'.
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
  """Returns μ at a step: linear from 0 to peak, then cosine down to valley.

  Args:
    step: The learner's step.
    warmup_steps: Steps in which μ rises to `peak`.
    decay_steps: Further steps in which μ falls to `valley`.
    peak: The largest μ.
    valley: The last μ.
  """
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
