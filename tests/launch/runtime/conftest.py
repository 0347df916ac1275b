"""One Ray for all tests of a process: it takes seconds to start."""

import pytest


@pytest.fixture(scope='session')
def ray():
  """Ray, started once, as a run would."""
  from launch.runtime.ray_runtime import RayRuntime

  host = RayRuntime()
  yield host._ray
  host._ray.shutdown()


@pytest.fixture(scope='session')
def local(tmp_path_factory):
  """A run in this process, which those under Ray are to equal: folder, what it told."""
  from tests.launch import runs
  from tests.launch.runtime.test_ray_runtime import OPTIONS

  folder = tmp_path_factory.mktemp('local')
  return folder, runs.record(folder, *OPTIONS)
