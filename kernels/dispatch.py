"""Kernel dispatch chooses the implementation of a kernel, and logs why.

It chooses while a program is traced, by the platform that the program is compiled for:
a process on a CPU that compiles for a TPU builds the TPU's program.
"""

import functools
import logging
from collections.abc import Callable, Mapping
from typing import Any

import jax

KERNEL_OPTIONS = ('auto', 'reference')
REFERENCE = 'reference'

_log = logging.getLogger(__name__)

# An implementation, or why it is out of the question here.
Candidate = Callable[..., Any] | str


def platform_of(platform: str | None) -> str:
  """Returns 'cpu', 'gpu' or 'tpu'.

  Args:
    platform: A platform; None stands for the backend that this process runs on.
  """
  name = jax.default_backend() if platform is None else platform
  return 'gpu' if name in ('cuda', 'rocm') else name


def check_kernels_option(option: str) -> None:
  """Checks the option `kernels`.

  Args:
    option: 'auto' or 'reference'.

  Raises:
    ValueError: If it is something else.
  """
  if option not in KERNEL_OPTIONS:
    raise ValueError(
      f'kernels={option!r} is not one of {", ".join(KERNEL_OPTIONS)}: auto takes the '
      'best for the platform, reference plain jnp'
    )


def only_on(home: str, implementation: Candidate, *, platform: str) -> Candidate:
  """Returns an implementation where it can be used, else the reason why not.

  Args:
    home: The platform that it is for.
    implementation: The implementation, or why it cannot be used.
    platform: The platform at hand.
  """
  return implementation if platform == home else f'is for {home}, not {platform}'


def choose(
  kernel: str,
  candidates: Mapping[str, Candidate],
  *,
  platform: str,
  option: str = 'auto',
) -> str:
  """Chooses the first candidate that can be used.

  Each choice is logged once for a kernel and platform, with what was passed over.

  Args:
    kernel: The name of the kernel, for the log.
    candidates: By name, in order of preference; a text instead of a function says why
      that one cannot be used here.
    platform: As returned by `platform_of`.
    option: 'auto' or 'reference'.

  Returns:
    The name of the candidate.

  Raises:
    ValueError: If none can be used, with every reason.
  """
  check_kernels_option(option)
  passed = {name: why for name, why in candidates.items() if isinstance(why, str)}
  if option == REFERENCE:
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
  _log_choice(kernel, platform, name, why)
  return name


def reset_choice_log() -> None:
  """Lets each choice be logged once more."""
  _log_choice.cache_clear()


@functools.cache
def _log_choice(kernel: str, platform: str, name: str, why: str) -> None:
  _log.info('%s on %s: %s (%s)', kernel, platform, name, why)
