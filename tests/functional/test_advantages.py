"""Every advantage against its restatement, and its invariances."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jaxrl import signature
from jaxrl.functional import advantages
from tests.functional import harness
from tests.functional import restated_advantages as restated
from tests.functional.harness import Case


def case(name, *, steps=False, **options):
  return Case(name, getattr(advantages, name), getattr(restated, name), options, steps)


NUMBERS = (int, float)
ADVANTAGES = [
  case('grpo'),
  case('grpo', scale_by_std=False),
  case('grpo', std_over='batch'),
  case('grpo', steps=True),
  case('grpo', rank_penalty=0.25),
  case('grpo', rank_penalty=0.5, scale_by_std=False, steps=True),
  case('opmd'),
  case('opmd', baseline='logavgexp', tau=0.5),
  case('opmd', baseline='logavgexp', steps=True),
  case('asymre', steps=True),
  case('rloo'),
  case('rloo', steps=True),
  case('rec'),
  case('rec', scale_by_std=True, steps=True),
  case('best'),
  case('gae'),
  case('gae', gamma=0.9, lam=0.8),
  case('gae', whiten=True),
  case('reinforce', steps=True),
  case('reinforce', gamma=0.9),
  case('reinforce_plus_plus'),
  case('reinforce_plus_plus', gamma=0.9, baseline='group'),
  case('remax', gamma=0.9),
  case('agentic_reinforce', gamma=0.5),
  case('step_wise_grpo', steps=True),
  case('step_wise_grpo', steps=True, divide_by_steps=True),
  case('gigpo', steps=True),
  case('gigpo', steps=True, gamma=0.5, omega=0.3, norm='std'),
  case('step_reinforce', steps=True),
  case('step_reinforce', steps=True, gamma=0.5, over='group'),
  case('cod', steps=True),
  case('cod', steps=True, future='sliding', window=2),
  case('cod', steps=True, future='discounted', gamma=0.5),
  case('on_policy_distill', coef=0.5),
  case('grpo_distill', coef=0.1),
  *(case('jsd', beta=beta) for beta in (0.0, 0.25, 0.5, 0.999, 1.0)),
  case('normalise', mean='group', std='batch'),
  case('normalise', mean='batch', std='batch', reward_clip=0.8),
  case('normalise', mean='none', std='none', whiten=True, advantage_clip=1.0),
]


def jitted(case):
  return jax.jit(lambda columns: harness.call(case, columns))


@pytest.mark.parametrize('case', ADVANTAGES, ids=str)
def test_equals_the_restatement(case):
  run = jitted(case)
  for seed in harness.seeds(case, ADVANTAGES):
    columns = harness.batch(seed, case.steps)
    out = run(columns)
    wanted = case.restated(harness.wide(columns), case.options)
    # Token by token where a token's advantage is its own, e^20 among them.
    alone = case.name in ('jsd', 'on_policy_distill')
    scale = 0.1 if alone else np.max(np.abs(wanted), initial=0) + 1
    harness.assert_close(out.advantages, wanted, scale, what=f'{case} on batch {seed}')
    assert np.all(np.asarray(out.advantages)[~columns['mask']] == 0)
    assert all(np.all(np.isfinite(m)) for m in out.metrics.values())


@pytest.mark.parametrize('case', ADVANTAGES, ids=str)
def test_rows_and_padding_change_nothing(case):
  run, columns = jitted(case), harness.batch(11, case.steps)
  plain = np.asarray(run(columns).advantages)
  order = np.random.default_rng(1).permutation(harness.ROWS)
  moved = run(harness.permuted(columns, order)).advantages
  np.testing.assert_allclose(moved, plain[order], rtol=1e-5, atol=1e-6)
  more = run(harness.padded(columns)).advantages
  inner = more[: harness.ROWS, : harness.TOKENS]
  np.testing.assert_allclose(inner, plain, rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize('case', ADVANTAGES, ids=str)
def test_a_number_is_traced(case):
  """Numeric options may be tracers, masks bool or float."""
  numeric = {k: v for k, v in signature.defaults(case.fn).items() if type(v) in NUMBERS}
  given = {k: v for k, v in case.options.items() if type(v) in NUMBERS}
  fixed = {k: v for k, v in case.options.items() if k not in given}

  def run(numbers, columns):
    again = Case(case.name, case.fn, case.restated, fixed | numbers)
    return harness.call(again, columns).advantages

  columns = harness.batch(1, case.steps)
  for mask in (columns['mask'], columns['mask'].astype(np.float32)):
    out = jax.eval_shape(run, numeric | given, columns | {'mask': mask})
    assert out.shape == mask.shape and out.dtype == jnp.float32


def columns_of(rewards, tasks, runs=None):
  """One token a row."""
  n = len(rewards)
  return (
    jnp.array(rewards, jnp.float32)[:, None],
    jnp.ones((n, 1), bool),
    jnp.array(tasks, jnp.int32),
    jnp.array(list(range(n)) if runs is None else runs, jnp.int32),
  )


def test_grpo_by_hand():
  """Rewards 1, 0, 0: μ = 1/3, s = √(1/3) with ddof 1; a singleton keeps its reward."""
  out = advantages.grpo(*columns_of([1, 0, 0, 5], [0, 0, 0, 1]))
  s = np.sqrt(1 / 3) + 1e-6
  wanted = [[2 / 3 / s], [-1 / 3 / s], [-1 / 3 / s], [5 / (1 + 1e-6)]]
  np.testing.assert_allclose(out.advantages, wanted, rtol=1e-5)


def test_equal_rewards_give_exactly_zero():
  """Seven times 0.7: a mean in float32 is not 0.7, and dividing by s inflates that."""
  for fn, options in [
    (advantages.grpo, {}),
    (advantages.opmd, {}),
    (advantages.opmd, {'baseline': 'logavgexp'}),
  ]:
    run = jax.jit(lambda *columns, fn=fn, options=options: fn(*columns, **options))
    for size in range(2, 40):
      ids = [0] * size + [-1] * (40 - size)
      runs = [*range(size)] + [-1] * (40 - size)
      assert np.all(np.asarray(run(*columns_of([0.7] * 40, ids, runs)).advantages) == 0)


def test_a_run_counts_once_however_many_rows_it_has():
  """Run 0 has three rows worth 1 in all, run 1 one row worth 0: μ = ½, not ¼."""
  out = advantages.opmd(*columns_of([0, 0, 1, 0], [0, 0, 0, 0], [0, 0, 0, 1]))
  np.testing.assert_allclose(out.advantages[:, 0], [0.5, 0.5, 0.5, -0.5])


def test_std_threshold_drops_groups():
  columns = columns_of([1, 1, 0, 1], [0, 0, 1, 1])
  out = advantages.grpo(*columns, std_threshold=0.0)
  np.testing.assert_array_equal(out.keep[:, 0], [False, False, True, True])


def test_opmd_logavgexp_by_hand():
  out = advantages.opmd(*columns_of([1, 0], [0, 0]), baseline='logavgexp', tau=2.0)
  b = 2 * np.log((np.exp(0.5) + 1) / 2)
  np.testing.assert_allclose(out.advantages[:, 0], [1 - b, -b], rtol=1e-5)


def test_opmd_refuses_an_unknown_baseline():
  with pytest.raises(ValueError, match='logavgexp'):
    advantages.opmd(*columns_of([1], [0]), baseline='median')


def test_gae_steps_over_observations():
  """Two turns with an observation between: the second turn's V follows the first."""
  rewards = jnp.array([[0.0, 9.0, 1.0]])  # the 9 lies on an observation
  values = jnp.array([[0.5, 7.0, 0.25]])
  mask = jnp.array([[True, False, True]])
  out = advantages.gae(rewards, values, mask, gamma=0.5, lam=0.5)
  last = 1 - 0.25
  np.testing.assert_allclose(
    out.advantages, [[0.5 * 0.25 - 0.5 + 0.25 * last, 0, last]], rtol=1e-6
  )
  np.testing.assert_allclose(out.returns, out.advantages + values * mask, rtol=1e-6)
