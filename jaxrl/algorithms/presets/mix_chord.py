"""CHORD: an expert's rows count for less as training goes on (arXiv 2508.11408)."""

from functools import partial

from jaxrl.functional import advantages, entropy, losses
from jaxrl.types import Algorithm


def mix_chord(
  *,
  warmup_steps: float = 0.0,
  decay_steps: float = 200.0,
  peak: float = 0.9,
  valley: float = 0.05,
  clip_low: float = 0.2,
  clip_high: float = 0.2,
  entropy_coef: float = 0.0,
  group_size: int = 8,
) -> Algorithm:
  """Builds (1−μ)·ppo_clip on rollouts + μ·SFT-φ on expert rows.

  μ rises to `peak` over `warmup_steps` and falls to `valley` over `decay_steps` more.

  The course of μ is that of the paper's CHORD-μ, whose expert term is plain SFT. The
  weights φ are those of its CHORD-φ.

  Args:
    warmup_steps: Steps in which μ rises to its peak.
    decay_steps: Further steps in which μ falls to its valley.
    peak: The largest μ.
    valley: The last μ.
    clip_low: The ratio is clipped below at 1 − clip_low.
    clip_high: The ratio is clipped above at 1 + clip_high.
    entropy_coef: The coefficient of the entropy bonus.
    group_size: Samples per task.

  Returns:
    The algorithm.
  """
  return Algorithm(
    advantage=advantages.grpo,
    policy_loss=partial(
      losses.mix_chord,
      warmup_steps=warmup_steps,
      decay_steps=decay_steps,
      peak=peak,
      valley=valley,
      clip_low=clip_low,
      clip_high=clip_high,
    ),
    entropy_loss=partial(entropy.mix, coef=entropy_coef) if entropy_coef else None,
    group_size=group_size,
    sampler='mixed',
    provenance='ours',
  )
