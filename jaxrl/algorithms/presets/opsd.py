"""OPSD: the policy teaches itself from a reference solution (arXiv 2601.18734)."""

from functools import partial
from typing import Literal

from jaxrl.functional import losses
from jaxrl.types import Algorithm, SelfTeacher


def opsd(
  *,
  context: str = "solution(key='solution')",
  teacher_params: Literal['live', 'initial', 'ema'] = 'initial',
  teacher_rate: float = 0.001,
  context_tokens: int = 0,
  alpha: float = 0.5,
  top_k: int = 100,
  group_size: int = 1,
) -> Algorithm:
  """Composes a divergence to the policy as it began, which sees the solution.

  The paper compares the whole vocabulary, which a `top_k` of its size does; fewer are
  the teacher's likeliest, normalised, as in the option of its code. Its template is
  our own here. How many tokens is our own choice.

  Args:
    context: What the teacher sees beside the question.
    teacher_params: Its parameters: 'initial', those that training began with; 'live',
      the student's; 'ema', their moving average.
    teacher_rate: The student's share in each step of the average.
    context_tokens: Tokens of the teacher's prompt; 0 for twice the longest row.
    alpha: The teacher's share of the mixture: 0 is the forward KL, 1 the reverse KL.
    top_k: How many tokens are compared.
    group_size: Samples per task.

  Returns:
    The algorithm.
  """
  return Algorithm(
    policy_loss=partial(
      losses.self_distill, alpha=alpha, top_k=top_k, tail=False, is_clip=None
    ),
    self_teacher=SelfTeacher(
      context, teacher_params, teacher_rate, 'teacher', context_tokens
    ),
    group_size=group_size,
    provenance='ours',
  )
