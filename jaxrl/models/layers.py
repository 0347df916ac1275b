"""The layers of a transformer as Flax NNX modules.

Every parameter has `axes`, the logical names of its axes. The sharding rules map them
to mesh axes; None is an axis that is never sharded. `constrain(x, *names)` names the
axes of activations: batch, length, heads, kv_heads, mlp and vocab.
"""

import functools
import math
from collections.abc import Callable
from types import ModuleType
from typing import Any, TypeVar

import jax
import jax.numpy as jnp
from flax import nnx
from jax.ad_checkpoint import checkpoint_name

from jaxrl.models import initializers, remat, rope
from jaxrl.models.model_config import Lora, ModelConfig
from jaxrl.options import Keywords
from jaxrl.types import PyTree
from kernels.dispatch import platform_of

Constrain = Callable[..., jax.Array]
Feed = Callable[[PyTree, jax.Array], tuple[jax.Array, PyTree]]


class RMSNorm(nnx.Module):
  """Computes x / rms(x) · scale over the last axis, or the last two, in float32.

  If the family's norms are zero-centred, the factor is 1 + scale instead, unless
  `zero_centred` is False.
  """

  def __init__(
    self,
    config: ModelConfig,
    shape: tuple[int, ...],
    axes: tuple[str | None, ...] = (None,),
    eps: float | None = None,
    *,
    zero_centred: bool = True,
  ):
    is_centred = zero_centred and config.spec.zero_centred_norms
    self.offset = 1.0 if is_centred else 0.0
    start = jnp.full(shape, 1.0 - self.offset, jnp.float32)
    self.scale = nnx.Param(start, axes=axes)
    self.eps = config.rms_norm_eps if eps is None else eps
    self.over = tuple(range(-len(shape), 0))
    self.kernels: ModuleType | None = None  # see `with_kernels`

  def __call__(self, x: jax.Array) -> jax.Array:
    """Normalizes the last axes of x."""
    scale = self.scale[...] + self.offset if self.offset else self.scale[...]
    if self.kernels is not None and x.dtype == jnp.float32:
      return self.kernels.rms_norm(x, scale.astype(x.dtype), self.eps)
    return (scale * normalized(x, self.eps, self.over)).astype(x.dtype)


def normalized(x: jax.Array, eps: float, over: tuple[int, ...] = (-1,)) -> jax.Array:
  """Computes x / rms(x).

  Args:
    x: Array `[...]`.
    eps: Number ε that is added to the mean square.
    over: Axes of the mean.

  Returns:
    Normalized array `[...]` float32.
  """
  wide = x.astype(jnp.float32)
  mean = jnp.mean(wide * wide, axis=over, keepdims=True)
  return wide * jax.lax.rsqrt(mean + eps)


class Linear(nnx.Module):
  """Maps x `[..., *inputs]` to `[..., *outputs]` by a kernel `[*inputs, *outputs]`."""

  def __init__(
    self,
    inputs: tuple[int, ...],
    outputs: tuple[int, ...],
    axes: tuple[str | None, ...],
    rngs: nnx.Rngs,
    bias: bool = False,
    lora: Lora | None = None,
  ):
    self.kernel = initializers.normal_param(rngs, inputs + outputs, axes)
    self.lora = lora
    if lora:
      names = axes[: len(inputs)], axes[len(inputs) :]
      adapter_pair = initializers.adapter_params(lora, (inputs, outputs), names, rngs)
      self.lora_a, self.lora_b = adapter_pair
    if bias:
      self.bias = nnx.Param(jnp.zeros(outputs), axes=axes[len(inputs) :])
    self.num_inputs, self.has_bias = len(inputs), bias
    self.product: Callable[[jax.Array], jax.Array] | None = None  # by the kernel
    self.row_product: Callable[[jax.Array], jax.Array] | None = None

  @property
  def is_plain(self) -> bool:
    """Returns whether it is a product with the kernel, and nothing else."""
    is_replaced = self.product is not None or self.row_product is not None
    return not (self.lora or self.has_bias or is_replaced)

  def __call__(self, x: jax.Array) -> jax.Array:
    """Applies the kernel, the adapters and the bias.

    Args:
      x: Inputs `[..., *inputs]`.

    Returns:
      Outputs `[..., *outputs]`.
    """
    kernel = self.kernel[...].astype(x.dtype)
    inputs, outputs = kernel.shape[: self.num_inputs], kernel.shape[self.num_inputs :]
    # Reshape to plain matrices: with more axes, XLA's CPU backend copies transposes in
    # the backward pass, which takes a third of the time of a train step.
    rows, whole = x.shape[: x.ndim - self.num_inputs], x
    x = x.reshape(-1, math.prod(inputs))
    y = self.product(x) if self.product else x @ kernel.reshape(math.prod(inputs), -1)
    y = y if self.row_product is None else y + self.row_product(whole).reshape(y.shape)
    if self.lora:
      a, b = self.lora_a[...].astype(x.dtype), self.lora_b[...].astype(x.dtype)
      inner = self.lora.scale * (x @ a.reshape(-1, self.lora.rank))
      y = y + inner @ b.reshape(self.lora.rank, -1)
    y = y.reshape(*rows, *outputs)
    return y + self.bias[...].astype(x.dtype) if self.has_bias else y


