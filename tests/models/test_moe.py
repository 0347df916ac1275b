"""Experts in the whole model: decode, exact mode, padding, and replayed routes."""

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jaxrl.models import kv_cache, moe
from jaxrl.models.exact_mode import Exact
from kernels import experts
from tests.models import small

MOE = {
  'family': 'qwen3_moe',
  'num_experts': 5,
  'num_experts_per_token': 2,
  'moe_intermediate_size': 12,
  'num_layers': 2,
}
SLOTS, WINDOW, WIDTH = 3, 40, 24
LENGTHS = np.array([20, 5, 24], np.int32)


@pytest.fixture(scope='module')
def model_and_params():
  model, params = small.model_and_params(**MOE)
  return dataclasses.replace(model, router_replay=True), params


def decoded(model, params, tokens, steps=6):
  """Logits `[steps + 1, rows, V]`, and the cache, in slots that are not the rows'."""
  slots = np.array([2, 0, 1])
  logits, kept = jax.jit(model.prefill)(params, tokens[:, :WIDTH], LENGTHS)
  cache = kv_cache.insert(model.init_cache(SLOTS, WINDOW), kept, np.arange(3), slots)
  decode, out = jax.jit(model.decode), [logits]
  for step in range(steps):
    fed, positions = np.zeros((2, SLOTS), np.int32)
    positions[slots] = LENGTHS + step
    fed[slots] = tokens[np.arange(3), LENGTHS + step]
    logits, cache = decode(params, cache, fed, positions, np.int32(WINDOW))
    out.append(logits[slots])
  return np.stack(out), cache, slots


def test_decode_equals_the_forward_pass_and_keeps_the_routes(model_and_params):
  model, params = model_and_params
  tokens = small.tokens(3, 32)
  decoded_logits, cache, slots = decoded(model, params, tokens)
  hidden = jax.jit(model.hidden)(params, tokens, np.ones_like(tokens))
  full = np.asarray(model.logits(params, hidden))
  rows = [np.asarray(model_cache_rows(cache, slot)) for slot in slots]
  for row, length in enumerate(LENGTHS):
    expected = full[row, length - 1 : length + 6]
    np.testing.assert_allclose(decoded_logits[:, row], expected, atol=2e-4)
  routed = np.stack(rows)[:, : tokens.shape[1]]
  known = np.arange(tokens.shape[1]) < LENGTHS[:, None] + 6
  routed = np.where(known[:, :, None, None], routed, -1)
  assert routed[known].min() >= 0 and len(np.unique(routed[known])) == 5
  again = jax.jit(model.hidden)(
    params, tokens, np.ones_like(tokens), routed_experts=routed
  )
  np.testing.assert_allclose(again, hidden, atol=1e-5)


def model_cache_rows(cache, slot):
  return kv_cache.experts_of(cache, slot)


def test_a_replayed_route_is_taken_and_the_router_still_learns(model_and_params):
  model, params = model_and_params
  tokens = small.tokens(2, 12)
  ones, draw = np.ones_like(tokens), np.random.default_rng(0)
  pairs = np.stack([draw.permutation(5)[:2] for _ in range(2 * 12 * 2)])
  routed = pairs.reshape(2, 12, 2, 2).astype(np.int16)

  def logprobs(params, routed):
    outputs = model.policy_outputs(params, tokens, ones, routed_experts=routed)
    return outputs.logprobs

  score = jax.jit(logprobs)
  free, forced = score(params, np.full_like(routed, -1)), score(params, routed)
  assert np.abs(forced - free).max() > 0.05
  slope = jax.jit(jax.grad(lambda p: logprobs(p, routed).sum()))(params)
  experts = slope['layers']['mlp']['experts']['down']['kernel']
  taken = np.zeros((2, 5), bool)
  for layer in range(2):
    taken[layer, routed[:, :-1, layer]] = True  # nothing follows the last token
  assert ((np.abs(experts).max((2, 3)) > 0) == taken).all()
  assert np.abs(slope['layers']['mlp']['router']['kernel']).max() > 0
  # An order of the same experts is the same mixture.
  turned = score(params, routed[..., ::-1])
  np.testing.assert_allclose(turned, forced, atol=1e-5)


def test_what_stands_at_padding_touches_no_other_token(model_and_params):
  model, params = model_and_params
  tokens = small.tokens(2, 16)
  there = np.arange(16) < np.array([[9], [16]])
  segments = there.astype(np.int32)
  score = jax.jit(model.policy_outputs)
  one = score(params, np.where(there, tokens, 0), segments).logprobs
  other = score(params, np.where(there, tokens, 66), segments).logprobs
  np.testing.assert_allclose(one, other, atol=1e-6)


@pytest.mark.slow
def test_exact_mode_gives_the_same_bits(model_and_params):
  model, params = model_and_params
  model = dataclasses.replace(model, router_replay=False, exact=Exact(rows=8))
  tokens = small.tokens(3, 32)
  decoded_logits, _, _ = decoded(model, params, tokens)
  outputs = jax.jit(model.policy_outputs)(params, tokens, np.ones_like(tokens))
  for row, length in enumerate(LENGTHS):
    following = jnp.asarray(tokens[row, length : length + 7])
    logits = jnp.asarray(decoded_logits[:, row])
    exact = model.exact.logprobs(logits, following, jnp.ones(7))
    np.testing.assert_array_equal(exact, outputs.logprobs[row, length : length + 7])


def test_replay_is_refused_where_there_is_nothing_to_replay(model_and_params):
  model, _ = model_and_params
  with pytest.raises(ValueError, match='router_replay and exact mode exclude'):
    dataclasses.replace(model, exact=Exact(rows=8))
  with pytest.raises(ValueError, match='router_replay needs a model with experts'):
    dataclasses.replace(model, config=small.config())


@pytest.mark.parametrize(
  ('changes', 'message'),
  [
    ({'num_experts_per_token': 6}, 'at most num_experts'),
    ({'moe_intermediate_size': 0}, 'moe_intermediate_size=0'),
    ({'family': 'qwen3'}, 'has no experts'),
  ],
)
def test_sizes_must_agree(changes, message):
  with pytest.raises(ValueError, match=message):
    small.config(**MOE | changes)


@pytest.mark.parametrize(
  ('shape', 'requested', 'platform', 'wanted'),
  [
    ((2, 5, 8), 'auto', 'tpu', experts.ragged),
    ((2, 5, 8), 'auto', 'cuda', experts.grouped),
    ((2, 5, 8), 'auto', 'cpu', experts.dense),
    ((10, 8), 'auto', 'tpu', experts.dense),
    ((2, 5, 8), 'reference', 'tpu', experts.dense),
  ],
)
def test_the_way_is_the_platforms_unless_the_reference_is_asked_for(
  shape, requested, platform, wanted
):
  assert moe.select_implementation(jnp.zeros(shape), requested, platform) is wanted
