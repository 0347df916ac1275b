"""Evaluation scores the current weights on every item, or on a fixed list of seeds."""

import asyncio
import itertools
from collections import Counter, defaultdict
from collections.abc import Callable, Hashable, Mapping, Sequence

import numpy as np

from jaxrl.envs.env_registry import unwrapped
from jaxrl.envs.graders.answer_matching import normalize_answer
from jaxrl.envs.graders.answer_numbers import parse_number
from jaxrl.group_stats import (
  SampleRows,
  rows_by_sample,
  sample_accuracies,
  sample_scores,
  without_greedy,
)
from jaxrl.options import OptionValues
from jaxrl.rollout import pass_at_k
from jaxrl.rollout.engine.actor_proxy import maybe_await
from jaxrl.rollout.env_manager import EnvManager
from jaxrl.rollout.queue.group_state import EpisodeLease, FailureLog
from jaxrl.types import Group, TaskSource

# The column in which an environment puts the answer that it extracted.
ANSWER_COLUMN = 'given'


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
  progress: Callable[[SampleRows, int], None] | None = None,
  failures: FailureLog | None = None,
) -> tuple[dict[str, float], list[Group]]:
  """Plays tasks 0, 1, 2 … and scores them, without filters, queue or training.

  Args:
    make_manager: Creates the i-th of `concurrency` managers.
    base_seed: Task i is played with seed `base_seed + i`, at every evaluation.
    tag: The environment's tag.
    num_tasks: Plays at most this many tasks; −1 plays the data set to its end, for
      which its mode must be 'traversal'.
    group_size: Samples per task, for pass@k.
    concurrency: Number of samples played at the same time.
    retries: How often a failed sample is retried before it scores 0.
    pass_score: A sample passes if its accuracy is at least this.
    progress: Called with each sample's rows and the total number of samples.
    failures: Logs why episodes fail.

  Returns:
    The metrics `eval/<tag>/…` (see `summarize`), and the groups in order of tasks.

  Raises:
    ValueError: If there is no data set and `num_tasks` is −1, or nothing was played.
  """
  managers = [make_manager(i) for i in range(concurrency)]
  failures = failures or FailureLog()
  count = await _count_tasks(managers[0].context.dataset, num_tasks)
  played: dict[int, dict[int, SampleRows]] = defaultdict(dict)
  remaining = itertools.product(range(count), range(group_size))

  async def play_remaining(manager: EnvManager) -> None:
    for task, sample_index in remaining:
      sample = task, sample_index
      rows = await _play_sample(manager, *sample, base_seed, retries, failures)
      if rows is None:
        return  # the environment has no more tasks
      played[task][sample_index] = rows
      if progress is not None:
        progress(rows, count * group_size)

  try:
    async with asyncio.TaskGroup() as tasks:
      for manager in managers:
        tasks.create_task(play_remaining(manager))
  except ExceptionGroup as errors:
    raise errors.exceptions[0] from None  # the others follow from the first
  groups = [
    [row for sample_index in sorted(played[task]) for row in played[task][sample_index]]
    for task in sorted(played)
  ]
  return summarize(groups, tag, pass_score=pass_score), groups


async def _count_tasks(dataset: TaskSource | None, num_tasks: int) -> int:
  """Returns how many tasks to play: never more than there are items."""
  if dataset is None:
    if num_tasks < 0:
      raise ValueError('num_tasks must be set for an environment without a data set')
    return num_tasks
  size = await maybe_await(dataset.get_size())
  return size if num_tasks < 0 else min(num_tasks, size)


async def _play_sample(
  manager: EnvManager,
  task: int,
  sample_index: int,
  base_seed: int,
  retries: int,
  failures: FailureLog,
) -> SampleRows | None:
  """Plays a sample, and again if it fails; a final failure scores 0."""
  rows: SampleRows | None = None
  for attempt in range(retries + 1):
    lease = EpisodeLease(0, task, sample_index, 0, attempt)
    rows = await manager.play_episode(lease, base_seed=base_seed)
    if rows is None or not any(row.failed for row in rows):
      return rows
    failures.record_episode(rows)
    if rows[-1].stop_reason == 'prompt_too_long':
      break  # the same task has the same prompt
  for row in rows or []:
    row.rewards = np.zeros_like(row.rewards)
  return rows


