"""Marks that parametrized tests share: which of their cases `make test` leaves out."""

from collections.abc import Container, Iterable
from typing import Any

import pytest


def slow(*values: Any) -> Any:
  """Returns a case that only `make test-all` runs.

  Args:
    *values: The values of the test's parameters.
  """
  return pytest.param(*values, marks=pytest.mark.slow)


def slow_except(fast: Container[Any], cases: Iterable[Any]) -> list[Any]:
  """Returns the cases of a test with one parameter, all but a few of them slow.

  Args:
    fast: The cases that `make test` runs, too.
    cases: All of them.
  """
  return [case if case in fast else slow(case) for case in cases]
