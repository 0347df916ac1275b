"""The language model as a set of pure functions of its parameters."""

import dataclasses
import functools
from collections.abc import Callable

import jax
import jax.numpy as jnp

from jaxrl.models import cache as caches
from jaxrl.models import exact as exactly
from jaxrl.models import rectangle as rectangles
from jaxrl.models import rope, transformer
from jaxrl.models.core import Core
from jaxrl.models.exact import Exact
from jaxrl.models.rectangle import Rectangle
from jaxrl.types import Params, PolicyOutputs
from kernels.attention import attention
from kernels.token_logprobs import token_logprobs


@dataclasses.dataclass(frozen=True)
class Model(Core):
  """A decoder-only transformer. Hashable and static; parameters are nested dicts."""

  def hidden(
    self,
    params: Params,
    tokens: jax.Array,
    segment_ids: jax.Array,
    *,
    prefix_ids: jax.Array | None = None,
    positions: jax.Array | None = None,
    routed_experts: jax.Array | None = None,
  ) -> jax.Array:
    """tokens, segment_ids `[B, T]` int32 → final normed states `[B, T, D]`.

    A token sees those before it in its own segment, and those of segment prefix_ids
    `[B, T]` of its row, 0: none. positions: `[B, T]`; default, counted from each
    segment's start. routed_experts: `[B, T, L, k]` int, those that a token takes in a
    layer, of its router's own choice where −1.
    """
    given = prefix_ids, positions, routed_experts
    return self._forward(params, tokens, segment_ids, *given, keep_cache=False)[0]

  def _forward(
    self,
    params: Params,
    tokens: jax.Array,
    segment_ids: jax.Array,
    prefix_ids: jax.Array | None = None,
    positions: jax.Array | None = None,
    routed_experts: jax.Array | None = None,
    *,
    keep_cache: bool,
    across: bool = False,
    rectangle: Rectangle | None = None,
  ) -> tuple[jax.Array, caches.Kept | None]:
    """across: rows are cut as `context` does it. rectangle: where they attend."""
    if self.exact is not None and prefix_ids is not None:
      raise ValueError('exact mode takes a sequence a row: give it no prefix_ids')
    if across and rectangle is not None:
      raise ValueError('rows that are cut attend within themselves: give no rectangle')
    ends = transformer.ends(self.config, params)
    x = ends.embedding.table[...][tokens].astype(self.dtype)
    x = self.constrain(x, 'batch', 'length', None)
    if positions is None:
      positions = transformer.segment_positions(segment_ids)
    cos, sin = rope.rotation(self.config, positions)

    def attend(q, k, v):
      q = self.constrain(q, 'batch', 'length', 'heads', None)
      k = self.constrain(k, 'batch', 'length', 'kv_heads', None)
      v = self.constrain(v, 'batch', 'length', 'kv_heads', None)
      kept = None
      if keep_cache:
        kept = {'k': k.transpose(0, 2, 3, 1), 'v': v.swapaxes(1, 2)}
      run = functools.partial(attention, **self._kernels())
      if rectangle is not None:
        return rectangles.attend(run, q, k, v, rectangle), kept
      if across:
        run = self.context.attention
      return run(q, k, v, segment_ids, prefix_ids=prefix_ids), kept

    def body(block, x, routed):
      feed = functools.partial(self._feed, routed=routed)
      x, (kept, chosen) = block(x, cos, sin, attend, feed)
      if kept is not None and self.router_replay:
        kept['e'] = chosen[:, None].astype(caches.EXPERT)
      return self.constrain(x, 'batch', 'length', None), kept

    if routed_experts is not None:
      routed_experts = jnp.moveaxis(routed_experts, 2, 0)
    x, kept = transformer.run_layers(
      self.config, params, x, body, self.remat, self.at_once, routed_experts
    )
    return ends.norm(x), kept

  def _exact_forward(
    self, params: Params, tokens: jax.Array, keep_cache: bool
  ) -> tuple[jax.Array, caches.Kept | None]:
    """tokens `[B, T]`, a sequence a row → the last layer's output `[B · T, D]`."""
    batch, length = tokens.shape
    positions = jnp.broadcast_to(jnp.arange(length, dtype=jnp.int32), tokens.shape)
    x, cos, sin = self._enter(params, tokens.reshape(-1), positions.reshape(-1))

    def attend(q, k, v):
      q, k, v = (y.reshape(batch, length, *y.shape[1:]) for y in (q, k, v))
      kept = {'k': k.transpose(0, 2, 3, 1), 'v': v.swapaxes(1, 2)}
      chunks = exactly.cut(kept['k'], 3), exactly.cut(kept['v'], 2)
      out = exactly.attend(q, *chunks, positions, jnp.int32(length))
      out = out.reshape(-1, *q.shape[2:]).astype(q.dtype)
      return out, kept if keep_cache else None

    def body(block, x, _):
      x, (kept, _) = self._layer(block, x, cos, sin, attend)
      return x, kept

    return transformer.run_layers(self.config, params, x, body, unroll=self.at_once)

  def _exact_logprobs(
    self,
    exact: Exact,
    params: Params,
    tokens: jax.Array,
    temperature: jax.Array | float,
  ) -> jax.Array:
    """tokens `[B, T]` → log-probs `[B, T − 1]` of those from the second on."""

    def score(params, tokens, temperature):
      x, _ = self._exact_forward(params, tokens, keep_cache=False)
      targets = jnp.roll(tokens, -1, axis=1)

      def some(x, targets, temperature):  # the logits of all tokens would be large
        return exact.logprobs(self._last(params, x), targets, temperature)

      found = exact.tokenwise(some, x, targets.reshape(-1), temperature.reshape(-1))
      return found.reshape(tokens.shape)[:, :-1]

    temperature = jnp.broadcast_to(jnp.float32(temperature), tokens.shape)
    params, temperature = jax.lax.stop_gradient((params, temperature))
    return exact.per_device(score, params, tokens, temperature)

  def _cut(self, length: int) -> Callable[[jax.Array], jax.Array]:
    """Cuts arrays `[B, T, …]` as `context` does, each piece to its devices."""

    def cut(x):
      x = self.context.cut(x, length)
      return self.constrain(x, 'batch', *(None,) * (x.ndim - 1))

    return cut

  def policy_outputs(
    self,
    params: Params,
    tokens: jax.Array,
    segment_ids: jax.Array,
    *,
    temperature: jax.Array | float = 1.0,
    entropy: bool = False,
    nec: bool = False,
    topk_ids: jax.Array | None = None,
    top_k: int = 0,
    prefix_ids: jax.Array | None = None,
    positions: jax.Array | None = None,
    routed_experts: jax.Array | None = None,
    rectangle: Rectangle | None = None,
  ) -> PolicyOutputs:
    """What the policy says of tokens `[B, T]` int32 with segment_ids `[B, T]`.

    Column t speaks of token t, given those before it: here, and only here, states
    shift by one. 0 at the first token of a segment and at padding (segment 0).
    temperature divides the logits of log-probs; entropy, nec and values ignore it.
    topk_ids: `[B, T, K]` int32, at t tokens that might stand in the place of token t,
    to be scored too; or top_k: the K likeliest, in falling order. prefix_ids, positions
    and routed_experts are those of `hidden`. rectangle: where the rows attend.
    """
    if positions is None:
      positions = transformer.segment_positions(segment_ids)
    inputs = tokens, segment_ids, prefix_ids, positions, routed_experts
    chosen = tokens[:, 1:], None if topk_ids is None else topk_ids[:, 1:]
    options = {'keep_cache': False, 'rectangle': rectangle}
    if self.context is None:
      states = self._forward(params, *inputs, **options)[0][:, :-1]
    else:
      inputs, chosen = jax.tree.map(self._cut(tokens.shape[1]), (inputs, chosen))
      states = self._forward(params, *inputs, across=True, **options)[0]
    scores = token_logprobs(
      states,
      self._head(params),
      chosen[0],
      temperature=temperature,
      entropy=entropy,
      nec=nec,
      topk_ids=chosen[1],
      top_k=top_k,
      kernels=self.kernels,
      platform=self.platform,
      shards=getattr(self.constrain, 'shards', None),
    )
    values = None
    if self.config.value_head:
      values = transformer.ends(self.config, params).value_head(states)
    if self.context is not None:
      join = lambda x: self.context.join(x, tokens.shape[1])[:, :-1]  # noqa: E731
      scores, values = jax.tree.map(join, (scores, values))
    if self.exact is not None:
      exact = self._exact_logprobs(self.exact, params, tokens, temperature)
      scores = scores._replace(logprobs=exactly.with_slope(exact, scores.logprobs))
    shift = functools.partial(_shifted, segment_ids=segment_ids)
    scores, values = jax.tree.map(shift, (scores._asdict(), values))
    return PolicyOutputs(**scores, values=values)

  def score(self, params: Params, tokens: jax.Array, lengths: jax.Array) -> jax.Array:
    """What the value head says of whole sequences: `[B]` float32.

    tokens: `[B, T]` int32, left-aligned; lengths: `[B]` int32 (≥ 1). It is read after
    each row's last token, as a reward model's is. A row depends on no other row.
    """
    time = jnp.arange(tokens.shape[1])
    segment_ids = (time < lengths[:, None]).astype(jnp.int32)
    hidden = self.hidden(params, tokens, segment_ids)
    last = jnp.take_along_axis(hidden, (lengths - 1)[:, None, None], axis=1)[:, 0]
    return transformer.ends(self.config, params).value_head(last)

  def prefill(
    self, params: Params, tokens: jax.Array, lengths: jax.Array
  ) -> tuple[jax.Array, caches.Kept]:
    """Runs prompts, left-aligned in tokens `[P, Tp]`, lengths `[P]` int32 (≥ 1).

    Returns the logits `[P, V]` float32 after each prompt's last token, and the rows'
    keys and values for `insert`. A row's result depends on no other row.
    """
    time = jnp.arange(tokens.shape[1])
    segment_ids = (time < lengths[:, None]).astype(jnp.int32)
    if self.exact is None:
      hidden, kept = self._forward(params, tokens, segment_ids, keep_cache=True)
    else:
      hidden, kept = self._exact_forward(params, tokens, keep_cache=True)
      hidden = hidden.reshape(*tokens.shape, -1)
    assert kept is not None  # it was asked for
    last = jnp.take_along_axis(hidden, (lengths - 1)[:, None, None], axis=1)[:, 0]
    if self.exact is None:
      return self.logits(params, last), kept
    return self._last(params, last), kept


def _shifted(x: jax.Array, *, segment_ids: jax.Array) -> jax.Array:
  """What was said of the next token, `[B, T − 1, …]`, where that token is: `[B, T, …]`.

  0 at the first token of a segment and at padding.
  """
  same = (segment_ids[:, 1:] == segment_ids[:, :-1]) & (segment_ids[:, 1:] != 0)
  there = same.reshape(same.shape + (1,) * (x.ndim - 2))
  x = jnp.where(there, x, jnp.zeros((), x.dtype))
  return jnp.pad(x, ((0, 0), (1, 0), *((0, 0),) * (x.ndim - 2)))
