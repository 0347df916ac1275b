"""Every kind of layer computes the same packed, on a mesh, exactly, with adapters."""

import dataclasses
import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jaxrl.models import kv_cache, lora
from jaxrl.models.exact_mode import Exact
from jaxrl.models.transformer_lm import TransformerLM
from jaxrl.options import ConfigError
from jaxrl.training.batching import unpacked_attention
from jaxrl.training.parallelism import sharding
from jaxrl.training.parallelism.mesh import MeshOptions, make_mesh
from jaxrl.training.parallelism.model_sharding import on_mesh
from jaxrl.types import TokenTree
from tests.marks import extended, slow, slow_in_gate
from tests.models.families import cases
from tests.training.test_unpacked_attention import lying

pytestmark = pytest.mark.slow
NAMES = [name for name in cases.CASES if name not in cases.VARIANTS]
UNPACKED = [name for name in cases.DISTINCT if name in NAMES]
KINDS = [name for name in NAMES if name not in cases.ALIKE]
# What the gate runs: sinks, latent attention, and DeltaNets. The others mix the parts.
GATE = ('gpt-oss', 'deepseek-v3', 'qwen3-next')
every_kind = pytest.mark.parametrize('name', slow_in_gate(GATE, KINDS))
MIXTURES = [name for name in KINDS if cases.CASES[name].has_experts] + ['gemma4-moe']
with_experts = pytest.mark.parametrize('name', slow_in_gate(GATE, MIXTURES))


def close(actual, wanted):
  size = max(1.0, np.abs(wanted).max(initial=0))
  np.testing.assert_allclose(actual, wanted, rtol=1e-3, atol=2e-5 * size)


@functools.partial(jax.jit, static_argnums=0)
def scores(model, params, tokens, options):
  """Log-probs `[B, T]`, and the gradient of a weighted sum of them."""
  weights = np.random.default_rng(1).standard_normal(tokens.shape)

  def total(params):
    outputs = model.policy_outputs(params, tokens, **options)
    return (outputs.logprobs * weights).sum(), outputs.logprobs

  slopes, logprobs = jax.grad(total, has_aux=True)(params)
  return logprobs, slopes


def plain(model, params, tokens, **options):
  options.setdefault('segment_ids', jnp.ones_like(tokens))
  return scores(model, params, tokens, options)


@functools.partial(jax.jit, static_argnums=0)
def logprobs_of(model, params, tokens, segment_ids=None):
  segment_ids = jnp.ones_like(tokens) if segment_ids is None else segment_ids
  return model.policy_outputs(params, tokens, segment_ids).logprobs


@every_kind
def test_packed_rows_equal_separate_ones(name):
  """Row 0 has what rows 1 and 2 have each for themselves, and row 3 joins it."""
  config, params = cases.ours(name)
  tokens = np.tile(cases.tokens(1, 30), (4, 1))
  tokens[2] = np.roll(tokens[2], -18)
  segment_ids = np.ones((4, 30), np.int32)
  segment_ids[0, 18:] = 2
  segment_ids[1, 18:] = segment_ids[2, 12:] = 0
  logprobs = logprobs_of(TransformerLM(config), params, tokens, segment_ids)
  close(logprobs[0, :18], logprobs[1, :18])
  close(logprobs[0, 18:], logprobs[2, :12])
  assert np.abs(logprobs[3] - logprobs[0])[19:22].max() > 1e-3  # or no leak would show


@pytest.mark.parametrize(
  ('name', 'unpacked'),
  [
    (slow if name in GATE else extended)(name, unpacked)
    for names, unpacked in ((KINDS, False), (UNPACKED, True))
    for name in names
  ],
)
def test_a_shared_prompt_is_seen_by_all_its_responses(name, unpacked):
  """Row 0 has a prompt of 7 tokens once, and responses of 5, 4 and 2."""
  config, params = cases.ours(name)
  # The kernel for a CPU would get packed rows as they are.
  model = TransformerLM(config, kernels='reference' if unpacked else 'auto')
  lengths = [12, 11, 9]
  rows, segment_ids = lying([(0, length, 7) for length in lengths], 24, 1)
  whole = cases.tokens(3, 12)
  whole[:, :7] = whole[0, :7]
  packed = np.where(rows.origin < 0, 0, whole.reshape(-1)[rows.origin])
  unpacked_rows = unpacked_attention.unpack_rows(rows, segment_ids)
  score = functools.partial(
    model.policy_outputs,
    prefix_ids=rows.prefix_ids,
    positions=rows.positions,
    attend_with=functools.partial(unpacked_attention.attend, unpacked_rows, rows)
    if unpacked
    else None,
  )
  logprobs = jax.jit(score)(params, packed, rows.segment_ids).logprobs
  wanted = logprobs_of(model, params, whole, segment_ids)
  for row, length in enumerate(lengths):
    at = rows.place[row, 8:length]
    close(np.asarray(logprobs).reshape(-1)[at], wanted[row, 8:length])


