"""Monitoring reports metrics of training and warns about what goes wrong.

It computes metrics of rewards, tokens and staleness, checks each update for values that
are not finite and for policies that disagree, counts compilations, and logs why a step
had to recompile.
"""

import logging
import threading
from collections.abc import Collection, Mapping, Sequence
from typing import Any

import jax
import numpy as np

from jaxrl.group_stats import (
  RAW_SCORE,
  is_truncated,
  raw_score,
  rows_by_sample,
  sample_score,
)
from jaxrl.training.batching.batch_builder import BatchShape
from jaxrl.training.train_step import SAMPLED_TOKENS, TOKENS
from jaxrl.types import Batch, Group

log = logging.getLogger(__name__)

MAX_IDLE_STEPS = 3  # in a row without any token to learn from, before a run is stopped


class EmptyBatchError(ArithmeticError):
  """No row of a step has an action token, so no mean over them is defined."""


class NothingLearnedError(ArithmeticError):
  """Step after step, no token has a gradient."""


def check_action_tokens(groups: Sequence[Group], step: int) -> None:
  """Checks that there is something to learn from.

  Args:
    groups: The groups of a step.
    step: The learner's step.

  Raises:
    EmptyBatchError: No row has an action token.
  """
  rows = [row for group in groups for row in group]
  if not any(np.any(row.action_mask) for row in rows):
    raise EmptyBatchError(
      f'step {step}: none of the {len(rows)} rows has an action token, so there is '
      'nothing to learn from. Are the prompts so long that no reply fits into '
      'batch.max_length, or do all replies come back empty? '
      'trajectory_dump.path=FOLDER keeps the trajectories to look at'
    )


def reward_metrics(groups: Sequence[Group]) -> dict[str, float]:
  """Computes metrics of the rewards of sampled episodes.

  reward/mean and the like are of rewards as the environment gave them, reward/shaped_…
  of rewards after shaping, if there is any. reward/greedy_mean is of greedy samples,
  which count in nothing else. Metrics that samples have as reward/…, grader/… or
  prefix/… (terms of a reward, failed graders, replayed turns) are averaged over the
  samples that have them. rollout/truncated is the share of samples that were cut short.

  Args:
    groups: The groups of a step; rows of experts are left out.

  Returns:
    Metrics by name; none if nothing was sampled.
  """
  shaped_scores: list[list[float]] = []
  raw_scores: list[list[float]] = []
  greedy_scores: list[float] = []
  truncated: list[bool] = []
  reported: dict[str, list[float]] = {}
  is_shaped = any(RAW_SCORE in row.metrics for group in groups for row in group)
  for group in groups:
    samples = rows_by_sample([row for row in group if not row.is_expert]).values()
    greedy_scores += [raw_score(rows) for rows in samples if rows[0].is_greedy]
    sampled = [rows for rows in samples if not rows[0].is_greedy]
    truncated += map(is_truncated, sampled)
    for rows in sampled:
      for name, value in rows[-1].metrics.items():
        if name.startswith(('reward/', 'grader/', 'prefix/')):
          reported.setdefault(name, []).append(value)
    if sampled:
      raw_scores.append([raw_score(rows) for rows in sampled])
      if is_shaped:
        shaped_scores.append([sample_score(rows) for rows in sampled])
  if not raw_scores:
    return {}
  scores = np.concatenate([np.asarray(group) for group in raw_scores])
  metrics = {name: float(np.mean(values)) for name, values in reported.items()}
  metrics |= {
    'reward/mean': float(scores.mean()),
    'reward/std': float(scores.std()),
    'reward/max': float(scores.max()),
    'reward/min': float(scores.min()),
    'reward/group_std': _mean_group_std(raw_scores),
    'reward/groups_without_spread': float(
      np.mean([max(group) == min(group) for group in raw_scores])
    ),
    'rollout/truncated': float(np.mean(truncated)),
  }
  if is_shaped:
    metrics['reward/shaped_mean'] = float(np.mean(np.concatenate(shaped_scores)))
    metrics['reward/shaped_group_std'] = _mean_group_std(shaped_scores)
  if greedy_scores:
    metrics['reward/greedy_mean'] = float(np.mean(greedy_scores))
  return metrics


def _mean_group_std(scores: Sequence[Sequence[float]]) -> float:
  return float(np.mean([np.std(group) for group in scores]))


