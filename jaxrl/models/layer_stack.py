"""The layer stack: modules as functions of a parameter tree, layers scanned."""

import functools
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
from flax import nnx

from jaxrl.call_strings import ComponentCall
from jaxrl.models import layers, lora, remat
from jaxrl.models.model_config import ModelConfig
from jaxrl.types import Params


class EmbeddingAndHead(nnx.Module):
  """The modules before and after the layers."""

  def __init__(self, config: ModelConfig, rngs: nnx.Rngs):
    self.embedding = layers.Embedding(config, rngs)
    self.norm = layers.RMSNorm(config.hidden_size, config.rms_norm_eps)
    if not config.tie_embeddings:
      self.lm_head = layers.Embedding(config, rngs, config.adapters('lm_head'))
    if config.value_head:
      self.value_head = layers.ValueHead(config)


def _make(kind: type, config: ModelConfig, key: jax.Array) -> nnx.Module:
  return kind(config, nnx.Rngs(params=key))


@functools.lru_cache
def _definition(kind: type, config: ModelConfig) -> tuple[Any, Any]:
  """The module's graph and its abstract state."""
  make = functools.partial(_make, kind, config)
  return nnx.split(nnx.eval_shape(lambda: make(jax.random.key(0))))


@functools.partial(jax.jit, static_argnums=0)
def init(config: ModelConfig, key: jax.Array) -> Params:
  """Makes random float32 parameters as nested dicts, layers stacked on axis 0.

  What adapters leave frozen has the type that they say.

  Args:
    config: The model's shape.
    key: A JAX random key.
  """

  def make(kind, key):
    return nnx.to_pure_dict(nnx.state(_make(kind, config, key)))

  ends_key, layers_key = jax.random.split(key)
  keys = jax.random.split(layers_key, config.num_layers)
  stacked = jax.vmap(functools.partial(make, layers.Block))(keys)
  return lora.to_storage_dtype(
    config, make(EmbeddingAndHead, ends_key) | {'layers': stacked}
  )


def logical_axes(config: ModelConfig) -> Params:
  """Returns the parameter tree with each array replaced by the names of its axes.

  Args:
    config: The model's shape.
  """

  def names(kind, prefix):
    _, state = _definition(kind, config)
    is_variable = lambda x: isinstance(x, nnx.Variable)  # noqa: E731
    axes = jax.tree.map(
      lambda x: prefix + x.get_metadata('axes'), state, is_leaf=is_variable
    )
    return nnx.to_pure_dict(axes)

  return names(EmbeddingAndHead, ()) | {'layers': names(layers.Block, ('layers',))}


def embedding_and_head(config: ModelConfig, params: Params) -> EmbeddingAndHead:
  """Returns the modules before and after the layers, with their parameters.

  Args:
    config: The model's shape.
    params: The parameters.
  """
  outer_params = {name: value for name, value in params.items() if name != 'layers'}
  return nnx.merge(_definition(EmbeddingAndHead, config)[0], outer_params)


def block(config: ModelConfig, weights: Params) -> layers.Block:
  """Returns one layer's module with its parameters.

  Args:
    config: The model's shape.
    weights: Those of the layer.
  """
  return nnx.merge(_definition(layers.Block, config)[0], weights)


def unstack(config: ModelConfig, params: Params) -> Params:
  """Replaces the stack of layers by a tuple; leaves a tuple as it is.

  Args:
    config: The model's shape.
    params: The parameters.
  """
  if isinstance(params['layers'], tuple):
    return params
  cut = [
    jax.tree.map(lambda x, i=i: x[i], params['layers'])
    for i in range(config.num_layers)
  ]
  return params | {'layers': tuple(cut)}


def run_layers(
  config: ModelConfig,
  params: Params,
  x: jax.Array,
  body: Callable[[layers.Block, jax.Array, Any], tuple[jax.Array, Any]],
  rematerialise: ComponentCall | str = 'none',
  unroll: int = 1,
  each: Any = None,
) -> tuple[jax.Array, Any]:
  """Runs `body(block, x, own) -> (x, y)` over the layers.

  Args:
    config: The model's shape.
    params: The parameters.
    x: The first input.
    body: What a layer does.
    rematerialise: A policy of `remat`.
    unroll: Layers per step of the scan.
    each: A tree of arrays `[L, …]`, of which each layer gets its own.

  Returns:
    x, and the ys stacked.
  """

  def step(x, given):
    weights, own = given
    return body(block(config, weights), x, own)

  policy = remat.policy(rematerialise)
  if policy is not None:
    step = jax.checkpoint(step, policy=policy, prevent_cse=False)
  if not isinstance(params['layers'], tuple):
    return jax.lax.scan(step, x, (params['layers'], each), unroll=unroll)
  ys = []
  for i, weights in enumerate(params['layers']):
    x, y = step(x, (weights, jax.tree.map(lambda own, i=i: own[i], each)))
    ys.append(y)
  return x, jax.tree.map(lambda *y: jnp.stack(y), *ys)


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
