"""A model that compiles at once and is told of by every token that it may see."""

import dataclasses

import jax
import jax.numpy as jnp

from jaxrl.models.layer_stack import segment_positions
from jaxrl.types import PolicyOutputs
from tests.training import toy


@dataclasses.dataclass(frozen=True)
class Bag(toy.Bigram):
  """The next token by the last one, its position and the mean of those before it."""

  def policy_outputs(
    self,
    params,
    tokens,
    segment_ids,
    *,
    prefix_ids=None,
    positions=None,
    tree=None,
    attend_with=None,
    **options,
  ):
    del attend_with  # another way to attend, to the same tokens
    table = params['bigram']['table']
    if positions is None:
      positions = segment_positions(segment_ids)
    if prefix_ids is None:
      prefix_ids = jnp.zeros_like(segment_ids)
    mine = segment_ids[:, :, None] == segment_ids[:, None]
    before = (prefix_ids[:, :, None] == segment_ids[:, None]) & (prefix_ids > 0)[
      ..., None
    ]
    time = jnp.arange(tokens.shape[1])
    seen = mine | before if tree is None else time[:, None] < tree.ends[:, None]
    seen &= time[:, None] >= time
    seen = seen / jnp.maximum(seen.sum(-1, keepdims=True), 1)
    place = jnp.cos(positions[..., None] * jnp.arange(1.0, 65.0))
    logits = table[tokens] + place + 3 * seen @ table[tokens]
    if tree is None:
      return self._score(params, tokens, segment_ids, logits[:, :-1], **options)
    # A row for the token before and one for its successor, side by side.
    rows, length = tokens.shape
    before = jnp.take_along_axis(tokens, jnp.maximum(tree.previous, 0), 1)
    pairs = jnp.stack([before, tokens], -1).reshape(-1, 2)
    ids = jnp.repeat(tree.previous.reshape(-1, 1) >= 0, 2, axis=1)
    logits = jnp.take_along_axis(logits, jnp.maximum(tree.previous, 0)[..., None], 1)
    if (topk := options.pop('topk_ids', None)) is not None:
      topk = topk.reshape(-1, 1, topk.shape[-1])
      options['topk_ids'] = jnp.concatenate([topk, topk], axis=1)
    logits = logits.reshape(-1, 1, logits.shape[-1])
    out = self._score(params, pairs, ids.astype(int), logits, **options)
    return jax.tree.map(lambda x: x[:, 1].reshape(rows, length, *x.shape[2:]), out)

  def _score(
    self,
    params,
    tokens,
    segment_ids,
    logits,
    *,
    temperature=1.0,
    entropy=False,
    nec=False,
    topk_ids=None,
  ):
    there = (segment_ids[:, 1:] == segment_ids[:, :-1]) & (segment_ids[:, 1:] > 0)
    p, full = jax.nn.log_softmax(logits / temperature), jax.nn.log_softmax(logits)
    h = -(jnp.exp(full) * full).sum(-1)

    def shift(x):
      x = jnp.where(there.reshape(there.shape + (1,) * (x.ndim - 2)), x, 0)
      return jnp.pad(x, ((0, 0), (1, 0)) + ((0, 0),) * (x.ndim - 2))

    head = params['value_head']['kernel'] if self.config.value_head else None
    topk = None
    if topk_ids is not None:
      topk = shift(jnp.take_along_axis(p, topk_ids[:, 1:], axis=-1))
    return PolicyOutputs(
      shift(jnp.take_along_axis(p, tokens[:, 1:, None], axis=-1)[..., 0]),
      shift(h) if entropy else None,
      None if head is None else shift(logits @ head),
      shift((jnp.exp(2 * full) * (h[..., None] + full)).sum(-1)) if nec else None,
      None,
      topk,
    )
