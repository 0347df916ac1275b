"""A run in which an agent with OpenAI's own client plays."""

import types

import numpy as np
import pytest
from safetensors.numpy import load_file

from jaxrl.rollout.engine.router import EngineRouter
from jaxrl.rollout.queue.group_queue import GroupQueue
from tests.launch.runs import ROOT, main, rows
from tests.rollout.gateway.test_concurrent_agents import check

CONFIG = str(ROOT / 'tests' / 'launch' / 'agent_run.py')


@pytest.fixture
def seen(monkeypatch):
  """What the engine was asked and said, and what was put, as the run goes on."""
  calls, put = [], []
  generate, keep = EngineRouter.generate, GroupQueue.put

  async def spied(self, name, tokens, sampling):
    completion = await generate(self, name, tokens, sampling)
    calls.append((name, list(tokens), completion, sampling))
    return completion

  async def kept(self, group_id, episode_id, start_step, rollout, env_id):
    put.extend(rollout or [])
    return await keep(self, group_id, episode_id, start_step, rollout, env_id)

  monkeypatch.setattr(EngineRouter, 'generate', spied)
  monkeypatch.setattr(GroupQueue, 'put', kept)
  return calls, put


@pytest.mark.slow
@pytest.mark.extended
def test_a_run_learns_from_what_an_agent_said(tmp_path, seen):
  assert main(tmp_path, config=CONFIG) == 0
  steps = [row for row in rows(tmp_path) if 'reward/mean' in row]
  for row in steps:
    assert row['mismatch/logprob_difference'] < 1e-5
    assert row['optimizer/grad_norm'] > 0 and row['tokens/action'] > 0
  assert len(steps) == 2 and steps[0]['eval/bot/failed'] == 0
  assert steps[0]['eval/bot/agent/replies'] == 3
  calls, put = seen
  played = {
    (row.env_group, row.episode_id, row.episode_seed, row.sample_index) for row in put
  }
  mine = [call for call in calls if tuple(map(int, call[0].split('/')[1:5])) in played]
  replies, count = check(types.SimpleNamespace(calls=mine), {'all': put})
  assert replies == 3 * len(played) and count == len(put) == 2 * len(played)
  assert not any(row.failed for row in put)
  before, after = (
    load_file(tmp_path / folder / 'model.safetensors') for folder in ('model', 'export')
  )
  assert any(not np.array_equal(before[name], after[name]) for name in before)


@pytest.mark.slow
def test_an_agent_of_one_file_raises_its_reward(tmp_path):
  agent = f'{ROOT / "tests" / "rollout" / "agent_cases.py"}:small_letters'
  options = {
    'num_steps': 30,
    'batch.num_groups': 4,
    'batch.max_length': 64,
    'algorithm.group_size': 8,
    'optimizer.learning_rate': 1e-2,
    'env.bot.env_config.agent': agent,
    'eval.interval': 0,
  }
  flags = [f'--config.{key}={value}' for key, value in options.items()]
  assert main(tmp_path, *flags, config=CONFIG) == 0
  rewards = [row['reward/mean'] for row in rows(tmp_path) if 'reward/mean' in row]
  assert np.mean(rewards[-3:]) > np.mean(rewards[:3]) + 0.3
