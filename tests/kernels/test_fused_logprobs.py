"""Each platform's log-probs, kernels interpreted, against float64; in shards too."""

import functools
import re

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import Mesh

from kernels import dispatch
from kernels.fused_logprobs import LogprobShards
from kernels.token_logprobs import token_logprobs
from tests.marks import NEEDS_COMPILER, slow, slow_except

HOMES = {'mosaic': 'tpu', 'kept': 'gpu', 'tiles': 'gpu'}
ANY_TABLE = {**HOMES, 'native': 'cpu'}  # native needs a C compiler, or is the reference
EVERYWHERE = {**ANY_TABLE, 'reference': 'cpu'}


def inputs(shape, dtype=jnp.float32, scale=1.0):
  batch, length, width, vocab = shape
  keys = jax.random.split(jax.random.key(0), 3)
  hidden = scale * jax.random.normal(keys[0], (batch, length, width)) / width**0.5
  table = jax.random.normal(keys[1], (vocab, width))
  targets = jax.random.randint(keys[2], (batch, length), 0, vocab)
  return hidden.astype(dtype), table, targets


def weights(targets, learned=3):
  """Of log-probs, entropy and nec; only the first `learned` are not 0."""
  drawn = np.random.default_rng(1).normal(size=(3, *targets.shape))
  return drawn * (np.array([1.0, 0.5, 30.0]) * (np.arange(3) < learned))[:, None, None]


def kernel(name, arrays, temperature=0.8, learned=3, **options):
  """Values and gradients, by states, table and temperature, of a weighted sum.

  learned: the sum is of the first so many of log-probs, entropy and nec.
  """
  hidden, table, targets = arrays
  options = options | {'kept_bytes': 0} if name == 'tiles' else options
  options = options | {'kernels': name} if name == 'reference' else options

  def total(hidden, table, temperature):
    scores = token_logprobs(
      hidden,
      table,
      targets,
      temperature=temperature,
      entropy=True,
      nec=True,
      platform=EVERYWHERE[name],
      interpret=True,
      **options,
    )
    values = scores.logprobs, scores.entropy, scores.nec
    pairs = zip(weights(targets)[:learned], values[:learned], strict=True)
    return sum((jnp.float32(w) * x).sum() for w, x in pairs), values

  run = jax.jit(jax.value_and_grad(total, argnums=(0, 1, 2), has_aux=True))
  (_, outputs), gradient = run(hidden, table, temperature)
  return (*outputs, *gradient)


def exactly(arrays, temperature=0.8, learned=3):
  """The same in float64 numpy, by the formulas of softmax."""
  hidden, table, targets = (np.asarray(x, np.float64) for x in arrays)
  targets = targets.astype(int)
  table = np.asarray(arrays[1].astype(arrays[0].dtype), np.float64)
  z = hidden @ table.T
  hit = np.eye(len(table))[targets]

  def softmax(z):
    log = z - z.max(-1, keepdims=True)
    log = log - np.log(np.exp(log).sum(-1, keepdims=True))
    return np.exp(log), log

  (cool, log_cool), (p, log_p) = softmax(z / temperature), softmax(z)
  entropy = -(p * log_p).sum(-1)
  delta = log_p + entropy[..., None]
  nec, square = (p * p * delta).sum(-1), (p * p).sum(-1, keepdims=True)
  a, b, c = (w[..., None] for w in weights(targets, learned))
  dz = a * (hit - cool) / temperature - b * p * delta
  dz += c * (p * p * (1 + 2 * delta) - p * (2 * nec[..., None] + square))
  dz -= c * square * p * delta
  tau = (a * (cool - hit) * z).sum() / temperature**2
  logprobs = (log_cool * hit).sum(-1)
  of_hidden, of_table = dz @ table, np.einsum('btv,btd->vd', dz, hidden)
  return logprobs, entropy, nec, of_hidden, of_table, tau


def assert_close(actual, wanted, rtol):
  for x, y in zip(actual, wanted, strict=True):
    x = np.asarray(x, np.float64)
    np.testing.assert_allclose(x, y, rtol=rtol, atol=rtol * np.abs(y).max())


# Neither rows nor vocabulary fill their blocks, and both take several.
@pytest.mark.parametrize(
  'shape', [(1, 1, 3, 5), (3, 23, 40, 300), slow((2, 8, 33, 1030))]
)
@pytest.mark.parametrize('name', EVERYWHERE)
def test_value_and_gradient_equal_float64(name, shape):
  arrays = inputs(shape)
  options = {'max_rows': 6} if name == 'reference' else {}
  assert_close(kernel(name, arrays, **options), exactly(arrays), 1e-5)


