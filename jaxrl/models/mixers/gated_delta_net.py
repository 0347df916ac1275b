"""Gated DeltaNet: linear attention, as in Qwen3-Next (arXiv 2412.06464).

Where attention keeps the keys and values of all tokens, it keeps a state of fixed size.
"""

import math
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
from flax import nnx
from jax.ad_checkpoint import checkpoint_name

from jaxrl.models import initializers, kv_cache, layers
from jaxrl.models.model_config import ModelConfig
from jaxrl.types import PyTree, TokenTree
from kernels import gated_delta_rule as rule


class GatedDeltaNet(nnx.Module):
  """The linear attention of one layer.

  Queries, keys and values pass a short causal convolution and the gated delta rule; the
  output is normalized over each head and multiplied by silu of a gate. Convolutions
  have a kernel `[W, heads, d]`; α = exp(−exp(a_log) · softplus(decay(x) + dt_bias)).
  """

  def __init__(self, config: ModelConfig, rngs: nnx.Rngs):
    width, taps = config.hidden_size, config.conv_width
    keys = config.linear_key_heads, config.linear_key_dim
    values = config.linear_value_heads, config.linear_value_dim
    k_axes, v_axes = ('kv_heads', None), ('heads', None)

    def linear(name, outputs, axes):
      adapters = config.adapters(name)
      return layers.Linear((width,), outputs, ('embed', *axes), rngs, lora=adapters)

    def convolution(size, axes):
      return initializers.normal_param(rngs, (taps, *size), (None, *axes))

    self.q, self.k = linear('q', keys, k_axes), linear('k', keys, k_axes)
    self.v = linear('v', values, v_axes)
    self.q_conv, self.k_conv = convolution(keys, k_axes), convolution(keys, k_axes)
    self.v_conv = convolution(values, v_axes)
    self.output_gate = linear('output_gate', values, v_axes)
    self.beta = linear('beta', values[:1], v_axes[:1])
    self.decay = linear('decay', values[:1], v_axes[:1])
    rate = jax.random.uniform(rngs.params(), values[:1], minval=0.01, maxval=16.0)
    self.a_log = nnx.Param(jnp.log(rate), axes=('heads',))
    self.dt_bias = nnx.Param(jnp.ones(values[:1]), axes=('heads',))
    self.norm = layers.RMSNorm(config, values[1:], zero_centred=False)
    o_axes, o = (*v_axes, 'embed'), config.adapters('o')
    self.o = layers.Linear(values, (width,), o_axes, rngs, lora=o)

  def project(self, x: jax.Array) -> layers.Projected:
    """Computes what `mix` or `step` takes.

    Args:
      x: `[..., D]`.

    Returns:
      q and k `[..., K, dk]`, v `[..., H, dv]`, all before their convolutions; log α and
      β `[..., H]` float32. Beside them, the output's gate `[..., H, dv]`.
    """
    q, k, v = self.q(x), self.k(x), self.v(x)
    beta = jax.nn.sigmoid(self.beta(x).astype(jnp.float32))
    step = jax.nn.softplus(self.decay(x).astype(jnp.float32) + self.dt_bias[...])
    log_decay = -jnp.exp(self.a_log[...].astype(jnp.float32)) * step
    projected = checkpoint_name((q, k, v, log_decay, beta), 'qkv')
    return projected, self.output_gate(x)

  def mix(
    self,
    inputs: tuple[jax.Array, ...],
    tree: rule.SegmentTree,
    constrain: layers.Constrain,
    **options: Any,
  ) -> tuple[jax.Array, jax.Array]:
    """Mixes the tokens of rows.

    Args:
      inputs: `[B, T, …]`, from `project`.
      tree: The segments of the rows.
      constrain: Places activations on a mesh.
      **options: `kernels` and `platform`, as in `kernels.dispatch`.

    Returns:
      Out `[B, T, H, dv]`, and the state after each row's last token `[B, H, dk, dv]`.
    """
    *qkv, log_decay, beta = inputs
    convolved = []
    for name, x in zip('qkv', qkv, strict=True):
      heads = 'heads' if name == 'v' else 'kv_heads'
      kernel = getattr(self, f'{name}_conv')[...]
      y = jax.nn.silu(rule.causal_convolution(x, kernel, tree)).astype(x.dtype)
      convolved.append(constrain(y, 'batch', 'length', heads, None))
    q, k, v = self._unit_length(*convolved)
    out, state = rule.gated_delta_rule(q, k, v, log_decay, beta, tree, **options)
    return out.astype(qkv[0].dtype), state

  def step(
    self,
    inputs: tuple[jax.Array, ...],
    states: dict[str, jax.Array],
    positions: jax.Array,
  ) -> tuple[jax.Array, dict[str, jax.Array]]:
    """Mixes one more token of each sequence.

    Args:
      inputs: `[S, …]`, from `project`.
      states: 'state' `[S, H, dk, dv]` float32, and 'conv' `[S, W − 1, channels]`, the
        last inputs of the convolutions. They are not read at position 0.
      positions: `[S]` int32.

    Returns:
      Out `[S, H, dv]`, and the states.
    """
    *qkv, log_decay, beta = inputs
    count, is_first = len(positions), positions == 0
    state = jnp.where(is_first[:, None, None, None], 0, states['state'])
    conv = jnp.where(is_first[:, None, None], 0, states['conv'])
    now = jnp.concatenate([x.reshape(count, -1) for x in qkv], axis=-1)
    window = jnp.concatenate([conv, now[:, None].astype(conv.dtype)], axis=1)
    convs = self.q_conv[...], self.k_conv[...], self.v_conv[...]
    kernel = jnp.concatenate([x.reshape(len(x), -1) for x in convs], axis=-1)
    mixed = jax.nn.silu((window.astype(jnp.float32) * kernel).sum(1)).astype(now.dtype)
    ends = [x.reshape(count, -1).shape[-1] for x in qkv]
    parts = jnp.split(mixed, [ends[0], ends[0] + ends[1]], axis=-1)
    parts = (y.reshape(x.shape) for x, y in zip(qkv, parts, strict=True))
    q, k, v = self._unit_length(*parts)
    out, state = rule.gated_delta_step(state, q, k, v, log_decay, beta)
    return out.astype(now.dtype), {'state': state, 'conv': window[:, 1:]}

  def empty_states(self, count: int, dtype: jnp.dtype) -> dict[str, jax.Array]:
    """Returns the states of sequences without any token, as `step` takes them.

    Args:
      count: The number of sequences.
      dtype: The type of activations.
    """
    (taps, *keys), values = self.q_conv.shape, self.v_conv.shape[1:]
    channels = 2 * math.prod(keys) + math.prod(values)
    return {
      'state': jnp.zeros((count, values[0], keys[1], values[1]), jnp.float32),
      'conv': jnp.zeros((count, taps - 1, channels), dtype),
    }

  def _unit_length(
    self, q: jax.Array, k: jax.Array, v: jax.Array
  ) -> tuple[jax.Array, jax.Array, jax.Array]:
    """Normalizes queries to length dk^−½ and keys to length 1, in float32."""
    q, k = (x.astype(jnp.float32) for x in (q, k))
    q, k = (x * jax.lax.rsqrt((x * x).sum(-1, keepdims=True) + 1e-6) for x in (q, k))
    return q * q.shape[-1] ** -0.5, k, v

  def output(self, out: jax.Array, gate: jax.Array) -> jax.Array:
    """Computes what a layer adds to the residual stream.

    Args:
      out: `[..., H, dv]`.
      gate: `[..., H, dv]`, from `project`.

    Returns:
      `[..., D]`.
    """
    y = self.norm(out).astype(jnp.float32) * jax.nn.silu(gate.astype(jnp.float32))
    return self.o(y.astype(out.dtype))


