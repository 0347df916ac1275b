"""One Ray for all tests of a process: it takes seconds to start."""

import os

import pytest


@pytest.fixture(scope='session')
def ray():
  """Ray, started once, as a run would."""
  from launch.runtime import process_env
  from launch.runtime.ray_runtime import RayRuntime

  found = process_env.missing_variables(os.environ)
  with pytest.MonkeyPatch.context() as patch:  # as `process_env.apply` leaves it
    if library := found.get(process_env.LIBRARY):
      patch.setenv(process_env.LIBRARY, library)
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
