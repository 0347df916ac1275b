"""A run that has lost a part of itself goes on from its newest checkpoint."""

import asyncio
import time
from collections.abc import Callable

from jaxrl.signature import ConfigError
from launch.cluster.handles import ActorError
from launch.job import Job


def train(
  make: Callable[[], Job],
  say: Callable[[str], None],
  *,
  resumes: int = 3,
  pause: float = 10.0,
) -> tuple[Job, bool]:
  """Runs the job that `make` makes; anew when a part that lived elsewhere is lost.

  resumes: how often in a row, before there is a newer checkpoint. Without one there
  is nothing to go on from: the ActorError is then raised. A job that cannot be made
  again counts as lost too, and after `pause` seconds there is another try: the config
  was fit for the cluster, so it is the cluster that is not what it was. Returns the
  job that came to its end, and whether that was the end of training.
  """
  newest, tries = None, 0
  while True:
    job = None
    try:
      job = make()
      return job, asyncio.run(job.train())
    except Exception as error:
      if job is None:
        if newest is None:
          raise
        found = newest
      elif isinstance(error, ActorError):
        found = job.newest()
      else:
        raise
      tries = 1 if found != newest else tries + 1
      newest = found
      if found is None or tries > resumes:
        if isinstance(error, ConfigError):  # as which it would be the user's to mend
          raise ActorError(str(error)) from error
        raise
      phase, step = found
      lost = str(error) if job is None else str(error).partition(',')[0]
      say(
        f'{lost}: the run goes on from its newest checkpoint, {phase} {step} '
        f'(resume {tries} of {resumes})'
      )
    if job is None:
      time.sleep(pause)
