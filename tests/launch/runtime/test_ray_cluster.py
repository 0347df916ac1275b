"""Ray, where a run starts its own."""

import os
import subprocess
import sys

import pytest

pytestmark = [pytest.mark.ray, pytest.mark.xdist_group('ray')]
PROGRAM = """
from launch.runtime.ray_runtime import RayRuntime

host = RayRuntime()
print('nodes', len(host._ray.nodes()))
host._ray.shutdown()
"""


def test_another_cluster_is_neither_joined_nor_waited_for():
  """Not even one that Ray's own variable names, and that died."""
  env = {**os.environ, 'RAY_ADDRESS': '127.0.0.1:1', 'JAX_PLATFORMS': 'cpu'}
  said = subprocess.run(
    [sys.executable, '-c', PROGRAM], env=env, stdout=subprocess.PIPE, timeout=120
  )
  assert said.returncode == 0 and b'nodes 1' in said.stdout
