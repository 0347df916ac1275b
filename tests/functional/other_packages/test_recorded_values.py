"""Newer losses and advantages against what the code of other packages computes.

`record_values.py` made the values: losses, their gradients and advantages by verl, TRL,
prime-rl, AReaL and R1-Reward, and which tokens Trinity-RFT keeps.
"""

import functools
import json
import pathlib

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jaxrl.functional import advantages, losses
from jaxrl.functional.aggregation import token_weights
from jaxrl.functional.components import call_component

VALUES = json.loads((pathlib.Path(__file__).parent / 'values.json').read_text())
INPUTS = {name: np.array(x, np.float32) for name, x in VALUES['inputs'].items()}


def columns(**changes):
  group = INPUTS['group'].astype(np.int32)
  ids = {'group_ids': group, 'episode_ids': np.arange(len(group), dtype=np.int32)}
  fields = INPUTS | ids | {'mask': INPUTS['mask'] > 0, 'key': jax.random.key(0)}
  versions = INPUTS['weights_version'].astype(np.int32)
  return fields | {'weights_version': versions, 'step': np.int32(10)} | changes


def by_row():
  """Columns whose advantage is the same for all tokens of a row."""
  mask = INPUTS['mask']
  return columns(advantages=np.broadcast_to(INPUTS['by_row'][:, None], mask.shape))


LUSPO = functools.partial(losses.gspo, gradient='mean')
NARROW = {'clip_low': 0.1, 'clip_high': 0.05}
WIDE = {'clip_low': 0.4, 'clip_high': 0.3}
CASES = {
  ('verl', 'dppo_tv'): (losses.dppo_tv, {'clip_low': 0.15, 'clip_high': 0.1}),
  ('verl', 'dppo_kl'): (losses.dppo_kl, {'clip_low': 0.05, 'clip_high': 0.02}),
  ('verl', 'clip_cov'): (
    losses.clip_cov,
    {'ratio': 1.0, 'cov_low': 0.2, 'cov_high': 1.5},
  ),
  ('verl', 'kl_cov'): (losses.kl_cov, {'ratio': 0.2, 'coef': 0.5}),
  ('verl', 'gmpo'): (losses.gmpo, WIDE),
  ('verl', 'dro'): (losses.dro, {'beta': 0.3}),
  ('trl', 'vespo'): (losses.vespo, {}),
  ('trl', 'luspo'): (LUSPO, NARROW),
  ('trl', 'gmpo'): (losses.gmpo, WIDE),
  ('prime-rl', 'ipo'): (
    losses.probability_band,
    {'threshold': 0.1, 'regulariser_coef': 0.25},
  ),
  ('areal', 'a3po'): (losses.a3po, {'clip_high': 0.28, 'cap': 1.4}),
}
AGGREGATION = {'luspo': 'sequence_mean_token_sum', 'gmpo': 'sequence_mean_token_mean'}


@pytest.mark.parametrize('package, name', CASES)
def test_loss_and_gradient_are_those_of_the_package(package, name):
  fn, options = CASES[package, name]
  fields = by_row() if package == 'trl' or name == 'gmpo' else columns()
  mode = AGGREGATION.get(name, 'token_mean')
  weights = token_weights(jnp.asarray(fields['mask']), mode=mode)

  @jax.jit
  @jax.value_and_grad
  def total(logprobs):
    loss, _ = call_component(fn, fields | {'logprobs': logprobs}, options)
    return jnp.sum(weights * loss)

  value, gradient = total(fields['logprobs'])
  wanted = VALUES[package][name]
  np.testing.assert_allclose(value, wanted['loss'], rtol=2e-5)
  scale = np.abs(wanted['gradient']).max()
  np.testing.assert_allclose(gradient, wanted['gradient'], rtol=1e-4, atol=1e-6 * scale)
  assert np.count_nonzero(gradient) > 10


