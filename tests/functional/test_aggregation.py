"""Weights by hand, their sums, and the errors of a wrong mode."""

from typing import Any

import jax.numpy as jnp
import numpy as np
import pytest

from jaxrl.component_calls import ComponentCall
from jaxrl.functional import aggregation
from jaxrl.options import ConfigError
from tests.functional import harness
from tests.functional.cases import AGGREGATION
from tests.functional.test_preference import paired

MASK = jnp.array([[1, 1, 0, 1], [0, 1, 0, 0], [0, 0, 0, 0]], bool)
LOSS = jnp.array([[1.0, 2, 100, 3], [100, 8, 100, 100], [100, 100, 100, 100]])


@pytest.mark.parametrize(
  'mode, wanted',
  [
    ('token_mean', 14 / 4),
    ('sequence_mean_token_sum', (6 + 8) / 2),
    ('sequence_mean_token_mean', (2 + 8) / 2),
    ('sequence_mean_token_sum_norm', 14 / 20),
  ],
)
def test_modes_by_hand(mode, wanted):
  weights = aggregation.token_weights(MASK, mode=mode, length=10)
  assert weights.shape == MASK.shape
  np.testing.assert_allclose(np.sum(weights * LOSS), wanted, rtol=1e-6)
  assert np.all(np.asarray(weights)[~np.asarray(MASK)] == 0)
  wider = aggregation.token_weights(
    jnp.pad(MASK, ((0, 3), (0, 5))), mode=mode, length=10
  )
  np.testing.assert_array_equal(wider[:3, :4], weights)


@pytest.mark.parametrize('case', AGGREGATION, ids=str)
def test_weights_equal_the_restatement(case):
  """Of every batch, padding rows and rows without action tokens among them."""
  columns = dict(harness.stacked())
  pairs = [paired(seed)['pair_ids'] for seed in range(harness.BATCHES)]
  columns['pair_ids'] = np.stack(pairs)
  got = harness.each(lambda c: harness.call(case, c))(columns)
  for seed, batch in enumerate(harness.unstacked(columns)):
    wanted = case.restated(batch, case.options)
    if case.name == 'term_scale':  # where there is nothing, nothing is scaled
      wanted = np.where(batch['mask'].any(axis=1), wanted, got[seed])
    harness.assert_close(got[seed], wanted, what=f'{case} on batch {seed}')


def test_rows_left_out_are_not_counted():
  weights = aggregation.token_weights(
    MASK, mode='sequence_mean_token_sum', row_valid=jnp.array([True, False, True])
  )
  np.testing.assert_allclose(np.sum(weights * LOSS), 6)


def test_an_empty_batch_weighs_nothing():
  for mode in aggregation.MODES:
    weights = aggregation.token_weights(jnp.zeros((2, 3), bool), mode=mode, length=5)
    assert np.all(np.asarray(weights) == 0)


def test_wrong_modes_are_errors():
  with pytest.raises(ConfigError, match="Did you mean 'token_mean'"):
    aggregation.token_weights(MASK, mode='token_men')
  bad: Any
  for bad in (None, 0, '9', True):
    with pytest.raises(ConfigError, match='length=1024'):
      aggregation.token_weights(MASK, mode=aggregation.MODES[3], length=bad)
    with pytest.raises(ConfigError, match='length=1024'):
      call = ComponentCall(aggregation.MODES[3], {'length': bad})
      aggregation.check_aggregation(call.name, call.options, length=1)
  with pytest.raises(ConfigError, match="no option 'length'"):
    aggregation.check_aggregation('token_mean', {'length': 3})
  aggregation.check_aggregation(aggregation.MODES[3], {}, length=1)


def test_row_and_pair_weights():
  np.testing.assert_allclose(aggregation.row_weights(MASK), [0.5, 0.5, 0])
  weights = aggregation.pair_weights(jnp.array([0, 1, 0, 1, -1]))
  np.testing.assert_allclose(weights, [0.25, 0.25, 0.25, 0.25, 0])
