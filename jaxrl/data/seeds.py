"""Seeds that fold in from one run seed; nothing depends on time or on arrival."""

import zlib

import numpy as np

Part = int | str


def fold(seed: int, *parts: Part) -> int:
  """A 31-bit seed that follows from `seed` and `parts`, all of which may be 0."""
  words = [seed, *(zlib.crc32(p.encode()) if isinstance(p, str) else p for p in parts)]
  return int(np.random.SeedSequence(words).generate_state(1)[0] >> 1)


def base_seed(run_seed: int, mode: str, tag: str = '') -> int:
  """The base seed of a tag's episodes: their seeds are this plus 0, 1, 2 …"""
  return fold(run_seed, 'episodes', mode, tag)