# Where entropy and nec are metrics alone, their gradient is not computed.
@pytest.mark.parametrize('temperature', [0.8, 0.05, 3.0])
@pytest.mark.parametrize('name', slow_except(['kept', 'tiles', 'native'], ANY_TABLE))
def test_what_is_not_learned_from_costs_no_gradient(name, temperature):
  arrays = inputs((3, 23, 40, 300))
  actual = kernel(name, arrays, temperature, learned=1)
  assert_close(actual, exactly(arrays, temperature, learned=1), 1e-5)


@pytest.mark.parametrize('temperature', [0.8, 0.05])
def test_kept_in_bfloat16_loses_no_small_probability(temperature):
  arrays = inputs((3, 23, 40, 300), jnp.bfloat16, scale=8.0)
  actual = kernel('kept', arrays, temperature, learned=1)
  wanted = exactly(arrays, temperature, learned=1)
  assert_close(actual[:3], wanted[:3], 2e-5)
  for x, y in zip(actual[3:5], wanted[3:5], strict=True):
    error = np.abs(np.asarray(x, np.float64) - y)
    assert error.max() < 5e-3 * np.abs(y).max()
    # Most rows of the table have small gradients, which are as precise.
    assert np.median(error) < 5e-3 * np.median(np.abs(y))


@pytest.mark.parametrize('dtype', [jnp.float32, slow(jnp.bfloat16)])
@pytest.mark.parametrize('name', EVERYWHERE)
def test_blocks_that_are_taken_in_turn(name, dtype, monkeypatch):
  from kernels import fused_logprobs_tpu, kept_softmax, token_logprobs

  monkeypatch.setattr(token_logprobs, 'VOCAB_BLOCK', 128)
  if name == 'native':
    monkeypatch.setattr(token_logprobs, 'MOST_LOGITS', 15 * 300)
  monkeypatch.setattr(kept_softmax, 'TILE_LOGITS', 15 * 300)
  monkeypatch.setattr(kept_softmax, 'TILE_MULTIPLE', 8)
  monkeypatch.setattr(fused_logprobs_tpu, 'block_sizes', lambda *_: (16, 128))
  arrays = inputs((3, 23, 40, 300), dtype)
  options = {'max_rows': 15} if name == 'reference' else {}
  actual, wanted = kernel(name, arrays, **options), exactly(arrays)
  assert_close(actual[:3], wanted[:3], 1e-5)
  assert_close(actual[3:], wanted[3:], 1e-5 if dtype == jnp.float32 else 1e-2)


@pytest.mark.parametrize('name', EVERYWHERE)
def test_narrow_states_are_summed_wide(name):
  arrays = inputs((3, 23, 40, 300), jnp.bfloat16)
  actual, wanted = kernel(name, arrays), exactly(arrays)
  assert_close(actual[:3], wanted[:3], 1e-5)  # the logits are of the narrow inputs
  assert_close(actual[3:], wanted[3:], 1e-2)
  assert actual[3].dtype == jnp.bfloat16


@pytest.mark.parametrize('name', slow_except(['kept', 'native'], ANY_TABLE))
def test_huge_logits_stay_finite(name):
  arrays = inputs((2, 9, 40, 300), scale=1e5)
  assert all(np.isfinite(x).all() for x in kernel(name, arrays))
  arrays = inputs((2, 9, 40, 300), scale=30.0)
  assert_close(kernel(name, arrays)[:3], exactly(arrays)[:3], 2e-5)


@pytest.mark.parametrize('name', slow_except(['mosaic', 'kept'], HOMES))
def test_shards_of_rows_and_table_change_nothing(name):
  mesh = Mesh(np.array(jax.devices()[:4]).reshape(2, 2), ('fsdp', 'tensor'))
  shards = LogprobShards(mesh, ('fsdp',), (), ('tensor',))
  arrays = inputs((2, 9, 40, 300))
  assert_close(kernel(name, arrays, shards=shards), exactly(arrays), 1e-5)


@pytest.mark.parametrize('dtype, rtol', [(jnp.float32, 1e-5), (jnp.bfloat16, 1e-2)])
def test_a_shard_without_any_likely_token_keeps_the_gradient_of_its_targets(
  dtype, rtol
):
  """Half of the targets are in the shard whose logits are all about 150 lower."""
  mesh = Mesh(np.array(jax.devices()[:2]), ('tensor',))
  hidden, table, targets = inputs((2, 9, 40, 300))
  hidden = hidden.at[..., 0].set(1.0)
  table = table.at[:, 0].set(jnp.where(jnp.arange(300) < 150, 0.0, -150.0))
  arrays = hidden.astype(dtype), table, targets
  shards = LogprobShards(mesh, vocab=('tensor',))
  actual = kernel('kept', arrays, 0.5, learned=1, shards=shards)
  wanted = exactly(arrays, 0.5, learned=1)
  assert_close(actual[3:5], wanted[3:5], rtol)
  # Probabilities of e^-300 are replaced by at most e^-30 of the shard's largest.
  improbable = np.unique(np.asarray(targets)[np.asarray(targets) >= 150])
  assert len(improbable) > 3
  for entry in improbable:
    y = wanted[4][entry]
    np.testing.assert_allclose(actual[4][entry], y, atol=rtol * np.abs(y).max())


