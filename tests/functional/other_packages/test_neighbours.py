"""What sets each newer loss apart from the older one next to it, by hand."""

import jax
import jax.numpy as jnp
import numpy as np

from jaxrl.functional import advantages as eager
from jaxrl.functional import aggregation, losses
from tests.functional import harness

advantages = harness.Compiled(eager)


def slopes(fn, ratios, advantages, old=0.25, mode='token_mean', mask=None, **options):
  """The gradient of the loss by the log-probs, for one row or several."""
  ratios = np.atleast_2d(np.float32(ratios))
  old = np.log(np.broadcast_to(np.float32(old), ratios.shape))
  a = np.broadcast_to(np.float32(advantages), ratios.shape)
  mask = np.ones(ratios.shape, bool) if mask is None else mask
  weights = aggregation.token_weights(jnp.asarray(mask), mode=mode)

  def total(p):
    return jnp.sum(weights * fn(p, old, a, mask, **options)[0])

  return np.asarray(jax.jit(jax.grad(total))(old + np.log(ratios)))


def test_dppo_bounds_probabilities_and_ppo_ratios():
  """A token from 0.1% to 1% has moved little, one from 50% to 59% as well."""
  ratios, old = [10, 1.18], [1e-3, 0.5]
  assert np.all(slopes(losses.dppo_tv, ratios, 1, old) < 0)
  assert np.all(slopes(losses.dppo_kl, ratios, 1, old, clip_high=0.05) < 0)
  assert slopes(losses.ppo_clip, ratios, 1, old)[0, 0] == 0
  # From 50% to 75%: PPO and both forms of DPPO agree.
  options = {'clip_low': 0.05, 'clip_high': 0.05}
  for fn in (losses.ppo_clip, losses.dppo_tv, losses.dppo_kl):
    assert slopes(fn, [1.5], 1, [0.5], **options)[0, 0] == 0


def test_total_variation_and_kl_disagree_on_rare_tokens():
  """From 10% to 0.1%: the difference is 10%, the divergence more than 0.3."""
  options = {'clip_low': 0.2, 'clip_high': 0.2}
  assert slopes(losses.dppo_tv, [0.01], -1, [0.1], **options)[0, 0] > 0
  assert slopes(losses.dppo_kl, [0.01], -1, [0.1], **options)[0, 0] == 0


def test_the_probability_band_lets_nothing_draw_a_token_back():
  """It rose from 25% to 50% and has A < 0: DPPO lowers it again."""
  assert slopes(losses.dppo_tv, [2], -1)[0, 0] > 0
  assert slopes(losses.probability_band, [2], -1, regulariser_coef=0.0)[0, 0] == 0
  # The regulariser remains: the slope of c·d² is 2cd.
  pull = slopes(losses.probability_band, [2], -1, regulariser_coef=0.5)
  np.testing.assert_allclose(pull, [[np.log(2)]], rtol=1e-5)


def test_dro_pulls_back_where_ppo_lets_go():
  """At r = 2 with A = 1 and β = 2: the slope is −A + β·log 2 > 0; it is `kimi`."""
  wanted = [[2 * np.log(2) - 1]]
  np.testing.assert_allclose(slopes(losses.dro, [2], 1, beta=2.0), wanted, rtol=1e-5)
  np.testing.assert_allclose(slopes(losses.kimi, [2], 1, tau=2.0), wanted, rtol=1e-5)
  assert slopes(losses.ppo_clip, [2], 1)[0, 0] == 0


def test_stable_reinforce_has_no_gradient_beyond_its_bounds():
  """At r = e^8 with A < 0 PPO without a dual clip has a slope of e^8."""
  far, near = np.exp(8.0), np.exp(5.0)
  ppo = slopes(losses.ppo_clip, [far], -1, 1e-5, dual_clip=None)
  np.testing.assert_allclose(ppo, [[far]], rtol=1e-4)
  assert slopes(losses.stable_reinforce, [far], -1, 1e-5)[0, 0] == 0
  within = slopes(losses.stable_reinforce, [near], -1, 1e-5)
  np.testing.assert_allclose(within, [[near]], rtol=1e-4)


