"""Joined, packed and output-major matrices compute the same; adapters stay."""

import dataclasses
import math
import re

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jaxrl.device_thread import DeviceThread
from jaxrl.models import kv_cache, layer_stack
from jaxrl.models.decoding import joined_products, output_major, weight_layout
from jaxrl.models.lora import lora_adapters
from jaxrl.rollout.engine.jax_engine import JaxEngine
from kernels.native import row_product
from kernels.native.row_product import PanelMatrix
from tests.marks import NEEDS_COMPILER, slow
from tests.models import small

BIASES = {'family': 'qwen2', 'qk_norm': False, 'attention_bias': True}


@pytest.mark.parametrize(
  'changes, joined',
  [
    (BIASES, {'qkv', 'gate_up'}),
    slow(small.EXPERTS, {'qkv'}),
  ],
)
def test_prefill_and_decode_are_the_same(changes, joined):
  model, params = small.model_and_params(**changes)
  apart = layer_stack.unstack(model.config, params)
  one = joined_products.join(apart)
  layer = one['layers'][0]
  assert {*layer['attention'], *layer['mlp']} & {'qkv', 'gate_up'} == joined
  assert not {'q', 'k', 'v'} & layer['attention'].keys()
  sizes = [sum(x.size for x in jax.tree.leaves(tree)) for tree in (apart, one)]
  assert sizes[0] == sizes[1]
  results = [_prefill_and_decode(model, weights) for weights in (apart, one)]
  for a, b in zip(*results, strict=True):
    np.testing.assert_allclose(a, b, rtol=1e-5, atol=1e-5)


def _arrange(model, params, dtype):
  params = output_major.cast_tables(params, dtype)
  arrange_layer = output_major.arrange_layer
  return weight_layout.unstack_by_layer(model.config, params, arrange_layer, dtype)


def _pack(model, params, dtype, old=None):
  narrow = 'bfloat16' if dtype == 'bfloat16' else ''
  model = dataclasses.replace(model, weights_dtype=narrow)
  return weight_layout.arrange(model, None, 1, params, old)


def _prefill_and_decode(model, weights):
  tokens, lengths = small.tokens(2, 12), np.array([12, 5], np.int32)
  logits, kept = jax.jit(model.prefill)(weights, tokens, lengths)
  slots = np.arange(2, dtype=np.int32)
  cache = kv_cache.insert(model.init_cache(2, 32), kept, slots, slots)
  inputs = cache, tokens[:, 0], lengths, np.int32(13)
  return logits, jax.jit(model.decode)(weights, *inputs)[0]


def test_adapters_stay_apart():
  lora = lora_adapters(rank=2, alpha=4.0, targets='k,up')
  model, params = small.model_and_params(lora=lora)
  apart = layer_stack.unstack(model.config, params)
  assert jax.tree.structure(joined_products.join(apart)) == jax.tree.structure(apart)
  arranged = _arrange(model, apart, 'bfloat16')['layers'][0]
  for module, name in (('attention', 'k'), ('mlp', 'up')):
    assert arranged[module][name].keys() == apart['layers'][0][module][name].keys()
  assert 'rows' in arranged['attention']['q']


@pytest.mark.parametrize('changes', [BIASES, slow(small.EXPERTS)])
@pytest.mark.parametrize('dtype, error', [('float32', 1e-5), ('bfloat16', 0.05)])
def test_output_major_matrices_compute_the_same(changes, dtype, error):
  model, params = small.model_and_params(**changes)
  plain = layer_stack.unstack(model.config, params)
  arranged = _arrange(model, params, dtype)
  rows = arranged['layers'][0]['attention']['o']['rows']
  assert rows.shape == (24, 64) and rows.dtype == dtype
  expected = _prefill_and_decode(model, plain)
  model = dataclasses.replace(model, weights_dtype=dtype)
  for a, b in zip(expected, _prefill_and_decode(model, arranged), strict=True):
    scale = np.abs(a).max()
    np.testing.assert_allclose(a / scale, b / scale, atol=error)


def _num_numbers(params):
  """How many numbers parameters hold, without the padding of panels."""
  is_panels = lambda x: isinstance(x, PanelMatrix)  # noqa: E731
  leaves = jax.tree.leaves(params, is_leaf=is_panels)
  return sum(math.prod(x.shape) for x in leaves)


def _packs(changes, dtype, error):
  """Packs a model's matrices, and compares what they compute; returns them."""
  model, params = small.model_and_params(**changes)
  plain = layer_stack.unstack(model.config, params)
  packed = _pack(model, params, dtype)
  assert packed.keys() == plain.keys()
  assert _num_numbers(packed) == _num_numbers(plain)
  expected = _prefill_and_decode(model, plain)
  if dtype == 'bfloat16':
    model = dataclasses.replace(model, weights_dtype=dtype)
  for a, b in zip(expected, _prefill_and_decode(model, packed), strict=True):
    scale = np.abs(a).max()
    np.testing.assert_allclose(a / scale, b / scale, atol=error)
  return packed


@NEEDS_COMPILER
@pytest.mark.parametrize(
  'changes',
  [
    BIASES,
    {'hidden_size': 23, 'intermediate_size': 41},
    {'tie_embeddings': False},
    slow(small.EXPERTS),
  ],
)
@pytest.mark.parametrize('dtype, error', [('float32', 1e-5), ('bfloat16', 0.05)])
def test_packed_matrices_compute_the_same(changes, dtype, error):
  packed = _packs(changes, dtype, error)
  layer = packed['layers'][0]
  is_dense = 'num_experts' not in changes
  names = [('attention', 'qkv'), ('attention', 'o')]
  names += [('mlp', 'gate_up'), ('mlp', 'down')] if is_dense else []
  for module, name in names:
    one = layer[module][name]
    assert 'kernel' not in one and one['panels'].panels.dtype == dtype
  head = packed['embedding' if changes.get('tie_embeddings', True) else 'lm_head']
  assert head.keys() == {'panels'} and head['panels'].panels.dtype == dtype
  if head is not packed['embedding']:
    assert packed['embedding']['table'].dtype == dtype


