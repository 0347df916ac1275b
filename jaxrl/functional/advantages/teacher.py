"""Advantages that pull a student towards a teacher, on the student's own samples.

teacher_logprobs are the teacher's log-probs of the tokens the student wrote; with
several teachers, each row holds those of the teacher its tag is routed to.
"""

from typing import Literal

import jax.numpy as jnp

from jaxrl.functional.advantages.group import grpo
from jaxrl.functional.groups import MAX_EXPONENT, exp
from jaxrl.types import Advantages, Array


def on_policy_distill(
  teacher_logprobs: Array, old_logprobs: Array, mask: Array, *, coef: float = 1.0
) -> Advantages:
  """A_t = c·(log π_teacher − log π_student): the reverse KL's (arXiv 2306.08543).

  teacher_logprobs, old_logprobs, mask: `[B, T]`; the student is the behaviour policy.
  """
  gap = coef * (teacher_logprobs - old_logprobs)
  return Advantages(jnp.where(mask, gap, 0).astype(jnp.float32))


def grpo_distill(
  rewards: Array,
  mask: Array,
  task_ids: Array,
  run_ids: Array,
  teacher_logprobs: Array,
  old_logprobs: Array,
  *,
  coef: float = 1.0,
  scale_by_std: bool = True,
  std_over: Literal['group', 'batch'] = 'group',
) -> Advantages:
  """A_t = A_grpo − c·(log π_student − log π_teacher) (arXiv 2402.03300, 2306.08543).

  All `[B, T]` but the ids, which are `[B]`.
  """
  group = grpo(
    rewards, mask, task_ids, run_ids, scale_by_std=scale_by_std, std_over=std_over
  )
  pull = on_policy_distill(teacher_logprobs, old_logprobs, mask, coef=coef)
  return Advantages(group.advantages + pull.advantages, metrics=group.metrics)


def jsd(
  teacher_logprobs: Array,
  old_logprobs: Array,
  mask: Array,
  *,
  beta: float = 0.5,
  coef: float = 1.0,
) -> Advantages:
  """A_t = c·log(β + (1−β)e^d)/(1−β), d = teacher − student (arXiv 2306.13649).

  The score-function gradient of JSD/(β(1−β)) with mixture (1−β)·teacher + β·student.
  β = 0 gives d, β → 1 gives e^d − 1. All `[B, T]`; beta in [0, 1].
  """
  d = jnp.where(mask, teacher_logprobs - old_logprobs, 0)
  d = jnp.clip(d, -MAX_EXPONENT, MAX_EXPONENT)
  share = jnp.asarray(1 - beta, jnp.float32)  # of the teacher
  rise = share * jnp.expm1(d)
  # log1p keeps the digits when the sum is near 1; when it is near 0, expm1 lost them.
  small = rise > -0.5
  far = jnp.log(jnp.where(small, 1, 1 - share + share * exp(d)))
  total = jnp.where(small, jnp.log1p(jnp.where(small, rise, 0)), far)
  divided = total / jnp.where(share == 0, 1, share)
  value = coef * jnp.where(share == 0, jnp.expm1(d), divided)
  return Advantages(jnp.where(mask, value, 0))
