"""An environment for child processes: what it imports, each of them imports."""

import os
import subprocess
import sys
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
    if action.startswith('say'):
      return 'x' * int(action.split()[1]), 0.0, False, False, {}
    if action.startswith('note'):
      note = 'x' * int(action.split()[1])
      return '', 0.0, False, False, {'columns': {'note': note}}
    if action.startswith('start children and hang'):
      sleep = [sys.executable, '-c', 'import time; time.sleep(120)']
      children = [
        subprocess.Popen(sleep),
        subprocess.Popen(sleep, start_new_session=True),  # left the process group
      ]
      pids = ' '.join(str(child.pid) for child in children)
      with open(action.split()[-1], 'w') as file:
        file.write(f'{os.getpid()} {os.getppid()} {pids}\n')
      while True:
        pass
    if action == 'raise':
      raise KeyError('broken')
    return '', 1.0, True, False, {}
