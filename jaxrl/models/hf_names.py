"""Names of parameters in Hugging Face checkpoints, and how their shapes differ."""

import dataclasses
import functools
import math

import jax
import jax.numpy as jnp
import numpy as np

from jaxrl.models import families, layer_stack
from jaxrl.models.families.family_spec import StoredAs
from jaxrl.models.model_config import ModelConfig
from jaxrl.types import AnyArray, PyTree


@dataclasses.dataclass(frozen=True)
class CheckpointTensor:
  """One tensor of a checkpoint that is one parameter, or a part of one.

  Attributes:
    name: Its name there.
    path: Its place in the parameter tree.
    index: Its layer and expert, as far as it has them: indices of the first axes in the
      tree.
    inner: Its shape in the tree, without those axes.
    num_inputs: Leading axes of a kernel that are inputs; 0 for what is not a kernel.
    stacked: The sizes of the first axes in the tree, those of `index`.
    lead: Axes of `inner` before a kernel's inputs: 1 where a tensor holds all experts.
    transposed: Whether the checkpoint has a kernel's outputs before its inputs.
    depthwise: Whether it is the kernel of a depthwise convolution; see `StoredAs`.
    dtype: What it is written in; '' is what the folder is written in.
  """

  name: str
  path: tuple[str, ...]
  index: tuple[int, ...]
  inner: tuple[int, ...]
  num_inputs: int
  stacked: tuple[int, ...] = ()
  lead: int = 0
  transposed: bool = True
  depthwise: bool = False
  dtype: str = ''

  @property
  def parts(self) -> tuple['CheckpointTensor', ...]:
    """Returns the parameters that the tensor holds: itself."""
    return (self,)

  @property
  def _matrix(self) -> tuple[int, ...]:
    """Returns the kernel's shape with one axis of inputs and one of outputs."""
    lead, end = self.lead, self.lead + self.num_inputs
    sizes = math.prod(self.inner[lead:end]), math.prod(self.inner[end:])
    return (*self.inner[:lead], *sizes)

  @property
  def shape(self) -> tuple[int, ...]:
    """Returns the checkpoint's shape: a kernel is `[outputs, inputs]`, a bias flat."""
    if self.depthwise:
      return (math.prod(self.inner[1:]), 1, self.inner[0])
    if self.num_inputs:
      *lead, inputs, outputs = self._matrix
      return (*lead, outputs, inputs) if self.transposed else self._matrix
    if self.path[-1] in ('bias', 'scale') and not self.lead:
      return (math.prod(self.inner),)
    return self.inner

  def from_hf(self, array: np.ndarray) -> np.ndarray:
    """Converts an array from the checkpoint's shape to the inner one.

    Args:
      array: The array.
    """
    if self.depthwise:
      array = array[:, 0].T
    elif self.num_inputs and self.transposed:
      array = array.swapaxes(-1, -2)
    return array.reshape(self.inner)

  def to_hf(self, array: np.ndarray) -> np.ndarray:
    """Converts an array from the inner shape to the checkpoint's.

    Args:
      array: The array.
    """
    if self.depthwise:
      return array.reshape(len(array), -1).T[:, None]
    if not self.num_inputs:
      return array.reshape(self.shape)
    array = array.reshape(self._matrix)
    return array.swapaxes(-1, -2) if self.transposed else array

  def split(self, array: np.ndarray) -> list[np.ndarray]:
    """Converts an array of the checkpoint to the inner shape of each part.

    Args:
      array: The array.
    """
    return [self.from_hf(array)]

  def join(self, arrays: list[PyTree]) -> PyTree:
    """Converts each part's array to an array of the checkpoint.

    Args:
      arrays: Numpy or JAX arrays.
    """
    return self.to_hf(arrays[0])


class ConvolutionTensor(CheckpointTensor):
  """A kernel with all its axes in the checkpoint, `[outputs, *inputs]`."""

  @property
  def shape(self) -> tuple[int, ...]:
    """Returns the checkpoint's shape."""
    return (*self.inner[self.num_inputs :], *self.inner[: self.num_inputs])

  def from_hf(self, array: np.ndarray) -> np.ndarray:
    """Converts an array as `CheckpointTensor.from_hf` does."""
    return super().from_hf(array.reshape(self._matrix[::-1]))

  def to_hf(self, array: np.ndarray) -> np.ndarray:
    """Converts an array as `CheckpointTensor.to_hf` does."""
    return super().to_hf(array).reshape(self.shape)


