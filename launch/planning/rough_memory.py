"""Estimates a phase's memory from sizes alone, and lists how it may need less.

Nothing is traced or compiled here: this is what every run does at its start.
"""

import dataclasses
from collections.abc import Iterator

import jax
from jax.sharding import Mesh

from jaxrl.algorithms import requirements
from jaxrl.component_calls import ComponentCall
from jaxrl.models.model_config import ModelConfig
from jaxrl.models.transformer_lm import MAX_UNROLLED_LAYERS
from jaxrl.training.batching import batch_builder
from jaxrl.training.parallelism import device_memory, sharding
from kernels.token_logprobs import KEPT_BYTES, MOST_LOGITS
from launch.learner.learner_factory import MemoryChoice, PhaseSpec
from launch.runtime import host_memory
from launch.settings.run_settings import RunSettings

# Tokens of a micro-batch on a device below which smaller ones make products slow.
EFFICIENT_TOKENS = {'cpu': 512}
DEFAULT_EFFICIENT_TOKENS = 8192
# How many times `_layer_width` a layer keeps of a token; 1.1 to 1.9 was measured.
KEPT_WIDTHS = 2.5
FULL, NONE = ComponentCall('full'), ComponentCall('none')
PRODUCTS = ComponentCall('products')


@dataclasses.dataclass(frozen=True)
class Room:
  """Holds the memory that a phase may fill.

  Attributes:
    limit: Bytes of each device, or of this process where the device is the CPU.
    held: Bytes of them that are neither the learner's nor the engine's.
    source: What limits them, for people.
  """

  limit: float
  held: float
  source: str

  def __str__(self) -> str:
    return f'{self.limit / 1e9:,.3g} GB ({self.source})'


def read_room(mesh: Mesh, loaded: float) -> Room:
  """Reads the memory of this process's devices; of several processes, the least.

  Args:
    mesh: Devices of the learner.
    loaded: Bytes of the model's parameters, which this process holds already.
  """
  local = [x for x in mesh.devices.flat if x.process_index == jax.process_index()]
  if not local or local[0].platform == 'cpu':
    memory = host_memory.read_host_memory()
    room = Room(memory.limit, max(0.0, memory.held - loaded), memory.source)
  else:
    limit = device_memory.read_limit(mesh)
    room = Room(limit or float('inf'), 0.0, "the device's memory")
  if jax.process_count() == 1:
    return room
  from jax.experimental import multihost_utils  # few runs have several processes

  free = multihost_utils.process_allgather(jax.numpy.float32(room.limit - room.held))
  return Room(float(free.min()) + room.held, room.held, room.source)


