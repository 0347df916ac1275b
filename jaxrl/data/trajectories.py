"""Trajectories as JSON and back, exactly: for checkpoints and dumps. No pickle."""

import base64
import binascii
import dataclasses
import json
import zlib
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np

from jaxrl.data import jsonable
from jaxrl.types import Group, Trajectory

FIELDS = {field.name: field for field in dataclasses.fields(Trajectory)}
# The columns of T entries, and the kind of number that each holds.
COLUMNS = {
  'tokens': 'iu',
  'action_mask': 'b',
  'rollout_logprobs': 'f',
  'rewards': 'f',
  'weights_version': 'iu',
}
# Of the other fields, those that are one plain value of this type.
PLAIN: dict[str, type | tuple[type, ...]] = {
  'group_id': int,
  'episode_id': int,
  'member': int,
  'step': int,
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


def oldest_version(group: Group) -> int | None:
  """The oldest weights that wrote an action of `group`; None for rows from files."""
  written = [row.weights_version[row.action_mask] for row in group]
  versions = np.concatenate([np.zeros(0, np.int32), *written])
  versions = versions[versions >= 0]
  return int(versions.min()) if versions.size else None


def to_json(row: Trajectory) -> dict[str, Any]:
  """Every field of a trajectory as JSON, by name; `from_json` gives the same bits.

  Raises TypeError naming the value, in metrics, columns or extras, that JSON cannot
  hold: arrays of numbers, bytes and tuples it can.
  """
  return {name: jsonable.encode(getattr(row, name), name) for name in FIELDS}


def from_json(data: Mapping[str, Any]) -> Trajectory:
  """The trajectory that `to_json` was given.

  Raises ValueError, naming the field, for one that is absent or unknown, of another
  type, or whose bytes do not fit its dtype and shape; and for columns of T that are
  not equally long.
  """
  if not isinstance(data, Mapping) or data.keys() != FIELDS.keys():
    named = set(data) if isinstance(data, Mapping) else set()
    differ = sorted(map(str, named ^ FIELDS.keys()))
    raise ValueError(f'not a trajectory: absent or unknown are {", ".join(differ)}')
  values = {name: jsonable.decode(data[name], name) for name in FIELDS}
  for name, kinds in COLUMNS.items():
    column = values[name]
    if not isinstance(column, np.ndarray) or column.dtype.kind not in kinds:
      raise ValueError(f'{name}: not an array of its kind of number')
    if column.shape != (len(values['tokens']),):
      raise ValueError(
        f'{name} has shape {column.shape}, tokens {values["tokens"].shape}: both must '
        'be [T]'
      )
  for name, kind in PLAIN.items():
    value = values[name]
    value = value.item() if isinstance(value, np.generic) else value
    if not isinstance(value, kind) or (isinstance(value, bool) and kind is not bool):
      raise ValueError(f'{name} cannot be a {type(value).__name__}')
  return Trajectory(**values)


def to_bytes(groups: Sequence[Group]) -> bytes:
  """Groups as their JSON, compressed. Raises TypeError as `to_json`."""
  rows = [[to_json(row) for row in group] for group in groups]
  text = json.dumps(rows, allow_nan=False, separators=(',', ':')).encode()
  return zlib.compress(text, 1)


def from_bytes(data: bytes, max_bytes: int = MAX_BYTES) -> list[Group]:
  """The groups that `to_bytes` was given. Raises ValueError for what it did not write.

  max_bytes: what is larger when it is unpacked is refused.
  """
  opened = zlib.decompressobj()
  try:
    text = opened.decompress(data, max_bytes)
  except (zlib.error, TypeError) as error:
    raise ValueError(f'groups: not what pack writes: {error}') from error
  if not opened.eof:
    raise ValueError(f'groups: torn, or larger than {max_bytes} bytes when unpacked')
  try:
    rows = json.loads(text)
  except RecursionError as error:
    raise ValueError('groups: too many levels deep') from error
  if not isinstance(rows, list) or not all(isinstance(group, list) for group in rows):
    raise ValueError('groups: not a list of lists of trajectories')
  return [[from_json(row) for row in group] for group in rows]


def pack(groups: Sequence[Group]) -> str:
  """Groups as one short text: `to_bytes` in base64. Raises TypeError as `to_json`."""
  return base64.b64encode(to_bytes(groups)).decode()


def unpack(text: str, max_bytes: int = MAX_BYTES) -> list[Group]:
  """The groups that `pack` was given. Raises ValueError as `from_bytes`."""
  try:
    data = base64.b64decode(text, validate=True)
  except (binascii.Error, TypeError) as error:
    raise ValueError(f'groups: not what pack writes: {error}') from error
  return from_bytes(data, max_bytes)
