"""Summarizes an evaluation: scores with their intervals, as JSON and as lines."""

from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import numpy as np

from jaxrl.data.seeds import fold_seed
from jaxrl.group_stats import rows_by_sample, sample_score
from jaxrl.options import defaults
from jaxrl.rollout import pass_at_k
from jaxrl.rollout.evaluation import ANSWER_COLUMN, metrics_by_task
from jaxrl.types import Group

LEVEL = defaults(pass_at_k.bootstrap_interval)['level']


def summarize_tags(
  metrics: Mapping[str, float], groups: Sequence[Group], ks: Sequence[int], seed: int
) -> dict[str, dict[str, Any]]:
  """Summarizes the evaluation of each tag.

  Args:
    metrics: Metrics of `RolloutScheduler.evaluate`.
    groups: Its groups.
    ks: The ks of pass@k and majority@k; () takes 1, 2, 4 … up to the samples of a task.
    seed: Seed of the run, from which the bootstrap samples of the intervals follow.

  Returns:
    By tag: num_tasks, num_attempts (of a task), scores {name: {value, low, high}},
    other (the mean of every other metric), error (of the first failed sample, or None)
    and tasks, each with its seed, scores, answers and stop reasons.
  """
  return {
    tag: _tag(metrics, [group for group in groups if group[0].tag == tag], ks, seed)
    for tag in dict.fromkeys(group[0].tag for group in groups)
  }


def _tag(
  metrics: Mapping[str, float], groups: list[Group], ks: Sequence[int], seed: int
) -> dict[str, Any]:
  tag, size = groups[0][0].tag, min(len(rows_by_sample(group)) for group in groups)
  scores = metrics_by_task(groups, ks or pass_at_k.powers_of_two(size))
  scores = {f'mean@{size}' if k == 'mean' else k: v for k, v in scores.items()}
  other = {}
  for name, value in metrics.items():
    short = name.removeprefix(f'eval/{tag}/')
    is_score = short in ('tasks', 'mean') or short.startswith(('pass@', 'majority@'))
    if short != name and not is_score:
      other[short] = value
  errors = [row.extras.get('error') for group in groups for row in group if row.failed]
  return {
    'num_tasks': len(groups),
    'num_attempts': size,
    'scores': with_intervals(scores, tag, seed),
    'other': other,
    'error': str(errors[0]) if errors else None,
    'tasks': [_task(group) for group in groups],
  }


def with_intervals(
  scores: Mapping[str, np.ndarray], tag: str, seed: int
) -> dict[str, dict[str, float]]:
  """Returns the mean of each score and its confidence interval.

  Args:
    scores: `[tasks]` of each score.
    tag: The environment's tag.
    seed: Seed of the run; with the tag, it decides the bootstrap samples.

  Returns:
    By score: value, low and high.
  """
  rng = np.random.default_rng(fold_seed(seed, 'bootstrap', tag))
  table = np.stack(list(scores.values()), axis=1)
  ends = pass_at_k.bootstrap_interval(table, rng)
  return {
    name: {'value': float(value), 'low': float(low), 'high': float(high)}
    for name, value, low, high in zip(scores, table.mean(0), *ends, strict=True)
  }


def _task(group: Group) -> dict[str, Any]:
  attempts = list(rows_by_sample(group).values())
  answers = [rows[-1].columns.get(ANSWER_COLUMN) for rows in attempts]
  return {
    'number': group[0].episode_id,
    'seed': group[0].episode_seed,
    'scores': [sample_score(rows) for rows in attempts],
    'answers': [None if answer is None else str(answer) for answer in answers],
    'stop_reasons': [rows[-1].stop_reason for rows in attempts],
  }


def format_results(
  results: Mapping[str, Mapping[str, Any]],
) -> Iterator[tuple[str, str]]:
  """Yields (text, style) of each line for people."""
  for tag, result in results.items():
    many = result['num_attempts'] > 1
    attempts = f', {result["num_attempts"]} attempts each' if many else ''
    yield '', ''
    yield f'{tag}: {result["num_tasks"]} tasks{attempts}', 'bold'
    width = max(14, *map(len, result['scores']))
    yield f'  {"":<{width}} {"score":>8}   {LEVEL:.0%} interval', 'dim'
    for name, row in result['scores'].items():
      span = f'{row["low"]:.3f} – {row["high"]:.3f}'
      yield f'  {name:<{width}} {row["value"]:>8.3f}   {span}', ''
    for name, value in result['other'].items():
      if name.startswith('stop/') and name != 'stop/finish':
        yield f'  {name:<{width}} {value:>8.1%}   of attempts', ''
    if result['other']['failed']:
      failed = f'{result["other"]["failed"]:.1%} of attempts failed and score 0'
      yield f'  {failed}; the first: {result["error"]}', 'yellow'
