"""A server of OpenEnv's own classes, for a Python that has them: guess a number."""

import os
import random
import sys

import uvicorn  # pyright: ignore[reportMissingImports]
from openenv.core.env_server.http_server import create_app  # pyright: ignore
from openenv.core.env_server.interfaces import Environment  # pyright: ignore
from openenv.core.env_server.types import Action, Observation, State  # pyright: ignore


class Guess(Action):
  number: int


class Answer(Observation):
  text: str = ''


class Game(Environment):
  SUPPORTS_CONCURRENT_SESSIONS = True

  def __init__(self):
    super().__init__()
    self.number = 0

  def reset(self, seed=None, episode_id=None, high=9, **_):
    self.number = random.Random(seed).randint(1, high)
    return Answer(text=f'A number from 1 to {high}?')

  def step(self, action, timeout_s=None, **_):
    if action.number == 99:
      os._exit(1)
    if action.number == 98:
      raise ValueError('that is too large')
    if action.number == 97:
      return Answer(text='x' * (17 << 20))
    if action.number == self.number:
      return Answer(text='yes', done=True, reward=1.0)
    return Answer(text='higher' if action.number < self.number else 'lower')

  @property
  def state(self):
    return State()


if __name__ == '__main__':
  app = create_app(Game, Guess, Answer, env_name='guess', max_concurrent_envs=2)
  uvicorn.run(app, host='127.0.0.1', port=int(sys.argv[1]), log_level='warning')
