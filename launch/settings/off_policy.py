"""Decides how a run treats rollouts that older weights have generated.

`weight_sync.policy` says when engines get new weights, see
`jaxrl.rollout.weights.weight_sync`;
`rollout.staleness_policy` says what becomes of rollouts that are too old, see
`jaxrl.training.staleness`. Where rollouts may be stale, or another program than the
learner's model samples them, algorithms that can take a correction get one by default:
truncated importance sampling.
"""

import dataclasses
import math

from jaxrl.algorithms import consistency, requirements
from jaxrl.data import samplers
from jaxrl.functional import components, corrections
from jaxrl.rollout.weights.weight_sync import fixed
from jaxrl.types import Algorithm
from launch.settings.run_settings import RunSettings


def max_staleness(settings: RunSettings) -> int | None:
  """Returns the staleness past which no group is taken from a queue.

  Without a rule of the user's it is what admission and publishing allow by themselves:
  ⌈async_ratio⌉ steps since a group was admitted, and the engines' lag at that time.

  Returns:
    A number of steps; None where nothing is dropped for its age.
  """
  rollout = settings.rollout
  if rollout.staleness_limit is not None:
    limit = rollout.staleness_limit
    return limit.max_age if limit.action == 'drop' else None
  if settings.experience_store is not None:
    return None
  lag = settings.weight_sync.sync_policy.max_lag(rollout.async_ratio)
  return None if lag is None else math.ceil(rollout.async_ratio) + lag


def validate_off_policy(settings: RunSettings) -> None:
  """Checks the sync policy and the staleness limit, alone and together.

  Raises:
    ConfigError: If they cannot be, or have no effect.
  """
  sync, limit = settings.weight_sync.sync_policy, settings.rollout.staleness_limit
  sync_key, limit_key = 'weight_sync.policy', 'rollout.staleness_policy'
  name = settings.algorithm_name
  if not settings.plays:
    for key, changed in ((sync_key, sync != fixed()), (limit_key, limit is not None)):
      if changed:
        raise settings.no_effect(key, f'{name} learns from files and plays nothing')
    return
  if limit is None:
    if sync.wait_for == 'none':
      raise settings.refusal(
        sync_key,
        "the engines' weights may become arbitrarily old: set a limit, such as "
        "--config.rollout.staleness_policy='drop(max=2)', or mask, or recompute",
      )
    return
  age = sync.interval - 1
  if limit.action == 'drop' and not sync.rollout_driven and age > limit.max_age:
    raise settings.refusal(
      limit_key,
      f'with {settings.quote(sync_key)} tokens are already up to {age} steps old when '
      'they are sampled, so whole steps would be lost: raise max, or lower the '
      'interval',
    )
  if limit.action == 'recompute' and not requirements.has_ratio(settings.algorithm):
    raise settings.refusal(
      limit_key,
      f'the loss of {name} does not read old_logprobs, so there is nothing to '
      'recompute: use drop or mask',
    )


def may_be_stale(settings: RunSettings) -> bool:
  """Returns whether tokens may be older than the step that learns from them."""
  rollout = settings.rollout
  ahead = rollout.async_ratio > 0 or settings.weight_sync.sync_policy.max_lag(0) != 0
  stored = settings.experience_store is not None
  return ahead or stored or _reuses_groups(settings.algorithm)


def _reuses_groups(algorithm: Algorithm) -> bool:
  return samplers.find_sampler(algorithm.sampler)[0].reuses


def _off_policy(settings: RunSettings) -> bool:
  return may_be_stale(settings) or settings.engine.traits.external


def apply_defaults(settings: RunSettings) -> Algorithm:
  """Returns the algorithm with what stale rollouts need, where its user left that open.

  Args:
    settings: Settings of the run, with the algorithm as its own options say.
  """
  algorithm = settings.algorithm
  if not settings.plays:
    return algorithm
  changes = {}
  is_open = settings.algorithm_options.get('correction', '') == ''
  may_correct = is_open and consistency.supports_correction(algorithm)
  if algorithm.correction is None and may_correct and _off_policy(settings):
    changes = {'correction': corrections.tis, 'old_logprobs_source': 'decoupled'}
  limit = settings.rollout.staleness_limit
  recomputes = limit is not None and limit.action == 'recompute'
  if recomputes and requirements.has_ratio(algorithm):
    changes['old_logprobs_source'] = 'decoupled'
  return dataclasses.replace(algorithm, **changes)


def describe(settings: RunSettings) -> str | None:
  """Says in a line what is done about stale rollouts; None where there are none."""
  if not settings.plays or not _off_policy(settings):
    return None
  algorithm = settings.algorithm
  rule, limit = settings.text('rollout.staleness_policy'), max_staleness(settings)
  stored = settings.experience_store is not None
  age = f'at most {limit} steps old' if limit is not None else f'by {rule}'
  if stored and not rule:
    age = 'of any age'
  if _reuses_groups(algorithm) and not rule:
    age += ' when first learned from, then as old as the sampler keeps them'
  how = 'from the store' if stored else f'sync {settings.text("weight_sync.policy")}'
  line = f'{age}, {how}, '
  correction = settings.algorithm_options.get('correction', '')
  if algorithm.correction is None:
    why = (
      'as asked' if correction == 'none' else "set algorithm.correction='tis' for one"
    )
    return f'{line}no correction ({why})'
  name = components.function_of(algorithm.correction).__name__
  line += f'corrected by {name}'
  if 'old_logprobs' in requirements.needs(algorithm):
    line += ', which takes a forward pass more a step'
  if correction == '':
    line += "; algorithm.correction='none' leaves it out"
  return line