def test_the_cases_reach_both_sides_of_every_bound():
  """Some tokens of the recorded batch are masked, and some are not."""
  for (package, name), (fn, options) in CASES.items():
    fields = by_row() if package == 'trl' or name == 'gmpo' else columns()
    _, metrics = call_component(fn, fields, options)
    cut = metrics.get('clip_fraction', metrics.get('penalised'))
    if cut is not None:
      share = np.asarray(cut)[fields['mask']].mean()
      assert 0.03 < share < 0.97, (package, name)


def test_the_proximal_policy_is_that_of_areal():
  """Tokens of 0 to 5 steps' age; those of one step at most are the sampler's own."""
  fields = columns()
  names = ('logprobs', 'old_logprobs', 'weights_version', 'step')
  got = losses.proximal_logprobs(*(fields[name] for name in names))
  np.testing.assert_allclose(got, VALUES['areal']['a3po']['proximal'], rtol=1e-6)
  fresh = 10 - fields['weights_version'] <= 1
  np.testing.assert_array_equal(got[fresh], fields['old_logprobs'][fresh])
  assert 0.1 < fresh.mean() < 0.9


@pytest.mark.parametrize(
  'name', ['optimal_token_baseline', 'turns_optimal_token_baseline']
)
def test_the_optimal_token_baseline_is_verls(name):
  """Also of rows with an observation in their midst, as verl's second function."""
  mask = INPUTS['mask'] > 0
  if name.startswith('turns'):
    mask[:, 2] = False
  fields = columns(mask=mask, sum_pi_squared=INPUTS['pi_squared'])
  out = call_component(advantages.optimal_token_baseline, fields)
  wanted = VALUES['verl_advantages'][name]
  np.testing.assert_allclose(out.advantages, wanted, rtol=1e-5, atol=1e-6)
  assert len(np.unique(np.round(out.advantages, 4))) > 15


def test_gdpo_is_verls():
  """Two rewards with weights 1 and ½, and one group of two."""
  scores = np.stack([INPUTS['rewards'].sum(axis=1), INPUTS['second_rewards']], axis=1)
  weights = np.tile(np.float32([1, 0.5]), (len(scores), 1))
  fields = columns(reward_terms=scores, reward_weights=weights)
  out = call_component(advantages.gdpo, fields)
  wanted = VALUES['verl_advantages']['gdpo']
  np.testing.assert_allclose(out.advantages, wanted, rtol=1e-4, atol=1e-5)


def one_token_rows(rewards, **more):
  """A row of one token for each episode, of one group unless said otherwise."""
  rewards = np.float32(rewards)[:, None]
  rows = np.arange(len(rewards), dtype=np.int32)
  ids = {'group_ids': np.zeros_like(rows), 'episode_ids': rows}
  return {'rewards': rewards, 'mask': np.ones(rewards.shape, bool)} | ids | more


def test_maxrl_is_prime_rls():
  """In three groups of two and three."""
  wanted = VALUES['prime-rl_advantages']['maxrl']
  got = call_component(advantages.maxrl, columns()).advantages
  for row, mask, a in zip(got, INPUTS['mask'] > 0, wanted, strict=True):
    np.testing.assert_allclose(row[mask], a, rtol=1e-6, atol=1e-7)
  assert len(set(wanted)) > 4


def test_hierarchical_grpo_is_prime_rls():
  """Three proposals of one task; two of them have two and three solvers."""
  fields = one_token_rows(
    INPUTS['second_rewards'],
    episode_ids=np.int32([0, 0, 0, 1, 1, 1, 1, 2]),
    role_ids=np.int32([0, 1, 1, 0, 1, 1, 1, 0]),
  )
  got = call_component(advantages.hierarchical_grpo, fields).advantages
  wanted = VALUES['prime-rl_advantages']['hierarchical_grpo']
  np.testing.assert_allclose(got[:, 0], wanted, rtol=1e-6, atol=1e-7)


