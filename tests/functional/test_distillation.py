"""Following a teacher leads to the teacher; the formulas of others do not."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jaxrl.functional import advantages, losses
from tests.marks import slow

TEACHER = jax.nn.log_softmax(jnp.array([0.3, -1.0, 2.0, 0.1, -2.0]))
START = jnp.array([1.0, 1.5, -0.7, 0.2, 0.4])
BETAS = (0.0, 0.1, 0.5, 0.7, 1.0)


def ours(d, beta):
  mask = jnp.ones((1, len(d)), bool)
  return advantages.jsd(d[None], 0 * d[None], mask, beta=beta).advantages[0]


def minus_both(d, beta):
  """−β·log(t/m) − (1−β)·log(s/m), m = βt + (1−β)s: the terms of the divergence at one
  token, taken for an advantage. At β = ½ it cannot tell d from −d; at β = 1 it is −d.
  """
  m = jnp.log(beta * jnp.exp(d) + 1 - beta)  # all relative to the student
  return jnp.where(beta == 1, -d, -beta * (d - m) + (1 - beta) * m)


@functools.partial(jax.jit, static_argnums=0)
def follow(advantage, beta):
  """KL(student‖teacher) before and after exact policy-gradient ascent."""

  def divergence(logits):
    student = jax.nn.log_softmax(logits)
    return jnp.sum(jnp.exp(student) * (student - TEACHER))

  def step(logits, _):
    student = jax.nn.log_softmax(logits)
    fixed = jax.lax.stop_gradient(student)
    a = advantage(TEACHER - fixed, beta)
    up = jax.grad(lambda x: jnp.sum(jnp.exp(fixed) * a * jax.nn.log_softmax(x)))
    return logits + 0.2 * up(logits), None

  return divergence(START), divergence(jax.lax.scan(step, START, None, 3000)[0])


@pytest.mark.parametrize('beta', BETAS)
def test_jsd_leads_to_the_teacher(beta):
  before, after = follow(ours, beta)
  assert before > 1 and after < 1e-3


@pytest.mark.parametrize('beta', [0.5, 1.0])
def test_the_divergences_own_terms_do_not(beta):
  """Were they the advantage, the tests above and below would say so."""
  before, after = follow(minus_both, beta)
  assert not after < 0.1 * before


def test_jsd_tells_more_likely_from_less_likely():
  """The faulty advantage is even in d at β = ½ to third order, and odd the wrong way
  round at β = 1; ours grows with d for every β.
  """
  d = jnp.array([-0.1, 0.1])
  for beta in BETAS:
    low, high = ours(d, beta)
    assert low < 0 < high
  low, high = minus_both(d, 0.5)
  assert abs(low - high) < 1e-4
  low, high = minus_both(d, 1.0)
  assert low > 0 > high


# ---- distill


def columns(seed=0, size=12, k=5):
  rng = np.random.default_rng(seed)
  draw = lambda: jnp.log(jnp.asarray(rng.dirichlet(np.ones(size), (2, 3)), jnp.float32))  # noqa: E731
  student, teacher = draw(), draw()
  ids = jnp.argsort(-teacher, axis=-1)[..., :k]
  pick = functools.partial(jnp.take_along_axis, indices=ids, axis=-1)
  return pick(student), pick(teacher), jnp.array([[1, 1, 1], [1, 0, 1]], bool)


LN = np.log
# The teacher has ½ and ¼ on its two likeliest tokens, the student ⅕ on each: the rest
# is ¼ and ⅗. Slopes are by the student's two log-probs; as one rises the rest falls.
FORWARD = 0.5 * LN(5 / 2) + 0.25 * LN(5 / 4) + 0.25 * LN(5 / 12)
REVERSE = 0.2 * LN(2 / 5) + 0.2 * LN(4 / 5) + 0.6 * LN(12 / 5)
FORWARD_SLOPE = [-0.5 + 0.2 * 5 / 12, -0.25 + 0.2 * 5 / 12]
REVERSE_SLOPE = [0.2 * LN(2 / 5 * 5 / 12), 0.2 * LN(4 / 5 * 5 / 12)]
MIXED = 0.5 * LN(0.5 / 0.23) + 0.25 * LN(0.25 / 0.205) + 0.25 * LN(0.25 / 0.565)
MIXED_SLOPE = [0.18 * (0.25 / 0.565 - t / m) for t, m in ((0.5, 0.23), (0.25, 0.205))]
TO_MIDDLE = 0.5 * LN(0.5 / 0.35) + 0.25 * LN(0.25 / 0.225) + 0.25 * LN(0.25 / 0.425)
FROM_STUDENT = 0.2 * LN(0.2 / 0.35) + 0.2 * LN(0.2 / 0.225) + 0.6 * LN(0.6 / 0.425)
JS_SLOPE = [0.1 * (LN(0.2 / m) - LN(0.6 / 0.425)) for m in (0.35, 0.225)]
HEAD = 0.3 / 0.7  # of gaps .3, .05 and .35 the head, the first token, has the first


@pytest.mark.parametrize(
  'kind, value, slope',
  [
    ('forward', FORWARD, FORWARD_SLOPE),
    ('reverse', REVERSE, REVERSE_SLOPE),
    ('skewed', MIXED, MIXED_SLOPE),
    ('js', (TO_MIDDLE + FROM_STUDENT) / 2, JS_SLOPE),
    (
      'adaptive',
      HEAD * FORWARD + (1 - HEAD) * REVERSE,
      HEAD * np.array(FORWARD_SLOPE) + (1 - HEAD) * np.array(REVERSE_SLOPE),
    ),
  ],
)
def test_top_k_by_hand(kind, value, slope):
  """arXiv 1503.02531, 2306.08543, 2402.03898 (λ = .1), 2306.13649 and 2404.02657.

  Of three tokens that are given only two count; the second place is masked.
  """
  student = jnp.log(jnp.array([[[0.2, 0.2, 0.01]] * 2]))
  teacher = jnp.log(jnp.array([[[0.5, 0.25, 0.2]] * 2]))
  mask = jnp.array([[True, False]])

  def run(student):
    loss, _ = losses.distill(student, teacher, mask, kind=kind, top_k=2)
    return loss.sum(), loss

  gradient, loss = jax.jit(jax.grad(run, has_aux=True))(student)
  np.testing.assert_allclose(loss, [[value, 0]], rtol=1e-5)
  np.testing.assert_allclose(gradient, [[[*slope, 0], [0, 0, 0]]], rtol=1e-4, atol=1e-6)


@pytest.mark.parametrize(
  'kind',
  [
    *('reverse', 'js'),
    *(slow(k) for k in ('forward', 'adaptive', 'skewed')),
  ],
)
def test_top_k_of_more_columns_is_as_if_only_they_were_there(kind):
  student, teacher, mask = columns(k=5)

  def run(s, t, k):
    return losses.distill(s, t, mask, kind=kind, top_k=k)[0].sum()

  compute = jax.jit(jax.value_and_grad(run), static_argnums=2)
  value, slope = compute(student, teacher, 3)
  cut, cut_slope = compute(student[..., :3], teacher[..., :3], 64)
  np.testing.assert_allclose(value, cut, rtol=1e-5)
  np.testing.assert_allclose(slope[..., :3], cut_slope, rtol=1e-4, atol=1e-6)
  assert not np.asarray(slope[..., 3:]).any()
  whole, _ = compute(student, teacher, 64)
  assert abs(whole - value) > 1e-3


@pytest.mark.parametrize('kind', ['forward', 'reverse', 'adaptive', 'skewed', 'js'])
def test_every_divergence_leads_to_the_teacher(kind):
  """By plain descent on the logits; on three of five tokens, the rest as one."""
  ids = np.argsort(-np.asarray(TEACHER))[:3]
  mask = jnp.ones((1, 1), bool)

  @jax.jit
  def loss(logits):
    s = jax.nn.log_softmax(logits)[ids]
    part, _ = losses.distill(s[None, None], TEACHER[ids][None, None], mask, kind=kind)
    return part.sum()

  step = jax.jit(lambda x: x - 0.5 * jax.grad(loss)(x))
  logits = START
  for _ in range(1500):
    logits = step(logits)
  assert loss(logits) < 1e-4 < 0.05 < loss(START)
  reached, taught = (
    np.exp(x - np.logaddexp.reduce(x))[ids]
    for x in (np.asarray(logits), np.asarray(TEACHER))
  )
  np.testing.assert_allclose(reached, taught, atol=0.02)


@pytest.mark.parametrize('kind', ['forward', 'reverse', 'adaptive', 'skewed', 'js'])
@pytest.mark.parametrize('skew', [0.0, 0.1, 1.0])
def test_tokens_that_float32_cannot_tell_from_impossible_are_finite(kind, skew):
  """At a low temperature a teacher's second token may have log-prob −110."""
  mask = jnp.ones((1, 1), bool)

  @jax.jit
  @jax.value_and_grad
  def loss(s, t):
    return losses.distill(s, t, mask, kind=kind, skew=skew)[0].sum()

  sharp = [jnp.array([[[-1e-4, second]]]) for second in (-110.0, -9.0)]
  for s in sharp:
    for t in sharp:
      value, slope = loss(s, t)
      assert np.isfinite(value) and np.isfinite(slope).all()