def test_a3po_clips_old_tokens_later_than_ppo_and_fresh_ones_alike():
  """At r = 1.3 with A = 1: a token of two steps' age has moved by √1.3 from between."""

  def slope(age, advantage=1):
    fields = {'weights_version': np.array([[10 - age]]), 'step': np.int32(10)}
    return slopes(losses.a3po, [1.3], advantage, **fields)[0, 0]

  assert slopes(losses.ppo_clip, [1.3], 1)[0, 0] == slope(0) == slope(1) == 0
  for age in (2, 5):  # the weight and the ratio multiply to r
    np.testing.assert_allclose([slope(age), slope(age, -1)], [-1.3, 1.3], rtol=1e-5)


def test_one_outlier_moves_gmpo_by_its_share_alone():
  """GSPO clips the mean, which one token at e^2 takes out of the range for all four."""
  ratios = [[1, 1, 1, np.exp(2.0)]]
  mode = 'sequence_mean_token_mean'
  gspo = slopes(losses.gspo, ratios, 1, 0.01, mode, clip_high=0.4)
  gmpo = slopes(losses.gmpo, ratios, 1, 0.01, mode)
  assert np.all(gspo == 0)  # e^0.5 > 1.4
  weight = np.exp(0.1)  # (0 + 0 + 0 + 0.4)/4
  np.testing.assert_allclose(gmpo, [[-weight / 4] * 3 + [0]], rtol=1e-5)


def test_luspo_weights_rows_by_their_length_and_gspo_does_not():
  """Rows of one and four tokens: gradients of a row add up to 1:1, and to 1:4."""
  mask = np.array([[1, 0, 0, 0], [1, 1, 1, 1]], bool)
  ratios, options = np.ones((2, 4)), {'gradient': 'mean'}
  for mode, shares in (
    ('sequence_mean_token_mean', [1, 1]),
    ('sequence_mean_token_sum', [1, 4]),
  ):
    rows = slopes(losses.gspo, ratios, 1, 0.5, mode, mask, **options).sum(axis=1)
    np.testing.assert_allclose(rows / rows[0], shares, rtol=1e-5)


def test_vespo_forgets_rows_of_another_policy_smoothly():
  """φ is 1 at w = 1, less on both sides, and of w, not of its geometric mean."""
  one = -slopes(losses.vespo, [1.0], 1)[0, 0]
  np.testing.assert_allclose(one, 1, rtol=1e-5)
  near, far, low = (-slopes(losses.vespo, [r], 1)[0, 0] for r in (1.5, 4.0, 0.25))
  assert 1 > near > far > 0 and 1 > low > 0
  # Two tokens of 1.5 weigh as w = 2.25.
  two = -slopes(losses.vespo, [1.5, 1.5], 1).sum()
  np.testing.assert_allclose(two, 2.25**2 * np.exp(3 * (1 - 2.25)), rtol=1e-5)
  unbounded = -slopes(losses.importance_sampling, [4.0], 1)[0, 0]
  np.testing.assert_allclose(unbounded, 4, rtol=1e-5)


COVARIANT = {
  'logprobs': np.float32([[-0.1, -3, -0.2, -2]]),
  'advantages': np.float32([[2, 2, -2, -2]]),
}


def test_the_covariance_is_that_of_a_batch():
  """Its mean is the covariance that makes the entropy fall: here by hand."""
  p, a = (x[0] for x in COVARIANT.values())
  got = losses.token_covariance(*COVARIANT.values(), np.ones((1, 4), bool))
  np.testing.assert_allclose(got[0], (a - a.mean()) * (p - p.mean()), rtol=1e-5)
  np.testing.assert_allclose(got.mean(), np.cov(a, p, ddof=0)[0, 1], rtol=1e-4)


