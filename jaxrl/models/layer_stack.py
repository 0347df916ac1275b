"""The layer stack: modules as functions of a parameter tree, layers scanned.

In the parameter tree, 'layers' has the parameters of all layers stacked on axis 0. If
layers of some kinds have other parameters than those of others, it has a stack for each
set of such kinds instead, under the name of the first. Layers that differ otherwise,
such as in their windows, lie in one stack.
"""

import functools
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx
from jax.tree_util import KeyPath

from jaxrl.models import layers, lora, remat
from jaxrl.models.model_config import ModelConfig, kind_config
from jaxrl.types import Params, PyTree, TokenTree


class EmbeddingAndHead(nnx.Module):
  """The modules before and after the layers."""

  def __init__(self, config: ModelConfig, rngs: nnx.Rngs):
    self.embedding = layers.Embedding(config, rngs)
    self.norm = layers.RMSNorm(config, (config.hidden_size,))
    if not config.tie_embeddings:
      self.lm_head = layers.Embedding(config, rngs, config.adapters('lm_head'))
    if config.value_head:
      self.value_head = layers.ValueHead(config)
    if width := config.per_layer_width:
      sizes, number = (config.hidden_size,), config.num_layers
      self.per_layer_embedding = layers.Embedding(config, rngs, width=number * width)
      axes = ('embed', None, None)
      self.per_layer_projection = layers.Linear(sizes, (number, width), axes, rngs)
      self.per_layer_norm = layers.RMSNorm(config, (width,))
    self.config = config
    self.lookup: Callable[[jax.Array], jax.Array] | None = None  # of rows of the table

  def embed(self, tokens: jax.Array, dtype: str) -> jax.Array:
    """Looks up the embeddings of tokens.

    Args:
      tokens: `[…]` int32.
      dtype: Dtype of activations.

    Returns:
      `[…, D]`.
    """
    rows = self.lookup(tokens) if self.lookup else self.embedding.table[...][tokens]
    return layers.scale_embeddings(self.config, rows, dtype)

  def per_layer_inputs(self, tokens: jax.Array, x: jax.Array) -> jax.Array | None:
    """Computes the input that each layer has of its own.

    Args:
      tokens: `[…]` int32.
      x: `[…, D]`, their embeddings, scaled.

    Returns:
      `[…, L, P]`; None for a model without any.
    """
    width = self.config.per_layer_width
    if not width:
      return None
    embedded = self.per_layer_embedding.table[...][tokens].astype(x.dtype)
    embedded = embedded * jnp.asarray(width**0.5, x.dtype)
    projected = self.per_layer_projection(x) * self.config.hidden_size**-0.5
    projected = self.per_layer_norm(projected)
    return (projected + embedded.reshape(projected.shape)) * 2**-0.5


def unconstrained(x: jax.Array, *names: str | None) -> jax.Array:
  """Leaves the sharding of an activation x, with axes `names`, to the compiler."""
  del names
  return x


def _layer(config: ModelConfig, rngs: nnx.Rngs) -> layers.Block:
  # Few models need one of these modules.
  if config.linear_attention:
    from jaxrl.models.mixers.gated_delta_net import GatedDeltaNet

    return layers.Block(config, rngs, GatedDeltaNet)
  if config.kv_latent:
    from jaxrl.models.mixers.latent_attention import LatentAttention

    return layers.Block(config, rngs, LatentAttention)
  return layers.Block(config, rngs)


def _make(
  kind: Callable[..., nnx.Module], config: ModelConfig, key: jax.Array
) -> nnx.Module:
  return kind(config, nnx.Rngs(params=key))


@functools.lru_cache
def _definition(
  kind: Callable[..., nnx.Module], config: ModelConfig
) -> tuple[PyTree, PyTree]:
  """Returns the module's graph and its abstract state."""
  make = functools.partial(_make, kind, config)
  return nnx.split(nnx.eval_shape(lambda: make(jax.random.key(0))))


