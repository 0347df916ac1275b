"""Ctrl-C during an evaluation ends a command within seconds."""

import signal
import subprocess
import sys
import time

import jax
import pytest

from jaxrl import model_loading
from tests.launch import runs

CONFIG = """
import time
from configs import base, debug

class Slow:
  uses_dataset = False

  def reset(self, *, seed, options=None):
    return 'Say something.', {}

  def step(self, action):
    print('playing', flush=True)
    time.sleep(2)
    return 'Go on.', 0.0, False, False, {}

def get_config(algorithm='grpo'):
  config = debug.get_config(algorithm)
  del config.env.arithmetic
  config.env.slow = base.env_section(
    f'{__file__}:Slow', max_steps=20, max_tokens_per_step=1)
  config.eval.num_tasks = 500
  config.sft.num_steps = 0
  return config
"""
# As `python -m`, but where the tests run in the background, Ctrl-C would be ignored.
MAIN = """
import runpy, signal, sys
signal.signal(signal.SIGINT, signal.default_int_handler)
del sys.argv[0]
runpy.run_module(sys.argv[0], run_name='__main__', alter_sys=True)
"""


@pytest.mark.slow
@pytest.mark.parametrize('command', ['train', 'evaluate'])
def test_ctrl_c_ends_an_evaluation(tmp_path, command):
  config = tmp_path / 'slow.py'
  config.write_text(CONFIG)
  argv = [sys.executable, '-u', '-c', MAIN, f'launch.{command}', f'--config={config}']
  if command == 'train':  # its first evaluation is before its first step
    argv += [f'--workdir={tmp_path}/run', *runs.BARE]
  else:
    shape = model_loading.random_config(hidden_size=32, num_layers=1, head_dim=16)
    options = {'value_head': False, 'dtype': 'float32', 'remat': 'none'}
    folder = tmp_path / 'model'
    model_loading.create_model(folder, shape, ['Go on.'], jax.random.key(0), **options)
    argv += [f'--checkpoint={folder}']
  process = subprocess.Popen(
    argv,
    stdout=subprocess.PIPE,
    stderr=subprocess.STDOUT,
    text=True,
    cwd=runs.ROOT,
    env=runs.environment(),
  )
  said = []
  for line in process.stdout:
    said.append(line)
    if said.count('playing\n') > 10:
      break
  start = time.perf_counter()
  process.send_signal(signal.SIGINT)
  output, _ = process.communicate(timeout=60)
  seconds = time.perf_counter() - start
  assert process.returncode == 130, ''.join(said) + output
  assert 'Stopped' in output and 'Traceback' not in output, output
  assert seconds < 30, output  # an episode takes 40
