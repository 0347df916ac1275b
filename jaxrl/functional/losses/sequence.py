"""Policy losses whose ratio is that of a whole sequence or turn."""

from typing import Literal

import jax
import jax.numpy as jnp

from jaxrl.functional.groups import exp, inside, row_mean
from jaxrl.functional.turns import turn_mean
from jaxrl.types import Array


def gspo(
  logprobs: Array,
  old_logprobs: Array,
  advantages: Array,
  mask: Array,
  *,
  clip_low: float = 3e-4,
  clip_high: float = 4e-4,
  level: Literal['sequence', 'turn'] = 'sequence',
  gradient: Literal['token', 'mean'] = 'token',
) -> tuple[Array, dict[str, Array]]:
  """L_t = max(−A·s, −A·clip(s, 1−ε_low, 1+ε_high)) (arXiv 2507.18071).

  Group sequence policy optimisation. The length-normalised ratio is
  s = e^{p − sg(p) + sg(mean_t(p−o))}: a sequence's ratio, a token's gradient.

  logprobs, old_logprobs, advantages, mask: `[B, T]`. level: 'turn' takes the mean
  over each unbroken stretch of action tokens instead of the row. gradient: 'mean' is
  the plain form s = e^{mean_t(p−o)}. Aggregate by sequence_mean_token_mean.
  """
  p, a, d = inside(mask, logprobs, advantages, logprobs - old_logprobs)
  if level == 'sequence':
    mean = jnp.broadcast_to(row_mean(d, mask)[:, None], d.shape)
  elif level == 'turn':
    mean = turn_mean(d, mask)
  else:
    raise ValueError(f"level is {level!r}; it must be 'sequence' or 'turn'")
  if gradient == 'token':
    mean = p - jax.lax.stop_gradient(p) + jax.lax.stop_gradient(mean)
  elif gradient != 'mean':
    raise ValueError(f"gradient is {gradient!r}; it must be 'token' or 'mean'")
  s = exp(mean)
  plain = -a * s
  clipped = -a * jnp.clip(s, 1 - clip_low, 1 + clip_high)
  metrics = {
    'clip_fraction': (clipped > plain).astype(jnp.float32),
    'ratio': s,
    'approx_kl': -d,
  }
  return jnp.maximum(plain, clipped), metrics
