"""The vision tower of Qwen3-VL (arXiv 2511.21631): patches → features of images.

Its parameters are the branch 'vision' of the parameter tree: the embedding of patches,
learned positions, layers (stacked on axis 0), and the mergers that make features, of
the last layer's output ('merger') and of those between ('deepstack', stacked).
"""

import functools
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
from flax import nnx

from jaxrl.models import initializers, remat, rope
from jaxrl.models.layers import Linear
from jaxrl.models.model_config import Lora, ModelConfig
from jaxrl.models.vision.image_places import PatchRows
from jaxrl.types import Params, PyTree

EPS = 1e-6  # of the norms
ROPE_THETA = 10000.0
QUERY_BLOCK = 512  # patches of which the scores are in memory at a time
NEGATIVE = -1e30  # finite, so that padding gives numbers, not NaN


class LayerNorm(nnx.Module):
  """Computes (x − mean) / std · scale + bias over the last axis, in float32."""

  def __init__(self, width: int):
    self.scale = nnx.Param(jnp.ones((width,)), axes=(None,))
    self.bias = nnx.Param(jnp.zeros((width,)), axes=(None,))

  def __call__(self, x: jax.Array) -> jax.Array:
    """Normalises the last axis."""
    wide = x.astype(jnp.float32)
    wide -= wide.mean(-1, keepdims=True)
    wide *= jax.lax.rsqrt((wide * wide).mean(-1, keepdims=True) + EPS)
    return (wide * self.scale[...] + self.bias[...]).astype(x.dtype)


class TwoLayers(nnx.Module):
  """Computes down(f(up(x))), both with biases."""

  def __init__(
    self,
    sizes: tuple[int, int, int],
    activation: Callable[[jax.Array], jax.Array],
    rngs: nnx.Rngs,
    adapters: Lora | None,
  ):
    into, inner, out = ((size,) for size in sizes)
    self.up = Linear(into, inner, ('embed', 'mlp'), rngs, True, adapters)
    self.down = Linear(inner, out, ('mlp', 'embed'), rngs, True, adapters)
    self.activation = activation

  def __call__(self, x: jax.Array) -> jax.Array:
    """Applies both."""
    return self.down(self.activation(self.up(x)))


class TowerLayer(nnx.Module):
  """Attention within images, and an MLP."""

  def __init__(self, config: ModelConfig, rngs: nnx.Rngs):
    vision, adapters = _vision(config), tower_adapters(config)
    width, heads = vision.hidden_size, vision.num_heads
    each = heads, width // heads
    axes = ('embed', None, 'heads', None)
    self.attention_norm, self.mlp_norm = LayerNorm(width), LayerNorm(width)
    self.qkv = Linear((width,), (3, *each), axes, rngs, True, adapters)
    self.out = Linear(each, (width,), ('heads', None, 'embed'), rngs, True, adapters)
    sizes = width, vision.intermediate_size, width
    gelu = functools.partial(jax.nn.gelu, approximate=True)
    self.mlp = TwoLayers(sizes, gelu, rngs, adapters)

  def __call__(
    self, x: jax.Array, image_ids: jax.Array, rotation: rope.Rotation
  ) -> jax.Array:
    """Runs the layer.

    Args:
      x: `[R, L, W]`.
      image_ids: `[R, L]` int32.
      rotation: Of the patches' places.

    Returns:
      `[R, L, W]`.
    """
    q, k, v = jnp.moveaxis(self.qkv(self.attention_norm(x)), -3, 0)
    q, k = (rope.rotate(y.astype(jnp.float32), *rotation) for y in (q, k))
    x = x + self.out(attend(q.astype(v.dtype), k.astype(v.dtype), v, image_ids))
    return x + self.mlp(self.mlp_norm(x))


class PatchMerger(nnx.Module):
  """Makes one feature of several patches, normed before or after they are joined."""

  def __init__(self, config: ModelConfig, rngs: nnx.Rngs, norm_joined: bool):
    vision = _vision(config)
    width = vision.hidden_size * vision.merged
    gelu = functools.partial(jax.nn.gelu, approximate=False)
    self.norm = LayerNorm(width if norm_joined else vision.hidden_size)
    sizes = width, width, config.hidden_size
    self.mlp = TwoLayers(sizes, gelu, rngs, tower_adapters(config))
    self.norm_joined, self.width = norm_joined, width

  def __call__(self, x: jax.Array) -> jax.Array:
    """Maps patches `[R, L, W]` to features `[R · L / merged, D]`."""
    if self.norm_joined:
      return self.mlp(self.norm(x.reshape(-1, self.width)))
    return self.mlp(self.norm(x).reshape(-1, self.width))