def batch_metrics(batch: Batch, step: int) -> dict[str, float]:
  """Computes counts of tokens and the staleness of a batch.

  A row's staleness is step − the version of its oldest action token; rows from files
  have none. staleness/share is the share of rows older than this step's weights.

  Args:
    batch: The batch in numpy.
    step: The learner's step.

  Returns:
    Metrics by name.
  """
  is_row = batch.group_ids >= 0
  num_tokens = int((batch.segment_ids > 0).sum())
  num_actions = batch.action_mask.sum(axis=1)[is_row]
  metrics = {
    'tokens/total': float(num_tokens),
    'tokens/action': float(num_actions.sum()),
    'tokens/action_per_row': float(num_actions.mean()),
    'tokens/rows': float(is_row.sum()),
    'tokens/length': float(batch.tokens.shape[1]),
    'tokens/padding_share': 1.0 - num_tokens / batch.tokens.size,
  }
  sampled = batch.action_mask & (batch.weights_version >= 0)
  if sampled.any():
    oldest = np.where(sampled, batch.weights_version, step).min(axis=1)
    oldest = oldest[sampled.any(axis=1)]
    metrics['staleness/mean'] = float((step - oldest).mean())
    metrics['staleness/max'] = float((step - oldest).max())
    metrics['staleness/share'] = float((oldest < step).mean())
  return metrics


def memory_metrics(devices: Sequence[Any] = ()) -> dict[str, float]:
  """Measures the memory of this process and of devices.

  Args:
    devices: The devices.

  Returns:
    'memory/process_gb', and, of devices that measure it, the largest
    'memory/device_gb' and 'memory/device_peak_gb', in 10⁹ bytes.
  """
  import psutil  # here, so that the library needs it only to train

  metrics = {'memory/process_gb': psutil.Process().memory_info().rss / 1e9}
  stats = [usage for device in devices if (usage := device.memory_stats())]
  for name, key in (('device', 'bytes_in_use'), ('device_peak', 'peak_bytes_in_use')):
    if sizes := [usage[key] for usage in stats if key in usage]:
      metrics[f'memory/{name}_gb'] = max(sizes) / 1e9
  return metrics


def average_updates(updates: Sequence[Mapping[str, np.ndarray]]) -> dict[str, float]:
  """Averages metrics over the updates of a batch.

  The mismatch is that of the first update, when the policy has not yet changed. Means
  over the tokens of an update without tokens do not count.

  Args:
    updates: The metrics of each update.

  Returns:
    Metrics by name; a mean over tokens is absent if no update has any.
  """
  values_by_name: dict[str, list[float]] = {}
  for update in updates:
    for name, value in _defined(update).items():
      values_by_name.setdefault(name, []).append(float(value))
  return {
    name: values[0] if name.startswith('mismatch/') else float(np.mean(values))
    for name, values in values_by_name.items()
  }


def _defined(update: Mapping[str, np.ndarray]) -> dict[str, np.ndarray]:
  """Returns the metrics of an update that are not the mean of nothing."""
  defined = dict(update)
  if not defined.pop(TOKENS, 1):
    always = ('loss/', 'optimizer/')
    return {name: x for name, x in defined.items() if name.startswith(always)}
  if not defined.pop(SAMPLED_TOKENS, 1):
    sampled = ('mismatch/', 'correction/')
    return {name: x for name, x in defined.items() if not name.startswith(sampled)}
  return defined


class UpdateMonitor:
  """Checks the metrics of updates: values must be finite, and policies should agree.

  Args:
    mismatch_limit: The mean |Δlog-prob| between rollout and learner above which it
      warns, once until the policies agree again.
  """

  def __init__(self, mismatch_limit: float):
    self._mismatch_limit = mismatch_limit
    self._has_warned = False
    self._idle_steps = 0  # in a row

  def check(self, metrics: dict[str, float], step: int) -> None:
    """Checks the metrics of an update.

    Args:
      metrics: The metrics, which get 'mismatch/alarm' if anything was sampled.
      step: The learner's step.

    Raises:
      FloatingPointError: The loss or the norm of the gradient is not finite.
      NothingLearnedError: The settings leave no token to learn from, for several steps.
    """
    for name in ('loss/total', 'optimizer/grad_norm'):
      if not np.isfinite(metrics[name]):
        raise FloatingPointError(
          f'{name} is {metrics[name]} at step {step}, so the parameters are no '
          'longer usable. Resume from the last checkpoint, with a lower learning '
          'rate or max_grad_norm set'
        )
    self._check_gradient(metrics, step)
    difference = metrics.get('mismatch/logprob_difference')
    if difference is None:  # nothing was sampled
      return
    is_too_large = difference > self._mismatch_limit
    metrics['mismatch/alarm'] = float(is_too_large)
    if is_too_large and not self._has_warned:
      from jaxrl.training.diagnosis import RULES

      rule = RULES['engine and learner disagree']
      log.warning(
        'step %d: %s (%.3g on average, the limit is %.3g). %s (%s)',
        step,
        rule.sentence,
        difference,
        self._mismatch_limit,
        rule.advice,
        rule.page,
      )
    self._has_warned = is_too_large

  def _check_gradient(self, metrics: Mapping[str, float], step: int) -> None:
    """Says why the gradient is 0, at once; raises if no later step could change it."""
    from jaxrl.training.diagnosis import NO_GRADIENT, zero_gradient_cause

    if not metrics['optimizer/grad_norm'] <= NO_GRADIENT:
      self._idle_steps = 0
      return
    self._idle_steps += 1
    cause, is_final = zero_gradient_cause(metrics)
    if self._idle_steps == 1:
      log.warning('step %d learns nothing, its gradient is 0: %s', step, cause)
    if is_final and self._idle_steps >= MAX_IDLE_STEPS:
      raise NothingLearnedError(
        f'steps {step - MAX_IDLE_STEPS + 1} to {step} learn nothing, their gradient is '
        f'0: {cause}'
      )


