"""Evaluation: every item once, or a fixed list of seeds, on the current weights."""

import asyncio
import itertools
import math
from collections import Counter, defaultdict
from collections.abc import Callable, Iterator

import numpy as np

from jaxrl.rollout.env_manager import EnvManager
from jaxrl.rollout.filters import scores
from jaxrl.rollout.group import Lease
from jaxrl.types import Group

Rows = Group


async def evaluate(
  make_manager: Callable[[int], EnvManager],
  base_seed: int,
  *,
  tag: str = 'default',
  num_tasks: int = -1,
  group_size: int = 1,
  concurrency: int = 64,
  retries: int = 1,
  pass_score: float = 1.0,
  progress: Callable[[int], None] | None = None,
) -> tuple[dict[str, float], list[Group]]:
  """Plays tasks 0, 1, 2 … and scores them; no filter, no queue, no training.

  make_manager(i) makes the i-th of `concurrency` managers. base_seed: task i is
  played with seed base_seed + i, the same at every evaluation. num_tasks: −1 plays
  until the data set is traversed (its mode must be 'traversal'). group_size: attempts
  a task, for pass@k. retries: how often a failed attempt is played again before it
  scores 0, with its reason. pass_score: from which score an attempt has passed.
  progress: called with the number of attempts done.

  Returns metrics `eval/<tag>/…` (see `summarize`), and the groups in order of tasks.
  """
  managers = [make_manager(i) for i in range(concurrency)]
  if num_tasks < 0 and managers[0].world.dataset is None:
    raise ValueError('without a data set there is no end: set num_tasks')
  played: dict[int, dict[int, Rows]] = defaultdict(dict)
  attempts = _attempts(num_tasks, group_size)
  done = itertools.count(1)

  async def play(manager: EnvManager) -> None:
    for task, member in attempts:
      rows = await _attempt(manager, task, member, base_seed, retries)
      if rows is None:
        return  # the data set is traversed
      played[task][member] = rows
      if progress is not None:
        progress(next(done))

  async with asyncio.TaskGroup() as tasks:
    for manager in managers:
      tasks.create_task(play(manager))
  groups = [
    [row for member in sorted(played[task]) for row in played[task][member]]
    for task in sorted(played)
  ]
  return summarize(groups, tag, pass_score=pass_score), groups


def _attempts(num_tasks: int, group_size: int) -> Iterator[tuple[int, int]]:
  """(task, member) in order, shared by all managers; endless for −1."""
  task = 0
  while num_tasks < 0 or task < num_tasks:
    yield from ((task, member) for member in range(group_size))
    task += 1


async def _attempt(
  manager: EnvManager, task: int, member: int, base_seed: int, retries: int
) -> Rows | None:
  """One attempt at a task, played again if it fails; a failure scores 0."""
  rows: Rows | None = None
  for attempt in range(retries + 1):
    lease = Lease(0, task, member, 0, attempt)
    rows = await manager.play(lease, base_seed=base_seed)
    if rows is None or not any(row.failed for row in rows):
      return rows
  for row in rows or []:
    row.rewards = np.zeros_like(row.rewards)
  return rows


def summarize(
  groups: list[Group], tag: str, *, pass_score: float = 1.0
) -> dict[str, float]:
  """Metrics of an evaluation, all under `eval/<tag>/`.

  mean: of all attempts' scores. pass@k: the chance that one of k attempts passes,
  without bias, averaged over tasks, for k = 1, 2, 4 … up to the group's size.
  tasks, failed (share of attempts), stop/<reason> (share), and the mean of every
  metric that trajectories carry. Raises ValueError when nothing was played.
  """
  if not groups:
    raise ValueError(f'evaluation {tag!r} played nothing: its data set is empty')
  totals = [scores(group) for group in groups]
  attempts = [_last_row_of_each(group) for group in groups]
  rows = [row for group in attempts for row in group]
  metrics = {
    'mean': float(np.mean(np.concatenate(totals))),
    'tasks': float(len(groups)),
    'failed': sum(row.failed for row in rows) / len(rows),
  }
  size = min(map(len, totals))
  for k in [2**i for i in range(int(math.log2(size)) + 1)]:
    chances = [pass_at_k(len(t), int((t >= pass_score).sum()), k) for t in totals]
    metrics[f'pass@{k}'] = float(np.mean(chances))
  for reason, count in sorted(Counter(row.stop_reason for row in rows).items()):
    metrics[f'stop/{reason}'] = count / len(rows)
  names = sorted({name for row in rows for name in row.metrics} - set(metrics))
  for name in names:
    values = [row.metrics[name] for row in rows if name in row.metrics]
    metrics[name] = float(np.mean(values))
  return {f'eval/{tag}/{name}': value for name, value in metrics.items()}


def pass_at_k(n: int, passed: int, k: int) -> float:
  """1 − C(n−passed, k) / C(n, k): unbiased, from n attempts (Chen et al. 2021)."""
  return 1.0 - math.comb(n - passed, k) / math.comb(n, k)


def _last_row_of_each(group: Group) -> Group:
  """One row for each member: its last turn, which carries the episode's metrics."""
  return list({row.member: row for row in group}.values())
