"""An environment for child processes: what it imports, each of them imports."""

import os
import time


class Faulty:
  """Does at each step what it is told."""

  def reset(self, *, seed, options=None):
    return f'{os.getpid()}', {}

  def step(self, action):
    if action == 'die':
      os._exit(7)
    if action == 'hang':
      time.sleep(60)
    if action.startswith('leak'):
      self.kept = [*getattr(self, 'kept', []), bytearray(int(action.split()[1]))]
    if action == 'raise':
      raise KeyError('broken')
    return '', 1.0, True, False, {}
