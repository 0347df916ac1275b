"""What all passes of the language model are made of, and decode, a token a slot."""

import dataclasses
import functools
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp

from jaxrl.models import cache as caches
from jaxrl.models import exact as exactly
from jaxrl.models import layers, lora, moe, pages, remat, rope, transformer
from jaxrl.models.cache import Cache
from jaxrl.models.config import ModelConfig
from jaxrl.models.exact import Exact
from jaxrl.types import Params
from kernels.attention import decode_attention
from kernels.dispatch import REFERENCE, check_asked, platform_of
from kernels.paged import choose_kernel

SHALLOW = 8  # layers at most that are compiled each for itself


def unconstrained(x: jax.Array, *names: str | None) -> jax.Array:
  """Leaves the layout of an activation to the compiler."""
  del names
  return x


@dataclasses.dataclass(frozen=True)
class Core:
  """A decoder-only transformer. Hashable and static; parameters are nested dicts.

  dtype: of activations and matrix products; parameters are cast at use.
  remat: what the backward pass finds kept, a call string; see `remat`. unroll: layers
  a step of the scan; more run a little faster and compile slower; 0: as `at_once`
  says. constrain: `(x, *axis names) -> x`, places activations on a mesh.
  mix: `(way, x, chosen, weights, *kernels) -> y`, takes tokens to their experts there.
  router_replay: the cache also holds the experts that tokens took, for the learner.
  exact: the mode in which `decode`, `prefill` and `policy_outputs` give a token's
  log-prob the same bits; None is the fast mode. kernels: 'auto', the best there is for
  the platform, or 'reference', plain jnp. platform: what it is compiled for ('cpu',
  'gpu', 'tpu'); None is what this process runs on. context: cuts the rows that
  `policy_outputs` gets over devices, by `cut`, `join` and `attention`.
  """

  config: ModelConfig
  dtype: str = 'float32'
  remat: str = 'none'
  unroll: int = 0
  constrain: Callable[..., jax.Array] = unconstrained
  mix: Callable[..., jax.Array] = moe.local
  exact: Exact | None = None
  kernels: str = 'auto'
  platform: str | None = None
  context: Any = None
  router_replay: bool = False

  def __post_init__(self) -> None:
    check_asked(self.kernels)
    if self.exact is not None and self.dtype != 'float32':
      raise ValueError(f"exact mode is of dtype='float32', not {self.dtype!r}")
    if self.router_replay and not self.config.num_experts:
      raise ValueError('router_replay is of models with experts, and this one has none')
    if self.router_replay and self.exact:
      raise ValueError('router_replay and exact mode exclude each other')
    remat.policy(self.remat)  # raises for one that is not

  @property
  def at_once(self) -> int:
    """Layers a step of the scan.

    All of a shallow model's on one CPU device, which so need not stack what the
    backward pass reads; where that is recomputed, a loop's end is what keeps it from
    being kept. On several, XLA lets collectives of a program that it has from its cache
    overtake each other, and waits for ever.
    """
    return self.unroll or (self.config.num_layers if self.shallow else 1)

  @property
  def shallow(self) -> bool:
    """Whether it has few layers, on one CPU device, none recomputed, not exact."""
    few = self.config.num_layers <= SHALLOW and platform_of(self.platform) == 'cpu'
    mesh = getattr(self.constrain, 'mesh', None)
    alone = mesh is None or mesh.size == 1
    return few and alone and self.remat == 'none' and self.exact is None

  def init(self, key: jax.Array) -> Params:
    """Random float32 parameters; every layer's are stacked on axis 0 of 'layers'."""
    return transformer.init(self.config, key)

  def logical_axes(self, params: Params | None = None) -> Params:
    """The tree of `params`, each array replaced by a tuple of its axes' names.

    Names: layers, embed, embedding, vocab, heads, kv_heads, mlp, experts; None is
    never sharded.
    """
    del params
    return transformer.logical_axes(self.config)

  def logits(self, params: Params, hidden: jax.Array) -> jax.Array:
    table = self._head(params).astype(hidden.dtype)
    return jnp.einsum('...d,vd->...v', hidden, table).astype(jnp.float32)

  def unstack(self, params: Params) -> Params:
    """The same parameters with every layer's arrays on their own: 'layers' a tuple.

    `prefill` and `decode` take them too and are faster with them, for no layer need
    be cut out of a stack at every step.
    """
    return transformer.unstack(self.config, params)

  def init_cache(self, num_slots: int, max_length: int) -> Cache:
    """An empty key-value cache for `num_slots` sequences of up to `max_length`.

    It is laid out for the kernel that `decode` uses, if it uses one.
    """
    sizes, options = None, {'kernels': self.kernels, 'platform': self.platform}
    if self.exact is not None:
      sizes = [exactly.CHUNK] * -(-max_length // exactly.CHUNK)
    elif not self.router_replay:  # whose cache has a token's experts beside
      kernel = choose_kernel(self.config.head_dim, self.dtype, **options)
      if kernel != REFERENCE:
        return pages.empty(self.config, num_slots, max_length, self.dtype)
    return caches.empty(
      *(self.config, num_slots, max_length, self.dtype),
      sizes=sizes,
      experts=self.router_replay,
    )

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
    rotation: tuple[jax.Array, jax.Array] | None = None,
  ) -> tuple[jax.Array, Cache]:
    """One token a slot: writes its key and value, returns what follows it.

    tokens, positions: `[S]` int32. limit: int32 scalar, at least max(positions) + 1;
    the cache beyond it is not read. rotation: `self.rotation(positions)`, where it is
    known before. Returns logits `[S, V]` float32 and the cache. A slot's result depends
    on no other slot, on which slot it is, or on `limit`.
    """
    x, cos, sin = self._enter(params, tokens, positions)
    cos, sin = rotation or (cos, sin)
    new: dict[str, list] = {name: [] for name in cache}
    # Not scanned: XLA's CPU backend copies what it slices out of stacked arrays.
    weights = transformer.unstack(self.config, params)['layers']
    for i, own in enumerate(weights):

      def attend(q, k, v, i=i):
        if pages.is_paged(cache):
          options = self._kernels()
          out, own = pages.step(cache, i, (q, k, v), positions, limit, **options)
          for name in own:
            new[name].append(own[name])
          return out.astype(q.dtype), None
        for name, value in (('k', k), ('v', v)):
          new[name].append(caches.write(cache[name][i], name, value, positions))
        chunks = new['k'][i], new['v'][i]
        if self.exact is None:
          out = decode_attention(q, *chunks, positions, limit)
        else:
          out = exactly.attend(q[:, None], *chunks, positions[:, None], limit)[:, 0]
        return out.astype(q.dtype), None

      block = transformer.block(self.config, own)
      x, (_, chosen) = self._layer(block, x, cos, sin, attend)
      if self.router_replay:
        new['e'].append(caches.write(cache['e'][i], 'e', chosen[:, None], positions))
    return self._last(params, x), {name: tuple(parts) for name, parts in new.items()}

  def rotation(self, positions: jax.Array) -> tuple[jax.Array, jax.Array] | None:
    """Cosines and sines for tokens at `positions` `[..., S]` int32, each
    `[..., S, head_dim / 2]`; None in exact mode, which finds them where it needs them.
    """
    return rope.rotation(self.config, positions) if self.exact is None else None

  def _kernels(self) -> dict[str, Any]:
    """How attention chooses its kernel, and runs it on a mesh."""
    shard = getattr(self.constrain, 'shard', None)
    return {'kernels': self.kernels, 'platform': self.platform, 'shard': shard}

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
  ) -> tuple[jax.Array, tuple[Any, Any]]:
    """One layer for states `[N, D]`; as a `Block`."""
    q, k, v = self._tokenwise(block.project, x, cos, sin)
    out, aux = attend(q, k, v)
    finish = functools.partial(block.finish, feed=self._feed)
    x, chosen = self._tokenwise(finish, x, out)
    return x, (aux, chosen)

  def _feed(
    self, mlp: Any, x: jax.Array, routed: jax.Array | None = None
  ) -> tuple[jax.Array, Any]:
    """The MLP or the experts of states `[..., D]`; beside, the experts taken.

    States `[N, D]`, of decode and the exact mode, are whole on each device.
    """
    if not self.config.num_experts:
      return mlp(x, self.constrain), None
    way = moe.way(x, self.kernels, self.platform)
    mix = self.mix if x.ndim == 3 else moe.local
    return mlp(x, functools.partial(mix, way), routed)

  def _last(self, params: Params, x: jax.Array) -> jax.Array:
    """The last layer's output `[N, D]` → logits `[N, V]` float32."""
    ends = transformer.ends(self.config, params)
    return self._tokenwise(lambda x: self.logits(params, ends.norm(x)), x)

  def _head(self, params: Params) -> jax.Array:
    if self.config.tie_embeddings:
      return params['embedding']['table']
    return lora.merged(self.config, params['lm_head'])['table']
