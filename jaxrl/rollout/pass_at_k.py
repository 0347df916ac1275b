"""pass@k and majority@k estimate how a policy does with several samples per task."""

import math
from collections.abc import Hashable, Sequence

import numpy as np


def powers_of_two(size: int) -> list[int]:
  """Returns 1, 2, 4 … up to `size`."""
  return [2**i for i in range(size.bit_length()) if 2**i <= size]


def pass_at_k(n: int, passed: int, k: int) -> float:
  """Estimates the probability that at least one of k samples passes.

  The estimate 1 − C(n − passed, k) / C(n, k) is unbiased (Chen et al. 2021,
  arXiv 2107.03374).

  Args:
    n: Number of samples played.
    passed: How many of them passed.
    k: Number of samples drawn, at most n.

  Returns:
    The probability.
  """
  return 1.0 - math.comb(n - passed, k) / math.comb(n, k)


def majority_at_k(
  answers: Sequence[Hashable | None], passed: Sequence[bool], ks: Sequence[int]
) -> np.ndarray:
  """Estimates the probability that the majority vote of k samples is right.

  The estimate is unbiased: it is the mean over all C(n, k) choices of k samples. Among
  answers with equally many votes each is as likely to win, and where nobody votes
  nothing is right.

  Args:
    answers: `[n]` answers that the samples vote for; None abstains. n is at most 1,000.
    passed: `[n]` whether each sample passed. Samples with the same answer of which only
      some passed count as right by that share.
    ks: The values of k.

  Returns:
    `[len(ks)]` probabilities.
  """
  shares = _answer_shares(answers, passed)
  n, max_k = len(answers), max(ks)
  num_silent = n - sum(count for count, _ in shares)
  if not any(share for _, share in shares):
    return np.zeros(len(ks))
  if not num_silent and all(share == 1 for _, share in shares):
    return np.ones(len(ks))
  max_votes = min(max_k, max(count for count, _ in shares))
  num_right = sum(
    _ways_to_win(votes, shares, num_silent, max_k) for votes in range(1, max_votes + 1)
  )
  return np.array([np.asarray(num_right)[k] / math.comb(n, k) for k in ks])


def _answer_shares(
  answers: Sequence[Hashable | None], passed: Sequence[bool]
) -> list[tuple[int, float]]:
  """Returns (votes, share of them that passed) of each answer."""
  passed_by_answer: dict[Hashable, list[bool]] = {}
  for answer, sample_passed in zip(answers, passed, strict=True):
    if answer is not None:
      passed_by_answer.setdefault(answer, []).append(bool(sample_passed))
  return [(len(votes), sum(votes) / len(votes)) for votes in passed_by_answer.values()]


