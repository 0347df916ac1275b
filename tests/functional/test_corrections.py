"""Weights for the mismatch between engine and learner, against numpy."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jaxrl.functional import corrections
from tests.functional import harness
from tests.functional.restated_losses import row_mean, turns


def restated_ratio(c, level):
  d = np.where(c['mask'], c['old_logprobs'] - c['rollout_logprobs'], 0)
  if level == 'sequence':
    d = d.sum(axis=1, keepdims=True) + 0 * d
  if level == 'geometric':
    d = row_mean(d, c['mask']) + 0 * d
  if level == 'segment':
    mean = 0 * d
    for row, stretches in enumerate(turns(c['mask'])):
      for where in stretches:
        mean[row, where] = d[row, where].mean()
    d = mean
  return np.exp(np.clip(d, -20, 20))


def band(c, w, low, high):
  return c['mask'] & (w >= low) & (w <= high)


def both(c, options):
  w, judged = restated_ratio(c, 'segment'), restated_ratio(c, 'geometric')
  p, q = np.exp(c['old_logprobs']), np.exp(c['rollout_logprobs'])
  calm = np.abs(p - q) <= 0.3
  return np.where(band(c, judged, 0.5, 2) & calm, np.minimum(w, 1.5), 0)


CASES = [
  ('tis', {}, lambda c, o: np.minimum(restated_ratio(c, 'token'), 2)),
  (
    'tis',
    {'level': 'sequence', 'cap': 3.0},
    lambda c, o: np.minimum(restated_ratio(c, 'sequence'), 3),
  ),
  (
    'tis',
    {'level': 'geometric'},
    lambda c, o: np.minimum(restated_ratio(c, 'geometric'), 2),
  ),
  ('mis', {}, lambda c, o: 1.0 * band(c, restated_ratio(c, 'geometric'), 0.5, 2)),
  (
    'mis',
    {'level': 'token', 'low': 0.9},
    lambda c, o: 1.0 * band(c, restated_ratio(c, 'token'), 0.9, 2),
  ),
  (
    'icepop',
    {},
    lambda c, o: (
      restated_ratio(c, 'token') * band(c, restated_ratio(c, 'token'), 0.5, 5)
    ),
  ),
  (
    'train_infer_correction',
    {
      'weight': 'segment',
      'cap': 1.5,
      'mask_level': 'geometric',
      'ratio_low': 0.5,
      'ratio_high': 2.0,
      'max_difference': 0.3,
    },
    both,
  ),
]


@pytest.mark.parametrize('name, options, slow', CASES)
def test_weights_equal_the_restatement(name, options, slow):
  fn = getattr(corrections, name)
  run = jax.jit(lambda o, r, m: fn(o, r, m, **options))
  for seed in range(harness.BATCHES):
    columns = harness.batch(seed)
    # Log-probs, as engines give them: at most 0.
    for column in ('old_logprobs', 'rollout_logprobs'):
      columns[column] = np.minimum(columns[column], 0)
    weights, metrics = run(
      columns['old_logprobs'], columns['rollout_logprobs'], columns['mask']
    )
    wide = harness.wide(columns)
    wanted = np.where(wide['mask'], slow(wide, options), 0)
    harness.assert_close(weights, wanted, what=f'{name} on batch {seed}')
    for key, metric in metrics.items():
      assert metric.shape == weights.shape and np.all(np.isfinite(metric)), key


def test_no_gradient_flows_through_a_weight():
  columns = harness.batch(0)

  def total(p):
    args = (p, columns['rollout_logprobs'], columns['mask'])
    return jnp.sum(corrections.tis(*args)[0] + corrections.icepop(*args)[0])

  assert np.all(jax.grad(total)(columns['old_logprobs']) == 0)


def test_effective_sample_size():
  mask = jnp.array([[True, True, True, False]])
  even = corrections.effective_sample_size(jnp.ones((1, 4)), mask)
  np.testing.assert_allclose(even, 1)
  one = corrections.effective_sample_size(jnp.array([[1.0, 0, 0, 9]]), mask)
  np.testing.assert_allclose(one, 1 / 3)
  assert corrections.effective_sample_size(0 * mask, mask) == 0


def test_mismatch_is_never_negative():
  columns = harness.batch(3)
  out = corrections.mismatch(
    columns['old_logprobs'], columns['rollout_logprobs'], columns['mask']
  )
  assert np.all(np.asarray(out['kl']) >= -1e-6)
  assert np.max(out['logprob_difference']) > 0


def test_an_unknown_level_is_an_error():
  with pytest.raises(ValueError, match='geometric'):
    corrections.ratio(jnp.ones((1, 1)), jnp.ones((1, 1)), jnp.ones((1, 1)), level='row')
