"""LoRA (arXiv 2106.09685): low-rank adapters beside frozen linear layers.

A layer with kernel W gets A, random, and B, zero at first: x·W + (α / rank)·(x·A)·B.
A model's `config.lora` says where they are; in the tree of parameters they lie beside
the kernel as lora_a `[*inputs, rank]` and lora_b `[rank, *outputs]`, in float32. Each
expert has its own pair, `[E, …]`; lm_head alone scores by table + (α / rank)·(A·B)ᵀ,
for its table is `[outputs, inputs]`. What learns are they and a value head; all else is
frozen. Functions here are of such trees, and of any tree where `lora` is None: then all
of it learns.
"""

import dataclasses
import functools
from collections.abc import Callable
from typing import Any, Literal

import jax
import jax.numpy as jnp

from jaxrl.models.config import LORA_TARGETS, Lora, ModelConfig
from jaxrl.signature import ConfigError, call, unknown
from jaxrl.types import Params

ADAPTERS = ('lora_a', 'lora_b')
KEY = 'model.lora'


def lora(
  *,
  rank: int = 16,
  alpha: float = 32.0,
  targets: str = 'q,k,v,o,gate,up,down',
  base: Literal['float32', 'bfloat16'] = 'float32',
  send: Literal['merged', 'adapters'] = 'merged',
) -> Lora:
  """Adapters of `rank` for the layers `targets`, scaled by alpha / rank.

  base: of what the frozen kernels and tables are kept in. send: what engines are given,
  merged weights or, once they have the base, adapters to merge themselves.
  """
  where, chosen = f'--config.{KEY}', tuple(name.strip() for name in targets.split(','))
  for name in chosen:
    if name not in LORA_TARGETS:
      raise unknown(name, LORA_TARGETS, 'linear layer', f'{where}: targets={targets!r}')
  if rank < 1 or alpha <= 0:
    raise ConfigError(f'{where}: rank={rank} and alpha={alpha} must be above 0')
  ordered = tuple(name for name in LORA_TARGETS if name in chosen)
  return Lora(rank, float(alpha), ordered, base, send)


def parse(text: str) -> Lora | None:
  """The adapters that a call string names; None for ''. Raises ConfigError."""
  return call(text, {'lora': lora}, 'kind of adapter', KEY) if text else None


def learns(path: Any) -> bool:
  """Whether what lies there, by JAX's path to it, is not frozen."""
  return path[-1].key in ADAPTERS or path[0].key == 'value_head'


def trained(config: ModelConfig, params: Params) -> Params:
  """The part of `params` that learns, as a tree with fewer branches."""
  if config.lora is None:
    return params
  found: Params = {}
  for path, leaf in jax.tree_util.tree_leaves_with_path(params):
    if learns(path):
      branch = found
      for key in path[:-1]:
        branch = branch.setdefault(key.key, {})
      branch[path[-1].key] = leaf
  return found


def join(config: ModelConfig, params: Params, part: Params) -> Params:
  """`params` with `part`, of the structure that `trained` gives, in its place."""
  return part if config.lora is None else _over(params, part)


def _over(tree: Params, part: Params) -> Params:
  return tree | {
    name: _over(tree[name], value) if isinstance(value, dict) else value
    for name, value in part.items()
  }


def without(params: Params) -> Params:
  """`params` without any adapter."""
  return {
    name: without(value) if isinstance(value, dict) else value
    for name, value in params.items()
    if name not in ADAPTERS
  }


def stored(config: ModelConfig, params: Params) -> Params:
  """`params` in the precision that they are kept in."""
  if config.lora is None or config.lora.base == 'float32':
    return params

  def cast(path: Any, x: jax.Array) -> jax.Array:
    narrow = path[-1].key in ('kernel', 'table') and not learns(path)
    return x.astype(config.lora.base) if narrow and config.lora else x

  return jax.tree_util.tree_map_with_path(cast, params)


def merged(config: ModelConfig, params: Params, dtype: str = 'float32') -> Params:
  """The parameters of the model without adapters that computes the same.

  W + (α / rank)·A·B in float32, then in W's own type, or `dtype`, that of the model's
  activations, where that is wider; a router's stay in float32, in which it scores.
  Rounding apart, it is the same forward pass.
  """
  own = config.lora
  return params if own is None else merge_by(own.scale, params, dtype)


def merge_by(scale: Any, params: Params, dtype: str = 'float32') -> Params:
  """As `merged`. scale: α / rank, a number or a float32 scalar."""

  def merge(tree: Params, layer: str = '') -> Params:
    made = {
      name: merge(x, name) if isinstance(x, dict) else x for name, x in tree.items()
    }
    if 'lora_b' not in made:
      return made
    a, b = made.pop('lora_a'), made.pop('lora_b')
    name = kernel_of(made)
    matmul = functools.partial(jnp.matmul, precision='highest')
    wide = made[name].astype(jnp.float32)
    wide += scale * product(a, b, wide.shape, name == 'table', matmul)
    own = jnp.promote_types(made[name].dtype, dtype)
    return made | {name: wide if layer == 'router' else wide.astype(own)}

  return merge(params)


def kernel_of(layer: Params) -> str:
  """The name of what adapters lie beside."""
  return 'kernel' if 'kernel' in layer else 'table'


def product(
  a: Any, b: Any, shape: tuple[int, ...], is_table: bool, matmul: Callable[..., Any]
) -> Any:
  """A·B in the `shape` of its kernel, which is_table has as `[outputs, inputs]`.

  The first axes, of layers and of experts, are those that A, B and kernel share.
  """
  lead = a.ndim + b.ndim - len(shape) - 2
  rank = b.shape[lead]
  left = a.reshape(*a.shape[:lead], -1, rank)
  right = b.reshape(*b.shape[:lead], rank, -1)
  if is_table:
    left, right = right.T, left.T
  return matmul(left, right).reshape(shape)


def bare(config: ModelConfig) -> ModelConfig:
  """The shape of the model without adapters."""
  return dataclasses.replace(config, lora=None)


def add(model: Any, params: Params, key: jax.Array) -> Params:
  """`params` of the bare model with fresh adapters of `model`, which has `lora`.

  Those that are there already stay. It computes what the bare model does, bit for bit.
  """
  config = model.config
  if config.lora is None or any(
    path[-1].key in ADAPTERS for path, _ in jax.tree_util.tree_leaves_with_path(params)
  ):
    return params

  def fresh(key: jax.Array) -> Params:
    whole = trained(config, model.init(key))
    return {name: x for name, x in whole.items() if name != 'value_head'}

  shapes = any(isinstance(x, jax.ShapeDtypeStruct) for x in jax.tree.leaves(params))
  part = jax.eval_shape(fresh, key) if shapes else jax.jit(fresh)(key)
  return _over(params, part)


def fingerprint(params: Params) -> jax.Array:
  """uint32: of every bit that is frozen, wherever on a mesh it lies."""
  total = jnp.uint32(0)
  for i, (path, x) in enumerate(jax.tree_util.tree_leaves_with_path(params)):
    if not learns(path):
      word = jnp.uint32 if x.dtype == jnp.float32 else jnp.uint16
      bits = jax.lax.bitcast_convert_type(x, word).astype(jnp.uint32)
      total += jnp.uint32(2 * i + 1) * jnp.sum(bits, dtype=jnp.uint32)
  return total
