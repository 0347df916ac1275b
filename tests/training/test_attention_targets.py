"""Train and decode steps for TPU and H200, with the kernels meant for them."""

import dataclasses
import re

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import NamedSharding
from jax.sharding import PartitionSpec as P

from jaxrl.algorithms.presets.grpo import grpo
from jaxrl.models.model_config import ModelConfig
from jaxrl.models.transformer_lm import TransformerLM
from jaxrl.training.batching import packing_plan
from jaxrl.training.learner import Learner
from jaxrl.training.learner_options import LearnerOptions
from jaxrl.training.parallelism import sharding
from jaxrl.training.parallelism.mesh import MeshOptions, make_mesh
from jaxrl.training.parallelism.model_sharding import on_mesh
from jaxrl.types import Trajectory
from launch.planning.targets import target_devices
from tests.targets import TARGETS

pytestmark = TARGETS
CONFIG = ModelConfig(
  vocab_size=256,
  hidden_size=256,
  num_layers=2,
  num_heads=8,
  num_kv_heads=2,
  head_dim=128,
  intermediate_size=256,
)
MODEL = TransformerLM(CONFIG, dtype='bfloat16', remat='full')
KERNEL = 'tpu_custom_call'


def slice_of_tpu():
  return make_mesh(
    MeshOptions(data=1, fsdp=2, tensor=2), devices=target_devices('v5p:2x2x1')
  )


def train_step(model, packed=''):
  params = jax.eval_shape(MODEL.init, jax.random.key(0))
  learner = Learner(
    model,
    params,
    grpo(),
    num_rows=4,
    length_buckets=[256],
    mesh=slice_of_tpu(),
    options=LearnerOptions(packing=packed),
  )
  return learner.trace(256)[1]['train'].lower()


def test_train_step():
  # Forward, and two of the backward pass.
  assert train_step(MODEL).compile().as_text().count(KERNEL) >= 3


def test_packed_rows_that_share_prompts():
  packed = packing_plan.first_fit(tokens=2048, length=1024)
  counts = []
  for kernels in ('auto', 'reference'):
    step = train_step(dataclasses.replace(MODEL, kernels=kernels), packed)
    assert step.compile().memory_analysis() is not None
    # JAX cannot read back what libtpu makes of it.
    counts.append(step.as_text().count(KERNEL))
  # Beside those of the log-probs: of the own segment and of the prompt, forward and two
  # of the backward pass.
  assert counts[0] >= 9 and counts[1] == 0


def test_kernels_are_turned_off():
  step = train_step(dataclasses.replace(MODEL, kernels='reference'))
  assert KERNEL not in step.compile().as_text()


LENGTH = 1152  # no other axis is as long


def h200_learner(packing=None):
  return Learner(
    MODEL,
    jax.eval_shape(MODEL.init, jax.random.key(0)),
    grpo(),
    num_rows=16,
    length_buckets=[LENGTH],
    mesh=make_mesh(
      MeshOptions(data=1, fsdp=1, tensor=1), devices=target_devices('h200:1')
    ),
    options=LearnerOptions(packing=packing),
  )


@pytest.mark.parametrize(
  'packing',
  [
    None,
    packing_plan.first_fit(tokens=4 * LENGTH, length=LENGTH, share_prefix=False),
    # Its attention runs on rows of one sequence.
    packing_plan.first_fit(tokens=8 * LENGTH, length=4 * LENGTH, sequences=16),
  ],
)
def test_a_train_step_for_h200_holds_no_mask(packing):
  step = h200_learner(packing).trace(LENGTH)[1]['train'].lower().compile().as_text()
  calls = re.findall(r'custom_call_target="(__cudnn[^"]*)"', step)
  # The layers are a loop, which computes the forward pass again in its backward pass.
  forward, backward = '__cudnn$fmhaSoftmax', '__cudnn$fmhaSoftmaxBackward'
  assert sorted(calls) == [forward, forward, backward]
  assert not re.search(rf'\[[\d,]*{LENGTH},{LENGTH}\]', step)


def test_shared_prompts_that_stay_packed_need_no_mask_on_h200():
  packing = packing_plan.first_fit(tokens=2 * LENGTH, length=LENGTH)
  learner = h200_learner(packing)
  assert learner._batch_builder.batch_shape().pack.share_prefix
  step = learner.trace(LENGTH)[1]['train'].lower().compile().as_text()
  calls = re.findall(r'custom_call_target="(__cudnn[^"]*)"', step)
  # Of the own segment and of the prompt; no call with a bias, which a mask is.
  forward, backward = '__cudnn$fmhaSoftmax', '__cudnn$fmhaSoftmaxBackward'
  assert sorted(calls) == [*[forward] * 4, *[backward] * 2]
  kinds = re.findall(r'"mask_type": ?"(\w+)"', step)
  assert sorted(kinds) == ['PADDING'] * 3 + ['PADDING_CAUSAL'] * 3
  assert not re.search(rf'\[[\d,]*{LENGTH},{LENGTH}\]', step)


def rows_of(*segment_lengths):
  """A group with a row for each list of segment lengths."""

  def row(lengths):
    size, extras = sum(lengths), {'segments': lengths} if len(lengths) > 1 else {}
    ones = np.ones(size, np.float32)
    return Trajectory(
      ones.astype(np.int32), ones > 0, -ones, ones, 0 * ones, extras=extras
    )

  return [[row(lengths) for lengths in segment_lengths]]


def test_segments_of_a_batch_choose_the_program_for_h200():
  builder = h200_learner()._batch_builder
  assert [shape.segments for shape in builder.warmup_shapes()] == [1]
  for lengths, expected in (([9], 1), ([4, 5], 2), ([2, 3, 4], 4)):
    shape = builder.build_batch(rows_of([7], lengths), 0)[1]
    assert shape.segments == expected


def test_decode_step_updates_its_pages_in_place():
  mesh = slice_of_tpu()
  model = on_mesh(MODEL, mesh)

  def abstract(x, spec):
    return jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=NamedSharding(mesh, spec))

  params = jax.eval_shape(model.init, jax.random.key(0))
  layouts = sharding.params_sharding(mesh, model.logical_axes(), params)
  params = jax.tree.map(lambda x, s: abstract(x, s.spec), params, layouts)
  pages = P('tensor', ('data', 'fsdp'))
  cache = jax.eval_shape(lambda: model.init_cache(16, 4096))
  cache = jax.tree.map(lambda x: abstract(x, pages), cache)
  slots = abstract(jax.ShapeDtypeStruct((16,), jnp.int32), P(('data', 'fsdp')))
  limit = abstract(jax.ShapeDtypeStruct((), jnp.int32), P())

  def steps(params, cache, tokens, positions, limit):
    def body(_, state):
      cache, tokens = state
      logits, cache = model.decode(params, cache, tokens, positions, limit)
      return cache, logits.argmax(-1).astype(jnp.int32)

    return jax.lax.fori_loop(0, 4, body, (cache, tokens))

  program = jax.jit(steps, donate_argnums=1)
  program = program.lower(params, cache, slots, slots, limit).compile()
  assert program.as_text().count(KERNEL) >= CONFIG.num_layers
  held = sum(x.size * 2 // mesh.size for x in jax.tree.leaves(cache))
  assert program.memory_analysis().temp_size_in_bytes < held / 4
