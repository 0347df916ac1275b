"""Packing: every token at its place, padding outside of everything."""

import dataclasses

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from jaxrl.training.batching.batch_builder import collate, pick_bucket
from jaxrl.types import Trajectory


def row(length, seed=0, **fields):
  rng = np.random.default_rng(seed)
  mask = rng.random(length) < 0.5
  return Trajectory(
    tokens=rng.integers(1, 100, length).astype(np.int32),
    action_mask=mask,
    rollout_logprobs=np.where(mask, rng.normal(size=length), 0).astype(np.float32),
    rewards=rng.normal(size=length).astype(np.float32),
    weights_version=np.where(mask, 5, -1).astype(np.int32),
    **fields,
  )


LENGTHS = st.lists(st.lists(st.integers(0, 12), min_size=1, max_size=4), min_size=1)


@settings(max_examples=60, deadline=None)
@given(lengths=LENGTHS, multiple=st.integers(1, 5))
def test_rows_survive_and_padding_is_empty(lengths, multiple):
  groups = [
    [row(n, seed=10 * i + j, sample_index=j) for j, n in enumerate(group)]
    for i, group in enumerate(lengths)
  ]
  batch = collate(groups, (4, 8, 16), multiple=multiple)
  rows = [r for group in groups for r in group]
  count, width = batch.tokens.shape
  assert width == pick_bucket(max(len(r.tokens) for r in rows), (16, 4, 8))
  assert count % multiple == 0
  assert count - len(rows) < multiple
  for i, r in enumerate(rows):
    n = len(r.tokens)
    for name in ('tokens', 'action_mask', 'rollout_logprobs', 'rewards'):
      column = getattr(batch, name)
      assert np.array_equal(column[i, :n], getattr(r, name))
      assert not column[i, n:].any()
    assert np.array_equal(batch.weights_version[i, :n], r.weights_version)
    assert (batch.weights_version[i, n:] == -1).all()
    assert batch.segment_ids[i].tolist() == [1] * n + [0] * (width - n)
  for column in (batch.tokens, batch.action_mask, batch.segment_ids, batch.rewards):
    assert not column[len(rows) :].any()
  for ids in (batch.group_ids, batch.episode_ids, batch.turn_ids):
    assert (ids[len(rows) :] == -1).all()
    assert (ids[: len(rows)] >= 0).all()


def test_ids_are_dense_and_turns_share_their_episode():
  groups = [
    [row(3, sample_index=0), row(3, sample_index=0, turn=1), row(3, sample_index=2)],
    [row(3, sample_index=0), row(3, sample_index=2)],
  ]
  batch = collate(groups, [4], num_rows=7)
  assert batch.group_ids.tolist() == [0, 0, 0, 1, 1, -1, -1]
  assert batch.episode_ids.tolist() == [0, 0, 1, 2, 3, -1, -1]
  assert batch.turn_ids.tolist() == [0, 1, 0, 0, 0, -1, -1]


def test_dtypes_and_absent_columns():
  batch = collate([[row(3)]], [4])
  assert batch.tokens.dtype == batch.segment_ids.dtype == np.int32
  assert batch.action_mask.dtype == bool
  assert batch.rewards.dtype == batch.rollout_logprobs.dtype == np.float32
  assert batch.expert_mask is batch.state_hash is batch.old_logprobs is None


def test_optional_columns():
  batch = collate(
    [[row(3, is_expert=True), row(3, extras={'state_hash': 9})]], [4], num_rows=3
  )
  assert batch.expert_mask.tolist() == [True, False, False]
  assert batch.state_hash.tolist() == [-1, 9, -1]


def test_roles_and_rewards_of_rows():
  """An episode of two rows that its environment alone rewarded has its return."""
  listed = {'role': 2, 'reward_terms': [(3.0, 0.5), (1.0, 2.0)]}
  first, second = row(3, seed=1), row(4, seed=2, turn=1)
  groups = [[row(3, sample_index=1, extras=listed), first, second]]
  batch = collate(groups, [4], num_rows=4)
  assert batch.role_ids.tolist() == [2, 0, 0, -1]
  total = first.score + second.score
  terms, weights = batch.reward_terms, batch.reward_weights
  assert terms.shape == weights.shape == (4, 8) and terms.dtype == np.float32
  np.testing.assert_allclose(terms[:, :2], [[3, 1], [total, 0], [total, 0], [0, 0]])
  np.testing.assert_allclose(weights[:, :2], [[0.5, 2], [1, 0], [1, 0], [0, 0]])
  assert collate([[row(3)]], [4]).role_ids is None


def test_ends_of_steps():
  """Where nobody rewarded steps, they end with the turns."""
  turns = [False, True, True, False, True]
  plain = dataclasses.replace(row(5), action_mask=np.array(turns))
  stepped = dataclasses.replace(plain, sample_index=1, extras={'step_ends': [1]})
  batch = collate([[plain, stepped]], [6], num_rows=3)
  assert batch.step_ends.dtype == bool
  places = [np.flatnonzero(row).tolist() for row in batch.step_ends]
  assert places == [[2, 4], [1, 2, 4], []]


def test_pad_id():
  batch = collate([[row(3)]], [4], num_rows=2, pad_id=77)
  assert batch.tokens[0, 3:].tolist() == [77]
  assert batch.tokens[1].tolist() == [77] * 4


def test_errors():
  with pytest.raises(ValueError, match=r'9 tokens is longer than .* 8'):
    collate([[row(9)]], [4, 8])
  with pytest.raises(ValueError, match='3 rows do not fit a batch of 2'):
    collate([[row(1), row(1), row(1)]], [4], num_rows=2)
  with pytest.raises(ValueError, match='nothing to collate'):
    collate([[], []], [4])
