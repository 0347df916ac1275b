import dataclasses

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from jaxrl.algorithms import registry
from jaxrl.training.batching import batch_builder
from jaxrl.training.batching.batch_builder import collate
from tests.training import toy

GRPO = registry.make('grpo', {'group_size': 4})


def test_rows_of_a_micro_batch_hold_whole_atoms_and_fit_the_mesh():
  assert (
    batch_builder.rows_per_micro_batch(
      64, num_micro_batches=4, unit_size=1, row_multiple=1
    )
    == 16
  )
  assert (
    batch_builder.rows_per_micro_batch(
      10, num_micro_batches=4, unit_size=1, row_multiple=2
    )
    == 4
  )
  assert (
    batch_builder.rows_per_micro_batch(
      24, num_micro_batches=4, unit_size=4, row_multiple=1
    )
    == 8
  )


@settings(deadline=None, max_examples=50)
@given(
  sizes=st.lists(st.integers(1, 4), min_size=1, max_size=12),
  minis=st.integers(1, 3),
  micros=st.integers(1, 3),
)
def test_dealing_keeps_atoms_whole_and_minibatches_even(sizes, minis, micros):
  ends = np.cumsum(sizes)
  atoms = [np.arange(end - size, end) for end, size in zip(ends, sizes, strict=True)]
  index = batch_builder.assign_rows(atoms, minis, micros, capacity=4 * len(sizes))
  assert index is not None
  dealt = index.reshape(-1, index.shape[-1])
  assert sorted(dealt[dealt >= 0]) == list(range(ends[-1]))
  for atom in atoms:
    assert sum(bool(np.isin(atom, rows).any()) for rows in dealt) == 1
  filled = (index >= 0).sum(axis=(1, 2))
  assert filled.max() - filled.min() <= max(sizes)


def test_an_atom_that_fits_nowhere_gives_none():
  assert batch_builder.assign_rows([np.arange(3)], 1, 2, capacity=2) is None


def test_atoms_of_groups_and_pairs():
  batch = collate(toy.groups(sizes=(2, 3)), (16,), 8)
  assert [len(a) for a in batch_builder.batch_units(GRPO, batch)] == [1] * 5
  grouped = dataclasses.replace(GRPO, batch_unit='group')
  assert [list(a) for a in batch_builder.batch_units(grouped, batch)] == [
    [0, 1],
    [2, 3, 4],
  ]
  paired = dataclasses.replace(GRPO, batch_unit='pair')
  with pytest.raises(ValueError, match='pair_ids'):
    batch_builder.batch_units(paired, batch)
  batch = batch.replace(pair_ids=np.array([1, 0, 1, 0, 2, -1, -1, -1], np.int32))
  assert [list(a) for a in batch_builder.batch_units(paired, batch)] == [
    [0, 2],
    [1, 3],
    [4],
  ]


def test_the_order_depends_on_seed_step_and_epoch_alone():
  atoms = [np.array([i]) for i in range(20)]

  def order(*key):
    return [int(a[0]) for a in batch_builder.shuffle_units(atoms, *key)]

  assert order(0, 3, 1) == order(0, 3, 1)
  keys = [(0, 0, 0), (1, 0, 0), (0, 1, 0), (0, 0, 1)]
  assert len({tuple(order(*key)) for key in keys}) == len(keys)
  assert sorted(order(0, 0, 0)) == list(range(20))
