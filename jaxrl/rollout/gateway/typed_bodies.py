"""Typed bodies are requests whose fields msgspec models describe and check.

The endpoint parses JSON with msgspec already, which checks types as it does so; models
of another package would make it depend on one more.
"""

import re
from collections.abc import Callable, Sequence
from typing import Any, TypeVar

import msgspec

from jaxrl.options import JsonObject
from jaxrl.rollout.gateway.generation_request import ApiError, invalid_field
from jaxrl.rollout.gateway.openai_requests import (
  MAX_IMAGES,
  parse_body,
  parse_client_messages,
)
from jaxrl.rollout.gateway.request_cache import RequestCache
from jaxrl.types import Message

T = TypeVar('T')
_PLACE = re.compile(r' - at `\$\.?(.*)`$')
_FIELD = re.compile(r'(required|unknown|supported) field `(\w+)`')
_CODES = {
  'required': 'missing_required_parameter',
  'unknown': 'unknown_parameter',
  'supported': 'unsupported_value',
}
_IMAGE_TYPES = ('image', 'input_image', 'image_url')


class BodyPart(msgspec.Struct, forbid_unknown_fields=True):
  """A part of a body: what it has beside the fields that are declared is refused.

  Fields that are declared as Any leave the reply as it is, whatever their value.
  """

  def refuse(self, name: str) -> None:
    """Refuses a field for its value, while a part is checked.

    Args:
      name: The field's name in the body.

    Raises:
      ValueError: Always; `check_model` makes an ApiError of it.
    """
    raise ValueError(f'this value of the supported field `{name}` is not supported')


def check_model(value: object, model: type[T], place: str = '') -> T:
  """Returns a JSON value as an object of a model.

  Args:
    value: The value.
    model: A `msgspec.Struct`, or a union of several.
    place: Where the value is in the body; '' for the body itself.

  Returns:
    The object.

  Raises:
    ApiError: Names the field at fault.
  """
  try:
    return msgspec.convert(value, model)
  except msgspec.ValidationError as error:
    text = str(error)
    found = _PLACE.search(text)
    named = _FIELD.search(text)
    places = [place, found[1] if found else '', named[2] if named else '']
    field = '.'.join(one for one in places if one)
    message = _PLACE.sub('', text)[:200]
    if message.startswith(('Invalid', 'Expected `null`')):  # it is of the right kind
      raise invalid_field(
        field, f'{message}: it is not supported here', 'unsupported_value'
      ) from error
    code = _CODES[named[1]] if named else 'invalid_value'
    raise invalid_field(field, message, code) from error


def read_entries(
  data: bytes,
  cache: RequestCache | None,
  parse_entries: Callable[[list[Any]], Sequence[object]],
  *,
  field: str,
  form: str,
) -> JsonObject:
  """Parses a body, of whose list of entries only what is not cached is looked at.

  Args:
    data: The body.
    cache: The session's earlier requests, to which the request is added; None parses
      all of it.
    parse_entries: Parses entries, each to one object.
    field: The field with the list; it may also hold something else.
    form: The API, as whose entries they are parsed.

  Returns:
    The body, with its entries parsed.

  Raises:
    ApiError: Names the field at fault.
  """
  if cache is not None:
    try:
      return cache.read(data, parse_entries, field=field, form=form)
    except (ApiError, KeyError, RecursionError, ValueError):
      pass  # all of it is parsed, so that errors count entries from the first one on
  body = parse_body(data)
  entries = body.get(field)
  if isinstance(entries, list):
    count = _count_images(entries)
    if count > MAX_IMAGES:
      message = f'{count} images are too many: at most {MAX_IMAGES} are accepted'
      raise invalid_field(field, message)
    body[field] = parse_entries(entries)
  return body


def _count_images(parts: object) -> int:
  """Counts the images in parts of messages, and in the results of tools in them."""
  if not isinstance(parts, list):
    return 0
  objects = [part for part in parts if isinstance(part, dict)]
  return sum(
    (part.get('type') in _IMAGE_TYPES)
    + _count_images(part.get('content'))
    + _count_images(part.get('output'))
    for part in objects
  )


def to_messages(messages: list[JsonObject], place: str) -> list[Message]:
  """Brings messages in the form of OpenAI's chat API into the form of templates.

  Args:
    messages: The messages, which an entry of a body stands for.
    place: Where the entry is.

  Returns:
    The messages.

  Raises:
    ApiError: Names the entry, if it cannot be one.
  """
  if not messages:
    return []
  try:
    return parse_client_messages(messages)
  except ApiError as error:
    text = str(error).removeprefix('messages: ')
    raise invalid_field(place, text.removeprefix('message 0: ')) from error


def rename_field(error: ApiError, names: dict[str, str]) -> ApiError:
  """Returns an error of the chat API under the names of another API.

  Args:
    error: The error.
    names: The other API's names of fields.

  Returns:
    The error.
  """
  name = names.get(error.param or '', error.param or '')
  text = str(error)
  if error.param and text.startswith(error.param):
    text = name + text.removeprefix(error.param)
  return ApiError(error.status, text, param=name or None, code=error.code)
