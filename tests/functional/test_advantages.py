"""Every advantage against its restatement, and its invariances."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jaxrl.functional import advantages as eager
from jaxrl.functional import components
from jaxrl.options import defaults
from tests.functional import harness
from tests.functional import restated_advantages as restated
from tests.functional.cases import ADVANTAGES, MOMENTS
from tests.functional.harness import Case

advantages = harness.Compiled(eager)

NUMBERS = (int, float)
FLOATS = ('rewards', 'old_values', 'old_logprobs', 'teacher_logprobs', 'entropy', 'nec')


def run_and_slopes(case):
  """A batch's advantages, and the slope of a random sum of them by every column."""
  names = [name for name in FLOATS if name in case.fn.__code__.co_varnames]

  def weighted(inputs, columns):
    out = harness.call(case, columns | inputs)
    weights = jax.random.normal(jax.random.key(0), out.advantages.shape)
    return jnp.sum(weights * out.advantages), out

  def run(columns):
    inputs = {name: columns[name] for name in names}
    return jax.grad(weighted, has_aux=True)(inputs, columns)

  return run


def by_code_path():
  """Every case; one whose switches all occur in earlier cases is slow.

  Means and deviations of `normalise` are taken one after the other, so each of their
  values is fast in one pair.
  """
  seen, params = set(), []
  for case in ADVANTAGES:
    options = case.options
    switches = {(case.name, k, v) for k, v in options.items() if type(v) not in NUMBERS}
    switches |= {(case.name,), (case.name, 'ranks', 'rank_penalty' in options)}
    if case.name == 'normalise' and len(options) == 2:
      fast = options['mean'] == options['std']
    elif case.name == 'jsd':  # the ends are forms of their own
      fast = options['beta'] in (0.0, 0.5, 1.0)
    else:
      fast = not switches <= seen
    seen |= switches
    params.append(pytest.param(case, marks=() if fast else pytest.mark.slow))
  return params


@pytest.mark.parametrize('case', by_code_path(), ids=str)
def test_equals_the_restatement(case):
  """Of batches without the padding that the function is given besides: so it is inert.

  Values, kept tokens, returns; finite slopes; zeros, not NaN, where nothing is.
  """
  plain, more = harness.stacked(case.steps), harness.stacked(case.steps, spare=True)
  run = harness.each(run_and_slopes(case))
  slopes, out = jax.tree.map(np.asarray, run(more))
  for leaf in jax.tree.leaves((slopes, out.metrics)):
    assert np.all(np.isfinite(leaf))
  got, rows = harness.unstacked(out), more['mask'].shape[1]
  for seed, batch in enumerate(harness.unstacked(harness.wide(plain))):
    check(case, got[seed], batch | {'rows': rows}, f'{case} on batch {seed}')

  order = np.random.default_rng(1).permutation(rows)
  moved = run({k: harness.reordered(v, order) for k, v in more.items()})[1]
  same(moved.advantages, out.advantages[:, order], case)

  slopes, rubbish = run(harness.poisoned(more, FLOATS[1:]))
  assert all(np.all(np.isfinite(leaf)) for leaf in jax.tree.leaves(slopes))
  same(rubbish.advantages, out.advantages, case)


def check(case, got, batch, what):
  wanted = case.restated(batch, case.options)
  # Token by token where a token's advantage is its own, e^20 among them.
  alone = case.name in ('jsd', 'on_policy_distill')
  scale = 0.1 if alone else magnitude(wanted)
  harness.assert_close(within(got.advantages), wanted, scale, what)
  assert np.all(within(got.advantages)[~batch['mask']] == 0), what
  assert np.count_nonzero(got.advantages) == np.count_nonzero(within(got.advantages))
  keep = restated.KEEPS.get(case.name, lambda c, o: None)(batch, case.options)
  assert (got.keep is None) == (keep is None), what
  if keep is not None:
    live = batch['mask']
    np.testing.assert_array_equal(within(got.keep)[live], keep[live], what)
  returns = restated.RETURNS.get(case.name, lambda c, o: None)(batch, case.options)
  assert (got.returns is None) == (returns is None), what
  if returns is not None:
    harness.assert_close(within(got.returns), returns, magnitude(returns), what)


def within(x):
  """Without the spare rows and tokens."""
  return x[: harness.ROWS, : harness.TOKENS]


def magnitude(x):
  """The largest entry of a batch, at least 1: rewards are of that size."""
  return max(np.max(np.abs(x), initial=0), 1)


