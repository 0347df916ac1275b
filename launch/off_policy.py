"""What a run does about rollouts that other weights wrote than it learns with.

rollout.sync: when engines get new weights, see `jaxrl.rollout.sync`.
rollout.staleness: what becomes of what is too old, see `jaxrl.data.staleness`.
Where rollouts may be stale, or another program than the learner's samples them,
algorithms that can take one get a correction: truncated importance sampling.
"""

import dataclasses
import math

from jaxrl import signature
from jaxrl.algorithms import checks, compose
from jaxrl.config import Config
from jaxrl.data import samplers, staleness
from jaxrl.functional import corrections
from jaxrl.rollout import sync
from jaxrl.signature import ConfigError
from jaxrl.types import Algorithm


def most(config: Config) -> int | None:
  """The staleness past which no group is taken from a queue; None without such a rule.

  Without a rule of the user's it is what admission and publishing allow by themselves:
  ⌈async_ratio⌉ steps since a group was admitted, and the engines' lag at that time.
  """
  bound, ratio = staleness.parse(config.rollout.staleness), config.rollout.async_ratio
  if bound is not None:
    return bound.most if bound.action == 'drop' else None
  if config.data.source:
    return None
  lag = sync.parse(config.rollout.sync).lag(ratio)
  return None if lag is None else math.ceil(ratio) + lag


def check(config: Config, algorithm: Algorithm) -> None:
  """Raises ConfigError for a style or a bound that cannot be, alone or together."""
  style = sync.parse(config.rollout.sync)
  bound = staleness.parse(config.rollout.staleness)
  if algorithm.schema != 'rollout':
    for key, changed in (
      ('sync', style != sync.fixed()),
      ('staleness', bound is not None),
    ):
      if changed:
        raise ConfigError(
          f'--config.rollout.{key}={config.rollout[key]}: has no effect here: '
          f'{config.algorithm.name} learns from files, schema={algorithm.schema}, and '
          'plays nothing to learn from'
        )
    return
  if bound is None:
    if style.waits == 'never':
      raise ConfigError(
        f'--config.rollout.sync={config.rollout.sync}: nothing bounds how old the '
        "engines' weights may be: set --config.rollout.staleness='drop(max=2)', or "
        'mask, or recompute'
      )
    return
  where = f'--config.rollout.staleness={config.rollout.staleness}'
  if bound.action == 'drop' and not style.asked and style.interval - 1 > bound.most:
    raise ConfigError(
      f'{where}: with --config.rollout.sync={config.rollout.sync} tokens are up to '
      f'{style.interval - 1} steps old when they are written, so whole steps would be '
      'lost: raise max, or lower the interval'
    )
  if bound.action != 'recompute':
    return
  name = config.algorithm.name
  if not compose.uses_old(algorithm):
    raise ConfigError(
      f'{where}: the loss of {name} reads no old_logprobs, so there is nothing to '
      'recompute: take drop or mask'
    )
  if config.algorithm.behaviour == 'rollout':
    raise ConfigError(
      f'{where} has the learner score old_logprobs, and '
      '--config.algorithm.behaviour=rollout has it not: leave one out'
    )


def stale(config: Config, algorithm: Algorithm) -> bool:
  """Whether tokens may be older than the step that learns from them."""
  style = sync.parse(config.rollout.sync)
  ahead = config.rollout.async_ratio > 0 or style.lag(0) != 0
  return ahead or bool(config.data.source) or _reuses(algorithm)


def _reuses(algorithm: Algorithm) -> bool:
  return samplers.find(algorithm.sampler)[0].reuses


def foreign(config: Config) -> bool:
  """Whether the engine is another program than the learner's model."""
  return signature.parse_call(config.rollout.engine)[0] != 'jax'


def adapt(config: Config, algorithm: Algorithm) -> Algorithm:
  """The algorithm with what stale rollouts ask of it, where its user left that open."""
  if algorithm.schema != 'rollout':
    return algorithm
  changes = {}
  if _by_default(config, algorithm):
    changes = {'correction': corrections.tis, 'behaviour': 'decoupled'}
  bound = staleness.parse(config.rollout.staleness)
  if bound is not None and bound.action == 'recompute' and compose.uses_old(algorithm):
    changes['behaviour'] = 'decoupled'
  return dataclasses.replace(algorithm, **changes)


def _by_default(config: Config, algorithm: Algorithm) -> bool:
  return (
    algorithm.correction is None
    and config.algorithm.get('correction', '') == ''
    and config.algorithm.get('behaviour', '') == ''
    and checks.corrigible(algorithm)
    and (stale(config, algorithm) or foreign(config))
  )


def describe(config: Config, algorithm: Algorithm) -> str | None:
  """What is done about them, in a line for people; None where there is nothing."""
  if algorithm.schema != 'rollout' or not (stale(config, algorithm) or foreign(config)):
    return None
  bound, limit = config.rollout.staleness, most(config)
  age = f'at most {limit} steps old' if limit is not None else f'by {bound}'
  if config.data.source and not bound:
    age = 'of any age'
  if _reuses(algorithm) and not bound:
    age += ' when first learned from, then as old as the sampler keeps them'
  how = 'from the store' if config.data.source else f'sync {config.rollout.sync}'
  text = f'{age}, {how}, '
  if algorithm.correction is None:
    asked = config.algorithm.get('correction', '') == 'none'
    why = 'as asked' if asked else "set algorithm.correction='tis' for one"
    return f'{text}no correction ({why})'
  name = compose.function_of(algorithm.correction).__name__
  text += f'corrected by {name}'
  if 'old_logprobs' in compose.needs(algorithm):
    text += ', which takes a forward pass more a step'
  if config.algorithm.get('correction', '') == '':
    text += "; algorithm.correction='none' leaves it out"
  return text
