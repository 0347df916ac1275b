"""Rematerialization policies: what the backward pass keeps of the forward pass.

`model.remat` names a policy, such as `names(save='attention')`. Within a layer these
activations have names: 'qkv' (queries, keys and values, rotated; in latent attention
queries and latents), 'attention' (its output, before the projection), 'residual' (the
stream between attention and MLP) and 'mlp' (the inner activations of a dense MLP). The
input of a layer is kept by every policy; everything else is computed again.
"""

import functools
from collections.abc import Callable
from typing import Any

import jax

from jaxrl.component_table import Component, ComponentTable
from jaxrl.options import unknown_name_error

NAMES = ('qkv', 'attention', 'residual', 'mlp')
HOST = {'offload_src': 'device', 'offload_dst': 'pinned_host'}
Policy = Callable[..., Any] | None
RematPolicy = Component  # a policy's name, or a call with its options
_POLICIES = jax.checkpoint_policies


def _none() -> Policy:
  """Keeps everything."""
  return None


def _auto() -> Policy:
  """Keeps everything unless a run finds that memory needs 'full'."""
  return None


def _full() -> Policy:
  """Keeps nothing but the input of each layer."""
  return _POLICIES.nothing_saveable


def _dots() -> Policy:
  """Keeps products with weights, but not those of attention, which have a batch."""
  return _POLICIES.dots_with_no_batch_dims_saveable


def _products() -> Policy:
  """Keeps products with weights and attention; what lies between is computed again.

  That includes the norms and rotations of queries and keys.
  """
  names = _POLICIES.save_only_these_names('attention', 'residual')
  return _POLICIES.save_from_both_policies(_dots(), names)


def _dots_batch() -> Policy:
  """Keeps all matrix products, attention's scores among them."""
  return _POLICIES.dots_saveable


def _names(*, save: str = 'attention', offload: str = '') -> Policy:
  """Keeps the activations that are named, on the device or in the host's memory.

  Args:
    save: Names of what is kept on the device, with commas between.
    offload: Names of what is kept in the memory of the host.
  """
  chosen = {}
  for option, text in (('save', save), ('offload', offload)):
    chosen[option] = [name.strip() for name in text.split(',') if name.strip()]
    for name in chosen[option]:
      if name not in NAMES:
        raise unknown_name_error(name, NAMES, 'activation', option)
  if twice := set(chosen['save']) & set(chosen['offload']):
    raise ValueError(f'{min(twice)} is both kept and offloaded')
  return _POLICIES.save_and_offload_only_these_names(
    names_which_can_be_saved=chosen['save'],
    names_which_can_be_offloaded=chosen['offload'],
    **HOST,
  )


REMAT_POLICIES = ComponentTable(
  'remat policy',
  'model.remat',
  {
    'auto': _auto,
    'none': _none,
    'full': _full,
    'dots': _dots,
    'products': _products,
    'dots_batch': _dots_batch,
    'names': _names,
  },
)


@functools.cache
def policy(call: RematPolicy) -> Policy:
  """Returns the policy that a call names, None for 'none'.

  Args:
    call: The call, or the name alone.

  Raises:
    ValueError: If there is no such policy or option.
  """
  return REMAT_POLICIES.build(call)


def may_keep(call: RematPolicy, name: str) -> bool:
  """Returns whether a policy may keep an activation because of its name.

  Args:
    call: As for `policy`. A user's own may keep any.
    name: One of `NAMES`.
  """
  known, function, options = REMAT_POLICIES.find(call)
  if function is not _names:
    return known not in REMAT_POLICIES
  kept = f'{options.get("save", "")},{options.get("offload", "")}'
  return name in kept.replace(' ', '').split(',')
