"""Faults that other systems have had: ours passes each check, the faulty formula fails.

Every test states its check once, as a function that raises AssertionError, and holds
both formulas to it: what it says of ours is then known to be able to fail.
"""

import contextlib

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jaxrl.algorithms import registry
from jaxrl.functional import advantages as eager
from jaxrl.functional import aggregation, components, kl, losses, reductions
from jaxrl.functional.advantages import token_level
from jaxrl.functional.losses import importance_weighted
from jaxrl.options import ConfigError
from tests.functional import harness
from tests.functional.test_advantage_rules import first, rows
from tests.marks import slow

advantages = harness.Compiled(eager)


def rejects(check, faulty):
  """The check must not let the faulty formula through."""
  with pytest.raises(AssertionError):
    check(faulty)


SHAPE = (2, 3)
MASK = jnp.array([[1, 1, 1], [1, 0, 0]], bool)
P = jnp.array([[-1.0, -0.5, -2.0], [-0.7, 0, 0]])
OLD = P + jnp.array([[0.3, -0.2, 0.1], [0.4, 0, 0]])
A = jnp.array([[1.0, 1.0, -1.0], [-2.0, 0, 0]])


def test_the_ratio_is_that_of_the_policy_that_sampled():
  """With o := sg(p) the ratio is 1 whatever the staleness: ROLL #242."""

  def check(ratio_of):
    d = np.asarray(P - OLD)[np.asarray(MASK)]
    np.testing.assert_allclose(ratio_of(P, OLD)[MASK], np.exp(d), rtol=1e-6)

  def faulty(p, old):
    return jnp.exp(p - jax.lax.stop_gradient(p))

  check(lambda p, old: losses.ppo_clip(p, old, A, MASK)[1]['ratio'])
  check(lambda p, old: losses.importance_sampling(p, old, A, MASK)[1]['ratio'])
  rejects(check, faulty)


def test_equal_rewards_have_no_advantage():
  """Seven times 0.7 has a float32 mean that is not 0.7: 0.056 after dividing by s."""
  columns = rows([0.7] * 7, [0] * 7)

  def check(advantage):
    assert np.all(np.asarray(advantage(columns)) == 0)

  def faulty(columns):
    r = columns['rewards'][:, 0]
    centred = r - jnp.sum(r) / 7
    return centred / (jnp.sqrt(jnp.sum(centred**2) / 6) + 1e-6)

  for name in ('grpo', 'opmd', 'rloo', 'rec'):
    check(lambda c, name=name: first(getattr(advantages, name)(**c)))
  assert np.abs(faulty(columns)).max() == pytest.approx(0.056, abs=1e-3)
  rejects(check, faulty)


def test_a_loss_does_not_grow_with_the_number_of_micro_batches():
  """Each micro-batch's own mean, added up, is as many times too large."""
  mask = np.random.default_rng(0).random((8, 5)) < 0.6
  loss = np.random.default_rng(1).random((8, 5))

  def check(total):
    np.testing.assert_allclose(total(4), total(1), rtol=1e-6)

  def ours(pieces):
    weights = np.asarray(aggregation.token_weights(mask))
    whole = weights * loss
    return sum(piece.sum() for piece in np.split(whole, pieces))

  def sum_of_means(pieces):
    parts = zip(np.split(loss, pieces), np.split(mask, pieces), strict=True)
    return sum(x[m].mean() for x, m in parts)

  def mean_of_means(pieces):
    return sum_of_means(pieces) / pieces  # right only for micro-batches of equal size

  check(ours)
  rejects(check, sum_of_means)
  rejects(check, mean_of_means)


def test_token_mean_minds_its_mask():
  """Prompt and padding tokens belong neither to the sum nor to the count."""

  def check(weights):
    loss = jnp.where(MASK, 2.0, 100.0)
    np.testing.assert_allclose(jnp.sum(weights(MASK) * loss), 2.0, rtol=1e-6)

  check(aggregation.token_weights)
  rejects(check, lambda mask: jnp.ones(mask.shape) / mask.size)
  rejects(check, lambda mask: mask / mask.size)


def test_anchors_belong_to_their_task():
  """Two tasks that pass the same state: steps are compared within each alone."""
  columns = rows([1, 0, 5, 5], [0, 0, 1, 1], turn_ids=jnp.zeros(4, jnp.int32))
  columns['state_hash'] = jnp.full(4, 7)

  def check(advantage):
    np.testing.assert_allclose(advantage(columns), [1, -1, 0, 0], atol=1e-6)

  def faulty(c):
    r = c['rewards'][:, 0]
    episode = r - jnp.array([0.5, 0.5, 5, 5])
    return episode + r - jnp.mean(r)  # anchors by state alone

  check(lambda c: first(advantages.gigpo(**c)))
  rejects(check, faulty)


