"""Policy losses: `fn(logprobs, old_logprobs, advantages, mask, *, …)`.

Each returns `(loss [B, T], metrics)`; losses never reduce. Parameters before the `*`
name the columns a loss reads; after it come its options. p is the policy's log-prob,
o the behaviour policy's, r = e^{p−o}, A the advantage, sg stops gradients.
"""

from jaxrl.functional.losses.clipped import ppo_clip
from jaxrl.functional.losses.critic import value_loss
from jaxrl.functional.losses.plain import opmd, sft, vanilla

__all__ = ['opmd', 'ppo_clip', 'sft', 'value_loss', 'vanilla']
