"""LoRA (arXiv 2106.09685): low-rank adapters beside frozen linear layers.

A layer with kernel W gets A, random, and B, zero at first: x·W + (α / rank)·(x·A)·B. A
model's `config.lora` says which layers have them. In the parameter tree they lie beside
the kernel as lora_a `[*inputs, rank]` and lora_b `[rank, *outputs]`, in float32. Each
expert has its own pair, `[E, …]`; lm_head alone scores by table + (α / rank)·(A·B)ᵀ,
because its table is `[outputs, inputs]`. Adapters and a value head are trained; all
else is frozen. Where `lora` is None everything is trained.

A transfer is what engines get that merge adapters themselves: the base parameters, the
adapters and the scale of their product. The weight store only sends what has changed
since the previous version, so it sends the base once and only the adapters afterwards.
"""

import dataclasses
import functools
from collections.abc import Callable
from typing import Any, Literal

import jax
import jax.numpy as jnp
import numpy as np
from jax.tree_util import KeyPath

from jaxrl.component_table import ComponentTable
from jaxrl.models.model_config import LORA_TARGETS, Lora, ModelConfig
from jaxrl.options import unknown_name_error
from jaxrl.types import AnyArray, Array, Params

ADAPTERS = ('lora_a', 'lora_b')
SCALE_KEY = 'lora_scale'  # float32 `[1]`, beside the branches of a transfer


def lora_adapters(
  *,
  rank: int = 16,
  alpha: float = 32.0,
  targets: str = 'q,k,v,o,gate,up,down',
  base: Literal['float32', 'bfloat16'] = 'float32',
  send: Literal['merged', 'adapters'] = 'merged',
) -> Lora:
  """Describes adapters for the layers `targets`, scaled by alpha / rank.

  Args:
    rank: Their rank.
    alpha: Their scale times the rank.
    targets: Names of layers, with commas between.
    base: The type that frozen kernels and tables are kept in.
    send: What engines get: merged weights or, once they have the base, adapters to
      merge themselves.

  Raises:
    ValueError: If a layer is unknown, or a number not above 0.
  """
  chosen = tuple(name.strip() for name in targets.split(','))
  for name in chosen:
    if name not in LORA_TARGETS:
      raise unknown_name_error(
        name, LORA_TARGETS, 'linear layer', f'targets={targets!r}'
      )
  if rank < 1 or alpha <= 0:
    raise ValueError(f'rank={rank} and alpha={alpha} must be above 0')
  ordered = tuple(name for name in LORA_TARGETS if name in chosen)
  return Lora(rank, float(alpha), ordered, base, send)


ADAPTER_KINDS = ComponentTable('kind of adapter', 'model.lora', {'lora': lora_adapters})


def is_trainable(path: KeyPath) -> bool:
  """Returns True if the parameter at a path is trained.

  Args:
    path: JAX's path to it.
  """
  return path[-1].key in ADAPTERS or path[0].key == 'value_head'


def trains_all(config: ModelConfig) -> bool:
  """Returns whether every parameter of a model is trained.

  Args:
    config: The model's shape.
  """
  tower = config.vision
  return config.lora is None and (tower is None or tower.train == 'full')


def is_trained(config: ModelConfig, path: KeyPath) -> bool:
  """Returns True if the parameter of a model at a path is trained.

  Args:
    config: The model's shape.
    path: JAX's path to it. The features of images, in the place of a tower, count as
      trained if something in the tower is.
  """
  if path[0].key != 'vision' or config.vision is None:
    return config.lora is None or is_trainable(path)
  how, is_feature = config.vision.train, path[-1].key in ('features', 'deep')
  return how == 'full' or (how == 'lora' and (is_feature or is_trainable(path)))


def trainable_params(config: ModelConfig, params: Params) -> Params:
  """Returns the trained part of the parameters, a tree with fewer branches.

  Args:
    config: The model's shape.
    params: The parameters.
  """
  if trains_all(config):
    return params
  return _part(params, functools.partial(is_trained, config))


