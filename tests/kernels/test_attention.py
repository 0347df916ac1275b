"""Attention against a loop over queries in numpy."""

import functools
import itertools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from kernels.attention import attention, decode_attention, reference_attention
from tests.marks import slow


def one_query(q, keys, values):
  """q `[d]`, keys and values `[n, d]`, in float64."""
  scores = keys @ q / np.sqrt(len(q))
  weights = np.exp(scores - scores.max())
  return weights @ values / weights.sum()


def random(*shape, seed=0):
  return np.random.default_rng(seed).normal(size=shape)


@pytest.mark.parametrize(
  'heads, block, stretches', [(4, 9, 1), (6, 4, 8), (2, 2, 2), (4, 2, 1)]
)
def test_attention_within_segments(heads, block, stretches):
  batch, length, kv_heads, dim = 2, 9, 2, 6
  q = random(batch, length, heads, dim)
  k, v = random(2, batch, length, kv_heads, dim, seed=1)
  segments = np.array([[1] * 4 + [2] * 3 + [0] * 2, [1] * 9])
  args = [jnp.asarray(x, jnp.float32) for x in (q, k, v)]
  run = functools.partial(reference_attention, block=block, stretches=stretches)
  out = jax.jit(run)(*args, jnp.asarray(segments))
  for b, t, h in np.ndindex(batch, length, heads):
    seen = [s for s in range(t + 1) if segments[b, s] == segments[b, t]]
    kv = h // (heads // kv_heads)
    expected = one_query(q[b, t, h], k[b, seen, kv], v[b, seen, kv])
    np.testing.assert_allclose(out[b, t, h], expected, atol=1e-5)


