"""The math grader: final answers compared by algebra, within a time limit.

By math-verify, https://github.com/huggingface/Math-Verify.
"""

import importlib.util
import re

from jaxrl.envs.graders.answers import (
  LONGEST,
  decide,
  final_answer,
  marked_answer,
)
from jaxrl.envs.graders.processes import shared
from jaxrl.envs.graders.rules import Item, Part, expected
from jaxrl.signature import ConfigError

# To algebra, a product of unknowns: 'no' would equal 'on'.
_WORDS = frozenset(['yes', 'no', 'true', 'false', 'none'])
_TEXT = re.compile(r'\\(?:text|textbf|mathrm|mathbf)\{([^{}]*)\}')


def math(*, strict: bool = False, timeout: float = 5.0) -> Part:
  r"""1 if the reply's final answer equals the item's, else 0.

  Final is what `\boxed{}` or `####` marks, else the last number; strict: only what is
  marked. What plainly agrees (as numbers, or letter for letter) and numbers that
  differ are decided at once; the rest is parsed and compared by math-verify in a
  process that is killed after `timeout` seconds. Raises ConfigError where math-verify
  is not installed, and GraderTimeout.
  """
  if importlib.util.find_spec('math_verify') is None:
    raise ConfigError(
      "the grader 'math' needs the package math-verify: pip install 'jaxrl[envs]'"
    )

  def grade(reply: str, item: Item) -> float:
    answer = expected(item, 'math')
    answer = marked_answer(answer) or answer
    given = marked_answer(reply) if strict else final_answer(reply)
    found = decide(given, answer)
    if found is None:
      found = equal(given, answer, timeout=timeout)
    return float(found)

  return grade


def equal(given: str, answer: str, *, timeout: float) -> bool:
  """Whether math-verify finds two answers equal; asked of a process of its own."""
  if max(len(given), len(answer)) > LONGEST:
    return False
  said, right = (
    _TEXT.sub(r'\1', text).strip(' .$').lower() for text in (given, answer)
  )
  if said in _WORDS or right in _WORDS:
    return said == right
  target = f'{__name__}:verified'
  return shared().call(target, given, answer, limit=timeout, needs=['math_verify'])


def verified(given: str, answer: str) -> bool:
  """What `equal` has computed: may take forever."""
  from math_verify import parse, verify

  # Its own limits are alarms, which a call that never returns to Python outlives.
  left, right = (
    parse(rf'\boxed{{{text}}}', parsing_timeout=0) for text in (answer, given)
  )
  return bool(verify(left, right, timeout_seconds=0))
