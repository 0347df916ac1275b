"""What several attempts at each task say of a policy. Numpy alone; no randomness."""

import math
from collections.abc import Callable, Hashable, Sequence

import numpy as np


def powers(size: int) -> list[int]:
  """1, 2, 4 … up to `size`."""
  return [2**i for i in range(size.bit_length()) if 2**i <= size]


def pass_at_k(n: int, passed: int, k: int) -> float:
  """The chance that one of k attempts passes, from n of which `passed` did.

  1 − C(n−passed, k) / C(n, k): unbiased (Chen et al. 2021, arXiv 2107.03374).
  """
  return 1.0 - math.comb(n - passed, k) / math.comb(n, k)


def majority_at_k(
  answers: Sequence[Hashable | None], passed: Sequence[bool], ks: Sequence[int]
) -> np.ndarray:
  """`[len(ks)]`: the chance that k attempts' vote for an answer is right, from n.

  answers: `[n]`, what each attempt votes for; None abstains. passed: `[n]`; attempts
  with one answer that fare differently count as right by their share. Without bias:
  the mean over all C(n, k) choices of k attempts. Among answers with equally many
  votes each is as likely to win; where nobody votes, nothing is right. n: up to 1,000.
  """
  shares = _shares(answers, passed)
  n, top = len(answers), max(ks)
  silent = n - sum(count for count, _ in shares)
  if not any(share for _, share in shares):
    return np.zeros(len(ks))
  if not silent and all(share == 1 for _, share in shares):
    return np.ones(len(ks))
  most = min(top, max(count for count, _ in shares))
  right = sum(_right(votes, shares, silent, top) for votes in range(1, most + 1))
  return np.array([np.asarray(right)[k] / math.comb(n, k) for k in ks])


def _shares(
  answers: Sequence[Hashable | None], passed: Sequence[bool]
) -> list[tuple[int, float]]:
  """(votes, share of them that passed) of each answer."""
  found: dict[Hashable, list[bool]] = {}
  for answer, right in zip(answers, passed, strict=True):
    if answer is not None:
      found.setdefault(answer, []).append(bool(right))
  return [(len(rights), sum(rights) / len(rights)) for rights in found.values()]


def _right(
  votes: int, shares: Sequence[tuple[int, float]], silent: int, top: int
) -> np.ndarray:
  """`[top + 1]`: ways to draw k attempts so that an answer wins with `votes`, each by
  how right it is.

  A polynomial in the number of attempts drawn, an answer at a time. Of every number
  of answers that tie there are the ways to come by them, and the ways times the sum
  of these answers' shares.
  """
  state = np.zeros((2, top // votes + 1, top + 1))
  state[0, 0, 0] = 1
  for count, share in shares:
    after = state @ _fold(count, min(count, votes - 1), top)
    if count >= votes:
      wins = math.comb(count, votes) * state[:, :-1, :-votes]
      after[:, 1:, votes:] += wins
      after[1, 1:, votes:] += share * wins[0]
    state = after
  tied = np.arange(1, state.shape[1])
  sums = state[1, 1:] @ _fold(silent, silent, top)
  return (sums / tied[:, None]).sum(0)


def _fold(count: int, most: int, top: int) -> np.ndarray:
  """`[top + 1, top + 1]`: multiplies polynomials by Σ C(count, s) xˢ, s = 0 … most."""
  size = top + 1
  padded = np.zeros(2 * size)
  own = [math.comb(count, s) for s in range(min(most, top) + 1)]
  padded[size : size + len(own)] = own
  index = np.arange(size)
  return padded[size + index[None, :] - index[:, None]]


def bootstrap(
  values: np.ndarray,
  rng: np.random.Generator,
  *,
  level: float = 0.95,
  draws: int = 2000,
) -> tuple[np.ndarray, np.ndarray]:
  """Low and high ends `[M]` of the intervals of M means over tasks; values: `[N, M]`.

  Percentiles of the means of `draws` samples of N tasks, drawn with replacement, the
  same for all M. Of values that are all alike they are that value: so few tasks, or
  so easy ones, tell nothing of their spread.
  """
  count = len(values)
  means = [values[rng.integers(count, size=count)].mean(0) for _ in range(draws)]
  edge = 50 * (1 - level)
  low, high = np.percentile(means, [edge, 100 - edge], axis=0)
  return low, high


def by_task(
  passed: Sequence[np.ndarray],
  answers: Sequence[Sequence[Hashable | None]],
  ks: Sequence[int],
) -> dict[str, np.ndarray]:
  """`[tasks]` of each `pass@k`, and of `majority@k` for k > 1 where anyone answers.

  passed: of each task `[attempts]` bool. answers: of each as many, None for none.
  Raises ValueError for a k for which some task has too few attempts.
  """
  least = min(map(len, passed))
  for k in ks:
    if not 1 <= k <= least:
      raise ValueError(f'k={k}: every task has {least} attempts, so k is 1 to {least}')

  def each(value: Callable[[int], float]) -> np.ndarray:
    return np.array([value(task) for task in range(len(passed))])

  found = {
    f'pass@{k}': each(
      lambda task, k=k: pass_at_k(len(passed[task]), int(passed[task].sum()), k)
    )
    for k in ks
  }
  several = [k for k in ks if k > 1]
  if several and any(answer is not None for task in answers for answer in task):
    votes = [
      majority_at_k(own, right.tolist(), several)
      for own, right in zip(answers, passed, strict=True)
    ]
    for k, values in zip(several, np.array(votes).T, strict=True):
      found[f'majority@{k}'] = values
  return found
