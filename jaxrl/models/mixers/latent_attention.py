"""Latent attention: keys and values of all heads are computed from one latent."""

import jax
import jax.numpy as jnp
from flax import nnx
from jax.ad_checkpoint import checkpoint_name
from jax.typing import DTypeLike

from jaxrl.models import rope
from jaxrl.models.layers import Linear, Projected, RMSNorm
from jaxrl.models.model_config import ModelConfig
from jaxrl.types import PyTree

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

  def project(self, x: jax.Array, *rotation: jax.Array) -> Projected:
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

  def _up(self, part: slice, dtype: DTypeLike) -> tuple[jax.Array, PyTree, PyTree]:
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