class Attention(nnx.Module):
  """The projections before and after attention, which the caller computes."""

  def __init__(self, config: ModelConfig, rngs: nnx.Rngs):
    width, dim, bias = config.hidden_size, config.head_dim, config.attention_bias
    heads, kv_heads = config.num_heads, config.num_kv_heads
    kv_axes = ('embed', 'kv_heads', None)
    q_axes, o_axes = ('embed', 'heads', None), ('heads', None, 'embed')
    q, k, v, o = (config.adapters(name) for name in 'qkvo')
    self.q = Linear((width,), (heads, dim), q_axes, rngs, bias, q)
    self.has_keys = config.kv_layer < 0
    self.has_values = self.has_keys and not config.keys_are_values
    if self.has_keys:
      self.k = Linear((width,), (kv_heads, dim), kv_axes, rngs, bias, k)
    if self.has_values:
      self.v = Linear((width,), (kv_heads, dim), kv_axes, rngs, bias, v)
    self.o = Linear((heads, dim), (width,), o_axes, rngs, config.output_bias, o)
    if config.qk_norm and config.spec.qk_norm_over == 'head':
      self.q_norm = RMSNorm(config, (dim,))
      if self.has_keys:
        self.k_norm = RMSNorm(config, (dim,))
    elif config.qk_norm:
      self.q_norm = RMSNorm(config, (heads, dim), ('heads', None))
      self.k_norm = RMSNorm(config, (kv_heads, dim), ('kv_heads', None))
    self.has_gate = config.spec.gates_attention
    if self.has_gate:
      gate = config.adapters('output_gate')
      self.output_gate = Linear((width,), (heads, dim), q_axes, rngs, bias, gate)
    if config.spec.sinks:
      self.sinks = initializers.normal_param(rngs, (heads,), ('heads',))
    self.joined: Callable[[jax.Array], list[jax.Array]] | None = None  # q, k and v
    self.qk_norm = config.qk_norm
    self.v_norm_eps = config.rms_norm_eps if config.spec.v_norm else None

  def project(self, x: jax.Array, *rotation: jax.Array) -> 'Projected':
    """Computes queries, keys and values.

    Args:
      x: Hidden states `[..., D]`.
      *rotation: Elements of a `rope.Rotation`.

    Returns:
      `(q, k, v), gate`: rotated q `[..., H, d]`, rotated k and v `[..., K, d]`, which
      are None if the layer reads those of another layer, and the output gate
      `[..., H, d]` or None.
    """
    if self.joined is not None:
      q, k, v = self.joined(x)
    else:
      q = self.q(x)
      k = self.k(x) if self.has_keys else None
      v = self.v(x) if self.has_values else k
    if self.qk_norm:
      q = self.q_norm(q)
      k = None if k is None else self.k_norm(k)
    if v is not None and self.v_norm_eps is not None:
      v = normalized(v, self.v_norm_eps).astype(v.dtype)
    if rotation:
      cos, sin, *growth = rotation
      q = rope.rotate(q, cos, sin)
      k = None if k is None else rope.rotate(k, cos, sin)
      if growth:
        q = q * growth[0][..., None].astype(q.dtype)
    gate = self.output_gate(x) if self.has_gate else None
    return checkpoint_name((q, k, v), 'qkv'), gate

  def output(self, out: jax.Array, gate: jax.Array | None) -> jax.Array:
    """Computes the layer's update to the residual stream.

    Args:
      out: Output of attention, `[..., H, d]`.
      gate: Output gate from `project`.

    Returns:
      Update `[..., D]`.
    """
    return self.o(out if gate is None else out * jax.nn.sigmoid(gate))


