"""Tensor digest: checksums tensors on their devices, not on the host."""

import hashlib
import json
from collections.abc import Iterable, Iterator

import torch

CHUNK_ELEMENTS = 1 << 22  # elements that are summed at a time, 8 bytes each
_WORD_DTYPES = {1: torch.int8, 2: torch.int16, 4: torch.int32, 8: torch.int64}
_MULTIPLIER = -7046029254386353131  # the increment of SplitMix64
_OFFSET = 0x632BE59BD9B4E019  # arbitrary


class TensorDigest:
  """Computes one digest of a set of named tensors, which may come in any order."""

  def __init__(self) -> None:
    """Initializes the digest of no tensors."""
    self._entries: dict[str, list[object]] = {}

  def add(self, name: str, tensor: torch.Tensor) -> None:
    """Adds a tensor, or replaces the one of the same name.

    Args:
      name: The tensor's name.
      tensor: Its values, on any device.
    """
    checksum = tensor_checksum(tensor)
    self._entries[name] = [str(tensor.dtype), *tensor.shape, checksum]

  def record_all(
    self, tensors: Iterable[tuple[str, torch.Tensor]]
  ) -> Iterator[tuple[str, torch.Tensor]]:
    """Adds tensors while they are passed on.

    Args:
      tensors: (name, tensor) pairs.

    Yields:
      The same pairs, each after it has been added.
    """
    for name, tensor in tensors:
      self.add(name, tensor)
      yield name, tensor

  def digest(self) -> str:
    """Returns a digest of the names, dtypes, shapes and contents."""
    entries = json.dumps(sorted(self._entries.items()))
    return hashlib.sha256(entries.encode()).hexdigest()[:32]


def tensor_checksum(tensor: torch.Tensor) -> int:
  """Computes a 64-bit checksum: Σ (word + 1) · odd(position), modulo 2⁶⁴.

  A single changed word always changes it. It detects tensors that were lost or mixed up
  in a transfer, but it does not protect against forgery. It is the same number on every
  device.

  Args:
    tensor: Values of any dtype, on any device.

  Returns:
    A signed 64-bit integer.
  """
  word_dtype = _WORD_DTYPES[tensor.element_size()]
  words = tensor.detach().contiguous().view(-1).view(word_dtype)
  total = torch.zeros((), dtype=torch.int64, device=tensor.device)
  for start in range(0, len(words), CHUNK_ELEMENTS):
    chunk = words[start : start + CHUNK_ELEMENTS].to(torch.int64)
    position = torch.arange(start, start + len(chunk), device=tensor.device)
    position = position * _MULTIPLIER + _OFFSET
    factor = (position ^ (position >> 29)) | 1
    total += ((chunk + 1) * factor).sum()
  return int(total)