@NEEDS_COMPILER
@pytest.mark.parametrize('temperature', [1.0, 0.8])
def test_a_cpu_that_scores_alone_keeps_nothing(temperature, monkeypatch):
  """Without a gradient, a tile of rows at a time, with the same bits."""
  from kernels.native import row_softmax

  hidden, table, targets = inputs((3, 23, 40, 300))
  options = {'temperature': temperature, 'entropy': True, 'nec': True}
  score = functools.partial(token_logprobs, **options)
  whole = jax.jit(score)(hidden, table, targets)
  monkeypatch.setattr(row_softmax, 'TILE_LOGITS', 15 * 300)
  program = jax.jit(functools.partial(score)).lower(hidden, table, targets).compile()
  tiles = program(hidden, table, targets)
  wanted = exactly((hidden, table, targets), temperature)
  for scores in (whole, tiles):
    assert_close((scores.logprobs, scores.entropy, scores.nec), wanted[:3], 1e-5)
  assert program.memory_analysis().temp_size_in_bytes < 2 * 3 * 23 * 300


@pytest.mark.parametrize('kernels', ['auto', 'reference'])
def test_a_batch_of_batches(kernels):
  """Under vmap, as a user may call it on a CPU."""
  hidden, table, targets = inputs((3, 23, 40, 300))
  score = functools.partial(token_logprobs, kernels=kernels)

  def total(hidden, targets):
    return score(hidden[None], table, targets[None]).logprobs.sum()

  run = jax.vmap(jax.value_and_grad(total))
  values, gradients = jax.jit(run)(hidden, targets)
  for i in range(3):
    value, gradient = jax.value_and_grad(total)(hidden[i], targets[i])
    np.testing.assert_allclose(values[i], value, rtol=1e-5)
    np.testing.assert_allclose(gradients[i], gradient, rtol=1e-4, atol=1e-6)


@NEEDS_COMPILER
def test_a_cpu_keeps_one_array_as_large_as_the_logits():
  hidden, table, targets = inputs((4, 64, 16, 4000))

  def total(hidden, table):
    return token_logprobs(hidden, table, targets, entropy=True).logprobs.sum()

  program = jax.jit(jax.grad(total, argnums=(0, 1))).lower(hidden, table).compile()
  logits = 4 * 4 * 64 * 4000
  assert logits <= program.memory_analysis().temp_size_in_bytes < 1.3 * logits
  assert program.as_text().count('jaxrl_keep_softmax') == 1


@NEEDS_COMPILER
@pytest.mark.parametrize(
  'change, why',
  [
    ({}, ''),
    ({'dtype': jnp.bfloat16}, 'takes float32, not bfloat16'),
    ({'vocab': 1 << 24}, 'keeps 256 MiB, not 4416'),
    ({'softcap': 30.0}, 'does not take softcap'),
  ],
)
def test_when_a_cpu_keeps_the_softmax(change, why, caplog):
  vocab, dtype = change.pop('vocab', 300), change.pop('dtype', jnp.float32)
  shapes = (3, 23, 4), (vocab, 4), (3, 23)
  kinds = dtype, jnp.float32, jnp.int32
  arrays = [jax.ShapeDtypeStruct(*x) for x in zip(shapes, kinds, strict=True)]
  dispatch.reset_choice_log()
  with caplog.at_level('INFO', logger='kernels.dispatch'):
    jax.eval_shape(functools.partial(token_logprobs, **change), *arrays)
  (line,) = caplog.messages
  chosen = 'reference' if why else 'native'
  assert line.startswith(f'token_logprobs on cpu: {chosen} (')
  assert not why or f'native {why}' in line


def test_shards_of_the_table_exchange_eight_numbers_a_token():
  mesh = Mesh(np.array(jax.devices()[:4]), ('tensor',))
  hidden, table, targets = inputs((2, 9, 40, 300))

  def score(hidden, table):
    options = {'platform': 'gpu', 'interpret': True, 'entropy': True, 'nec': True}
    shards = LogprobShards(mesh, vocab=('tensor',))
    return token_logprobs(hidden, table, targets, shards=shards, **options)

  text = jax.jit(score).lower(hidden, table).compile().as_text()
  collectives = re.findall(
    r'= (\S+)\{\S+ (all-\S+|reduce-scatter|collective-\S+)\(', text
  )
  assert collectives == [('f32[4,8,18,1]', 'all-gather')]


def test_what_shards_do_not_divide_is_told():
  mesh = Mesh(np.array(jax.devices()[:2]), ('tensor',))
  hidden, table, _ = inputs((1, 2, 4, 5))
  why = LogprobShards(mesh, vocab=('tensor',)).obstacle(hidden, table)
  assert why == "needs entries that mesh axes ('tensor',) divide, not 5"
