"""Which devices an actor sees whose seat shares them."""

import os
import subprocess
import sys

import pytest

from tests.launch import runs

PROGRAM = """
import ray
ray.init('local', num_gpus=2, include_dashboard=False, log_to_driver=False)
from launch.runtime.placement_group import PlacementGroup
from launch.runtime.placement import Placement, ActorResources

shared = (
  (ActorResources(bundle=0, devices=(0, 1)),),
  (ActorResources(bundle=0, devices=(1,)),),
)
seats = PlacementGroup(Placement('colocated', *shared, bundles=({'GPU': 2.0},)))

def sees():
  import os
  return os.environ['CUDA_VISIBLE_DEVICES']

told = [
  ray.remote(sees).options(**seats.actor_options(seat)).remote()
  for part in shared for seat in part
]
print('seen', *ray.get(told))
"""


@pytest.mark.slow
@pytest.mark.ray
@pytest.mark.xdist_group('ray')
def test_shared_devices_are_those_that_ray_may_use():
  env = {**os.environ, 'CUDA_VISIBLE_DEVICES': '4,6', 'JAX_PLATFORMS': 'cpu'}
  result = subprocess.run(
    [sys.executable, '-c', PROGRAM],
    capture_output=True,
    text=True,
    cwd=runs.ROOT,
    env=env,
    timeout=120,
  )
  assert 'seen 4,6 6' in result.stdout, result.stderr
