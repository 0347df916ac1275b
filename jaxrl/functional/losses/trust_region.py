"""Trust-region losses mask tokens by how far their probability has moved.

PPO bounds a ratio, so it cuts unlikely tokens long before likely ones. These bound a
divergence or a difference of probabilities.
"""

import jax
import jax.numpy as jnp

from jaxrl.functional.components import component
from jaxrl.functional.losses.clipped import ppo_clip
from jaxrl.functional.losses.importance_weighted import kimi, tis
from jaxrl.functional.reductions import clipped_exp, zero_outside
from jaxrl.types import Array

NEARLY_ONE = 1e-8  # keeps log(1 − probability) finite, as in verl


@component()
def dppo_tv(
  logprobs: Array,
  old_logprobs: Array,
  advantages: Array,
  mask: Array,
  *,
  clip_low: float = 0.2,
  clip_high: float = 0.2,
  cap: float = 20.0,
) -> tuple[Array, dict[str, Array]]:
  """Computes L_t = −A·sg(min(r, C)·keep)·p, DPPO by total variation (arXiv 2602.04879).

  The divergence is that of the sampled token against all others. keep = 0 where the
  update would carry it further out: A > 0 and e^p − e^o > ε_high, or A < 0 and e^o −
  e^p > ε_low.

  Args:
    logprobs: `[B, T]` the policy's log-probs p, with gradient.
    old_logprobs: `[B, T]` the old log-probs o.
    advantages: `[B, T]` the advantages A.
    mask: `[B, T]` bool, True at action tokens.
    clip_low: ε_low, a difference of probabilities.
    clip_high: ε_high, a difference of probabilities.
    cap: The cap C of the ratio.

  Returns:
    Loss `[B, T]` and the metrics 'clip_fraction' and 'ratio'.
  """
  p, o, a = _detached(mask, logprobs, old_logprobs, advantages)
  moved = _probability(p) - _probability(o)
  is_out = jnp.where(a > 0, moved > clip_high, moved < -clip_low)
  return _capped(logprobs, old_logprobs, advantages, mask, is_out, cap)


@component()
def dppo_kl(
  logprobs: Array,
  old_logprobs: Array,
  advantages: Array,
  mask: Array,
  *,
  clip_low: float = 0.2,
  clip_high: float = 0.2,
  cap: float = 20.0,
) -> tuple[Array, dict[str, Array]]:
  """Computes L_t = −A·sg(min(r, C)·keep)·p, DPPO by divergence KL (arXiv 2602.04879).

  As `dppo_tv`, with KL(old‖policy) of the sampled token against all others in the place
  of the difference: e^o·(o−p) + (1−e^o)·log((1−e^o)/(1−e^p)).

  Args:
    logprobs: `[B, T]` the policy's log-probs p, with gradient.
    old_logprobs: `[B, T]` the old log-probs o.
    advantages: `[B, T]` the advantages A.
    mask: `[B, T]` bool, True at action tokens.
    clip_low: ε_low, a divergence.
    clip_high: ε_high, a divergence.
    cap: The cap C of the ratio.

  Returns:
    Loss `[B, T]` and the metrics 'clip_fraction' and 'ratio'.
  """
  p, o, a = _detached(mask, logprobs, old_logprobs, advantages)
  old, others = _probability(o), -jnp.expm1(jnp.minimum(o, 0))  # others: 1 − e^o
  others_now = -jnp.expm1(jnp.minimum(p, 0))
  rest = jnp.log(others + NEARLY_ONE) - jnp.log(others_now + NEARLY_ONE)
  divergence = old * (o - p) + others * rest
  up = (divergence > clip_high) & (p > o)
  down = (divergence > clip_low) & (p < o)
  is_out = jnp.where(a > 0, up, down)
  return _capped(logprobs, old_logprobs, advantages, mask, is_out, cap)