# The inputs of `attend`, and the output gate or None.
Projected = tuple[tuple[PyTree, ...], jax.Array | None]


ACTIVATIONS = {'silu': jax.nn.silu, 'gelu_tanh': jax.nn.gelu}


class MLP(nnx.Module):
  """Computes down(f(gate(x)) · up(x)), f the family's activation."""

  def __init__(self, config: ModelConfig, rngs: nnx.Rngs, inner: int | None = None):
    width, wide = config.hidden_size, inner or config.intermediate_size
    gate, up, down = (config.adapters(name) for name in ('gate', 'up', 'down'))
    self.gate = Linear((width,), (wide,), ('embed', 'mlp'), rngs, lora=gate)
    self.up = Linear((width,), (wide,), ('embed', 'mlp'), rngs, lora=up)
    self.down = Linear((wide,), (width,), ('mlp', 'embed'), rngs, lora=down)
    self.joined: Callable[[jax.Array], list[jax.Array]] | None = None  # gate and up
    self.activation = config.spec.activation
    self.kernels: ModuleType | None = None  # see `with_kernels`
    self.keeps_inner = True

  def __call__(self, x: jax.Array, constrain: Constrain) -> jax.Array:
    """Applies the MLP.

    Args:
      x: Hidden states `[..., D]`.
      constrain: Function that constrains the sharding of activations.

    Returns:
      Outputs `[..., D]`.
    """
    if self.kernels is not None and x.dtype == jnp.float32:
      return self._apply_kernels(self.kernels, x)
    gate, up = self._gate_and_up(x)
    activation = ACTIVATIONS[self.activation]
    # The backward pass keeps gate and up alone, and computes the activation again.
    product = jax.checkpoint(lambda gate, up: activation(gate) * up)
    inner = checkpoint_name(product(gate, up), 'mlp')
    if x.ndim == 3:
      inner = constrain(inner, 'batch', 'length', 'mlp')
    return self.down(inner)

  def _gate_and_up(self, x: jax.Array) -> list[jax.Array]:
    if self.joined is None:
      return [self.gate(x), self.up(x)]
    return jnp.split(self.joined(x)[0], 2, axis=-1)

  def _apply_kernels(self, kernels: ModuleType, x: jax.Array) -> jax.Array:
    """Applies the MLP with kernels that compute the activation."""
    if self.joined is not None:
      return self.down(kernels.gated_joined(self.joined(x)[0], self.activation))
    gate, up = self._gate_and_up(x)
    if not self.keeps_inner and self.down.is_plain:
      matrix = self.down.kernel[...].astype(x.dtype)
      return kernels.gated_product(gate, up, matrix, self.activation)
    inner = kernels.gated(gate, up, self.activation)
    return self.down(checkpoint_name(inner, 'mlp'))


T = TypeVar('T', bound=nnx.Module)


def with_kernels(model: Any, module: T) -> T:
  """Returns a part of a model whose norms and MLPs run the kernels for a CPU.

  Args:
    model: The `TransformerLM`, whose options say whether there are such kernels.
    module: The part, which is changed. Without kernels, it is left as it is.
  """
  is_cpu = platform_of(model.platform) == 'cpu' and model.is_on_one_device
  if not is_cpu or model.exact is not None:
    return module
  from kernels.native import layer_ops  # not for other platforms

  if layer_ops.obstacle(model.platform, model.dtype, kernels=model.kernels):
    return module
  for _, part in nnx.iter_graph(module):
    if isinstance(part, RMSNorm | MLP):
      part.kernels = layer_ops
    if isinstance(part, MLP):
      part.keeps_inner = remat.may_keep(model.remat, 'mlp')
  return module


