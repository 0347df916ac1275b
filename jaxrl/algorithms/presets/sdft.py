"""SDFT: the policy, shown a demonstration, teaches itself (arXiv 2601.19897)."""

from functools import partial
from typing import Literal

from jaxrl.functional import losses
from jaxrl.types import Algorithm, SelfTeacher


def sdft(
  *,
  context: str = "demonstration(key='solution')",
  teacher_params: Literal['live', 'initial', 'ema'] = 'initial',
  teacher_rate: float = 0.05,
  context_tokens: int = 0,
  alpha: float = 0.5,
  top_k: int = 100,
  is_clip: float = 2.0,
  group_size: int = 1,
) -> Algorithm:
  """Composes a divergence to the policy as it began, which sees a demonstration.

  The paper's teacher is a moving average of the student. Its equation 1 is the reverse
  KL, α = 1, but its results are those of the forward KL, α = 0, as its authors have
  said since beside their code. TRL starts from these values, between the two.

  Args:
    context: What the teacher sees beside the question.
    teacher_params: Its parameters: 'initial', those that training began with; 'live',
      the student's; 'ema', their moving average.
    teacher_rate: The student's share in each step of the average.
    context_tokens: Tokens of the teacher's prompt; 0 for twice the longest row.
    alpha: The teacher's share of the mixture: 0 is the forward KL, 1 the reverse KL.
    top_k: How many of the student's likeliest tokens are compared.
    is_clip: The greatest weight for the age of a row.
    group_size: Samples per task.

  Returns:
    The algorithm.
  """
  return Algorithm(
    policy_loss=partial(
      losses.self_distill, alpha=alpha, top_k=top_k, tail=False, is_clip=is_clip
    ),
    aggregation='sequence_mean_token_mean',
    self_teacher=SelfTeacher(
      context, teacher_params, teacher_rate, 'student', context_tokens
    ),
    group_size=group_size,
    provenance='trl',
  )
