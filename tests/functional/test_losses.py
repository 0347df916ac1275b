"""Every loss and KL estimator against its restatement, and their invariances."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jaxrl.functional import aggregation, kl, losses
from tests.functional import harness
from tests.functional import restated_losses as restated
from tests.functional.cases import (
  COVARIANCE,
  DISTILL,
  LOSSES,
  M2PO,
  OF_ENTROPY,
  OF_LOGITS,
  PER_TOKEN,
  RECS,
  VALUE,
)
from tests.functional.harness import Case, first
from tests.marks import slow_except

FLOATS = ('logprobs', 'old_logprobs', 'advantages', 'entropy', 'values', 'old_values')


def compare(case, argument='logprobs', jit=True, scale=0.0):
  """Value and gradient on the rows of all batches, and on those of one policy.

  That is where a step begins: the policy is the one that sampled, and the reference.

  scale: what either is at least measured against, beside its own size.
  """
  columns = harness.end_to_end(harness.stacked())
  weights = harness.random_weights(columns)
  run = harness.loss_and_gradient(case, argument, jit)
  for given in (columns, harness.with_one_policy(columns)):
    check_restated(case, run, given, weights, argument, scale)
  return run, columns, weights


def check_restated(case, run, columns, weights, argument='logprobs', scale=0.0):
  """Compares what `run` gives for some columns with the restatement."""
  out, gradient = run(columns, weights)
  wide = harness.wide(columns)
  wanted = np.real(case.restated(wide, case.options))
  harness.assert_close(first(out), wanted, scale, str(case))
  slope = harness.restated_gradient(case, wide, weights, argument)
  rows = np.maximum(harness.row_scale(slope), scale)
  harness.assert_close(gradient, slope, rows, f'gradient of {case}')
  assert np.all(gradient[~columns['mask']] == 0)
  check_metrics(out)


def check_metrics(out):
  for metric in jax.tree.leaves(out):
    assert np.all(np.isfinite(metric))


@pytest.mark.parametrize('case', PER_TOKEN, ids=str)
def test_equals_the_restatement_in_value_and_gradient(case):
  run, columns, weights = compare(case)
  names = set(case.fn.__code__.co_varnames)
  if 'mask' in names:  # a KL estimator has none: its weights are 0 there
    poisoned = harness.poisoned(columns, [n for n in FLOATS if n in names])
    plain, rubbish = run(columns, weights), run(poisoned, weights)
    np.testing.assert_array_equal(first(rubbish[0]), first(plain[0]))
    np.testing.assert_array_equal(rubbish[1], plain[1])


def one_at_a_time(cases):
  """Every case; those that differ from the first in several options are slow."""
  first = cases[0].options.items()
  return slow_except([c for c in cases if len(c.options.items() - first) < 2], cases)


@pytest.mark.parametrize('case', one_at_a_time(RECS), ids=str)
def test_every_combination_of_rec_equals_its_restatement(case):
  compare(case, jit=False)


@pytest.mark.parametrize('case', VALUE, ids=str)
def test_value_loss_equals_the_restatement(case):
  compare(case, 'values')


@pytest.mark.parametrize('case', DISTILL, ids=str)
def test_distillation_equals_the_restatement(case):
  """The rest, 1 − Σp, has as many digits fewer as it is smaller than 1."""
  compare(case, 'topk_logprobs', scale=10.0)


@pytest.mark.parametrize('case', OF_ENTROPY, ids=str)
def test_entropy_terms_equal_the_restatement(case):
  compare(case, 'entropy')


@pytest.mark.parametrize('case', OF_LOGITS, ids=str)
def test_what_is_exact_over_a_vocabulary(case):
  """As exact as the largest of what is added up, the differences of log-probs."""
  columns = harness.end_to_end(harness.stacked())
  gaps = np.abs(columns['logits'] - columns['ref_logits'])
  compare(case, 'logits', scale=np.max(gaps))


@pytest.mark.parametrize('case', M2PO, ids=str)
def test_m2po_equals_the_restatement(case):
  """Batch by batch, for the whole batch decides what is kept."""
  columns = harness.stacked()
  weights = harness.random_weights(columns)
  pair = harness.each(lambda both: harness.loss_and_gradient(case)(*both))
  for given in (columns, harness.with_one_policy(columns)):
    check_m2po(case, pair((given, weights)), given, weights)


def check_m2po(case, out, columns, weights):
  (loss, metrics), gradients = out
  check_metrics((loss, metrics, gradients))
  for seed, batch in enumerate(harness.unstacked(harness.wide(columns))):
    what = f'{case} on batch {seed}'
    wanted = np.real(case.restated(batch, case.options))
    harness.assert_close(loss[seed], wanted, what=what)
    slope = harness.restated_gradient(case, batch, weights[seed])
    harness.assert_close(gradients[seed], slope, harness.row_scale(slope), what)
    keep = restated.m2po_keep(batch, case.options.get('threshold', 0.04))
    cut = np.asarray(metrics['clip_fraction'][seed])
    np.testing.assert_array_equal(cut[batch['mask']] == 0, keep[batch['mask']], what)


@pytest.mark.parametrize(
  'case, decided, kind', COVARIANCE, ids=lambda x: getattr(x, '__name__', str(x))
)
def test_covariance_losses_equal_the_restatement(case, decided, kind):
  """Batch by batch, too: the loss, its gradient, and which tokens are singled out."""
  columns = harness.stacked()
  weights = harness.random_weights(columns)
  pair = harness.each(lambda both: harness.loss_and_gradient(case)(*both))
  (loss, metrics), gradients = pair((columns, weights))
  check_metrics((loss, metrics, gradients))
  name, singled_out = ('penalised', 0) if kind else ('clip_fraction', 0)
  for seed, batch in enumerate(harness.unstacked(harness.wide(columns))):
    what = f'{case} on batch {seed}'
    wanted = decided(batch, case.options)
    got = np.asarray(metrics[name][seed]) == (1 if kind else 0)
    np.testing.assert_array_equal(got[batch['mask']], wanted[batch['mask']], what)
    singled_out += np.sum((wanted == kind)[batch['mask']])
    value = np.real(case.restated(batch, case.options))
    harness.assert_close(loss[seed], value, what=what)
    slope = harness.restated_gradient(case, batch, weights[seed])
    harness.assert_close(gradients[seed], slope, harness.row_scale(slope), what)
  assert singled_out > 100


@pytest.mark.parametrize('case', LOSSES + VALUE + DISTILL, ids=str)
def test_rows_padding_and_micro_batches_change_nothing(case):
  """Row order, more padding, and splitting under weights made once."""
  columns = harness.batch(5)
  run = jax.jit(lambda columns: first(harness.call(case, columns)))
  loss = np.asarray(run(columns))
  order = np.random.default_rng(0).permutation(harness.ROWS)
  moved = run(harness.permuted(columns, order))
  np.testing.assert_allclose(moved, loss[order], rtol=1e-6)
  more = run(harness.padded(columns))
  np.testing.assert_allclose(more[: harness.ROWS, : harness.TOKENS], loss, rtol=1e-5)
  assert np.all(np.asarray(more)[harness.ROWS :] == 0)
  half = harness.ROWS // 2
  for mode in ('token_mean', 'sequence_mean_token_mean'):
    weights = np.asarray(aggregation.token_weights(columns['mask'], mode=mode))
    parts = [
      np.sum(weights[rows] * run(harness.permuted(columns, rows)))
      for rows in (np.arange(half), np.arange(half, harness.ROWS))
    ]
    np.testing.assert_allclose(sum(parts), np.sum(weights * loss), rtol=1e-5)


@pytest.mark.parametrize('case', PER_TOKEN, ids=str)
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


def test_corrected_k3_by_hand():
  """DeepSeek-V3.2 (arXiv 2512.02556): ratio·(x − log x − 1) with x = π_ref/π.

  Ratio 1.5 and x = 2: the value is 1.5·(1 − log 2), and its slope by log π is the ratio
  times (x − log x − 1) + (1 − x) = −log 2. Ratio 4 counts as 2, and its own slope is 0:
  x = ½ leaves 2·(1 − ½).
  """
  p = np.float32([[-1, -1]])
  q, o = np.float32(p + np.log([2, 0.5])), np.float32(p - np.log([1.5, 4]))

  def run(p):
    value = kl.corrected_k3(p, q, o)
    return value.sum(), value

  slope, value = jax.jit(jax.grad(run, has_aux=True))(p)
  wanted = [[1.5 * (1 - np.log(2)), 2 * (np.log(2) - 0.5)]]
  np.testing.assert_allclose(value, wanted, rtol=1e-5)
  np.testing.assert_allclose(slope, [[-1.5 * np.log(2), 1]], rtol=1e-5)


def test_corrected_k3_is_unbiased_for_samples_of_an_older_policy():
  """Its mean over the older policy's tokens is KL(π‖π_ref), and so is its gradient's.

  That is what DeepSeek-V3.2 corrects: k3 alone has another mean and another gradient.
  """
  rng = np.random.default_rng(0)
  logits, ref, noise = np.float32(rng.normal(size=(3, 6)))

  @jax.jit
  def run(logits):
    q, o = jax.nn.log_softmax(ref), jax.nn.log_softmax(logits + 0.2 * noise)
    ratio = jnp.exp(jax.nn.log_softmax(logits) - o)

    def exact(logits):
      p = jax.nn.log_softmax(logits)
      return jnp.sum(jnp.exp(p) * (p - q))

    def mean(estimator, *others):
      return lambda x: jnp.sum(jnp.exp(o) * estimator(jax.nn.log_softmax(x), *others))

    means = exact, mean(kl.corrected_k3, q, o), mean(kl.k3, q)
    return ratio, *(jax.value_and_grad(fn)(logits) for fn in means)

  ratio, wanted, corrected, plain = run(logits)
  assert ratio.max() < 2  # none is cut
  for a, b, other in zip(corrected, wanted, plain, strict=True):
    np.testing.assert_allclose(a, b, rtol=1e-4, atol=1e-6)
    assert np.abs(other - b).max() > 0.01


def test_a_coefficient_of_zero_needs_no_reference():
  assert kl.term(kl.k2, 0.0) is None
