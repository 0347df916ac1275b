"""Protobuf codec: reads and writes the messages of the Tinker API that are no JSON.

The field numbers are those of `tinker_public.proto` in the package `tinker` 0.38.0.
Unknown fields are skipped, as protobuf does it.
"""

import dataclasses
import struct
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import numpy as np

FLOAT32, INT64 = 1, 2
_DTYPES = {1: np.float32, 2: np.int64, 3: np.int32}
STOP, LENGTH = 0, 1
_VARINT, _FIXED64, _BYTES, _FIXED32 = 0, 1, 2, 5


class ProtoError(ValueError):
  """A message is not a valid protobuf of its kind."""


@dataclasses.dataclass(frozen=True)
class DatumMessage:
  """One datum as it was sent.

  Attributes:
    tokens: `[n]` int32.
    inputs: The loss's inputs by name.
    other_chunk: The kind of a chunk of the prompt that is not text; '' for none.
  """

  tokens: np.ndarray
  inputs: dict[str, np.ndarray]
  other_chunk: str = ''


@dataclasses.dataclass(frozen=True)
class ForwardBackwardMessage:
  """A request to run data forward, and backward unless `forward_only`."""

  model_id: str
  seq_id: int
  data: list[DatumMessage]
  loss: str
  loss_config: dict[str, float | str]
  forward_only: bool


def _varint(data: bytes, at: int) -> tuple[int, int]:
  value = shift = 0
  while True:
    if at >= len(data) or shift > 63:
      raise ProtoError('a number is cut short')
    byte = data[at]
    at += 1
    value |= (byte & 0x7F) << shift
    shift += 7
    if byte < 0x80:
      return value, at


def _fields(data: bytes) -> Iterator[tuple[int, Any]]:
  """Yields the number and the raw value of each field: an int, a float or bytes."""
  at = 0
  while at < len(data):
    tag, at = _varint(data, at)
    number, kind = tag >> 3, tag & 7
    if kind == _VARINT:
      value, at = _varint(data, at)
    elif kind == _BYTES:
      size, at = _varint(data, at)
      value, at = data[at : at + size], at + size
    elif kind == _FIXED64:
      value, at = data[at : at + 8], at + 8
      if len(value) == 8:
        value = struct.unpack('<d', value)[0]
    elif kind == _FIXED32:
      value, at = data[at : at + 4], at + 4
    else:
      raise ProtoError(f'field {number} is of wire type {kind}')
    if at > len(data) or number == 0:
      raise ProtoError('a field is cut short')
    yield number, value


def _text(value: object) -> str:
  if not isinstance(value, bytes):
    raise ProtoError('a text was expected')
  try:
    return value.decode()
  except UnicodeDecodeError as error:
    raise ProtoError('a text is no UTF-8') from error


def _bytes(value: object) -> bytes:
  if not isinstance(value, bytes):
    raise ProtoError('bytes were expected')
  return value


def _signed(value: int) -> int:
  return value - (1 << 64) if value >> 63 else value


def _array(data: object, dtype: Any) -> np.ndarray:
  raw = _bytes(data)
  if len(raw) % np.dtype(dtype).itemsize:
    raise ProtoError('an array is cut short')
  return np.frombuffer(raw, dtype)


def _entry(data: object) -> tuple[str, Any]:
  """Returns key and raw value of an entry of a map; the value is None if absent."""
  key, value = '', None
  for number, part in _fields(_bytes(data)):
    if number == 1:
      key = _text(part)
    elif number == 2:
      value = part
  return key, value


def read_tensor(data: bytes, max_cells: int) -> np.ndarray:
  """Reads a `Tensor`, dense or sparse; unlisted entries of a sparse one are 0.

  Args:
    data: The message.
    max_cells: The most elements that it may have.

  Raises:
    ProtoError: If it is not valid.
  """
  dense, sparse, kind, shape = None, None, FLOAT32, []
  for number, value in _fields(data):
    if number == 1:
      dense = value
    elif number == 2:
      sparse = dict(_fields(_bytes(value)))
    elif number == 3:
      kind = value
    elif number == 4 and isinstance(value, bytes):  # packed
      at = 0
      while at < len(value):
        size, at = _varint(value, at)
        shape.append(_signed(size))
    elif number == 4:
      shape.append(_signed(value))
  if kind not in _DTYPES:
    raise ProtoError(f'a tensor is of type {kind}')
  if any(size < 0 for size in shape) or _product(shape) > max_cells:
    raise ProtoError(f'a tensor of shape {shape} is not possible here')
  if sparse is None:
    values = _array(dense or b'', _DTYPES[kind])
    if shape and _product(shape) != values.size:
      raise ProtoError(f'a tensor of shape {shape} has {values.size} values')
    return values.reshape(shape) if shape else values
  return _dense(sparse, _DTYPES[kind], shape)


