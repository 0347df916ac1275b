"""Policy losses are components `fn(logprobs, old_logprobs, advantages, mask, *, …)`.

Each returns `(loss [B, T], metrics)`; losses never reduce. Parameters before the `*`
name the batch fields that a loss reads; after it come its options. In the formulas p is
the policy's log-prob, o the old (behaviour) policy's, r = e^{p−o}, A the advantage, and
sg stops gradients. Exponents are clipped to ±20.

A module of this package is imported when one of its losses is first used.
"""

import importlib
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
  from jaxrl.functional.losses.clipped import ppo_clip, sapo, value_loss
  from jaxrl.functional.losses.covariance import clip_cov, kl_cov, token_covariance
  from jaxrl.functional.losses.distillation import distill, self_distill
  from jaxrl.functional.losses.expert_mixture import chord_mu, mix, mix_chord
  from jaxrl.functional.losses.importance_weighted import (
    cispo,
    importance_sampling,
    kimi,
    m2po,
    rec,
    second_moment_keep,
    sppo,
    tis,
    topr,
  )
  from jaxrl.functional.losses.likelihood import opmd, sft, sft_is, sft_phi, vanilla
  from jaxrl.functional.losses.preference import check_pairs, dpo, hinge, ipo
  from jaxrl.functional.losses.proximal import a3po, proximal_logprobs
  from jaxrl.functional.losses.sequence_weighted import gmpo, gspo, vespo
  from jaxrl.functional.losses.trust_region import (
    dppo_kl,
    dppo_tv,
    dro,
    probability_band,
    stable_reinforce,
  )

__all__ = [
  'cispo',
  'gspo',
  'ppo_clip',
  'sapo',
  'value_loss',
  'clip_cov',
  'kl_cov',
  'token_covariance',
  'distill',
  'self_distill',
  'chord_mu',
  'mix',
  'mix_chord',
  'importance_sampling',
  'kimi',
  'm2po',
  'rec',
  'second_moment_keep',
  'sppo',
  'tis',
  'topr',
  'opmd',
  'sft',
  'sft_is',
  'sft_phi',
  'vanilla',
  'check_pairs',
  'dpo',
  'hinge',
  'ipo',
  'a3po',
  'proximal_logprobs',
  'gmpo',
  'vespo',
  'dppo_kl',
  'dppo_tv',
  'dro',
  'probability_band',
  'stable_reinforce',
]

_NAMES_OF_MODULE = {
  'clipped': ('ppo_clip', 'sapo', 'value_loss'),
  'covariance': ('clip_cov', 'kl_cov', 'token_covariance'),
  'distillation': ('distill', 'self_distill'),
  'expert_mixture': ('chord_mu', 'mix', 'mix_chord'),
  'importance_weighted': (
    'cispo',
    'importance_sampling',
    'kimi',
    'm2po',
    'rec',
    'second_moment_keep',
    'sppo',
    'tis',
    'topr',
  ),
  'likelihood': ('opmd', 'sft', 'sft_is', 'sft_phi', 'vanilla'),
  'preference': ('check_pairs', 'dpo', 'hinge', 'ipo'),
  'proximal': ('a3po', 'proximal_logprobs'),
  'sequence_weighted': ('gmpo', 'gspo', 'vespo'),
  'trust_region': (
    'dppo_kl',
    'dppo_tv',
    'dro',
    'probability_band',
    'stable_reinforce',
  ),
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
