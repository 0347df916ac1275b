"""Mixture of experts in the place of a layer's MLP, as in Qwen3-MoE (arXiv 2505.09388).

The router scores in float32 whatever the rest computes in: p = softmax(x W), the k
likeliest experts are taken, and their p are made to sum to 1 if the model says so.
Every token gets its experts: none has a capacity. A shared expert, which every token
takes, is an MLP beside them; its output is added, in some families after it has been
multiplied by the sigmoid of a linear gate (Qwen2-MoE, arXiv 2407.10671).

Other models have p = σ(x W) and take the k experts with the largest p + b, maybe from
some groups of experts only (DeepSeek-V3, arXiv 2412.19437). The bias b is not trained,
and the weights are those of p.
"""

import functools
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
from flax import nnx

from jaxrl.models import initializers
from jaxrl.models.model_config import Lora, ModelConfig
from kernels import dispatch, experts

ExpertFn = Callable[..., jax.Array]


def apply_experts(
  way: ExpertFn, x: jax.Array, chosen: jax.Array, *rest: Any
) -> jax.Array:
  """Runs an implementation on states with any number of axes before the last.

  Args:
    way: One of `kernels.experts`.
    x: `[…, D]`.
    chosen: `[…, k]` int32, the experts of each token.
    *rest: Weights `[…, k]` and the kernels.

  Returns:
    `[…, D]`.
  """
  flat = (y.reshape(-1, y.shape[-1]) for y in (x, chosen, rest[0]))
  return way(*flat, *rest[1:]).reshape(x.shape)


def select_implementation(x: jax.Array, kernels: str, platform: str | None) -> ExpertFn:
  """Selects how experts are computed; see `kernels.experts`.

  States `[N, D]` come from decode, which waits for the experts' weights: all but the
  smallest batches need nearly all of them.

  Args:
    x: States `[…, D]`.
    kernels: 'auto' or 'reference'.
    platform: As in `kernels.dispatch`.
  """
  platform, what = dispatch.platform_of(platform), 'experts'
  candidates: dict[str, dispatch.Candidate] = {
    'ragged': experts.ragged,
    'grouped': dispatch.only_on('gpu', experts.grouped, platform=platform),
    'reference': experts.dense,
  }
  if x.ndim == 2:
    what, why = 'experts, decoding', 'sorts, where reading the weights takes the time'
    candidates = {'ragged': why, 'reference': experts.dense}
  elif platform != 'tpu':
    why = f"multiplies each of a token's k rows by every expert on {platform}"
    candidates['ragged'] = why
  name = dispatch.choose(what, candidates, platform=platform, option=kernels)
  run = candidates[name]
  assert callable(run)  # `choose` gives no other
  return run


class ExpertKernel(nnx.Module):
  """A kernel `[…, inputs, outputs]`, or one per expert, with its adapters."""

  def __init__(
    self,
    shape: tuple[int, ...],
    axes: tuple[str | None, ...],
    rngs: nnx.Rngs,
    lora: Lora | None = None,
    bias: bool = False,
  ):
    self.kernel = initializers.normal_param(rngs, shape, axes)
    self.lora, self.has_bias = lora, bias
    if bias:
      start = jnp.zeros((*shape[:-2], shape[-1]))
      self.bias = nnx.Param(start, axes=(*axes[:-2], axes[-1]))
    if lora:
      sizes, names = (shape[-2:-1], shape[-1:]), (axes[-2:-1], axes[-1:])
      each = shape[:-2], axes[:-2]
      adapter_pair = initializers.adapter_params(lora, sizes, names, rngs, each)
      self.lora_a, self.lora_b = adapter_pair

  def as_matrix(self, dtype: jax.typing.DTypeLike) -> experts.Matrix:
    """Returns what multiplies, in a type.

    Args:
      dtype: The type.
    """
    matrix = self.without_bias(dtype)
    if not self.has_bias:
      return matrix
    return experts.Biased(matrix, self.bias[...].astype(dtype))

  def without_bias(self, dtype: jax.typing.DTypeLike) -> jax.Array | experts.Adapted:
    """Returns what multiplies, in a type, without the bias.

    Args:
      dtype: The type.
    """
    kernel = self.kernel[...].astype(dtype)
    if not self.lora:
      return kernel
    b = self.lora.scale * self.lora_b[...]
    return experts.Adapted(kernel, self.lora_a[...].astype(dtype), b.astype(dtype))


