"""Walks the types of requests in official clients, down to the last nested field."""

import base64
import collections.abc
import dataclasses
import io
import json
import types
import typing
from collections.abc import Callable, Collection
from typing import Any, Literal

import typing_extensions
from PIL import Image

from jaxrl.rollout.gateway.generation_request import ApiError, GenerationRequest

Parse = Callable[[bytes], GenerationRequest]
Place = Callable[[Any], dict[str, Any]]
_WRAPPERS = (
  *(typing.Annotated, typing.Required, typing.NotRequired),
  *(typing_extensions.Required, typing_extensions.NotRequired),
)
_LISTS = (list, collections.abc.Iterable, collections.abc.Sequence)


def _png() -> str:
  file = io.BytesIO()
  Image.new('RGB', (4, 4)).save(file, 'PNG')
  return base64.b64encode(file.getvalue()).decode()


PNG = _png()
# Texts that must be more than texts, and then some that are not.
TEXTS = {
  'arguments': ['{}', '{"a": 1}'],
  'data': [PNG, 'x'],
  'image_url': [f'data:image/png;base64,{PNG}', 'x'],
  'url': [f'data:image/png;base64,{PNG}', 'x'],
}
# What a request needs although the client's types leave it out.
NEEDED: dict[str, dict[str, Any]] = {
  'ChatCompletionAssistantMessageParam': {'content': 'x'},
  'FunctionCallOutput': {'call_id': 'x'},
  'JSONSchema': {'schema': {'type': 'object'}},
}


class Walk:
  """Tries every field of a request's type, by putting values of it into a body.

  Attributes:
    decided: Each field, as CLASS.FIELD, with whether a value of it was refused, or was
      read otherwise than another value, or has a field of which that is true.
  """

  def __init__(self, parse: Parse, ignored: Collection[str]):
    """Creates a walk.

    Args:
      parse: Parses a body.
      ignored: Fields that may be without effect; what is in them is not tried.
    """
    self._parse = parse
    self._ignored = ignored
    self.decided: dict[str, bool] = {}

  def try_fields(
    self, kind: Any, place: Place, root: str = '', outer: tuple[Any, ...] = ()
  ) -> None:
    """Tries all fields of a class.

    Args:
      kind: A TypedDict.
      place: Makes a body of a value of it.
      root: The field of the body that it is in; '' for the body itself.
      outer: The classes around it.
    """
    for base in _examples(kind):
      for name, hint in _hints(kind).items():

        def put(value: Any, base: Any = base, name: str = name) -> dict[str, Any]:
          return place({**base, name: value})

        def put_list(value: Any, put: Place = put) -> dict[str, Any]:
          return put([value])

        for choice in _choices(hint):
          is_list = typing.get_origin(choice) in _LISTS
          for one in _choices(typing.get_args(choice)[0]) if is_list else [choice]:
            where = put_list if is_list else put, root or name, (*outer, kind)
            self._try(f'{kind.__name__}.{name}', one, name, place(base), *where)

  def _try(self, label, choice, name, before, put, root, outer) -> None:
    """Tries the values of a field that are of one type."""
    known = self._read(before, root)
    for value in _values(choice, name):
      if (body := put(value)) != before:
        read = self._read(body, root)
        self._note(label, decided=read is None or read != known)
    is_class = typing_extensions.is_typeddict(choice)
    if not is_class or label in self._ignored or choice in outer:
      return
    if self._read(put(_examples(choice)[-1]), root) is not None:
      inner = Walk(self._parse, self._ignored)
      inner.try_fields(choice, put, root, outer)
      self._note(label, decided=any(inner.decided.values()))
      for one, decided in inner.decided.items():
        self._note(one, decided=decided)

  def _note(self, label: str, *, decided: bool) -> None:
    self.decided[label] = self.decided.get(label, False) or decided

  def _read(self, body: dict[str, Any], root: str) -> str | None:
    """Returns what is read of a body, without what is echoed; None if it is refused."""
    try:
      request = self._parse(json.dumps(body).encode())
    except ApiError as error:
      assert error.status == 400 and (error.param or '').startswith(root), error
      return None
    return repr(dataclasses.asdict(dataclasses.replace(request, echo={})))


def _hints(kind: Any) -> dict[str, Any]:
  return typing_extensions.get_type_hints(kind, include_extras=True)


def _choices(hint: Any) -> list[Any]:
  """Returns the types of which a value may be, without None."""
  origin = typing.get_origin(hint)
  if origin in _WRAPPERS:
    return _choices(typing.get_args(hint)[0])
  if origin in (typing.Union, types.UnionType):
    return [one for part in typing.get_args(hint) for one in _choices(part)]
  return [] if hint is type(None) else [hint]


def _is_required(kind: Any, hint: Any) -> bool:
  origin = typing.get_origin(hint)
  if origin in (typing.Required, typing_extensions.Required):
    return True
  not_required = typing.NotRequired, typing_extensions.NotRequired
  return kind.__total__ and origin not in not_required


def _examples(kind: Any) -> list[dict[str, Any]]:
  """Returns values with what is required alone: one for each role that it may have."""
  hints = _hints(kind)
  base = {
    name: _values(_choices(hint)[0], name)[0]
    for name, hint in hints.items()
    if _is_required(kind, hint)
  }
  base |= NEEDED.get(kind.__name__, {})
  if 'role' not in base:
    return [base]
  roles = _values(_choices(hints['role'])[0], 'role')
  return [{**base, 'role': role} for role in roles]


def _values(choice: Any, name: str) -> list[Any]:
  """Returns some values of a type."""
  origin, inner = typing.get_origin(choice), typing.get_args(choice)
  if typing_extensions.is_typeddict(choice):
    return _examples(choice)
  if origin is Literal:
    return list(inner)
  if origin in _LISTS:
    return [[_values(_choices(inner[0])[0], name)[0]]]
  if origin in (dict, collections.abc.Mapping):
    return [{}, {'k': _values(_choices(inner[1])[0], name)[0]}]
  if choice is bool:
    return [True, False]
  return {str: TEXTS.get(name, ['x', 'y']), int: [2, 1], float: [0.5, 0.25]}.get(
    choice, [{}, {'k': 1}]
  )
