"""JSON codec: encodes arrays, non-finite numbers and bytes as JSON without loss.

Plain JSON values represent themselves. Anything else becomes an object with one key
that begins with `$`: `$array` and `$scalar` (numpy's, as base64 of little-endian bytes
with dtype and shape), `$float` (nan, inf, −inf), `$bytes`, `$tuple` and `$items` (a
mapping whose keys are not strings, or begin with `$`).
"""

import base64
import binascii
import math
from collections.abc import Mapping
from typing import Any

import numpy as np

MAX_DEPTH = 64  # of lists and objects within each other
MAX_NDIM = 16
NUMERIC_KINDS = 'biufc'  # the dtypes that are plain numbers


def encode_value(value: Any, where: str = 'value', depth: int = 0) -> Any:
  """Encodes a value as strict JSON, without NaN.

  Args:
    value: The value.
    where: The name of the value, for error messages.
    depth: The nesting depth of the value.

  Returns:
    The JSON value, which `decode_value` reads.

  Raises:
    TypeError: If a value cannot be represented; the error names it.
  """
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
    items = [encode_value(x, f'{where}[{i}]', depth + 1) for i, x in enumerate(value)]
    return items if type(value) is list else {'$tuple': items}
  if isinstance(value, Mapping):
    return _mapping(value, where, depth)
  raise TypeError(f'{where} is a {type(value).__name__}, which JSON cannot hold')


def _mapping(value: Mapping[object, object], where: str, depth: int) -> Any:
  if all(type(key) is str and not key.startswith('$') for key in value):
    return {k: encode_value(x, f'{where}[{k!r}]', depth + 1) for k, x in value.items()}
  pairs = [
    [encode_value(k, where, depth + 2), encode_value(x, f'{where}[{k!r}]', depth + 2)]
    for k, x in value.items()
  ]
  return {'$items': pairs}


def _array(array: np.ndarray, where: str) -> dict[str, Any]:
  if array.dtype.kind not in NUMERIC_KINDS:
    raise TypeError(f'{where} is an array of {array.dtype}, which is not a number')
  little = array.astype(array.dtype.newbyteorder('<'), copy=False)
  data = base64.b64encode(little.tobytes()).decode()
  return {'dtype': little.dtype.str, 'shape': list(array.shape), 'data': data}


def decode_value(value: object, where: str = 'value', depth: int = 0) -> Any:
  """Decodes what `encode_value` returned.

  Args:
    value: The JSON value.
    where: The name of the value, for error messages.
    depth: The nesting depth of the value.

  Returns:
    The original value.

  Raises:
    ValueError: If something cannot be decoded; the error names it.
  """
  if depth > MAX_DEPTH:
    raise ValueError(f'{where}: more than {MAX_DEPTH} levels deep')
  if value is None or isinstance(value, bool | int | float | str):
    return value
  if isinstance(value, list):
    return [decode_value(x, f'{where}[{i}]', depth + 1) for i, x in enumerate(value)]
  if not isinstance(value, Mapping):
    raise ValueError(f'{where}: {type(value).__name__} is not a JSON value')
  marker = next((key for key in value if key.startswith('$')), None)
  if marker is None:
    return {k: decode_value(x, f'{where}[{k!r}]', depth + 1) for k, x in value.items()}
  if len(value) != 1 or marker not in _DECODERS:
    raise ValueError(f'{where}: no type is encoded with the keys {list(value)[:8]}')
  return _DECODERS[marker](value[marker], where, depth)


def decode_array(value: object, where: str, depth: int = 0) -> np.ndarray:
  """Decodes an array from its dtype, shape and bytes, which must agree.

  Args:
    value: An object with the keys dtype, shape and data.
    where: The name of the value, for error messages.
    depth: The nesting depth of the value.

  Returns:
    The array.

  Raises:
    ValueError: If the parts are missing, invalid or disagree.
  """
  if not isinstance(value, Mapping) or value.keys() != {'dtype', 'shape', 'data'}:
    raise ValueError(f'{where}: an array needs exactly the keys dtype, shape and data')
  shape, dtype_name = value['shape'], value['dtype']
  try:
    dtype = np.dtype(dtype_name) if isinstance(dtype_name, str) else None
  except TypeError:
    dtype = None
  if (
    dtype is None
    or dtype.kind not in NUMERIC_KINDS
    or dtype.str != dtype_name
    or dtype_name[0] == '>'
  ):
    raise ValueError(f'{where}: {dtype_name!r} is not a little-endian dtype of numbers')
  dimensions = shape if isinstance(shape, list) and len(shape) <= MAX_NDIM else [-1]
  if any(type(size) is not int or size < 0 for size in dimensions):
    raise ValueError(f'{where}: {shape!r} is not a shape')
  data = _bytes(value['data'], where)
  if math.prod(dimensions) * dtype.itemsize != len(data):
    raise ValueError(
      f'{where}: {len(data)} bytes are not an array of shape {tuple(dimensions)} and '
      f'dtype {dtype_name}'
    )
  return np.frombuffer(data, dtype).reshape(dimensions).copy()


def _scalar(value: object, where: str, depth: int) -> Any:
  array = decode_array(value, where)
  if array.ndim:
    raise ValueError(f'{where}: a scalar must have the shape (), not {array.shape}')
  return array[()]


def _bytes(value: Any, where: str, depth: int = 0) -> bytes:
  try:
    return base64.b64decode(value, validate=True)
  except (binascii.Error, ValueError, TypeError) as error:
    raise ValueError(f'{where}: not base64: {error}') from error


def _float(value: object, where: str, depth: int) -> float:
  if value not in ('nan', 'inf', '-inf'):
    raise ValueError(f'{where}: must be nan, inf or -inf, not {value!r}')
  return float(value)


def _tuple(value: object, where: str, depth: int) -> tuple[Any, ...]:
  if not isinstance(value, list):
    raise ValueError(f'{where}: a tuple must be encoded as a list')
  return tuple(decode_value(value, where, depth))


def _items(value: object, where: str, depth: int) -> dict[Any, Any]:
  pairs = decode_value(value, where, depth)
  try:
    return dict(pairs)
  except (TypeError, ValueError) as error:
    raise ValueError(f'{where}: not pairs of a key and a value: {error}') from error


_DECODERS = {
  '$array': decode_array,
  '$scalar': _scalar,
  '$bytes': _bytes,
  '$float': _float,
  '$tuple': _tuple,
  '$items': _items,
}
