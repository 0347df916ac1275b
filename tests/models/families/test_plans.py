"""`launch.plan` knows a published size of every family: parameters, work and cache."""

import math

import jax
import jax.numpy as jnp
import pytest

from jaxrl.models import families, huggingface
from jaxrl.models.families.known_configs import KNOWN_CONFIGS
from jaxrl.models.transformer_lm import TransformerLM
from launch.planning import engine_decode, planned_run
from launch.planning.flops import count_flops
from launch.settings import command_line
from launch.settings.resolve import resolve_settings
from tests.launch import compiled_families
from tests.marks import slow_except, slow_in_gate

# Parameters as published, in billions.
SIZES = {
  'Qwen3-30B-A3B': 30.5,
  'Qwen3-Next-80B-A3B-Instruct': 79.7,
  'Qwen3.5-9B': 9.0,
  'Qwen3.5-35B-A3B': 34.7,
  'Qwen3-VL-2B-Instruct': 2.1,
  'Qwen3-VL-4B-Instruct': 4.4,
  'Qwen3-VL-8B-Instruct': 8.8,
  'Mistral-Small-24B-Instruct-2501': 23.6,
  'Ministral-8B-Instruct-2410': 8.0,
  'Ministral-3-8B-Base-2512': 8.5,
  'phi-4': 14.7,
  'SmolLM3-3B': 3.1,
  'Olmo-3-1025-7B': 7.3,
  'gemma-2-2b': 2.6,
  'gemma-3-1b-it': 1.0,
  'gemma-4-E4B-it': 7.5,
  'gemma-4-26B-A4B-it': 25.2,
  'gpt-oss-20b': 20.9,
  'DeepSeek-V3': 671.0,
  'Kimi-K2-Instruct': 1026.4,
  'GLM-4.5-Air': 106.9,
  'GLM-4.7-Flash': 29.9,
}
# Positions that a layer keeps of 4096, by its window, if not all.
KEPT = {
  'gemma-3-1b-it': {512: 512},
  'gemma-4-E4B-it': {512: 512},
  'gemma-4-26B-A4B-it': {1024: 1024},
  'gpt-oss-20b': {128: 128},
}
# Of a latent and of the rotated part of a key, as published.
LATENTS = {'deepseek_v3': 512 + 64, 'glm4_moe_lite': 512 + 64}


LARGER = (
  *('Qwen3-30B-A3B', 'Qwen3.5-35B-A3B', 'Qwen3-VL-4B-Instruct'),
  'Qwen3-VL-8B-Instruct',
)

# Those whose layers differ most.
FAST = ('Qwen3.5-9B', 'gemma-4-E4B-it', 'gpt-oss-20b', 'GLM-4.7-Flash', 'SmolLM3-3B')


def sizes_of(name):
  model = TransformerLM(huggingface.config_from_hf(KNOWN_CONFIGS[name]), unroll=1)
  return model, planned_run.param_shapes(model)


def delta_rule_flops(layer, length):
  """Operations of a chunk of `length` tokens: products with keys, values and state."""
  keys, values = layer.linear_key_dim, layer.linear_value_dim
  scores = 2 * 2 * layer.linear_key_heads * length**2 * keys
  levels = math.log2(length) - 1  # of the system's blocks, two products each
  solved = 2 * length**2 * (2 * levels * length + 2 * values + keys)
  states = 3 * 2 * length * keys * values
  return scores + layer.linear_value_heads * (solved + states)


def width_kept(layer):
  """How many numbers the cache has of a token: its key and value, or its latent."""
  return LATENTS.get(layer.family) or 2 * layer.num_kv_heads * layer.head_dim


def is_matrix(path):
  return path[-1].key == 'kernel' and path[0].key != 'vision'  # text alone


@pytest.mark.parametrize('name', slow_except(FAST, SIZES))
def test_parameters_work_and_cache(name):
  model, params = sizes_of(name)
  config, length = model.config, 64
  leaves = jax.tree_util.tree_leaves_with_path(params)
  assert round(sum(x.size for _, x in leaves) / 1e9, 1) == SIZES[name]
  # Two operations for each parameter of a matrix: on a CPU, of every expert too.
  used = sum(x.size for path, x in leaves if is_matrix(path))
  tokens = jax.ShapeDtypeStruct((1, length), jnp.int32)
  ones = jnp.ones((1, length), jnp.int32)
  hidden = jax.make_jaxpr(lambda p, t: model.hidden(p, t, ones))(params, tokens)
  work, least = count_flops(hidden), 2 * used * length
  layers = config.layer_configs
  attention = [c.num_heads * c.head_dim for c in layers if not c.linear_attention]
  most = least + 4 * length**2 * sum(attention)
  most += sum(delta_rule_flops(c, length) for c in layers if c.linear_attention)
  assert least < work <= most
  cache = jax.eval_shape(lambda: model.init_cache(2, 4096))
  values = sum(
    2 * c.linear_value_heads * c.linear_key_dim * c.linear_value_dim
    + 2
    * (c.conv_width - 1)
    * (
      2 * c.linear_key_heads * c.linear_key_dim
      + c.linear_value_heads * c.linear_value_dim
    )
    if c.linear_attention
    else 2 * width_kept(c) * KEPT.get(name, {}).get(c.window, 4096)
    for c in config.layer_configs
    if c.kv_layer < 0  # others keep none
  )
  assert sum(x.size for x in jax.tree.leaves(cache)) == values


def test_every_family_has_a_size():
  known = {config['model_type'] for config in KNOWN_CONFIGS.values()}
  # Of Qwen3.5, the text models are known.
  assert set(families.BUILT_IN) - known == {'qwen2', 'llama', 'qwen3_5', 'qwen3_5_moe'}
  # What `compiled_families` compiles for accelerators has a layer of each kind.
  names = compiled_families.first_of_each_family()
  assert len(names) == len(set(map(families.family_name, known)))
  shape = compiled_families.cut_run('gemma-4-E4B-it').shape
  whole = huggingface.config_from_hf(KNOWN_CONFIGS['gemma-4-E4B-it'])
  assert set(shape.layer_types) == set(whole.layer_types)


# What the gate plans: linear, sliding and latent attention, experts, and images.
GATE = (
  *('Qwen3-30B-A3B', 'Qwen3-VL-4B-Instruct', 'gemma-4-26B-A4B-it', 'gpt-oss-20b'),
  *('Qwen3-Next-80B-A3B-Instruct', 'phi-4'),
)


@pytest.mark.parametrize(
  'name', slow_in_gate(GATE, [name for name in SIZES if name not in LARGER])
)
def test_the_update_and_decode_are_planned(name):
  words = ['--config=configs/qwen3_0_6b.py', f'--config.model.checkpoint={name}']
  run = planned_run.read_run(
    resolve_settings(command_line.load(command_line.parse(words)))
  )
  mesh = planned_run.planned_mesh(run, jax.devices()[:1])
  learner = planned_run.make_learner(run, mesh)
  shape, traced = learner.trace(run.buckets[-1])
  assert bool(shape.patches) == (run.shape.vision is not None)
  assert count_flops(traced['train'].jaxpr) > 1e12
  decode = engine_decode.trace_decode(
    engine_decode.with_layers(run, range(2)), jax.devices()[:1]
  )
  assert count_flops(decode.jaxpr) > 1e9
