"""A thought stands before a reply, between markers of the model's family."""

import dataclasses
from collections.abc import Callable, Mapping
from typing import Any

from jaxrl.data.tool_formats.harmony_format import split_analysis
from jaxrl.data.tool_formats.tool_format import Calls, ToolFormat, Tools

Render = Callable[..., str]  # (messages, prompt=bool) -> text


@dataclasses.dataclass(frozen=True)
class ThoughtFormat:
  """How one family of models marks its thoughts.

  Attributes:
    name: The family's name, to be shown to the user.
    opening: What begins a thought.
    closing: What ends it.
    has_channels: Whether thoughts are messages of their own, as GPT-OSS's are.
  """

  name: str
  opening: str
  closing: str
  has_channels: bool = False

  def is_opened_by(self, prompt: str) -> bool:
    """Returns whether a prompt ends inside of a thought, which the reply goes on with.

    Args:
      prompt: The rendered prompt, with the header that asks for a reply.
    """
    return not self.has_channels and prompt.rstrip().endswith(self.opening.rstrip())

  def is_marked(self, text: str, *, opened: bool) -> bool:
    """Returns whether a reply begins with a thought, as its first letters tell.

    Args:
      text: The reply.
      opened: Whether the prompt has already opened the thought.
    """
    return opened or self.has_channels or text.lstrip().startswith(self._opening)

  @property
  def _opening(self) -> str:
    return self.opening.rstrip()

  def split_begun(self, text: str, *, opened: bool) -> tuple[str, str]:
    """Splits what there is of a reply that a model still writes.

    Whatever follows, `split` of the whole reply returns texts that begin with these, if
    `is_marked` says that it has a thought.

    Args:
      text: The beginning of the reply.
      opened: Whether the prompt has already opened the thought.

    Returns:
      The beginning of the thought, and of what follows it.
    """
    body, closing = text.lstrip(), self.closing.strip()
    if self.has_channels or self._opening.startswith(body):
      return '', ''  # the next letters decide
    if body.startswith(self._opening):
      body = body.removeprefix(self._opening)
    elif not opened:
      return '', text
    thought, closed, rest = body.partition(closing)
    if not closed:
      thought = thought[: len(thought) - overlap(thought, closing)]
    return thought.strip(), rest.lstrip()

  def split(self, text: str, *, opened: bool) -> tuple[str | None, str]:
    """Splits a reply into its thought and the rest.

    Args:
      text: The reply.
      opened: Whether the prompt has already opened the thought.

    Returns:
      The thought, or None if there is none, and what follows it. A thought that does
      not end takes up the whole reply.
    """
    if self.has_channels:
      return split_analysis(text)
    opening, closing = self._opening, self.closing.strip()
    body = text.lstrip()
    if body.startswith(opening):
      body = body.removeprefix(opening)
    elif not opened:
      # A model may leave out the opening, as its own template then expects.
      if closing not in text or opening in text.partition(closing)[0]:
        return None, text
      body = text
    else:
      body = text
    thought, _, rest = body.partition(closing)
    return thought.strip(), rest.lstrip()


THINK = ThoughtFormat('<think>', '<think>', '</think>')
HARMONY = ThoughtFormat(
  'GPT-OSS (harmony)', '<|channel|>analysis<|message|>', '<|end|>', has_channels=True
)
GEMMA4 = ThoughtFormat('Gemma 4', '<|channel>thought\n', '<channel|>')
COHERE = ThoughtFormat('Cohere', '<|START_THINKING|>', '<|END_THINKING|>')
MISTRAL = ThoughtFormat('Mistral', '[THINK]', '[/THINK]')
SEED = ThoughtFormat('Seed', '<seed:think>', '</seed:think>')
# Those whose markers hold another's come first.
THOUGHT_FORMATS = (HARMONY, GEMMA4, COHERE, MISTRAL, SEED, THINK)

_THOUGHT = 'Let me look it up first.'
_ANSWER = 'It is blue.'