@functools.lru_cache
def stacks(config: ModelConfig) -> tuple[str, ...]:
  """Returns the name of each layer's stack of parameters; '' where there is but one.

  Args:
    config: The model's shape.
  """
  names: dict[str, str] = {}
  known: list[tuple[str, Any]] = []
  for kind in dict.fromkeys(config.layer_types):
    _, state = _definition(_layer, kind_config(config, kind))
    shapes = jax.tree.map(lambda x: x.shape, nnx.to_pure_dict(state))
    names[kind] = next((name for name, other in known if other == shapes), kind)
    known.append((names[kind], shapes))
  if len(set(names.values())) < 2:
    return ('',) * config.num_layers
  return tuple(names[kind] for kind in config.layer_types)


def places(config: ModelConfig) -> list[tuple[str, int]]:
  """Returns each layer's stack, and its index there.

  Args:
    config: The model's shape.
  """
  counts: dict[str, int] = {}
  layer_places = []
  for name in stacks(config):
    layer_places.append((name, counts.setdefault(name, 0)))
    counts[name] += 1
  return layer_places


def _stack(params: Params, name: str) -> Params:
  return params['layers'][name] if name else params['layers']


@functools.partial(jax.jit, static_argnums=0)
def init(config: ModelConfig, key: jax.Array) -> Params:
  """Makes random float32 parameters as nested dicts, layers stacked on axis 0.

  What adapters leave frozen has the type that they say.

  Args:
    config: The model's shape.
    key: A JAX random key.
  """

  def make(kind, config, key):
    return nnx.to_pure_dict(nnx.state(_make(kind, config, key)))

  ends_key, layers_key = jax.random.split(key)
  keys = jax.random.split(layers_key, config.num_layers)

  def stack(layer, keys):
    return jax.vmap(functools.partial(make, _layer, layer))(keys)

  names = stacks(config)
  tower = {}
  if config.vision is not None:
    from jaxrl.models.vision import vision_tower  # few models see images

    tower = {'vision': vision_tower.init(config, jax.random.fold_in(key, 0))}
  stacked = {
    name: stack(
      config.layer(names.index(name)),
      keys[np.array([i for i, other in enumerate(names) if other == name])]
      if name
      else keys,
    )
    for name in dict.fromkeys(names)
  }
  return lora.to_storage_dtype(
    config,
    make(EmbeddingAndHead, config, ends_key)
    | {'layers': stacked.get('', stacked)}
    | tower,
  )


def logical_axes(config: ModelConfig) -> Params:
  """Returns the parameter tree with each array replaced by the names of its axes.

  Args:
    config: The model's shape.
  """

  def names(kind, config, prefix):
    _, state = _definition(kind, config)
    is_variable = lambda x: isinstance(x, nnx.Variable)  # noqa: E731
    axes = jax.tree.map(
      lambda x: prefix + x.get_metadata('axes'), state, is_leaf=is_variable
    )
    return nnx.to_pure_dict(axes)

  stack_names = stacks(config)
  stacked = {
    name: names(_layer, config.layer(stack_names.index(name)), ('layers',))
    for name in dict.fromkeys(stack_names)
  }
  tower = {}
  if config.vision is not None:
    from jaxrl.models.vision import vision_tower  # few models see images

    tower = {'vision': vision_tower.logical_axes(config)}
  ends = names(EmbeddingAndHead, config, ())
  return ends | {'layers': stacked.get('', stacked)} | tower


def embedding_and_head(config: ModelConfig, params: Params) -> EmbeddingAndHead:
  """Returns the modules before and after the layers, with their parameters.

  Args:
    config: The model's shape.
    params: The parameters.
  """
  outer_names = params.keys() - {'layers', 'vision', 'head_adapters'}
  outer_params = {name: value for name, value in params.items() if name in outer_names}
  panels = {n: x['panels'] for n, x in outer_params.items() if 'panels' in x}
  tables = {name: {'table': x.unpack().T} for name, x in panels.items()}
  ends = nnx.merge(_definition(EmbeddingAndHead, config)[0], outer_params | tables)
  if 'embedding' in panels:
    ends.lookup = panels['embedding'].columns
  return ends


def _modules(part: Params) -> list[Params]:
  """Returns the parameters of each module of a part; experts have plain arrays too."""
  return [one for one in part.values() if isinstance(one, dict)]


