"""Policy losses: `fn(logprobs, old_logprobs, advantages, mask, *, …)`.

Each returns `(loss [B, T], metrics)`; losses never reduce. Parameters before the `*`
name the columns a loss reads; after it come its options. p is the policy's log-prob,
o the behaviour policy's, r = e^{p−o}, A the advantage, sg stops gradients. Exponents
are clipped to ±20.
"""

from jaxrl.functional.losses.clipped import cispo, ppo_clip, sapo
from jaxrl.functional.losses.critic import value_loss
from jaxrl.functional.losses.off_policy import (
  importance_sampling,
  kimi,
  rec,
  sppo,
  tis,
  topr,
)
from jaxrl.functional.losses.plain import opmd, sft, sft_is, sft_phi, vanilla
from jaxrl.functional.losses.sequence import gspo

__all__ = [
  'cispo',
  'gspo',
  'importance_sampling',
  'kimi',
  'opmd',
  'ppo_clip',
  'rec',
  'sapo',
  'sft',
  'sft_is',
  'sft_phi',
  'sppo',
  'tis',
  'topr',
  'value_loss',
  'vanilla',
]