class Block(nnx.Module):
  """One layer: attention and MLP, each added to the residual stream.

  A gated DeltaNet may replace attention, and a mixture of experts the MLP. The caller
  passes `feed(mlp, x [..., D]) -> (y [..., D], aux)`, which computes the MLP or the
  experts. The family determines whether norms come before or after attention and MLP,
  or both. Experts beside an MLP have their own norms before them.

  Attributes:
    config: Config of the layer, with the fields of its kind.
  """

  def __init__(
    self,
    config: ModelConfig,
    rngs: nnx.Rngs,
    kind: Callable[[ModelConfig, nnx.Rngs], Any] | None = None,
  ):
    self.config, norms, width = config, config.spec.norms, (config.hidden_size,)
    mixer: Any = (kind or Attention)(config, rngs)
    if config.linear_attention:
      self.delta = mixer
    else:
      self.attention = mixer
    beside = bool(config.num_experts) and config.spec.experts_beside_mlp
    if config.num_experts:
      from jaxrl.models import moe  # most models have no experts
    if beside:
      norm = functools.partial(RMSNorm, config, width)
      self.mlp = moe.ExpertsBesideMLP(config, rngs, MLP(config, rngs), norm)
    elif config.num_experts:
      size = config.shared_expert_size
      self.mlp = moe.MoE(config, rngs, MLP(config, rngs, size) if size else None)
    else:
      self.mlp = MLP(config, rngs)
    self.has_mlp_norm = norms != 'after' and not beside
    if norms != 'after':
      self.attention_norm = RMSNorm(config, width)
    if self.has_mlp_norm:
      self.mlp_norm = RMSNorm(config, width)
    if norms != 'before':
      self.attention_post_norm = RMSNorm(config, width)
      self.mlp_post_norm = RMSNorm(config, width)
    self.norms = norms
    if inner := config.per_layer_width:
      self.per_layer_gate = Linear(width, (inner,), ('embed', None), rngs)
      self.per_layer_out = Linear((inner,), width, (None, 'embed'), rngs)
      self.per_layer_norm = RMSNorm(config, width)
    if config.spec.scales_layers:
      self.output_scale = nnx.Param(jnp.ones((1,)), axes=(None,))

  @property
  def mixer(self) -> Any:
    """Returns the layer's attention module, or the gated DeltaNet in its place."""
    return self.delta if self.config.linear_attention else self.attention

  @property
  def attention_rules(self) -> Keywords:
    """Returns the options of `attention` that the layer sets, by parameter name."""
    config = self.config
    if config.linear_attention:
      return {}
    rules = {
      'window': config.span,
      'softcap': config.attention_softcap,
      'scale': config.query_scale,
    }
    sinks = {'sinks': self.attention.sinks[...]} if config.spec.sinks else {}
    return sinks | {name: value for name, value in rules.items() if value}

  @property
  def cache_rules(self) -> Keywords:
    """Returns the options of attention over a cache, by parameter name."""
    if not self.config.kv_latent:
      return self.attention_rules
    return self.attention_rules | {'scale': self.config.head_dim**-0.5}

  def __call__(
    self,
    x: jax.Array,
    rotation: rope.Rotation,
    attend: Callable[..., tuple[jax.Array, PyTree]],
    feed: Feed,
    extra: jax.Array | None = None,
  ) -> tuple[jax.Array, tuple[PyTree, PyTree]]:
    """Runs the layer.

    Args:
      x: Hidden states `[..., D]`.
      rotation: Rotation for the positions.
      attend: Attention, `(q, k, v) -> (out [..., H, d], aux)`. For a gated DeltaNet it
        takes `(q, k, v, log_decay, beta)`.
      feed: Function that computes the MLP or the experts.
      extra: Per-layer input `[..., P]`, if the layer has one.

    Returns:
      The next hidden states, and the aux values of `attend` and `feed`.
    """
    inputs, gate = self.project(x, *rotation)
    out, aux = attend(*inputs)
    x, more = self.finish(x, out, gate, extra, feed=feed)
    return x, (aux, more)

  def project(self, x: jax.Array, *rotation: jax.Array) -> Projected:
    """Computes the inputs of attention and the output gate.

    Args:
      x: Hidden states `[..., D]`.
      *rotation: Rotation for the positions.
    """
    if self.norms != 'after':
      x = self.attention_norm(x)
    return self.mixer.project(x, *rotation)

  def project_for_cache(self, x: jax.Array, *rotation: jax.Array) -> Projected:
    """Computes the inputs of attention over a cache and the output gate.

    Args:
      x: Hidden states `[..., D]`.
      *rotation: Rotation for the positions.
    """
    (q, *others), gate = self.project(x, *rotation)
    q = self.attention.absorb(q) if self.config.kv_latent else q
    return (q, *others), gate

  def finish(
    self,
    x: jax.Array,
    out: jax.Array,
    gate: jax.Array | None = None,
    extra: jax.Array | None = None,
    *,
    feed: Feed,
    over_cache: bool = False,
  ) -> tuple[jax.Array, PyTree]:
    """Computes the rest of the layer from the output of attention.

    Args:
      x: Hidden states `[..., D]`.
      out: Output of attention, `[..., H, d]`.
      gate: Output gate `[..., H, d]`, if the layer has one.
      extra: Per-layer input `[..., P]`, if the layer has one.
      feed: Function that computes the MLP or the experts.
      over_cache: Whether the queries came from `project_for_cache`.

    Returns:
      The next hidden states, and the aux value of `feed`.
    """
    if over_cache and self.config.kv_latent:
      out = self.attention.release(out)
    out = self.mixer.output(checkpoint_name(out, 'attention'), gate)
    if self.norms != 'before':
      out = self.attention_post_norm(out)
    x = checkpoint_name(x + out, 'residual')
    y, more = feed(self.mlp, self.mlp_norm(x) if self.has_mlp_norm else x)
    if self.norms != 'before':
      y = self.mlp_post_norm(y)
    x = x + y
    if extra is not None:
      inner = ACTIVATIONS[self.config.spec.activation](self.per_layer_gate(x)) * extra
      x = x + self.per_layer_norm(self.per_layer_out(inner))
    if self.config.spec.scales_layers:
      x = x * jax.lax.stop_gradient(self.output_scale[...]).astype(x.dtype)
    return x, more


