"""A turn's end is found in a chat template and in what a checkpoint says of its tokens.

A reply stops at every token that `generation_config.json` names, at the tokenizer's eos
token and at those that the template writes after an answer and after tool calls: these
often differ.
"""

import contextlib
import dataclasses
import re
from collections.abc import Callable, Iterable, Sequence
from typing import Any

from jaxrl.types import Message

MARK = '\x02reply\x03'  # stands for a reply in a rendered text
_NEXT = '\x02next\x03'  # stands for the message after it
QUESTION: Message = {'role': 'user', 'content': 'x'}


class ChatOptionError(ValueError):
  """What a user has set about conversations does not suit the checkpoint.

  Attributes:
    option: The option, such as 'template_options.enable_thinking'.
  """

  def __init__(self, option: str, problem: str):
    super().__init__(problem)
    self.option = option


class AddedTokens:
  """Finds a tokenizer's added tokens, such as `<|im_end|>`, in text.

  Tokenizers read them before all else, so that text is encoded alike after one of them,
  whatever stands before it.

  Attributes:
    ids: The id of each, by its text.
  """

  def __init__(self, tokenizer: Any):
    """Reads the added tokens of a tokenizer.

    Args:
      tokenizer: A Hugging Face tokenizer.
    """
    self.ids: dict[str, int] = {
      str(token): number
      for number, token in tokenizer.added_tokens_decoder.items()
      if str(token).strip()
    }
    longest_first = sorted(self.ids, key=len, reverse=True)
    self._pattern = re.compile('|'.join(map(re.escape, longest_first)) or '(?!)')

  def find_first(self, text: str) -> re.Match[str] | None:
    """Returns the first added token of a text if only spaces stand before it.

    Args:
      text: The text.
    """
    match = self._pattern.search(text)
    return match if match and not text[: match.start()].strip() else None

  def last_start(self, text: str) -> int:
    """Returns where the last added token of a text begins; 0 if it has none.

    Args:
      text: The text.
    """
    start = 0
    for match in self._pattern.finditer(text):
      start = match.start()
    return start

  def find_last_end(self, text: str, stop_ids: Sequence[int]) -> re.Match[str] | None:
    """Returns the token that ends a text: spaces and such tokens alone may follow it.

    Args:
      text: The text.
      stop_ids: The tokens that may end it.
    """
    first, rest = None, 0
    for match in self._pattern.finditer(text):
      if self.ids[match[0]] not in stop_ids or text[rest : match.start()].strip():
        first = None
      if self.ids[match[0]] in stop_ids:
        first, rest = first or match, match.end()
    return first if first and not text[rest:].strip() else None


@dataclasses.dataclass(frozen=True)
class TurnEnd:
  """Says how an assistant's turn ends.

  Attributes:
    stop_ids: Tokens that end a reply, in ascending order.
    closing: What the template writes after the last reply, up to the token that ends
      it; the eos token where the template writes none.
    closing_id: The id of the token in `closing`.
    is_written: Whether the template writes `closing`.
    message_end: What the template writes after a reply that other messages follow;
      '' if the next message follows at once.
    doubt: Why replies may not stop, for the user; '' if nothing is doubtful.
  """

  stop_ids: tuple[int, ...]
  closing: str
  closing_id: int
  is_written: bool
  message_end: str
  doubt: str = ''


def find_turn_end(
  tokenizer: Any,
  added: AddedTokens,
  render: Callable[..., str],
  stop_token_ids: Sequence[int] = (),
) -> TurnEnd:
  """Finds out how a reply ends.

  Args:
    tokenizer: The tokenizer; `generation_config`, if it has one, is what the checkpoint
      says of its tokens.
    added: The tokenizer's added tokens.
    render: Renders messages; `prompt=True` appends the header of a reply.
    stop_token_ids: The tokens that the user wants to end a reply, in place of those
      that are found.

  Returns:
    How a turn ends.

  Raises:
    ValueError: If nothing would end a reply, or the template ends it with a text that
      is not a token of this tokenizer, as that of another model does.
    ChatOptionError: If a token that the user names does not exist.
  """
  for number in stop_token_ids:
    if not 0 <= number < len(tokenizer):
      size = f'{len(tokenizer):,}'
      problem = f'{number} is not a token of the tokenizer, which has {size}'
      raise ChatOptionError('stop_token_ids', problem)
  reply = {'role': 'assistant', 'content': MARK}
  whole = render([QUESTION, reply], prompt=False)
  if MARK not in whole:
    raise ValueError(
      "the chat template does not render the text of an assistant's message"
    )
  last = whole.rpartition(MARK)[2]
  found = added.find_first(last)
  generation = getattr(tokenizer, 'generation_config', None) or {}
  named = _as_ids(generation.get('eos_token_id'))
  eos_id = tokenizer.eos_token_id
  stops = {*stop_token_ids} or {*named, *_as_ids(eos_id)}
  if not stop_token_ids:
    stops |= _find_written_ends(added, render, reply, found)
  if not found and last.strip() and not stop_token_ids:
    raise ValueError(
      f'the chat template ends a reply with {last.strip()!r}, which is not a token of '
      'this tokenizer, so that nothing would stop a reply there: use the template of '
      'this model, add the token to the tokenizer, or name the tokens that end a reply '
      'in the option stop_token_ids'
    )
  if found and not _is_read(tokenizer, last[: found.end()], added.ids[found[0]]):
    raise ValueError(
      f'the tokenizer reads {found[0]} after a word as plain letters, and not as the '
      'token that ends a reply: set "normalized" of this token to false in '
      'tokenizer.json'
    )
  if not stops:
    raise ValueError(
      'no token ends a reply: the tokenizer has no eos token, generation_config.json '
      'names none, and the chat template writes none; set tokenizer.eos_token or the '
      'option stop_token_ids'
    )
  doubt = ''
  if found and named and added.ids[found[0]] not in named and not stop_token_ids:
    doubt = (
      f'the chat template ends a reply with {found[0]}, and generation_config.json '
      f'names {describe_tokens(tokenizer, named)} alone: replies stop at either, but '
      'a model that was not trained with this template may write neither'
    )
  middle = _message_end(added, render, reply, stops)
  if found:
    closing, closing_id = last[: found.end()], added.ids[found[0]]
  else:  # what begins the next message, or the eos token
    next_id = added.ids.get(middle.strip())
    closing_id = next_id if next_id in stops else _usual_stop(eos_id, stops)
    closing = tokenizer.convert_ids_to_tokens(closing_id)
  return TurnEnd(
    stop_ids=tuple(sorted(stops)),
    closing=closing,
    closing_id=closing_id,
    is_written=found is not None,
    message_end=middle if found else '',
    doubt=doubt,
  )


