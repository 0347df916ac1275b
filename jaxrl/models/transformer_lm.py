"""A decoder-only transformer language model as pure functions of its parameters."""

import dataclasses
import functools
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp

from jaxrl.models import exact_mode, layer_stack, layers, lora, remat, rope
from jaxrl.models import kv_cache as caches
from jaxrl.models.exact_mode import Exact
from jaxrl.models.kv_cache import Cache
from jaxrl.models.model_config import ModelConfig
from jaxrl.models.remat import RematPolicy
from jaxrl.options import Keywords
from jaxrl.types import Array, Params, PolicyOutputs, PyTree, TokenTree
from kernels.attention import attention
from kernels.dispatch import check_kernels_option, platform_of
from kernels.token_logprobs import token_logprobs

# (attention, q, k, v) -> output: runs attention on another arrangement of the rows.
AttendWith = Callable[[Callable[..., Array], Array, Array, Array], Array]
_STREAM = 'batch', 'length', None  # the axes of the residual stream
MAX_UNROLLED_LAYERS = 8  # layers at most that are compiled each for itself


@dataclasses.dataclass(frozen=True)
class TransformerLM:
  """A decoder-only transformer. Hashable and static; parameters are nested dicts.

  Attributes:
    config: The shape.
    dtype: The type of activations and matrix products; parameters are cast at use.
    remat: What the backward pass keeps: the name of a policy of `remat`, or a call.
    unroll: Layers per step of the scan; more run a little faster and compile slower; 0
      as `scan_unroll` says.
    constrain: `(x, *axis names) -> x`, places activations on a mesh.
    expert_fn: `(implementation, x, chosen, weights, *kernels) -> y`, computes the
      experts on a mesh; None is `moe.apply_experts`, for one device.
    exact: The mode in which `decode`, `prefill` and `policy_outputs` give a token's
      log-prob the same bits; None is the fast mode.
    kernels: 'auto', the best for the platform, or 'reference', plain jnp.
    platform: What it is compiled for ('cpu', 'gpu', 'tpu'); None is what this process
      runs on.
    kept_bytes: Bytes of each GPU that the softmax may take which `policy_outputs` keeps
      for its backward pass; None is the default of `token_logprobs`.
    context: Shards the rows of `policy_outputs` over devices, by `shard`, `unshard` and
      `attention`.
    router_replay: Whether the cache also records each token's experts, for the learner.
    row_segments: The most segments of a row, see `attention`; 0 for not known.
    weights_dtype: Of matrices that `decoding.weight_layout` has cast; '' for others.
    rounding: The `BlockFormat` to which `policy_outputs` rounds matrices, if any.
  """

  config: ModelConfig
  dtype: str = 'float32'
  remat: RematPolicy = 'none'
  unroll: int = 0
  constrain: Callable[..., jax.Array] = layer_stack.unconstrained
  expert_fn: Callable[..., jax.Array] | None = None
  exact: Exact | None = None
  kernels: str = 'auto'
  platform: str | None = None
  kept_bytes: int | None = None
  context: PyTree = None
  router_replay: bool = False
  row_segments: int = 0
  weights_dtype: str = ''
  rounding: PyTree = None

  def __post_init__(self) -> None:
    check_kernels_option(self.kernels)
    if self.exact is not None:
      exact_mode.check_supported(self.config, self.dtype)
    if self.router_replay and not self.config.num_experts:
      raise ValueError('router_replay needs a model with experts')
    if self.router_replay and self.exact:
      raise ValueError('router_replay and exact mode exclude each other')
    remat.policy(self.remat)  # raises for one that is not

  @property
  def scan_unroll(self) -> int:
    """Returns the layers per step of the scan: all of a shallow model.

    It then stacks nothing for the backward pass. Several devices could deadlock: XLA
    lets collectives of an unrolled program from its cache overtake each other.
    """
    return self.unroll or (self.config.num_layers if self.is_shallow else 1)

  @property
  def is_shallow(self) -> bool:
    """Returns True for few layers on one CPU device, not recomputed and not exact."""
    few = self.config.num_layers <= MAX_UNROLLED_LAYERS
    few = few and platform_of(self.platform) == 'cpu' and self.is_on_one_device
    return few and remat.policy(self.remat) is None and self.exact is None

  @property
  def is_on_one_device(self) -> bool:
    """Returns True if no mesh splits its arrays."""
    mesh = getattr(self.constrain, 'mesh', None)
    return mesh is None or mesh.size == 1

  def init(self, key: jax.Array) -> Params:
    """Makes random float32 parameters; 'layers' has every layer's on axis 0.

    Args:
      key: A JAX random key.
    """
    return layer_stack.init(self.config, key)

  def logical_axes(self) -> Params:
    """Returns the parameter tree with each array replaced by the names of its axes.

    The names are layers, embed, embedding, vocab, heads, kv_heads, mlp and experts; an
    axis named None is never sharded.
    """
    return layer_stack.logical_axes(self.config)

  def logits(self, params: Params, hidden: jax.Array) -> jax.Array:
    """Computes logits from final states.

    Args:
      params: The parameters, with 'head_adapters' if rows have some of their own.
      hidden: `[…, D]`.

    Returns:
      `[…, V]` float32.
    """
    is_arranged = bool(self.weights_dtype)
    logits = layer_stack.vocabulary_product(self._head(params), hidden, is_arranged)
    if 'head_adapters' in params:
      logits = logits + params['head_adapters'].logits(hidden)
    cap = self.config.logits_softcap
    return cap * jnp.tanh(logits / cap) if cap else logits

  def hidden(
    self,
    params: Params,
    tokens: jax.Array,
    segment_ids: jax.Array,
    *,
    prefix_ids: jax.Array | None = None,
    positions: jax.Array | None = None,
    routed_experts: jax.Array | None = None,
    images: PyTree = None,
  ) -> jax.Array:
    """Computes the final normed states of tokens.

    Args:
      params: The parameters.
      tokens: `[B, T]` int32.
      segment_ids: `[B, T]` int32; a token sees those before it in its own segment. 0 is
        padding.
      prefix_ids: `[B, T]` int32, another segment of the row that a token sees, 0 for
        none.
      positions: `[B, T]` int32; by default counted from each segment's start.
      routed_experts: `[B, T, L, k]` int, the experts that a token takes in each layer;
        −1 lets the router choose.
      images: The `ImagePlaces` of the rows; params are then those that
        `vision_tower.encode` returns.

    Returns:
      `[B, T, D]`.
    """
    inputs = tokens, segment_ids, prefix_ids, positions, routed_experts, images
    return self._forward(params, *inputs, keep_cache=False)[0]

  def _forward(
    self,
    params: Params,
    tokens: jax.Array,
    segment_ids: jax.Array,
    prefix_ids: jax.Array | None = None,
    positions: jax.Array | None = None,
    routed_experts: jax.Array | None = None,
    images: PyTree = None,
    *,
    keep_cache: bool,
    across: bool = False,  # whether rows are sharded as `context` does it
    attend_with: AttendWith | None = None,
    row_segments: int | None = None,
    tree: TokenTree | None = None,
  ) -> tuple[jax.Array, caches.PrefillKV | None]:
    """Runs the layers; returns final normed states, and keys and values if kept."""
    if self.exact is not None and (prefix_ids is not None or tree is not None):
      raise ValueError('exact mode needs a row for each sequence, without prefix_ids')
    if across and attend_with is not None:
      raise ValueError('rows sharded over devices attend among themselves only')
    ends = layer_stack.embedding_and_head(self.config, params)
    x = ends.embed(tokens, self.dtype)
    x = self.constrain(x if images is None else images.merge(params, x), *_STREAM)
    if positions is None:
      positions = layer_stack.segment_positions(segment_ids)
    rotations, shared = self._rotations(positions, images), caches.SharedKV()
    kernel_options, mix = self.kernel_options(row_segments), None
    if self.config.has_linear_attention:
      from jaxrl.models.mixers.gated_delta_net import row_mixer  # few models need it

      options = {'across': across, 'keep_cache': keep_cache, 'tree': tree}
      mix = row_mixer(self, segment_ids, prefix_ids, **options)

    def attend(block, q, own_k, own_v, *gates):
      if mix is not None and gates:
        return mix(block, q, own_k, own_v, *gates)
      k, v = shared.read(block.config, own_k, own_v)
      prefill_kv, rules = None, block.attention_rules
      if keep_cache:
        window = rules.get('window', 0)
        prefill_kv = caches.keep(own_k, own_v, q, window, segment_ids.sum(1))
        if mix is not None:
          prefill_kv |= caches.no_states(q)
      if block.config.kv_latent:
        k, v = block.attention.expand(k)
      q = self.constrain(q, 'batch', 'length', 'heads', None)
      k, v = (self.constrain(x, 'batch', 'length', 'kv_heads', None) for x in (k, v))
      aux = prefill_kv, shared.passed_on(block.config, k, v)
      run = functools.partial(attention, **rules, **kernel_options)
      if attend_with is not None:
        return attend_with(run, q, k, v), aux
      if across:
        run = functools.partial(self.context.attention, **rules)
      ids = {'prefix_ids': prefix_ids, 'positions': positions}
      ids |= {} if tree is None else {'key_ends': tree.ends}
      return run(q, k, v, segment_ids, **ids), aux

    def body(block, x, inputs):
      routed, extra, layer = inputs
      block = layers.with_kernels(self, block)
      feed = functools.partial(self._feed, routed=routed)
      rotation = rotations[rope.rotation_key(block.config)]
      own_attend = functools.partial(attend, block)
      x, ((kept, read), chosen) = block(x, rotation, own_attend, feed, extra)
      if kept is not None and self.router_replay:
        kept['e'] = chosen[:, None].astype(caches.EXPERT_DTYPE)
      x = x if images is None else images.deepen(params, x, layer)
      return self.constrain(x, *_STREAM), (kept, read)

    each = routed_experts, ends.per_layer_inputs(tokens, x)
    each = jax.tree.map(lambda x: jnp.moveaxis(x, 2, 0), each)
    each = *each, None if images is None else jnp.arange(self.config.num_layers)
    options = self.remat, self.scan_unroll, each, shared.after, self.rounding
    x, (kept, _) = layer_stack.run_layers(self.config, params, x, body, *options)
    return layers.with_kernels(self, ends).norm(x), kept

  def _exact_rows(self) -> Callable[..., tuple[jax.Array, caches.PrefillKV | None]]:
    """Returns `exact.run_rows` as `(params, tokens, lengths, keep_cache=…) -> …`."""
    parts, unroll = (self.config, self.enter, self.run_layer), self.scan_unroll
    return functools.partial(exact_mode.run_rows, *parts, unroll=unroll)

  def policy_outputs(
    self,
    params: Params,
    tokens: jax.Array,
    segment_ids: jax.Array,
    *,
    temperature: jax.Array | float = 1.0,
    entropy: bool = False,
    nec: bool = False,
    sum_pi_squared: bool = False,
    topk_ids: jax.Array | None = None,
    top_k: int = 0,
    prefix_ids: jax.Array | None = None,
    positions: jax.Array | None = None,
    routed_experts: jax.Array | None = None,
    images: PyTree = None,
    attend_with: AttendWith | None = None,
    row_segments: int | None = None,
    tree: TokenTree | None = None,
  ) -> PolicyOutputs:
    """Computes what the policy says of tokens.

    Index t of the outputs describes token t, given those before it: here, and only
    here, states shift by one. Outputs are 0 at the first token of a segment and at
    padding.

    Args:
      params: The parameters.
      tokens: `[B, T]` int32.
      segment_ids: As in `hidden`.
      temperature: Divides the logits of log-probs; entropy, nec and values ignore it.
      entropy: Whether to compute the entropy.
      nec: Whether to compute nec; see `PolicyOutputs`.
      sum_pi_squared: Whether to compute that; see `PolicyOutputs`.
      topk_ids: `[B, T, K]` int32, at t tokens that might stand in the place of token t,
        to be scored too.
      top_k: Find and score the K likeliest tokens instead, in falling order.
      prefix_ids: As in `hidden`.
      positions: As in `hidden`.
      routed_experts: As in `hidden`.
      images: As in `hidden`.
      attend_with: Runs attention on another arrangement of the rows; see `AttendWith`.
      row_segments: The most segments of the rows that attend, if not the model's own.
      tree: The tree of the rows' tokens: a token sees those that it descends from.

    Returns:
      Outputs `[B, T]`.
    """
    if positions is None:
      positions = layer_stack.segment_positions(segment_ids)
    inputs = tokens, segment_ids, prefix_ids, positions, routed_experts, images
    options = {'attend_with': attend_with, 'row_segments': row_segments, 'tree': tree}
    states, chosen, others = self._states_before(params, inputs, topk_ids, **options)
    scores = token_logprobs(
      states,
      self._head(params)['table'],
      chosen,
      topk_ids=others,
      temperature=temperature,
      entropy=entropy,
      nec=nec,
      sum_pi_squared=sum_pi_squared,
      top_k=top_k,
      softcap=self.config.logits_softcap,
      kernels=self.kernels,
      platform=self.platform,
      shards=getattr(self.constrain, 'shards', None),
      kept_bytes=self.kept_bytes,
    )
    values = None
    if self.config.value_head:
      values = layer_stack.embedding_and_head(self.config, params).value_head(states)
    if self.context is not None:
      join = lambda x: self.context.unshard(x, tokens.shape[1])[:, :-1]  # noqa: E731
      scores, values = jax.tree.map(join, (scores, values))
    if self.exact is not None:
      exact = self._exact_logprobs(params, tokens, temperature)
      logprobs = exact_mode.with_gradient_of(exact, scores.logprobs)
      scores = scores._replace(logprobs=logprobs)
    arrangement: Any = {'segment_ids': segment_ids, 'tree': tree}
    shift = functools.partial(layer_stack.shift_right, **arrangement)
    scores, values = jax.tree.map(shift, (scores._asdict(), values))
    return PolicyOutputs(**scores, values=values)

  def _states_before(
    self,
    params: Params,
    inputs: tuple[Any, ...],
    topk_ids: jax.Array | None,
    *,
    tree: TokenTree | None,
    **options: Any,
  ) -> tuple[jax.Array, jax.Array, jax.Array | None]:
    """Returns states, and the tokens and `topk_ids` that each of them predicts.

    In a tree a token is predicted by the state of its parent, elsewhere by that of the
    token before. Rows that `context` shards stay sharded.
    """
    tokens = inputs[0]
    run = functools.partial(self._forward, params, keep_cache=False, **options)
    if tree is not None:
      return layer_stack.at_previous(run(*inputs, tree=tree)[0], tree), tokens, topk_ids
    chosen = tokens[:, 1:], None if topk_ids is None else topk_ids[:, 1:]
    if self.context is None:
      return run(*inputs)[0][:, :-1], *chosen
    cut = functools.partial(self.context.cut, length=tokens.shape[1])
    inputs, chosen = jax.tree.map(cut, (inputs, chosen))
    return run(*inputs, across=True)[0], *chosen

  def _exact_logprobs(
    self, params: Params, tokens: jax.Array, temperature: jax.Array | float
  ) -> jax.Array:
    """Computes log-probs with the bits of `decode`, which have no gradient."""
    assert self.exact is not None
    forward = lambda *rows: self._exact_rows()(*rows)[0]  # noqa: E731
    return self.exact.row_logprobs(
      forward, self.last_logits, params, tokens, temperature
    )

  def prefill(
    self, params: Params, tokens: jax.Array, lengths: jax.Array, images: PyTree = None
  ) -> tuple[jax.Array, caches.PrefillKV]:
    """Runs prompts. A row's result depends on no other row.

    Args:
      params: The parameters.
      tokens: `[P, T]` int32, left-aligned.
      lengths: `[P]` int32, at least 1.
      images: As in `hidden`.

    Returns:
      The logits `[P, V]` float32 after each prompt's last token, and the rows' keys and
      values for `kv_cache.insert`.
    """
    time = jnp.arange(tokens.shape[1])
    segment_ids = (time < lengths[:, None]).astype(jnp.int32)
    if self.exact is None:
      options = {'images': images, 'keep_cache': True, 'row_segments': 1}
      hidden, kept = self._forward(params, tokens, segment_ids, **options)
    else:
      hidden, kept = self._exact_rows()(params, tokens, lengths, keep_cache=True)
      hidden = hidden.reshape(*tokens.shape, -1)
    assert kept is not None  # it was asked for
    last = jnp.take_along_axis(hidden, (lengths - 1)[:, None, None], axis=1)[:, 0]
    logits = self.logits if self.exact is None else self.last_logits
    return logits(params, last), kept

  def init_cache(self, num_slots: int, max_length: int) -> Cache:
    """Makes an empty key-value cache, laid out for the kernel that `decode` uses.

    Args:
      num_slots: The number of sequences.
      max_length: The longest sequence, in tokens.
    """
    sizes = None
    if self.exact is not None:
      sizes = [exact_mode.CHUNK] * -(-max_length // exact_mode.CHUNK)
    elif not self.router_replay and platform_of(self.platform) != 'cpu':
      # Not for a router's replay, whose cache has a token's experts beside.
      layout = caches.choose_layout(
        *(self.config, self.dtype), kernels=self.kernels, platform=self.platform
      )
      if layout is not None:
        return layout.empty(self.config, num_slots, max_length, self.dtype)
    return caches.empty(
      *(self.config, num_slots, max_length, self.dtype),
      sizes=sizes,
      experts=self.router_replay,
    )

  def decode(
    self,
    params: Params,
    cache: Cache,
    tokens: jax.Array,
    positions: jax.Array,
    limit: jax.Array,
    rotations: dict[str, rope.Rotation] | None = None,
  ) -> tuple[jax.Array, Cache]:
    """Decodes one token per slot: writes its key and value, returns what follows.

    A slot's result depends on no other slot, nor on `limit`.

    Args:
      params: The parameters.
      cache: The cache.
      tokens: `[S]` int32.
      positions: `[S]` int32.
      limit: A scalar, at least max(positions) + 1; the cache beyond it is not read.
      rotations: `self.rotations(positions)`, where they are known before.

    Returns:
      Logits `[S, V]` float32 and the cache.
    """
    from jaxrl.models.decoding import decode_step  # training needs none of it

    arrays = tokens, positions, limit, rotations
    return decode_step.decode(self, params, cache, *arrays)

  def rotations(self, positions: jax.Array) -> dict[str, rope.Rotation] | None:
    """Computes the cosines and sines of positions.

    Args:
      positions: `[…, S]` int32.

    Returns:
      Each `[…, S, n]`, see `rope.rotations`; None in exact mode, which computes them
      where it needs them.
    """
    return self._rotations(positions) if self.exact is None else None

  def _rotations(
    self, positions: jax.Array, images: PyTree = None
  ) -> dict[str, rope.Rotation]:
    if images is not None:
      return images.rotations(self.config)
    return rope.rotations(self.config, positions, platform=self.platform)

  def kernel_options(self, row_segments: int | None = None) -> Keywords:
    """Returns the options by which attention chooses its kernel and runs on a mesh.

    Args:
      row_segments: As in `policy_outputs`.
    """
    shard = getattr(self.constrain, 'shard', None)
    return {
      'kernels': self.kernels,
      'platform': self.platform,
      'shard': None if self.is_on_one_device else shard,
      'row_segments': self.row_segments if row_segments is None else row_segments,
    }

  def _tokenwise(self, function: Callable[..., Any], *arrays: Array | None) -> PyTree:
    """Runs function(*arrays) on arrays `[N, …]` or None, in the mode of this model."""
    if self.exact is None:
      return function(*arrays)
    return self.exact.tokenwise(function, *arrays)

  def enter(
    self, params: Params, tokens: jax.Array, positions: jax.Array
  ) -> tuple[jax.Array, dict[str, rope.Rotation], jax.Array | None]:
    """Computes the first layer's input, in the mode of this model.

    Args:
      params: The parameters.
      tokens: `[N]` int32.
      positions: `[N]` int32.

    Returns:
      States `[N, D]`, rotations, and the per-layer inputs `[N, L, P]` or None.
    """
    ends = layer_stack.embedding_and_head(self.config, params)

    def start(tokens, positions):
      x = ends.embed(tokens, self.dtype)
      extras = ends.per_layer_inputs(tokens, x)
      return x, self._rotations(positions), extras

    return self._tokenwise(start, tokens, positions)

  def run_layer(
    self,
    block: layers.Block,
    x: jax.Array,
    rotations: dict[str, rope.Rotation],
    attend: Callable[..., tuple[jax.Array, PyTree]],
    extra: jax.Array | None = None,
  ) -> tuple[jax.Array, tuple[PyTree, PyTree]]:
    """Runs one layer over a cache, in the mode of this model.

    Args:
      block: The layer.
      x: States `[N, D]`.
      rotations: Those of the positions.
      attend: As in `Block`.
      extra: Per-layer input `[N, P]`, if the layer has one.

    Returns:
      The next states, and the aux values of `attend` and of the MLP or experts.
    """
    block = layers.with_kernels(self, block)
    rotation = rotations[rope.rotation_key(block.config)]
    inputs, gate = self._tokenwise(block.project_for_cache, x, *rotation)
    out, aux = attend(*inputs)
    finish = functools.partial(block.finish, feed=self._feed, over_cache=True)
    x, chosen = self._tokenwise(finish, x, out, gate, extra)
    return x, (aux, chosen)

  def _feed(
    self, mlp: Any, x: jax.Array, routed: jax.Array | None = None
  ) -> tuple[jax.Array, PyTree]:
    """Computes the MLP or experts of states `[..., D]`; also returns the experts taken.

    States `[N, D]`, of decode and the exact mode, are whole on each device.
    """
    if isinstance(mlp, layers.MLP):
      shape = (*x.shape[:-1], self.config.num_experts_per_token)  # of other layers
      return mlp(x, self.constrain), jnp.full(shape, -1) if shape[-1] else None
    from jaxrl.models import moe  # most models have no experts

    way = mlp.gated(moe.select_implementation(x, self.kernels, self.platform))
    mix = (self.expert_fn if x.ndim == 3 else None) or moe.apply_experts
    return mlp(x, functools.partial(mix, way), routed, self.constrain)

  def last_logits(self, params: Params, x: jax.Array) -> jax.Array:
    """Computes logits from the last layer's output, in the mode of this model.

    Args:
      params: The parameters.
      x: `[N, D]`.

    Returns:
      `[N, V]` float32.
    """
    ends = layer_stack.embedding_and_head(self.config, params)
    norm = layers.with_kernels(self, ends).norm
    return self._tokenwise(lambda x: self.logits(params, norm(x)), x)

  def _head(self, params: Params) -> Params:
    if self.config.tie_embeddings:
      return params['embedding']
    return lora.merged(self.config, params['lm_head'])
