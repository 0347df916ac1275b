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
  """Composes GAE, PPO's clip, a clipped critic and a k1 penalty on the rewards.

  The paper's tasks are control and games: for MuJoCo it has γ = 0.99, λ = 0.95 and a
  clip range of 0.2. It clips no value loss, and its clipped objective has neither a
  dual clip nor a KL penalty.

  Args:
    gamma: The discount.
    lam: GAE's λ.
    whiten: Whether to whiten advantages over the batch.
    clip_low: The ratio is clipped below at 1 − clip_low.
    clip_high: The ratio is clipped above at 1 + clip_high.
    value_clip: The clip range of the value loss; None for none.
    value_coef: The coefficient of the value loss.
    kl_coef: The coefficient of the KL term; 0 needs no reference model.
    critic_warmup: First steps that train the value head alone.
    group_size: Samples per task.

  Returns:
    The algorithm.
  """
  return Algorithm(
    advantage=partial(advantages.gae, gamma=gamma, lam=lam, whiten=whiten),
    policy_loss=partial(losses.ppo_clip, clip_low=clip_low, clip_high=clip_high),
    value_loss=partial(losses.value_loss, clip=value_clip, coef=value_coef),
    kl_penalty=kl.term(kl.k1, kl_coef),
    critic_warmup=critic_warmup,
    group_size=group_size,
    provenance='ours',
  )