@dataclasses.dataclass(frozen=True)
class PhasePlan:
  """Describes a phase that has to fit, and what it may choose.

  Attributes:
    settings: Settings of the run.
    shape: The model's shape.
    mesh: Devices of the learner.
    phase: The phase.
    platform: Platform of the devices.
  """

  settings: RunSettings
  shape: ModelConfig
  mesh: Mesh
  phase: PhaseSpec
  platform: str

  @property
  def plays(self) -> bool:
    """Whether an engine generates in this phase."""
    return self.phase.name == 'train' and self.settings.plays

  @property
  def length(self) -> int:
    """Tokens of the longest rows."""
    return max(self.settings.batch.padded_lengths)

  def rows(self, num_micro_batches: int) -> int:
    """Returns the rows of a micro-batch."""
    algorithm = self.settings.algorithm
    unit = batch_builder.batch_unit_size(algorithm) if self.phase.name == 'train' else 1
    chunks = self.settings.batch.num_minibatches * max(1, num_micro_batches)
    shards = sharding.num_row_shards(self.mesh)
    rows = self.phase.num_rows
    if self.phase.name == 'train':
      rows *= self.settings.rows_per_sample
    return batch_builder.rows_per_micro_batch(rows, chunks, unit, shards)

  def candidates(self) -> Iterator[MemoryChoice]:
    """Yields what the phase may choose, what costs the least time first.

    Smaller micro-batches come first, as long as products stay large; then, everything
    is computed again; then, micro-batches get as small as can be.
    """
    batch, remat = self.settings.batch, self.settings.model.remat
    tokens = EFFICIENT_TOKENS.get(self.platform, DEFAULT_EFFICIENT_TOKENS)
    tokens *= sharding.num_row_shards(self.mesh)
    counts = [batch.num_micro_batches] if batch.num_micro_batches else self._counts()
    large = [n for n in counts[1:] if self.rows(n) * self.length >= tokens]
    efficient = [counts[0], *large]
    small = [n for n in counts if n not in efficient]
    policies = [self._fastest_remat, FULL] if remat.name == 'auto' else [remat]
    for group in (efficient, small):
      for policy in policies:
        for count in group:
          text = f'{count} micro-batch{"es" if count > 1 else ""}, remat {policy}'
          if batch.packing_plan is not None:  # whose plan decides how many
            text = f'remat {policy}'
          yield MemoryChoice(count, policy, text)

  @property
  def _fastest_remat(self) -> ComponentCall:
    """What a backward pass keeps that need not save memory.

    On a CPU, the layers of a deep model write what they keep to memory, and reading it
    again takes longer than computing it, other than products and attention. A shallow
    model is unrolled there. The chunks of a DeltaNet are long to compute.
    """
    is_deep = self.shape.num_layers > MAX_UNROLLED_LAYERS
    scans = self.platform == 'cpu' and is_deep and not self.shape.has_linear_attention
    return PRODUCTS if scans else NONE

  def _counts(self) -> list[int]:
    """Lists numbers of micro-batches, each with fewer rows than the one before."""
    counts = [1]
    if self.settings.batch.packing_plan is None:
      while self.rows(2 * counts[-1]) < self.rows(counts[-1]):
        counts.append(2 * counts[-1])
    return counts

  def estimate(self, choice: MemoryChoice, num_params: float) -> float:
    """Estimates the bytes that the phase needs from sizes alone, rather too high.

    Args:
      choice: How it divides its batches.
      num_params: Number of the model's parameters.
    """
    shape, settings, mesh = self.shape, self.settings, self.mesh
    # Learner, gradients, two moments, a reference, as loaded, and for an engine what it
    # serves, what it will, and what that is made of.
    copies = 5 + (3 if self.plays else 0)
    copies += 'ref_logprobs' in requirements.needs(settings.algorithm)
    shards = mesh.size // mesh.shape.get('data', 1) // mesh.shape.get('context', 1)
    tokens = self.rows(choice.num_micro_batches) * self.length
    tokens /= sharding.num_row_shards(mesh)
    if (packing := settings.batch.packing_plan) is not None:
      tokens = max(1, packing.num_parallel or 2) * max(packing.tokens, self.length)
    layers = 4 * shape.num_layers * tokens * KEPT_WIDTHS * self._layer_width()
    logits = 8 * 4 * min(tokens * shape.vocab_size, MOST_LOGITS)
    if self.platform in ('gpu', 'cuda'):
      logits = self._gpu_logits(tokens * shape.vocab_size)
    cache = 0.0
    if self.plays and not settings.cluster.ray:
      slots = settings.rollout.max_num_seqs * settings.batch.max_length
      cache = 4.0 * slots * shape.num_layers * 2 * shape.num_kv_heads * shape.head_dim
    return 4 * num_params * copies / shards + layers + logits + cache

  def _gpu_logits(self, logits: float) -> float:
    """Returns the bytes of a softmax that is kept or formed again, and of its tiles."""
    from kernels.kept_softmax import TILE_LOGITS  # as below, for GPUs alone
    from launch.planning import device_budget

    budget = device_budget.kept_bytes(self.settings, self.mesh)
    budget = KEPT_BYTES if budget is None else budget
    itemsize = 4 if self.settings.model.dtype == 'float32' else 2
    kept = min(itemsize * logits, max(budget, itemsize * TILE_LOGITS))
    return kept + 2 * 4 * min(logits, TILE_LOGITS)

  def _layer_width(self) -> float:
    """Returns about how many numbers a layer computes of a token."""
    shape = self.shape
    heads = (shape.num_heads + 2 * shape.num_kv_heads) * shape.head_dim
    inner = shape.intermediate_size
    if shape.num_experts:
      used = shape.moe_intermediate_size * max(1, shape.num_experts_per_token)
      inner = max(inner, used)
    scores = shape.num_heads * min(self.length, 128)
    return 4 * shape.hidden_size + 2 * heads + 3 * inner + 2 * scores