class TowerEnds(nnx.Module):
  """What comes before and after the tower's layers."""

  def __init__(self, config: ModelConfig, rngs: nnx.Rngs):
    vision, width = _vision(config), (_vision(config).hidden_size,)
    axes = (None, None, None, None, 'embed')
    self.patch_embedding = Linear(vision.patch_shape, width, axes, rngs, bias=True)
    shape = vision.num_positions, vision.hidden_size
    self.positions = initializers.normal_param(rngs, shape, (None, None))
    self.merger = PatchMerger(config, rngs, norm_joined=False)


def _vision(config: ModelConfig) -> Any:
  assert config.vision is not None  # the caller has checked
  return config.vision


def tower_adapters(config: ModelConfig) -> Lora | None:
  """Returns the adapters of the tower's layers, or None.

  Args:
    config: The model's shape.
  """
  return config.lora if _vision(config).train == 'lora' else None


def _kinds(config: ModelConfig) -> dict[str, tuple[Callable[..., nnx.Module], int]]:
  """Returns the stacked modules: how to make one, and how many there are."""
  vision = _vision(config)
  deep = functools.partial(PatchMerger, norm_joined=True)
  return {
    'layers': (TowerLayer, vision.num_layers),
    'deepstack': (deep, len(vision.deepstack_layers)),
  }


def init(config: ModelConfig, key: jax.Array) -> Params:
  """Makes random float32 parameters of the tower.

  Args:
    config: The model's shape.
    key: A JAX random key.
  """

  def make(kind, key):
    module = kind(config, rngs=nnx.Rngs(params=key))
    return nnx.to_pure_dict(nnx.state(module))

  params = make(TowerEnds, jax.random.fold_in(key, 0))
  for i, (name, (kind, count)) in enumerate(_kinds(config).items()):
    if count:
      keys = jax.random.split(jax.random.fold_in(key, 1 + i), count)
      params[name] = jax.vmap(functools.partial(make, kind))(keys)
  return params


def logical_axes(config: ModelConfig) -> Params:
  """Returns the tower's tree with each array replaced by the names of its axes.

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

  stacked = {
    name: names(kind, ('layers',)) for name, (kind, n) in _kinds(config).items() if n
  }
  return names(TowerEnds, ()) | stacked


def _definition(kind: Callable[..., nnx.Module], config: ModelConfig) -> Any:
  """Returns the module's graph and its abstract state."""
  make = lambda: kind(config, rngs=nnx.Rngs(params=jax.random.key(0)))  # noqa: E731
  return nnx.split(nnx.eval_shape(make))


def attend(q: jax.Array, k: jax.Array, v: jax.Array, image_ids: jax.Array) -> jax.Array:
  """Computes attention among the patches of each image.

  Args:
    q: `[R, L, H, d]`.
    k: `[R, L, H, d]`.
    v: `[R, L, H, d]`.
    image_ids: `[R, L]` int32.

  Returns:
    `[R, L, H, d]`.
  """
  scale = q.shape[-1] ** -0.5

  def block(query_block: tuple[jax.Array, jax.Array]) -> jax.Array:
    queries, ids = query_block
    scores = jnp.einsum('rqhd,rkhd->rhqk', queries, k).astype(jnp.float32) * scale
    is_own = ids[:, None, :, None] == image_ids[:, None, None, :]
    shares = jax.nn.softmax(jnp.where(is_own, scores, NEGATIVE), axis=-1)
    return jnp.einsum('rhqk,rkhd->rqhd', shares.astype(v.dtype), v)

  length = q.shape[1]
  if length <= QUERY_BLOCK:
    return block((q, image_ids))

  def cut(x: jax.Array) -> jax.Array:
    blocks = x.reshape(x.shape[0], -1, QUERY_BLOCK, *x.shape[2:])
    return jnp.moveaxis(blocks, 1, 0)

  out = jax.lax.map(jax.checkpoint(block), (cut(q), cut(image_ids)))
  return jnp.moveaxis(out, 0, 1).reshape(q.shape)


