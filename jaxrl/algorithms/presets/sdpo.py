"""SDPO: samples learn from one that succeeded, or feedback (arXiv 2601.20802)."""

from functools import partial
from typing import Literal

from jaxrl.functional import losses
from jaxrl.types import Algorithm, SelfTeacher


def sdpo(
  *,
  context: str = "sibling(min_reward=0.5, feedback='feedback')",
  teacher_params: Literal['live', 'initial', 'ema'] = 'ema',
  teacher_rate: float = 0.05,
  context_tokens: int = 0,
  alpha: float = 0.5,
  top_k: int = 100,
  tail: bool = True,
  is_clip: float = 2.0,
  group_size: int = 8,
) -> Algorithm:
  """Composes a divergence to the averaged policy, which sees a successful sample.

  The defaults are those of the paper's own code, but for thoughts, which it cuts out of
  the sample that is shown.

  Args:
    context: What the teacher sees beside the question.
    teacher_params: Its parameters: 'ema', the student's moving average; 'initial',
      those that training began with; 'live', the student's.
    teacher_rate: The student's share in each step of the average.
    context_tokens: Tokens of the teacher's prompt; 0 for twice the longest row.
    alpha: The teacher's share of the mixture: 0 is the forward KL, 1 the reverse KL.
    top_k: How many of the student's likeliest tokens are compared.
    tail: Whether all other tokens count as one more.
    is_clip: The greatest weight for the age of a row.
    group_size: Samples per task.

  Returns:
    The algorithm.
  """
  return Algorithm(
    policy_loss=partial(
      losses.self_distill, alpha=alpha, top_k=top_k, tail=tail, is_clip=is_clip
    ),
    self_teacher=SelfTeacher(
      context, teacher_params, teacher_rate, 'student', context_tokens
    ),
    group_size=group_size,
    provenance='paper',
  )
