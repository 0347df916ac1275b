"""Router replay: from the engine's choice to the learner's update."""

import asyncio
import dataclasses

import jax
import numpy as np
import pytest

from configs import debug
from jaxrl import model_loading
from jaxrl.algorithms import registry
from jaxrl.component_calls import ComponentCall
from jaxrl.device_thread import DeviceThread
from jaxrl.options import ConfigError
from jaxrl.rollout.engine.jax_engine import JaxEngine
from jaxrl.rollout.engine.resumable_generation import (
  concat_completions,
  concat_routed_experts,
  pad_or_trim_experts,
)
from jaxrl.rollout.episodes.rollout_cache import RolloutCache
from jaxrl.rollout.episodes.row_format import ROW_FORMATS
from jaxrl.training.batching import router_replay
from jaxrl.training.batching.batch_builder import ROUTED_EXPERTS_KEY, collate
from jaxrl.training.learner import Learner
from jaxrl.training.learner_options import LearnerOptions
from jaxrl.types import Completion, SamplingParams, Trajectory
from launch.settings.engine_settings import check_model
from launch.settings.resolve import resolve_settings
from tests.calls import parse_call, split_options
from tests.launch import runs
from tests.models import small
from tests.models.test_moe import MOE
from tests.rollout import fakes

PROMPTS = [[3, 4, 5, 6], [9], [3, 4, 5, 6], [7] * 20]


@pytest.fixture(scope='module')
def model_and_params():
  return small.model_and_params(**MOE)


async def _generate(model, params):
  device_thread = DeviceThread()
  engine = JaxEngine(
    model,
    device_thread=device_thread,
    max_num_seqs=3,
    max_length=48,
    decode_steps=4,
    prompt_buckets=[32],
    router_replay=True,
  )
  await engine.load(0, params)
  rules = [SamplingParams(max_tokens=6, seed=i) for i in range(len(PROMPTS))]
  requests = zip(map(str, range(len(PROMPTS))), PROMPTS, rules, strict=True)
  replies = await asyncio.gather(*(engine.generate(*one) for one in requests))
  device_thread.close()
  return replies


@pytest.fixture(scope='module')
def sampled(model_and_params):
  return asyncio.run(_generate(*model_and_params))


def row(prompt, reply):
  tokens = np.r_[prompt, reply.tokens].astype(np.int32)
  action = np.arange(len(tokens)) >= len(prompt)
  logprobs = np.zeros(len(tokens), np.float32)
  logprobs[action] = reply.logprobs
  rewards = np.where(np.arange(len(tokens)) == len(tokens) - 1, tokens % 3, 0)
  return Trajectory(
    tokens,
    action,
    logprobs,
    rewards.astype(np.float32),
    np.where(action, 0, -1).astype(np.int32),
    extras={ROUTED_EXPERTS_KEY: pad_or_trim_experts(reply.routed_experts, len(tokens))},
  )


def test_the_engine_tells_what_every_token_took(model_and_params, sampled):
  model, params = model_and_params
  for prompt, reply in zip(PROMPTS, sampled, strict=True):
    tokens = np.r_[prompt, reply.tokens].astype(np.int32)
    assert reply.routed_experts.shape == (len(tokens) - 1, 2, 2)
    keeping = dataclasses.replace(model, router_replay=True)
    lengths = np.int32([len(tokens) - 1])
    _, kept = jax.jit(keeping.prefill)(params, tokens[None, :-1], lengths)
    mine = np.moveaxis(np.asarray(kept['e'])[:, 0, 0], 0, 1)
    np.testing.assert_array_equal(reply.routed_experts, mine)