def features(
  config: ModelConfig,
  params: Params,
  rows: PatchRows,
  *,
  dtype: str = 'float32',
  rematerialise: remat.RematPolicy = 'none',
  constrain: Callable[..., jax.Array] = lambda x, *names: x,
) -> Params:
  """Computes the features of images.

  Args:
    config: The model's shape.
    params: The tower's parameters.
    rows: The images.
    dtype: The type of activations.
    rematerialise: A policy of `remat`.
    constrain: Places activations on a mesh.

  Returns:
    'features' `[M, D]`, M the patches of all rows over those that are merged, and
    'deep' `[n, M, D]`, for the states after the first n layers of the language model.
  """
  vision = _vision(config)
  stacked = {name: params[name] for name in _kinds(config) if name in params}
  outer = {name: x for name, x in params.items() if name not in stacked}
  ends = nnx.merge(_definition(TowerEnds, config)[0], outer)
  shape = rows.image_ids.shape
  patches = rows.patches.astype(dtype).reshape(*shape, *vision.patch_shape)
  x = ends.patch_embedding(patches)
  learned = ends.positions[...][rows.grid_index]  # [R, L, 4, W]
  x = x + (learned * rows.grid_weights[..., None]).sum(2).astype(x.dtype)
  x = constrain(x, 'batch', None, None)
  rotation, graph = _rotation(config, rows.places), _definition(TowerLayer, config)[0]

  def step(x: jax.Array, weights: Params) -> tuple[jax.Array, PyTree]:
    x = nnx.merge(graph, weights)(x, rows.image_ids, rotation)
    return constrain(x, 'batch', None, None), None

  policy = remat.policy(rematerialise)
  if policy is not None:
    step = jax.checkpoint(step, policy=policy, prevent_cse=False)
  deep, start = [], 0
  for number, layer in enumerate(vision.deepstack_layers):
    x = _run(step, x, stacked['layers'], start, layer + 1)
    one = jax.tree.map(lambda y, i=number: y[i], stacked['deepstack'])
    kind = _kinds(config)['deepstack'][0]
    deep.append(nnx.merge(_definition(kind, config)[0], one)(x))
    start = layer + 1
  x = _run(step, x, stacked['layers'], start, vision.num_layers)
  merged = ends.merger(x)
  none = jnp.zeros((0, *merged.shape), merged.dtype)
  whole = {'features': merged, 'deep': jnp.stack(deep) if deep else none}
  return jax.tree.map(lambda y: constrain(y, *(None,) * y.ndim), whole)


def _run(step: Any, x: jax.Array, layers: Params, start: int, end: int) -> jax.Array:
  """Runs the layers from `start` to before `end`."""
  if start == end:
    return x
  return jax.lax.scan(step, x, jax.tree.map(lambda y: y[start:end], layers))[0]


def _rotation(config: ModelConfig, places: jax.Array) -> rope.Rotation:
  """Returns the rotation of patches: half of the frequencies by row, half by column."""
  vision = _vision(config)
  size = vision.hidden_size // vision.num_heads // 2
  inverse = 1.0 / ROPE_THETA ** (jnp.arange(0, size, 2, dtype=jnp.float32) / size)
  angles = places[..., None].astype(jnp.float32) * inverse  # [R, L, 2, size / 2]
  angles = angles.reshape(*places.shape[:-1], size)
  return jnp.cos(angles), jnp.sin(angles)


def encode(model: Any, params: Params, rows: PatchRows | None) -> Params:
  """Returns the parameters with the features of images in the tower's place.

  A model takes them where it is told the places of images.

  Args:
    model: The model, a `TransformerLM`.
    params: Its parameters.
    rows: The images; None leaves the parameters as they are.
  """
  if rows is None:
    return params
  run = functools.partial(
    features,
    model.config,
    dtype=model.dtype,
    rematerialise=model.remat,
    constrain=model.constrain,
  )
  encoded = run(params['vision'], rows)
  if model.config.vision.train == 'frozen':
    encoded = jax.lax.stop_gradient(encoded)
  return params | {'vision': encoded}