@component()
def probability_band(
  logprobs: Array,
  old_logprobs: Array,
  advantages: Array,
  mask: Array,
  *,
  threshold: float = 0.1,
  regulariser_coef: float = 1e-3,
) -> tuple[Array, dict[str, Array]]:
  """Computes L_t = −A·r·sg(keep) + c(p−o)², keep = 1[|e^p − e^o| ≤ δ].

  Its source is the code (prime-rl, 2026), which calls it IPO (`ipo_loss_fn`), a name
  that a preference loss has here. In contrast to `dppo_tv`, a token that has moved too
  far is left out whatever the sign of its advantage, so that nothing draws it back but
  the regulariser.

  Args:
    logprobs: `[B, T]` the policy's log-probs p, with gradient.
    old_logprobs: `[B, T]` the old log-probs o; prime-rl takes the rollout's.
    advantages: `[B, T]` the advantages A.
    mask: `[B, T]` bool, True at action tokens.
    threshold: δ, a difference of probabilities.
    regulariser_coef: The coefficient c.

  Returns:
    Loss `[B, T]` and the metrics 'clip_fraction' and 'ratio'.
  """
  a, d = zero_outside(mask, advantages, logprobs - old_logprobs)
  p, o, _ = _detached(mask, logprobs, old_logprobs, advantages)
  is_out = jnp.abs(_probability(p) - _probability(o)) > threshold
  r = clipped_exp(d)
  loss = jnp.where(is_out, 0, -a * r) + regulariser_coef * jnp.square(d)
  return loss, {'clip_fraction': 1.0 * is_out, 'ratio': r}


@component()
def dro(
  logprobs: Array,
  old_logprobs: Array,
  advantages: Array,
  mask: Array,
  *,
  beta: float = 0.05,
) -> tuple[Array, dict[str, Array]]:
  """Computes L_t = −A·p + (β/2)(p−o)², direct reward optimisation (arXiv 2405.19107).

  This is the token form of verl and of Tinker, and `kimi` with τ = β. The paper sums
  log-ratios over an answer, and learns a value to compare the reward with.

  Args:
    logprobs: `[B, T]` the policy's log-probs p, with gradient.
    old_logprobs: `[B, T]` the old log-probs o.
    advantages: `[B, T]` the advantages A.
    mask: `[B, T]` bool, True at action tokens.
    beta: The strength β of the regulariser.

  Returns:
    Loss `[B, T]` and the metric 'square'.
  """
  return kimi(logprobs, old_logprobs, advantages, mask, tau=beta)


@component(on_policy=True)
def stable_reinforce(
  logprobs: Array,
  old_logprobs: Array,
  advantages: Array,
  mask: Array,
  *,
  clip_low: float = 0.2,
  clip_high: float = 0.2,
  ratio_low: float = 1e-3,
  ratio_high: float = 1e3,
) -> tuple[Array, dict[str, Array]]:
  """Computes PPO's loss of a ratio that is clipped first (R1-Reward, arXiv 2505.02835).

  r = e^{clip(p−o, log ρ_low, log ρ_high)}: beyond these bounds a token has no gradient,
  where PPO's min still has one: for A < 0 above, and for A > 0 below. There is no dual
  clip. The paper's filter of advantages is `reinforce_plus_plus(max_sigma=3.0)`. The
  loss of this name in Tinker's API is another one, which is not published.

  Args:
    logprobs: `[B, T]` the policy's log-probs p, with gradient.
    old_logprobs: `[B, T]` the old log-probs o.
    advantages: `[B, T]` the advantages A.
    mask: `[B, T]` bool, True at action tokens.
    clip_low: ε_low.
    clip_high: ε_high.
    ratio_low: ρ_low.
    ratio_high: ρ_high.

  Returns:
    Loss `[B, T]` and the metrics 'clip_fraction', 'ratio' and 'approx_kl'.
  """
  (d,) = zero_outside(mask, logprobs - old_logprobs)
  d = jnp.clip(d, jnp.log(ratio_low), jnp.log(ratio_high))
  return ppo_clip(
    d,
    jnp.zeros_like(d),
    advantages,
    mask,
    clip_low=clip_low,
    clip_high=clip_high,
    dual_clip=None,
  )


def _detached(mask: Array, *columns: Array) -> tuple[Array, ...]:
  return jax.lax.stop_gradient(zero_outside(mask, *columns))


def _probability(logprobs: Array) -> Array:
  return jnp.exp(jnp.minimum(logprobs, 0))


def _capped(
  logprobs: Array,
  old_logprobs: Array,
  advantages: Array,
  mask: Array,
  is_out: Array,
  cap: float,
) -> tuple[Array, dict[str, Array]]:
  """Computes `tis` without the tokens that are out, and the share of these."""
  loss, metrics = tis(logprobs, old_logprobs, advantages, mask, cap=cap)
  return jnp.where(is_out, 0, loss), metrics | {'clip_fraction': 1.0 * is_out}
