"""The engine's decode program for H200: nothing in it waits for the host."""

import collections
import re

import jax
import numpy as np
import pytest
from jax.sharding import Mesh, NamedSharding
from jax.sharding import PartitionSpec as P

from jaxrl.models.model_config import ModelConfig
from jaxrl.models.transformer_lm import TransformerLM
from jaxrl.rollout.engine import model_runner, token_sampling
from kernels.block_rounding import BlockFormat
from launch.planning.targets import target_devices
from tests.targets import TARGETS

pytestmark = TARGETS
SLOTS, LENGTH, STEPS = 32, 640, 8
# Instructions of a compiled program that start a kernel.
KERNEL = re.compile(r' = .*? (fusion|custom-call|dot|sort|reduce|scatter|copy)\(')


def config(layers, **changes):
  """The layers of Qwen3-0.6B."""
  sizes = {'hidden_size': 1024, 'num_heads': 16, 'num_kv_heads': 8, 'head_dim': 128}
  sizes |= {'intermediate_size': 3072, 'vocab_size': 151_936}
  return ModelConfig(num_layers=layers, family='qwen3', **sizes | changes)


def program(shape, needs, dtype='bfloat16', form=None):
  """The text of a decode program compiled for H200."""
  devices = target_devices('h200:1')
  here = NamedSharding(Mesh(np.array(devices), ('one',)), P())
  model = TransformerLM(shape, dtype=dtype, platform='gpu')
  runner = model_runner.ModelRunner(
    model,
    num_slots=SLOTS,
    max_length=LENGTH,
    decode_steps=STEPS,
    prompt_buckets=[64],
    prefill_tokens=64,
    max_stop_ids=8,
    sharding=here,
    weights_format=form,
  )

  def weights():
    params = model.init(jax.random.key(0))
    return runner._arrange(jax.tree.map(lambda x: x.astype(dtype), params))

  def cache():
    return model.init_cache(SLOTS, LENGTH)

  arguments = (
    *map(jax.eval_shape, (weights, cache)),
    model_runner.SlotState.idle(SLOTS, 8),
  )
  arguments = jax.tree.map(
    lambda x: jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=here), arguments
  )
  return runner._decode[needs].lower(*arguments).compile().as_text()


def kernels_of_a_token(text):
  """How many kernels of each kind the body of the loop has."""
  counts, name = {}, ''
  for line in text.splitlines():
    if head := re.match(r'(?:ENTRY )?%?([\w.\-]+) \(.*\{$', line):
      name = head[1]
      counts[name] = collections.Counter()
    elif kernel := KERNEL.search(line):
      target = re.search(r'custom_call_target="([^"]*)"', line)
      counts[name][target[1] if target else kernel[1]] += 1
  (body,) = re.findall(r'body=%?([\w.\-]+)', text)
  return counts[body]


def assert_that_nothing_waits(text):
  loops = re.findall(r' while\(.*', text)
  assert len(loops) == 1 and f'"known_trip_count":{{"n":"{STEPS}"}}' in loops[0]
  assert ' conditional(' not in text


@pytest.mark.parametrize(
  'needs, most', [('greedy', 16), ('plain', 24), ('truncated', 40)]
)
def test_kernels_of_a_token(needs, most):
  texts = [program(config(layers), needs) for layers in (2, 4)]
  for text in texts:
    assert_that_nothing_waits(text)
  two, four = map(kernels_of_a_token, texts)
  # Of a layer: attention, four products, and what docs/performance.md lists.
  assert four - two == {'__cudnn$fmhaSoftmax': 2, 'fusion': 2 * 13}
  assert two.total() - 2 * 14 <= most


@pytest.mark.parametrize(
  'changes, dtype',
  [({}, 'float32'), ({'layer_kinds': (('sliding', (('window', 128),)),)}, 'bfloat16')],
)
def test_a_cache_in_chunks_is_read_without_branches(changes, dtype):
  if changes:
    changes = changes | {'layer_types': ('sliding',)}
  small = {'vocab_size': 512, 'intermediate_size': 256, 'hidden_size': 256}
  text = program(config(1, **small, **changes), 'plain', dtype)
  assert '__cudnn' not in text
  assert_that_nothing_waits(text)


def test_each_weight_is_read_once():
  """Of the products that read the same input, there is one."""
  text = program(config(1), token_sampling.PLAIN)
  entry = text[text.index('ENTRY') :].splitlines()[0]
  joined = ['bf16[1024,4096]', 'bf16[1024,6144]']  # q, k and v; gate and up
  assert all(entry.count(shape) == 1 for shape in joined)
  assert not any(shape in entry for shape in ('bf16[1024,16,128]', 'bf16[1024,3072]'))


@pytest.mark.parametrize('dtype, name', [('int8', 's8'), ('float8_e4m3fn', 'f8e4m3fn')])
def test_weights_of_8_bits_are_arguments(dtype, name):
  """Matrices, joined as others are, take a byte for each element and their scales."""
  text = program(config(1), token_sampling.PLAIN, form=BlockFormat(dtype, 128))
  assert_that_nothing_waits(text)
  entry = text[text.index('ENTRY') :].splitlines()[0]
  sizes = [(1024, 4096), (2048, 1024), (1024, 6144), (3072, 1024)]
  for rows, outputs in sizes:
    assert f'{name}[{rows},{outputs}]' in entry
    assert f'bf16[{rows // 128},{outputs}]' in entry
    assert f'bf16[{rows},{outputs}]' not in entry
