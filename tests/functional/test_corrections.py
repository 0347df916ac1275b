"""Weights for the mismatch between engine and learner, against numpy."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jaxrl.functional import corrections
from tests.functional import harness
from tests.functional.cases import CORRECTIONS, RATIOS


def columns_of_engines():
  """The rows of all batches, with log-probs as engines give them: at most 0."""
  columns = harness.end_to_end(harness.stacked())
  for name in ('old_logprobs', 'rollout_logprobs'):
    columns[name] = np.minimum(columns[name], 0)
  return columns


@pytest.mark.parametrize('case', CORRECTIONS, ids=str)
def test_weights_equal_the_restatement_and_have_no_slope(case):
  columns = columns_of_engines()
  one = np.ones(columns['mask'].shape, np.float32)
  run = harness.loss_and_gradient(case, 'old_logprobs')
  (weights, metrics), slope = run(columns, one)
  wanted = case.restated(harness.wide(columns), case.options)
  harness.assert_close(weights, wanted, what=str(case))
  assert np.all(slope == 0)
  for key, metric in metrics.items():
    assert metric.shape == weights.shape and np.all(np.isfinite(metric)), key
  rubbish = run(harness.poisoned(columns, ('old_logprobs', 'rollout_logprobs')), one)
  np.testing.assert_array_equal(rubbish[0][0], weights)
  assert np.all(rubbish[1] == 0)


@pytest.mark.parametrize('case', RATIOS[:-1], ids=str)
def test_ratios_and_mismatch_equal_the_restatement(case):
  columns = columns_of_engines()
  out = jax.jit(functools.partial(harness.call, case))(columns)
  wanted = case.restated(harness.wide(columns), case.options)
  for name in wanted if isinstance(wanted, dict) else [...]:
    # |Δ| of log-probs, at most 50, has their rounding; the KL is a difference of it.
    scale = 0.1 if isinstance(wanted, dict) else 0.0
    got = out[name] if isinstance(wanted, dict) else out
    harness.assert_close(got, wanted[name], scale, f'{case}, {name}')


def test_effective_sample_size_equals_the_restatement():
  case, columns = RATIOS[-1], dict(harness.stacked())
  columns['weights'] = np.random.default_rng(0).exponential(size=columns['mask'].shape)
  got = harness.each(lambda c: harness.call(case, c))(columns)
  for seed, batch in enumerate(harness.unstacked(columns)):
    harness.assert_close(got[seed], case.restated(batch, {}), what=f'batch {seed}')


def weights_of(part, ratios, mask, **options):
  """A part's weights of one row, and what it calls masked, for π_train/π_rollout."""
  rollout = jnp.full((1, len(ratios)), -2.0)
  old = rollout + jnp.log(jnp.array([ratios]))
  run = jax.jit(functools.partial(part, **options))
  weights, metrics = run(old, rollout, jnp.array([mask], bool))
  return weights[0], metrics['masked'][0]


def test_icepop_by_hand():
  """Ring-1T (arXiv 2510.18855): M(k) = k for α ≤ k ≤ β, else 0; α = ½ and β = 5."""
  ratios, mask = [1.2, 0.49, 0.51, 7.0, 4.9, 5.1], [1, 1, 1, 0, 1, 1]
  weights, masked = weights_of(corrections.icepop, ratios, mask)
  np.testing.assert_allclose(weights, [1.2, 0, 0.51, 0, 4.9, 0], rtol=1e-6)
  np.testing.assert_array_equal(masked, [0, 1, 0, 0, 0, 1])


@pytest.mark.parametrize(
  'level, wanted',
  [
    ('token', [1, 0, 0, 0]),  # 2, ½ and 3
    ('segment', [1, 1, 0, 0]),  # √(2·½) and 3
    ('geometric', [1, 1, 0, 1]),  # ∛3 = 1.44
    ('sequence', [0, 0, 0, 0]),  # 3
  ],
)
def test_mis_by_hand(level, wanted):
  """Masked importance sampling (Liu et al., 2025) of a row with turns 2, ½ and 3.

  The band is [0.6, 2.5]; what an observation's ratio is does not matter.
  """
  ratios, mask = [2.0, 0.5, 100.0, 3.0], [1, 1, 0, 1]
  options = {'low': 0.6, 'high': 2.5, 'level': level}
  weights, masked = weights_of(corrections.mis, ratios, mask, **options)
  np.testing.assert_array_equal(weights, wanted)
  np.testing.assert_array_equal(masked, (1 - np.array(wanted)) * mask)


def test_no_gradient_flows_through_a_weight():
  columns = harness.batch(0)

  def total(p):
    args = (p, columns['rollout_logprobs'], columns['mask'])
    return jnp.sum(corrections.tis(*args)[0] + corrections.icepop(*args)[0])

  assert np.all(jax.jit(jax.grad(total))(columns['old_logprobs']) == 0)


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