def test_jsd_tells_what_the_teacher_likes_from_what_it_does_not():
  """At β = ½ the terms of the divergence are the same for d and −d, and repel at 1."""
  d = jnp.array([[-2.0, -0.5, 0.5, 2.0]])

  def check(advantage):
    for beta in (0.5, 1.0):
      assert np.all(np.sign(advantage(d, beta)) == np.sign(d))

  def faulty(d, beta):
    mixed = jnp.log((1 - beta) + beta * jnp.exp(d))
    return jnp.where(beta == 1, -d, -beta * (d - mixed) + (1 - beta) * mixed)

  def ours(d, beta):
    return advantages.jsd(d, 0 * d, d < 9, beta=beta).advantages

  check(ours)
  rejects(check, faulty)


@pytest.mark.parametrize('name', ['grpo', 'opmd', 'rloo', 'asymre', 'rec', 'gigpo'])
def test_a_kl_penalty_reaches_group_advantages(name):
  """R_t −= coef·KL_t; read off the score before it, it is without effect (Trinity)."""
  columns = rows([1, 0, 0, 1], [0, 0, 0, 0], turn_ids=jnp.zeros(4, jnp.int32))
  columns['state_hash'] = jnp.arange(4)
  old, ref = jnp.array([[-1.0], [-3.0], [-0.5], [-2.0]]), jnp.full((4, 1), -1.5)

  def scored(columns, rewards):
    return first(
      components.call_component(getattr(advantages, name), columns | rewards)
    )

  def ours(coef):
    penalty = kl.k1(old, ref, coef=coef)
    return scored(columns, {'rewards': columns['rewards'] - penalty})

  def faulty(coef):
    return scored(columns, {})

  def check(advantage):
    change = advantage(0.5) - advantage(0.0)
    assert np.abs(change).max() > 0.1
    assert change[2] < 0 < change[1]  # likelier, and less likely, than the reference

  check(ours)
  rejects(check, faulty)


@pytest.mark.parametrize('keep', importance_weighted.Keep.__args__)
@pytest.mark.parametrize('weight', importance_weighted.Weight.__args__)
def test_every_kind_of_rec_runs(keep, weight):
  """Trinity has a NameError, or shapes that do not meet, in some combinations."""

  def check(loss):
    assert loss(keep=keep, weight=weight).shape == SHAPE

  def faulty(*, keep, weight):
    w = (
      jnp.exp(jnp.mean(P - OLD, axis=1)) if weight == 'gspo' else 1.0
    )  # [B], not [B, 1]
    return (w * A * P)[: len(P)]

  check(lambda **o: losses.rec(P, OLD, A, MASK, **o)[0])
  if weight == 'gspo':
    with pytest.raises((TypeError, ValueError)):
      check(faulty)


def test_the_gradient_of_sapo_is_the_papers():
  """d(−A f)/dp = −A·4σ(1−σ)·r, so 1 at r = 1; −A·sg(f)·p has −A·f, 2 there."""

  def check(loss):
    slope = jax.grad(lambda p: jnp.sum(loss(p)))(P)
    r = jnp.exp(P - OLD)
    tau = jnp.where(A > 0, 1.0, 1.05)
    gate = jax.nn.sigmoid(tau * (r - 1))
    wanted = jnp.where(MASK, -A * 4 * gate * (1 - gate) * r, 0)
    np.testing.assert_allclose(slope, wanted, rtol=1e-5)

  def faulty(p):
    r = jnp.exp(p - OLD)
    tau = jnp.where(A > 0, 1.0, 1.05)
    f = 4 * jax.nn.sigmoid(tau * (r - 1)) / tau
    return jnp.where(MASK, -A * jax.lax.stop_gradient(f) * p, 0)

  check(lambda p: losses.sapo(p, OLD, A, MASK)[0])
  rejects(check, faulty)


def test_an_unknown_baseline_is_refused():
  """Whatever is not 'mean' or 'logavgexp', an empty string and None among it."""

  def check(baseline_of):
    for name in ('median', 'Mean', ''):
      with contextlib.suppress(ValueError):
        baseline_of(name)
        raise AssertionError(f'{name!r} was taken')

  def faulty(name):
    return 0.0 if name != 'mean' else 0.5  # no baseline at all

  check(lambda name: advantages.opmd(**rows([1, 0], [0, 0]), baseline=name))
  rejects(check, faulty)
  with pytest.raises(ConfigError, match='logavgexp'):
    registry.make('opmd', {'baseline': 'median'})


@pytest.mark.parametrize(
  'name, size',
  [
    ('grpo', 8),
    slow('opmd', 2),
    slow('dapo', 16),
  ],
)
def test_presets_of_group_size_apply(name, size):
  """With n left at 1, the advantage is the raw reward (Trinity's repeat_times)."""

  def check(played):
    assert played == size
    columns = rows([1.0] * played, [0] * played)
    assert np.all(first(advantages.grpo(**columns)) == 0)

  check(registry.make(name).group_size)
  rejects(check, 1)


