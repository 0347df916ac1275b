"""Schedules, controllers and entropy, distillation, penalties."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jaxrl.functional import aggregation, entropy, kl_controllers, shaping
from jaxrl.functional import losses as eager
from tests.functional import harness
from tests.functional.cases import SCHEDULES

losses = harness.Compiled(eager)


@pytest.mark.parametrize('case', SCHEDULES, ids=str)
def test_schedules_and_controllers_equal_the_restatement(case):
  got = harness.each(lambda c: harness.call(case, c))(harness.stacked())
  for seed, batch in enumerate(harness.unstacked(harness.wide(harness.stacked()))):
    wanted = case.restated(batch, case.options)
    got_of = jax.tree.map(lambda x, seed=seed: x[seed], got)
    for actual, right in zip(
      jax.tree.leaves(got_of), jax.tree.leaves(wanted), strict=True
    ):
      harness.assert_close(actual, right, what=f'{case} on batch {seed}')


def test_overlong_penalty_by_hand():
  lengths = jnp.array([5, 8, 9, 10, 11])
  soft = shaping.overlong_penalty(lengths, max_length=10, cache=2)
  np.testing.assert_allclose(soft, [0, 0, -0.5, -1, -1])
  step = shaping.overlong_penalty(lengths, max_length=10)
  np.testing.assert_allclose(step, [0, 0, 0, 0, -1])


def test_adaptive_coefficient_moves_within_its_band():
  for measured, factor in [(0.1, 1.0), (1.0, 1.02), (0.0, 0.98), (0.11, 1.01)]:
    beta = kl_controllers.adaptive_coef(0.5, measured, 1000)
    np.testing.assert_allclose(beta, 0.5 * factor, rtol=1e-6)


def test_nec_is_the_mean_of_the_indicator():
  p = jax.nn.softmax(jnp.array([0.3, -1.0, 2.0]))
  h = -jnp.sum(p * jnp.log(p))
  wanted = sum(p[v] * p[v] * (h + jnp.log(p[v])) for v in range(3))
  np.testing.assert_allclose(entropy.nec(jnp.log(p) + 5), wanted, rtol=1e-5)


def test_entropy_terms():
  h, expert = jnp.array([[2.0], [3.0]]), jnp.array([True, False])
  np.testing.assert_allclose(entropy.entropy_loss(h, coef=0.1), [[-0.2], [-0.3]])
  mask = jnp.ones((2, 1), bool)
  np.testing.assert_allclose(entropy.mix(h, mask, expert, coef=0.1), [[0], [-0.6]])


def test_chord_schedule():
  steps = jnp.array([0, 5, 10, 60, 110, 500])
  mu = losses.chord_mu(steps, warmup_steps=10, decay_steps=100, peak=0.9, valley=0.1)
  np.testing.assert_allclose(mu, [0, 0.45, 0.9, 0.5, 0.1, 0.1], atol=1e-6)


def test_each_term_of_a_mixed_loss_is_a_mean_over_its_own_rows():
  mask = jnp.array([[1, 1, 1], [1, 0, 0], [1, 1, 0], [0, 0, 0]], bool)
  expert = jnp.array([False, True, True, False])
  for mode in ('token_mean', 'sequence_mean_token_mean'):
    scale = aggregation.term_scale(mask, expert, mode=mode)
    weights = aggregation.token_weights(mask, mode=mode) * scale[:, None]
    for rows in (expert, ~expert):
      np.testing.assert_allclose(jnp.sum(weights[rows]), 1, rtol=1e-6)


@pytest.mark.parametrize('kind', ['forward', 'reverse', 'adaptive', 'skewed', 'js'])
def test_distillation_equals_numpy_and_vanishes_at_the_teacher(kind):
  rng = np.random.default_rng(0)
  full = [np.log(rng.dirichlet(np.ones(9), size=(3, 4))) for _ in range(2)]
  student, teacher = (x[..., :5].astype(np.float32) for x in full)
  mask = rng.random((3, 4)) < 0.7
  loss, _ = losses.distill(student, teacher, mask, kind=kind)
  wanted = np.zeros((3, 4))
  for at in zip(*np.nonzero(mask), strict=True):
    s, t = (np.append(np.exp(x[at][:5]), np.exp(x[at][5:]).sum()) for x in full)
    forward, reverse = np.sum(t * np.log(t / s)), np.sum(s * np.log(s / t))
    order = np.argsort(-t)
    head = order[np.cumsum(t[order]) - t[order] < 0.5]
    a = np.abs(t - s)[head].sum() / np.abs(t - s).sum()
    m = (t + s) / 2
    skewed = np.sum(t * np.log(t / (0.1 * t + 0.9 * s)))
    js = (np.sum(t * np.log(t / m)) + np.sum(s * np.log(s / m))) / 2
    adaptive = a * forward + (1 - a) * reverse
    wanted[at] = {
      'forward': forward,
      'reverse': reverse,
      'adaptive': adaptive,
      'skewed': skewed,
      'js': js,
    }[kind]
  np.testing.assert_allclose(loss, wanted, rtol=1e-4, atol=1e-6)
  same, _ = losses.distill(teacher, teacher, mask, kind=kind)
  np.testing.assert_allclose(same, 0, atol=1e-6)
  slope = jax.grad(lambda x: jnp.sum(losses.distill(x, teacher, mask, kind=kind)[0]))
  gradient = np.asarray(jax.jit(slope)(student))
  assert np.all(np.isfinite(gradient)) and np.all(gradient[~mask] == 0)


def test_an_unknown_divergence_is_an_error():
  one = jnp.ones((1, 1, 1))
  with pytest.raises(ValueError, match='forward'):
    losses.distill(one, one, jnp.ones((1, 1), bool), kind='kl')


def test_m2po_drops_the_far_and_counts_the_calm():
  """Three candidates at .1, .1, .3: the mean square .037 passes, .5 does not."""
  one, mask = np.ones((1, 4), np.float32), np.ones((1, 4), bool)
  keep = losses.second_moment_keep(
    jnp.array([[0.1, 0.1, 0.3, -9]]), 0 * one, one, mask, threshold=0.04
  )
  np.testing.assert_array_equal(keep, [[True, True, True, True]])
  keep = losses.second_moment_keep(
    jnp.array([[0.1, 0.1, 0.5, -9]]), 0 * one, one, mask, threshold=0.04
  )
  np.testing.assert_array_equal(keep, [[True, True, False, True]])