def _ways_to_win(
  votes: int, shares: Sequence[tuple[int, float]], num_silent: int, max_k: int
) -> np.ndarray:
  """Counts the draws of k samples in which an answer wins with `votes` votes.

  Each draw counts by the share of its winning answers that passed. The count is a
  polynomial in the number of samples drawn, built one answer at a time: `state[0, a]`
  counts the draws in which `a` answers tie, and `state[1, a]` weighs them by the sum of
  these answers' shares.

  Returns:
    `[max_k + 1]` counts, by k.
  """
  state = np.zeros((2, max_k // votes + 1, max_k + 1))
  state[0, 0, 0] = 1
  for count, share in shares:
    updated = state @ _convolution(count, min(count, votes - 1), max_k)
    if count >= votes:
      wins = math.comb(count, votes) * state[:, :-1, :-votes]
      updated[:, 1:, votes:] += wins
      updated[1, 1:, votes:] += share * wins[0]
    state = updated
  num_tied = np.arange(1, state.shape[1])
  sums = state[1, 1:] @ _convolution(num_silent, num_silent, max_k)
  return (sums / num_tied[:, None]).sum(0)


def _convolution(count: int, max_drawn: int, max_k: int) -> np.ndarray:
  """Returns the matrix that multiplies polynomials by Σ C(count, s) xˢ.

  Here s = 0 … max_drawn, and the matrix is `[max_k + 1, max_k + 1]`.
  """
  size = max_k + 1
  padded = np.zeros(2 * size)
  coefficients = [math.comb(count, s) for s in range(min(max_drawn, max_k) + 1)]
  padded[size : size + len(coefficients)] = coefficients
  index = np.arange(size)
  return padded[size + index[None, :] - index[:, None]]


def wilson_interval(
  share: float, count: int, *, z: float = 1.96
) -> tuple[float, float]:
  """Computes Wilson's interval of a share (1927), which has a width also at 0 and 1.

  Args:
    share: The share, from 0 to 1.
    count: Of how many it is.
    z: Standard deviations; 1.96 for 95%.

  Returns:
    The low and the high end.
  """
  scale = 1 + z * z / count
  middle = (share + z * z / (2 * count)) / scale
  half = z * math.sqrt(share * (1 - share) / count + (z / (2 * count)) ** 2) / scale
  return max(0.0, min(share, middle - half)), min(1.0, max(share, middle + half))


def bootstrap_interval(
  values: np.ndarray,
  rng: np.random.Generator,
  *,
  level: float = 0.95,
  draws: int = 2000,
) -> tuple[np.ndarray, np.ndarray]:
  """Computes bootstrap confidence intervals of means over tasks.

  The intervals are percentiles of the means of `draws` samples of N tasks, drawn with
  replacement and shared by all M columns. Where every task has the value 0, or every
  task the value 1, such samples have no spread, so the interval is the exact one for
  values between 0 and 1 (Clopper and Pearson 1934): with 8 tasks of which none passed,
  it is 0 to 0.37. If all values of a column are equal to another number between 0 and
  1, the interval is Wilson's for a share of that size, which is the widest.

  Args:
    values: `[N, M]` values of N tasks.
    rng: Draws the tasks.
    level: Confidence level.
    draws: Number of bootstrap samples.

  Returns:
    The low and the high ends, `[M]` each.
  """
  count = len(values)
  means = [values[rng.integers(count, size=count)].mean(0) for _ in range(draws)]
  edge = 50 * (1 - level)
  low, high = np.percentile(means, [edge, 100 - edge], axis=0)
  # A mean of p leaves each task the value 0 with a probability of at most 1 − p.
  margin = 1 - ((1 - level) / 2) ** (1 / count)
  high = np.where((values == 0).all(0), margin, high)
  low = np.where((values == 1).all(0), 1 - margin, low)
  for column in np.flatnonzero(low == high):
    if 0 <= low[column] <= 1:
      low[column], high[column] = wilson_interval(float(low[column]), count)
  return low, high


def pass_metrics_by_task(
  passed: Sequence[np.ndarray],
  answers: Sequence[Sequence[Hashable | None]],
  ks: Sequence[int],
) -> dict[str, np.ndarray]:
  """Computes pass@k, and majority@k for k > 1, of every task.

  Args:
    passed: For each task, `[samples]` bool.
    answers: For each task, as many answers; None for none.
    ks: The values of k.

  Returns:
    `[tasks]` of each `pass@k`, and of each `majority@k` if any sample gave an answer.

  Raises:
    ValueError: If some task has fewer than k samples.
  """
  min_samples = min(map(len, passed))
  for k in ks:
    if not 1 <= k <= min_samples:
      raise ValueError(
        f'k={k}: every task has {min_samples} samples, so k must be 1 to {min_samples}'
      )
  metrics: dict[str, np.ndarray] = {}
  for k in ks:
    estimates = [pass_at_k(len(task), int(task.sum()), k) for task in passed]
    metrics[f'pass@{k}'] = np.array(estimates)
  vote_sizes = [k for k in ks if k > 1]
  has_answers = any(answer is not None for task in answers for answer in task)
  if vote_sizes and has_answers:
    by_task = [
      majority_at_k(task_answers, task_passed.tolist(), vote_sizes)
      for task_answers, task_passed in zip(answers, passed, strict=True)
    ]
    for k, values in zip(vote_sizes, np.array(by_task).T, strict=True):
      metrics[f'majority@{k}'] = values
  return metrics