@dataclasses.dataclass(frozen=True)
class FusedTensor:
  """One tensor of a checkpoint that holds several parameters.

  Attributes:
    name: Its name there.
    parts: The parameters, whose outputs follow one another.
    turns: How often they do, each time with an equal share of the outputs of each.
  """

  name: str
  parts: tuple[CheckpointTensor, ...]
  turns: int = 1

  @property
  def index(self) -> tuple[int, ...]:
    """Returns the indices of the layer and expert."""
    return self.parts[0].index

  @property
  def _axis(self) -> int:
    """Returns the axis of outputs, counted from the last."""
    first = self.parts[0]
    if first.depthwise:
      return -3
    return -2 if first.num_inputs and first.transposed else -1

  @property
  def shape(self) -> tuple[int, ...]:
    """Returns the checkpoint's shape."""
    sizes, axis = list(self.parts[0].shape), self._axis
    sizes[axis] = sum(part.shape[axis] for part in self.parts)
    return tuple(sizes)

  def split(self, array: np.ndarray) -> list[np.ndarray]:
    """Converts an array of the checkpoint to the inner shape of each part.

    Args:
      array: The array.
    """
    axis = self._axis
    shares = [part.shape[axis] // self.turns for part in self.parts]
    array = _in_turns(array, axis, self.turns)
    cut = np.split(array, np.cumsum(shares)[:-1], axis=axis)
    cut = [x.reshape(part.shape) for part, x in zip(self.parts, cut, strict=True)]
    return [part.from_hf(x) for part, x in zip(self.parts, cut, strict=True)]

  def join(self, arrays: list[PyTree]) -> PyTree:
    """Converts each part's array to an array of the checkpoint.

    Args:
      arrays: Numpy or JAX arrays.
    """
    converted = [part.to_hf(x) for part, x in zip(self.parts, arrays, strict=True)]
    library = np if isinstance(converted[0], np.ndarray) else jnp
    if self.turns == 1:
      return library.concatenate(converted, axis=self._axis)
    converted = [_in_turns(x, self._axis, self.turns) for x in converted]
    return library.concatenate(converted, axis=self._axis).reshape(self.shape)


def _in_turns(array: AnyArray, axis: int, turns: int) -> PyTree:
  """Splits an axis, counted from the last, into two: turns and the elements of each."""
  end = array.ndim + axis
  return array.reshape(*array.shape[:end], turns, -1, *array.shape[end + 1 :])


def checkpoint_tensors(config: ModelConfig) -> list[CheckpointTensor | FusedTensor]:
  """Lists every tensor of a checkpoint; the value head is not among them.

  Those outside the layers come first, then layer after layer.

  Args:
    config: The model's shape.
  """
  make = functools.partial(layer_stack.init, config)
  tree = jax.eval_shape(make, jax.eval_shape(lambda: jax.random.key(0)))
  spec = families.find_family(config.family)
  tensors: list[CheckpointTensor | FusedTensor] = []
  stacked, tower = tree.pop('layers'), tree.pop('vision', {})
  for keys, leaf in jax.tree_util.tree_leaves_with_path(tree):
    path = tuple(key.key for key in keys)
    if path[0] != 'value_head':
      name, inputs = spec.top_tensors['.'.join(path)], int(path[-1] == 'kernel')
      tensors.append(CheckpointTensor(name, path, (), leaf.shape, inputs))
  tensors += _tower_tensors(spec, tower)
  for layer, (stack, place) in enumerate(layer_stack.places(config)):
    stack_params = stacked[stack] if stack else stacked
    where = ('layers', stack) if stack else ('layers',)
    tensors += _layer_tensors(config, layer, stack_params, where, place)
  return tensors


def _tower_tensors(spec: families.FamilySpec, tree: PyTree) -> list[CheckpointTensor]:
  """Returns the tensors of a vision tower."""
  tensors = []
  for keys, leaf in jax.tree_util.tree_leaves_with_path(tree):
    path = tuple(key.key for key in keys)
    name = spec.tower_tensors['.'.join(path)]
    inputs = int(path[-1] == 'kernel') * {'patch_embedding': 4, 'out': 2}.get(
      path[-2] if len(path) > 1 else '', 1
    )
    kind = ConvolutionTensor if inputs > 2 else CheckpointTensor
    lead = int('{layer}' in name)
    for index in np.ndindex(leaf.shape[:lead]):
      tensor_name = name.format(layer=index[0]) if index else name
      shapes = leaf.shape[lead:], inputs, leaf.shape[:lead]
      tensors.append(kind(tensor_name, ('vision', *path), index, *shapes))
  return tensors


def _layer_tensors(
  config: ModelConfig, layer: int, tree: PyTree, where: tuple[str, ...], place: int
) -> list[CheckpointTensor | FusedTensor]:
  """Returns the tensors of a layer whose parameters are at index `place` of a stack."""
  by_name: dict[str, list[CheckpointTensor]] = {}
  turns: dict[str, int] = {}
  order = {name: i for i, name in enumerate(config.spec.layer_tensors)}
  leaves = [
    ('.'.join(key.key for key in keys), leaf)
    for keys, leaf in jax.tree_util.tree_leaves_with_path(tree)
  ]
  for name, leaf in leaves:
    stored = config.spec.layer_tensors[name]
    stored = StoredAs(stored) if isinstance(stored, str) else stored
    path = (*where, *name.split('.'))
    inputs = 0 if path[-1] != 'kernel' else 2 if name.endswith('.o.kernel') else 1
    has_experts = '.experts.' in name
    each = has_experts and '{expert}' in stored.name
    for expert in range(config.num_experts if each else 1):
      at = (place, expert) if each else (place,)
      tensor = CheckpointTensor(
        stored.name.format(layer=layer, expert=expert),
        path,
        at,
        leaf.shape[len(at) :],
        inputs,
        leaf.shape[: len(at)],
        int(has_experts and not each),
        stored.transposed,
        stored.depthwise,
        stored.dtype,
      )
      by_name.setdefault(tensor.name, []).append(tensor)
      turns[tensor.name] = getattr(config, stored.turns) if stored.turns else 1
  tensors = []
  for name, parts in by_name.items():
    parts.sort(key=lambda part: order['.'.join(part.path[len(where) :])])
    fused = FusedTensor(name, tuple(parts), turns[name])
    tensors.append(parts[0] if len(parts) == 1 else fused)
  return tensors
