"""Which implementation of a kernel a program is built of, and why.

Chosen while a program is traced, by the platform that it is compiled for: a process
on a CPU that compiles for a TPU builds the TPU's program.
"""

import functools
import logging
from collections.abc import Callable, Mapping
from typing import Any

import jax

ASKED = ('auto', 'reference')
REFERENCE = 'reference'

_log = logging.getLogger(__name__)

# An implementation, or why it is out of the question here.
Candidate = Callable[..., Any] | str


def platform_of(platform: str | None) -> str:
  """'cpu', 'gpu' or 'tpu'. None stands for the backend that this process runs on."""
  found = jax.default_backend() if platform is None else platform
  return 'gpu' if found in ('cuda', 'rocm') else found


def check_asked(asked: str) -> None:
  """Raises ValueError for what `choose` would not know."""
  if asked not in ASKED:
    raise ValueError(
      f'kernels={asked!r} is not one of {", ".join(ASKED)}: auto takes the best for '
      'the platform, reference plain jnp'
    )


def only_on(home: str, implementation: Candidate, *, platform: str) -> Candidate:
  """The implementation, where `platform` is its home, else the reason why not."""
  return implementation if platform == home else f'is for {home}, not {platform}'


def choose(
  kernel: str,
  candidates: Mapping[str, Candidate],
  *,
  platform: str,
  asked: str = 'auto',
) -> str:
  """The name of the first candidate that can be used; 'reference' if that is asked.

  candidates: by name, in order of preference; a text instead of a function says why
    that one cannot be used here.
  platform: as `platform_of` has it. asked: 'auto' or 'reference'.

  Each choice is logged once for a kernel and platform, with what was passed over.
  Raises ValueError when none can be used, with every reason.
  """
  check_asked(asked)
  passed = {name: why for name, why in candidates.items() if isinstance(why, str)}
  if asked == REFERENCE:
    name, why = REFERENCE, 'asked for'
    if REFERENCE not in candidates or REFERENCE in passed:
      raise ValueError(f'{kernel} has no reference to use on {platform}: {passed}')
  else:
    able = [name for name in candidates if name not in passed]
    if not able:
      raise ValueError(f'{kernel}: nothing can be used on {platform}: {passed}')
    name = able[0]
    order = list(candidates)
    better = [n for n in order[: order.index(name)] if n in passed]
    why = '; '.join(f'{n} {passed[n]}' for n in better) or 'preferred'
  _tell(kernel, platform, name, why)
  return name


def tell_again() -> None:
  """Each choice is logged once; from here on once more."""
  _tell.cache_clear()


@functools.cache
def _tell(kernel: str, platform: str, name: str, why: str) -> None:
  _log.info('%s on %s: %s (%s)', kernel, platform, name, why)
