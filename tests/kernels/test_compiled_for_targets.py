"""Kernels compile for accelerators that are not here, and in little memory."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import AxisType, Mesh, NamedSharding
from jax.sharding import PartitionSpec as P

from kernels.fused_logprobs import LogprobShards
from kernels.sparse_delta import extract, scatter
from kernels.token_logprobs import token_logprobs
from launch.planning import targets

MACHINES = ['v5e:2x2', 'v5p:2x2x1', 'v6e:2x2', 'h200:8']


def mesh_of(machine, shape):
  why = targets.missing_compiler(targets.parse_target(machine))
  if why:
    pytest.skip(f'{why} is not installed: make env-targets')
  devices = targets.target_devices(machine)[: shape[0] * shape[1]]
  axes = (AxisType.Auto,) * 2
  return Mesh(np.array(devices).reshape(shape), ('fsdp', 'tensor'), axis_types=axes)


def compiled(function, mesh, *args):
  """args: (shape, dtype, *mesh axes)."""
  structs = [
    jax.ShapeDtypeStruct(shape, dtype, sharding=NamedSharding(mesh, P(*axes)))
    for shape, dtype, *axes in args
  ]
  with jax.sharding.use_abstract_mesh(mesh.abstract_mesh):
    lowered = jax.jit(function).lower(*structs)
  return lowered.compile()


def gradient(mesh, rows, width, vocab, dtype):
  """The compiled gradient of log-probs, entropy and nec: states bf16 or f32."""
  shards = LogprobShards(mesh, ('fsdp',), (), ('tensor',))
  platform = mesh.devices.flat[0].platform

  def total(hidden, table, tokens):
    scores = token_logprobs(
      hidden,
      table,
      tokens,
      temperature=0.8,
      entropy=True,
      nec=True,
      platform=platform,
      shards=shards,
    )
    return sum(x.sum() for x in scores if x is not None)

  return compiled(
    jax.grad(total, argnums=(0, 1)),
    mesh,
    ((8, rows // 8, width), dtype, 'fsdp'),
    ((vocab, width), jnp.float32, 'tensor'),
    ((8, rows // 8), jnp.int32, 'fsdp'),
  )


# Those that are left out are compiled below, for their memory, in bfloat16.
@pytest.mark.targets
@pytest.mark.parametrize(
  'machine, dtype',
  [
    ('v5e:2x2', jnp.float32),
    ('v5e:2x2', jnp.bfloat16),
    ('v5p:2x2x1', jnp.float32),
    ('v6e:2x2', jnp.bfloat16),
    ('h200:8', jnp.float32),
  ],
)
def test_log_probs_and_their_gradient(machine, dtype):
  program = gradient(mesh_of(machine, (2, 2)), 1000, 200, 1002, dtype)
  text = program.as_text()
  gpu = machine.startswith('h200')
  assert ('__gpu$xla.gpu.triton' if gpu else 'tpu_custom_call') in text


ROWS, VOCAB = 32_768, 151_936
HERE_AND_THERE = pytest.mark.parametrize(
  'machine, dtype',
  [
    pytest.param('v5p:2x2x1', jnp.bfloat16, marks=pytest.mark.targets),
    pytest.param('h200:8', jnp.bfloat16, marks=pytest.mark.targets),
    ('cpu:1', jnp.float32),
    ('cpu:1', jnp.bfloat16),
  ],
)


def assert_is_a_twentieth(program):
  """Of the logits, beside inputs, outputs and gradients."""
  assert program.memory_analysis().temp_size_in_bytes <= 0.05 * 4 * ROWS * VOCAB


@pytest.mark.parametrize('width', [1024, 5120])
@HERE_AND_THERE
def test_memory_is_a_twentieth_of_the_logits(machine, dtype, width):
  mesh = mesh_of(machine, (1, 1))
  assert_is_a_twentieth(gradient(mesh, ROWS, width, VOCAB, dtype))


@pytest.mark.parametrize('what', ['given', 'likeliest'])
@HERE_AND_THERE
def test_so_it_is_for_distillation(machine, dtype, what):
  """Of 64 tokens a position."""
  mesh, width = mesh_of(machine, (1, 1)), 4096
  platform = mesh.devices.flat[0].platform

  def total(hidden, table, ids):
    chosen = {'top_k': 64} if what == 'likeliest' else {'topk_ids': ids}
    scores = token_logprobs(hidden, table, ids[..., 0], platform=platform, **chosen)
    return scores.topk_logprobs.sum()

  states = (8, ROWS // 8, width), dtype
  table = (VOCAB, width), jnp.float32
  program = compiled(
    jax.grad(total, argnums=(0, 1)),
    mesh,
    *(states, table, ((8, ROWS // 8, 64), jnp.int32)),
  )
  assert_is_a_twentieth(program)


@pytest.mark.targets
@pytest.mark.parametrize('machine', MACHINES)
def test_several_tokens_a_position(machine):
  mesh = mesh_of(machine, (2, 2))
  shards, platform = (
    LogprobShards(mesh, ('fsdp',), (), ('tensor',)),
    mesh.devices.flat[0].platform,
  )

  def likeliest(hidden, table, tokens):
    scores = token_logprobs(
      hidden, table, tokens, top_k=8, platform=platform, shards=shards, max_rows=64
    )
    return scores.topk_logprobs.sum()

  compiled(
    jax.grad(likeliest, argnums=(0, 1)),
    mesh,
    ((8, 100, 128), jnp.bfloat16, 'fsdp'),
    ((1024, 128), jnp.float32, 'tensor'),
    ((8, 100), jnp.int32, 'fsdp'),
  )


@pytest.mark.targets
@pytest.mark.parametrize('machine', MACHINES)
def test_changes_of_weights(machine):
  mesh = mesh_of(machine, (1, 1))

  def there_and_back(old, new):
    delta = extract(old, new, capacity=100)
    return scatter(old, delta), delta.count

  compiled(there_and_back, mesh, *(((50, 130), jnp.bfloat16),) * 2)