@every_kind
def test_a_tree_is_seen_by_all_its_branches(name):
  """Three sequences share 7 tokens in one row, and two of them 2 more."""
  config, params = cases.ours(name)
  model = TransformerLM(config)
  whole = cases.tokens(3, 12)
  whole[:, :7], whole[1, :9] = whole[0, :7], whole[0, :9]
  columns = [np.r_[:12], np.r_[:9, 12:14], np.r_[:7, 14:16]]
  tokens, previous, positions = np.zeros((3, 1, 16), np.int32)
  for row, path in enumerate(columns):
    tokens[0, path], positions[0, path] = whole[row, : len(path)], np.arange(len(path))
    previous[0, path] = [-1, *path[:-1]]
  ends = np.repeat(np.int32([16, 14, 12, 14, 16]), [7, 2, 3, 2, 2])[None]
  tree, ones = TokenTree(previous, ends), np.ones((1, 16), np.int32)
  score = functools.partial(model.policy_outputs, positions=positions, tree=tree)
  if config.has_linear_attention:
    with pytest.raises(ValueError, match='no state at the forks'):
      score(params, tokens, ones)
    return
  logprobs = jax.jit(score)(params, tokens, ones).logprobs[0]
  wanted = logprobs_of(model, params, whole)
  for row, path in enumerate(columns):
    close(logprobs[path], wanted[row, : len(path)])


@pytest.mark.parametrize(
  ('remat', 'name'),
  [
    *((slow if name in GATE else extended)('full', name) for name in cases.DISTINCT),
    ('dots', 'qwen3-moe'),
  ],
)
def test_rematerialization_changes_nothing(remat, name):
  config, params = cases.ours(name)
  model, tokens = TransformerLM(config, unroll=1), cases.tokens(4, 20)
  wanted = plain(model, params, tokens)
  result = plain(dataclasses.replace(model, remat=remat), params, tokens)
  jax.tree.map(close, result, wanted)


def on_devices(name, sizes, tokens, **options):
  config, params = cases.ours(name)
  model = TransformerLM(config, unroll=1)
  mesh = make_mesh(MeshOptions(**{'data': 1} | sizes))
  layout = sharding.params_sharding(mesh, model.logical_axes(), params)
  there = jax.tree.map(jax.device_put, params, layout)
  return plain(on_mesh(model, mesh), there, tokens, **options)


@every_kind
def test_eight_devices_equal_one(name):
  config, params = cases.ours(name)
  tokens = cases.tokens(4, 20)
  wanted = plain(TransformerLM(config, unroll=1), params, tokens)
  result = on_devices(name, {'data': 2, 'fsdp': 2, 'tensor': 2}, tokens)
  jax.tree.map(close, result, wanted)


@every_kind
def test_rows_are_split_over_devices_or_that_is_refused(name):
  config, params = cases.ours(name)
  tokens = cases.tokens(4, 20)
  split = functools.partial(on_devices, name, {'context': 4, 'fsdp': 2}, tokens)
  if obstacle := cases.CASES[name].context_obstacle:
    with pytest.raises(ConfigError, match=f'does not take {obstacle}') as error:
      split()
    assert 'context=4' in str(error.value) and '\n' not in str(error.value)
    return
  wanted = plain(TransformerLM(config, unroll=1), params, tokens)
  jax.tree.map(close, split(), wanted)


@with_experts
def test_experts_are_split_over_devices(name):
  config, params = cases.ours(name)
  tokens = cases.tokens(4, 20)
  wanted = plain(TransformerLM(config, unroll=1), params, tokens)
  result = on_devices(name, {'expert': 2, 'fsdp': 2, 'tensor': 2}, tokens)
  jax.tree.map(close, result, wanted)


