"""Batches of many sizes are laid out in few shapes."""

import pytest

from jaxrl.algorithms import registry
from jaxrl.training.batching.batch_builder import BatchBuilder
from tests.training import toy


def layout(**changes):
  options = {
    'algorithm': registry.make('multi_step_grpo'),
    'num_rows': 8,
    'row_multiple': 2,
    'buckets': (16,),
    'num_minibatches': 2,
    'num_micro_batches': 2,
    'num_epochs': 1,
    'seed': 0,
  }
  return BatchBuilder(**(options | changes))


@pytest.mark.parametrize('count', range(1, 33))
def test_rows_come_in_multiples_of_the_usual_number(count):
  rows = toy.groups(sizes=(count,))
  batch, shape, indices = layout().build_batch(rows, 0)
  assert shape.rows == 8 * -(-count // 8) == len(batch.tokens)
  dealt = sorted(int(i) for index in indices for i in index.ravel() if i >= 0)
  assert dealt == list(range(count))
