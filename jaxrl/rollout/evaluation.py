"""Evaluation: every item once, or a fixed list of seeds, on the current weights."""

import asyncio
import itertools
from collections import Counter, defaultdict
from collections.abc import Callable, Hashable, Sequence
from typing import Any

import numpy as np

from jaxrl.envs.graders.answers import normal, number
from jaxrl.rollout import scores
from jaxrl.rollout.env_manager import EnvManager
from jaxrl.rollout.group import Lease
from jaxrl.rollout.handles import settle
from jaxrl.rollout.members import Rows, accuracies, members, sampled
from jaxrl.rollout.members import scores as returns
from jaxrl.types import Group

GIVEN = 'given'  # the column in which an environment puts the answer it extracted


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
  progress: Callable[[Rows, int], None] | None = None,
) -> tuple[dict[str, float], list[Group]]:
  """Plays tasks 0, 1, 2 … and scores them; no filter, no queue, no training.

  make_manager(i) makes the i-th of `concurrency` managers. base_seed: task i is
  played with seed base_seed + i, the same at every evaluation. num_tasks: at most so
  many; −1 plays the data set to its end (its mode must be 'traversal'). group_size:
  attempts a task, for pass@k. retries: how often a failed attempt is played again
  before it scores 0, with its reason. pass_score: from which accuracy an attempt has
  passed. progress: called with each attempt's rows, and the number of all attempts.

  Returns metrics `eval/<tag>/…` (see `summarize`), and the groups in order of tasks.
  """
  managers = [make_manager(i) for i in range(concurrency)]
  count = await _count(managers[0].world.dataset, num_tasks)
  played: dict[int, dict[int, Rows]] = defaultdict(dict)
  attempts = itertools.product(range(count), range(group_size))

  async def play(manager: EnvManager) -> None:
    for task, member in attempts:
      rows = await _attempt(manager, task, member, base_seed, retries)
      if rows is None:
        return  # the environment has no more tasks
      played[task][member] = rows
      if progress is not None:
        progress(rows, count * group_size)

  async with asyncio.TaskGroup() as tasks:
    for manager in managers:
      tasks.create_task(play(manager))
  groups = [
    [row for member in sorted(played[task]) for row in played[task][member]]
    for task in sorted(played)
  ]
  return summarize(groups, tag, pass_score=pass_score), groups


async def _count(dataset: Any, num_tasks: int) -> int:
  """How many tasks to play: never more than there are items."""
  if dataset is None:
    if num_tasks < 0:
      raise ValueError('without a data set there is no end: set num_tasks')
    return num_tasks
  size = await settle(dataset.get_size())
  return size if num_tasks < 0 else min(num_tasks, size)


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

  Those of `by_task`, averaged over tasks, for k = 1, 2, 4 … up to the group's size;
  tasks, failed (share of attempts), stop/<reason> (share), and the mean of every
  metric that trajectories carry. Raises ValueError when nothing was played.
  """
  if not groups:
    raise ValueError(f'evaluation {tag!r} played nothing: its data set is empty')
  rows = [rows[-1] for group in groups for rows in members(sampled(group)).values()]
  size = min(len(members(sampled(group))) for group in groups)
  found = by_task(groups, scores.powers(size), pass_score=pass_score)
  metrics = {
    'tasks': float(len(groups)),
    'failed': sum(row.failed for row in rows) / len(rows),
  }
  metrics |= {name: float(values.mean()) for name, values in found.items()}
  for reason, count in sorted(Counter(row.stop_reason for row in rows).items()):
    metrics[f'stop/{reason}'] = count / len(rows)
  names = sorted({name for row in rows for name in row.metrics} - set(metrics))
  for name in names:
    values = [row.metrics[name] for row in rows if name in row.metrics]
    metrics[name] = float(np.mean(values))
  return {f'eval/{tag}/{name}': value for name, value in metrics.items()}


def by_task(
  groups: list[Group], ks: Sequence[int], *, pass_score: float = 1.0
) -> dict[str, np.ndarray]:
  """`[tasks]` float64 of every score: mean, pass@k, majority@k.

  mean: of the attempts' returns. pass@k: the chance that one of k attempts passes.
  majority@k: the chance that the answer most of k attempts give is right, for k > 1
  and environments that say which answer they found (the column 'given'). Both without
  bias, from all attempts. An attempt passes if its accuracy, as the environment has
  it, else its return, is at least `pass_score`; a failed one does not.
  """
  passed = [(accuracies(group) >= pass_score) & ~_failed(group) for group in groups]
  given = [answers(group) for group in groups]
  means = np.array([returns(group).mean() for group in groups])
  return {'mean': means, **scores.by_task(passed, given, ks)}


def _failed(group: Group) -> np.ndarray:
  attempts = members(sampled(group)).values()
  return np.array([any(row.failed for row in rows) for rows in attempts])


def answers(group: Group) -> list[Hashable | None]:
  """What each attempt answers, None for nothing; of one number all forms are alike."""
  attempts = members(sampled(group)).values()
  return [_answer(rows[-1].columns.get(GIVEN)) for rows in attempts]


def _answer(given: Any) -> Hashable | None:
  text = normal('' if given is None else str(given))
  found = number(text)
  return found if found is not None else text or None
