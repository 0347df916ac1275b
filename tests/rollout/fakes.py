"""Stand-ins for what surrounds environments: an engine, a chat, environments."""

import asyncio
import time

import numpy as np

from jaxrl.data.dataset import GlobalDataset
from jaxrl.rollout.env_manager import EnvContext, EnvManager
from jaxrl.rollout.queue.group_state import EpisodeLease
from jaxrl.rollout.thread_pool import ThreadPool
from jaxrl.types import Completion, Trajectory

END = 0  # ends a reply


class FakeChat:
  """Characters as tokens: a message is its text between its role and `END`."""

  end_id, stop_token_ids = END, (END,)
  generation_prompt, tool_format = '>', None

  def encode(self, text):
    return [ord(c) for c in text]

  def decode(self, tokens):
    return ''.join(chr(t) for t in tokens if t != END)

  def _write(self, messages):
    return [
      t for m in messages for t in [*self.encode(m['role'][0] + m['content']), END]
    ]

  def encode_prompt(self, messages, *, max_tokens=None):
    return [*self._write(messages), ord('>')]

  def encode_next_prompt(self, messages, *, reply, prompt=True, max_tokens=None):
    return ([] if reply[-1] == END else [END]) + [*self._write(messages), ord('>')]


class FakeEngine:
  """Replies with `reply(prompt, sampling)`; remembers what it was asked."""

  def __init__(self, reply=None, delay=0.0):
    self.reply = reply or (lambda prompt, sampling: str(sampling.seed % 10))
    self.delay, self.requests, self.aborted, self.version = delay, [], [], 3

  async def generate(self, request_id, token_ids, sampling):
    self.requests.append((request_id, list(token_ids), sampling))
    await asyncio.sleep(self.delay)
    text = self.reply(token_ids, sampling)
    if isinstance(text, Exception):
      raise text
    if isinstance(text, Completion):
      return text
    tokens = [*FakeChat().encode(text), END][: sampling.max_tokens]
    finish = 'stop' if tokens[-1] == END else 'length'
    return completion(tokens, finish, self.version)

  async def abort(self, request_id):
    self.aborted.append(request_id)


def completion(tokens, finish='stop', version=3):
  n = len(tokens)
  logprobs = -np.arange(1, n + 1, dtype=np.float32)
  return Completion(
    np.array(tokens, np.int32), logprobs, np.full(n, version, np.int32), finish
  )


class EchoEnv:
  """Counts turns; rewards each with its number; ends after `turns`."""

  def __init__(self, *, turns: int = 1):
    self.turns, self.turn = turns, 0

  def reset(self, *, seed, options=None):
    self.turn = 0
    task = (options or {}).get('task')
    return (f'seed {seed}' if task is None else task.item['question']), {}

  def step(self, action):
    self.turn += 1
    info = {'metrics': {'length': len(action)}, 'columns': {'said': action}}
    return f'turn {self.turn}', float(self.turn), self.turn >= self.turns, False, info


class BadEnv(EchoEnv):
  """Breaks as told: 'reset' or 'step' raise, hang, exit, or give a bad reward."""

  def __init__(self, *, fault: str = 'step raises', seconds: float = 30.0):
    super().__init__(turns=2)
    self.fault, self.seconds = fault, seconds

  def _break(self, where):
    if self.fault == f'{where} raises':
      raise KeyError('broken')
    if self.fault == f'{where} hangs':
      time.sleep(self.seconds)
    if self.fault == f'{where} exits':
      raise SystemExit(3)
    return self.fault == f'{where} garbage'

  def reset(self, *, seed, options=None):
    if self._break('reset'):
      return 'no pair'
    return super().reset(seed=seed, options=options)

  def step(self, action):
    if self._break('step'):
      return 'nonsense'
    if self.fault.startswith('step gives '):
      return 'fine', float(self.fault.split()[-1]), True, False, {}
    if self.fault == 'step counts too far':
      return 'fine', 10**400, True, False, {}
    return super().step(action)


def world(make_env=EchoEnv, engine=None, queue=None, rows=0, pool=None, mode='sample'):
  """An EnvContext; with `rows` > 0 it has a data set of so many questions."""
  dataset = None
  if rows:
    items = [{'question': f'q{i}', 'answer': str(i)} for i in range(rows)]
    dataset = GlobalDataset(items, mode=mode)
  pool = pool or ThreadPool(2)
  return EnvContext(make_env, engine or FakeEngine(), FakeChat(), pool, queue, dataset)


def lease(group_id=0, episode_id=0, member=0, start_step=0, attempt=0):
  return EpisodeLease(group_id, episode_id, member, start_step, attempt)


async def play(world, *, base_seed=7, member=0, **options):
  """The rows of episode 0 of env group 0."""
  manager = EnvManager(world, **options)
  return await manager.play_episode(lease(member=member), base_seed=base_seed)


def row(score=0.0, sample_index=0, stop_reason='finish', **fields):
  """A trajectory of two tokens, the second an action."""
  return Trajectory(
    tokens=np.array([5, 6], np.int32),
    action_mask=np.array([False, True]),
    rollout_logprobs=np.array([0, -0.5], np.float32),
    rewards=np.array([0, score], np.float32),
    weights_version=np.array([-1, 0], np.int32),
    sample_index=sample_index,
    stop_reason=stop_reason,
    **fields,
  )
