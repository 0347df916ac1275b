"""Chat as tokens: what the model wrote is never tokenised again.

An episode's history grows by appending: the ids of the first prompt, then in turn
the ids the engine returned and the ids of the new messages alone.
"""

from collections.abc import Sequence
from typing import Any

import numpy as np

from jaxrl.types import Message

_MARK = '\x02reply\x03'  # stands for the reply that is there as ids already


class Chat:
  """A tokenizer's chat template, one message at a time.

  template_options: passed to the template, such as `enable_thinking=False`.
  """

  def __init__(self, tokenizer: Any, *, template_options: dict[str, Any] | None = None):
    if tokenizer.chat_template is None:
      raise ValueError(
        'the tokenizer has no chat template; set tokenizer.chat_template'
      )
    if tokenizer.eos_token_id is None:
      raise ValueError('the tokenizer has no eos token to end a reply with')
    self.tokenizer = tokenizer
    self.eos_id: int = tokenizer.eos_token_id
    self._options = dict(template_options or {})
    self._prefix = [
      {'role': 'user', 'content': 'x'},
      {'role': 'assistant', 'content': _MARK},
    ]

  def _render(self, messages: Sequence[Message], prompt: bool) -> str:
    return self.tokenizer.apply_chat_template(
      list(messages), tokenize=False, add_generation_prompt=prompt, **self._options
    )

  def encode(self, text: str) -> list[int]:
    """Ids of `text` as it stands."""
    return self.tokenizer.encode(text, add_special_tokens=False)

  def decode(self, tokens: Sequence[int] | np.ndarray) -> str:
    """The text of a reply: special tokens, its end among them, are left out."""
    ids = tokens.tolist() if isinstance(tokens, np.ndarray) else list(tokens)
    return self.tokenizer.decode(ids, skip_special_tokens=True)

  def first_prompt(self, messages: Sequence[Message]) -> list[int]:
    """Ids of the opening messages and of the header that asks for a reply."""
    return self.encode(self._render(messages, prompt=True))

  def next_prompt(
    self, messages: Sequence[Message], *, ended: bool, prompt: bool = True
  ) -> list[int]:
    """Ids of `messages` alone, to be appended to a history that ends in a reply.

    ended: whether the reply's ids hold its end-of-turn token; if it was cut short,
    that token comes first. prompt: whether to ask for another reply.
    """
    text = self._render([*self._prefix, *messages], prompt=prompt)
    tail = text.rpartition(_MARK)[2]
    end = self.tokenizer.eos_token
    if ended:
      tail = tail.removeprefix(end)
    elif not tail.startswith(end):
      tail = end + tail
    return self.encode(tail)

  def conversation(self, messages: Sequence[Message]) -> tuple[np.ndarray, np.ndarray]:
    """A written conversation as a rollout would have produced it.

    Returns tokens `[T]` int32 and mask `[T]` bool, True on the assistant's words and
    on the token that ends each of its turns.
    """
    opening, rest = _split(messages)
    tokens = self.first_prompt(opening)
    mask = [False] * len(tokens)
    while rest:
      reply = [*self.encode(rest[0]['content']), self.eos_id]
      tokens += reply
      mask += [True] * len(reply)
      others, rest = _split(rest[1:])
      if others and rest:
        heard = self.next_prompt(others, ended=True)
        tokens += heard
        mask += [False] * len(heard)
      elif rest:
        raise ValueError('two assistant messages follow each other; join them')
    return np.asarray(tokens, np.int32), np.asarray(mask, bool)


def _split(messages: Sequence[Message]) -> tuple[list[Message], list[Message]]:
  """Messages before the first assistant message, and from it on."""
  for i, message in enumerate(messages):
    if message['role'] == 'assistant':
      return list(messages[:i]), list(messages[i:])
  return list(messages), []
