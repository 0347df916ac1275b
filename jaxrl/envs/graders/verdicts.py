"""The number in what a judge said."""

import collections
import re

# `Score: 7`, `**Score:** 7.5`, `score = 7`.
SCORE = r'(?i)\bscore\b[\s:*=]{0,8}(-?\d{1,9}(?:\.\d{1,9})?)'


def last_number(pattern: str, text: str) -> float | None:
  """What group 1 of the pattern's last match says; None for no match or no number.

  May take forever for a pattern of the user's.
  """
  last = collections.deque(re.finditer(pattern, text), maxlen=1)
  try:
    return float(last[0].group(1)) if last else None
  except (TypeError, ValueError):  # the group took no part in the match, or is a word
    return None