class Experts(nnx.Module):
  """The experts' matrices: gate and up `[E, D, I]`, down `[E, I, D]`."""

  def __init__(self, config: ModelConfig, rngs: nnx.Rngs):
    number, width = config.num_experts, config.hidden_size
    wide, names = config.moe_intermediate_size, ('experts', 'embed', 'mlp')
    gate, up, down = (config.adapters(name) for name in ('gate', 'up', 'down'))
    bias = config.spec.expert_biases
    self.gate = ExpertKernel((number, width, wide), names, rngs, gate, bias)
    self.up = ExpertKernel((number, width, wide), names, rngs, up, bias)
    names = ('experts', 'mlp', 'embed')
    self.down = ExpertKernel((number, wide, width), names, rngs, down, bias)


class MoE(nnx.Module):
  """Router and experts; how tokens reach the experts is up to the caller.

  Attributes:
    shared: The shared expert, `(x, constrain) -> y`, or None.
  """

  def __init__(
    self, config: ModelConfig, rngs: nnx.Rngs, shared: Callable[..., Any] | None = None
  ):
    shape, bias = (config.hidden_size, config.num_experts), config.spec.expert_biases
    router_options = config.adapters('router'), bias
    self.router = ExpertKernel(shape, (None, None), rngs, *router_options)
    self.experts = Experts(config, rngs)
    self.picks = config.num_experts_per_token
    self.sums_to_one = config.norm_topk_prob
    self.gating = config.spec.gating
    self.shared = shared
    self.gates_shared = shared is not None and config.spec.gates_shared_expert
    if self.gates_shared:
      names = 'embed', None
      self.shared_gate = ExpertKernel((config.hidden_size, 1), names, rngs)
    self.scores = config.spec.router_scores
    self.groups = config.router_groups, config.router_top_groups
    self.scaling = config.routed_scaling
    if self.scores == 'sigmoid':
      self.correction = nnx.Param(jnp.zeros(config.num_experts), axes=(None,))

  def __call__(
    self,
    x: jax.Array,
    mix: ExpertFn,
    routed: jax.Array | None = None,
    constrain: Callable[..., jax.Array] = lambda x, *names: x,
  ) -> tuple[jax.Array, jax.Array]:
    """Computes the mixture.

    Args:
      x: `[…, D]`.
      mix: Computes the experts.
      routed: `[…, k]` int, experts to take instead of the likeliest, −1 where there are
        none; their weights are those of this router, and gradients flow through them.
      constrain: Places the shared expert's activations on a mesh.

    Returns:
      y `[…, D]` and the experts taken `[…, k]` int32.
    """
    chosen, weights = self.route(x, routed)
    gate, up, down = self.experts.gate, self.experts.up, self.experts.down
    kernels = gate.as_matrix(x.dtype), up.as_matrix(x.dtype), down.without_bias(x.dtype)
    y = mix(self.inputs(x), chosen, weights, *kernels)
    if down.has_bias:  # here, where no device has a part of the sum only
      picked = chosen[..., None] == jnp.arange(down.bias.shape[0])
      share = jnp.where(picked, weights[..., None], 0).sum(-2)
      y = y + (share @ down.bias[...].astype(jnp.float32)).astype(y.dtype)
    return self.combine(y, x, constrain), chosen

  def inputs(self, x: jax.Array) -> jax.Array:
    """Returns what the experts read, for states `[…, D]`."""
    return x

  def combine(
    self, y: jax.Array, x: jax.Array, constrain: Callable[..., jax.Array]
  ) -> jax.Array:
    """Adds what every token gets, here the shared expert, to the experts' mixture.

    Args:
      y: The mixture `[…, D]`.
      x: The states `[…, D]`.
      constrain: As above.

    Returns:
      `[…, D]`.
    """
    if self.shared is None:
      return y
    shared = self.shared(x, constrain)
    if self.gates_shared:
      gate = x @ self.shared_gate.kernel[...].astype(x.dtype)
      shared = jax.nn.sigmoid(gate) * shared
    return y + shared

  def gated(self, way: ExpertFn) -> ExpertFn:
    """Returns an implementation of `kernels.experts` with this model's gating."""
    return way if self.gating == 'silu' else functools.partial(way, gating=self.gating)

  def route(
    self, x: jax.Array, routed: jax.Array | None = None
  ) -> tuple[jax.Array, jax.Array]:
    """Chooses experts.

    Args:
      x: `[…, D]`.
      routed: As above.

    Returns:
      Experts `[…, k]` int32 and their weights `[…, k]` float32.
    """
    scores = experts.times(
      jnp.matmul, x.astype(jnp.float32), self.router.as_matrix('float32')
    )
    if self.scores == 'softmax':
      p = jax.nn.softmax(scores, axis=-1)
      ranking = jax.lax.stop_gradient(p)
    else:
      p = jax.nn.sigmoid(scores)
      ranking = jax.lax.stop_gradient(p + self.correction[...].astype(p.dtype))
    if self.groups != (1, 1):
      ranking = within_groups(ranking, *self.groups)
    _, chosen = jax.lax.top_k(ranking, self.picks)
    if routed is not None:
      recorded = (routed >= 0).all(axis=-1, keepdims=True)
      chosen = jnp.where(recorded, routed.astype(jnp.int32), chosen)
    weights = jnp.take_along_axis(p, chosen, axis=-1)
    if self.sums_to_one:
      total = weights.sum(axis=-1, keepdims=True)
      # A sum of σ may be 0, one of the largest p of a softmax may not.
      weights = weights / (total if self.scores == 'softmax' else total + 1e-20)
    return chosen, weights if self.scaling == 1.0 else weights * self.scaling


