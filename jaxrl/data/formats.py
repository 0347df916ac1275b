"""Rows of files as users have them: conversations, pairs and texts, told by their keys.

| schema | a row has |
|---|---|
| messages | `messages` (role, content) or `conversations` (from, value); or else a |
| | prompt and a response: prompt, question or instruction (with an input), and |
| | response, solution, completion or output, each a text or a list of messages |
| preference | chosen and rejected: texts or messages after a prompt; or two whole |
| | conversations with a common start, as messages or as `Human: … Assistant: …` |
| text | text |

A row may also have `system` (a text), `tools` (as chat templates take them), `tag` and
`reward`; of messages, `extras`: by name, lists of a value a token, such as a teacher's
log-probs. A message's `"train": false` (or `"weight": 0`) leaves a turn out of
training.
"""

from collections.abc import Iterator, Mapping
from typing import Any

from jaxrl import signature
from jaxrl.data import messages as read
from jaxrl.data.sources import DataError, Row
from jaxrl.types import Message

SCHEMAS = ('messages', 'preference', 'text')


class Format:
  """How rows are read.

  keys: where a row holds what, if not where it is usual: 'prompt=ask, response=reply'.
  question_key, solution_key: further names of the prompt and the response.
  system: the system message of conversations that have none.
  """

  def __init__(
    self,
    *,
    keys: str = '',
    question_key: str = 'question',
    solution_key: str = 'solution',
    system: str = '',
  ):
    self._names: dict[str, tuple[str, ...]] = {
      'messages': ('messages', 'conversations'),
      'prompt': (question_key, 'prompt', 'instruction'),
      'input': ('input',),
      'response': (solution_key, 'response', 'completion', 'output'),
      'chosen': ('chosen',),
      'rejected': ('rejected',),
      'text': ('text',),
      'reward': ('reward',),
      'system': ('system',),
      'tools': ('tools',),
      'tag': ('tag',),
    }
    self._given = _read_keys(keys, self._names)
    self._names |= {name: (key,) for name, key in self._given.items()}
    self._system = system

  def find(self, row: Row, name: str) -> Any:
    """What the row holds under one of the keys for `name`; None if nothing."""
    values = (row.get(key) for key in self._names[name])
    return next((value for value in values if value is not None), None)

  def conversation(self, row: Row) -> list[Message]:
    """The messages of a row, as chat templates take them.

    Raises DataError for a row that holds no conversation.
    """
    found = self.find(row, 'messages')
    named = any(self._given.get(name) in row for name in ('prompt', 'response'))
    if found is not None and not named:
      return self._opened(row, read.messages(found))
    prompt, response = self.find(row, 'prompt'), self.find(row, 'response')
    if prompt is None or response is None:
      raise self._missing(row, 'messages', 'prompt', 'response')
    return self._opened(row, [*self._prompt(row), *read.turns(response, 'assistant')])

  def pair(self, row: Row) -> tuple[list[Message], list[Message]]:
    """The chosen and the rejected conversation; only the answers are to be trained.

    Raises DataError for a row without them, and for answers to different prompts.
    """
    sides = [self.find(row, name) for name in ('chosen', 'rejected')]
    if None in sides:
      raise self._missing(row, 'chosen', 'rejected')
    prompt = self.find(row, 'prompt') is not None
    prefix = self._prompt(row) if prompt else []
    chosen, rejected = (_answer(side, prefix) for side in sides)
    same = read.common(chosen, rejected)
    for side, name in ((chosen, 'chosen'), (rejected, 'rejected')):
      if len(side) == same or side[same]['role'] != 'assistant':
        raise DataError(
          'chosen and rejected must share their prompt and then differ in the '
          f'answer; after {same} equal messages, {name} '
          + ('ends' if len(side) == same else f'has one of {side[same]["role"]}')
        )
    opening = [message | {'train': False} for message in chosen[:same]]
    one, other = ([*opening, *side[same:]] for side in (chosen, rejected))
    return self._opened(row, one), self._opened(row, other)

  def text(self, row: Row) -> str:
    """The text of a row. Raises DataError for one that has none."""
    text = self.find(row, 'text')
    if not isinstance(text, str):
      raise self._missing(row, 'text')
    return text

  def reward(self, row: Row, *, required: bool = False) -> float:
    """The number that the row was given; 0 for none, or a DataError if `required`."""
    reward = self.find(row, 'reward')
    if reward is None and not required:
      return 0.0
    if reward is None:
      raise self._missing(row, 'reward')
    try:
      value = float(reward)
    except (TypeError, ValueError) as error:
      raise DataError(f'the reward is not a number: {reward!r}') from error
    if value - value != 0:
      raise DataError(f'the reward is not a finite number: {reward!r}')
    return value

  def tools(self, row: Row) -> list[Any]:
    """The tools that the conversation's system message is to announce."""
    tools = self.find(row, 'tools')
    tools = read.parsed(tools, 'tools') if isinstance(tools, str) and tools else tools
    return list(tools or ())

  def extras(self, row: Row) -> dict[str, Any]:
    """What else the row says of the tokens of its conversation."""
    extras = row.get('extras') or {}
    if not isinstance(extras, Mapping):
      raise DataError(f'extras is {type(extras).__name__}, not an object')
    return dict(extras)

  def tag(self, row: Row) -> str:
    return str(self.find(row, 'tag') or '')

  def strings(self, row: Row) -> Iterator[str]:
    """Every text of a row that a model may meet, whatever the schema."""
    for name in ('messages', 'prompt', 'response', 'chosen', 'rejected', 'text'):
      value = self.find(row, name)
      if isinstance(value, str):
        yield value
      elif isinstance(value, list):
        for message in value:
          if isinstance(message, Mapping):
            yield str(message.get('content') or message.get('value') or '')

  def _prompt(self, row: Row) -> list[Message]:
    prompt = self.find(row, 'prompt')
    more = self.find(row, 'input')
    instruction = 'input' in self._given or prompt == row.get('instruction')
    if isinstance(prompt, str) and more and instruction:
      prompt = f'{prompt}\n\n{more}'
    return [message | {'train': False} for message in read.turns(prompt, 'user')]

  def _opened(self, row: Row, messages: list[Message]) -> list[Message]:
    """With the system message of the row, or the usual one, where it has none."""
    system = self.find(row, 'system') or self._system
    if not system or messages[0]['role'] in ('system', 'developer'):
      return messages
    return [{'role': 'system', 'content': str(system)}, *messages]

  def _missing(self, row: Row, *names: str) -> DataError:
    keys = [' or '.join(map(repr, dict.fromkeys(self._names[name]))) for name in names]
    wanted = '; '.join(f'{n}: {k}' for n, k in zip(names, keys, strict=True))
    return DataError(
      f'it does not hold what is needed ({wanted}). Its keys are '
      f'{", ".join(map(str, row)) or "none"}; name others by '
      f"--config.files.keys='{names[-1]}=KEY'"
    )


def _read_keys(text: str, names: Mapping[str, Any]) -> dict[str, str]:
  """'prompt=ask, response=reply' as a mapping. Raises ConfigError."""
  found = {}
  for term in filter(str.strip, text.split(',')):
    name, equals, key = (part.strip() for part in term.partition('='))
    if not equals or not key:
      raise signature.ConfigError(f'keys={text!r}: write name=key, name=key')
    if name not in names:
      raise signature.unknown(name, names, 'name', f'keys={text!r}')
    found[name] = key
  return found


def _answer(side: Any, prompt: list[Message]) -> list[Message]:
  """The whole conversation of one side of a pair, with or without a prompt."""
  if isinstance(side, str):
    if prompt:
      return [*prompt, {'role': 'assistant', 'content': side}]
    return read.transcript(side)
  turns = read.messages(side)
  said = [(turn['role'], turn['content']) for turn in turns]
  if prompt and turns[0]['role'] == 'assistant':
    return [*prompt, *turns]
  if prompt and (prompt[-1]['role'], prompt[-1]['content']) not in said:
    raise DataError(
      'an answer starts neither with an assistant message nor with the prompt, '
      f'{prompt[-1]["content"]!r}'[:200]
    )
  return turns