def summarize(
  groups: list[Group], tag: str, *, pass_score: float = 1.0
) -> dict[str, float]:
  """Computes the metrics of an evaluation.

  They are: the means over tasks of `metrics_by_task`, for k = 1, 2, 4 … up to the
  group size; `tasks`, the number of tasks; `failed` and `stop/<reason>`, shares of the
  samples; and the mean of every metric that the rows carry.

  Args:
    groups: The played groups.
    tag: The environment's tag.
    pass_score: A sample passes if its accuracy is at least this.

  Returns:
    The metrics, all under `eval/<tag>/`.

  Raises:
    ValueError: If there are no groups.
  """
  if not groups:
    raise ValueError(f'evaluation {tag!r} played nothing: its data set is empty')
  samples = [rows_by_sample(without_greedy(group)) for group in groups]
  last_rows = [rows[-1] for by_index in samples for rows in by_index.values()]
  ks = pass_at_k.powers_of_two(min(len(by_index) for by_index in samples))
  by_task = metrics_by_task(groups, ks, pass_score=pass_score)
  metrics = {
    'tasks': float(len(groups)),
    'failed': sum(row.failed for row in last_rows) / len(last_rows),
  }
  metrics |= {name: float(values.mean()) for name, values in by_task.items()}
  for reason, count in sorted(Counter(row.stop_reason for row in last_rows).items()):
    metrics[f'stop/{reason}'] = count / len(last_rows)
  env_metrics = {name for row in last_rows for name in row.metrics} - set(metrics)
  for name in sorted(env_metrics):
    values = [row.metrics[name] for row in last_rows if name in row.metrics]
    metrics[name] = float(np.mean(values))
  return {f'eval/{tag}/{name}': value for name, value in metrics.items()}


def derived_metrics(
  env_type: str, env_config: OptionValues, tag: str, metrics: Mapping[str, float]
) -> dict[str, float]:
  """Returns what the class of an environment says follows from an evaluation.

  Args:
    env_type: The environment.
    env_config: Its options.
    tag: As for `evaluate`.
    metrics: What `evaluate` returned.

  Returns:
    Further metrics `eval/<tag>/…`; none if its class has no `evaluation_metrics`.
  """
  derive = getattr(unwrapped(env_type, env_config), 'evaluation_metrics', None)
  if derive is None:
    return {}
  prefix = f'eval/{tag}/'
  named = {name.removeprefix(prefix): value for name, value in metrics.items()}
  return {f'{prefix}{name}': float(value) for name, value in derive(named).items()}


def metrics_by_task(
  groups: list[Group], ks: Sequence[int], *, pass_score: float = 1.0
) -> dict[str, np.ndarray]:
  """Computes the mean return, pass@k and majority@k of every task.

  pass@k is the probability that at least one of k samples passes. majority@k is the
  probability that the most frequent answer of k samples is right, for k > 1 and
  environments that report their answers. Both are unbiased estimates from all samples.
  A sample passes if its accuracy is at least `pass_score`; a failed one never does.

  Args:
    groups: The played groups, one per task.
    ks: The values of k.
    pass_score: The accuracy from which a sample passes.

  Returns:
    `[tasks]` float64 of each metric: `mean`, `pass@k`, `majority@k`.
  """
  passed = [
    (sample_accuracies(group) >= pass_score) & ~_failed(group) for group in groups
  ]
  answers = [sample_answers(group) for group in groups]
  means = np.array([sample_scores(group).mean() for group in groups])
  return {'mean': means, **pass_at_k.pass_metrics_by_task(passed, answers, ks)}


def _failed(group: Group) -> np.ndarray:
  """Returns `[samples]` bool: which samples failed."""
  samples = rows_by_sample(without_greedy(group)).values()
  return np.array([any(row.failed for row in rows) for rows in samples])


def sample_answers(group: Group) -> list[Hashable | None]:
  """Returns the answer of each sample; equal numbers are equal answers.

  Args:
    group: Rows of all samples of one task.

  Returns:
    One answer per sample that is not greedy, None where it gave none.
  """
  samples = rows_by_sample(without_greedy(group)).values()
  return [_canonical_answer(rows[-1].columns.get(ANSWER_COLUMN)) for rows in samples]


def _canonical_answer(answer: object) -> Hashable | None:
  text = normalize_answer('' if answer is None else str(answer))
  number = parse_number(text)
  return number if number is not None else text or None
