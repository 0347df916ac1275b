"""Names of parameters in Hugging Face checkpoints, and how their shapes differ."""

import dataclasses
import functools
import math

import jax
import numpy as np

from jaxrl.models import families, layer_stack
from jaxrl.models.model_config import ModelConfig


@dataclasses.dataclass(frozen=True)
class CheckpointTensor:
  """One tensor of a checkpoint.

  Attributes:
    name: Its name there.
    path: Its place in the parameter tree.
    index: Its layer and expert, as far as it has them: indices of the first axes in the
      tree.
    inner: Its shape in the tree, without those axes.
    num_inputs: Leading axes of a kernel that are inputs; 0 for what is not a kernel.
  """

  name: str
  path: tuple[str, ...]
  index: tuple[int, ...]
  inner: tuple[int, ...]
  num_inputs: int

  @property
  def shape(self) -> tuple[int, ...]:
    """Returns the checkpoint's shape: a kernel is `[outputs, inputs]`, a bias flat."""
    if self.num_inputs:
      inputs, outputs = self.inner[: self.num_inputs], self.inner[self.num_inputs :]
      return (math.prod(outputs), math.prod(inputs))
    return (math.prod(self.inner),) if self.path[-1] == 'bias' else self.inner

  def from_hf(self, array: np.ndarray) -> np.ndarray:
    """Converts an array from the checkpoint's shape to the inner one.

    Args:
      array: The array.
    """
    return (array.T if self.num_inputs else array).reshape(self.inner)

  def to_hf(self, array: np.ndarray) -> np.ndarray:
    """Converts an array from the inner shape to the checkpoint's.

    Args:
      array: The array.
    """
    if not self.num_inputs:
      return array.reshape(self.shape)
    return array.reshape(self.shape[::-1]).T


def checkpoint_tensors(config: ModelConfig) -> list[CheckpointTensor]:
  """Lists every tensor of a checkpoint; the value head is not among them.

  Those outside the layers come first, then layer after layer.

  Args:
    config: The model's shape.
  """
  make = functools.partial(layer_stack.init, config)
  tree = jax.eval_shape(make, jax.eval_shape(lambda: jax.random.key(0)))
  spec = families.find_family(config.family)
  tensors = []
  for keys, leaf in jax.tree_util.tree_leaves_with_path(tree):
    path = tuple(key.key for key in keys)
    if path[0] == 'value_head':
      continue
    if path[0] != 'layers':
      name = spec.top_tensors['.'.join(path)]
      tensors.append(CheckpointTensor(name, path, (), leaf.shape, 0))
      continue
    template = spec.layer_tensors['.'.join(path[1:])]
    inputs = 0 if path[-1] != 'kernel' else 2 if path[1:3] == ('attention', 'o') else 1
    for layer in range(config.num_layers):
      if '{expert}' not in template:
        name = template.format(layer=layer)
        tensors.append(CheckpointTensor(name, path, (layer,), leaf.shape[1:], inputs))
        continue
      for expert in range(config.num_experts):
        name = template.format(layer=layer, expert=expert)
        tensors.append(
          CheckpointTensor(name, path, (layer, expert), leaf.shape[2:], inputs)
        )
  return sorted(tensors, key=lambda tensor: tensor.index[:1])
