"""Computes the learner's device memory that publishing the weights takes."""

import functools
import math
from typing import Any

import jax

from jaxrl.models import hf_names, lora
from jaxrl.models.decoding import eight_bit_weights
from jaxrl.rollout.weights.direct_transfer import TransferOptions
from jaxrl.rollout.weights.publisher import PublisherOptions
from jaxrl.rollout.weights.snapshots import is_compared_on_device
from jaxrl.rollout.weights.weight_store import WeightStoreOptions
from jaxrl.training.learner import Learner
from jaxrl.types import Params
from kernels.block_rounding import BlockFormat
from launch.planning import planned_run
from launch.planning.compiled_program import CompiledProgram, bytes_per_device
from launch.planning.planned_run import PlannedRun

# Copies on their way while the learner learns, by what it waits for; where that is
# never, the newest may wait beside the one that is sent. See `WeightSyncer`.
PENDING_COPIES = {'current': 0, 'previous': 1, 'none': 2}


def trace_merge(run: PlannedRun, learner: Learner) -> dict[str, Any]:
  """Traces the program that merges adapters for the engines.

  Args:
    run: The run.
    learner: Its learner, built from shapes.

  Returns:
    The traced program under the name 'merge'; empty if nothing is merged.
  """
  adapters = learner.model.config.lora
  if not run.publishes_weights or adapters is None or adapters.transfer == 'adapters':
    return {}
  return {'merge': learner._inference_params.merge.trace(learner.params)}


def pending_memory(run: PlannedRun, learner: Learner) -> dict[str, float]:
  """Computes the memory of versions that are pending or kept in every phase.

  Args:
    run: The run.
    learner: Its learner, built from shapes.

  Returns:
    Bytes of each device, by part.
  """
  style, transport = run.settings.weight_sync.sync_policy, run.settings.transport
  published, memory = _published_shapes(run, learner), {}
  if count := PENDING_COPIES[style.wait_for]:
    memory['versions on their way'] = count * bytes_per_device(published)
  if _finds_changes_on_device(transport.options):
    cast = planned_run.cast_shapes(published, transport.options.dtype)
    compared = (
      x for x in jax.tree.leaves(cast) if is_compared_on_device(_shard_size(x), x.dtype)
    )
    memory['version before'] = bytes_per_device(list(compared))
  return memory


def publishing_memory(
  run: PlannedRun, learner: Learner, merge: CompiledProgram | None
) -> dict[str, float]:
  """Computes the additional memory in use while a version is published.

  Args:
    run: The run.
    learner: Its learner, built from shapes.
    merge: The compiled program that merges adapters, None if there is none.

  Returns:
    Bytes of the fullest device, by part.
  """
  memory = {'gradients': 0.0, 'temporaries': _copied_bytes(run, learner)}
  form = _sent_format(run, learner)
  if form is not None:
    rounded = eight_bit_weights.parts(_encoded(_merged_shapes(learner), form))
    memory = {'rounded weights': bytes_per_device(rounded), **memory}
  if merge is None:
    return memory
  memory['temporaries'] = max(memory['temporaries'], merge.temporaries)
  return {'merged weights': bytes_per_device(_merged_shapes(learner)), **memory}


def _sent_format(run: PlannedRun, learner: Learner) -> BlockFormat | None:
  """Returns the format of 8-bit weights that the learner sends; None for others."""
  adapters = learner.model.config.lora
  if adapters is not None and adapters.transfer == 'adapters':
    return None
  return run.settings.engine.weights_format


def _published_shapes(run: PlannedRun, learner: Learner) -> Params:
  """Returns the shapes of the published weights, sharded as on the learner."""
  form, shapes = _sent_format(run, learner), _merged_shapes(learner)
  return shapes if form is None else _encoded(shapes, form)


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


def _merged_shapes(learner: Learner) -> Params:
  """Returns the shapes of the weights before rounding, sharded as on the learner."""
  config, params = learner.model.config, learner.params
  if config.lora and config.lora.transfer == 'adapters':
    return params
  merge = functools.partial(lora.merged, config, dtype=learner.model.dtype)
  return jax.tree.map(
    lambda x, param: jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=param.sharding),
    jax.eval_shape(merge, params),
    lora.without(params),
  )


def _shard_size(x: jax.ShapeDtypeStruct) -> int:
  """Returns the number of elements of one device's shard."""
  assert x.sharding is not None
  return math.prod(x.sharding.shard_shape(x.shape))


def _finds_changes_on_device(options: WeightStoreOptions) -> bool:
  return isinstance(options, PublisherOptions) and options.on_device


def _copied_bytes(run: PlannedRun, learner: Learner) -> float:
  """Returns the bytes that a transport copies on a device before it sends anything."""
  transport, options = run.settings.transport, run.settings.transport.options
  dtype = options.dtype
  published = planned_run.cast_shapes(_published_shapes(run, learner), dtype)
  if transport.name == 'inprocess':
    # What the engine makes of it, beside what it serves yet; a cast is one more copy.
    served = planned_run.served_params(run, dtype)
    form = run.settings.engine.weights_format
    copies = 1 if dtype is None else 2
    return copies * bytes_per_device(planned_run.encoded_shapes(served, form))
  if isinstance(options, TransferOptions):
    width = jax.numpy.dtype(dtype or 'float32').itemsize
    largest = max(
      math.prod(tensor.shape) for tensor in hf_names.checkpoint_tensors(run.shape)
    )
    return max(options.buffer_bytes, largest * width)
  if _finds_changes_on_device(options):  # a parameter at a time
    return max(bytes_per_device(x) for x in jax.tree.leaves(published))
  return bytes_per_device(published)
