"""The shape of a model."""

import dataclasses
from typing import Any

FAMILIES = ('qwen2', 'qwen3', 'llama')


@dataclasses.dataclass(frozen=True)
class ModelConfig:
  """Everything that fixes the parameters' shapes and the forward pass.

  attention_bias: biases on query, key and value (and, outside qwen2, on the output).
  qk_norm: RMS norms over each head of query and key. rope_scaling: sorted
  (name, value) pairs of the scaling's settings, `rope_type` among them, or None.
  value_head: a linear value head beside the language model's.
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
    if self.qk_norm != (self.family == 'qwen3'):
      raise ValueError(f'family {self.family!r} needs qk_norm={self.family == "qwen3"}')
    if self.family == 'qwen2' and not self.attention_bias:
      raise ValueError("family 'qwen2' needs attention_bias=True")

  @property
  def output_bias(self) -> bool:
    """Whether the attention's output projection has a bias."""
    return self.attention_bias and self.family != 'qwen2'

  def replace(self, **changes: Any) -> 'ModelConfig':
    return dataclasses.replace(self, **changes)