def _part(params: Params, is_chosen: Callable[[KeyPath], bool]) -> Params:
  """Returns the subtree of the parameters whose paths are chosen."""
  selected: Params = {}
  for path, leaf in jax.tree_util.tree_leaves_with_path(params):
    if is_chosen(path):
      branch = selected
      for key in path[:-1]:
        branch = branch.setdefault(key.key, {})
      branch[path[-1].key] = leaf
  return selected


def merge_trainable(config: ModelConfig, params: Params, part: Params) -> Params:
  """Returns the parameters with their trained part replaced.

  Args:
    config: The model's shape.
    params: The parameters.
    part: Of the structure that `trainable_params` returns.
  """
  return part if trains_all(config) else _over(params, part)


def _over(tree: Params, part: Params) -> Params:
  return tree | {
    name: _over(tree[name], value) if isinstance(value, dict) else value
    for name, value in part.items()
  }


def without(params: Params) -> Params:
  """Returns the parameters without any adapter.

  Args:
    params: The parameters.
  """
  return {
    name: without(value) if isinstance(value, dict) else value
    for name, value in params.items()
    if name not in ADAPTERS
  }


def to_storage_dtype(config: ModelConfig, params: Params) -> Params:
  """Casts parameters to the types that they are kept in.

  Args:
    config: The model's shape.
    params: The parameters.
  """
  if config.lora is None or config.lora.base == 'float32':
    return params

  def cast(path: KeyPath, x: jax.Array) -> jax.Array:
    narrow = path[-1].key in ('kernel', 'table') and not is_trainable(path)
    return x.astype(config.lora.base) if narrow and config.lora else x

  return jax.tree_util.tree_map_with_path(cast, params)


def merged(config: ModelConfig, params: Params, dtype: str = 'float32') -> Params:
  """Merges adapters into their kernels: W + (α / rank)·A·B, computed in float32.

  Rounding aside, the forward pass stays the same.

  Args:
    config: The model's shape.
    params: The parameters.
    dtype: The type of the model's activations; a merged kernel has W's type or this,
      whichever is wider. A router's stays float32, in which it scores.

  Returns:
    The parameters of the model without adapters.
  """
  adapters = config.lora
  return params if adapters is None else merge_with_scale(adapters.scale, params, dtype)


def merge_with_scale(scale: AnyArray, params: Params, dtype: str = 'float32') -> Params:
  """Merges adapters as `merged` does.

  Args:
    scale: α / rank, a number or a float32 scalar.
    params: The parameters.
    dtype: As in `merged`.
  """

  def merge(tree: Params, layer: str = '') -> Params:
    merged_tree = {
      name: merge(x, name) if isinstance(x, dict) else x for name, x in tree.items()
    }
    if 'lora_b' not in merged_tree:
      return merged_tree
    a, b = merged_tree.pop('lora_a'), merged_tree.pop('lora_b')
    name = kernel_of(merged_tree)
    matmul = functools.partial(jnp.matmul, precision='highest')
    wide = merged_tree[name].astype(jnp.float32)
    wide += scale * product(a, b, wide.shape, name == 'table', matmul)
    kernel_dtype = jnp.promote_types(merged_tree[name].dtype, dtype)
    return merged_tree | {
      name: wide if layer == 'router' else wide.astype(kernel_dtype)
    }

  return merge(params)


def kernel_of(layer: Params) -> str:
  """Returns the name of what adapters lie beside.

  Args:
    layer: A layer's parameters.
  """
  return 'kernel' if 'kernel' in layer else 'table'


def product(
  a: AnyArray,
  b: AnyArray,
  shape: tuple[int, ...],
  is_table: bool,
  matmul: Callable[..., Array],
) -> AnyArray:
  """Computes A·B in the shape of its kernel.

  The first axes, of layers and of experts, are those that A, B and kernel share.

  Args:
    a: A.
    b: B.
    shape: The kernel's shape.
    is_table: Whether the kernel is `[outputs, inputs]`.
    matmul: numpy's or JAX's.
  """
  lead = a.ndim + b.ndim - len(shape) - 2
  rank = b.shape[lead]
  left = a.reshape(*a.shape[:lead], -1, rank)
  right = b.reshape(*b.shape[:lead], rank, -1)
  if is_table:
    left, right = right.T, left.T
  return matmul(left, right).reshape(shape)


