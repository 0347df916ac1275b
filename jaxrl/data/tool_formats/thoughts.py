"""A thought stands before a reply, between markers of the model's family."""

import dataclasses
from collections.abc import Callable, Mapping
from typing import Any

from jaxrl.data.tool_formats.harmony_format import split_analysis

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
    opening, closing = self.opening.rstrip(), self.closing.strip()
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
