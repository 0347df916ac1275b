"""Reads the conversations of dumps: their text, thoughts, tool calls and images.

What a message is made of becomes a list of parts, which static/messages.js shows.
"""

import base64
import json
import pathlib
import re
from collections.abc import Mapping, Sequence
from typing import Any

from jaxrl.data import json_codec
from jaxrl.data.images import MARK, ImageFolder, as_image
from jaxrl.data.trajectory_writers.file_writer import IMAGES

IMAGE_TYPES = {
  b'\x89PNG\r\n\x1a\n': 'png',
  b'\xff\xd8\xff': 'jpeg',
  b'GIF8': 'gif',
  b'RIFF': 'webp',
}
DATA_URL = re.compile(r'data:image/(?:png|jpeg|gif|webp);base64,[A-Za-z0-9+/=\s]*')
MAX_IMAGE = 8 << 20  # bytes
# What models write around their thoughts and tool calls (Hermes' and Qwen's formats).
MARKED = re.compile(r'<(think|tool_call)>(.*?)(?:</\1>|\Z)', re.S)
Part = dict[str, str]


def message_texts(messages: Sequence[Any]) -> list[tuple[str, str]]:
  """Returns the role and the text of each message; tool calls are text too."""
  texts = []
  for message in messages:
    if isinstance(message, Mapping):
      parts = [_text(message.get('content'))]
      parts += [' '.join(_tool_call(call)) for call in message.get('tool_calls') or ()]
      texts.append((str(message.get('role', '')), '\n'.join(filter(None, parts))))
  return texts


def count_tool_calls(messages: Sequence[Any]) -> int:
  """Returns the number of tool calls: those of messages, and those in their text."""
  count = 0
  for message in messages:
    if isinstance(message, Mapping) and message.get('role') == 'assistant':
      calls = message.get('tool_calls')
      count += len(calls) if isinstance(calls, list) else 0
      count += _text(message.get('content')).count('<tool_call>')
  return count


def message_parts(message: Mapping[str, Any]) -> list[Part]:
  """Returns the parts of a message, in order.

  Returns:
    Each a mapping with a `kind`: 'text' and 'thought' have a `text`; 'call' has a
    `name` and `arguments`; 'image' has a `src`, which is a data URL.
  """
  content = message.get('content')
  pieces = content if isinstance(content, list) else [content]
  parts: list[Part] = []
  if isinstance(thought := message.get('reasoning_content'), str) and thought:
    parts.append({'kind': 'thought', 'text': thought})
  for piece in pieces:
    if isinstance(piece, str):
      written = message.get('role') == 'assistant'
      parts += _split_marked(piece) if written else [{'kind': 'text', 'text': piece}]
    elif isinstance(piece, Mapping):
      parts.append(_piece(piece))
  for call in message.get('tool_calls') or ():
    name, arguments = _tool_call(call)
    parts.append({'kind': 'call', 'name': name, 'arguments': arguments})
  return parts


def _piece(piece: Mapping[str, Any]) -> Part:
  if isinstance(piece.get('text'), str):
    return {'kind': 'text', 'text': piece['text']}
  image = piece.get('image_url', piece.get('image'))
  if isinstance(image, Mapping) and 'url' in image:
    image = image['url']
  source = image_source(image)
  if source:
    return {'kind': 'image', 'src': source}
  return {'kind': 'text', 'text': json.dumps(readable(piece), ensure_ascii=False)}


def with_stored_images(messages: Any, folder: pathlib.Path) -> list[Any]:
  """Returns messages of a dump with data URLs in the place of their images' digests.

  Args:
    messages: The messages.
    folder: Folder of the dump, which has the images in `images`.
  """
  stored = ImageFolder(folder / IMAGES)

  def part(piece: Any) -> Any:
    mark = piece.get('image') if isinstance(piece, Mapping) else None
    if not isinstance(mark, str) or not mark.startswith(MARK):
      return piece
    try:
      return {**piece, 'image': stored[mark].data_url()}
    except (KeyError, ValueError):
      return {'type': 'text', 'text': f'[the image {mark} is not in {IMAGES}]'}

  return [
    {**message, 'content': [part(x) for x in message['content']]}
    if isinstance(message, Mapping) and isinstance(message.get('content'), list)
    else message
    for message in (messages if isinstance(messages, list) else ())
  ]


