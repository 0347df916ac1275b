"""Where each parameter stands in a Hugging Face checkpoint: one table for all."""

import dataclasses
import functools
import math

import jax
import numpy as np

from jaxrl.models import transformer
from jaxrl.models.config import ModelConfig

ENDS = {
  'embedding.table': 'model.embed_tokens.weight',
  'norm.scale': 'model.norm.weight',
  'lm_head.table': 'lm_head.weight',
}
# Each is a name after 'model.layers.N.'.
LAYER = {
  'attention_norm.scale': 'input_layernorm.weight',
  'attention.q.kernel': 'self_attn.q_proj.weight',
  'attention.q.bias': 'self_attn.q_proj.bias',
  'attention.k.kernel': 'self_attn.k_proj.weight',
  'attention.k.bias': 'self_attn.k_proj.bias',
  'attention.v.kernel': 'self_attn.v_proj.weight',
  'attention.v.bias': 'self_attn.v_proj.bias',
  'attention.o.kernel': 'self_attn.o_proj.weight',
  'attention.o.bias': 'self_attn.o_proj.bias',
  'attention.q_norm.scale': 'self_attn.q_norm.weight',
  'attention.k_norm.scale': 'self_attn.k_norm.weight',
  'mlp_norm.scale': 'post_attention_layernorm.weight',
  'mlp.gate.kernel': 'mlp.gate_proj.weight',
  'mlp.up.kernel': 'mlp.up_proj.weight',
  'mlp.down.kernel': 'mlp.down_proj.weight',
  'mlp.router.kernel': 'mlp.gate.weight',
}
# Each is a name after 'model.layers.N.mlp.experts.M.'.
EXPERT = {
  'mlp.experts.gate.kernel': 'gate_proj.weight',
  'mlp.experts.up.kernel': 'up_proj.weight',
  'mlp.experts.down.kernel': 'down_proj.weight',
}


@dataclasses.dataclass(frozen=True)
class Tensor:
  """One tensor of a checkpoint. path: its place in the parameter tree; index: along
  the first axes there, its layer and its expert, as far as it has them; inner: its
  shape there, without those axes; num_inputs: leading axes of a kernel that are inputs,
  0 for what is not a kernel.
  """

  name: str
  path: tuple[str, ...]
  index: tuple[int, ...]
  inner: tuple[int, ...]
  num_inputs: int

  @property
  def shape(self) -> tuple[int, ...]:
    """The shape in the checkpoint: a kernel is `[outputs, inputs]`, a bias is flat."""
    if self.num_inputs:
      inputs, outputs = self.inner[: self.num_inputs], self.inner[self.num_inputs :]
      return (math.prod(outputs), math.prod(inputs))
    return (math.prod(self.inner),) if self.path[-1] == 'bias' else self.inner

  def from_hf(self, array: np.ndarray) -> np.ndarray:
    """From the checkpoint's shape to the inner one."""
    return (array.T if self.num_inputs else array).reshape(self.inner)

  def to_hf(self, array: np.ndarray) -> np.ndarray:
    """From the inner shape to the checkpoint's."""
    if not self.num_inputs:
      return array.reshape(self.shape)
    return array.reshape(self.shape[::-1]).T


def tensors(config: ModelConfig) -> list[Tensor]:
  """Every tensor of a checkpoint of this model; the value head has no place there.

  The ends come first, then layer after layer, each whole.
  """
  make = functools.partial(transformer.init, config)
  tree = jax.eval_shape(make, jax.eval_shape(lambda: jax.random.key(0)))
  found = []
  for keys, leaf in jax.tree_util.tree_leaves_with_path(tree):
    path = tuple(key.key for key in keys)
    if path[0] == 'value_head':
      continue
    if path[0] != 'layers':
      found.append(Tensor(ENDS['.'.join(path)], path, (), leaf.shape, 0))
      continue
    inner = '.'.join(path[1:])
    inputs = 0 if path[-1] != 'kernel' else 2 if path[1:3] == ('attention', 'o') else 1
    for layer in range(config.num_layers):
      start = f'model.layers.{layer}'
      if inner not in EXPERT:
        name = f'{start}.{LAYER[inner]}'
        found.append(Tensor(name, path, (layer,), leaf.shape[1:], inputs))
        continue
      for expert in range(config.num_experts):
        name = f'{start}.mlp.experts.{expert}.{EXPERT[inner]}'
        found.append(Tensor(name, path, (layer, expert), leaf.shape[2:], inputs))
  return sorted(found, key=lambda tensor: tensor.index[:1])
