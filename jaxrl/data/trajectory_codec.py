"""Trajectory codec: converts trajectories to JSON and back exactly, without pickle.

Checkpoints, dumps and the experience store use it. In JSON, the digest of an image
stands for it; whoever stores rows stores each of their images once, beside them.
"""

import base64
import binascii
import dataclasses
import json
import zlib
from collections.abc import Iterable, Mapping, Sequence
from typing import TYPE_CHECKING, Any

import numpy as np

from jaxrl.data import json_codec
from jaxrl.options import JsonObject
from jaxrl.types import Group, Trajectory

if TYPE_CHECKING:
  from jaxrl.data.images import Image

FIELDS = {field.name for field in dataclasses.fields(Trajectory)}
# Keys of files that were written by earlier versions, which are still read.
RENAMED_FIELDS = {'member': 'sample_index', 'step': 'turn'}
# Fields with one entry per token, and the dtype kinds that each may have.
PER_TOKEN_FIELDS = {
  'tokens': 'iu',
  'action_mask': 'b',
  'rollout_logprobs': 'f',
  'rewards': 'f',
  'weights_version': 'iu',
}
# The other fields and their types.
PER_ROW_FIELDS: dict[str, type | tuple[type, ...]] = {
  'env_group': int,
  'episode_id': int,
  'sample_index': int,
  'turn': int,
  'tag': str,
  'episode_seed': int,
  'stop_reason': str,
  'is_expert': bool,
  'is_greedy': bool,
  'weight': (int, float),
  'messages': list,
  'metrics': dict,
  'columns': dict,
  'extras': dict,
}
MAX_BYTES = 2**32  # of groups that are unpacked


def to_json(row: Trajectory, *, arrays: bool = True) -> JsonObject:
  """Converts every field of a trajectory to JSON, by name, the messages first.

  Args:
    row: The trajectory. Its metrics, columns and extras may hold arrays of numbers,
      bytes and tuples.
    arrays: Whether to convert the fields with one entry per token, which come last.

  Returns:
    The fields as JSON; with the arrays, `from_json` restores the same bits.

  Raises:
    TypeError: If a value cannot be represented; the error names it.
  """
  others = [key for key in PER_ROW_FIELDS if key != 'messages']
  keys = ['messages', *others, *(PER_TOKEN_FIELDS if arrays else ())]
  marks = {}
  if _may_have_images(row):
    from jaxrl.data import images  # text alone needs none

    row = dataclasses.replace(row, messages=images.map_images(row.messages, _mark_of))
    marks = {'images': [images.MARK + image.digest for image in row.images]}
    marks = marks if row.images else {}
  fields = {key: json_codec.encode_value(getattr(row, key), key) for key in keys}
  return fields | marks


def images_of(rows: Iterable[Trajectory]) -> dict[str, 'Image']:
  """Returns the images of rows and of their messages, each once.

  Args:
    rows: The rows.

  Returns:
    The images by what stands for them in JSON.
  """
  by_mark: dict[str, Image] = {}
  for row in rows:
    if _may_have_images(row):
      from jaxrl.data import images

      row_images = [*row.images, *images.find_images(row.messages)]
      by_mark |= {images.MARK + image.digest: image for image in row_images}
  return by_mark


def _may_have_images(row: Trajectory) -> bool:
  return bool(row.images) or any(
    isinstance(message.get('content'), list) for message in row.messages
  )


def _mark_of(value: object) -> Any:
  from jaxrl.data import images

  return value.mark if isinstance(value, images.Image) else value


def from_json(
  data: JsonObject, images: Mapping[str, 'Image'] | None = None
) -> Trajectory:
  """Restores the trajectory that `to_json` was given.

  Args:
    data: The fields as JSON.
    images: The images that the row may have, as `images_of` returns them.

  Returns:
    The trajectory.

  Raises:
    ValueError: If a field is missing, unknown, of another type, or its bytes do not fit
      its dtype and shape, or if per-token fields differ in length. The error names the
      field.
  """
  if isinstance(data, Mapping):
    data = {RENAMED_FIELDS.get(key, key): value for key, value in data.items()}
  if isinstance(data, Mapping):
    data = {'images': [], **data}  # only rows that have some say so
  if not isinstance(data, Mapping) or data.keys() != FIELDS:
    keys = set(data) if isinstance(data, Mapping) else set()
    difference = sorted(map(str, keys ^ FIELDS))
    raise ValueError(
      f'not a trajectory: these keys are missing or unknown: {", ".join(difference)}'
    )
  values = {name: json_codec.decode_value(data[name], name) for name in FIELDS}
  for name, kinds in PER_TOKEN_FIELDS.items():
    column = values[name]
    if not isinstance(column, np.ndarray) or column.dtype.kind not in kinds:
      raise ValueError(f'{name}: must be an array of numbers of the right kind')
    if column.shape != (len(values['tokens']),):
      raise ValueError(
        f'{name} has shape {column.shape}, tokens {values["tokens"].shape}: both must '
        'be [T]'
      )
  for name, kind in PER_ROW_FIELDS.items():
    value = values[name]
    value = value.item() if isinstance(value, np.generic) else value
    if not isinstance(value, kind) or (isinstance(value, bool) and kind is not bool):
      raise ValueError(f'{name} cannot be a {type(value).__name__}')
  if not isinstance(values['images'], list):
    raise ValueError(f'images cannot be a {type(values["images"]).__name__}')
  return _with_images(Trajectory(**values), images or {})