def test_rae_is_prime_rls_game_by_game():
  """Four games of two sides. A batch of more than one game has no order here."""
  state, got = advantages.init_baselines(), []
  for game in INPUTS['second_rewards'].reshape(4, 2):
    fields = one_token_rows(game, role_ids=np.int32([0, 1]), state=state)
    out = call_component(advantages.rae, fields, {'decay': 0.95})
    state = out.state
    got += out.advantages[:, 0].tolist()
  np.testing.assert_allclose(got, VALUES['prime-rl_advantages']['rae'], rtol=1e-5)


def test_stable_reinforces_loss_and_gradient_are_r1_rewards():
  """With log-ratios six times as far off, so that some lie beyond its bounds."""
  fields = columns()
  old = fields['old_logprobs']
  weights = token_weights(jnp.asarray(fields['mask']), mode='sequence_mean_token_mean')

  @jax.jit
  @jax.value_and_grad
  def total(logprobs):
    columns = fields | {'logprobs': logprobs}
    return jnp.sum(weights * call_component(losses.stable_reinforce, columns)[0])

  value, gradient = total(old + 6 * (fields['logprobs'] - old))
  wanted = VALUES['r1_reward']['stable_reinforce']
  np.testing.assert_allclose(value, wanted['loss'], rtol=2e-5)
  scale = np.abs(wanted['gradient']).max()
  np.testing.assert_allclose(gradient, wanted['gradient'], rtol=1e-4, atol=1e-6 * scale)
  assert np.count_nonzero(gradient) > 10
  beyond = 6 * (old - fields['logprobs']) > np.log(1000)
  beyond &= fields['mask'] & (fields['advantages'] > 0)  # where PPO has a gradient
  assert np.any(beyond) and not np.any(gradient[beyond])


def test_advantages_beyond_three_deviations_are_those_that_r1_reward_takes_away():
  """It divides by the population's deviation, and we by the sample's."""
  returns = np.float32([0.5, -0.5] * 11 + [1, -1, 4, -4])
  fields = one_token_rows(returns)
  out = call_component(advantages.reinforce_plus_plus, fields, {'max_sigma': 3.0})
  wanted = np.array(VALUES['r1_reward']['filtered'])
  assert out.keep is None and np.flatnonzero(wanted == 0).tolist() == [24, 25]
  scaled = np.asarray(out.advantages)[:, 0] * returns.std(ddof=1) / returns.std()
  np.testing.assert_allclose(scaled, wanted, atol=1e-5)


def test_clip_v_with_trinitys_values_keeps_what_trinity_keeps():
  """The two batches hold tokens with A = 0 and D > μσ: Trinity 0.6.0 drops them."""
  options = {'mu': 0.5, 'max_frac': 0.05}
  ours = call_component(advantages.clip_v, columns(), options).keep
  theirs = call_component(advantages.clip_v, columns(), options | {'drop_zero': True})
  mask = INPUTS['mask'] > 0
  wanted = np.array(VALUES['trinity']['random']) > 0
  np.testing.assert_array_equal((theirs.keep & mask), wanted)
  one = np.ones((4, 1), np.float32)
  equal = columns(
    rewards=np.float32([[0.3], [0.3], [1], [0]]),
    mask=one > 0,
    group_ids=np.int32([0, 0, 1, 1]),
    episode_ids=np.arange(4, dtype=np.int32),
    old_logprobs=0 * one,
    entropy=0 * one,
    nec=np.float32([[0.9], [0], [0], [0]]),
  )
  for drop_zero, kept in ((True, VALUES['trinity']['equal_rewards']), (False, one)):
    out = call_component(advantages.clip_v, equal, {'mu': 1.0, 'drop_zero': drop_zero})
    np.testing.assert_array_equal(1.0 * out.keep, kept)
  assert np.all(np.asarray(ours)[mask & wanted])