def _split_marked(text: str) -> list[Part]:
  """Splits what a model wrote into text, thoughts and tool calls."""
  parts: list[Part] = []
  end = 0
  for match in MARKED.finditer(text):
    if before := text[end : match.start()].strip('\n'):
      parts.append({'kind': 'text', 'text': before})
    end = match.end()
    if match[1] == 'think':
      parts.append({'kind': 'thought', 'text': match[2].strip('\n')})
      continue
    try:
      name, arguments = _tool_call(json.loads(match[2]))
    except (ValueError, RecursionError):
      name, arguments = '', match[2].strip()
    parts.append({'kind': 'call', 'name': name, 'arguments': arguments})
  if (rest := text[end:].strip('\n')) or not parts:
    parts.append({'kind': 'text', 'text': rest})
  return parts


def _text(content: Any) -> str:
  if isinstance(content, str):
    return content
  if isinstance(content, list):
    texts = [
      part['text'] for part in content if isinstance(part, Mapping) and 'text' in part
    ]
    return '\n'.join(map(str, texts))
  return ''


def _tool_call(call: Any) -> tuple[str, str]:
  """Returns the name and arguments of a call in OpenAI's format, or its function's."""
  function = call.get('function', call) if isinstance(call, Mapping) else {}
  if not isinstance(function, Mapping):
    return '', str(function)
  arguments = function.get('arguments', function.get('parameters', ''))
  if not isinstance(arguments, str):
    arguments = json.dumps(arguments, ensure_ascii=False, default=str)
  return str(function.get('name', '')), arguments


def image_source(value: Any) -> str:
  """Returns a data URL of an image: of bytes, an array of pixels, or such a URL.

  Args:
    value: A value of a dump. Other URLs are not followed.

  Returns:
    The URL; '' if it is not an image.
  """
  if isinstance(value, str):
    return value if DATA_URL.fullmatch(value[: 2 * MAX_IMAGE]) else ''
  if not isinstance(value, Mapping):
    return ''
  try:
    if isinstance(text := value.get('$bytes'), str):
      data = base64.b64decode(text, validate=True)
      kinds = [kind for start, kind in IMAGE_TYPES.items() if data.startswith(start)]
      is_image = kinds and len(data) <= MAX_IMAGE
      return f'data:image/{kinds[0]};base64,{text}' if is_image else ''
    array = value.get('$array')
    if isinstance(array, Mapping) and array.get('dtype') == '|u1':
      return as_image(json_codec.decode_array(array, 'image')).data_url()
  except ValueError:
    return ''
  return ''


def readable(value: Any) -> Any:
  """Returns a value of a dump with arrays and bytes described in words.

  Args:
    value: JSON, with the objects that `json_codec` writes.
  """
  if isinstance(value, list):
    return [readable(item) for item in value]
  if not isinstance(value, Mapping):
    return value
  if len(value) == 1:
    ((mark, inner),) = value.items()
    if mark == '$array' and isinstance(inner, Mapping):
      return f'array {inner.get("dtype")} {inner.get("shape")}'
    if mark == '$bytes':
      return f'{len(str(inner)) * 3 // 4} bytes'
    if mark in ('$float', '$tuple', '$items'):
      return readable(inner)
    if mark == '$scalar':
      return readable({'$array': inner})
  return {str(key): readable(item) for key, item in value.items()}


def find_images(value: Any, name: str = '') -> list[tuple[str, str]]:
  """Returns the name and the data URL of each image inside a value of a dump.

  Args:
    value: JSON, with the objects that `json_codec` writes.
    name: Name of the value.
  """
  if source := image_source(value):
    return [(name, source)]
  if isinstance(value, list):
    items = [(f'{name}[{i}]', item) for i, item in enumerate(value)]
  elif isinstance(value, Mapping):
    items = [(f'{name}.{key}' if name else str(key), v) for key, v in value.items()]
  else:
    return []
  return [image for label, item in items for image in find_images(item, label)]