def _with_images(row: Trajectory, known: Mapping[str, 'Image']) -> Trajectory:
  """Puts images in the place of what stands for them. Raises ValueError."""
  if not _may_have_images(row):
    return row
  from jaxrl.data.images import MARK, map_images

  def find(mark: object) -> Any:
    if not isinstance(mark, str) or not mark.startswith(MARK):
      return mark
    if mark not in known:
      raise ValueError(f'images: the row needs {mark}, which was not given with it')
    return known[mark]

  if not all(isinstance(mark, str) and mark.startswith(MARK) for mark in row.images):
    raise ValueError(f'images: must be a list of {MARK}…, one for each image')
  images, messages = [find(mark) for mark in row.images], map_images(row.messages, find)
  return dataclasses.replace(row, images=images, messages=messages)


def to_bytes(groups: Sequence[Group]) -> bytes:
  """Serializes groups as compressed JSON.

  Args:
    groups: The groups.

  Returns:
    The compressed bytes.

  Raises:
    TypeError: If a value cannot be represented.
  """
  rows: Any = [[to_json(row) for row in group] for group in groups]
  images = images_of(row for group in groups for row in group)
  if images:  # each once, whatever group or message has it
    files = {mark: json_codec.encode_value(x.png) for mark, x in images.items()}
    rows = {'groups': rows, 'images': files}
  text = json.dumps(rows, allow_nan=False, separators=(',', ':')).encode()
  return zlib.compress(text, 1)


def from_bytes(data: bytes, max_bytes: int = MAX_BYTES) -> list[Group]:
  """Restores the groups that `to_bytes` was given.

  Args:
    data: The compressed bytes.
    max_bytes: The largest accepted size when unpacked.

  Returns:
    The groups.

  Raises:
    ValueError: If the data was not written by `to_bytes` or is too large.
  """
  decompressor = zlib.decompressobj()
  try:
    text = decompressor.decompress(data, max_bytes)
  except (zlib.error, TypeError) as error:
    raise ValueError(f'groups: not what pack writes: {error}') from error
  if not decompressor.eof:
    raise ValueError(
      f'groups: truncated, or larger than {max_bytes} bytes when unpacked'
    )
  try:
    rows = json.loads(text)
  except RecursionError as error:
    raise ValueError('groups: too many levels deep') from error
  images = {}
  if isinstance(rows, dict) and rows.keys() == {'groups', 'images'}:
    images, rows = _read_images(rows['images']), rows['groups']
  if not isinstance(rows, list) or not all(isinstance(group, list) for group in rows):
    raise ValueError('groups: not a list of lists of trajectories')
  return [[from_json(row, images) for row in group] for group in rows]


def _read_images(files: object) -> dict[str, 'Image']:
  """Reads the images that `to_bytes` wrote beside the groups. Raises ValueError."""
  from jaxrl.data.images import from_png

  by_mark = {}
  for mark, file in files.items() if isinstance(files, dict) else ():
    data = json_codec.decode_value(file, mark)
    if not isinstance(data, bytes) or (image := from_png(data)).mark != mark:
      raise ValueError(f'images: the contents of {mark} are not those of its name')
    by_mark[mark] = image
  return by_mark


def pack(groups: Sequence[Group]) -> str:
  """Serializes groups as one short text, the base64 of `to_bytes`.

  Args:
    groups: The groups.

  Returns:
    The text.

  Raises:
    TypeError: If a value cannot be represented.
  """
  return base64.b64encode(to_bytes(groups)).decode()


def unpack(text: str, max_bytes: int = MAX_BYTES) -> list[Group]:
  """Restores the groups that `pack` was given.

  Args:
    text: The text.
    max_bytes: The largest accepted size when unpacked.

  Returns:
    The groups.

  Raises:
    ValueError: If the text was not written by `pack` or is too large.
  """
  try:
    data = base64.b64decode(text, validate=True)
  except (binascii.Error, TypeError) as error:
    raise ValueError(f'groups: not what pack writes: {error}') from error
  return from_bytes(data, max_bytes)