def scale_embeddings(config: ModelConfig, x: jax.Array, dtype: str) -> jax.Array:
  """Makes the first layer's input of embeddings.

  Args:
    config: Config of the model.
    x: Rows of the embedding table `[..., D]`.
    dtype: Dtype of activations.

  Returns:
    Embeddings `[..., D]`, in that dtype and scaled if the family does so.
  """
  x = x.astype(dtype)
  factor = config.hidden_size**0.5 if config.spec.scales_embeddings else None
  return x if factor is None else x * jnp.asarray(factor, x.dtype)


class Embedding(nnx.Module):
  """The table `[V, D]` of the vocabulary, for embeddings and for the LM head.

  The LoRA factors of an LM head are A `[D, rank]` and B `[rank, V]`.
  """

  def __init__(
    self,
    config: ModelConfig,
    rngs: nnx.Rngs,
    lora: Lora | None = None,
    width: int | None = None,
  ):
    shape = (config.vocab_size, width or config.hidden_size)
    self.table = initializers.normal_param(rngs, shape, ('vocab', 'embedding'))
    if lora:
      inner = ((shape[1],), (shape[0],)), (('embedding',), ('vocab',))
      self.lora_a, self.lora_b = initializers.adapter_params(lora, *inner, rngs)


class ValueHead(nnx.Module):
  """Maps hidden states `[..., D]` to values `[...]` float32; initialized to zero."""

  def __init__(self, config: ModelConfig):
    self.kernel = nnx.Param(jnp.zeros((config.hidden_size,)), axes=(None,))
    self.bias = nnx.Param(jnp.zeros(()), axes=())

  def __call__(self, hidden: jax.Array) -> jax.Array:
    """Computes values.

    Args:
      hidden: Hidden states `[..., D]`.

    Returns:
      Values `[...]` float32.
    """
    return hidden.astype(jnp.float32) @ self.kernel[...] + self.bias[...]