def test_padding_ids_enter_no_statistic():
  """Ids of −1 must not be a group of their own, nor count from the end."""
  columns = rows([1, 0, 9, 9], [0, 0, -1, -1], runs=[0, 1, -1, -1])

  def check(advantage):
    np.testing.assert_allclose(advantage(columns)[:2], [0.5, -0.5], atol=1e-6)

  def wrapped(c):  # numpy's, and JAX's, −1 is the last entry
    returns = jnp.zeros(2).at[c['episode_ids']].add(c['rewards'][:, 0])
    return (returns - returns.mean())[c['episode_ids']]

  check(lambda c: first(advantages.opmd(**c)))
  rejects(check, wrapped)
  rejects(check, lambda c: c['rewards'][:, 0] - jnp.mean(c['rewards']))


def test_a_run_counts_once_however_many_rows_it_has():
  """A run of three rows worth 1 and a run of one row worth 0: the mean is ½."""
  columns = rows([0, 0, 1, 0], [0, 0, 0, 0], [0, 0, 0, 1])

  def check(advantage):
    np.testing.assert_allclose(advantage(columns), [0.5, 0.5, 0.5, -0.5], atol=1e-6)

  def faulty(c):  # a mean over rows
    score = jnp.array([1.0, 1, 1, 0])
    return score - jnp.mean(score)

  check(lambda c: first(advantages.opmd(**c)))
  rejects(check, faulty)


def test_penalised_rewards_are_centred_again():
  """A penalty after the mean was taken leaves advantages that add up to less than 0."""
  columns = rows([1, 1, 0], [0, 0, 0])
  columns['rollout_logprobs'] = jnp.array([[-1.0], [-3.0], [-2.0]])

  def check(advantage):
    np.testing.assert_allclose(jnp.sum(advantage(columns)), 0, atol=1e-6)

  def faulty(c):
    r = c['rewards'][:, 0]
    share = reductions.rank_in_group(c['rollout_logprobs'][:, 0], c['group_ids']) / 3
    return r * (1 - 0.3 * share) - jnp.mean(r)

  def ours(c):
    return first(advantages.grpo(**c, scale_by_std=False, rank_penalty=0.3))

  check(ours)
  rejects(check, faulty)


def test_a_lone_attempt_keeps_its_reward():
  """A group of one has baseline 0: less its own mean, it would teach nothing."""
  columns = rows([0.8], [0])

  def check(advantage):
    np.testing.assert_allclose(advantage(columns), [0.8], rtol=1e-5)

  for name in ('grpo', 'opmd', 'rloo', 'asymre', 'rec'):
    check(lambda c, name=name: first(getattr(advantages, name)(**c)))
  rejects(check, lambda c: c['rewards'][:, 0] - jnp.mean(c['rewards']))


def test_a_turn_is_discounted_once():
  """γ per token makes what a turn earned depend on how long it was."""
  mask = jnp.array([[1, 1, 1, 0, 1, 1]], bool)
  rewards = jnp.array([[0, 0, 1.0, 0, 0, 4.0]])

  def check(returns):
    np.testing.assert_allclose(returns(rewards, mask)[0], [3, 3, 3, 0, 4, 4], rtol=1e-6)

  check(lambda r, m: advantages.agentic_reinforce(r, m, gamma=0.5).advantages)
  rejects(check, lambda r, m: token_level.returns_to_go(r, m, 0.5))


def test_observations_are_no_steps_of_time():
  """GAE over all tokens bootstraps from what V says of words nobody chose."""
  rewards, values = jnp.array([[0.0, 0, 1]]), jnp.array([[0.5, 7.0, 0.25]])
  mask = jnp.array([[1, 0, 1]], bool)

  def check(advantage):
    np.testing.assert_allclose(
      advantage(rewards, values, mask), [[0.5, 0, 0.75]], atol=1e-6
    )

  def faulty(rewards, values, mask):
    out, later, value = [], 0.0, 0.0
    for t in (2, 1, 0):
      later = rewards[0, t] + value - values[0, t] + 0.9 * later
      value = values[0, t]
      out.insert(0, later)
    return jnp.array([out]) * mask

  check(lambda r, v, m: advantages.gae(r, v, m).advantages)
  rejects(check, faulty)


def test_extreme_log_ratios_stay_finite():
  """e^50 squared is beyond float32, and inf · 0 in the gradient is NaN."""
  p, old = jnp.array([[-1.0, -1.0]]), jnp.array([[-101.0, 99.0]])
  mask, a = jnp.ones((1, 2), bool), jnp.array([[-1.0, 1.0]])

  def check(loss):
    value, slope = jax.jit(jax.value_and_grad(lambda p: jnp.sum(loss(p))))(p)
    assert np.isfinite(value) and np.all(np.isfinite(slope))

  for name in ('ppo_clip', 'importance_sampling', 'sapo', 'gspo', 'topr', 'cispo'):
    check(lambda p, name=name: getattr(losses, name)(p, old, a, mask)[0])
  rejects(check, lambda p: -a * jnp.exp(p - old))
