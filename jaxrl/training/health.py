"""What each update is checked for: finite numbers, and policies that agree."""

import logging

import numpy as np

from jaxrl.types import Batch

log = logging.getLogger(__name__)


class Health:
  """Watches the metrics of updates.

  limit: mean |Δlog-prob| between rollout and learner from which on it warns, once until
  they agree again.
  """

  def __init__(self, limit: float):
    self._limit, self._alarmed = limit, False

  def check(self, metrics: dict[str, float], host: Batch, step: int) -> None:
    """Raises FloatingPointError for what is not finite; warns when policies differ.

    metrics: of the update at `step`, which learned from `host`; 'mismatch/alarm' is put
    there, and what compares policies is taken out where nothing was sampled.
    """
    for name in ('loss/total', 'optimizer/grad_norm'):
      if not np.isfinite(metrics[name]):
        raise FloatingPointError(
          f'{name} is {metrics[name]} at step {step}: the parameters are '
          'spoilt. Resume from the last checkpoint, with a lower learning rate or '
          'clip_norm set'
        )
    if host.expert_mask.sum() == (host.task_ids >= 0).sum():
      for name in [name for name in metrics if name.startswith('mismatch/')]:
        del metrics[name]
      return
    difference = metrics['mismatch/logprob_difference']
    alarm = difference > self._limit
    metrics['mismatch/alarm'] = float(alarm)
    if alarm and not self._alarmed:
      log.warning(
        'step %d: the rollout engine and the learner disagree on the log-probs of '
        'the sampled tokens by %.3g on average (rollout.mismatch_alarm=%.3g): '
        'docs/mismatch.md lists the causes and how to tell them apart',
        *(step, difference, self._limit),
      )
    self._alarmed = alarm