def same(got, wanted, case):
  """As near as another order of adding up allows."""
  got, wanted = np.asarray(got), np.asarray(wanted)
  scale = np.max(np.abs(wanted), axis=(1, 2), keepdims=True)
  assert np.all(np.abs(got - wanted) <= 1e-5 * np.maximum(scale, 1)), str(case)


def one_for_each_set_of_numbers():
  """The first case of every function with every set of numeric options."""
  cases = {}
  for case in ADVANTAGES:
    numbers = defaults(case.fn) | dict(case.options)
    names = frozenset(k for k, v in numbers.items() if type(v) in NUMBERS)
    cases.setdefault((case.name, names), case)
  return list(cases.values())


@pytest.mark.parametrize('case', one_for_each_set_of_numbers(), ids=str)
def test_a_number_is_traced(case):
  """Numeric options may be tracers, masks bool or float."""
  numeric = {k: v for k, v in defaults(case.fn).items() if type(v) in NUMBERS}
  traced = {k: v for k, v in case.options.items() if type(v) in NUMBERS}
  fixed = {k: v for k, v in case.options.items() if k not in traced}

  def run(numbers, columns):
    again = Case(case.name, case.fn, case.restated, fixed | numbers)
    return harness.call(again, columns).advantages

  columns = harness.batch(1, case.steps)
  for mask in (columns['mask'], columns['mask'].astype(np.float32)):
    out = jax.eval_shape(run, numeric | traced, columns | {'mask': mask})
    assert out.shape == mask.shape and out.dtype == jnp.float32


def test_running_moments_equal_the_restatement():
  (case,) = MOMENTS
  out = harness.each(lambda c: harness.call(case, c))(harness.stacked(True))
  for seed, batch in enumerate(harness.unstacked(harness.wide(harness.stacked(True)))):
    for name, wanted in case.restated(batch, {}).items():
      harness.assert_close(out[name][seed], wanted, 10, f'{name} on batch {seed}')


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
    (eager.grpo, {}),
    (eager.opmd, {}),
    (eager.opmd, {'baseline': 'logavgexp'}),
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


def test_std_threshold_drops_groups_without_contrast():
  """Of equal rewards, and of one sample alone."""
  columns = columns_of([1, 1, 0, 1, 1], [0, 0, 1, 1, 2])
  out = advantages.grpo(*columns, std_threshold=0.0)
  np.testing.assert_array_equal(out.keep[:, 0], [False, False, True, True, False])


@pytest.mark.parametrize(
  'name',
  [
    'grpo',
    'opmd',
    'asymre',
    'rloo',
    'rec',
    'gigpo',
    'step_wise_grpo',
    'cod',
    'normalise',
    'clip_b',
    'clip_v',
    'grpo_distill',
    'remax',
  ],
)
def test_a_sample_without_others_keeps_its_return(name):
  """One rule for all: baseline 0, scale 1. Its group is the task 1."""
  rewards, mask, tasks, runs = columns_of([1, 0, 5], [0, 0, 1])
  columns = {
    'rewards': rewards,
    'mask': mask,
    'group_ids': tasks,
    'episode_ids': runs,
    'turn_ids': jnp.zeros(3, jnp.int32),
    'state_hash': jnp.array([7, 7, 8]),
    'greedy_mask': jnp.array([False, True, False]),
    **dict.fromkeys(
      ('old_logprobs', 'teacher_logprobs', 'entropy', 'nec'), 0 * rewards
    ),
  }
  options = {'mean': 'group', 'std': 'group'} if name == 'normalise' else {}
  call = harness.Compiled(components).call_component
  out = call(getattr(eager, name), columns, options)
  np.testing.assert_allclose(out.advantages[2, 0], 5, rtol=1e-5)


def test_a_sample_without_others_where_the_advantage_is_no_difference():
  """It is the best of its group, and 0 is subtracted before a batch is whitened."""
  columns = columns_of([1, 0, 5], [0, 0, 1])
  best = advantages.best_of_group(*columns)
  np.testing.assert_array_equal(best.advantages[:, 0], [1, 0, 1])
  whitened = advantages.reinforce_plus_plus(*columns, baseline='group').advantages
  wanted = np.array([0.5, -0.5, 5]) - 5 / 3
  ratio = whitened[:, 0] / wanted
  np.testing.assert_allclose(ratio, ratio[0], rtol=1e-5)
  assert ratio[0] > 0


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
