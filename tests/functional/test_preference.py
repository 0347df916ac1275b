"""Losses on pairs: values, gradients through both rows, and broken pairs."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jaxrl.functional import losses
from jaxrl.functional.aggregation import pair_weights
from tests.functional import harness
from tests.functional import restated_losses as restated

CASES = [
  ('dpo', {}),
  ('dpo', {'beta': 0.5, 'label_smoothing': 0.2}),
  ('ipo', {}),
  ('hinge', {'beta': 0.3}),
]
NAMES = ('logprobs', 'ref_logprobs', 'mask', 'rewards', 'pair_ids')


def paired(seed):
  """A random batch whose rows are paired; every second one was preferred."""
  columns = harness.batch(seed)
  rng = np.random.default_rng(seed)
  real = rng.permutation(np.flatnonzero(columns['task_ids'] >= 0))
  columns['pair_ids'] = np.full(harness.ROWS, -1, np.int32)
  columns['rewards'] = np.zeros_like(columns['rewards'])
  for pair in range(len(real) // 2):
    both = real[2 * pair : 2 * pair + 2]
    columns['pair_ids'][both] = pair
    columns['rewards'][both[0], -1] = 1
  return columns


@pytest.mark.parametrize('name, options', CASES)
def test_value_and_gradient_equal_the_restatement(name, options):
  fn, slow = getattr(losses, name), getattr(restated, name)

  @jax.jit
  def run(logprobs, columns):
    def total(p):
      given = {k: columns[k] for k in NAMES} | {'logprobs': p}
      loss, metrics = fn(**given, **options)
      return jnp.sum(loss * pair_weights(columns['pair_ids'])), (loss, metrics)

    return jax.grad(total, has_aux=True)(logprobs)

  for seed in range(60):
    columns = paired(seed)
    slope, (loss, metrics) = run(columns['logprobs'], columns)
    wide = harness.wide(columns)
    wanted = np.real(slow(wide, options))
    # Sums over a row reach ±300, so the margin carries their rounding.
    harness.assert_close(loss, wanted, scale=10, what=name)
    assert all(np.all(np.isfinite(m)) for m in metrics.values())
    rows = np.asarray(columns['pair_ids']) >= 0
    exact = np.zeros(slope.shape)
    for at in np.ndindex(slope.shape):
      step = np.zeros(slope.shape, complex)
      step[at] = 1j * harness.STEP
      moved = slow(wide | {'logprobs': wide['logprobs'] + step}, options)
      exact[at] = np.sum(np.imag(moved)[rows]) / harness.STEP / max(rows.sum(), 1)
    harness.assert_close(slope, exact, np.abs(exact).max(initial=0) * 10, what=name)
    assert np.all(np.asarray(slope)[~columns['mask']] == 0)


def test_dpo_by_hand_and_independent_of_row_order():
  """Δ = 1 − (−2) = 3: loss log(1 + e^−0.3), the mean of one pair."""
  p, q = jnp.array([[-1.0], [-4.0]]), jnp.array([[-2.0], [-2.0]])
  mask, rewards = jnp.ones((2, 1), bool), jnp.array([[1.0], [0.0]])
  ids = jnp.array([0, 0])
  for order in ([0, 1], [1, 0]):
    at = jnp.array(order)
    loss, metrics = losses.dpo(p[at], q[at], mask, rewards[at], ids)
    total = jnp.sum(loss * pair_weights(ids))
    np.testing.assert_allclose(total, np.log1p(np.exp(-0.3)), rtol=1e-6)
    np.testing.assert_allclose(metrics['accuracy'], 1)


@pytest.mark.parametrize(
  'ids, rewards, words',
  [
    ([0, 0, 1], [1.0, 0, 1], 'pair 1 has 1 rows'),
    ([0, 0, 0], [1.0, 0, 0], 'pair 0 has 3 rows'),
    ([0, 0, -1], [1.0, 1, 0], 'both have reward 1.0'),
  ],
)
def test_broken_pairs_are_errors(ids, rewards, words):
  rewards = jnp.array(rewards)[:, None]
  with pytest.raises(ValueError, match=words):
    losses.dpo(rewards, rewards, rewards > -1, rewards, jnp.array(ids))
