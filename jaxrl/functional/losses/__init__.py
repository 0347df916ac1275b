"""Policy losses: `fn(logprobs, old_logprobs, advantages, mask, *, …)`.

Each returns `(loss [B, T], metrics)`; losses never reduce. Parameters before the `*`
name the columns a loss reads; after it come its options. p is the policy's log-prob,
o the behaviour policy's, r = e^{p−o}, A the advantage, sg stops gradients. Exponents
are clipped to ±20.
"""

from jaxrl.functional.losses.clipped import cispo, ppo_clip, sapo
from jaxrl.functional.losses.critic import value_loss
from jaxrl.functional.losses.distillation import distill
from jaxrl.functional.losses.mixed import chord_mu, mix, mix_chord
from jaxrl.functional.losses.off_policy import (
  importance_sampling,
  kimi,
  m2po,
  rec,
  second_moment_keep,
  sppo,
  tis,
  topr,
)
from jaxrl.functional.losses.plain import opmd, sft, sft_is, sft_phi, vanilla
from jaxrl.functional.losses.preference import check_pairs, dpo, hinge, ipo
from jaxrl.functional.losses.sequence import gspo

__all__ = [
  'check_pairs',
  'chord_mu',
  'cispo',
  'distill',
  'dpo',
  'gspo',
  'hinge',
  'importance_sampling',
  'ipo',
  'kimi',
  'm2po',
  'mix',
  'mix_chord',
  'opmd',
  'ppo_clip',
  'rec',
  'sapo',
  'second_moment_keep',
  'sft',
  'sft_is',
  'sft_phi',
  'sppo',
  'tis',
  'topr',
  'value_loss',
  'vanilla',
]
