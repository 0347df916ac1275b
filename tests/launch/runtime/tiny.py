"""An engine without a model, for an actor: it may be slow, break, or never start."""

import asyncio
import os
import pathlib

import numpy as np

from jaxrl.types import Completion
from launch.runtime.ray_engines import MonitoredEngine


class Slow:
  """Emits the tokens `100 · seed + place`, up to where it is held.

  folder: where each start leaves a file. deaths: how many starts end in `exit`.
  """

  def __init__(self, folder, deaths=0, error=''):
    starts = len(list(pathlib.Path(folder).iterdir()))
    (pathlib.Path(folder) / str(os.getpid())).touch()
    if starts < deaths:
      os._exit(1)
    if error:
      raise ValueError(error)
    self.limit, self.version, self.seconds_since_progress = None, 0, 0.0
    self.requests, self.broken, self.pulling = {}, '', False

  async def generate(self, name, prompt, sampling):
    tokens = []
    self.requests[name] = tokens, []
    for place in range(
      sampling.num_generated, sampling.num_generated + sampling.max_tokens
    ):
      await asyncio.sleep(0)
      while self.limit is not None and len(tokens) >= self.limit and not self.broken:
        await asyncio.sleep(0.01)
      if self.broken:
        raise OSError(self.broken)
      tokens.append(100 * sampling.seed + place)
      self.requests[name][1].append(self.version)
    return self.completion(*self.requests.pop(name), 'length')

  @staticmethod
  def completion(tokens, versions, reason='abort'):
    tokens = np.array(tokens, np.int32)
    return Completion(tokens, -tokens / 7, np.array(versions, np.int32), reason)

  async def progress(self, names):
    return {n: self.completion(*self.requests[n]) for n in names if n in self.requests}

  async def abort(self, name):
    pass

  async def pull(self, version, *, full=False, seconds=0.3):
    self.pulling = True
    await asyncio.sleep(seconds)
    self.version, self.pulling = version, False
    return f'digest {version}'

  async def about(self):
    return {'pid': os.getpid(), 'version': self.version, 'pulling': self.pulling}

  async def hold(self, limit):
    """Requests wait at so many tokens; None lets them go."""
    self.limit = limit

  async def spoil(self, broken='', seconds_since_progress=0.0):
    self.broken = broken
    self.seconds_since_progress = seconds_since_progress


class Tiny(MonitoredEngine, Slow):
  """As the fleet looks after it."""