def test_an_episode_of_several_replies_keeps_all_routes(sampled):
  cache = RolloutCache(fakes.lease(), 7)
  cache.append_observation(PROMPTS[0])
  cache.append_response(sampled[0])
  cache.append_observation([5])
  later = dataclasses.replace(
    sampled[1], routed_experts=np.full((11 + 5, 2, 2), 4, np.int16)
  )
  cache.append_response(later)
  (row,) = ROW_FORMATS['trajectory'](cache)
  routed = row.extras[ROUTED_EXPERTS_KEY]
  np.testing.assert_array_equal(routed[:9], sampled[0].routed_experts)
  assert (routed[9:16] == 4).all() and (routed[16] == -1).all() and len(routed) == 17
  first, second = ROW_FORMATS['step'](cache)
  assert (first.extras[ROUTED_EXPERTS_KEY][9] == 4).all() and len(
    first.extras[ROUTED_EXPERTS_KEY]
  ) == 10
  (whole,) = ROW_FORMATS['concatenated'](cache)
  np.testing.assert_array_equal(
    whole.extras[ROUTED_EXPERTS_KEY],
    np.r_[first.extras[ROUTED_EXPERTS_KEY], second.extras[ROUTED_EXPERTS_KEY]],
  )


def test_replay_changes_nothing_at_the_same_weights_and_all_at_others(
  model_and_params, sampled
):
  model, params = model_and_params
  rows = [row(*one) for one in zip(PROMPTS, sampled, strict=True)]
  batch = collate([rows], (32,))
  assert batch.routed_experts.shape == (4, 32, 2, 2)
  score = jax.jit(model.policy_outputs)
  inputs = batch.tokens, batch.segment_ids
  free = score(params, *inputs).logprobs
  bound = score(params, *inputs, routed_experts=batch.routed_experts).logprobs
  np.testing.assert_allclose(bound, free, atol=1e-5)
  np.testing.assert_allclose(
    np.asarray(bound)[batch.action_mask],
    batch.rollout_logprobs[batch.action_mask],
    atol=1e-4,
  )
  draw = np.random.default_rng(0)
  other = jax.tree.map(lambda x: x + 0.05 * draw.normal(size=x.shape), params)
  free = np.asarray(score(other, *inputs).logprobs)
  bound = score(other, *inputs, routed_experts=batch.routed_experts).logprobs
  assert np.abs(bound - free).max() > 1e-2


def test_a_learner_takes_the_recorded_experts_whichever_they_are(
  model_and_params, sampled
):
  """Rows whose routes no router would choose: the learner's numbers are theirs."""
  model, params = model_and_params
  rows = [row(*one) for one in zip(PROMPTS, sampled, strict=True)]
  for one in rows:
    known = one.extras[ROUTED_EXPERTS_KEY] >= 0
    one.extras[ROUTED_EXPERTS_KEY] = np.where(known, np.int16([1, 4]), -1).astype(
      np.int16
    )
  batch = collate([rows], (32,))
  score, mask = jax.jit(model.policy_outputs), batch.action_mask
  routing = {'routed_experts': batch.routed_experts}
  forced = score(params, batch.tokens, batch.segment_ids, **routing).logprobs
  forced, rollout = np.asarray(forced)[mask], batch.rollout_logprobs[mask]
  assert np.abs(forced - rollout).mean() > 0.1
  keeping = dataclasses.replace(model, router_replay=True)
  options = {'num_rows': 4, 'length_buckets': (32,), 'log_entropy': False}
  learner = Learner(
    keeping,
    params,
    registry.make('reinforce'),
    **split_options(LearnerOptions, options),
  )
  metrics = asyncio.run(learner.update([rows]))
  wanted = np.abs(forced - rollout).mean()
  np.testing.assert_allclose(metrics['mismatch/logprob_difference'], wanted, rtol=1e-4)
  np.testing.assert_allclose(metrics['policy/logprob'], forced.mean(), rtol=1e-4)
  assert metrics['optimizer/grad_norm'] > 0
  assert metrics['replay/share'] == 1
  assert metrics['moe/max_load'] == 2.5  # two of five experts share all tokens
  for one in rows:
    del one.extras[ROUTED_EXPERTS_KEY]
  with pytest.raises(ValueError, match='4 sampled rows bring no routed_experts'):
    asyncio.run(learner.update([rows]))


