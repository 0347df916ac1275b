"""Router replay: the learner sends each token to the experts that the rollout took.

A small difference between engine and learner, or a step of stale weights, can send a
token elsewhere and change its log-prob by a lot; with the rollout's experts the two
differ as little as dense models do. The weights of these experts are the learner's own,
and its router learns through them. Paper: https://arxiv.org/abs/2510.11370.
"""

import numpy as np

from jaxrl.models.model import Model
from jaxrl.types import Batch


def filled(model: Model, batch: Batch) -> Batch:
  """The batch on the host with the column that `model` asks for, if it asks.

  Rows that the policy did not sample are left to the router. Raises ValueError for
  sampled rows without experts, and for those of another model.
  """
  if not getattr(model, 'router_replay', False):
    return batch
  config, routed = model.config, batch.routed_experts
  shape = (*batch.tokens.shape, config.num_layers, config.num_experts_per_token)
  if routed is None:
    routed = np.full(shape, -1, np.int16)
  if routed.shape != shape or routed.max(initial=-1) >= config.num_experts:
    raise ValueError(
      f'routed_experts {list(routed.shape)}, up to expert {routed.max()}, is not of '
      f'this model, which asks for {list(shape)} of {config.num_experts} experts'
    )
  played = (batch.action_mask & ~batch.expert_mask[:, None]).any(axis=1)
  lacking = played & ~(routed >= 0).any(axis=(1, 2, 3))
  if lacking.any():
    raise ValueError(
      f'{lacking.sum()} sampled rows bring no routed_experts to replay: the engine '
      'that sampled them must keep these (router_replay)'
    )
  return batch.replace(routed_experts=routed)


def metrics(model: Model, batch: Batch) -> dict[str, float]:
  """What is told of a batch that `filled` gave; nothing where nothing is replayed.

  replay/share: of the sampled tokens, those whose log-prob is computed with the
  experts that the rollout took for the token before. moe/max_load: tokens of the most
  loaded expert over the mean of its layer's experts, in the worst layer: 1 to E / k.
  """
  if not getattr(model, 'router_replay', False):
    return {}
  known = (batch.routed_experts >= 0).all(axis=(2, 3))  # [B, T]
  sampled = (batch.action_mask & ~batch.expert_mask[:, None])[:, 1:]
  found = {
    'replay/share': float(known[:, :-1][sampled].mean()) if sampled.any() else 0.0
  }
  if known.any():
    number, taken = model.config.num_experts, batch.routed_experts[known]  # [N, L, k]
    layers = taken.swapaxes(0, 1).reshape(taken.shape[1], -1)
    loads = [np.bincount(layer, minlength=number).max() for layer in layers]
    found['moe/max_load'] = float(max(loads) * number / layers.shape[1])
  return found
