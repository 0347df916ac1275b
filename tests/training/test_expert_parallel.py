"""Experts split over devices: the same values and gradients as on one."""

import dataclasses

import jax
import numpy as np
import pytest

from jaxrl.algorithms import registry, requirements
from jaxrl.models import lora
from jaxrl.options import ConfigError
from jaxrl.training import train_state
from jaxrl.training.parallelism import sharding
from jaxrl.training.parallelism.mesh import MeshOptions, make_mesh
from jaxrl.training.parallelism.model_sharding import on_mesh
from jaxrl.training.train_state import StepSpec
from kernels import experts
from tests.marks import slow
from tests.models import small
from tests.models.test_moe import MOE

SIZES = MOE | {
  'num_experts': 4,
  'num_layers': 2,
  'vocab_size': 64,
  'moe_intermediate_size': 16,
}
EVERY = lora.lora_adapters(rank=3, alpha=1.5, targets=small.TARGETS)


def sums(model, params, tokens, segments, routed):
  """Log-probs, and the gradient of a weighed sum of them."""
  weights = np.random.default_rng(1).standard_normal(tokens.shape)

  def loss(params):
    outputs = model.policy_outputs(params, tokens, segments, routed_experts=routed)
    return (weights * outputs.logprobs).sum(), outputs.logprobs

  slope, logprobs = jax.jit(jax.grad(loss, has_aux=True))(params)
  return logprobs, slope


@pytest.mark.parametrize(
  ('sizes', 'rows', 'replay', 'way', 'adapters'),
  [
    ({'fsdp': 2, 'tensor': 2, 'expert': 2}, 4, True, 'ragged', None),
    slow(*({'expert': 2, 'fsdp': 2, 'tensor': 2}, 4, False, 'ragged', EVERY)),
    slow(*({'expert': 2, 'context': 2, 'tensor': 2}, 4, False, 'dense', EVERY)),
    # Rows that are not divided.
    slow(*({'expert': 4, 'data': 2}, 3, False, 'ragged', None)),
  ],
)
def test_equal_to_one_device(sizes, rows, replay, way, adapters, monkeypatch):
  # Which of the two is taken depends on the platform.
  monkeypatch.setattr(experts, 'dense', getattr(experts, way))
  model, params = small.model_and_params(
    **SIZES, lora=adapters, tie_embeddings=not adapters
  )
  model = dataclasses.replace(model, remat='full')
  tokens = small.tokens(rows, 10) % 64
  segments = (np.arange(10) < np.r_[6, [10] * (rows - 1)][:, None]).astype(np.int32)
  routed = None
  if replay:
    drawn = np.random.default_rng(2).integers(0, 4, (rows, 10, 2, 1))
    routed = np.concatenate([drawn, (drawn + 1) % 4], -1).astype(np.int16)
    routed[:, -1] = -1
  mesh = make_mesh(MeshOptions(**{'data': 1} | sizes))
  logprobs, slope = sums(model, params, tokens, segments, routed)
  layout = sharding.params_sharding(mesh, model.logical_axes(), params)
  kernel = layout['layers']['mlp']['experts']['gate']['kernel']
  assert kernel.spec[1] == 'expert'
  there = jax.tree.map(jax.device_put, params, layout)
  sharded_logprobs, split = sums(on_mesh(model, mesh), there, tokens, segments, routed)
  np.testing.assert_allclose(sharded_logprobs, logprobs, atol=1e-5)
  jax.tree.map(
    lambda a, b: np.testing.assert_allclose(a, b, atol=2e-5, rtol=1e-4), split, slope
  )


@pytest.fixture
def algorithm():
  return requirements.split_hparams(registry.make('grpo'))[0]


def test_an_expert_axis_that_does_not_divide_is_named(algorithm):
  model, _ = small.model_and_params(**MOE | {'vocab_size': 64})
  with pytest.raises(ConfigError, match=r'expert=4 does not divide experts=5'):
    train_state.state_shapes(
      StepSpec(model, algorithm), make_mesh(MeshOptions(data=2, expert=4))
    )


def test_a_model_without_experts_is_refused(algorithm):
  model, _ = small.model_and_params(vocab_size=64)
  mesh = make_mesh(MeshOptions(data=4, expert=2))
  with pytest.raises(ConfigError, match=r'expert=2 splits experts.*family qwen3,'):
    train_state.state_shapes(StepSpec(model, algorithm), mesh)
  # A dense teacher of a student with experts has this mesh.
  train_state.params_shapes(StepSpec(model, algorithm), mesh)
