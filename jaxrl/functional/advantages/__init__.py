"""Advantages are components `fn(rewards, mask, group_ids, …, *, …) -> Advantages`.

Parameters before the `*` name the batch fields that an estimator reads; after it come
its options. Groups are identified by ids: they may differ in size and their rows may
come in any order. An episode counts once, however many rows it has. In the formulas R
is the total reward of an episode, μ and s are the mean and sample standard deviation of
R over the episodes of its group, and n is their number.

A module of this package is imported when one of its estimators is first used.
"""

import importlib
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
  from jaxrl.functional.advantages.group_baselines import (
    asymre,
    best_of_group,
    maxrl,
    opmd,
    optimal_token_baseline,
    rec,
    rloo,
  )
  from jaxrl.functional.advantages.group_relative import grpo
  from jaxrl.functional.advantages.process_supervision import process_grpo
  from jaxrl.functional.advantages.reward_normalisation import (
    gdpo,
    init_moments,
    normalise,
    update_moments,
  )
  from jaxrl.functional.advantages.role_relative import (
    hierarchical_grpo,
    init_baselines,
    rae,
  )
  from jaxrl.functional.advantages.token_level import (
    agentic_reinforce,
    clip_b,
    clip_v,
    gae,
    grpo_distill,
    jsd,
    on_policy_distill,
    reinforce,
    reinforce_plus_plus,
    remax,
  )
  from jaxrl.functional.advantages.turn_level import (
    cod,
    gigpo,
    step_reinforce,
    step_wise_grpo,
  )

__all__ = [
  'asymre',
  'best_of_group',
  'clip_b',
  'clip_v',
  'grpo',
  'maxrl',
  'opmd',
  'rec',
  'rloo',
  'optimal_token_baseline',
  'process_grpo',
  'gdpo',
  'init_moments',
  'normalise',
  'update_moments',
  'hierarchical_grpo',
  'init_baselines',
  'rae',
  'agentic_reinforce',
  'gae',
  'grpo_distill',
  'jsd',
  'on_policy_distill',
  'reinforce',
  'reinforce_plus_plus',
  'remax',
  'cod',
  'gigpo',
  'step_reinforce',
  'step_wise_grpo',
]

_NAMES_OF_MODULE = {
  'group_baselines': (
    'asymre',
    'best_of_group',
    'maxrl',
    'opmd',
    'optimal_token_baseline',
    'rec',
    'rloo',
  ),
  'group_relative': ('grpo',),
  'process_supervision': ('process_grpo',),
  'reward_normalisation': ('gdpo', 'init_moments', 'normalise', 'update_moments'),
  'role_relative': ('hierarchical_grpo', 'init_baselines', 'rae'),
  'token_level': (
    'agentic_reinforce',
    'clip_b',
    'clip_v',
    'gae',
    'grpo_distill',
    'jsd',
    'on_policy_distill',
    'reinforce',
    'reinforce_plus_plus',
    'remax',
  ),
  'turn_level': ('cod', 'gigpo', 'step_reinforce', 'step_wise_grpo'),
}
_MODULE_OF_NAME = {
  name: module for module, names in _NAMES_OF_MODULE.items() for name in names
}


def __getattr__(name: str) -> Any:
  """Imports the module that defines `name`, and returns what it defines."""
  if name not in _MODULE_OF_NAME:
    raise AttributeError(f'module {__name__!r} has no attribute {name!r}')
  module = importlib.import_module(f'{__name__}.{_MODULE_OF_NAME[name]}')
  return getattr(module, name)


def __dir__() -> list[str]:
  """Returns the public names, whether their modules are imported or not."""
  return __all__