class CompileCounter:
  """Context manager that counts the programs compiled while it is open, in all threads.

  Programs that are fetched from the cache on disk count too.

  Attributes:
    count: Programs compiled.
    seconds: Time spent compiling.
  """

  EVENT = '/jax/core/compile/backend_compile_duration'

  def __init__(self) -> None:
    self.count = 0
    self.seconds = 0.0
    self._lock = threading.Lock()

  def _on_event(self, event: str, duration_secs: float, **kwargs: object) -> None:
    del kwargs
    if event == self.EVENT:
      with self._lock:
        self.count += 1
        self.seconds += duration_secs

  def __enter__(self) -> 'CompileCounter':
    jax.monitoring.register_event_duration_secs_listener(self._on_event)
    return self

  def __exit__(self, *_: object) -> None:
    jax.monitoring.unregister_event_duration_listener(self._on_event)


def recompile_reason(shape: BatchShape, compiled: Collection[BatchShape]) -> str:
  """Explains why no compiled program fits a batch.

  Args:
    shape: The shape of the batch.
    compiled: The shapes that programs are compiled for.

  Returns:
    What `shape` has that none of the others has, for people.
  """
  if not compiled:
    return 'nothing was compiled before'
  reasons = []
  most_rows = max(other.rows for other in compiled)
  if shape.rows > most_rows:
    reasons.append(f'a batch of {shape.rows} rows, more than the usual {most_rows}')
  lengths = {other.length for other in compiled}
  if shape.length not in lengths:
    usual = ', '.join(str(length) for length in sorted(lengths))
    reasons.append(f'rows of {shape.length} tokens, where so far they had {usual}')
  if shape.segments not in {other.segments for other in compiled}:
    reasons.append(f'sequences of up to {shape.segments} segments')
  packs = [other.pack for other in compiled if other.pack is not None]
  if shape.pack is not None and packs:
    most = max(pack.max_micro_batches for pack in packs)
    if shape.pack.max_micro_batches > most:
      reasons.append(
        f'room for {shape.pack.max_micro_batches} micro-batches an update, more than '
        f'{most}'
      )
    if shape.pack.rows not in {pack.rows for pack in packs}:
      reasons.append(f'micro-batches of {shape.pack.rows} packed rows')
    if shape.pack.tree not in {pack.tree for pack in packs}:
      reasons.append(
        'rows that share tokens ' + ('in trees' if shape.pack.tree else 'without trees')
      )
  if not reasons and shape.micro_rows not in {other.micro_rows for other in compiled}:
    reasons.append(f'micro-batches of {shape.micro_rows} rows')
  return '; '.join(reasons) or 'another combination of rows, length and micro-batches'


def log_recompile(
  shape: BatchShape, compiled: Collection[BatchShape], *, is_warm: bool
) -> None:
  """Logs that programs are compiled for a shape.

  Args:
    shape: The shape of the batch.
    compiled: The shapes that programs are compiled for.
    is_warm: Whether warm-up is over: then this is a warning, with the reason.
  """
  size = f'{shape.rows} rows of {shape.length} tokens'
  if shape.pack is not None:
    size += f', packed in {shape.pack.rows} × {shape.pack.length} slots a micro-batch'
    if shape.num_parallel > 1:
      size += f', {shape.num_parallel} of them at once'
  else:
    size += f', {shape.micro_rows} a micro-batch'
  if not is_warm:
    log.info('compiling the train step for %s', size)
    return
  log.warning(
    'compiling the train step for %s, after warm-up: %s',
    size,
    recompile_reason(shape, compiled),
  )
