"""Payloads packed into blobs of bounded size: few names, each a safetensors file."""

import json
import struct
from typing import Any

from jaxrl.rollout.weights.errors import Corrupt
from jaxrl.rollout.weights.layout import DTYPES, Region
from jaxrl.rollout.weights.transport import Buffer
from jaxrl.rollout.weights.wire import RAW, Payload

HEAD = struct.Struct('<Q')
Blob = tuple[int, list[Buffer]]  # its number and, one after another, its bytes


def label(region: Region, start: int) -> str:
  """A chunk's name, for people: `layers.norm.scale[0:4,8:16]@1024`."""
  box = ','.join(f'{s.start}:{s.stop}' for s in region.window)
  return f'{region.name}[{box}]@{start}'


class Packer:
  """Fills blobs one after another. limit: bytes of a blob, unless one payload, or what
  `reserve` keeps together, has more.

  `add` places a payload and returns where. Blobs are given out once they are full, and
  the rest by `finish`; their payloads are views of what was added.
  """

  def __init__(self, limit: int):
    self._limit, self._number, self._size, self._reserved = limit, 0, 0, 0
    self._entries: dict[str, Any] = {}
    self._parts: list[Buffer] = []

  def reserve(self, size: int, itemsize: int) -> Blob | None:
    """Keeps the payloads of the next `size` bytes together, aligned to `itemsize`.

    Returns the blob that had to make room, if any.
    """
    fits = self._size + size <= self._limit and self._size % itemsize == 0
    full = None if fits else self.finish()
    self._reserved = self._size + size
    return full

  def add(
    self, name: str, region: Region, codec: str, data: Any, checksum: str
  ) -> tuple[Payload, Blob | None]:
    """data: a buffer. Returns its place, and the blob that had to make room, if any."""
    view = memoryview(data).cast('B')
    most = max(self._limit, self._reserved)
    full = self.finish() if self._size + len(view) > most else None
    kind = DTYPES[region.dtype] if codec == RAW else None
    count = len(view) // region.itemsize if kind else len(view)
    place = Payload(codec, self._number, self._size, len(view), checksum)
    self._entries[name] = {
      'dtype': kind or 'U8',
      'shape': [count],
      'data_offsets': [self._size, self._size + len(view)],
    }
    self._parts.append(view)
    self._size += len(view)
    return place, full

  def finish(self) -> Blob | None:
    """The blob at hand, if there is anything in it; the next payload starts another."""
    if not self._parts:
      return None
    head = json.dumps(self._entries, separators=(',', ':')).encode()
    head += b' ' * (-len(head) % 8)
    made = self._number, [HEAD.pack(len(head)), head, *self._parts]
    self._number, self._size, self._reserved = self._number + 1, 0, 0
    self._entries, self._parts = {}, []
    return made


def cut(blob: memoryview, payload: Payload) -> memoryview:
  """The payload's bytes, unchecked. Raises Corrupt when the blob is too short."""
  if len(blob) < HEAD.size:
    raise Corrupt('a blob without its head')
  start = HEAD.size + HEAD.unpack(blob[: HEAD.size])[0] + payload.at
  found = blob[start : start + payload.size]
  if len(found) != payload.size:
    raise Corrupt(f'a blob has {len(found)} of the {payload.size} bytes of a payload')
  return found
