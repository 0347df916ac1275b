"""Plays episodes with observations of 50 MB; prints why they ended and the memory.

It is a process of its own, whose memory is its own: `python -m
tests.rollout.huge_observations reset|step|isolated`.
"""

import asyncio
import dataclasses
import resource
import sys

from jaxrl.envs.isolated_env import IsolatedEnv
from tests.data.test_chat_tokenizer import make_chat
from tests.rollout.fakes import EchoEnv, FakeEngine, completion, play, world

NUM_CHARS = 50_000_000


class HugeEnv(EchoEnv):
  """Has an observation of `NUM_CHARS` at its reset, or after its first step."""

  def __init__(self, where):
    super().__init__(turns=3)
    self.where = where

  def reset(self, *, seed, options=None):
    return 'a pen ' * (NUM_CHARS // 6) if self.where == 'reset' else 'go', {}

  def step(self, action):
    return 'x' * NUM_CHARS, 0.0, False, False, {}


def main(where):
  chat = make_chat()
  reply = [*chat.encode(f'say {NUM_CHARS}'), chat.end_id]
  engine = FakeEngine(lambda prompt, sampling: completion(reply))

  def make_env():
    isolated = IsolatedEnv('tests.envs.faulty:Faulty', {})
    return isolated if where == 'isolated' else HugeEnv(where)

  context = dataclasses.replace(world(make_env, engine), chat=chat)
  before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
  (row,) = asyncio.run(play(context, max_steps=3, max_length=8192))
  after = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
  print(row.stop_reason, len(row.tokens), (after - before) >> 10)


if __name__ == '__main__':
  main(sys.argv[1])
