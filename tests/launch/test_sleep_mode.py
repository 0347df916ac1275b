"""Learner and engines that have the memory of their devices in turns: the real loop and
its hooks, around parts that know only who has memory.
"""

import dataclasses
import pathlib
import types

import pytest

from configs import base
from jaxrl import loop
from launch.rollouts.group_sources import PlayedGroups, Players
from launch.settings.resolve import resolve_settings
from launch.trainer import RunParts, TrainPhase


class Memory:
  """The parts of a run, each of which fails when another holds what it needs."""

  def __init__(self, events):
    self.events, self.cache, self.resting, self.step = events, False, False, 0
    self.params, self.advantages, self.version = 'params', None, None
    self.old_logprobs = None

  # The learner's.

  async def inference_params(self):
    return self.params

  async def update(self, groups):
    assert not self.cache and not self.resting
    self.events.append(f'update {self.step}')
    self.step += 1
    return {}

  async def offload(self):
    self.events.append('rest')
    self.resting = True

  async def reload(self):
    assert not self.cache, 'the engine has the memory'
    self.events.append('wake')
    self.resting = False

  async def save(self, checkpointer, data, *, wait=False):
    self.events.append('save')

  # The engines', the router's, and what hands weights over.

  async def at(self, step, weights):
    assert not self.cache and not self.resting and await weights() == 'params'
    self.events.append(f'publish {step}')
    self.version = step

  now = at

  async def sleep(self):
    self.events.append('sleep')
    self.cache = False

  async def resume(self):
    assert self.resting, 'the learner has the memory'
    self.events.append('resume')
    self.cache = True

  async def warmup(self):
    assert self.cache
    self.events.append('warmup')

  async def advance(self, step):
    pass

  async def evaluate(self, names):
    assert self.cache
    self.events.append('evaluate')
    return {}, []

  # The sampler's.

  def plays(self, step):
    return True

  async def next(self, step):
    assert self.cache and self.resting and self.version == step
    self.events.append(f'play {step}')
    return [['row']]

  def state_dict(self):
    return {}


def phase(events, every):
  parts = Memory(events)
  config = base.get_config()
  config.env.math = base.env_section('math')
  config.cluster.update(ray=True, placement='colocated(sleep=True)')
  config.rollout.engine = 'vllm'
  config.checkpoint.save_interval, config.eval.interval = 1, every
  none = types.SimpleNamespace(metrics=dict)

  async def nothing():
    return {}

  rollouts = types.SimpleNamespace(
    engine=parts,
    weight_syncer=types.SimpleNamespace(
      maybe_sync=parts.at, sync_now=parts.now, metrics=lambda step: {}
    ),
    weights=none,
    advance=parts.advance,
    evaluate=parts.evaluate,
    metrics=nothing,
    state_dict=nothing,
  )
  sampler = types.SimpleNamespace(
    plays=parts.plays, next=parts.next, metrics=dict, state_dict=parts.state_dict
  )
  ignore = lambda *_, **__: None  # noqa: E731
  settings = resolve_settings(config)
  settings = dataclasses.replace(settings, num_steps=3)
  sink = types.SimpleNamespace(write=ignore, trajectories=ignore)
  runtime = types.SimpleNamespace(hosts_learner=True, metrics=nothing)
  stop = lambda: False  # noqa: E731
  run = RunParts(settings, pathlib.Path(), sink, stop, runtime)  # pyright: ignore
  sleeps = settings.placement.sleeps
  players = Players(rollouts, sleeps=sleeps, learns_here=False)  # pyright: ignore
  source = PlayedGroups(settings, sampler, players)  # pyright: ignore
  options = (parts, source, None, settings.active_evaluations)
  return parts, TrainPhase(run, 'train', *options)  # pyright: ignore


@pytest.mark.asyncio
@pytest.mark.parametrize('every', [0, 3])
async def test_nobody_has_memory_that_another_needs(every):
  events = []
  parts, train_phase = phase(events, every)
  assert await loop.train(parts, train_phase, train_phase.hooks(), num_steps=3)
  look = ['evaluate'] if every else []
  round_ = lambda n: [f'play {n}', 'sleep', 'wake', f'update {n}', 'save']  # noqa: E731
  hand_over = lambda n: [f'publish {n}', 'rest', 'resume']  # noqa: E731
  wanted = [*hand_over(0), 'warmup', *look]
  for step in range(3):
    wanted += round_(step) + hand_over(step + 1)
  assert events == [*wanted, *look, 'save']
