"""Concatenated steps: joined in rows, and what they teach is what separate rows do."""

import dataclasses

import jax
import numpy as np
import pytest

from jaxrl.algorithms import registry
from jaxrl.data.trajectory_codec import from_json, to_json
from jaxrl.models.transformer_lm import TransformerLM
from jaxrl.training.batching.batch_builder import collate
from jaxrl.training.optimizers import OptimizerOptions
from tests.calls import make_optimizer
from tests.rollout.fakes import EchoEnv, FakeEngine, play, world
from tests.training import toy


async def rows(row_format, turns=3, **options):
  engine = FakeEngine(lambda prompt, sampling: 'ab')
  context = world(lambda: EchoEnv(turns=turns), engine)
  return await play(context, max_steps=turns, row_format=row_format, **options)


async def test_steps_are_laid_end_to_end():
  apart = await rows('step')
  (row,) = await rows('concatenated')
  assert row.extras['segments'] == [len(part.tokens) for part in apart]
  for name in 'tokens action_mask rollout_logprobs rewards weights_version'.split():
    wanted = np.concatenate([getattr(part, name) for part in apart])
    np.testing.assert_array_equal(getattr(row, name), wanted)
    assert getattr(row, name).dtype == wanted.dtype
  assert (row.turn, row.score) == (0, 6)
  assert 'state_hash' not in row.extras  # of which of its turns?
  again = from_json(to_json(row))
  batch = collate([[again, apart[1]]], (256,))
  ids = [n + 1 for n, part in enumerate(apart) for _ in part.tokens]
  assert batch.segment_ids[0, : len(ids)].tolist() == ids
  assert not batch.segment_ids[0, len(ids) :].any()
  assert batch.segment_ids[1].tolist() == [1] * len(apart[1].tokens) + [0] * (
    256 - len(apart[1].tokens)
  )


async def test_a_row_has_no_more_tokens_than_an_episode_may():
  apart = [len(row.tokens) for row in await rows('step', turns=4)]
  packed = await rows('concatenated', turns=4, max_length=apart[0] + apart[1] + 70)
  assert [row.extras.get('segments') for row in packed] == [apart[:3], None]
  assert [row.turn for row in packed] == [0, 3]
  assert not any('state_hash' in row.extras for row in packed)
  assert len({row.trajectory_id for row in packed}) == 2


def test_segments_that_are_not_the_row_are_refused():
  ((row, *_), *_) = toy.groups()
  row.extras['segments'] = [2, 2]
  with pytest.raises(ValueError, match=r'has segments of \[2, 2\]'):
    collate([[row]], (16,))


def played(joined, seed=0):
  """Two groups of two episodes of three steps each, apart or joined in a row."""
  rng, groups = np.random.default_rng(seed), []
  for g in range(2):
    group = []
    for member in range(2):
      fields = {'env_group': g, 'sample_index': member}
      steps = [
        toy.trajectory(rng, rng.integers(4, 10), turn=i, **fields) for i in range(3)
      ]
      whole = {
        name: np.concatenate([getattr(row, name) for row in steps])
        for name in ('tokens', 'action_mask', 'rollout_logprobs', 'rewards')
      }
      versions = np.concatenate([row.weights_version for row in steps])
      sizes = [len(row.tokens) for row in steps]
      row = dataclasses.replace(
        steps[0], **whole, weights_version=versions, extras={'segments': sizes}
      )
      group += [row] if joined else steps
    groups.append(group)
  return groups


async def learn(joined):
  algorithm = registry.make('grpo', {'kl_coef': 0.0})
  shape = {'num_rows': 4, 'length_buckets': (32,)} if joined else {'num_rows': 12}
  learner = toy.learner(
    algorithm,
    kind=TransformerLM,
    optimizer=make_optimizer(
      OptimizerOptions(learning_rate=1e-2, name='adamw(eps=1e-2)')
    ),
    **shape,
  )
  metrics = await learner.update(played(joined))
  return learner.params, metrics


async def test_loss_and_gradient_are_those_of_rows_of_their_own():
  (params, metrics), (others, other_metrics) = await learn(True), await learn(False)
  for name in ('loss/total', 'optimizer/grad_norm', 'mismatch/kl'):
    if name in metrics:
      assert metrics[name] == pytest.approx(other_metrics[name], rel=1e-5, abs=1e-7)
  assert metrics['optimizer/grad_norm'] > 1e-2
  leaves, wanted, start = map(
    jax.tree.leaves, (params, others, toy.params(TransformerLM))
  )
  for one, other in zip(leaves, wanted, strict=True):
    np.testing.assert_allclose(one, other, rtol=0, atol=2e-6)
  moved = [np.abs(one - first).max() for one, first in zip(leaves, start, strict=True)]
  assert max(moved) > 1e-3  # else equality says nothing