class ExpertsBesideMLP(MoE):
  """A mixture of experts and a dense MLP on the same states, as in Gemma 4.

  For states x, not normalized, y = post₁(mlp(pre₁(x))) + post₂(experts(pre₂(x))).
  The router scores x / rms(x) · s · D^−½ with a vector s, and the weights of a token's
  experts, made to sum to 1, are multiplied by a number that each expert has.
  """

  def __init__(
    self,
    config: ModelConfig,
    rngs: nnx.Rngs,
    dense: Callable[..., Any],
    norm: Callable[[], nnx.Module],
  ):
    super().__init__(config, rngs)
    self.dense: Any = dense
    self.dense_norm: Any = norm()
    self.dense_post_norm: Any = norm()
    self.router_norm: Any = norm()
    self.norm: Any = norm()
    self.post_norm: Any = norm()
    self.expert_scale = nnx.Param(jnp.ones(config.num_experts), axes=(None,))

  def combine(
    self, y: jax.Array, x: jax.Array, constrain: Callable[..., jax.Array]
  ) -> jax.Array:
    """Adds the dense MLP to the experts' mixture, each normalized; see `MoE`."""
    dense = self.dense_post_norm(self.dense(self.dense_norm(x), constrain))
    return dense + self.post_norm(y)

  def inputs(self, x: jax.Array) -> jax.Array:
    """Returns what the experts read, for states `[…, D]`."""
    return self.norm(x)

  def route(
    self, x: jax.Array, routed: jax.Array | None = None
  ) -> tuple[jax.Array, jax.Array]:
    """Chooses experts; see `MoE`."""
    scaled = self.router_norm(x) * x.shape[-1] ** -0.5
    chosen, weights = super().route(scaled, routed)
    return chosen, weights * self.expert_scale[...][chosen]


def within_groups(ranking: jax.Array, groups: int, top: int) -> jax.Array:
  """Keeps the best groups of experts, those whose two best have the largest sum.

  Args:
    ranking: `[…, E]`.
    groups: How many groups there are.
    top: How many are kept.

  Returns:
    `[…, E]`, −∞ for experts of other groups.
  """
  grouped = ranking.reshape(*ranking.shape[:-1], groups, -1)
  _, kept = jax.lax.top_k(jax.lax.top_k(grouped, 2)[0].sum(axis=-1), top)
  is_kept = (kept[..., None] == jnp.arange(groups)).any(axis=-2)
  return jnp.where(is_kept[..., None], grouped, -jnp.inf).reshape(ranking.shape)
