"""A step on trees of tokens is the step on flat rows, for each kind of algorithm."""

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jaxrl.algorithms import registry, requirements
from jaxrl.models.transformer_lm import TransformerLM
from jaxrl.options import ConfigError
from jaxrl.training import batch_fields, compiled_steps, forward_pass, monitoring
from jaxrl.training import train_step as steps
from jaxrl.training.batching import packing_plan, token_tree_placement
from jaxrl.training.optimizers import OptimizerOptions
from jaxrl.training.parallelism.mesh import single_device_mesh
from jaxrl.training.teacher_scoring import Teachers
from tests.calls import make_optimizer
from tests.marks import slow_in_gate
from tests.training import toy
from tests.training.bag import Bag

LENGTH = 24
# The gradient itself is what one step changes.
PLAIN_STEP = {'learning_rate': 1.0, 'name': 'sgd', 'max_grad_norm': None}
SAME = ('time/', 'tokens/', 'compile/')  # what may differ begins with these


def first_fit(tokens=96, length=48, share_tree=True, **options):
  return packing_plan.first_fit(
    tokens=tokens, length=length, share_tree=share_tree, **options
  )


def branches(rng, count):
  """Random sequences that part anywhere; some continue others, or repeat them."""
  sequences = [rng.integers(0, 64, rng.integers(4, 12))]
  while len(sequences) < count:
    parent = sequences[rng.integers(len(sequences))]
    kept = parent[: rng.integers(1, len(parent) + 1)]
    added = rng.integers(0, 64, rng.integers(0, LENGTH - len(kept) + 1))
    sequences.append(np.concatenate([kept, added]))
  return sequences


def tries(algorithm, seed=0, sizes=(5, 4, 3), segments=False):
  """Groups of rows that are random tries; which tokens are actions differs by row."""
  rng = np.random.default_rng(seed)
  if algorithm.batch_unit == 'pair':
    sizes = (2,) * 5
  groups = []
  for g, size in enumerate(sizes):
    sequences = branches(rng, size)
    groups.append([
      row(rng, algorithm, tokens, g, m, segments) for m, tokens in enumerate(sequences)
    ])
  if algorithm.data_format in ('messages', 'text'):  # each row is a group of its own
    groups = [[one] for group in groups for one in group]
  return groups


def row(rng, algorithm, tokens, g, m, segments):
  length = max(len(tokens), 2)
  one = toy.trajectory(rng, length, env_group=g, sample_index=m)
  mask = rng.random(length) < 0.7
  mask[0], mask[-1] = False, True
  rewards = np.zeros(length, np.float32)
  rewards[-1] = m if algorithm.batch_unit == 'pair' else rng.normal()
  mixes = 'expert_mask' in requirements.fields_read(algorithm)
  extras = {
    'state_hash': int(rng.integers(2)),
    'teacher_logprobs': np.where(mask, -rng.random(length), 0).astype(np.float32),
    'teacher_topk_ids': rng.integers(0, 64, (length, 64)).astype(np.int32),
    'teacher_topk_logprobs': -6 * rng.random((length, 64)).astype(np.float32) - 1,
  }
  if segments and m % 2 and length > 3:
    extras['segments'] = [length - 2, 2]
  return dataclasses.replace(
    one,
    tokens=np.resize(tokens, length).astype(np.int32),
    action_mask=mask,
    rollout_logprobs=np.where(mask, one.rollout_logprobs, 0).astype(np.float32),
    weights_version=np.where(mask, 0, -1).astype(np.int32),
    rewards=rewards,
    is_expert=algorithm.data_format != 'rollout' or (mixes and g == 2),
    extras=extras,
  )


async def train(algorithm, groups, kind=TransformerLM, changes=None, **options):
  """Parameters after a step of plain gradient descent, and the step's metrics."""
  changes = {'value_head': True} if algorithm.value_loss else {}
  options = {'mesh': single_device_mesh(), 'log_entropy': True} | options
  if batch_fields.teacher_fields(algorithm):
    options['teachers'] = Teachers(algorithm, mesh=options['mesh'], chunk_rows=8)
  learner = toy.learner(
    algorithm,
    kind=kind,
    changes=changes,
    num_rows=16,
    optimizer=make_optimizer(OptimizerOptions(**PLAIN_STEP)),
    length_buckets=(LENGTH,),
    ref_params=toy.params(kind, seed=1, **changes),
    **options,
  )
  metrics = await learner.update(groups)
  return jax.tree.map(np.asarray, learner.params), metrics


def assert_same(flat, tree):
  jax.tree.map(
    lambda a, b: np.testing.assert_allclose(a, b, rtol=0, atol=1e-6), flat[0], tree[0]
  )
  names = {key for key in flat[1] if not key.startswith(SAME)}
  assert names == {key for key in tree[1] if not key.startswith(SAME)}
  for key in names:
    assert tree[1][key] == pytest.approx(flat[1][key], rel=2e-4, abs=1e-5), key


# By token, by turn, by sequence and by group; of pairs, of files, of teachers and of
# experts; with a critic and with KL in the loss.
KINDS = ('dpo', 'gigpo', 'grpo', 'gspo', 'mix_chord', 'on_policy_distill', 'ppo', 'sft')


@pytest.mark.parametrize('name', [*slow_in_gate(KINDS, KINDS)])
async def test_a_step_on_trees_is_one_on_flat_rows(name):
  algorithm = registry.make(name)
  groups = tries(algorithm, segments=algorithm.data_format == 'rollout')
  flat = await train(algorithm, groups)
  tree = await train(algorithm, groups, packing=first_fit())
  assert tree[1]['tokens/in_trees'] == 1
  assert tree[1]['tokens/shared_share'] > 0.1
  assert_same(flat, tree)
