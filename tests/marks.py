"""Marks that tests share: what `make test` leaves out, and what runs in one process."""

import pathlib
import shutil
from collections.abc import Container, Iterable
from typing import Any

import pytest

from jaxrl.envs.sandbox import local_sandbox
from kernels.native import compiler

SANDBOXED = pytest.mark.skipif(
  bool(reason := local_sandbox.unsupported_reason()), reason=reason
)
# With a C compiler, kernels that cannot be built are a fault.
NEEDS_COMPILER = pytest.mark.skipif(
  not any(map(shutil.which, compiler.COMPILERS)), reason='has no C compiler'
)
# Tests in one process, since torch is long to import.
TORCH = pytest.mark.xdist_group('torch')


def adapter(folder: str) -> Any:
  """Returns the mark of tests of a package that `make env-adapters` installs apart.

  Args:
    folder: The folder, below the repository's, that must exist.
  """
  missing = not (pathlib.Path(__file__).parents[1] / folder).exists()

  def mark(test: Any) -> Any:
    marks = (pytest.mark.slow, pytest.mark.adapters)
    for one in (*marks, pytest.mark.skipif(missing, reason='make env-adapters')):
      test = one(test)
    return test

  return mark


def slow(*values: Any) -> Any:
  """Returns a case that only `make test-all` runs.

  Args:
    *values: The values of the test's parameters.
  """
  return pytest.param(*values, marks=pytest.mark.slow)


def extended(*values: Any) -> Any:
  """Returns a slow case that the gate leaves out, and only `make test-all` runs.

  Args:
    *values: The values of the test's parameters.
  """
  return pytest.param(*values, marks=[pytest.mark.slow, pytest.mark.extended])


def slow_in_gate(gate: Container[Any], cases: Iterable[Any]) -> list[Any]:
  """Returns slow cases of a test with one parameter, all but a few of them extended.

  Args:
    gate: The cases that the gate runs, too.
    cases: All of them.
  """
  return [slow(case) if case in gate else extended(case) for case in cases]


def slow_except(fast: Container[Any], cases: Iterable[Any]) -> list[Any]:
  """Returns the cases of a test with one parameter, all but a few of them slow.

  Args:
    fast: The cases that `make test` runs, too.
    cases: All of them.
  """
  return [case if case in fast else slow(case) for case in cases]