def _product(shape: Sequence[int]) -> int:
  total = 1
  for size in shape:
    total *= size
  return total


def _dense(
  sparse: Mapping[int, Any], dtype: object, shape: Sequence[int]
) -> np.ndarray:
  values = _array(sparse.get(1, b''), dtype)
  starts = _array(sparse.get(2, b''), np.int64)
  columns = _array(sparse.get(3, b''), np.int64)
  return from_csr(values, starts, columns, shape, 0)


def from_csr(
  values: np.ndarray,
  starts: np.ndarray,
  columns: np.ndarray,
  shape: Sequence[int],
  pad: float,
) -> np.ndarray:
  """Makes a dense matrix of a sparse one.

  Args:
    values: The values that are listed.
    starts: Where each row's values start, and the end.
    columns: The column of each value.
    shape: The matrix's.
    pad: The value of the rest.

  Raises:
    ProtoError: If the parts contradict each other.
  """
  is_whole = (
    len(shape) == 2
    and len(starts) == shape[0] + 1
    and len(columns) == len(values)
    and starts[0] == 0
    and starts[-1] == len(values)
    and bool(np.all(np.diff(starts) >= 0))
    and (not len(columns) or (columns.min() >= 0 and columns.max() < shape[1]))
  )
  if not is_whole:
    raise ProtoError('the parts of a sparse tensor contradict each other')
  dense = np.full(shape, pad, values.dtype)
  dense[np.repeat(np.arange(shape[0]), np.diff(starts)), columns] = values
  return dense


def read_forward_backward(data: bytes, max_cells: int) -> ForwardBackwardMessage:
  """Reads a `ForwardBackwardRequest`.

  Args:
    data: The message.
    max_cells: The most elements of a tensor.

  Raises:
    ProtoError: If it is not valid.
  """
  model_id, seq_id, loss, forward_only = '', 0, '', False
  datums: list[DatumMessage] = []
  config: dict[str, float | str] = {}
  second: dict[str, float | str] = {}
  for number, value in _fields(data):
    if number == 1:
      model_id = _text(value)
    elif number == 2 and isinstance(value, int):
      seq_id = _signed(value)
    elif number == 3:
      datums.append(_datum(_bytes(value), max_cells))
    elif number == 4:
      loss = _text(value)
    elif number == 5:
      key, setting = _entry(value)
      config[key] = setting if isinstance(setting, float) else 0.0
    elif number == 6:
      forward_only = bool(value)
    elif number == 7:
      key, setting = _entry(value)
      second[key] = _setting(_bytes(setting or b''))
  return ForwardBackwardMessage(
    model_id, seq_id, datums, loss, second or config, forward_only
  )


def _setting(data: bytes) -> float | str:
  value: float | str = 0.0
  for number, part in _fields(data):
    value = _text(part) if number == 2 else part
  return value


def _datum(data: bytes, max_cells: int) -> DatumMessage:
  pieces: list[np.ndarray] = []
  inputs: dict[str, np.ndarray] = {}
  other = ''
  for number, value in _fields(data):
    if number == 1:
      for kind, chunk in _fields(_bytes(value)):
        if kind == 1:
          tokens = dict(_fields(_bytes(chunk))).get(1, b'')
          pieces.append(_array(tokens, np.int32))
        else:
          other = {2: 'image', 3: 'audio'}.get(kind, 'unknown')
    elif number == 2:
      key, tensor = _entry(value)
      inputs[key] = read_tensor(_bytes(tensor or b''), max_cells)
  tokens = np.concatenate(pieces) if pieces else np.zeros(0, np.int32)
  return DatumMessage(tokens, inputs, other)


# ---- writing


def _write_varint(value: int) -> bytes:
  value &= (1 << 64) - 1
  out = bytearray()
  while value >= 0x80:
    out.append(value & 0x7F | 0x80)
    value >>= 7
  out.append(value)
  return bytes(out)


def _put(number: int, value: int | float | bytes | str) -> bytes:
  if isinstance(value, float):
    return _write_varint(number << 3 | _FIXED64) + struct.pack('<d', value)
  if isinstance(value, int):
    return _write_varint(number << 3 | _VARINT) + _write_varint(value)
  data = value.encode() if isinstance(value, str) else value
  return _write_varint(number << 3 | _BYTES) + _write_varint(len(data)) + data


