"""The layers of a transformer as Flax NNX modules.

Every parameter has `axes`, the logical names of its axes. The sharding rules map them
to mesh axes; None is an axis that is never sharded. `constrain(x, *names)` names the
axes of activations: batch, length, heads, kv_heads, mlp and vocab.
"""

import functools
import math
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
from flax import nnx
from jax.ad_checkpoint import checkpoint_name

from jaxrl.models import initializers, rope
from jaxrl.models.model_config import Lora, ModelConfig
from jaxrl.options import Keywords
from jaxrl.types import PyTree

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

  def __call__(self, x: jax.Array) -> jax.Array:
    """Normalizes the last axes of x."""
    scale = self.scale[...] + self.offset if self.offset else self.scale[...]
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


LATENT_NORM_EPS = 1e-6  # config.json has no setting for it


class LatentAttention(nnx.Module):
  """Projections of latent attention (DeepSeek-V2, arXiv 2405.04434).

  The key and value of a token are computed from a latent `[r]`; all heads share the
  rotated part of the key, `[p]`. The cache holds the concatenation of both,
  `[1, r + p]`, in place of keys, and no values.

  Attention over whole sequences uses the keys and values from `expand`. Attention over
  a cache uses the latents directly, as a single head whose keys are also its values:
  `absorb` multiplies the queries by the up-projection of the keys, and `release`
  multiplies the output by the up-projection of the values.
  """

  def __init__(self, config: ModelConfig, rngs: nnx.Rngs):
    width, heads, bias = config.hidden_size, config.num_heads, config.attention_bias
    latent, self.rotated = config.kv_latent, config.rope_dim
    self.plain = config.head_dim - self.rotated  # elements of a head without rotation
    q_axes, norm_axes = ('embed', 'heads', None), (None,)
    q_size, kv_size = (heads, config.head_dim), (heads, self.plain + config.value_dim)
    if inner := config.q_latent:
      q_a, q_b = config.adapters('q_a'), config.adapters('q_b')
      self.q_a = Linear((width,), (inner,), ('embed', None), rngs, bias, q_a)
      self.q_norm = RMSNorm(config, (inner,), norm_axes, LATENT_NORM_EPS)
      self.q_b = Linear((inner,), q_size, q_axes, rngs, lora=q_b)
    else:
      self.q = Linear((width,), q_size, q_axes, rngs, lora=config.adapters('q'))
    kv_a, kv_b = config.adapters('kv_a'), config.adapters('kv_b')
    both = (latent + self.rotated,)
    self.kv_a = Linear((width,), both, ('embed', None), rngs, bias, kv_a)
    self.kv_norm = RMSNorm(config, (latent,), norm_axes, LATENT_NORM_EPS)
    self.kv_b = Linear((latent,), kv_size, q_axes, rngs, lora=kv_b)
    o = config.output_bias, config.adapters('o')
    sizes = (heads, config.value_dim), (width,), ('heads', None, 'embed')
    self.o = Linear(*sizes, rngs, *o)
    self.has_q_latent, self.latent = bool(inner), latent
    self.interleaved = config.rope_interleaved
    self.factor = rope.latent_score_factor(config)

  def project(self, x: jax.Array, *rotation: jax.Array) -> 'Projected':
    """Computes queries, and latents in place of keys.

    Args:
      x: Hidden states `[..., D]`.
      *rotation: Elements of a `rope.Rotation`.

    Returns:
      `(q, latents, None), None`: q `[..., H, d]`, whose last p elements are rotated,
      latents `[..., 1, r + p]`, no values and no output gate.
    """
    cos, sin = rotation
    turn = {'cos': cos, 'sin': sin, 'interleaved': self.interleaved}
    q = self.q_b(self.q_norm(self.q_a(x))) if self.has_q_latent else self.q(x)
    plain, rotated = jnp.split(q, [self.plain], axis=-1)
    q = jnp.concatenate([plain, rope.rotate(rotated, **turn)], axis=-1)
    if self.factor != 1.0:
      q = q * jnp.asarray(self.factor, q.dtype)
    latent, rotated = jnp.split(self.kv_a(x), [self.latent], axis=-1)
    latent = self.kv_norm(latent)[..., None, :]
    rotated = rope.rotate(rotated[..., None, :], **turn)
    kept = jnp.concatenate([latent, rotated], axis=-1)
    return (*checkpoint_name((q, kept), 'qkv'), None), None

  def output(self, out: jax.Array, gate: None) -> jax.Array:
    """Computes the layer's update to the residual stream, `[..., D]`.

    Args:
      out: Output of attention, `[..., H, value_dim]`.
      gate: None, because there is no gate.
    """
    del gate
    return self.o(out)

  def expand(self, kept: jax.Array) -> tuple[jax.Array, jax.Array]:
    """Computes keys and values from latents.

    Args:
      kept: Latents `[..., 1, r + p]`.

    Returns:
      Keys `[..., H, d]` and values `[..., H, value_dim]`.
    """
    latent, rotated = jnp.split(kept, [self.latent], axis=-1)
    plain, v = jnp.split(self.kv_b(latent[..., 0, :]), [self.plain], axis=-1)
    rotated = jnp.broadcast_to(rotated, (*plain.shape[:-1], self.rotated))
    return jnp.concatenate([plain, rotated], axis=-1), v

  def absorb(self, q: jax.Array) -> jax.Array:
    """Computes queries that attend to latents in place of keys.

    Args:
      q: Queries `[..., H, d]`.

    Returns:
      Queries `[..., H, r + p]`. Their products with latents equal the products of `q`
      with the keys of those latents.
    """
    plain, rotated = jnp.split(q, [self.plain], axis=-1)
    kernel, a, b = self._up(slice(None, self.plain), q.dtype)
    inner = jnp.einsum('...hd,rhd->...hr', plain, kernel)
    if a is not None:
      narrow = jnp.einsum('...hd,khd->...hk', plain, b)
      inner = inner + jnp.einsum('...hk,rk->...hr', narrow, a)
    return jnp.concatenate([inner, rotated], axis=-1)

  def release(self, out: jax.Array) -> jax.Array:
    """Computes the output of attention from the output over latents.

    Args:
      out: Output over latents, `[..., H, r + p]`; the last p elements are not read.

    Returns:
      Output `[..., H, value_dim]`.
    """
    out = out[..., : self.latent]
    kernel, a, b = self._up(slice(self.plain, None), out.dtype)
    values = jnp.einsum('...hr,rhd->...hd', out, kernel)
    if a is not None:
      narrow = jnp.einsum('...hr,rk->...hk', out, a)
      values = values + jnp.einsum('...hk,khd->...hd', narrow, b)
    return values

  def _up(self, part: slice, dtype: Any) -> tuple[jax.Array, PyTree, PyTree]:
    """Slices the outputs of each head of kv_b: its kernel, and A and the scaled B.

    Args:
      part: Slice of the outputs of a head.
      dtype: Dtype of the results.

    Returns:
      The kernel, and the LoRA factors A and B, or None for both.
    """
    kv_b = self.kv_b
    kernel = kv_b.kernel[...][..., part].astype(dtype)
    if not kv_b.lora:
      return kernel, None, None
    b = kv_b.lora.scale * kv_b.lora_b[...][..., part]
    return kernel, kv_b.lora_a[...].astype(dtype), b.astype(dtype)


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

  def __call__(self, x: jax.Array, constrain: Constrain) -> jax.Array:
    """Applies the MLP.

    Args:
      x: Hidden states `[..., D]`.
      constrain: Function that constrains the sharding of activations.

    Returns:
      Outputs `[..., D]`.
    """
    activation = ACTIVATIONS[self.activation]
    gate, up = (self.gate(x), self.up(x)) if self.joined is None else self.joined(x)
    # The backward pass keeps gate and up alone, and computes the activation again.
    product = jax.checkpoint(lambda gate, up: activation(gate) * up)
    inner = checkpoint_name(product(gate, up), 'mlp')
    if x.ndim == 3:
      inner = constrain(inner, 'batch', 'length', 'mlp')
    return self.down(inner)


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
    linear_attention: Callable[[ModelConfig, nnx.Rngs], Any] | None = None,
  ):
    self.config, norms, width = config, config.spec.norms, (config.hidden_size,)
    if linear_attention is not None:
      self.delta = linear_attention(config, rngs)
    else:
      kind = LatentAttention if config.kv_latent else Attention
      self.attention: Any = kind(config, rngs)
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
