"""The shape of a model."""

import dataclasses
from typing import Any

FAMILIES = ('qwen2', 'qwen3', 'qwen3_moe', 'llama')
LORA_TARGETS = ('q', 'k', 'v', 'o', 'gate', 'up', 'down', 'router', 'lm_head')


@dataclasses.dataclass(frozen=True)
class Lora:
  """Low-rank adapters; see `jaxrl.models.lora.lora`, which checks them."""

  rank: int
  alpha: float
  targets: tuple[str, ...]
  base: str
  send: str = 'merged'

  @property
  def scale(self) -> float:
    return self.alpha / self.rank


@dataclasses.dataclass(frozen=True)
class ModelConfig:
  """Everything that fixes the parameters' shapes and the forward pass.

  attention_bias: biases on query, key and value (and, outside qwen2, on the output).
  qk_norm: RMS norms over each head of query and key. rope_scaling: sorted
  (name, value) pairs of the scaling's settings, `rope_type` among them, or None.
  value_head: a linear value head beside the language model's.
  num_experts: of every layer's feed-forward part, 0 for a dense one; of these a token
  takes the num_experts_per_token that its router finds likeliest, each of inner width
  moe_intermediate_size. norm_topk_prob: their weights are made to sum to 1.
  lora: adapters beside the linear layers, or None.
  """

  vocab_size: int
  hidden_size: int
  num_layers: int
  num_heads: int
  num_kv_heads: int
  head_dim: int
  intermediate_size: int
  family: str = 'qwen3'
  rope_theta: float = 1e6
  rope_scaling: tuple[tuple[str, Any], ...] | None = None
  rms_norm_eps: float = 1e-6
  max_position: int = 32768
  tie_embeddings: bool = True
  attention_bias: bool = False
  qk_norm: bool = True
  value_head: bool = False
  num_experts: int = 0
  num_experts_per_token: int = 0
  moe_intermediate_size: int = 0
  norm_topk_prob: bool = True
  lora: Lora | None = None

  def __post_init__(self) -> None:
    if self.family not in FAMILIES:
      raise ValueError(f'family {self.family!r} is not one of {", ".join(FAMILIES)}')
    if self.num_heads % self.num_kv_heads:
      raise ValueError(
        f'num_heads={self.num_heads} must be a multiple of '
        f'num_kv_heads={self.num_kv_heads}'
      )
    if self.head_dim % 2:
      raise ValueError(f'head_dim={self.head_dim} must be even for rotary positions')
    qwen3 = self.family in ('qwen3', 'qwen3_moe')
    if self.qk_norm != qwen3:
      raise ValueError(f'family {self.family!r} needs qk_norm={qwen3}')
    if self.family == 'qwen2' and not self.attention_bias:
      raise ValueError("family 'qwen2' needs attention_bias=True")
    self._check_experts()
    targets = self.lora.targets if self.lora else ()
    if 'router' in targets and not self.num_experts:
      raise ValueError("lora: targets='router', and this model has no experts")
    if 'lm_head' in targets and self.tie_embeddings:
      raise ValueError(
        "lora: targets='lm_head', and this model scores by its table of embeddings, "
        'which is no layer of its own'
      )

  def _check_experts(self) -> None:
    sizes = {
      name: getattr(self, name)
      for name in ('num_experts', 'num_experts_per_token', 'moe_intermediate_size')
    }
    told = ', '.join(f'{name}={size}' for name, size in sizes.items())
    if self.family != 'qwen3_moe':
      if any(sizes.values()):
        raise ValueError(f"{told}: experts are of family 'qwen3_moe'")
    elif min(sizes.values()) < 1 or self.num_experts_per_token > self.num_experts:
      raise ValueError(
        f"{told}: family 'qwen3_moe' needs each, and at most all experts a token"
      )

  @property
  def output_bias(self) -> bool:
    """Whether the attention's output projection has a bias."""
    return self.attention_bias and self.family != 'qwen2'

  def adapters(self, name: str) -> Lora | None:
    """Those of the linear layer `name`, one of LORA_TARGETS."""
    return self.lora if self.lora and name in self.lora.targets else None

  def replace(self, **changes: Any) -> 'ModelConfig':
    return dataclasses.replace(self, **changes)
