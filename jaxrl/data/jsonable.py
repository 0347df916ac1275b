"""Values as JSON and back, to the last bit: arrays, numbers that are not finite, bytes.

What JSON knows stands for itself. Anything else is an object with one key that begins
with `$`: `$array` and `$scalar` (numpy's, base64 of little-endian bytes with dtype and
shape), `$float` (nan, inf, −inf), `$bytes`, `$tuple` and `$items` (a mapping whose keys
are not texts, or begin with `$`).
"""

import base64
import binascii
import math
from collections.abc import Mapping
from typing import Any

import numpy as np

MAX_DEPTH = 64  # of lists and objects within each other
MAX_NDIM = 16
KINDS = 'biufc'  # the dtypes that are plain numbers


def encode(value: Any, where: str = 'value', depth: int = 0) -> Any:
  """`value` as JSON, strictly: no NaN. Raises TypeError naming what is no value."""
  if depth > MAX_DEPTH:
    raise TypeError(f'{where}: more than {MAX_DEPTH} levels deep')
  if value is None or type(value) in (bool, int, str):
    return value
  if type(value) is float:
    return value if math.isfinite(value) else {'$float': repr(value)}
  if isinstance(value, np.ndarray | np.generic):
    kind = '$array' if isinstance(value, np.ndarray) else '$scalar'
    return {kind: _array(np.asarray(value), where)}
  if type(value) is bytes:
    return {'$bytes': base64.b64encode(value).decode()}
  if type(value) in (list, tuple):
    items = [encode(x, f'{where}[{i}]', depth + 1) for i, x in enumerate(value)]
    return items if type(value) is list else {'$tuple': items}
  if isinstance(value, Mapping):
    return _mapping(value, where, depth)
  raise TypeError(f'{where} is a {type(value).__name__}, which JSON cannot hold')


def _mapping(value: Mapping[Any, Any], where: str, depth: int) -> Any:
  if all(type(key) is str and not key.startswith('$') for key in value):
    return {k: encode(x, f'{where}[{k!r}]', depth + 1) for k, x in value.items()}
  pairs = [
    [encode(k, where, depth + 2), encode(x, f'{where}[{k!r}]', depth + 2)]
    for k, x in value.items()
  ]
  return {'$items': pairs}


def _array(array: np.ndarray, where: str) -> dict[str, Any]:
  if array.dtype.kind not in KINDS:
    raise TypeError(f'{where} is an array of {array.dtype}, which is not a number')
  little = array.astype(array.dtype.newbyteorder('<'), copy=False)
  data = base64.b64encode(little.tobytes()).decode()
  return {'dtype': little.dtype.str, 'shape': list(array.shape), 'data': data}


def decode(value: Any, where: str = 'value', depth: int = 0) -> Any:
  """What `encode` was given. Raises ValueError naming what cannot be read."""
  if depth > MAX_DEPTH:
    raise ValueError(f'{where}: more than {MAX_DEPTH} levels deep')
  if value is None or isinstance(value, bool | int | float | str):
    return value
  if isinstance(value, list):
    return [decode(x, f'{where}[{i}]', depth + 1) for i, x in enumerate(value)]
  if not isinstance(value, Mapping):
    raise ValueError(f'{where}: {type(value).__name__} is no value of JSON')
  mark = next((key for key in value if key.startswith('$')), None)
  if mark is None:
    return {k: decode(x, f'{where}[{k!r}]', depth + 1) for k, x in value.items()}
  if len(value) != 1 or mark not in _MARKS:
    raise ValueError(f'{where}: cannot read an object with the keys {list(value)[:8]}')
  return _MARKS[mark](value[mark], where, depth)


def read_array(value: Any, where: str, depth: int = 0) -> np.ndarray:
  """An array from its dtype, shape and bytes, which must agree."""
  if not isinstance(value, Mapping) or value.keys() != {'dtype', 'shape', 'data'}:
    raise ValueError(f'{where}: an array has dtype, shape and data')
  shape, name = value['shape'], value['dtype']
  try:
    dtype = np.dtype(name) if isinstance(name, str) else None
  except TypeError:
    dtype = None
  if dtype is None or dtype.kind not in KINDS or dtype.str != name or name[0] == '>':
    raise ValueError(f'{where}: {name!r} is not the little-endian dtype of numbers')
  sizes = shape if isinstance(shape, list) and len(shape) <= MAX_NDIM else [-1]
  if any(type(size) is not int or size < 0 for size in sizes):
    raise ValueError(f'{where}: {shape!r} is not a shape')
  data = _bytes(value['data'], where)
  if math.prod(sizes) * dtype.itemsize != len(data):
    raise ValueError(
      f'{where}: {len(data)} bytes are not an array of shape {tuple(sizes)} and dtype '
      f'{name}'
    )
  return np.frombuffer(data, dtype).reshape(sizes).copy()


def _scalar(value: Any, where: str, depth: int) -> Any:
  array = read_array(value, where)
  if array.ndim:
    raise ValueError(f'{where}: a scalar has no shape, not {array.shape}')
  return array[()]


def _bytes(value: Any, where: str, depth: int = 0) -> bytes:
  try:
    return base64.b64decode(value, validate=True)
  except (binascii.Error, ValueError, TypeError) as error:
    raise ValueError(f'{where}: not base64: {error}') from error


def _float(value: Any, where: str, depth: int) -> float:
  if value not in ('nan', 'inf', '-inf'):
    raise ValueError(f'{where}: {value!r} is not nan, inf or -inf')
  return float(value)


def _tuple(value: Any, where: str, depth: int) -> tuple[Any, ...]:
  if not isinstance(value, list):
    raise ValueError(f'{where}: a tuple is a list of its items')
  return tuple(decode(value, where, depth))


def _items(value: Any, where: str, depth: int) -> dict[Any, Any]:
  pairs = decode(value, where, depth)
  try:
    return dict(pairs)
  except (TypeError, ValueError) as error:
    raise ValueError(f'{where}: not pairs of a key and a value: {error}') from error


_MARKS = {
  '$array': read_array,
  '$scalar': _scalar,
  '$bytes': _bytes,
  '$float': _float,
  '$tuple': _tuple,
  '$items': _items,
}