def _has_codes(tree: Params) -> bool:
  """Returns whether any matrix is kept in 8 bits."""
  return 'codes' in tree or any(_has_codes(one) for one in _modules(tree))


def block(config: ModelConfig, weights: Params) -> layers.Block:
  """Returns one layer's module with its parameters.

  Args:
    config: The layer's shape, as `ModelConfig.layer` gives it.
    weights: Those of the layer; 'row_adapters' among them is an object whose
      `bind(layer)` gives each row of a batch adapters of its own.
  """
  joined, products, row_adapters = {}, {}, None
  if isinstance(weights, dict):
    weights = dict(weights)
    row_adapters = weights.pop('row_adapters', None)
    if _has_codes(weights):
      from jaxrl.models.decoding import eight_bit_weights  # few engines have them

      shapes = nnx.to_pure_dict(_definition(_layer, config)[1])
      weights = eight_bit_weights.decode(weights, shapes)
    parts = [weights.get(name, {}) for name in ('attention', 'mlp')]
    kinds = {kind for part in parts for one in _modules(part) for kind in one}
    if 'panels' in kinds or any(
      name in part for part in parts for name in ('qkv', 'gate_up')
    ):
      from jaxrl.models.decoding import joined_products  # engines alone have them

      weights, products = joined_products.unpack(config, weights)
      weights, joined = joined_products.part(config, weights, products)
    elif 'rows' in kinds:
      from jaxrl.models.decoding import output_major  # engines on CPUs have them

      weights, products = output_major.part(config, weights)
  layer = nnx.merge(_definition(_layer, config)[0], weights)
  for name, product in joined.items():
    getattr(layer, name).joined = product
  for (module, name), product in products.items():
    if hasattr(getattr(layer, module), name):  # not one of the joined
      getattr(getattr(layer, module), name).product = product
  if row_adapters is not None:
    row_adapters.bind(layer)
  return layer


def vocabulary_product(head: Params, hidden: jax.Array, is_arranged: bool) -> jax.Array:
  """Computes the product of final states with the LM head.

  Args:
    head: The head's `table` `[V, D]`, or its `panels`.
    hidden: `[…, D]`.
    is_arranged: Whether the parameters are those of `decoding.output_major`, which are
      multiplied in the type that they have.

  Returns:
    `[…, V]` float32.
  """
  if 'panels' in head:
    from kernels.native import row_product  # engines on CPUs have them

    return row_product.multiply(hidden, head['panels'])
  table = head['table']
  if is_arranged:
    from jaxrl.models.decoding import output_major  # engines on CPUs have them

    return output_major.product(table, hidden.astype(jnp.float32))
  table = table.astype(hidden.dtype)
  return jnp.einsum('...d,vd->...v', hidden, table).astype(jnp.float32)


# Parts of layers whose kernels enter only products with activations, in their type.
MULTIPLIED = ('q', 'k', 'v', 'o', 'gate', 'up', 'down')


def cast_kernels(params: Params, dtype: str) -> Params:
  """Casts the matrices of layers to the type of their products, if that is narrower.

  Layers cast them at use, each time that they run; this does it once for all of them.

  Args:
    params: The parameters, or a part of them under the same names.
    dtype: The type of activations and matrix products.
  """

  def cast(path: KeyPath, x: jax.Array) -> jax.Array:
    names = [getattr(key, 'key', None) for key in path]
    is_kernel = names[:1] == ['layers'] and names[-1] == 'kernel'
    is_wide = x.dtype.itemsize > jnp.dtype(dtype).itemsize
    return x.astype(dtype) if is_kernel and is_wide and names[-2] in MULTIPLIED else x

  return jax.tree_util.tree_map_with_path(cast, params)


def unstack(config: ModelConfig, params: Params) -> Params:
  """Replaces the stack of layers by a tuple; leaves a tuple as it is.

  Args:
    config: The model's shape.
    params: The parameters.
  """
  if isinstance(params['layers'], tuple):
    return params
  cut = [
    jax.tree.map(lambda x, i=i: x[i], _stack(params, name))
    for name, i in places(config)
  ]
  return params | {'layers': tuple(cut)}


