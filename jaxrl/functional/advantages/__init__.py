"""Advantages: `fn(rewards, mask, task_ids, run_ids, …, *, …) -> Advantages`.

Parameters before the `*` name the columns an estimator reads; after it come its
options. Groups are told apart by ids and may differ in size and lie in any order; a
run counts once however many rows it has. R is a run's total reward, μ and s the mean
and sample standard deviation of R over the runs of its task, n their number.
"""

from jaxrl.functional.advantages.entropy_clip import clip_b, clip_v
from jaxrl.functional.advantages.group import asymre, best, grpo, opmd, rec, rloo
from jaxrl.functional.advantages.normalisation import (
  init_moments,
  normalise,
  update_moments,
)
from jaxrl.functional.advantages.steps import (
  cod,
  gigpo,
  step_reinforce,
  step_wise_grpo,
)
from jaxrl.functional.advantages.teacher import grpo_distill, jsd, on_policy_distill
from jaxrl.functional.advantages.temporal import (
  agentic_reinforce,
  gae,
  reinforce,
  reinforce_plus_plus,
  remax,
)

__all__ = [
  'agentic_reinforce',
  'asymre',
  'best',
  'clip_b',
  'clip_v',
  'cod',
  'gae',
  'gigpo',
  'grpo',
  'grpo_distill',
  'init_moments',
  'jsd',
  'normalise',
  'on_policy_distill',
  'opmd',
  'rec',
  'reinforce',
  'reinforce_plus_plus',
  'remax',
  'rloo',
  'step_reinforce',
  'step_wise_grpo',
  'update_moments',
]
