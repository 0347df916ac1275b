"""The language model as a set of pure functions of its parameters."""

import dataclasses
import functools
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp

from jaxrl.models import cache as caches
from jaxrl.models import exact as exactly
from jaxrl.models import layers, moe, rope, transformer
from jaxrl.models.cache import Cache
from jaxrl.models.config import ModelConfig
from jaxrl.models.exact import Exact
from jaxrl.types import Params, PolicyOutputs
from kernels.attention import attention, decode_attention
from kernels.dispatch import check_asked
from kernels.token_logprobs import token_logprobs


def unconstrained(x: jax.Array, *names: str | None) -> jax.Array:
  """Leaves the layout of an activation to the compiler."""
  del names
  return x


@dataclasses.dataclass(frozen=True)
class Model:
  """A decoder-only transformer. Hashable and static; parameters are nested dicts.

  dtype: of activations and matrix products; parameters are cast at use.
  remat: 'none', 'full' (each layer recomputed in the backward pass) or 'dots' (matrix
  products kept). unroll: layers a step of the scan; more run a little faster and
  compile slower. constrain: `(x, *axis names) -> x`, places activations on a mesh.
  mix: `(way, x, chosen, weights, *kernels) -> y`, takes tokens to their experts there.
  exact: the mode in which `decode`, `prefill` and `policy_outputs` give a token's
  log-prob the same bits; None is the fast mode. kernels: 'auto', the best there is for
  the platform, or 'reference', plain jnp. platform: what it is compiled for ('cpu',
  'gpu', 'tpu'); None is what this process runs on. context: cuts the rows that
  `policy_outputs` gets over devices, by `cut`, `join` and `attention`.
  """

  config: ModelConfig
  dtype: str = 'float32'
  remat: str = 'none'
  unroll: int = 1
  constrain: Callable[..., jax.Array] = unconstrained
  mix: Callable[..., jax.Array] = moe.local
  exact: Exact | None = None
  kernels: str = 'auto'
  platform: str | None = None
  context: Any = None

  def __post_init__(self) -> None:
    check_asked(self.kernels)
    if self.exact is not None and self.dtype != 'float32':
      raise ValueError(f"exact mode is of dtype='float32', not {self.dtype!r}")
    if self.remat not in transformer.REMAT:
      names = ', '.join(transformer.REMAT)
      raise ValueError(f'remat={self.remat!r} is not one of {names}')

  def init(self, key: jax.Array) -> Params:
    """Random float32 parameters; every layer's are stacked on axis 0 of 'layers'."""
    return transformer.init(self.config, key)

  def logical_axes(self, params: Params | None = None) -> Params:
    """The tree of `params`, each array replaced by a tuple of its axes' names.

    Names: layers, embed, embedding, vocab, heads, kv_heads, mlp; None is never
    sharded.
    """
    del params
    return transformer.logical_axes(self.config)

  def hidden(
    self,
    params: Params,
    tokens: jax.Array,
    segment_ids: jax.Array,
    *,
    prefix_ids: jax.Array | None = None,
    positions: jax.Array | None = None,
  ) -> jax.Array:
    """tokens, segment_ids `[B, T]` int32 → final normed states `[B, T, D]`.

    A token sees those before it in its own segment, and those of segment prefix_ids
    `[B, T]` of its row, 0: none. positions: `[B, T]`; default, counted from each
    segment's start.
    """
    forward = functools.partial(self._forward, keep_cache=False)
    return forward(params, tokens, segment_ids, prefix_ids, positions)[0]

  def _forward(
    self,
    params: Params,
    tokens: jax.Array,
    segment_ids: jax.Array,
    prefix_ids: jax.Array | None = None,
    positions: jax.Array | None = None,
    *,
    keep_cache: bool,
    across: bool = False,
  ) -> tuple[jax.Array, caches.Kept | None]:
    """across: rows are cut as `context` does it."""
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
      run = self.context.attention if across else attention
      return run(q, k, v, segment_ids, prefix_ids=prefix_ids), kept

    def body(block, x):
      x, (kept, _) = block(x, cos, sin, attend, self._feed)
      return self.constrain(x, 'batch', 'length', None), kept

    x, kept = transformer.run_layers(
      self.config, params, x, body, self.remat, self.unroll
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

    def body(block, x):
      return self._layer(block, x, cos, sin, attend)

    return transformer.run_layers(self.config, params, x, body, unroll=self.unroll)

  def _tokenwise(self, function: Callable[..., Any], *arrays: jax.Array) -> Any:
    """function(*arrays), arrays `[N, …]`, in the mode of this model."""
    if self.exact is None:
      return function(*arrays)
    return self.exact.tokenwise(function, *arrays)

  def _enter(
    self, params: Params, tokens: jax.Array, positions: jax.Array
  ) -> tuple[jax.Array, jax.Array, jax.Array]:
    """Tokens `[N]` → states `[N, D]`, and the cosines and sines of their positions."""
    table = params['embedding']['table']

    def enter(tokens, positions):
      x = table[tokens].astype(self.dtype)
      return x, *rope.rotation(self.config, positions)

    return self._tokenwise(enter, tokens, positions)

  def _layer(
    self,
    block: layers.Block,
    x: jax.Array,
    cos: jax.Array,
    sin: jax.Array,
    attend: Callable[..., tuple[jax.Array, Any]],
  ) -> tuple[jax.Array, Any]:
    """One layer for states `[N, D]`; `attend` as in `Block`."""
    q, k, v = self._tokenwise(block.project, x, cos, sin)
    out, aux = attend(q, k, v)
    finish = functools.partial(block.finish, feed=self._feed)
    return self._tokenwise(finish, x, out)[0], aux

  def _feed(self, mlp: Any, x: jax.Array) -> tuple[jax.Array, Any]:
    """The MLP or the experts of states `[..., D]`; beside, the experts taken."""
    if not self.config.num_experts:
      return mlp(x, self.constrain), None
    way = moe.way(x, 'reference' if self.exact else self.kernels, self.platform)
    return mlp(x, functools.partial(self.mix, way))

  def _last(self, params: Params, x: jax.Array) -> jax.Array:
    """The last layer's output `[N, D]` → logits `[N, V]` float32."""
    ends = transformer.ends(self.config, params)
    return self._tokenwise(lambda x: self.logits(params, ends.norm(x)), x)

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

  def _head(self, params: Params) -> jax.Array:
    name = 'embedding' if self.config.tie_embeddings else 'lm_head'
    return params[name]['table']

  def logits(self, params: Params, hidden: jax.Array) -> jax.Array:
    table = self._head(params).astype(hidden.dtype)
    return jnp.einsum('...d,vd->...v', hidden, table).astype(jnp.float32)

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
  ) -> PolicyOutputs:
    """What the policy says of tokens `[B, T]` int32 with segment_ids `[B, T]`.

    Column t speaks of token t, given those before it: here, and only here, states
    shift by one. 0 at the first token of a segment and at padding (segment 0).
    temperature divides the logits of log-probs; entropy, nec and values ignore it.
    topk_ids: `[B, T, K]` int32, at t tokens that might stand in the place of token t,
    to be scored too; or top_k: the K likeliest, in falling order. prefix_ids and
    positions are those of `hidden`.
    """
    if positions is None:
      positions = transformer.segment_positions(segment_ids)
    inputs = tokens, segment_ids, prefix_ids, positions
    chosen = tokens[:, 1:], None if topk_ids is None else topk_ids[:, 1:]
    if self.context is None:
      states = self._forward(params, *inputs, keep_cache=False)[0][:, :-1]
    else:
      inputs, chosen = jax.tree.map(self._cut(tokens.shape[1]), (inputs, chosen))
      states = self._forward(params, *inputs, keep_cache=False, across=True)[0]
    scores = token_logprobs(
      states,
      self._head(params),
      chosen[0],
      temperature=temperature,
      entropy=entropy,
      nec=nec,
      topk_ids=chosen[1],
      top_k=top_k,
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
    same = (segment_ids[:, 1:] == segment_ids[:, :-1]) & (segment_ids[:, 1:] != 0)

    def shift(x):
      there = same.reshape(same.shape + (1,) * (x.ndim - 2))
      x = jnp.where(there, x, jnp.zeros((), x.dtype))
      return jnp.pad(x, ((0, 0), (1, 0), *((0, 0),) * (x.ndim - 2)))

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

  def unstack(self, params: Params) -> Params:
    """The same parameters with every layer's arrays on their own: 'layers' a tuple.

    `prefill` and `decode` take them too and are faster with them, for no layer need
    be cut out of a stack at every step.
    """
    return transformer.unstack(self.config, params)

  def init_cache(self, num_slots: int, max_length: int) -> Cache:
    """An empty key-value cache for `num_slots` sequences of up to `max_length`."""
    sizes = None
    if self.exact is not None:
      sizes = [exactly.CHUNK] * -(-max_length // exactly.CHUNK)
    return caches.empty(self.config, num_slots, max_length, self.dtype, sizes=sizes)

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

  def insert(
    self, cache: Cache, kv: caches.Kept, row_index: jax.Array, slots: jax.Array
  ) -> Cache:
    """Copies row `row_index[i]` of a prefill's `kv` into slot `slots[i]`, for each i.

    row_index, slots: `[n]` int32. A slot outside the cache is skipped, so that n can
    be padded. The prefill must not be wider than the cache.
    """
    return caches.insert(cache, kv, row_index, slots)

  def copy(self, cache: Cache, table: jax.Array, count: jax.Array) -> Cache:
    """Slot to slot: for each of the first `count` rows (source, target, length) of
    `table` `[n, 3]` int32, in order, at least the source's first `length` positions.
    """
    return caches.copy(cache, table, count)

  def decode(
    self,
    params: Params,
    cache: Cache,
    tokens: jax.Array,
    positions: jax.Array,
    limit: jax.Array,
  ) -> tuple[jax.Array, Cache]:
    """One token a slot: writes its key and value, returns what follows it.

    tokens, positions: `[S]` int32. limit: int32 scalar, at least max(positions) + 1;
    the cache beyond it is not read. Returns logits `[S, V]` float32 and the cache. A
    slot's result depends on no other slot, on which slot it is, or on `limit`.
    """
    x, cos, sin = self._enter(params, tokens, positions)
    new: dict[str, list] = {'k': [], 'v': []}
    # Not scanned: XLA's CPU backend copies what it slices out of stacked arrays.
    weights = transformer.unstack(self.config, params)['layers']
    for i, own in enumerate(weights):

      def attend(q, k, v, i=i):
        for name, value in (('k', k), ('v', v)):
          new[name].append(caches.write(cache[name][i], name, value, positions))
        chunks = new['k'][i], new['v'][i]
        if self.exact is None:
          out = decode_attention(q, *chunks, positions, limit)
        else:
          out = exactly.attend(q[:, None], *chunks, positions[:, None], limit)[:, 0]
        return out.astype(q.dtype), None

      block = transformer.block(self.config, own)
      x, _ = self._layer(block, x, cos, sin, attend)
    return self._last(params, x), {name: tuple(parts) for name, parts in new.items()}
