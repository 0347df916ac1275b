"""Makes the runtime of a run, in this process or under Ray, and closes a failed one."""

import asyncio
import os

import jax

from jaxrl.options import ConfigError
from launch.runtime import placement
from launch.runtime.runtime_base import Runtime
from launch.settings.run_settings import RunSettings


def make_runtime(settings: RunSettings, *, learns: bool = True) -> Runtime:
  """Returns the runtime of the run's parts: this process, or Ray.

  Args:
    settings: Settings of the run.
    learns: Whether there is a learner, which needs devices too.

  Raises:
    ConfigError: For parts that do not fit on the devices.
  """
  cluster = settings.cluster
  if not cluster.ray:
    os.environ.update(placement.single_process_env(settings))
    return Runtime(settings.transport)
  from launch.runtime.ray_runtime import RayRuntime  # Ray: seconds

  runtime = RayRuntime(cluster.address, settings.transport)
  try:
    hides = runtime.reserve(settings, has_learner=learns).others.env
  except Exception:
    asyncio.run(runtime.close())
    raise
  if hides:  # the actors have the devices; this process must not take their memory
    jax.config.update('jax_platforms', hides['JAX_PLATFORMS'])
  return runtime


def close_and_reraise(runtime: Runtime, error: Exception) -> None:
  """Closes the runtime after an error; raises the error's root cause if it has one."""
  cause = (
    error if isinstance(error, ConfigError) else asyncio.run(runtime.root_cause(error))
  )
  asyncio.run(runtime.close())
  if cause is not error:
    raise cause from error
