"""Kernel dispatch chooses the implementation of a kernel, and logs why.

It chooses at trace time, for the platform that the program is compiled for. A process
on a CPU that compiles for a TPU therefore gets the TPU kernels.
"""

import functools
import logging
from collections.abc import Callable, Mapping
from typing import Any

import jax

KERNEL_OPTIONS = ('auto', 'reference')
REFERENCE = 'reference'

_log = logging.getLogger(__name__)

# An implementation, or the reason why it cannot be used here.
PyTree = Any  # arrays in nested dicts, lists and tuples
Candidate = Callable[..., Any] | str


def platform_of(platform: str | None) -> str:
  """Returns 'cpu', 'gpu' or 'tpu'.

  Args:
    platform: A platform; None for the default backend of this process.
  """
  name = jax.default_backend() if platform is None else platform
  return 'gpu' if name in ('cuda', 'rocm') else name


def check_kernels_option(option: str) -> None:
  """Checks the option `kernels`.

  Args:
    option: Value of the option, 'auto' or 'reference'.

  Raises:
    ValueError: If the value is neither.
  """
  if option not in KERNEL_OPTIONS:
    raise ValueError(
      f'kernels={option!r} is not one of {", ".join(KERNEL_OPTIONS)}: auto takes the '
      'best for the platform, reference plain jnp'
    )


def only_on(home: str, implementation: Candidate, *, platform: str) -> Candidate:
  """Returns an implementation if it supports the platform, or else the reason why not.

  Args:
    home: The only platform that the implementation supports.
    implementation: The implementation, or the reason why it cannot be used.
    platform: The platform to compile for.
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

  Each choice is logged once per kernel and platform, with the candidates that were
  skipped and why.

  Args:
    kernel: Name of the kernel, for the log.
    candidates: Candidates by name, in order of preference. A string in place of a
      function is the reason why that candidate cannot be used.
    platform: Platform, as returned by `platform_of`.
    option: Preference, 'auto' or 'reference'.

  Returns:
    The name of the chosen candidate.

  Raises:
    ValueError: If no candidate can be used. The message gives every reason.
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
  """Clears the record of logged choices, so that each is logged once more."""
  _log_choice.cache_clear()


@functools.cache
def _log_choice(kernel: str, platform: str, name: str, why: str) -> None:
  _log.info('%s on %s: %s (%s)', kernel, platform, name, why)