def row_mixer(
  model: Any,
  segment_ids: jax.Array,
  prefix_ids: jax.Array | None,
  *,
  across: bool,
  keep_cache: bool,
  tree: TokenTree | None = None,
) -> Callable[..., Any]:
  """Returns what runs the gated DeltaNets of a model over rows.

  Args:
    model: A `TransformerLM`.
    segment_ids: `[B, T]` int32, 0 is padding.
    prefix_ids: `[B, T]` int32, another segment that a token's continues, or None.
    across: Whether rows are sharded over devices.
    keep_cache: Whether states are kept for a cache.
    tree: The tree of the rows' tokens, or None.

  Returns:
    `(block, *inputs) -> (out, (what is kept, None))`.

  Raises:
    ValueError: If rows are sharded, or a tree.
  """
  if across:
    model.context.refuse('gated DeltaNet layers')
  if tree is not None:
    raise ValueError('gated DeltaNet layers keep no state at the forks of a tree')
  segments = rule.segment_tree(segment_ids, prefix_ids)
  options = {'kernels': model.kernels, 'platform': model.platform}

  def mix(block: layers.Block, *inputs: jax.Array) -> PyTree:
    out, state = block.delta.mix(inputs, segments, model.constrain, **options)
    if not keep_cache:
      return out, (None, None)
    taps, lengths = block.config.conv_width - 1, segment_ids.sum(1)
    return out, (kv_cache.keep_states(state, inputs[:3], lengths, taps), None)

  return mix
