"""Tool calls are read here from the text of a reply whose format is not known.

`jaxrl.data.tool_formats` has the formats of the families of models.
"""

from jaxrl.data.tool_formats import UNKNOWN, InvalidToolCall, ToolCall, ToolFormat

OPEN_TAG, CLOSE_TAG = '<tool_call>', '</tool_call>'


def parse_tool_calls(
  text: str, tool_format: ToolFormat = UNKNOWN
) -> tuple[str, list[ToolCall | InvalidToolCall]]:
  """Splits a reply into its text and its tool calls.

  Args:
    text: The reply.
    tool_format: How the model writes calls; by default as Hermes or Llama 3.

  Returns:
    The text around the calls, and the calls in order; an unreadable call is an
    InvalidToolCall.
  """
  return tool_format.parse(text)


def may_be_tool_call(text: str) -> bool:
  """Returns whether a reply that begins like this may be nothing but a tool call.

  Args:
    text: The beginning of the reply.

  Returns:
    True if the text could still become a call.
  """
  return UNKNOWN.may_begin(text)


def extract_tool_calls(
  text: str, tool_format: ToolFormat = UNKNOWN
) -> tuple[str, list[ToolCall]]:
  """Splits a reply into its text and its tool calls, all or none.

  A reply with an unreadable call is returned as text without calls, so that whoever
  supplied the tools sees what the model wrote.

  Args:
    text: The reply.
    tool_format: How the model writes calls; by default as Hermes or Llama 3.

  Returns:
    The text around the calls, and the calls.
  """
  content, calls = parse_tool_calls(text, tool_format)
  valid = [call for call in calls if not isinstance(call, InvalidToolCall)]
  return (content, valid) if calls and len(valid) == len(calls) else (text, [])