@pytest.mark.parametrize('block, stretches', [(12, 1), (4, 8), (2, 1)])
def test_a_prefix_is_seen_beside_the_own_segment(block, stretches):
  q = random(1, 12, 4, 6)
  k, v = random(2, 1, 12, 2, 6, seed=1)
  segments = np.array([[1, 1, 1, 2, 2, 3, 3, 4, 4, 4, 0, 0]])
  prefixes = np.array([[0, 0, 0, 1, 1, 1, 1, 0, 0, 0, 0, 0]])
  args = [jnp.asarray(x, jnp.float32) for x in (q, k, v)]
  ids = jnp.asarray(segments), jnp.asarray(prefixes)
  run = functools.partial(reference_attention, block=block, stretches=stretches)
  out = jax.jit(run)(*args, ids[0], prefix_ids=ids[1])
  for t, h in np.ndindex(12, 4):
    sees = {segments[0, t], prefixes[0, t] or segments[0, t]}
    seen = [s for s in range(t + 1) if segments[0, s] in sees]
    expected = one_query(q[0, t, h], k[0, seen, h // 2], v[0, seen, h // 2])
    np.testing.assert_allclose(out[0, t, h], expected, atol=1e-5)


@pytest.mark.parametrize('block, stretches', [(12, 1), (4, 8), (2, 1)])
@pytest.mark.parametrize('window', [0, 3])
def test_a_query_of_a_tree_sees_the_keys_that_it_descends_from(
  block, stretches, window
):
  """0 to 2, which 3 and 4, then 5, then 6 to 8 follow; 9 and 10 follow 5; padding."""
  q = random(1, 12, 4, 6)
  k, v = random(2, 1, 12, 2, 6, seed=1)
  parents = [-1, 0, 1, 2, 3, 2, 5, 6, 7, 5, 9, -1]
  seen = [[t] for t in range(12)]
  for t, parent in enumerate(parents):
    seen[t] = (seen[parent] if parent >= 0 else []) + [t]
  ends = jnp.asarray([[11, 11, 11, 5, 5, 11, 9, 9, 9, 11, 11, 12]])
  places = jnp.asarray([[len(path) - 1 for path in seen]])
  args = [jnp.asarray(x, jnp.float32) for x in (q, k, v)]
  run = functools.partial(reference_attention, block=block, stretches=stretches)
  run, ids = functools.partial(run, window=window), jnp.ones((1, 12), jnp.int32)
  out = jax.jit(run)(*args, ids, positions=places, key_ends=ends)
  through_choice = attention(
    *args, ids, positions=places, key_ends=ends, window=window, platform='gpu'
  )
  np.testing.assert_allclose(through_choice, out, atol=1e-5)
  for t, h in np.ndindex(12, 4):
    keys = seen[t][-window:]
    expected = one_query(q[0, t, h], k[0, keys, h // 2], v[0, keys, h // 2])
    np.testing.assert_allclose(out[0, t, h], expected, atol=1e-5)


RULES = {'window': 3, 'softcap': 0.7, 'scale': 0.9}


def ruled_query(q, keys, values, sink):
  """As `one_query`, with RULES and a sink, for the keys within the window."""
  scores = 0.7 * np.tanh(keys @ q * 0.9 / 0.7)
  weights = np.exp(scores)
  return weights @ values / (weights.sum() + np.exp(sink))


@pytest.mark.parametrize('block, stretches', [(12, 1), (4, 8), (2, 1)])
@pytest.mark.parametrize('shares', [False, True])
def test_windows_sinks_caps_and_scales(block, stretches, shares):
  """A shared prompt stands right before each of its responses."""
  q, sinks = random(1, 12, 4, 6), random(4, seed=3)
  k, v = random(2, 1, 12, 2, 6, seed=1)
  segments = np.array([[1, 1, 1, 2, 2, 3, 3, 4, 4, 4, 0, 0]])
  prefixes = np.array([[0, 0, 0, 1, 1, 1, 1, 0, 0, 0, 0, 0]]) * shares
  starts = [0, 3 * shares, 3 * shares, 0, 0]
  counts = np.bincount(segments[0])[[1, 2, 3, 4, 0]]
  places = np.concatenate(
    [np.arange(n) + a for n, a in zip(counts, starts, strict=True)]
  )
  prompt_options = {
    'positions': jnp.asarray(places[None]),
    'prefix_ids': jnp.asarray(prefixes),
  }
  args = [jnp.asarray(x, jnp.float32) for x in (q, k, v)]
  run = functools.partial(reference_attention, block=block, stretches=stretches)
  out = jax.jit(functools.partial(run, **RULES))(
    *args,
    jnp.asarray(segments),
    **(prompt_options if shares else {}),
    sinks=jnp.asarray(sinks, jnp.float32),
  )
  for t, h in np.ndindex(12, 4):
    sees = {segments[0, t], prefixes[0, t] or segments[0, t]}
    seen = [
      s for s in range(t + 1) if segments[0, s] in sees and places[t] - places[s] < 3
    ]
    expected = ruled_query(q[0, t, h], k[0, seen, h // 2], v[0, seen, h // 2], sinks[h])
    np.testing.assert_allclose(out[0, t, h], expected, atol=1e-5)


def test_a_window_beside_shared_prompts_needs_positions():
  x, ids = jnp.zeros((1, 4, 2, 6)), jnp.ones((1, 4), jnp.int32)
  with pytest.raises(ValueError, match='needs the positions'):
    attention(x, x, x, ids, prefix_ids=ids, window=2)
  with pytest.raises(ValueError, match='beside key_ends needs the positions'):
    attention(x, x, x, ids, key_ends=ids, window=2)


@pytest.mark.parametrize('ring', [8, 32])
def test_decode_within_a_ring(ring):
  """The key at position p is at p modulo the ring's length."""
  positions = np.array([0, 5, 7, 22])
  q, sinks = random(4, 4, 6), random(4, seed=3)
  k, v = random(2, 4, 24, 2, 6, seed=1)
  held = np.full((2, 4, ring, 2, 6), 9.0)  # stale
  for s, last in enumerate(positions):
    for p in range(last + 1):
      held[:, s, p % ring] = k[s, p], v[s, p]
  keys, values = (jnp.asarray(x.swapaxes(1, 2), jnp.float32) for x in held)
  out = jax.jit(functools.partial(decode_attention, **RULES))(
    jnp.asarray(q, jnp.float32),
    jnp.split(keys.swapaxes(2, 3), [ring // 2], axis=3),
    jnp.split(values, [ring // 2], axis=2),
    jnp.asarray(positions),
    jnp.int32(23),
    sinks=jnp.asarray(sinks, jnp.float32),
  )
  for s, h in np.ndindex(4, 4):
    seen = slice(max(0, positions[s] - 2), positions[s] + 1)
    expected = ruled_query(q[s, h], k[s, seen, h // 2], v[s, seen, h // 2], sinks[h])
    np.testing.assert_allclose(out[s, h], expected, atol=1e-5)


@pytest.mark.parametrize('block, stretches', [(4, 8), (2, 2)])
def test_queries_in_blocks_have_the_same_gradient(block, stretches):
  args = [jnp.asarray(random(2, 9, h, 6, seed=h), jnp.float32) for h in (4, 2, 2)]
  segments = jnp.asarray([[1] * 4 + [2] * 3 + [0] * 2, [1] * 9])

  def gradient(**sizes):
    def total(q, k, v):
      return (reference_attention(q, k, v, segments, **sizes) ** 2).sum()

    return jax.jit(jax.grad(total, argnums=(0, 1, 2)))(*args)

  whole, parts = gradient(block=9), gradient(block=block, stretches=stretches)
  jax.tree.map(lambda a, b: np.testing.assert_allclose(a, b, atol=1e-5), whole, parts)


def test_short_sequences_see_no_keys_beyond_a_run_of_queries():
  args = [jnp.asarray(random(2, 70, h, 6, seed=h), jnp.float32) for h in (4, 2, 2)]
  ids = np.ones((2, 70), np.int32)
  ids[1, 20:] = 2

  def gradient(**sizes):
    def total(q, k, v):
      return (reference_attention(q, k, v, jnp.asarray(ids), **sizes) ** 2).sum()

    return jax.jit(jax.value_and_grad(total, argnums=(0, 1, 2)))

  run = gradient()  # of 32, 32 and 6 queries
  for a, b in zip(
    jax.tree.leaves(run(*args)), jax.tree.leaves(gradient(block=35)(*args)), strict=True
  ):
    np.testing.assert_allclose(a, b, atol=1e-4)
  text = str(jax.make_jaxpr(run)(*args)).replace(' ', '')
  assert '[2,2,64,32]' in text and '[2,2,140,70]' not in text


@pytest.mark.parametrize(
  'length, differentiated',
  [(8192, False), slow(8300, True)],
)
def test_over_8000_tokens_in_one_call(length, differentiated):
  """Some queries of a row in float64, and gradients of a sum that weighs them alone.

  They are at the edges of blocks, of runs of queries, of segments and of padding.
  """
  heads, kv_heads, dim = 2, 1, 16
  ids = np.repeat([1, 2, 3, 4, 0], [5000, 1, 2500, 600, length - 8101])
  q = random(length, heads, dim)
  k, v = random(2, length, kv_heads, dim, seed=1)
  positions = [
    0,
    127,
    128,
    2047,
    2048,
    2176,
    4096,
    4999,
    5000,
    5001,
    7500,
    8100,
  ]
  weights = np.zeros(q.shape)
  weights[positions] = random(len(positions), heads, dim, seed=2)

  def run(q, k, v):
    out = attention(q[None], k[None], v[None], jnp.asarray(ids[None]))[0]
    return jnp.sum(out * weights), out

  inputs = [jnp.asarray(x, jnp.float32) for x in (q, k, v)]
  if differentiated:
    run = jax.value_and_grad(run, argnums=(0, 1, 2), has_aux=True)
    (_, out), gradients = jax.jit(run)(*inputs)
  else:
    (_, out), gradients = jax.jit(run)(*inputs), ()
  assert np.isfinite(out).all()  # at padding too, where it means nothing
  wanted = [np.zeros(x.shape) for x in (q, k, v)]
  for t, h in itertools.product(positions, range(heads)):
    seen = np.flatnonzero((ids == ids[t]) & (np.arange(length) <= t))
    keys, values, w = k[seen, 0], v[seen, 0], weights[t, h]
    scores = keys @ q[t, h] / np.sqrt(dim)
    p = np.exp(scores - scores.max())
    p /= p.sum()
    np.testing.assert_allclose(out[t, h], p @ values, atol=1e-5)
    slope = p * (values @ w - p @ values @ w) / np.sqrt(dim)  # by each product k·q
    wanted[0][t, h] = slope @ keys
    wanted[1][seen, 0] += slope[:, None] * q[t, h]
    wanted[2][seen, 0] += p[:, None] * w
  for gradient, right in zip(gradients, wanted, strict=False):
    np.testing.assert_allclose(gradient, right, atol=1e-5)


@pytest.mark.parametrize('limit', [40, 64])
def test_decode_attention_up_to_each_position(limit):
  slots, heads, kv_heads, dim = 3, 4, 2, 6
  q = random(slots, heads, dim)
  k, v = random(2, slots, kv_heads, 64, dim, seed=1)
  positions = np.array([0, 15, 39])
  narrow = [jnp.asarray(x, jnp.float32) for x in (q, k.swapaxes(2, 3), v)]
  k_chunks = jnp.split(narrow[1], [16, 48], axis=3)
  v_chunks = jnp.split(narrow[2], [16, 48], axis=2)
  out = jax.jit(decode_attention)(
    narrow[0], k_chunks, v_chunks, jnp.asarray(positions), jnp.int32(limit)
  )
  for s, h in np.ndindex(slots, heads):
    seen = slice(0, positions[s] + 1)
    expected = one_query(q[s, h], k[s, h // 2, seen], v[s, h // 2, seen])
    np.testing.assert_allclose(out[s, h], expected, atol=1e-5)


def test_a_long_sequence_is_not_held_square():
  length = 4096
  args = [jax.ShapeDtypeStruct((1, length, h, 16), jnp.float32) for h in (4, 2, 2)]
  segments = jax.ShapeDtypeStruct((1, length), jnp.int32)

  def total(q, k, v, segments):
    return reference_attention(q, k, v, segments).sum()

  grad = jax.jit(jax.grad(total, argnums=(0, 1, 2)))
  memory = grad.lower(*args, segments).compile().memory_analysis()
  assert memory.temp_size_in_bytes < 4 * length * length * 4 / 2