def base_config(config: ModelConfig) -> ModelConfig:
  """Returns the shape of the model without adapters.

  Args:
    config: The model's shape.
  """
  return dataclasses.replace(config, lora=None)


def add_adapters(model: Any, params: Params, key: jax.Array) -> Params:
  """Adds fresh adapters to the parameters of a model without any.

  Those that exist already stay. The model computes what it did before, bit for bit.

  Args:
    model: The model; its config has `lora`.
    params: The parameters.
    key: A JAX random key.
  """
  config = model.config
  if config.lora is None or any(
    path[-1].key in ADAPTERS for path, _ in jax.tree_util.tree_leaves_with_path(params)
  ):
    return params

  def fresh(key: jax.Array) -> Params:
    return _part(model.init(key), lambda path: path[-1].key in ADAPTERS)

  shapes = any(isinstance(x, jax.ShapeDtypeStruct) for x in jax.tree.leaves(params))
  part = jax.eval_shape(fresh, key) if shapes else jax.jit(fresh)(key)
  return _over(params, part)


def fingerprint(params: Params, config: ModelConfig | None = None) -> jax.Array:
  """Hashes every frozen bit, wherever on a mesh it lies.

  Args:
    params: The parameters.
    config: The model's shape; None for one of which adapters are trained.

  Returns:
    uint32.
  """
  total = jnp.uint32(0)
  for i, (path, x) in enumerate(jax.tree_util.tree_leaves_with_path(params)):
    if not (is_trained(config, path) if config else is_trainable(path)):
      word = jnp.uint32 if x.dtype == jnp.float32 else jnp.uint16
      bits = jax.lax.bitcast_convert_type(x, word).astype(jnp.uint32)
      total += jnp.uint32(2 * i + 1) * jnp.sum(bits, dtype=jnp.uint32)
  return total


def make_transfer(config: ModelConfig, params: Params) -> Params:
  """Returns the parameters of a model with adapters, as engines get them.

  Args:
    config: The model's shape.
    params: The parameters.
  """
  assert config.lora is not None
  return params | {SCALE_KEY: np.full(1, config.lora.scale, np.float32)}


def is_transfer(params: Params) -> bool:
  """Returns True if parameters come from `make_transfer`.

  Args:
    params: The parameters.
  """
  return SCALE_KEY in params


def merge_transfer(params: Params, dtype: str) -> Params:
  """Merges the adapters of a transfer; see `merge_with_scale`.

  Args:
    params: From `make_transfer`.
    dtype: The type of the model's activations.

  Returns:
    The parameters of the model without adapters.
  """
  base = {name: branch for name, branch in params.items() if name != SCALE_KEY}
  return merge_with_scale(params[SCALE_KEY][0], base, dtype)


@dataclasses.dataclass(frozen=True)
class _Kernel:
  """A stack of kernels, each merged when it is looked at, float32 and by numpy.

  A table is not a stack: its index is ().
  """

  kernel: np.ndarray
  lora_a: np.ndarray
  lora_b: np.ndarray
  scale: np.float32
  is_table: bool

  def __getitem__(self, index: Any) -> np.ndarray:
    kernel, a, b = self.kernel[index], self.lora_a[index], self.lora_b[index]
    change = product(a, b, kernel.shape, self.is_table, np.matmul)
    return kernel.astype(np.float32) + self.scale * change


def merge_transfer_on_host(params: Params) -> Params:
  """Merges numpy arrays as `merge_transfer` does, without room for a second model.

  A stack of kernels with adapters merges a layer or more when it is indexed.

  Args:
    params: From `make_transfer`.
  """
  scale = np.float32(params[SCALE_KEY][0])

  def walk(tree: Params) -> Params:
    merged_tree = {
      name: walk(x) if isinstance(x, dict) else x for name, x in tree.items()
    }
    if 'lora_b' in merged_tree:
      a, b = (merged_tree.pop(name) for name in ADAPTERS)
      name = kernel_of(merged_tree)
      merged_tree[name] = _Kernel(merged_tree[name], a, b, scale, name == 'table')
    return merged_tree

  return walk({name: branch for name, branch in params.items() if name != SCALE_KEY})
