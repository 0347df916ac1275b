"""Parsing of replies: the part of the model's text that an environment acts on."""

import collections
import re

# Matches `Score: 7`, `**Score:** 7.5` and `score = 7`.
SCORE_PATTERN = r'(?i)\bscore\b[\s:*=]{0,8}(-?[0-9]{1,9}(?:\.[0-9]{1,9})?)'


def without_thought(reply: str) -> str:
  """Returns what a reply says after its thought.

  Args:
    reply: The model's text.

  Returns:
    What follows the last `</think>`; the whole reply if nothing does.
  """
  answer = reply[reply.rfind('</think>') + len('</think>') :]
  return answer if '</think>' in reply and answer.strip() else reply


def tagged_answer(reply: str) -> str:
  """Returns the answer that a reply marks with `<answer>` tags.

  Args:
    reply: The model's text.

  Returns:
    The stripped content of the last `<answer>…</answer>`. Without such tags, the last
    line that holds text.
  """
  end = reply.rfind('</answer>')
  start = reply.rfind('<answer>', 0, max(end, 0))
  if start >= 0:
    return reply[start + len('<answer>') : end].strip()
  return reply.rstrip().rpartition('\n')[2].strip()


def last_code_block(reply: str) -> str:
  """Returns the content of the last closed ``` block of a reply.

  Args:
    reply: The model's text.

  Returns:
    The lines between the fences, or '' if no block was closed.
  """
  block: list[str] | None = None
  last = ''
  for line in reply.splitlines(keepends=True):
    fence = line.strip().startswith('```')
    if fence and block is None:
      block = []
    elif fence and block is not None and line.strip() == '```':
      last, block = ''.join(block), None
    elif block is not None:
      block.append(line)
  return last


def last_number(pattern: str, text: str) -> float | None:
  """Returns the number in group 1 of the last match of a pattern.

  A user's own pattern may take forever to match, so call this in a process that can
  be killed.

  Args:
    pattern: A regular expression with one group.
    text: The text to search, such as a judge's verdict.

  Returns:
    The number, or None if nothing matched or group 1 is not a number.
  """
  last_match = collections.deque(re.finditer(pattern, text), maxlen=1)
  try:
    return float(last_match[0].group(1)) if last_match else None
  except (TypeError, ValueError):  # group 1 took no part in the match, or is a word
    return None
