"""Weights on their way to engines that merge the adapters themselves.

They are a learner's parameters, base and adapters, and by what the product of these is
scaled. A weight service that knows what changed since the version before then sends
the base once and adapters alone from there on.
"""

import dataclasses
from typing import Any

import numpy as np

from jaxrl.models import lora
from jaxrl.models.config import ModelConfig
from jaxrl.types import Params

SCALE = 'lora_scale'  # float32 `[1]`, beside the branches of the model


def given(config: ModelConfig, params: Params) -> Params:
  """`params` of a model with adapters, as engines are given them."""
  assert config.lora is not None
  return params | {SCALE: np.full(1, config.lora.scale, np.float32)}


def is_unmerged(params: Params) -> bool:
  return SCALE in params


def merge(params: Params, dtype: str) -> Params:
  """The parameters of the bare model: `lora.merged` of what `given` took."""
  base = {name: branch for name, branch in params.items() if name != SCALE}
  return lora.merge_by(params[SCALE][0], base, dtype)


@dataclasses.dataclass(frozen=True)
class _Kernel:
  """A stack of kernels, each merged when it is looked at, float32 and by numpy.

  A table is no stack: its index is ().
  """

  kernel: np.ndarray
  lora_a: np.ndarray
  lora_b: np.ndarray
  scale: np.float32
  is_table: bool

  def __getitem__(self, index: Any) -> np.ndarray:
    kernel, a, b = self.kernel[index], self.lora_a[index], self.lora_b[index]
    change = lora.product(a, b, kernel.shape, self.is_table, np.matmul)
    return kernel.astype(np.float32) + self.scale * change


def merge_on_host(params: Params) -> Params:
  """As `merge`, of numpy arrays, and without room for a second model.

  A stack of kernels with adapters gives merged ones by its index, a layer or more.
  """
  scale = np.float32(params[SCALE][0])

  def walk(tree: Params) -> Params:
    made = {name: walk(x) if isinstance(x, dict) else x for name, x in tree.items()}
    if 'lora_b' in made:
      a, b = (made.pop(name) for name in lora.ADAPTERS)
      name = lora.kernel_of(made)
      made[name] = _Kernel(made[name], a, b, scale, name == 'table')
    return made

  return walk({name: branch for name, branch in params.items() if name != SCALE})
