"""Stop strings, found in tokens."""

from collections.abc import Sequence
from typing import Any

# Tokens of context beyond the longest stop string: covers characters that are split
# over several tokens, and what a tokenizer does at the start of a text.
MARGIN = 8


def stop_index(
  tokenizer: Any, tokens: Sequence[int], new: int, stops: Sequence[str]
) -> int | None:
  """How many of `tokens` to keep: up to the one that completes a stop string.

  Only the last `new` tokens can complete one; None when none does. A token is at least
  one byte of text, so the longest string's bytes bound how far back it can begin.
  """
  if not stops or not new:
    return None
  reach = max(len(stop.encode()) for stop in stops) + MARGIN
  begin = max(0, len(tokens) - new - reach)

  def stopped(end: int) -> bool:
    text = tokenizer.decode(tokens[begin:end], skip_special_tokens=False)
    return any(stop in text for stop in stops)

  if not stopped(len(tokens)):
    return None
  return next(
    end for end in range(len(tokens) - new + 1, len(tokens) + 1) if stopped(end)
  )