def test_clip_cov_drops_and_kl_cov_penalises_what_ppo_updates():
  """On the policy that sampled, PPO updates all four tokens.

  Tokens 0 and 3 have a covariance above 1: likely and good, unlikely and bad.
  """
  p, a = COVARIANT.values()
  mask = np.ones(p.shape, bool)

  def slope(fn, *others, old=p, **options):
    def total(x):
      return jnp.sum(fn(x, old, a, mask, *others, **options)[0])

    return np.asarray(jax.jit(jax.grad(total))(p))[0]

  ppo = slope(losses.ppo_clip)
  assert np.all(ppo != 0)
  dropped = slope(losses.clip_cov, jax.random.key(0), ratio=0.5)
  np.testing.assert_array_equal(dropped != 0, [False, True, True, False])
  np.testing.assert_array_equal(dropped[1:3], ppo[1:3])
  # One draw of the two, another with another key.
  drawn = {
    tuple(slope(losses.clip_cov, jax.random.key(k), ratio=0.25) != 0) for k in range(8)
  }
  assert drawn == {(False, True, True, True), (True, True, True, False)}
  # A log-ratio of 0.1 everywhere: |p − o| adds its slope at the two largest.
  moved = {'old': p - np.float32(0.1)}
  more = slope(losses.kl_cov, ratio=0.5, coef=3.0, **moved)
  plain = slope(losses.importance_sampling, **moved)
  np.testing.assert_allclose(more - plain, [3, 0, 0, 3], atol=1e-5)


def test_micro_batches_know_what_the_whole_batch_decided():
  """Halves with the fields of the whole have its loss; alone, each would draw one."""
  rng = np.random.default_rng(0)
  p = np.float32(-rng.exponential(size=(8, 5)))
  a, mask = np.float32(rng.normal(size=p.shape) * 2), np.ones(p.shape, bool)
  key = jax.random.key(1)
  options = {'ratio': 0.05, 'cov_low': 0.1}
  whole, _ = losses.clip_cov(p, p, a, mask, key, **options)
  from jaxrl.functional.losses.covariance import clip_cov_fields

  keep = clip_cov_fields(
    p, p, a, mask, key, clip_low=0.2, clip_high=0.2, cov_high=5.0, **options
  )['clip_cov_keep']
  assert np.sum(~np.asarray(keep)) == 2
  halves = [
    losses.clip_cov(p[s], p[s], a[s], mask[s], key, keep[s], **options)[0]
    for s in (slice(0, 4), slice(4, 8))
  ]
  np.testing.assert_array_equal(np.concatenate(halves), whole)


def one_token(rewards, groups, episodes=None, **more):
  """Columns of one token a row."""
  rewards = np.float32(rewards)[:, None]
  count = len(rewards)
  return {
    'rewards': rewards,
    'mask': np.ones((count, 1), bool),
    'group_ids': np.int32(groups),
    'episode_ids': np.arange(count, dtype=np.int32)
    if episodes is None
    else np.int32(episodes),
    **more,
  }


def test_maxrl_weighs_rare_successes_by_one_over_the_pass_rate():
  """One success of four, and of eight: A is 3 and 7, with GRPO's std √3 and √7."""
  columns = one_token([1, 0, 0, 0] + [1] + [0] * 7, [0] * 4 + [1] * 8)
  out = np.asarray(advantages.maxrl(**columns).advantages)[:, 0]
  np.testing.assert_allclose(out[[0, 1, 4, 5]], [3, -1, 7, -1], rtol=1e-6)
  grpo = np.asarray(advantages.grpo(**columns).advantages)[:, 0]
  np.testing.assert_allclose(grpo[[0, 4]], [1.5, 2.475], rtol=1e-3)
  # Nothing was achieved: no gradient, though rewards differ.
  nothing = advantages.maxrl(**one_token([-1, 0, 1, 0], [0] * 4))
  np.testing.assert_array_equal(nothing.advantages, 0)


def test_gdpo_tells_apart_what_is_equal_in_sum():
  """Rewards (0, 2), (1, 1), (0, 0): to GRPO the first two are the same."""
  columns = one_token([2, 2, 0], [0, 0, 0])
  terms = np.float32([[0, 2], [1, 1], [0, 0]])
  fields = columns | {'reward_terms': terms, 'reward_weights': np.ones_like(terms)}
  fields.pop('rewards')
  got = advantages.gdpo(**fields, whiten=False).advantages[:, 0]
  std = terms.std(axis=0, ddof=1)
  wanted = ((terms - terms.mean(axis=0)) / std).sum(axis=1)
  np.testing.assert_allclose(got, wanted, rtol=1e-4)
  grpo = advantages.grpo(**columns).advantages[:, 0]
  assert grpo[0] == grpo[1] and abs(got[0] - got[1]) > 0.1


