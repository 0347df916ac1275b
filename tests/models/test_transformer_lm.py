"""The forward pass and its log-probs: alignment, padding, packing, remat, dtypes."""

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jaxrl.functional import entropy
from jaxrl.models.exact_mode import Exact
from jaxrl.models.model_config import ModelConfig
from jaxrl.models.transformer_lm import TransformerLM
from jaxrl.training.parallelism.mesh import MeshOptions, make_mesh
from jaxrl.training.parallelism.sharding import ShardingConstraint
from tests.marks import slow_except
from tests.models import small

FAMILIES = {
  'qwen3': {},
  'qwen2': {'family': 'qwen2', 'qk_norm': False, 'attention_bias': True},
  'llama': {'family': 'llama', 'qk_norm': False, 'tie_embeddings': False},
}


# One compilation instead of one for every operation.
def outputs(model, *args, **options):
  static = ('entropy', 'nec', 'top_k')
  return jax.jit(model.policy_outputs, static_argnames=static)(*args, **options)


def hidden(model, *args):
  return jax.jit(model.hidden)(*args)


@pytest.fixture(scope='module')
def qwen3():
  return small.model_and_params(value_head=True)


def test_column_t_speaks_of_token_t(qwen3):
  model, params = qwen3
  tokens = small.tokens(2, 9)
  ones = np.ones_like(tokens)
  out = outputs(model, params, tokens, ones, temperature=0.7, entropy=True)
  states = np.asarray(hidden(model, params, tokens, ones), np.float64)
  logits = states @ np.asarray(params['embedding']['table'], np.float64).T

  def log_softmax(x):
    return x - np.log(np.exp(x).sum(-1, keepdims=True))

  for row in range(2):
    assert out.logprobs[row, 0] == out.entropy[row, 0] == out.values[row, 0] == 0
    for t in range(1, 9):
      before = logits[row, t - 1]
      logprob = log_softmax(before / 0.7)[tokens[row, t]]
      log_p = log_softmax(before)
      head = params['value_head']
      value = states[row, t - 1] @ np.asarray(head['kernel']) + head['bias']
      np.testing.assert_allclose(out.logprobs[row, t], logprob, atol=1e-4)
      np.testing.assert_allclose(
        out.entropy[row, t], -(np.exp(log_p) * log_p).sum(), atol=1e-4
      )
      np.testing.assert_allclose(out.values[row, t], value, atol=1e-4)
  plain = outputs(model, params, tokens, ones, temperature=0.7)
  assert plain.entropy is None
  np.testing.assert_array_equal(plain.logprobs, out.logprobs)


def test_alternatives_stand_in_the_place_of_token_t(qwen3):
  model, params = qwen3
  tokens = small.tokens(2, 9)
  segments = np.array([[1] * 9, [1] * 4 + [2] * 3 + [0] * 2])
  alternatives = small.tokens(2, 9, 3, seed=5)
  alternatives[..., 1] = tokens
  out = outputs(
    model, params, tokens, segments, temperature=0.7, nec=True, topk_ids=alternatives
  )
  assert out.topk_logprobs.shape == (2, 9, 3) and out.topk_ids is None
  np.testing.assert_allclose(out.topk_logprobs[..., 1], out.logprobs, atol=1e-5)
  first = np.array([[1] + [0] * 8, [1, 0, 0, 0, 1, 0, 0, 1, 1]], bool)
  for x in (out.logprobs, out.nec, out.topk_logprobs):
    assert (np.asarray(x)[first] == 0).all() and (np.asarray(x)[~first] != 0).all()

  # Another token in the place of t leaves the states before t as they are.
  changed = tokens.copy()
  changed[0, 5] = alternatives[0, 5, 0]
  other = outputs(model, params, changed, segments, temperature=0.7)
  np.testing.assert_allclose(
    out.topk_logprobs[0, 5, 0], other.logprobs[0, 5], atol=1e-5
  )

  logits = model.logits(params, hidden(model, params, tokens, segments))
  expected = entropy.nec(logits)[:, :-1]
  np.testing.assert_allclose(
    np.asarray(out.nec)[:, 1:][~first[:, 1:]], expected[~first[:, 1:]], atol=1e-5
  )
  best = outputs(model, params, tokens, segments, temperature=0.7, top_k=67)
  assert best.topk_ids.dtype == jnp.int32
  mass = np.exp(np.asarray(best.topk_logprobs, np.float64)).sum(-1)
  np.testing.assert_allclose(mass[~first], 1, atol=1e-5)
  assert (np.diff(np.asarray(best.topk_logprobs)[~first]) <= 0).all()
  again = outputs(
    model, params, tokens, segments, temperature=0.7, topk_ids=best.topk_ids
  )
  np.testing.assert_allclose(again.topk_logprobs, best.topk_logprobs, atol=1e-5)


