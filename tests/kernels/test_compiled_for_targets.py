"""Kernels compile for accelerators that are not here, and in little memory."""

import math
import re

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import AxisType, Mesh, NamedSharding
from jax.sharding import PartitionSpec as P

from kernels.fused_logprobs import LogprobShards
from kernels.kept_softmax import TILE_LOGITS, TILE_MULTIPLE
from kernels.sparse_delta import extract, scatter
from kernels.token_logprobs import token_logprobs
from launch.planning import targets

ROWS, VOCAB = 32_768, 151_936
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


def gradient(mesh, rows, width, vocab, dtype, **options):
  """The compiled gradient of log-probs, entropy and nec: states bf16 or f32.

  kept_bytes: as in `token_logprobs`. of: fields whose sum is differentiated.
  """
  of = options.pop('of', ('logprobs', 'entropy', 'nec'))
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
      **options,
    )
    return sum(getattr(scores, name).sum() for name in of), scores

  return compiled(
    jax.grad(total, argnums=(0, 1), has_aux=True),
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
  assert ('tpu_custom_call' in text) != gpu


def products(text):
  """Number of matrix products, one in a loop counted once."""
  library = re.findall(r'custom_call_target="__cublas[^"]*"', text)
  return len(re.findall(r' dot\(', text)) + len(library)


def arrays(text):
  """(dtype, shape) of what the program's operations write, without fused ones."""
  fused = set(re.findall(r'calls=%?([\w.-]+)', text))
  found = set()
  for block in re.split(r'\n\n', text):
    head = re.match(r'(?:ENTRY )?%?([\w.-]+) ', block)
    if head and head[1] not in fused:
      for dtype, sizes in re.findall(r'(\w+)\[([\d,]+)\]', block):
        found.add((dtype, tuple(map(int, sizes.split(',')))))
  return found


GIB = 2**30
# Of a softmax that is kept where it may take that much, and formed again elsewhere:
# tokens, kept_bytes, what is differentiated, products, GiB beside inputs and outputs.
# Kept are 2.32 GiB for 8,192 tokens; a tile of float32 logits has half a GiB, and the
# table in bfloat16 0.58.
LOGPROB, ENTROPY = ('logprobs',), ('logprobs', 'entropy')


@pytest.mark.targets
@pytest.mark.parametrize(
  'tokens, gib, of, number, temporaries',
  [
    (8192, 3, LOGPROB, 3, 2.9),
    (8192, 2, LOGPROB, 4, 3.2),
    (8192, 3, ENTROPY, 4, 2.9),
    (32_768, 1, LOGPROB, 4, 2.1),
  ],
)
def test_products_and_memory_of_a_gpu(tokens, gib, of, number, temporaries):
  width, vocab, options = 2048, VOCAB, {'kept_bytes': gib * GIB, 'of': of}
  mesh = mesh_of('h200:8', (1, 1))
  program = gradient(mesh, tokens, width, vocab, jnp.bfloat16, **options)
  text = program.as_text()
  assert products(text) == number
  wide = {shape for dtype, shape in arrays(text) if dtype == 'f32' and vocab in shape}
  largest = max(math.prod(shape) for shape in wide - {(vocab, width)})
  assert TILE_LOGITS // 2 < largest <= TILE_LOGITS + TILE_MULTIPLE * vocab
  kept = {shape for dtype, shape in arrays(text) if dtype == 'bf16' and vocab in shape}
  is_kept = any(math.prod(shape) == tokens * vocab for shape in kept)
  assert is_kept == (gib == 3)
  assert program.memory_analysis().temp_size_in_bytes <= temporaries * GIB


def assert_is_a_twentieth(program):
  """Of the logits, beside inputs, outputs and gradients."""
  assert program.memory_analysis().temp_size_in_bytes <= 0.05 * 4 * ROWS * VOCAB


@pytest.mark.parametrize('width', [1024, 5120])
@pytest.mark.parametrize(
  'machine, dtype',
  [
    pytest.param('v5p:2x2x1', jnp.bfloat16, marks=pytest.mark.targets),
    ('cpu:1', jnp.float32),
    ('cpu:1', jnp.bfloat16),
  ],
)
def test_memory_is_a_twentieth_of_the_logits(machine, dtype, width):
  mesh = mesh_of(machine, (1, 1))
  assert_is_a_twentieth(gradient(mesh, ROWS, width, VOCAB, dtype))


@pytest.mark.parametrize('what', ['given', 'likeliest'])
@pytest.mark.parametrize(
  'machine, dtype',
  [
    pytest.param('v5p:2x2x1', jnp.bfloat16, marks=pytest.mark.targets),
    pytest.param('h200:8', jnp.bfloat16, marks=pytest.mark.targets),
    ('cpu:1', jnp.float32),
    ('cpu:1', jnp.bfloat16),
  ],
)
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