def overlap(text: str, marker: str) -> int:
  """Returns how many of the last letters of a text may be the start of a marker.

  Args:
    text: The text.
    marker: The marker, of which the text has not all at its end.
  """
  sizes = range(min(len(text), len(marker) - 1), 0, -1)
  return next((n for n in sizes if text.endswith(marker[:n])), 0)


@dataclasses.dataclass(frozen=True)
class ReplyParts:
  """Holds the parts of a reply.

  Attributes:
    thought: The thought; '' if there is none.
    head: The reply up to the end of its thought, as it was written; '' where thoughts
      are messages of their own.
    rest: What follows the thought, as it was written.
    content: The text around the calls.
    calls: The calls, in order.
  """

  thought: str
  head: str
  rest: str
  content: str
  calls: Calls

  @property
  def text(self) -> str:
    """Returns the text around the calls, with the thought as it was written."""
    return self.head + self.content


def split_reply(
  text: str,
  tools: Tools,
  *,
  thought_format: ThoughtFormat | None,
  tool_format: ToolFormat,
  opened: bool,
) -> ReplyParts:
  """Splits a reply into its thought, its text and its tool calls.

  What looks like a call within a thought is none.

  Args:
    text: The reply.
    tools: JSON schemas of the tools, which restore types in some formats.
    thought_format: The family's markers; None for a model without thoughts.
    tool_format: How calls are written.
    opened: Whether the prompt has already opened the thought.

  Returns:
    The parts.
  """
  thought, rest = split_thought(text, opened=opened, thought_format=thought_format)
  if thought_format is not None and not rest:
    # A call ends a thought that the model has not closed.
    starts = [at for mark in tool_format.markers if (at := text.find(mark)) >= 0]
    if starts:
      rest = text[min(starts) :]
      thought, _ = thought_format.split(text[: min(starts)], opened=opened)
  head = text[: len(text) - len(rest)] if text.endswith(rest) else ''
  content, calls = tool_format.parse(text[len(head) :], tools)
  if thought_format is not None and thought_format.has_channels:
    head = ''
  return ReplyParts(thought or '', head, rest, content, calls)


def split_thought(
  text: str, *, opened: bool, thought_format: ThoughtFormat | None = THINK
) -> tuple[str | None, str]:
  """Splits a reply into its thought and the rest.

  Args:
    text: The reply.
    opened: Whether the prompt has already opened the thought.
    thought_format: The family's markers; None for a model without thoughts.

  Returns:
    The thought, or None if there is none, and what follows it.
  """
  if thought_format is None:
    return None, text
  return thought_format.split(text, opened=opened)


def detect_thought_format(template: str, render: Render) -> ThoughtFormat | None:
  """Chooses the format of thoughts that a chat template writes or reads.

  Args:
    template: The chat template.
    render: Renders messages through it: `render(messages, prompt=…)`; may raise.

  Returns:
    The format; None if the template knows no thoughts.
  """
  question: list[Mapping[str, Any]] = [{'role': 'user', 'content': 'What colour?'}]
  reply = {'role': 'assistant', 'content': _ANSWER}
  for key in ('reasoning_content', 'reasoning', 'thinking', 'thought'):
    try:
      text = render([*question, {**reply, key: _THOUGHT}], prompt=False)
    except Exception:  # a template is a program of its own
      continue
    before, found, after = text.partition(_THOUGHT)
    if not found:
      continue
    for one in THOUGHT_FORMATS:
      begins = before.rstrip().endswith(one.opening.rstrip())
      if begins and after.lstrip().startswith(one.closing.strip()):
        return one
  try:
    prompt = render(question, prompt=True)
  except Exception:  # a template is a program of its own
    prompt = ''
  for one in THOUGHT_FORMATS:
    if one.opening.strip() in prompt or one.closing.strip() in template:
      if one.has_channels and one.opening not in template:
        continue  # its closing ends any message, also of other families
      return one
  return None
