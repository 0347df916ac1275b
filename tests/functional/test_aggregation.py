"""Weights by hand, their sums, and the errors of a wrong mode."""

import jax.numpy as jnp
import numpy as np
import pytest

from jaxrl.functional import aggregation
from jaxrl.signature import ConfigError

MASK = jnp.array([[1, 1, 0, 1], [0, 1, 0, 0], [0, 0, 0, 0]], bool)
LOSS = jnp.array([[1.0, 2, 100, 3], [100, 8, 100, 100], [100, 100, 100, 100]])


@pytest.mark.parametrize(
  'mode, wanted',
  [
    ('token_mean', 14 / 4),
    ('sequence_mean_token_sum', (6 + 8) / 2),
    ('sequence_mean_token_mean', (2 + 8) / 2),
    ('sequence_mean_token_sum_norm(length=10)', 14 / 20),
  ],
)
def test_modes_by_hand(mode, wanted):
  weights = aggregation.token_weights(MASK, mode=mode)
  assert weights.shape == MASK.shape
  np.testing.assert_allclose(np.sum(weights * LOSS), wanted, rtol=1e-6)
  assert np.all(np.asarray(weights)[~np.asarray(MASK)] == 0)
  wider = aggregation.token_weights(jnp.pad(MASK, ((0, 3), (0, 5))), mode=mode)
  np.testing.assert_array_equal(wider[:3, :4], weights)


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
  with pytest.raises(ConfigError, match='length=1024'):
    aggregation.token_weights(MASK, mode='sequence_mean_token_sum_norm')
  with pytest.raises(ConfigError, match='length'):
    aggregation.token_weights(MASK, mode='token_mean(length=3)')


def test_row_and_pair_weights():
  np.testing.assert_allclose(aggregation.row_weights(MASK), [0.5, 0.5, 0])
  weights = aggregation.pair_weights(jnp.array([0, 1, 0, 1, -1]))
  np.testing.assert_allclose(weights, [0.25, 0.25, 0.25, 0.25, 0])