def decoded(model, params, tokens, lengths, width, steps):
  """Logits `[steps + 1, rows, V]` and the cache, a slot for each row."""
  last, kept = jax.jit(model.prefill)(params, tokens[:, :width], lengths)
  cache = jax.jit(model.init_cache, static_argnums=(0, 1))(len(lengths), 64)
  rows = np.arange(len(lengths))
  cache = jax.jit(kv_cache.insert)(cache, kept, rows, rows)
  decode, out = jax.jit(model.decode), [last]
  for step in range(steps):
    fed = tokens[np.arange(len(lengths)), lengths + step]
    last, cache = decode(params, cache, fed, lengths + step, np.int32(64))
    out.append(last)
  return np.stack(out), cache


LENGTHS = np.array([20, 5, 24], np.int32)


@every_kind
def test_exact_mode_gives_the_same_bits(name):
  config, params = cases.ours(name)
  if config.vision is not None:
    with pytest.raises(ValueError, match='does not compute models that see images'):
      TransformerLM(config, exact=Exact(rows=8))
    return
  model = TransformerLM(config, exact=Exact(rows=8))
  tokens = cases.tokens(3, 30)
  logits, _ = decoded(model, params, tokens, LENGTHS, width=24, steps=5)
  ones = np.ones_like(tokens)
  outputs = jax.jit(model.policy_outputs)(params, tokens, ones)
  for row, length in enumerate(LENGTHS):
    following = jnp.asarray(tokens[row, length : length + 6])
    exact = model.exact.logprobs(jnp.asarray(logits[:, row]), following, jnp.ones(6))
    np.testing.assert_array_equal(exact, outputs.logprobs[row, length : length + 6])
  close(outputs.logprobs, logprobs_of(TransformerLM(config), params, tokens))


@with_experts
def test_routes_of_decode_are_replayed(name):
  config, params = cases.ours(name)
  model = TransformerLM(config, router_replay=True)
  tokens = cases.tokens(3, 30)
  _, cache = decoded(model, params, tokens, LENGTHS, width=24, steps=5)
  rows = np.stack([kv_cache.experts_of(cache, slot)[:30] for slot in range(3)])
  known = np.arange(30) < LENGTHS[:, None] + 5
  routed = np.where(known[..., None, None], rows, -1)
  is_sparse = np.array([layer.num_experts > 0 for layer in config.layer_configs])
  assert routed[known][:, is_sparse].min() >= 0
  assert (routed[known][:, ~is_sparse] == -1).all()
  free = plain(model, params, tokens)
  same = plain(model, params, tokens, routed_experts=routed)
  jax.tree.map(close, same, free)
  turned = plain(
    model, params, tokens, routed_experts=np.where(routed < 0, -1, (routed + 1) % 4)
  )
  assert np.abs(turned[0] - free[0]).max() > 1e-3


@every_kind
def test_adapters_of_every_linear_layer(name):
  """Merged they compute the same, and only they have gradients."""
  config, params = cases.ours(name)
  targets = ['q', 'k', 'v', 'o', 'gate', 'up', 'down']
  targets += ['router'] if config.num_experts else []
  targets += [] if config.tie_embeddings else ['lm_head']
  if config.has_linear_attention:
    targets += ['output_gate', 'beta', 'decay']
  adapters = lora.lora_adapters(rank=2, alpha=3.0, targets=','.join(targets))
  model = TransformerLM(config.replace(lora=adapters), unroll=1)
  adapted = lora.add_adapters(model, params, jax.random.key(0))
  draw = np.random.default_rng(0)

  def moved(path, x):
    is_b = path[-1].key == 'lora_b'
    return np.float32(x + 0.1 * draw.standard_normal(x.shape) * is_b)

  adapted = jax.tree_util.tree_map_with_path(moved, jax.device_get(adapted))
  tokens = cases.tokens(4, 20)
  part = lora.trainable_params(model.config, adapted)

  def total(part):
    whole = lora.merge_trainable(model.config, adapted, part)
    logprobs = model.policy_outputs(whole, tokens, jnp.ones_like(tokens)).logprobs
    return logprobs.sum(), logprobs

  slopes, logprobs = jax.jit(jax.grad(total, has_aux=True))(part)
  for path, slope in jax.tree_util.tree_leaves_with_path(slopes):
    assert np.abs(slope).max() > 0, path
  without = TransformerLM(config, unroll=1)
  merged = jax.jit(functools.partial(lora.merged, model.config))(adapted)
  close(logprobs, logprobs_of(without, merged, tokens))
  assert np.abs(logprobs - logprobs_of(without, params, tokens)).max() > 0.01
