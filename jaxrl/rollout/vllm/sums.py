"""A digest of tensors, taken where they lie: a GPU's never come to the host for it."""

import hashlib
import json
from collections.abc import Iterable, Iterator

import torch

PIECE = 1 << 22  # elements at a time, 8 bytes each
WORDS = {1: torch.int8, 2: torch.int16, 4: torch.int32, 8: torch.int64}
ODD, SHIFT = -7046029254386353131, 0x632BE59BD9B4E019  # SplitMix64's increment; any


class Sums:
  """Adds tensors, in any order, and tells one digest of all of them."""

  def __init__(self) -> None:
    self._found: dict[str, list[object]] = {}

  def add(self, name: str, tensor: torch.Tensor) -> None:
    about = [str(tensor.dtype), *tensor.shape, checksum(tensor)]
    self._found[name] = about

  def through(
    self, tensors: Iterable[tuple[str, torch.Tensor]]
  ) -> Iterator[tuple[str, torch.Tensor]]:
    """The same tensors, each added before it is passed on."""
    for name, tensor in tensors:
      self.add(name, tensor)
      yield name, tensor

  def digest(self) -> str:
    """Of names, dtypes, shapes and contents."""
    told = json.dumps(sorted(self._found.items()))
    return hashlib.sha256(told.encode()).hexdigest()[:32]


def checksum(tensor: torch.Tensor) -> int:
  """64 bits of a tensor's contents: Σ (word + 1) · odd(place), modulo 2⁶⁴.

  One changed word always changes it. It guards against what is lost or mixed up on the
  way, not against forgery, and is the same number on every device.
  """
  words = tensor.detach().contiguous().view(-1).view(WORDS[tensor.element_size()])
  total = torch.zeros((), dtype=torch.int64, device=tensor.device)
  for start in range(0, len(words), PIECE):
    piece = words[start : start + PIECE].to(torch.int64)
    place = torch.arange(start, start + len(piece), device=tensor.device)
    place = place * ODD + SHIFT
    place = (place ^ (place >> 29)) | 1
    total += ((piece + 1) * place).sum()
  return int(total)