def test_alternatives_give_the_gradient_of_a_plain_softmax(qwen3):
  model, params = qwen3
  tokens, alternatives = small.tokens(2, 7), small.tokens(2, 7, 3, seed=5)
  segments = np.ones_like(tokens)

  def ours(params):
    out = model.policy_outputs(
      params, tokens, segments, temperature=0.7, nec=True, topk_ids=alternatives
    )
    return jnp.sin(out.topk_logprobs[:, 1:]).sum() + jnp.sin(9 * out.nec[:, 1:]).sum()

  def plain(params):
    logits = model.logits(params, model.hidden(params, tokens, segments))[:, :-1]
    logprobs = jax.nn.log_softmax(logits / 0.7)
    chosen = jnp.take_along_axis(logprobs, alternatives[:, 1:], -1)
    return jnp.sin(chosen).sum() + jnp.sin(9 * entropy.nec(logits)).sum()

  jax.tree.map(
    lambda a, b: np.testing.assert_allclose(a, b, rtol=1e-3, atol=1e-4),
    *(jax.jit(jax.grad(function))(params) for function in (ours, plain)),
  )


@pytest.mark.parametrize('family', slow_except(['qwen3'], FAMILIES))
def test_a_token_depends_on_none_after_it(family):
  model, params = small.model_and_params(**FAMILIES[family])
  tokens = small.tokens(1, 12)
  changed = tokens.copy()
  changed[0, 7] = (changed[0, 7] + 1) % 67
  ones = np.ones_like(tokens)
  one, other = (np.asarray(hidden(model, params, t, ones)) for t in (tokens, changed))
  np.testing.assert_array_equal(one[0, :7], other[0, :7])
  assert (np.abs(one - other)[0, 7:].max(-1) > 1e-4).all()


def test_packed_rows_equal_rows_of_their_own(qwen3):
  model, params = qwen3
  first, second = small.tokens(1, 6), small.tokens(1, 5, seed=1)
  packed = np.concatenate([first, second, np.zeros((1, 3), np.int32)], axis=1)
  segments = np.array([[1] * 6 + [2] * 5 + [0] * 3])
  out = outputs(model, params, packed, segments, entropy=True)
  for part, start in ((first, 0), (second, 6)):
    alone = outputs(model, params, part, np.ones_like(part), entropy=True)
    for name in ('logprobs', 'entropy', 'values'):
      np.testing.assert_allclose(
        getattr(out, name)[:, start : start + part.shape[1]],
        getattr(alone, name),
        atol=2e-5,
      )
  for name in ('logprobs', 'entropy', 'values'):
    np.testing.assert_array_equal(getattr(out, name)[0, 11:], 0)


def test_padding_has_no_gradient_and_no_say():
  model, params = small.model_and_params(tie_embeddings=False)
  tokens = small.tokens(2, 8) % 60
  segments = np.array([[1] * 8, [1] * 5 + [0] * 3])
  tokens[1, 5:] = [61, 62, 63]  # tokens found nowhere but in the padding

  def score(params, tokens):
    out = model.policy_outputs(params, tokens, segments)
    return (out.logprobs * jnp.arange(8.0)).sum()

  differentiate = jax.jit(jax.grad(score))
  gradient = differentiate(params, tokens)
  table = np.asarray(gradient['embedding']['table'])
  np.testing.assert_array_equal(table[61:64], 0)
  assert np.abs(table[tokens[0, :-1]]).max(-1).min() > 0
  other = tokens.copy()
  other[1, 5:] = [3, 64, 9]
  for left, right in zip(
    jax.tree.leaves(gradient),
    jax.tree.leaves(differentiate(params, other)),
    strict=True,
  ):
    np.testing.assert_array_equal(left, right)


@pytest.mark.slow
@pytest.mark.extended
def test_remat_and_unrolling_change_no_gradient(qwen3):
  model, params = qwen3
  tokens = small.tokens(2, 8)

  def gradient(**changes):
    this = dataclasses.replace(model, **changes)

    def score(params):
      return this.policy_outputs(params, tokens, np.ones_like(tokens)).logprobs.sum()

    return jax.jit(jax.grad(score))(params)

  plain = gradient()
  named = [{'remat': name} for name in ('full', 'dots', 'dots_batch')]
  for changes in (*named, {'unroll': 1}, {'unroll': 2}):
    jax.tree.map(
      lambda a, b: np.testing.assert_allclose(a, b, atol=2e-4),
      plain,
      gradient(**changes),
    )


@pytest.mark.parametrize(
  ('layers', 'changes', 'expected'),
  [
    (3, {}, 3),
    (9, {}, 1),
    (3, {'unroll': 2}, 2),
    (3, {'remat': 'full'}, 1),
    (3, {'platform': 'tpu'}, 1),
    (3, {'exact': Exact.for_slots(4)}, 1),
  ],
)
def test_shallow_models_on_one_cpu_are_unrolled(layers, changes, expected):
  model = TransformerLM(small.config(num_layers=layers), **changes)
  assert model.scan_unroll == expected
  for devices in (1, 2):
    constrain = ShardingConstraint(
      make_mesh(MeshOptions(data=devices), devices=jax.devices()[:devices])
    )
    placed = dataclasses.replace(model, constrain=constrain)
    assert placed.scan_unroll == (expected if devices == 1 else model.unroll or 1)