def test_what_is_told_of_a_batch(model_and_params, sampled):
  model = dataclasses.replace(model_and_params[0], router_replay=True)
  rows = [row(*one) for one in zip(PROMPTS, sampled, strict=True)]
  batch = collate([rows], (32,)).replace(expert_mask=np.zeros(4, bool))
  batch.routed_experts[0, 6:] = -1  # of four tokens before the six that are sampled
  metrics = router_replay.replay_metrics(model, batch)
  np.testing.assert_allclose(metrics['replay/share'], 1 - 3 / batch.action_mask.sum())
  taken = batch.routed_experts[(batch.routed_experts >= 0).all((2, 3))]
  loads = [(taken[:, layer] == e).sum() for layer in range(2) for e in range(5)]
  np.testing.assert_allclose(metrics['moe/max_load'], max(loads) * 5 / (2 * len(taken)))


def test_parts_of_a_reply_are_put_together():
  def part(start, stop, number):
    zeros = np.zeros(stop - start)
    routed = np.full((stop - 1, 1, 1), number, np.int16)
    return Completion(zeros, zeros, zeros, 'abort', routed)

  whole = concat_completions([part(2, 4, 0), part(4, 4, 1), part(4, 7, 2)])
  assert whole.routed_experts[:, 0, 0].tolist() == [0, 0, 0, 2, 2, 2]
  assert concat_routed_experts(None, None) is None
  assert pad_or_trim_experts(whole.routed_experts, 8)[:, 0, 0].tolist() == [
    0,
    0,
    0,
    2,
    2,
    2,
    -1,
    -1,
  ]
  assert len(pad_or_trim_experts(whole.routed_experts, 4)) == 4


def test_rows_of_other_shapes_are_named(sampled):
  rows = [row(*one) for one in zip(PROMPTS, sampled, strict=True)]
  rows[1].extras[ROUTED_EXPERTS_KEY] = rows[1].extras[ROUTED_EXPERTS_KEY][:-1]
  with pytest.raises(ValueError, match='routed_experts in its extras has shape'):
    collate([rows], (32,))


EXPERTS = {'num_experts': 4, 'num_experts_per_token': 2, 'moe_intermediate_size': 16}
FAMILY = ComponentCall('qwen3_moe', EXPERTS)


@pytest.mark.slow
def test_a_run_with_experts_learns_and_replays(tmp_path):
  options = (
    runs.model('qwen3_moe', num_layers=1, **EXPERTS),
    '--config.rollout.engine=jax(router_replay=True)',
    '--config.num_steps=1',
    '--config.sft.num_steps=0',
    '--config.eval.interval=0',
    '--config.checkpoint.save_interval=0',
  )
  assert runs.main(tmp_path, *options) == 0
  (step,) = runs.rows(tmp_path)
  assert step['mismatch/logprob_difference'] < 1e-4
  assert step['replay/share'] == 1 and 1 <= step['moe/max_load'] <= 2


def test_families_by_call_string():
  shape = model_loading.random_config(family=FAMILY)
  assert (shape.num_experts, shape.moe_intermediate_size) == (4, 16)
  with pytest.raises(ConfigError, match="no option 'num_expert'"):
    model_loading.random_config(family=parse_call('qwen3_moe(num_expert=4)'))
  with pytest.raises(ConfigError, match="no option 'num_experts'"):
    model_loading.random_config(family=parse_call('qwen3(num_experts=4)'))
  with pytest.raises(ConfigError, match="no family 'qwen4'"):
    model_loading.random_config(family='qwen4')


def test_replay_is_refused_where_it_cannot_be():
  config = debug.get_config()
  config.rollout.engine = 'jax(router_replay=True, exact=True)'
  with pytest.raises(ConfigError, match='exclude each other'):
    resolve_settings(config)
  config.rollout.engine = 'jax(router_replay=True)'
  with pytest.raises(ConfigError, match='this one, of family qwen3, has none'):
    check_model(resolve_settings(config), small.config())