def _message_end(
  added: AddedTokens, render: Callable[..., str], reply: Message, stops: set[int]
) -> str:
  """Returns the text that ends a reply before a user's message; '' if there is none.

  The text ends with a token that also stops replies or ends the user's messages.
  """
  following = {'role': 'user', 'content': _NEXT}
  text = render([QUESTION, reply, following], prompt=False).rpartition(MARK)[2]
  found = added.find_first(text)
  if found is None:
    return ''
  after_user = added.find_first(text.partition(_NEXT)[2])
  ends_users = after_user is not None and after_user[0] == found[0]
  is_end = added.ids[found[0]] in stops or ends_users
  return text[: found.end()] if is_end else ''


def _find_written_ends(
  added: AddedTokens, render: Callable[..., str], reply: Message, found: Any
) -> set[int]:
  """Finds the tokens that a template writes after a reply, with and without calls."""
  if found is None:  # what begins the next message ends a reply
    return _find_next_headers(added, render, reply)
  return {added.ids[found[0]]} | _find_ends_of_calls(added, render)


def _find_ends_of_calls(added: AddedTokens, render: Callable[..., str]) -> set[int]:
  """Finds the token that a template writes after a reply with tool calls.

  GPT-OSS and Gemma 4 have another than after an answer. What ends each of the calls
  ends no reply.
  """
  last = []
  for count in (1, 2):
    try:
      text = render([QUESTION, reply_with_calls(count)], prompt=False)
    except ValueError:
      return set()
    start = added.last_start(text)
    token = added.find_first(text[start:])
    if 'look_up' not in text or token is None or text[start + token.end() :].strip():
      return set()
    last.append((token[0], text.count(token[0])))
  return {added.ids[last[0][0]]} if last[0] == last[1] else set()


def _find_next_headers(
  added: AddedTokens, render: Callable[..., str], reply: Message
) -> set[int]:
  """Finds the tokens that begin other messages, where a template ends no reply.

  GLM's models write <|user|> after an answer and <|observation|> after tool calls.
  """
  found = []
  text = render([QUESTION, reply, QUESTION], prompt=False)
  found.append(added.find_first(text.rpartition(MARK)[2]))
  conversation = [QUESTION, reply_with_calls(1)]
  result = {'role': 'tool', 'content': _NEXT, 'tool_call_id': 'abcdefgh0'}
  with contextlib.suppress(ValueError):
    before = render(conversation, prompt=False)
    text = render([*conversation, result], prompt=False)
    if _NEXT in text and text.startswith(before):
      found.append(added.find_first(text[len(before) :]))
  return {added.ids[token[0]] for token in found if token}


def reply_with_calls(count: int) -> Message:
  """Returns a made-up reply that calls look_up(place='Rome').

  Args:
    count: How many times.
  """
  calls = [
    {
      'id': f'abcdefgh{i}',  # as long as Mistral's
      'type': 'function',
      'function': {'name': 'look_up', 'arguments': {'place': 'Rome'}},
    }
    for i in range(count)
  ]
  return {'role': 'assistant', 'content': '', 'tool_calls': calls}


def _is_read(tokenizer: Any, closing: str, number: int) -> bool:
  """Returns whether `closing`, encoded after a word, ends with the token `number`."""
  return tokenizer.encode(f'x{closing}', add_special_tokens=False)[-1] == number


def _usual_stop(eos_id: int | None, stops: Iterable[int]) -> int:
  return eos_id if eos_id is not None and eos_id in stops else min(stops)


def _as_ids(value: Any) -> list[int]:
  """Converts an id, a list of ids or None, as found in configs, to a list."""
  values = value if isinstance(value, list | tuple) else [value]
  return [int(number) for number in values if number is not None]


def describe_tokens(tokenizer: Any, ids: Iterable[int]) -> str:
  """Returns tokens as text with their ids, such as '<eos> (1), <end_of_turn> (106)'.

  Args:
    tokenizer: The tokenizer.
    ids: The ids.
  """
  return ', '.join(f'{tokenizer.convert_ids_to_tokens(i)} ({i})' for i in ids)
