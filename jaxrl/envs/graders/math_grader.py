"""The math grader compares final answers by algebra, within a time limit.

It uses math-verify, https://github.com/huggingface/Math-Verify.
"""

import re

from jaxrl.envs.graders.answer_marks import (
  MAX_ANSWER_CHARS,
  final_answer,
  marked_answer,
)
from jaxrl.envs.graders.answer_matching import compare_answers
from jaxrl.envs.graders.grader_processes import shared_grader_pool
from jaxrl.envs.graders.rule_graders import GraderPart, TaskItem, expected_answer
from jaxrl.options import POSITIVE, option_ranges, require_package

# Algebra would read these as products of unknowns, so that 'no' equals 'on'.
_LITERAL_WORDS = frozenset(['yes', 'no', 'true', 'false', 'none'])
_TEXT = re.compile(r'\\(?:text|textbf|mathrm|mathbf)\{([^{}]*)\}')

# As in 12\pi \text{ square units}; units that have names are compared.
_UNNAMED_UNIT = re.compile(
  r'(?:\\[ ,;]|\s)*\\(?:text|mathrm|mbox)\s*\{\s*(?:square |cubic |sq\.? )?units?\.?\s*'
  r'\}(?:\^\{?[23]\}?)?\s*$'
)


@option_ranges(timeout=POSITIVE)
def make_math_grader(*, strict: bool = False, timeout: float = 5.0) -> GraderPart:
  r"""Builds a grader that scores 1 if the final answer equals the item's, else 0.

  The final answer is what `\boxed{}` or `####` marks, else the last number. Answers
  that plainly agree (as numbers, or letter for letter) and numbers that differ are
  decided at once. The rest is parsed and compared by math-verify in a process that is
  killed after `timeout` seconds.

  Args:
    strict: Whether only a marked answer counts.
    timeout: Seconds that a comparison may take.

  Returns:
    The grader, which raises GraderTimeout.

  Raises:
    ValueError: If math-verify is not installed.
  """
  require_package('math_verify', "the grader 'math'", 'envs')

  def grade(reply: str, item: TaskItem) -> float:
    answer = expected_answer(item, 'math')
    answer = marked_answer(answer) or answer
    candidate = (marked_answer if strict else final_answer)(reply, answer)
    candidate, answer = (_UNNAMED_UNIT.sub('', text) for text in (candidate, answer))
    is_equal = compare_answers(candidate, answer)
    if is_equal is None:
      is_equal = algebra_equal(candidate, answer, timeout=timeout)
    return float(is_equal)

  return grade


def algebra_equal(candidate: str, answer: str, *, timeout: float) -> bool:
  """Returns whether math-verify finds two answers equal, in a separate process.

  Args:
    candidate: The answer of the reply.
    answer: The right answer.
    timeout: Seconds that the comparison may take.

  Returns:
    True if they are equal.

  Raises:
    GraderTimeout: If it took longer.
  """
  if max(len(candidate), len(answer)) > MAX_ANSWER_CHARS:
    return False
  given_text, answer_text = (
    _TEXT.sub(r'\1', text).strip(' .$').lower() for text in (candidate, answer)
  )
  if given_text in _LITERAL_WORDS or answer_text in _LITERAL_WORDS:
    return given_text == answer_text
  target = f'{__name__}:verify_answers'
  return shared_grader_pool().call(
    target, candidate, answer, limit=timeout, needs=['math_verify']
  )


def verify_answers(candidate: str, answer: str) -> bool:
  """Compares two answers by math-verify, which may take forever.

  Args:
    candidate: The answer of the reply.
    answer: The right answer.

  Returns:
    True if they are equal.
  """
  from math_verify import parse, verify

  # math-verify's own limits are alarms, which cannot stop a call that never returns.
  left, right = (
    parse(rf'\boxed{{{text}}}', parsing_timeout=0) for text in (answer, candidate)
  )
  return bool(verify(left, right, timeout_seconds=0))
