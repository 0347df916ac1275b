"""A step is the same however it is split: micro-batches, devices, padding."""

import dataclasses
import functools

import jax
import numpy as np
import pytest

from jaxrl.algorithms import compose
from jaxrl.models.model import Model
from jaxrl.training.learner import Learner
from jaxrl.training.mesh import make_mesh
from jaxrl.training.optimizer import adamw
from tests.training import toy

# A large eps makes the update a smooth function of the gradient, so that rounding
# stays rounding; Adam's own would turn a sign of 1e-9 into a whole step.
SMOOTH = {'learning_rate': 1e-2, 'eps': 1e-2}
RAGGED = (4, 3)  # padding rows, unequal groups


async def train(name, **options):
  changes = {'value_head': True} if name == 'ppo' else {}
  algorithm = compose.make(name)
  learner = toy.learner(
    algorithm, kind=Model, changes=changes, optimizer=adamw(**SMOOTH), **options
  )
  groups = toy.groups(sizes=RAGGED)
  metrics = [await learner.update(groups) for _ in range(3)]
  return jax.tree.map(np.asarray, learner.params), metrics


@functools.cache
def plain_results():
  return {}


async def plain(name):
  if name not in plain_results():
    plain_results()[name] = await train(name)
  return plain_results()[name]


CASES = [
  ('grpo', None, 4),
  ('ppo', None, 2),
  ('grpo', {'fsdp': 4, 'tensor': 2}, 1),
]
REST = [
  (name, mesh, micro)
  for name in ('grpo', 'ppo', 'opmd', 'sft')
  for mesh in (None, {'fsdp': 4, 'tensor': 2}, {'fsdp': 2, 'tensor': 2}, {'fsdp': 4})
  for micro in (1, 2, 4)
  if (name, mesh, micro) not in CASES and (mesh, micro) != (None, 1)
]


async def assert_same(name, **options):
  params, metrics = await plain(name)
  others, other_metrics = await train(name, **options)
  start = toy.params(Model, **({'value_head': True} if name == 'ppo' else {}))
  moved = jax.tree.map(lambda a, b: float(np.abs(a - b).max()), params, start)
  assert max(jax.tree.leaves(moved)) > 1e-3  # else equality says nothing
  jax.tree.map(
    lambda a, b: np.testing.assert_allclose(a, b, rtol=0, atol=2e-6), params, others
  )
  for before, after in zip(metrics, other_metrics, strict=True):
    assert before.keys() == after.keys()
    for key, value in before.items():
      if not key.startswith(('time/', 'tokens/', 'compile/')):
        assert after[key] == pytest.approx(value, rel=2e-4, abs=1e-5), key


@pytest.mark.xdist_group('invariance')
@pytest.mark.parametrize('name, mesh, micro', CASES)
async def test_splitting_changes_nothing(name, mesh, micro):
  options = {'mesh': make_mesh(**mesh)} if mesh else {}
  await assert_same(name, micro_batches=micro, **options)


@pytest.mark.slow
@pytest.mark.xdist_group('invariance')
@pytest.mark.parametrize('name, mesh, micro', REST)
async def test_no_splitting_changes_anything(name, mesh, micro):
  options = {'mesh': make_mesh(**mesh)} if mesh else {}
  await assert_same(name, micro_batches=micro, **options)


@pytest.mark.xdist_group('invariance')
async def test_bfloat16_compute_keeps_float32_state():
  model, sft = dataclasses.replace(toy.model(), dtype='bfloat16'), compose.make('sft')
  learner = Learner(model, toy.params(), sft, num_rows=8, buckets=(16,))
  low = await learner.update(toy.groups(sizes=RAGGED))
  full = (await plain('grpo'))[1][0]
  assert {x.dtype.name for x in jax.tree.leaves(learner.params)} == {'float32'}
  assert low['policy/logprob'] == pytest.approx(full['policy/logprob'], abs=0.02)
  assert low['policy/logprob'] != full['policy/logprob']
