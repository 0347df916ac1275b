"""Losses on pairs: values, gradients through both rows, and broken pairs."""

import functools

import jax.numpy as jnp
import numpy as np
import pytest

from jaxrl.functional import losses
from jaxrl.functional.aggregation import pair_weights
from tests.functional import harness
from tests.functional.cases import PAIRS

NAMES = ('logprobs', 'ref_logprobs', 'mask', 'rewards', 'pair_ids')


def paired(seed):
  """A random batch whose rows are paired; every second one was preferred."""
  columns = harness.batch(seed)
  rng = np.random.default_rng(seed)
  real = rng.permutation(np.flatnonzero(columns['group_ids'] >= 0))
  columns['pair_ids'] = np.full(harness.ROWS, -1, np.int32)
  columns['rewards'] = np.zeros_like(columns['rewards'])
  for pair in range(len(real) // 2):
    both = real[2 * pair : 2 * pair + 2]
    columns['pair_ids'][both] = pair
    columns['rewards'][both[0], -1] = 1
  return columns


@pytest.mark.parametrize('case', PAIRS, ids=str)
def test_value_and_gradient_equal_the_restatement(case):
  """The pairs of all batches, also of a policy that is still its own reference.

  Rubbish where there is no action token changes nothing.
  """
  columns = all_pairs()
  weights = np.asarray(pair_weights(columns['pair_ids']))
  run = harness.loss_and_gradient(case)
  for given in (harness.with_one_policy(columns), columns):
    out, gradient = check_restated(case, run, given, weights)
  rubbish = run(harness.poisoned(columns, ('logprobs', 'ref_logprobs')), weights)
  np.testing.assert_array_equal(rubbish[0][0], out[0])
  np.testing.assert_array_equal(rubbish[1], gradient)


def check_restated(case, run, columns, weights):
  """Compares what `run` gives for some columns with the restatement, and returns it."""
  out, gradient = run(columns, weights)
  wide = harness.wide(columns)
  # Sums over a row reach ±300, so the margin carries their rounding.
  wanted = np.real(case.restated(wide, case.options))
  harness.assert_close(out[0], wanted, scale=30, what=str(case))
  for metric in out[1].values():
    assert np.all(np.isfinite(metric))
  exact = slopes(case, wide, weights)
  scale = harness.row_scale(exact) + 30 * weights[:, None]
  harness.assert_close(gradient, exact, scale, f'gradient of {case}')
  assert np.all(gradient[~columns['mask']] == 0)
  return out, gradient


@functools.cache
def all_pairs():
  """The rows of all batches; pairs of one are not those of another."""
  batches = [paired(seed) for seed in range(harness.BATCHES)]
  for number, batch in enumerate(batches):
    ids = batch['pair_ids']
    batch['pair_ids'] = np.where(ids < 0, -1, ids + number * harness.ROWS)
  stacked = {name: np.stack([b[name] for b in batches]) for name in NAMES}
  stacked['episode_ids'] = np.stack([b['episode_ids'] for b in batches])
  return harness.end_to_end(stacked)


def slopes(case, wide, weights):
  """By complex steps, of all chosen rows at once and then of all rejected ones.

  Both rows of a pair bear its loss, and have the same weight.
  """
  chosen, exact = wide['rewards'].sum(axis=1) > 0, np.zeros(wide['mask'].shape)
  for role in (chosen, ~chosen):
    for t in range(exact.shape[1]):
      step = np.zeros(exact.shape, complex)
      step[role, t] = 1j * harness.STEP
      moved = case.restated(wide | {'logprobs': wide['logprobs'] + step}, case.options)
      exact[role, t] = (2 * weights * np.imag(moved) / harness.STEP)[role]
  return exact


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
