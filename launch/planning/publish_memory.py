"""Computes the learner's device memory that publishing the weights takes."""

import dataclasses
import functools
import math
from typing import Any

import jax

from jaxrl.models import hf_names, lora
from jaxrl.models.decoding import eight_bit_weights
from jaxrl.models.lora import Lora
from jaxrl.rollout.weights.direct_transfer import TransferOptions
from jaxrl.rollout.weights.publisher import PublisherOptions
from jaxrl.rollout.weights.snapshots import is_compared_on_device
from jaxrl.training.learner import Learner
from jaxrl.types import Params
from kernels.block_rounding import BlockFormat
from launch.planning import planned_run
from launch.planning.compiled_program import CompiledProgram, bytes_per_device
from launch.planning.planned_run import PlannedRun

# Copies on their way while the learner learns, by what it waits for; where that is
# never, the newest may wait beside the one that is sent. See `WeightSyncer`.
PENDING_COPIES = {'current': 0, 'previous': 1, 'none': 2}


@dataclasses.dataclass(frozen=True)
class PublishMemory:
  """Computes the memory that publishing the weights takes, in bytes by part.

  Attributes:
    run: The run.
    learner: Its learner, built from shapes.
  """

  run: PlannedRun
  learner: Learner

  def trace_merge(self) -> dict[str, Any]:
    """Traces the program that merges adapters for the engines, if there is one.

    Returns:
      The traced program under the name 'merge'; empty if nothing is merged.
    """
    merges = self._adapters and not self._sends_adapters
    if not self.run.settings.plays or not merges:
      return {}
    return {'merge': self.learner._inference_params.merge.trace(self.learner.params)}

  def pending(self) -> dict[str, float]:
    """Returns the memory of versions that are pending or kept in every phase."""
    settings, memory = self.run.settings, {}
    if count := PENDING_COPIES[settings.weight_sync.sync_policy.wait_for]:
      memory['versions on their way'] = count * bytes_per_device(self._published)
    if self._finds_changes_on_device:
      compared = (
        x
        for x in jax.tree.leaves(self._sent)
        if is_compared_on_device(_shard_size(x), x.dtype)
      )
      memory['version before'] = bytes_per_device(list(compared))
    return memory

  def publishing(self, merge: CompiledProgram | None = None) -> dict[str, float]:
    """Returns the additional memory in use while a version is published.

    Args:
      merge: The compiled program that merges adapters, None if there is none.
    """
    memory = {'gradients': 0.0, 'temporaries': self._copied_bytes()}
    if self._sent_format is not None:
      rounded = eight_bit_weights.parts(self._published)
      memory = {'rounded weights': bytes_per_device(rounded), **memory}
    if merge is None:
      return memory
    memory['temporaries'] = max(memory['temporaries'], merge.temporaries)
    return {'merged weights': bytes_per_device(self._merged), **memory}

  @property
  def _adapters(self) -> Lora | None:
    return self.learner.model.config.lora

  @property
  def _sends_adapters(self) -> bool:
    return self._adapters is not None and self._adapters.transfer == 'adapters'

  @property
  def _sent_format(self) -> BlockFormat | None:
    """The format of 8-bit weights that the learner sends; None for others."""
    return None if self._sends_adapters else self.run.settings.engine.weights_format

  @functools.cached_property
  def _merged(self) -> Params:
    """The shapes of the weights before rounding, sharded as on the learner."""
    model, params = self.learner.model, self.learner.params
    if self._sends_adapters:
      return params
    merge = functools.partial(lora.merged, model.config, dtype=model.dtype)
    return jax.tree.map(
      lambda x, param: jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=param.sharding),
      jax.eval_shape(merge, params),
      lora.without(params),
    )

  @functools.cached_property
  def _published(self) -> Params:
    """The shapes of the published weights, sharded as on the learner."""
    form = self._sent_format
    return self._merged if form is None else _encoded(self._merged, form)

  @property
  def _sent(self) -> Params:
    """The shapes of the published weights in the transport's dtype."""
    dtype = self.run.settings.transport.options.dtype
    return planned_run.cast_shapes(self._published, dtype)

  @property
  def _finds_changes_on_device(self) -> bool:
    options = self.run.settings.transport.options
    return isinstance(options, PublisherOptions) and options.on_device

  def _copied_bytes(self) -> float:
    """Returns the bytes that a transport copies on a device before it sends."""
    run, transport = self.run, self.run.settings.transport
    options = transport.options
    if transport.name == 'inprocess':
      # What the engine makes of it, beside what it serves yet; a cast is one more copy.
      served = planned_run.served_params(run, options.dtype)
      form = run.settings.engine.weights_format
      copies = 1 if options.dtype is None else 2
      return copies * bytes_per_device(planned_run.encoded_shapes(served, form))
    if isinstance(options, TransferOptions):
      width = jax.numpy.dtype(options.dtype or 'float32').itemsize
      tensors = hf_names.checkpoint_tensors(run.shape)
      largest = width * max(math.prod(tensor.shape) for tensor in tensors)
      return max(options.buffer_bytes, largest)
    if self._finds_changes_on_device:  # a parameter at a time
      return max(bytes_per_device(x) for x in jax.tree.leaves(self._sent))
    return bytes_per_device(self._sent)


def _encoded(shapes: Params, form: BlockFormat) -> Params:
  """Returns shapes with codes and scales, for which XLA chooses a sharding.

  Codes take the kernel's here, and scales are whole on each device: at least as large.
  """
  encoded = planned_run.encoded_shapes(shapes, form)

  def shard(x: Any, known: Any) -> Any:
    if not isinstance(x, dict):
      return known
    if eight_bit_weights.CODES not in x:
      return {name: shard(value, known[name]) for name, value in x.items()}
    kernel = known['kernel']
    codes = jax.ShapeDtypeStruct(kernel.shape, 'int8', sharding=kernel.sharding)
    return x | {eight_bit_weights.CODES: codes}

  return shard(encoded, shapes)


def _shard_size(x: jax.ShapeDtypeStruct) -> int:
  """Returns the number of elements of one device's shard."""
  assert x.sharding is not None
  return math.prod(x.sharding.shard_shape(x.shape))
