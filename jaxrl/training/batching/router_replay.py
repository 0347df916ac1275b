"""Router replay sends each token to the experts that the rollout engine chose for it.

A small difference between engine and learner, or a step of stale weights, can send a
token to another expert and change its log-probability by a lot. With the rollout's
experts the two differ as little as dense models do. The learner computes the experts'
weights itself, and its router learns through them. Paper:
https://arxiv.org/abs/2510.11370.
"""

from collections.abc import Sequence
from typing import Any

import numpy as np

from jaxrl.models.transformer_lm import TransformerLM
from jaxrl.types import Batch, Trajectory


def add_to_batch(model: TransformerLM, batch: Batch) -> Batch:
  """Adds `routed_experts` to the numpy batch of a model that replays them.

  Args:
    model: The model.
    batch: The batch. Its router chooses for rows that the policy did not sample.

  Returns:
    The batch, with `routed_experts` `[B, T, L, k]`.

  Raises:
    ValueError: Sampled rows lack the experts, or these are of another model.
  """
  config, routed = model.config, batch.routed_experts
  shape = (*batch.tokens.shape, config.num_layers, config.num_experts_per_token)
  if routed is None:
    routed = np.full(shape, -1, np.int16)
  if routed.shape != shape or routed.max(initial=-1) >= config.num_experts:
    raise ValueError(
      f'routed_experts {list(routed.shape)}, up to expert {routed.max()}, is not of '
      f'this model, which asks for {list(shape)} of {config.num_experts} experts'
    )
  is_sampled = (batch.action_mask & ~batch.expert_mask[:, None]).any(axis=1)
  is_missing = is_sampled & ~(routed >= 0).any(axis=(1, 2, 3))
  if is_missing.any():
    raise ValueError(
      f'{is_missing.sum()} sampled rows bring no routed_experts to replay: the engine '
      'that sampled them must keep these (router_replay)'
    )
  return batch.replace(routed_experts=routed)


def replay_metrics(model: TransformerLM, batch: Batch) -> dict[str, float]:
  """Returns metrics of the replayed experts.

  replay/share is the share of sampled tokens whose log-probability is computed with the
  rollout's experts for the token before. moe/max_load is the number of tokens of the
  most loaded expert over the mean of its layer, in the worst layer: 1 to E / k.

  Args:
    model: The model.
    batch: The numpy batch that `add_to_batch` returned.
  """
  is_known = (batch.routed_experts >= 0).all(axis=(2, 3))  # [B, T]
  sampled = (batch.action_mask & ~batch.expert_mask[:, None])[:, 1:]
  share = float(is_known[:, :-1][sampled].mean()) if sampled.any() else 0.0
  metrics = {'replay/share': share}
  if is_known.any():
    num_experts, chosen = model.config.num_experts, batch.routed_experts[is_known]
    layers = chosen.swapaxes(0, 1).reshape(chosen.shape[1], -1)  # [L, N · k]
    loads = [np.bincount(layer, minlength=num_experts).max() for layer in layers]
    metrics['moe/max_load'] = float(max(loads) * num_experts / layers.shape[1])
  return metrics


def collect_experts(
  rows: Sequence[Trajectory], recorded: Sequence[Any], is_token: np.ndarray
) -> np.ndarray:
  """Joins the experts that rows have recorded.

  Args:
    rows: The rows.
    recorded: For each row `[T, L, k]`, or None; at least one is not None.
    is_token: `[B, T]` bool, False at padding.

  Returns:
    `[B, T, L, k]` int16, −1 where unknown.

  Raises:
    ValueError: What a row has recorded is of another shape than its tokens.
  """
  first = next(experts for experts in recorded if experts is not None)
  layers_and_experts = np.asarray(first).shape[1:]
  routed = np.full((*is_token.shape, *layers_and_experts), -1, np.int16)
  for i, (row, experts) in enumerate(zip(rows, recorded, strict=True)):
    if experts is None:
      continue
    value = np.asarray(experts)
    expected_shape = (len(row.tokens), *layers_and_experts)
    if value.shape != expected_shape:
      raise ValueError(
        f'row {row.trajectory_id}: routed_experts in its extras has shape '
        f'{value.shape}, but its tokens and the first row ask for {expected_shape}'
      )
    routed[i, : len(value)] = value
  return routed
