"""PPO with a critic (arXiv 1707.06347)."""

from functools import partial

from jaxrl.functional import advantages, kl, losses
from jaxrl.types import Algorithm


def ppo(
  *,
  gamma: float = 1.0,
  lam: float = 1.0,
  whiten: bool = False,
  clip_low: float = 0.2,
  clip_high: float = 0.2,
  value_clip: float | None = 0.2,
  value_coef: float = 0.5,
  kl_coef: float = 1e-3,
  critic_warmup: int = 0,
  group_size: int = 1,
) -> Algorithm:
  """GAE, the clipped surrogate, a clipped critic, and k1 taken off the rewards.

  critic_warmup: first steps that train the value head alone.
  """
  return Algorithm(
    advantage=partial(advantages.gae, gamma=gamma, lam=lam, whiten=whiten),
    policy_loss=partial(losses.ppo_clip, clip_low=clip_low, clip_high=clip_high),
    value_loss=partial(losses.value_loss, clip=value_clip, coef=value_coef),
    kl_penalty=kl.term(kl.k1, kl_coef),
    critic_warmup=critic_warmup,
    group_size=group_size,
  )
