"""What tests that compile for accelerators, on a machine without, are marked with."""

import importlib.util

import pytest

TARGETS = [
  pytest.mark.targets,
  pytest.mark.timeout(600),
  pytest.mark.skipif(
    not all(map(importlib.util.find_spec, ('libtpu', 'jax_cuda13_plugin'))),
    reason='no compilers for accelerators here: make env-targets, make test-targets',
  ),
]