def write_tensor(array: np.ndarray) -> bytes:
  """Writes a dense `Tensor`.

  Args:
    array: int64, or what becomes float32.
  """
  is_int = array.dtype.kind in 'iu'
  data = array.astype(np.int64 if is_int else np.float32).tobytes()
  kind = _put(3, INT64 if is_int else FLOAT32)
  return _put(1, data) + kind + b''.join(_put(4, size) for size in array.shape)


def write_sparse(
  values: np.ndarray, starts: np.ndarray, columns: np.ndarray, shape: Sequence[int]
) -> bytes:
  """Writes a sparse `Tensor` of float32; see `from_csr`.

  Args:
    values: The values that are listed.
    starts: Where each row's values start, and the end.
    columns: The column of each value.
    shape: The matrix's.
  """
  parts = values.astype(np.float32), starts.astype(np.int64), columns.astype(np.int64)
  csr = b''.join(_put(i, x.tobytes()) for i, x in enumerate(parts, 1))
  return _put(2, csr) + _put(3, FLOAT32) + b''.join(_put(4, int(n)) for n in shape)


def write_forward_backward(
  outputs: Sequence[Mapping[str, np.ndarray]], metrics: Mapping[str, float]
) -> bytes:
  """Writes a `ForwardBackwardOutput`.

  Args:
    outputs: Each datum's float32 arrays by name.
    metrics: Numbers by name, which ends in how they are reduced, such as ':sum'.
  """
  message = _put(1, 'ArrayRecord')
  start = 0
  while start < len(outputs):  # a record for each run of arrays of like shapes
    shapes = {name: x.shape[1:] for name, x in outputs[start].items()}
    end = start
    while end < len(outputs) and shapes == {
      name: x.shape[1:] for name, x in outputs[end].items()
    }:
      end += 1
    record = _put(1, 'ArrayRecord')
    for name in shapes:
      arrays = [x[name].astype(np.float32) for x in outputs[start:end]]
      offsets = np.cumsum([0, *(x.nbytes for x in arrays)]).astype(np.int64)
      batched = _put(1, b''.join(x.tobytes() for x in arrays))
      batched += _put(2, offsets.tobytes()) + _put(3, FLOAT32)
      batched += b''.join(_put(4, size) for size in shapes[name])
      record += _put(2, _put(1, name) + _put(2, batched))
    message += _put(2, record + _put(3, end - start))
    start = end
  for name, value in metrics.items():
    message += _put(3, _put(1, name) + _put(2, float(value)))
  return message


@dataclasses.dataclass(frozen=True)
class SequenceMessage:
  """One sampled sequence.

  Attributes:
    tokens: `[n]` int32.
    logprobs: `[n]` float32.
    stop_reason: STOP or LENGTH.
    topk: Ids `[n, k]` int32 and log-probs `[n, k]` float32; None if not asked for.
  """

  tokens: np.ndarray
  logprobs: np.ndarray
  stop_reason: int
  topk: tuple[np.ndarray, np.ndarray] | None = None


def _topk(ids: np.ndarray, logprobs: np.ndarray) -> bytes:
  length, k = ids.shape
  data = _put(1, ids.astype(np.int32).tobytes())
  data += _put(2, logprobs.astype(np.float32).tobytes())
  return data + _put(3, k) + _put(4, length)


def write_sample(
  sequences: Sequence[SequenceMessage],
  *,
  prompt_logprobs: np.ndarray | None = None,
  topk_prompt: tuple[np.ndarray, np.ndarray] | None = None,
  target_prompt: bytes | None = None,
  alternatives: tuple[np.ndarray, np.ndarray] | None = None,
) -> bytes:
  """Writes a `SampleResponse`.

  Args:
    sequences: What was sampled.
    prompt_logprobs: `[p]` float32, NaN where there is none.
    topk_prompt: Ids and log-probs `[p, k]`.
    target_prompt: A `Tensor` of the log-probs asked for.
    alternatives: Ids `[p − 1, k]` int64 and log-probs of tokens drawn in the places of
      the prompt's.
  """
  message = b''
  for sequence in sequences:
    data = _put(1, sequence.stop_reason)
    data += _put(2, sequence.tokens.astype(np.int32).tobytes())
    data += _put(3, sequence.logprobs.astype(np.float32).tobytes())
    if sequence.topk is not None:
      data += _put(4, _topk(*sequence.topk))
    message += _put(1, data)
  if prompt_logprobs is not None:
    message += _put(2, prompt_logprobs.astype(np.float32).tobytes())
  if topk_prompt is not None:
    message += _put(3, _topk(*topk_prompt))
  if target_prompt is not None:
    message += _put(5, target_prompt)
  if alternatives is not None:
    ids, logprobs = alternatives
    pair = _put(1, write_tensor(ids.astype(np.int64))) + _put(2, write_tensor(logprobs))
    message += _put(6, pair)
  return message