@NEEDS_COMPILER
@pytest.mark.parametrize('dtype, error', [('float32', 1e-5), ('bfloat16', 0.05)])
def test_packed_matrices_leave_adapters_apart(dtype, error):
  lora = lora_adapters(rank=2, alpha=4.0, targets='k,up,lm_head')
  packed = _packs({'lora': lora, 'tie_embeddings': False}, dtype, error)
  adapted, layer = {'kernel', 'lora_a', 'lora_b'}, packed['layers'][0]
  assert layer['attention']['k'].keys() == layer['mlp']['up'].keys() == adapted
  assert packed['lm_head'].keys() == {'table', 'lora_a', 'lora_b'}
  for module, names in (('attention', 'qvo'), ('mlp', ('gate', 'down'))):
    for name in names:
      assert layer[module][name].keys() == {'panels'}


@NEEDS_COMPILER
@pytest.mark.parametrize('dtype', ['float32', 'bfloat16'])
def test_decode_reads_panels_as_they_lie(dtype):
  model, params = small.model_and_params(hidden_size=32)
  packed = _pack(model, params, dtype)
  if dtype == 'bfloat16':
    model = dataclasses.replace(model, weights_dtype=dtype)
  ids = np.zeros(8, np.int32)
  inputs = model.init_cache(8, 32), ids, ids, np.int32(1)
  compiled = jax.jit(model.decode).lower(packed, *inputs).compile().as_text()
  assert compiled
  program = compiled.partition('\nENTRY ')[2]  # where arrays are written to memory
  # Four products a layer, and the head's.
  assert compiled.count(f'custom_call_target="{row_product.TARGET}"') == 3 * 4 + 1
  form = {'float32': 'f32', 'bfloat16': 'bf16'}[dtype]
  is_panels = lambda x: isinstance(x, PanelMatrix)  # noqa: E731
  matrices = jax.tree.leaves(packed, is_leaf=is_panels)
  for matrix in filter(is_panels, matrices):
    lies, plain = (','.join(map(str, x.shape)) for x in (matrix.panels, matrix))
    assert re.search(rf' = {form}\[{lies}\]\S* parameter\(', program)
    assert not re.search(rf' = \w+\[{lies}\]\S* (?!parameter\()', program)
    assert f'[{plain}]' not in program


def test_layers_are_cut_by_a_program_each():
  model, params = small.model_and_params()
  cut = weight_layout.unstack_by_layer(model.config, params)
  expected = layer_stack.unstack(model.config, params)
  jax.tree.map(np.testing.assert_array_equal, cut, expected)
  # Layers that are cut already are changed as those of a stack.
  for given in (params, expected):
    changed = weight_layout.unstack_by_layer(model.config, given, _scaled, 2.0)
    for layer, plain in zip(changed['layers'], expected['layers'], strict=True):
      jax.tree.map(lambda x, y: np.testing.assert_array_equal(x, 2 * y), layer, plain)


def _scaled(weights, factor):
  return jax.tree.map(lambda x: factor * x, weights)


def test_one_row_is_multiplied_as_several():
  rows = jnp.asarray(np.random.default_rng(0).standard_normal((5, 7)), jnp.bfloat16)
  x = jnp.arange(7.0)
  expected = np.asarray(rows, np.float32) @ np.arange(7.0)
  np.testing.assert_allclose(output_major.product(rows, x), expected, rtol=1e-6)


def test_decode_converts_no_bfloat16_matrix():
  model, params = small.model_and_params(hidden_size=32)
  arranged = _arrange(model, params, 'bfloat16')
  model = dataclasses.replace(model, weights_dtype='bfloat16')
  ids = np.zeros(8, np.int32)
  inputs = model.init_cache(8, 32), ids, ids, np.int32(1)
  compiled = jax.jit(model.decode).lower(arranged, *inputs).compile().as_text()
  assert compiled
  matrices = {
    x.shape for x in jax.tree.leaves(arranged['layers']) if x.dtype == jnp.bfloat16
  }
  assert (40, 32) in matrices
  for rows, width in matrices:
    for sizes in (f'{rows},{width}', f'{width},{rows}'):
      assert not re.search(rf'f32\[{sizes}\]\S* (convert|fusion|copy)\(', compiled)


def test_an_exact_engine_refuses_another_type():
  model, _ = small.model_and_params()
  thread = DeviceThread()
  try:
    with pytest.raises(ValueError, match="weights_dtype='bfloat16'"):
      JaxEngine(model, device_thread=thread, exact=True, weights_dtype='bfloat16')
  finally:
    thread.close()


@NEEDS_COMPILER
@pytest.mark.parametrize('dtype', ['float32', 'bfloat16'])
def test_new_panels_take_the_places_of_the_old_ones(dtype):
  model, params = small.model_and_params(tie_embeddings=False)
  newer = jax.tree.map(lambda x: 2 * x, params)
  first = _pack(model, params, dtype)
  places = [x.unsafe_buffer_pointer() for x in joined_products.panels(first)]
  second = _pack(model, newer, dtype, weight_layout.spent_panels(first))
  assert weight_layout.spent_panels(layer_stack.unstack(model.config, params)) is None
  assert [x.unsafe_buffer_pointer() for x in joined_products.panels(second)] == places
  assert len(places) == 3 * 4 + 1 and len(set(places)) == len(places)
  expected = _pack(model, newer, dtype)
  jax.tree.map(np.testing.assert_array_equal, second, expected)