def test_process_grpo_credits_the_step_that_was_right():
  """Two replies of two steps, (1, 0) and (0, 1): to GRPO they are the same."""
  columns = one_token([1, 1], [0, 0])
  steps = {
    'rewards': np.float32([[0, 1, 0, 0], [0, 0, 0, 1]]),
    'step_ends': np.array([[False, True, False, True]] * 2),
    'mask': np.ones((2, 4), bool),
  }
  fields = {k: v for k, v in columns.items() if k != 'episode_ids'}
  got = advantages.process_grpo(**fields | steps).advantages
  # Of four steps with rewards 1, 0, 0, 1 the mean is ½ and the deviation 1/√3.
  up = 0.5 * np.sqrt(3)
  np.testing.assert_allclose(got, [[0, 0, -up, -up], [0, 0, up, up]], atol=1e-5)
  whole = columns | {k: v for k, v in steps.items() if k != 'step_ends'}
  np.testing.assert_array_equal(advantages.grpo(**whole).advantages, 0)
  # The paper's GRPO is the case of one step a reply.
  plain = one_token([1, 0, 0.2], [0, 0, 0])
  one_step = {k: v for k, v in plain.items() if k != 'episode_ids'}
  got = advantages.process_grpo(**one_step, step_ends=plain['mask']).advantages
  np.testing.assert_allclose(got, advantages.grpo(**plain).advantages, rtol=1e-6)


def test_the_optimal_token_baseline_leans_to_rows_of_more_variance():
  """Row 0 chose what was nearly sure, row 1 between two: the baseline is near R_1."""
  columns = one_token([1, 0], [0, 0])
  columns.pop('episode_ids')
  logp = np.log(np.float32([[0.99], [0.5]]))
  square = np.float32([[0.99**2 + 0.01**2], [0.5]])
  out = advantages.optimal_token_baseline(
    **columns, old_logprobs=logp, sum_pi_squared=square
  )
  weights = np.array([2 * 0.01**2, 0.5])
  baseline = weights[0] / weights.sum()
  np.testing.assert_allclose(out.advantages[:, 0], [1 - baseline, -baseline], rtol=1e-3)
  assert baseline < 0.001  # a group's mean is ½


def test_rae_judges_each_side_by_its_own_past():
  """A game that the first side wins: a group's mean credits it with that for ever."""
  columns = one_token([1, -1, 1, -1], [0] * 4, role_ids=np.int32([0, 1, 0, 1]))
  state = advantages.init_baselines()
  for _ in range(200):
    out = advantages.rae(**columns, state=state, decay=0.95)
    state = out.state
  np.testing.assert_allclose(out.advantages, 0, atol=1e-3)
  np.testing.assert_allclose(state['baseline'][:2], [1, -1], atol=1e-3)
  rloo = advantages.rloo(**{k: v for k, v in columns.items() if k != 'role_ids'})
  assert np.abs(rloo.advantages).min() > 1
  # The first batch of two episodes each: as two moves of an exponential mean.
  first = advantages.rae(**columns, state=advantages.init_baselines(), decay=0.95)
  np.testing.assert_allclose(first.state['baseline'][0], 1 - 0.95**2, rtol=1e-5)
  np.testing.assert_array_equal(first.advantages, columns['rewards'])


def test_hierarchical_grpo_does_not_compare_solvers_of_other_problems():
  """Two proposals of a task: two solvers of an easy one, two of a hard one."""
  columns = one_token(
    [0.5, 1, 1, 0.1, 0.4, 0],
    [0] * 6,
    episodes=[0, 0, 0, 1, 1, 1],
    role_ids=np.int32([0, 1, 1, 0, 1, 1]),
  )
  got = advantages.hierarchical_grpo(**columns, episode_role=1).advantages[:, 0]
  np.testing.assert_allclose(got, [0.2, 0, 0, -0.2, 0.2, -0.2], atol=1e-6)
