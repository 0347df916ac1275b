"""Formats of tool calls and thoughts: how each family of models writes them.

`detect_tool_format` and `detect_thought_format` choose one by the chat template. Each
format reads a reply (`parse`, `split`); a ToolFormat also writes calls (`render`).
"""

from jaxrl.data.tool_formats.detection import TOOL_FORMATS, detect_tool_format
from jaxrl.data.tool_formats.json_formats import UNKNOWN
from jaxrl.data.tool_formats.thoughts import (
  THINK,
  THOUGHT_FORMATS,
  ReplyParts,
  ThoughtFormat,
  detect_thought_format,
  overlap,
  split_reply,
  split_thought,
)
from jaxrl.data.tool_formats.tool_format import (
  InvalidToolCall,
  MalformedCallError,
  ToolCall,
  ToolFormat,
  read_arguments,
)

__all__ = [
  'THINK',
  'THOUGHT_FORMATS',
  'TOOL_FORMATS',
  'UNKNOWN',
  'InvalidToolCall',
  'MalformedCallError',
  'ReplyParts',
  'ThoughtFormat',
  'ToolCall',
  'ToolFormat',
  'detect_thought_format',
  'detect_tool_format',
  'overlap',
  'read_arguments',
  'split_reply',
  'split_thought',
]
