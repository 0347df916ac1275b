"""Batches of many sizes are laid out in few shapes."""

import pytest

from jaxrl.algorithms import compose
from jaxrl.training.layout import Layout
from tests.training import toy


def layout(**changes):
  options = {
    'algorithm': compose.make('multi_step_grpo'),
    'num_rows': 8,
    'multiple': 2,
    'buckets': (16,),
    'minibatches': 2,
    'micro_batches': 2,
    'epochs': 1,
    'seed': 0,
  }
  return Layout(**(options | changes))


@pytest.mark.parametrize('count', range(1, 33))
def test_rows_come_in_multiples_of_the_usual_number(count):
  rows = toy.groups(sizes=(count,))
  batch, shape, indices = layout().lay_out(rows, 0)
  assert shape.rows == 8 * -(-count // 8) == len(batch.tokens)
  dealt = sorted(int(i) for index in indices for i in index.ravel() if i >= 0)
  assert dealt == list(range(count))
