"""Seeds are derived from the run's seed, never from time or order of arrival."""

import contextlib
import zlib
from collections.abc import Iterator
from contextvars import ContextVar
from typing import NamedTuple

import numpy as np

SeedPart = int | str


class StartingEpisode(NamedTuple):
  """The episode whose environment is being reset.

  Attributes:
    seed: The seed that `reset` is given.
    number: Counts the groups of the run, or of the evaluation, from 0; all samples of
      a group have the same.
    is_trial: Whether it begins before the run, only to reveal errors.
  """

  seed: int
  number: int
  is_trial: bool = False


_starting: ContextVar[StartingEpisode | None] = ContextVar('starting', default=None)


def starting_episode() -> StartingEpisode | None:
  """Returns the episode whose environment this thread resets; None outside `reset`."""
  return _starting.get()


@contextlib.contextmanager
def starting(episode: StartingEpisode | None) -> Iterator[None]:
  """Tells data sets which episode asks for a row, where environments open them.

  Args:
    episode: The episode whose environment is reset meanwhile.
  """
  token = _starting.set(episode)
  try:
    yield
  finally:
    _starting.reset(token)


def fold_seed(seed: int, *parts: SeedPart) -> int:
  """Derives a 31-bit seed from `seed` and `parts`.

  Args:
    seed: The seed to start from; 0 is an ordinary seed.
    *parts: Numbers and names to fold in, each of which may be 0.

  Returns:
    The derived seed.
  """
  words = [seed, *(zlib.crc32(p.encode()) if isinstance(p, str) else p for p in parts)]
  return int(np.random.SeedSequence(words).generate_state(1)[0] >> 1)


def base_seed(run_seed: int, mode: str, tag: str = '') -> int:
  """Returns the base seed of a tag's episodes.

  The episodes' seeds are this number plus 0, 1, 2 and so on.

  Args:
    run_seed: The seed of the run.
    mode: The mode of the rollout, such as 'train' or 'val'.
    tag: The environment's tag.

  Returns:
    The base seed.
  """
  return fold_seed(run_seed, 'episodes', mode, tag)
