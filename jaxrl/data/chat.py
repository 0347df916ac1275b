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

  def with_options(self, **options: Any) -> 'Chat':
    """The same chat with more template options, such as `tools=[…]`."""
    return Chat(self.tokenizer, template_options=self._options | options)

  def with_tools(self, tools: Sequence[dict[str, Any]]) -> 'Chat':
    """The same chat, whose first prompt tells of `tools` as its template does.

    tools: JSON schemas, as OpenAI's API has them. Raises ValueError for a template
    that would leave them out: the model could never know of them.
    """
    told, asked = self.with_options(tools=list(tools)), self._prefix[:1]
    if told._render(asked, prompt=True) == self._render(asked, prompt=True):
      raise ValueError(
        "the tokenizer's chat template leaves tools out: take a model whose template "
        'reads `tools`, or set tokenizer.chat_template'
      )
    return told

  def _render(self, messages: Sequence[Message], prompt: bool) -> str:
    try:
      return self.tokenizer.apply_chat_template(
        list(messages), tokenize=False, add_generation_prompt=prompt, **self._options
      )
    except Exception as error:  # a template is a program of its own
      roles = ', '.join(str(message.get('role')) for message in messages)
      raise ValueError(
        f'the chat template refuses messages of the roles {roles}: {error}'
      ) from error

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

  def whole(self, messages: Sequence[Message]) -> list[int]:
    """Ids of a whole conversation, as the template writes it."""
    return self.encode(self._render(messages, prompt=False))

  def next_prompt(
    self, messages: Sequence[Message], *, ended: bool, prompt: bool = True
  ) -> list[int]:
    """Ids of `messages` alone, to be appended to a history that ends in a reply.

    ended: whether the reply's ids hold its end-of-turn token; if it was cut short,
    that token comes first. prompt: whether to ask for another reply.
    """
    text = self._render([*self._prefix, *messages], prompt=prompt)
    tail = text.partition(_MARK)[2]  # what is shown may have the mark in it
    end = self.tokenizer.eos_token
    if ended:
      tail = tail.removeprefix(end)
    elif not tail.startswith(end):
      tail = end + tail
    return self.encode(tail)

  def conversation(self, messages: Sequence[Message]) -> tuple[np.ndarray, np.ndarray]:
    """A written conversation as a rollout would have produced it.

    Returns tokens `[T]` int32 and mask `[T]` bool, True on the assistant's words and
    on the token that ends each of its turns. A message whose 'train' is false is left
    out of the mask. What follows the last reply is left out.
    """
    opening, rest = _split(messages)
    if rest and not opening:
      raise ValueError('it begins with an assistant message: nothing comes before it')
    tokens = self.first_prompt(opening)
    mask = [False] * len(tokens)
    while rest:
      reply = [*self.encode(self._reply(rest[0])), self.eos_id]
      tokens += reply
      mask += [bool(rest[0].get('train', True))] * len(reply)
      others, rest = _split(rest[1:])
      if others and rest:
        heard = self.next_prompt(others, ended=True)
        tokens += heard
        mask += [False] * len(heard)
      elif rest:
        raise ValueError('two assistant messages follow each other; join them')
    return np.asarray(tokens, np.int32), np.asarray(mask, bool)

  def _reply(self, message: Message) -> str:
    """What the model wrote: the content, or the template's words for its tool calls."""
    if not message.get('tool_calls'):
      return message['content']
    asked = self._prefix[:1]
    header = self._render(asked, prompt=True)
    whole = self._render([*asked, message], prompt=False)
    if not whole.startswith(header):
      raise ValueError('the chat template writes tool calls under another header')
    return whole.removeprefix(header).partition(self.tokenizer.eos_token)[0]

  def document(self, text: str) -> np.ndarray:
    """`[T]` int32: a text as in pretraining, between the tokenizer's own start, if it
    has one, and its end.
    """
    ids = self.tokenizer.encode(text)
    return np.asarray(
      [*ids, self.eos_id] if ids[-1:] != [self.eos_id] else ids, np.int32
    )


def _split(messages: Sequence[Message]) -> tuple[list[Message], list[Message]]:
  """Messages before the first assistant message, and from it on."""
  for i, message in enumerate(messages):
    if message['role'] == 'assistant':
      return list(messages[:i]), list(messages[i:])
  return list(messages), []
