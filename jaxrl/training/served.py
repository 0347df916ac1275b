"""What engines are given of a learner's parameters."""

import dataclasses
import functools
from typing import Any

import jax
from jax.sharding import Mesh

from jaxrl.models import lora, unmerged
from jaxrl.training import programs
from jaxrl.training.state import Spec
from jaxrl.types import Params


@dataclasses.dataclass(frozen=True)
class Served:
  """Of a learner by its spec, on its mesh. To be called on the devices' thread."""

  spec: Spec
  mesh: Mesh

  def of(self, params: Params) -> Params:
    """`params`; with adapters a copy of the model into which these are merged, or
    `params` and their scale, where engines merge.
    """
    config = self.spec.model.config
    if config.lora is None:
      return params
    if config.lora.send == 'adapters':
      return unmerged.given(config, params)
    return self.merge(params)

  @functools.cached_property
  def merge(self) -> Any:
    """The program that merges, laid out as the parameters are."""
    config, dtype = self.spec.model.config, self.spec.model.dtype
    layout = lora.without(programs.params_shapes(self.spec, self.mesh))
    run = functools.partial(lora.merged, config, dtype=dtype)
    return jax.jit(run, out_shardings=programs.shardings_of(layout))