def without_stack(params: Params) -> Params:
  """Returns parameters without their stack of layers; a tuple of layers stays."""
  return {k: x for k, x in params.items() if k != 'layers' or isinstance(x, tuple)}


@functools.lru_cache
def periods(kinds: tuple[Any, ...]) -> tuple[tuple[int, int, int], ...]:
  """Cuts a sequence into runs of repeated patterns, with few elements to compile.

  Args:
    kinds: The kinds of layers.

  Returns:
    Triples (start, period, repeats): the elements from `start` on are `repeats` times
    the first `period` of them.
  """
  length = len(kinds)
  # From each element on: elements to compile, runs, and the first run's shape.
  best = [(0, 0, 0, 0)] * (length + 1)
  for start in reversed(range(length)):
    candidates = []
    for period in range(1, min(MAX_PERIOD, length - start) + 1):
      end = start + period
      while end < length and kinds[end] == kinds[end - period]:
        end += 1
      for repeats in {1, (end - start) // period}:
        cost, runs, *_ = best[start + period * repeats]
        candidates.append((cost + period, runs + 1, period, repeats))
    best[start] = min(candidates)
  runs, start = [], 0
  while start < length:
    _, _, period, repeats = best[start]
    runs.append((start, period, repeats))
    start += period * repeats
  return tuple(runs)


MAX_PERIOD = 16  # layers of a pattern at most


def run_layers(
  config: ModelConfig,
  params: Params,
  x: jax.Array,
  body: Callable[[layers.Block, jax.Array, PyTree], tuple[jax.Array, PyTree]],
  rematerialise: remat.RematPolicy = 'none',
  unroll: int = 1,
  each: PyTree = None,
  after: Callable[[int, PyTree], PyTree] = lambda i, y: y,
  rounding: PyTree = None,
) -> tuple[jax.Array, PyTree]:
  """Runs `body(block, x, inputs) -> (x, y)` over the layers.

  Args:
    config: The model's shape.
    params: The parameters.
    x: The first input.
    body: What a layer does.
    rematerialise: A policy of `remat`.
    unroll: Layers per step of the scan.
    each: A tree of arrays `[L, …]`, of which each layer gets its own.
    after: `(layer's number, y) -> y`, run after a layer whose kind does not recur. It
      may keep what later layers read.
    rounding: The `BlockFormat` that matrices are rounded to, if any.

  Returns:
    x, and the ys: stacked, or, where layers are of several kinds, as tuples.
  """
  policy = remat.policy(rematerialise)

  def step_of(layer, *, scanned):
    def step(x, layer_slice):
      weights, inputs = layer_slice
      if rounding is not None:
        from jaxrl.models.decoding import eight_bit_weights  # few learners round

        weights = eight_bit_weights.rounded(weights, rounding)
      return body(block(layer, weights), x, inputs)

    if policy is None:
      return step
    return jax.checkpoint(step, policy=policy, prevent_cse=not scanned)

  is_cut = isinstance(params['layers'], tuple)
  kinds, are_alike = config.layer_configs, len(set(config.layer_types)) < 2
  if are_alike and not is_cut:
    step = step_of(kinds[0], scanned=True)
    return jax.lax.scan(step, x, (params['layers'], each), unroll=unroll)
  if is_cut or unroll >= config.num_layers:
    ys: list[PyTree] = []
    for i, weights in enumerate(unstack(config, params)['layers']):
      layer_inputs = jax.tree.map(lambda x, i=i: x[i], each)
      x, y = step_of(kinds[i], scanned=is_cut)(x, (weights, layer_inputs))
      ys.append(y if are_alike else after(i, y))
  else:
    x, ys = _run_periods(config, params, x, step_of, each, after)
  join = jnp.stack if are_alike else tuple
  return x, jax.tree.map(lambda *y: join(y), *ys)


def _run_periods(
  config: ModelConfig,
  params: Params,
  x: jax.Array,
  step_of: Callable[..., Callable[..., tuple[jax.Array, PyTree]]],
  each: PyTree,
  after: Callable[[int, PyTree], PyTree],
) -> tuple[jax.Array, list[PyTree]]:
  """Runs layers of several kinds, scanning repeated patterns of them.

  Args:
    config: The model's shape.
    params: The layers' parameters, stacked by kind.
    x: The input of the first layer.
    step_of: `(the layer's config, scanned=…) -> step(x, (weights, inputs)) -> (x, y)`.
    each: Further inputs of each layer.
    after: Changes the y of a layer, given its number.

  Returns:
    x, and the y of each layer.
  """
  kinds, at, ys = config.layer_configs, places(config), []
  for start, period, repeats in periods(config.layer_types):
    end = start + period * repeats
    names = [name for name, _ in at[start : start + period]]

    weights = {}
    for name in dict.fromkeys(names):
      first = next(i for other, i in at[start:end] if other == name)
      size = names.count(name) * repeats
      part = jax.tree.map(lambda x, a=first, n=size: x[a : a + n], _stack(params, name))
      weights[name] = _fold(part, repeats)

    def pattern(x, period_slice, start=start, names=names, scanned=repeats > 1):
      weights, inputs = period_slice
      outputs = []
      for i, name in enumerate(names):
        at = names[:i].count(name)
        step = step_of(kinds[start + i], scanned=scanned)
        one = jax.tree.map(lambda x, at=at: x[at], weights[name])
        x, y = step(x, (one, jax.tree.map(lambda x, i=i: x[i], inputs)))
        outputs.append(y if scanned else after(start + i, y))
      return x, outputs

    period_inputs = jax.tree.map(lambda x, s=start, e=end: x[s:e], each)
    xs = weights, _fold(period_inputs, repeats)
    if repeats == 1:
      x, period_outputs = pattern(x, jax.tree.map(lambda x: x[0], xs))
      ys.extend(period_outputs)
      continue
    x, period_outputs = jax.lax.scan(pattern, x, xs)
    for r in range(repeats):
      ys.extend(jax.tree.map(lambda y, r=r: y[r], period_outputs))
  return x, ys


def _fold(tree: PyTree, repeats: int) -> PyTree:
  """Reshapes `[repeats · n, …]` to `[repeats, n, …]`."""
  return jax.tree.map(lambda x: x.reshape(repeats, -1, *x.shape[1:]), tree)


def segment_positions(segment_ids: jax.Array) -> jax.Array:
  """Computes positions that start at 0 in each segment.

  Args:
    segment_ids: `[B, T]`.

  Returns:
    `[B, T]` int32.
  """
  time = jnp.arange(segment_ids.shape[1], dtype=jnp.int32)
  starts = segment_ids[:, 1:] != segment_ids[:, :-1]
  starts = jnp.pad(starts, ((0, 0), (1, 0)))
  return time - jax.lax.cummax(jnp.where(starts, time, 0), axis=1)


def at_previous(states: jax.Array, tree: TokenTree) -> jax.Array:
  """Returns the state that predicts each token of a tree.

  Args:
    states: `[B, T, D]`.
    tree: The tree of the rows.

  Returns:
    `[B, T, D]`, of any values where no token comes before.
  """
  columns = jnp.maximum(jnp.asarray(tree.previous), 0)
  return jnp.take_along_axis(states, columns[..., None], axis=1)


def shift_right(
  x: jax.Array, *, segment_ids: jax.Array, tree: TokenTree | None = None
) -> jax.Array:
  """Shifts next-token outputs right, so that index t describes token t.

  Args:
    x: `[B, T − 1, …]`; of a tree, `[B, T, …]` in their places.
    segment_ids: `[B, T]` int32.
    tree: The tree of the rows, if they are one.

  Returns:
    `[B, T, …]`, 0 at the first token of a sequence and at padding.
  """
  if tree is not None:
    has_output = jnp.asarray(tree.previous) >= 0
    has_output = has_output.reshape(has_output.shape + (1,) * (x.ndim - 2))
    return jnp.where(has_output, x, jnp.zeros((), x.dtype))
  same = (segment_ids[:, 1:] == segment_ids[:, :-1]) & (segment_ids[:, 1:] != 0)
  has_output = same.reshape(same.shape + (1,) * (x.ndim - 2))
  x = jnp.where(has_output, x, jnp.zeros((), x.dtype))
  return jnp.pad(x, ((0, 0), (1, 0), *((0, 0),) * (x.ndim - 2)))
