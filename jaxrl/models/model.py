"""The language model as a set of pure functions of its parameters."""

import dataclasses
from collections.abc import Callable

import jax
import jax.numpy as jnp

from jaxrl.models import cache as caches
from jaxrl.models import rope, transformer
from jaxrl.models.cache import Cache
from jaxrl.models.config import ModelConfig
from jaxrl.types import Params, PolicyOutputs
from kernels.attention import attention, decode_attention
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
  """

  config: ModelConfig
  dtype: str = 'float32'
  remat: str = 'none'
  unroll: int = 1
  constrain: Callable[..., jax.Array] = unconstrained

  def __post_init__(self) -> None:
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
    self, params: Params, tokens: jax.Array, segment_ids: jax.Array
  ) -> jax.Array:
    """tokens, segment_ids `[B, T]` int32 → final normed states `[B, T, D]`.

    A token sees those before it in its own segment; positions count from each
    segment's start.
    """
    return self._forward(params, tokens, segment_ids, keep_cache=False)[0]

  def _forward(
    self,
    params: Params,
    tokens: jax.Array,
    segment_ids: jax.Array,
    keep_cache: bool,
  ) -> tuple[jax.Array, caches.Kept | None]:
    ends = transformer.ends(self.config, params)
    x = ends.embedding.table[...][tokens].astype(self.dtype)
    x = self.constrain(x, 'batch', 'length', None)
    positions = transformer.segment_positions(segment_ids)
    cos, sin = rope.rotation(self.config, positions)

    def attend(q, k, v):
      q = self.constrain(q, 'batch', 'length', 'heads', None)
      k = self.constrain(k, 'batch', 'length', 'kv_heads', None)
      v = self.constrain(v, 'batch', 'length', 'kv_heads', None)
      kept = None
      if keep_cache:
        kept = {'k': k.transpose(0, 2, 3, 1), 'v': v.swapaxes(1, 2)}
      return attention(q, k, v, segment_ids), kept

    def body(block, x):
      x, kept = block(x, cos, sin, attend, self.constrain)
      return self.constrain(x, 'batch', 'length', None), kept

    x, kept = transformer.run_layers(
      self.config, params, x, body, self.remat, self.unroll
    )
    return ends.norm(x), kept

  def _head(self, params: Params) -> jax.Array:
    name = 'embedding' if self.config.tie_embeddings else 'lm_head'
    return params[name]['table']

  def logits(self, params: Params, hidden: jax.Array) -> jax.Array:
    table = self._head(params).astype(hidden.dtype)
    return jnp.einsum('...d,vd->...v', hidden, table).astype(jnp.float32)

  def policy_outputs(
    self,
    params: Params,
    tokens: jax.Array,
    segment_ids: jax.Array,
    *,
    temperature: jax.Array | float = 1.0,
    entropy: bool = False,
  ) -> PolicyOutputs:
    """What the policy says of tokens `[B, T]` int32 with segment_ids `[B, T]`.

    Column t speaks of token t, given those before it: here, and only here, states
    shift by one. 0 at the first token of a segment and at padding (segment 0).
    temperature divides the logits of `logprobs`; entropy and values ignore it.
    """
    states = self.hidden(params, tokens, segment_ids)[:, :-1]
    logprobs, entropies = token_logprobs(
      states,
      self._head(params),
      tokens[:, 1:],
      temperature=temperature,
      entropy=entropy,
    )
    same = (segment_ids[:, 1:] == segment_ids[:, :-1]) & (segment_ids[:, 1:] != 0)

    def shift(x):
      return jnp.pad(jnp.where(same, x, 0.0), ((0, 0), (1, 0)))

    values = None
    if self.config.value_head:
      values = shift(transformer.ends(self.config, params).value_head(states))
    return PolicyOutputs(
      logprobs=shift(logprobs),
      entropy=None if entropies is None else shift(entropies),
      values=values,
    )

  def unstack(self, params: Params) -> Params:
    """The same parameters with every layer's arrays on their own: 'layers' a tuple.

    `prefill` and `decode` take them too and are faster with them, for no layer need
    be cut out of a stack at every step.
    """
    return transformer.unstack(self.config, params)

  def init_cache(self, num_slots: int, max_length: int) -> Cache:
    """An empty key-value cache for `num_slots` sequences of up to `max_length`."""
    return caches.empty(self.config, num_slots, max_length, self.dtype)

  def prefill(
    self, params: Params, tokens: jax.Array, lengths: jax.Array
  ) -> tuple[jax.Array, caches.Kept]:
    """Runs prompts, left-aligned in tokens `[P, Tp]`, lengths `[P]` int32 (≥ 1).

    Returns the logits `[P, V]` float32 after each prompt's last token, and the rows'
    keys and values for `insert`. A row's result depends on no other row.
    """
    time = jnp.arange(tokens.shape[1])
    segment_ids = (time < lengths[:, None]).astype(jnp.int32)
    hidden, kept = self._forward(params, tokens, segment_ids, keep_cache=True)
    assert kept is not None  # it was asked for
    last = jnp.take_along_axis(hidden, (lengths - 1)[:, None, None], axis=1)[:, 0]
    return self.logits(params, last), kept

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
    ends = transformer.ends(self.config, params)
    x = ends.embedding.table[...][tokens].astype(self.dtype)
    cos, sin = rope.rotation(self.config, positions)
    new: dict[str, list] = {'k': [], 'v': []}
    # Not scanned: XLA's CPU backend copies what it slices out of stacked arrays.
    layers = transformer.unstack(self.config, params)['layers']
    for i, weights in enumerate(layers):

      def attend(q, k, v, i=i):
        for name, value in (('k', k), ('v', v)):
          new[name].append(caches.write(cache[name][i], name, value, positions))
        out = decode_attention(q, new['k'][i], new['v'][i], positions, limit)
        return out.astype(q.dtype), None

      block = transformer.block(self.config, weights)
      x, _ = block(x, cos, sin, attend, self.constrain)
    cache = {name: tuple(chunks) for name, chunks in new.items()}
    return self.logits(params, ends.norm(x)), cache