SELF_DISTILLATION = {
  'forward': {'alpha': 0.0, 'is_clip': None},
  'sdpo': {'alpha': 0.5},
  'sdft': {'alpha': 0.5, 'tail': False},
  'reverse': {'alpha': 1.0},
  'whole': {'alpha': 0.3, 'tail': False, 'is_clip': None, 'top_k': 12},
}


@pytest.mark.parametrize('name', SELF_DISTILLATION)
def test_self_distillation_is_trls(name):
  """On the student's likeliest tokens, by way of its logits."""
  values = VALUES['trl_self_distillation']
  given = {key: np.array(x) for key, x in values['inputs'].items()}
  options = {'top_k': 4} | SELF_DISTILLATION[name]
  likeliest = jnp.argsort(-given['student'], axis=-1)[..., : options['top_k']]
  teacher = jax.nn.log_softmax(jnp.float32(given['teacher']))
  mask = jnp.ones(given['ids'].shape, bool)

  @jax.jit
  @jax.value_and_grad
  def total(logits, weights):
    student = jax.nn.log_softmax(logits)
    chosen = jnp.take_along_axis(student, given['ids'][..., None], axis=-1)[..., 0]
    old = jax.lax.stop_gradient(chosen) + given['old_gap']
    compared = (jnp.take_along_axis(x, likeliest, axis=-1) for x in (student, teacher))
    loss, _ = losses.self_distill(chosen, old, *compared, mask, mask, **options)
    return jnp.sum(weights * loss)

  wanted = {key: np.array(x) for key, x in values[name].items()}
  logits = jnp.float32(given['student'])
  for row in range(3):  # one token's loss at a time
    one = np.zeros(mask.shape, np.float32)
    one[row, row] = 1
    value, _ = total(logits, one)
    np.testing.assert_allclose(value, wanted['loss'][row, row], rtol=1e-4, atol=1e-6)
  value, gradient = total(logits, np.ones(mask.shape, np.float32))
  np.testing.assert_allclose(value, wanted['loss'].sum(), rtol=1e-5)
  np.testing.assert_allclose(gradient, wanted['gradient'], rtol=1e-3, atol=3e-6)
  assert np.count_nonzero(np.abs(wanted['gradient']) > 1e-4) > 100


def test_self_distillations_differ_where_their_papers_say_so():
  """SDPO minds what lies beyond the k tokens, SDFT and OPSD only what is among them."""
  k, mask = jnp.log(jnp.array([[[0.6, 0.2]]])), jnp.ones((1, 1), bool)
  less = k + jnp.log(0.5)  # as likely to each other, less likely than all others
  zero = jnp.zeros((1, 1))

  def loss(student, teacher, **options):
    columns = zero, zero, student, teacher, mask, mask
    return float(losses.self_distill(*columns, **options)[0][0, 0])

  assert abs(loss(k, less, tail=False)) < 1e-6 < 0.01 < loss(k, less, tail=True)
  # α is the teacher's share: the reverse KL at 1 and the forward KL at 0.
  s, t = (jnp.log(jnp.array([[x]])) for x in ([0.9, 0.1], [0.5, 0.5]))
  forward = 0.5 * np.log(0.5 / 0.9) + 0.5 * np.log(0.5 / 0.1)
  reverse = 0.9 * np.log(0.9 / 0.5) + 0.1 * np.log(0.1 / 0.5)
  for alpha, wanted in ((0.0, forward), (1.0, reverse)):
    np.testing.assert_allclose(loss(s, t, alpha=alpha, tail=False), wanted, rtol=1e-5)


def test_a_mean_over_tokens_is_over_those_that_have_a_teacher():
  """As in the loss of SDPO's own code; other means count a row without one as 0."""
  mask, taught = jnp.ones((4, 2), bool), jnp.arange(4)[:, None] < jnp.array([[1, 1]])
  scale = losses.distillation.self_distill_fields(mask, taught, 'token_mean')
  assert float(scale['distill_scale']) == 4
  scale = losses.distillation.self_distill_fields(mask, taught, 'sequence_mean')
  assert float(scale['distill_scale']) == 1
