"""pass@k and majority@k are means over all choices of k; intervals cover means."""

import itertools
import math

import numpy as np
import pytest

from jaxrl.rollout import pass_at_k


@pytest.mark.parametrize(
  ('n', 'passed', 'k', 'wanted'),
  [(4, 1, 2, 1 / 2), (5, 0, 3, 0), (6, 6, 2, 1), (3, 1, 3, 1), (10, 2, 1, 0.2)],
)
def test_pass_at_k_by_hand(n, passed, k, wanted):
  assert pass_at_k.pass_at_k(n, passed, k) == pytest.approx(wanted)


def test_pass_at_k_is_the_mean_over_all_choices():
  for n in range(1, 8):
    for passed, k in itertools.product(range(n + 1), range(1, n + 1)):
      draws = list(itertools.combinations([1] * passed + [0] * (n - passed), k))
      wanted = sum(any(draw) for draw in draws) / len(draws)
      assert pass_at_k.pass_at_k(n, passed, k) == pytest.approx(wanted)


def test_majority_by_hand():
  answers, passed = ['a', 'a', 'b', None], [True, True, False, False]
  # k=1: a, a, b, nothing. k=2: aa, ab twice (a tie), a alone twice, b alone.
  # k=3: aab, aa, ab twice (a tie). k=4: aab.
  wanted = [2 / 4, (1 + 2 / 2 + 2) / 6, (1 + 1 + 2 / 2) / 4, 1]
  np.testing.assert_allclose(
    pass_at_k.majority_at_k(answers, passed, [1, 2, 3, 4]), wanted
  )
  assert pass_at_k.majority_at_k([None, None], [True, True], [1, 2]).tolist() == [0, 0]
  assert pass_at_k.majority_at_k(['a', 'a'], [True, True], [1, 2]).tolist() == [1, 1]


def vote(answers, passed, chosen):
  """How right the vote of the attempts `chosen` is; ties count by their parts."""
  counts = {}
  for i in chosen:
    if answers[i] is not None:
      counts[answers[i]] = counts.get(answers[i], 0) + 1
  if not counts:
    return 0
  best = [a for a, c in counts.items() if c == max(counts.values())]
  shares = [np.mean([p for p, b in zip(passed, answers) if b == a]) for a in best]  # noqa: B905
  return np.mean(shares)


def test_majority_is_the_mean_over_all_choices():
  rng = np.random.default_rng(0)
  for _ in range(60):
    n = int(rng.integers(1, 9))
    answers = [[None, 'a', 'b', 'c', 'd'][i] for i in rng.integers(5, size=n)]
    passed = (rng.random(n) < 0.5).tolist()
    ks = list(range(1, n + 1))
    wanted = [
      np.mean([vote(answers, passed, c) for c in itertools.combinations(range(n), k)])
      for k in ks
    ]
    estimates = pass_at_k.majority_at_k(answers, passed, ks)
    np.testing.assert_allclose(estimates, wanted, atol=1e-12)


def test_majority_of_many():
  answers = ['right'] * 24 + [f'wrong {i % 9}' for i in range(36)]
  passed = [a == 'right' for a in answers]
  estimates = pass_at_k.majority_at_k(answers, passed, [1, 8, 60])
  assert estimates[0] == pytest.approx(0.4) and estimates[2] == 1
  assert 0.4 < estimates[1] < 1 and math.isfinite(estimates[1])


def test_intervals_cover_the_mean_as_often_as_they_say():
  rng = np.random.default_rng(1)
  truth, covered = 0.3, 0
  for _ in range(200):
    values = (rng.random((80, 1)) < truth).astype(float)
    low, high = pass_at_k.bootstrap_interval(values, rng, draws=200)
    covered += bool(low[0] <= truth <= high[0])
  assert 0.88 < covered / 200 < 0.99


def test_intervals_repeat_and_share_their_samples():
  values = np.random.default_rng(2).random((30, 1)) * np.array([[1.0, 2.0]])
  low, high = pass_at_k.bootstrap_interval(values, np.random.default_rng(3))
  again, _ = pass_at_k.bootstrap_interval(values, np.random.default_rng(3))
  other, _ = pass_at_k.bootstrap_interval(values, np.random.default_rng(4))
  assert low.tolist() == again.tolist() != other.tolist()
  np.testing.assert_allclose(low[1], 2 * low[0])
  assert (low < values.mean(0)).all() and (values.mean(0) < high).all()
  error = values[:, 0].std() / math.sqrt(30)
  assert high[0] - low[0] == pytest.approx(2 * 1.96 * error, rel=0.1)


def test_no_interval_is_empty_where_all_tasks_pass_or_none_does():
  values = np.array([[0.0, 1.0, 0.5]] * 8)
  low, high = pass_at_k.bootstrap_interval(values, np.random.default_rng(5), draws=20)
  assert low[0] == 0 and high[0] == pytest.approx(0.36942, abs=1e-5)  # R's binom.test
  assert high[1] == 1 and low[1] == pytest.approx(1 - 0.36942, abs=1e-5)
  # statsmodels' proportion_confint(4, 8, method='wilson')
  assert (low[2], high[2]) == pytest.approx((0.21521, 0.78479), abs=1e-4)


def test_wilsons_interval_of_a_share_is_never_empty():
  # statsmodels' proportion_confint(x, n, method='wilson')
  for share, count, ends in (
    (1.0, 8, (0.67558, 1.0)),
    (0.0, 8, (0.0, 0.32442)),
    (0.3, 100, (0.21895, 0.39585)),
  ):
    assert pass_at_k.wilson_interval(share, count) == pytest.approx(ends, abs=1e-4)


def test_wrong_k_is_said():
  passed = [np.array([True, False]), np.array([True])]
  with pytest.raises(ValueError, match='k=2: every task has 1 samples'):
    pass_at_k.pass_metrics_by_task(passed, [['a', 'b'], ['a']], [1, 2])
  assert pass_at_k.powers_of_two(1) == [1] and pass_at_k.powers_of_two(10) == [
    1,
    2,
    4,
    8,
  ]
