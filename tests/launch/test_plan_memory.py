"""The memory that a plan foretells is the memory that a learner takes, on the CPU."""

import pathlib

import pytest

from tests.benchmarks import memory


@pytest.mark.slow
@pytest.mark.skipif(
  not pathlib.Path('/proc/self/clear_refs').exists(), reason='needs Linux'
)
def test_the_peak_is_foretold():
  found = memory.measure('small')
  assert found['foretold'] == pytest.approx(
    found['measured'], rel=0.2
  )  # small: threads' own memory counts
