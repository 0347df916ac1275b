"""The losses that the Tinker API names, on log-probs of rows that differ in their loss.

Each is the sum over a datum's tokens of a function of `jaxrl.functional`, times the
datum's `weights` if it has any. The thresholds of a clip bound the ratio itself, so
0.8 and 1.2 are ε = 0.2.
"""

import dataclasses
import math
from collections.abc import Mapping

import jax
import jax.numpy as jnp

from jaxrl.functional import losses
from jaxrl.types import AnyArray, Array

CROSS_ENTROPY = 'cross_entropy'
CUSTOM = 'custom'
_CLIP = {'clip_low_threshold': 0.8, 'clip_high_threshold': 1.2}
# Loss → its options with their defaults. Clips may also be given for each token.
LOSSES: dict[str, dict[str, float]] = {
  CROSS_ENTROPY: {},
  'importance_sampling': {},
  'ppo': _CLIP,
  'cispo': _CLIP,
  'dro': {'beta': 0.05},
  # The paper's, arXiv 2507.18071.
  'gspo': {'clip_low_threshold': 1 - 3e-4, 'clip_high_threshold': 1 + 4e-4},
  # R1-Reward's, arXiv 2505.02835, if the server's options say so.
  'stable_reinforce': _CLIP,
}
CODES = {name: code for code, name in enumerate(LOSSES)}
R1_REWARD = 'r1_reward'
NO_STABLE_REINFORCE = (
  "the API's stable_reinforce has not been published, and is not R1-Reward's of the "
  f'same name. With stable_reinforce={R1_REWARD!r} the server computes the latter; '
  'importance_sampling, cispo and gspo need no option'
)
RL_INPUTS = 'target_tokens', 'logprobs', 'advantages'
PER_TOKEN = 'weights', 'logprobs', 'advantages', 'clip_low_threshold'
PER_TOKEN = (*PER_TOKEN, 'clip_high_threshold', 'sequence_ratio_mask')


@jax.tree_util.register_dataclass
@dataclasses.dataclass
class LossRows:
  """What the losses of G rows read besides log-probs, padded to T tokens.

  Attributes:
    codes: `[G]` int32, from CODES.
    mask: `[G, T]` bool, True at the datum's tokens.
    weights: `[G, T, K]` float32.
    old_logprobs: `[G, T]` float32, of the policy that sampled.
    advantages: `[G, T]` float32.
    ratio_mask: `[G, T]` bool, the tokens over which gspo takes its mean.
    clip_low: `[G, T]` float32, the lowest ratio.
    clip_high: `[G, T]` float32, the highest ratio.
    beta: `[G]` float32.
  """

  codes: AnyArray
  mask: AnyArray
  weights: AnyArray
  old_logprobs: AnyArray
  advantages: AnyArray
  ratio_mask: AnyArray
  clip_low: AnyArray
  clip_high: AnyArray
  beta: AnyArray


def row_losses(logprobs: Array, rows: LossRows) -> Array:
  """Computes each row's loss, summed over its tokens.

  Args:
    logprobs: `[G, T, K]` float32, of the K targets of each position; all losses but
      cross-entropy read the first.
    rows: What the losses read.

  Returns:
    `[G]` float32.
  """
  first = logprobs[..., 0]
  inputs = first, rows.old_logprobs, rows.advantages
  clip = {'clip_low': 1 - rows.clip_low, 'clip_high': rows.clip_high - 1}
  sequence_clip = {**clip, 'level': 'sequence', 'gradient': 'token'}
  ratio_mask = rows.ratio_mask & rows.mask
  token_losses = {
    'importance_sampling': losses.importance_sampling(*inputs, rows.mask)[0],
    'ppo': losses.ppo_clip(*inputs, rows.mask, **clip, dual_clip=None)[0],
    'cispo': losses.cispo(*inputs, rows.mask, **clip)[0],
    'dro': losses.kimi(*inputs, rows.mask, tau=rows.beta[:, None])[0],
    'gspo': losses.gspo(*inputs, ratio_mask, **sequence_clip)[0],
    'stable_reinforce': losses.stable_reinforce(*inputs, rows.mask, **clip)[0],
  }
  # Padding may hold anything, so it is replaced, not multiplied by 0.
  nll = jnp.where(rows.mask[..., None], -logprobs * rows.weights, 0)
  total = jnp.sum(nll, axis=(1, 2))
  for name, loss in token_losses.items():
    weighted = jnp.where(rows.mask, loss * rows.weights[..., 0], 0)
    total = jnp.where(rows.codes == CODES[name], jnp.sum(weighted, axis=1), total)
  return total


def check_loss(
  name: str, config: Mapping[str, float | str], stable_reinforce: str = ''
) -> dict[str, float]:
  """Returns the options of a loss, with defaults filled in.

  Args:
    name: Its name.
    config: What the client sets.
    stable_reinforce: R1_REWARD, if that is what the loss of this name computes.

  Raises:
    ValueError: If there is no such loss, or an option is wrong.
  """
  if name == 'stable_reinforce' and stable_reinforce != R1_REWARD:
    raise ValueError(f'loss_fn {name!r} is refused: {NO_STABLE_REINFORCE}')
  if name not in LOSSES:
    raise ValueError(f'no loss_fn {name!r}; there are {", ".join(LOSSES)}')
  options = dict(LOSSES[name])
  for key, value in config.items():
    if key not in options:
      known = ', '.join(options) or 'none'
      raise ValueError(f'{name} has no option {key!r}; it has {known}')
    if isinstance(value, str) or not math.isfinite(value):
      raise ValueError(f'{name}: {key}={value!r} must be a finite number')
    options[key] = float(value)
  if options.get('clip_low_threshold', 0) > options.get('clip_high_threshold', 1e30):
    raise ValueError(f'{name}: clip_low_threshold is above clip_high_threshold')
  if options.get('beta', 0) < 0:
    raise ValueError(f'{name}: beta={options["beta"]:g} must be 0 or more')
  return options
