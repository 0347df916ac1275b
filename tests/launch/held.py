"""The varied config with an environment and an engine that wait while a file is there.

So a test knows what is in flight on a host at the moment when it does something to it.
The files are `step` and `generate` in the folder that $HELD_FOLDER names.
"""

import asyncio
import os
import pathlib
import socket
import time

from configs import base
from jaxrl.rollout.engine.jax_engine import JaxEngine
from tests.launch import varied, words

PAUSE_S = 0.3  # of each step, so that a test can hold the run before the next ones


def is_held(what):
  folder = os.environ.get('HELD_FOLDER')
  return folder is not None and (pathlib.Path(folder) / what).exists()


class Words(words.Words):
  """Grades a reply when it is let to."""

  def step(self, action):
    if 'HELD_FOLDER' in os.environ:
      time.sleep(PAUSE_S)
    while is_held('step'):
      time.sleep(0.02)
    return super().step(action)


class Engine(JaxEngine):
  """Answers a request when it is let to, and leaves a note of one that waits."""

  async def generate(self, *arguments):
    while is_held('generate'):
      folder = pathlib.Path(os.environ['HELD_FOLDER'])
      (folder / f'generate-{socket.gethostname()}').touch()
      await asyncio.sleep(0.02)
    return await super().generate(*arguments)


def get_config(algorithm='grpo'):
  config = varied.get_config(algorithm)
  env = base.env_section(f'{__file__}:Words', max_tokens_per_step=16)
  config.env.arithmetic = env
  config.rollout.engine = f'{__file__}:Engine(decode_steps=4)'
  config.batch.num_groups = 3  # one for each of three engines
  return config