@pytest.mark.slow
def test_bfloat16_is_near_float32(qwen3):
  model, params = qwen3
  tokens = small.tokens(2, 8)
  narrow = dataclasses.replace(model, dtype='bfloat16')
  assert hidden(narrow, params, tokens, np.ones_like(tokens)).dtype == jnp.bfloat16
  out, near = (outputs(m, params, tokens, tokens * 0 + 1) for m in (model, narrow))
  assert near.logprobs.dtype == jnp.float32
  np.testing.assert_allclose(out.logprobs, near.logprobs, atol=0.5)


@pytest.mark.parametrize('family', FAMILIES)
def test_every_axis_has_a_name(family):
  model, params = small.model_and_params(value_head=True, **FAMILIES[family])
  axes = model.logical_axes()
  sizes = {'layers': 3, 'vocab': 67, 'embed': 24, 'embedding': 24, 'mlp': 40}
  sizes |= {'heads': 4, 'kv_heads': 2}

  def check(leaf, names):
    assert len(names) == leaf.ndim
    for name, size in zip(names, leaf.shape, strict=True):
      assert name is None or sizes[name] == size

  jax.tree.map(check, params, axes)


def test_constrain_sees_every_activation():
  seen = set()

  def constrain(x, *names):
    assert x.ndim == len(names)
    seen.update(names)
    return x

  model, params = small.model_and_params()
  model = dataclasses.replace(model, constrain=constrain, kernels='reference')
  jax.eval_shape(model.policy_outputs, params, *[small.tokens(2, 8)] * 2)
  assert seen >= {'batch', 'length', 'heads', 'kv_heads', 'mlp'}


def test_shapes_are_told_without_memory():
  model = TransformerLM(small.config(vocab_size=10**8, hidden_size=2**14, num_layers=2))
  params = jax.eval_shape(model.init, jax.random.key(0))
  assert params['embedding']['table'].shape == (10**8, 2**14)  # 6.5 terabytes
  out = jax.eval_shape(model.hidden, params, *[small.tokens(1, 4)] * 2)
  assert out.shape == (1, 4, 2**14)
  assert model.logical_axes()['embedding']['table'] == ('vocab', 'embedding')


def test_model_is_hashable_and_init_is_a_function_of_its_key():
  model, _ = small.model_and_params()
  assert hash(model) == hash(TransformerLM(small.config()))
  one, same, other = (model.init(jax.random.key(seed)) for seed in (0, 0, 1))
  jax.tree.map(np.testing.assert_array_equal, one, same)
  assert (one['embedding']['table'] != other['embedding']['table']).all()
  layers = one['layers']['mlp']['up']['kernel']
  assert (layers[0] != layers[1]).all()


@pytest.mark.parametrize(
  ('changes', 'message'),
  [
    ({'family': 'gpt'}, "no family 'gpt'"),
    ({'num_kv_heads': 3}, 'must be a multiple'),
    ({'head_dim': 15}, 'must be even'),
    ({'family': 'llama'}, 'needs qk_norm=False'),
    ({'family': 'qwen2', 'qk_norm': False}, 'needs attention_bias=True'),
  ],
)
def test_impossible_shapes_are_refused(changes, message):
  with pytest.raises(ValueError, match=message):
    small.config(**changes)
  with pytest.raises(ValueError, match='remat'):
    TransformerLM(small.config(), remat='some')
  assert isinstance(small.config(), ModelConfig)


def test_responses_may_share_their_prompt(qwen3):
  """[a b][c d e][c f] with [a b] seen by both is a b c d e and a b c f."""
  model, params = qwen3
  long, short = [5, 9, 2, 7, 1], [5, 9, 2, 8]
  alone = [
    outputs(model, params, np.array([row]), np.ones((1, len(row)), np.int32))
    for row in (long, short)
  ]
  shared = outputs(
    model,
    params,
    np.array([[5, 9, 2, 7, 1, 2, 8]]),
    np.array([[1, 1, 2, 2, 2, 3, 3]]),
    prefix_ids=np.array([[0, 0, 1, 1, 1, 1, 1]]),
    positions=np.array([[0, 1, 2, 3, 4, 2, 3]]),
  )
  for name in ('logprobs', 'values'):
    one, two = (getattr(x, name)[0] for x in alone)
    values = getattr(shared, name)[0]
    expected = [0, one[1], 0, one[3], one[4], 0, two[3]]
    np.testing.assert_allclose(values, expected, atol=1e-5)


def test_a_cpu_computes_cosines_once_for_all_layers_and_heads():
  model, params = small.model_and_params()
  assert model.is_shallow  # so that its layers are unrolled
  rows = small.tokens(2, 12)

  def loss(params):
    return model.hidden(params, rows, np.ones_like(rows)).sum()

  compiled = jax.jit(jax.grad(loss)).lower(params).compile().as_text()
  for function in ('cosine', 'sine'):
    assert compiled.count(f' {function}(') == 1
