"""A tiny random checkpoint with a real tokenizer, and a server of it in a process."""

import contextlib
import os
import pathlib
import re
import subprocess
import sys
import threading

import jax

from jaxrl import model_loading

KEY = 'tml-test-key'
TEXTS = [
  'the cat sat on the mat and the dog ran to the park',
  'one two three four five',
]
SIZES = {
  'vocab_size': 300,
  'hidden_size': 32,
  'num_layers': 2,
  'num_heads': 4,
  'num_kv_heads': 2,
  'head_dim': 8,
  'intermediate_size': 64,
}
LIMITS = (
  '--max_length=64',
  '--step_tokens=128',
  '--max_rank=8',
  '--max_tenants=3',
  '--max_samplers=2',
  '--max_num_seqs=8',
  '--stable_reinforce=r1_reward',
  '--dimuon=muon',
)


def make_checkpoint(folder: pathlib.Path) -> pathlib.Path:
  """Saves a random model with a tokenizer; returns its folder."""
  config = model_loading.random_config(**SIZES)
  options = {'value_head': False, 'dtype': 'float32', 'remat': 'none'}
  key = jax.random.key(0)
  return model_loading.create_model(folder, config, TEXTS, key, **options).folder


class ServerProcess:
  """`python -m launch.tinker` as a process of its own."""

  def __init__(self, checkpoint, folder, *flags, port=0, wait=120):
    command = [sys.executable, '-m', 'launch.tinker', f'--checkpoint={checkpoint}']
    command += [f'--folder={folder}', f'--port={port}', *LIMITS, *flags]
    env = {**os.environ, 'TINKER_API_KEY': KEY, 'JAXRL_TUNE': '0'}
    # Servers of the same model compile its programs once.
    env['JAX_COMPILATION_CACHE_DIR'] = str(pathlib.Path(folder).parent / 'xla')
    env['JAX_PERSISTENT_CACHE_MIN_COMPILE_TIME_SECS'] = '0'
    env['JAX_PERSISTENT_CACHE_MIN_ENTRY_SIZE_BYTES'] = '0'
    self.process = subprocess.Popen(
      command, env=env, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True
    )
    self.lines: list[str] = []
    self.url = ''
    ready = threading.Event()

    def read():
      for line in self.process.stdout:
        self.lines.append(line)
        if found := re.search(r'http://[\d.]+:\d+', line):
          self.url = self.url or found[0]
          ready.set()
      ready.set()

    threading.Thread(target=read, daemon=True).start()
    ready.wait(timeout=wait)
    assert self.url, ''.join(self.lines)

  @property
  def log(self) -> str:
    return ''.join(self.lines)

  def stop(self):
    """Ends the process and waits for it."""
    if self.process.poll() is None:
      self.process.terminate()
    with contextlib.suppress(subprocess.TimeoutExpired):
      self.process.wait(timeout=30)
    if self.process.poll() is None:
      self.process.kill()
      self.process.wait()
