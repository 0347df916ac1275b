"""The tool format is chosen by what the chat template makes of a made-up call."""

import json
from collections.abc import Iterator, Mapping
from typing import Any

from jaxrl.data.tool_formats.harmony_format import HARMONY
from jaxrl.data.tool_formats.json_formats import (
  COHERE,
  DEEPSEEK_V3,
  DEEPSEEK_V31,
  GRANITE,
  HERMES,
  KIMI_K2,
  LLAMA3,
  MISTRAL,
  MISTRAL_LIST,
  NEMOTRON,
  PHI4,
)
from jaxrl.data.tool_formats.literal_formats import FUNCTION_GEMMA, GEMMA4, LFM2
from jaxrl.data.tool_formats.tagged_formats import (
  GLM,
  MINIMAX,
  MUSE,
  QWEN3_CODER,
  SEED,
)
from jaxrl.data.tool_formats.thoughts import Render
from jaxrl.data.tool_formats.tool_format import ToolFormat

# A format that needs more around a call comes before one that needs less.
TOOL_FORMATS = (
  *(HARMONY, DEEPSEEK_V3, DEEPSEEK_V31, KIMI_K2, GEMMA4, FUNCTION_GEMMA, LFM2, COHERE),
  *(NEMOTRON, PHI4, GRANITE, MISTRAL_LIST, MISTRAL, MINIMAX, MUSE, SEED, QWEN3_CODER),
  *(GLM, HERMES, LLAMA3),
)

_NAME, _ARGUMENTS = 'look_up', {'place': 'Reykjavik by night', 'days': 3}
_CALL_ID = 'aaaaaaaa1'  # nine letters or digits, which Mistral's template asks for
_QUESTION: Mapping[str, Any] = {'role': 'user', 'content': 'What colour is it?'}
_ANSWER = 'It is of the colour that it was.'


def detect_tool_format(template: str, render: Render) -> ToolFormat | None:
  """Chooses the format in which a chat template writes tool calls.

  Args:
    template: The chat template.
    render: Renders messages through it: `render(messages, prompt=…)`; may raise.

  Returns:
    The format whose parser gives a made-up call back from the rendered text; None if
    the template ignores `tool_calls`, or writes them in a way that is not known.
  """
  expected = [{'name': _NAME, 'arguments': _ARGUMENTS}]
  bodies = list(_render_calls(render))
  for tool_format in TOOL_FORMATS:
    for body in bodies:
      # Parsers forgive a missing wrapper; a template writes it.
      has_marker = bool(tool_format.bare) or tool_format.markers[0] in body
      if has_marker and tool_format.parse(body)[1] == expected:
        return _written_alike(tool_format, body)
  return None


def _written_alike(tool_format: ToolFormat, body: str) -> ToolFormat:
  """Returns the format; of Mistral's two, the one that the template writes."""
  if tool_format is MISTRAL_LIST and MISTRAL.markers[0] + _NAME in body.replace(
    ' ', ''
  ):
    return MISTRAL
  return tool_format


def _render_calls(render: Render) -> Iterator[str]:
  """Yields what the template writes for the made-up call, as far as it does."""
  try:
    head, _, tail = render(
      [_QUESTION, {'role': 'assistant', 'content': _ANSWER}], prompt=False
    ).partition(_ANSWER)
  except Exception:  # a template is a program of its own
    head = tail = ''
  for arguments in (_ARGUMENTS, json.dumps(_ARGUMENTS)):
    for content in ('', None):
      function = {'name': _NAME, 'arguments': arguments}
      call = {'id': _CALL_ID, 'type': 'function', 'function': function}
      reply = {'role': 'assistant', 'content': content, 'tool_calls': [call]}
      try:
        text = render([_QUESTION, reply], prompt=False)
      except Exception:  # the next one may suit it
        continue
      yield text.rpartition(_QUESTION['content'])[2]
      if head and text.startswith(head):
        yield text.removeprefix(head).removesuffix(tail)
