"""Every loss and KL estimator against its restatement, and their invariances."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jaxrl.functional import aggregation, kl, losses
from tests.functional import harness
from tests.functional import restated_losses as restated
from tests.functional.harness import Case


def case(name, **options):
  return Case(name, getattr(losses, name), getattr(restated, name), options)


RECS = [
  {'keep': keep, 'weight': weight, 'regulariser': regulariser, 'regulariser_coef': 0.1}
  for keep, weight, regulariser in [
    ('none', 'none', 'k2'),
    ('two_side', 'importance', 'forward'),
    ('one_side', 'advantage', 'none'),
    ('gspo_one_side', 'none', 'none'),
    ('none', 'gspo', 'k2'),
    ('ring', 'gspo', 'none'),
  ]
]
LOSSES = [
  case('vanilla'),
  case('opmd'),
  case('opmd', tau=0.3),
  case('sft'),
  case('sft_is'),
  case('sft_phi'),
  case('ppo_clip'),
  case('ppo_clip', dual_clip=None, clip_high=0.28),
  case('ppo_clip', sequence_mask=0.05),
  case('cispo'),
  case('cispo', mask_clipped=True, clip_low=0.3),
  case('sapo'),
  case('gspo'),
  case('gspo', level='turn', clip_low=0.2, clip_high=0.2),
  case('gspo', gradient='mean', clip_low=0.2),
  case('gspo', gradient='mean', level='turn'),
  case('importance_sampling'),
  case('tis'),
  case('topr'),
  case('topr', ratio='token'),
  case('sppo'),
  case('kimi'),
  case('kimi', level='sequence', tau=0.2),
  case('rec'),
  *(case('rec', **options) for options in RECS),
  case('mix'),
  case('mix', mu=0.4, clip_high=0.28),
  case('mix_chord'),
]
WHOLE = [case('m2po'), case('m2po', threshold=0.5)]  # the batch decides for each row
KLS = [
  Case('k1', kl.k1, restated.k1),
  Case('k2', kl.k2, restated.k2, {'coef': 0.3}),
  Case('k3', kl.k3, restated.k3),
  Case('low_var', kl.low_var, restated.low_var, {'coef': 0.3}),
  Case('abs', kl.abs, restated.abs_),
  Case('corrected_k3', kl.corrected_k3, restated.corrected_k3),
]


def first(out):
  return out[0] if isinstance(out, tuple) else out


@pytest.mark.parametrize('case', LOSSES + WHOLE + KLS, ids=str)
def test_equals_the_restatement_in_value_and_gradient(case):
  compare(case, 'logprobs', harness.seeds(case, LOSSES + WHOLE + KLS))


@pytest.mark.parametrize('options', [{}, {'clip': None}, {'coef': 0.5, 'clip': 0.5}])
def test_value_loss_equals_the_restatement(options):
  case = Case('value_loss', losses.value_loss, restated.value_loss, options)
  compare(case, 'values', range(harness.BATCHES // 2))


def compare(case, argument, seeds):
  run = harness.loss_and_gradient(case, argument)
  for seed in seeds:
    columns = harness.batch(seed)
    weights = np.where(
      columns['mask'], np.random.default_rng(seed).random(columns['mask'].shape), 0
    ).astype(np.float32)
    out, gradient = run(columns, weights)
    wanted = np.real(case.restated(harness.wide(columns), case.options))
    what = f'{case} on batch {seed}'
    harness.assert_close(first(out), wanted, what=what)
    slope = harness.restated_gradient(case, harness.wide(columns), weights, argument)
    harness.assert_close(
      gradient, slope, harness.row_scale(slope), what=f'gradient of {what}'
    )
    assert np.all(gradient[~columns['mask']] == 0)
    if isinstance(out, tuple):
      for name, metric in out[1].items():
        assert np.all(np.isfinite(metric)), name


@pytest.mark.parametrize('case', LOSSES, ids=str)
def test_rows_padding_and_micro_batches_change_nothing(case):
  """Row order, more padding, and splitting under weights made once."""
  columns = harness.batch(5)
  loss = np.asarray(first(harness.call(case, columns)))
  order = np.random.default_rng(0).permutation(harness.ROWS)
  moved = first(harness.call(case, harness.permuted(columns, order)))
  np.testing.assert_allclose(moved, loss[order], rtol=1e-6)
  more = first(harness.call(case, harness.padded(columns)))
  np.testing.assert_allclose(more[: harness.ROWS, : harness.TOKENS], loss, rtol=1e-6)
  assert np.all(np.asarray(more)[harness.ROWS :] == 0)
  for mode in ('token_mean', 'sequence_mean_token_mean'):
    weights = aggregation.token_weights(columns['mask'], mode=mode)
    parts = [
      jnp.sum(
        weights[rows] * first(harness.call(case, harness.permuted(columns, rows)))
      )
      for rows in (np.arange(5), np.arange(5, harness.ROWS))
    ]
    np.testing.assert_allclose(sum(parts), np.sum(weights * loss), rtol=1e-5)


@pytest.mark.parametrize('case', LOSSES + KLS, ids=str)
def test_a_number_is_traced(case):
  """Numeric options may be tracers, masks bool or float."""
  numbers = {k: v for k, v in case.options.items() if isinstance(v, float)}
  fixed = {k: v for k, v in case.options.items() if k not in numbers}

  def run(numbers, columns):
    again = Case(case.name, case.fn, case.restated, fixed | numbers)
    return first(harness.call(again, columns))

  columns = harness.batch(1)
  for mask in (columns['mask'], columns['mask'].astype(np.float32)):
    out = jax.eval_shape(run, numbers, columns | {'mask': mask})
    assert out.shape == mask.shape and out.dtype == jnp.float32


def test_ppo_clip_by_hand():
  """ε = .2, c = 3: clipped above for A > 0, below for A < 0, and dual-clipped."""
  r = jnp.array([[1.5, 0.5, 1.5, 0.5, 4.0, 1.1]])
  a = jnp.array([[1.0, 1.0, -1.0, -1.0, -1.0, 2.0]])
  mask = jnp.ones_like(r, bool)
  loss, metrics = losses.ppo_clip(jnp.log(r), jnp.zeros_like(r), a, mask)
  np.testing.assert_allclose(loss, [[-1.2, -0.5, 1.5, 0.8, 3.0, -2.2]], rtol=1e-6)
  np.testing.assert_array_equal(metrics['clip_fraction'], [[1, 0, 0, 1, 1, 0]])


def test_opmd_by_hand():
  loss, _ = losses.opmd(
    jnp.array([[-2.0, -1.0]]), jnp.array([[0.5, -1.0]]), jnp.ones((1, 2), bool), tau=3.0
  )
  np.testing.assert_allclose(loss, [[0.25, -0.25]])


def test_value_loss_by_hand():
  """V moved 1 from V_old: the clipped error is the larger one and has no slope."""
  ones = jnp.ones((1, 1))
  loss, _ = losses.value_loss(ones, 0 * ones, 2 * ones, ones > 0, clip=0.2)
  np.testing.assert_allclose(loss, [[0.5 * 1.8**2]], rtol=1e-6)


def test_k3_by_hand():
  p, q = jnp.array([[-1.0]]), jnp.array([[-1.5]])
  np.testing.assert_allclose(kl.k3(p, q), np.exp(-0.5) - 0.5, rtol=1e-6)


def test_a_coefficient_of_zero_needs_no_reference():
  assert kl.term(kl.k2, 0.0) is None
