"""The learner: owns the mesh and the train state, and turns groups into updates."""

import dataclasses
import logging
import time
from collections.abc import Mapping, Sequence
from typing import Any

import jax
import numpy as np
from jax.sharding import Mesh

from jaxrl.algorithms import compose
from jaxrl.data.packing import pack
from jaxrl.dispatch import Dispatcher
from jaxrl.models.model import Model
from jaxrl.training import metrics as reports
from jaxrl.training import minibatches as dealing
from jaxrl.training import programs, sharding
from jaxrl.training.checkpoint import Checkpointer
from jaxrl.training.mesh import single_device_mesh
from jaxrl.training.optimizer import Optimizer, adamw
from jaxrl.training.state import Spec
from jaxrl.types import Algorithm, Batch, Group, Params

log = logging.getLogger(__name__)
Metrics = dict[str, float]


class Learner:
  """Trains `model` by `algorithm`, one `update` a step.

  params: a tree as `model.init` gives it; copied. mesh: default, the first device.
  dispatcher: runs the device work; default, one of its own. ref_params: the reference
  policy, if a part reads one; default, `params`.
  num_rows: rows of a usual batch. buckets: lengths that rows are padded to.
  minibatches: optimizer updates a batch. micro_batches: parts of a minibatch whose
  gradients are summed, to save memory. epochs: passes over a batch. temperature: the
  one that rollouts are sampled at. seed: of the minibatches' order. entropy: report
  the exact entropy though no part reads it. mismatch_alarm: mean |Δlog-prob| between
  rollout and learner from which on it warns.
  """

  def __init__(
    self,
    model: Model,
    params: Params,
    algorithm: Algorithm,
    *,
    num_rows: int,
    buckets: Sequence[int],
    mesh: Mesh | None = None,
    optimizer: Optimizer | None = None,
    dispatcher: Dispatcher | None = None,
    ref_params: Params | None = None,
    minibatches: int = 1,
    micro_batches: int = 1,
    epochs: int = 1,
    temperature: float = 1.0,
    seed: int = 0,
    entropy: bool = True,
    mismatch_alarm: float = 0.1,
  ):
    for name, value in (('minibatches', minibatches), ('micro_batches', micro_batches)):
      if value < 1:
        raise ValueError(f'{name}={value} must be at least 1')
    self.mesh = mesh or single_device_mesh()
    model = dataclasses.replace(model, constrain=sharding.Constrain(self.mesh))
    self.optimizer = optimizer or adamw()
    self.temperature, self.seed, self.step = temperature, seed, 0
    self._dispatcher = dispatcher or Dispatcher('learner')
    self._buckets = tuple(sorted(buckets))
    self._minibatches, self._epochs = minibatches, epochs
    self._mismatch_alarm, self._alarmed = mismatch_alarm, False
    static, self._parts = compose.split_numbers(algorithm)
    self._spec = Spec(model, static, micro_batches, entropy)
    self._shape = self._usual_shape(num_rows)
    self._warm: set[programs.Shape] = set()
    _check_params(self._spec, self.mesh, params)
    self._state = programs.init_state(self._spec, self.mesh, params)
    self._advantages: jax.Array | None = None
    self._reference = None
    if 'ref_logprobs' in self._spec.needs:
      shapes = programs.params_shapes(self._spec, self.mesh)
      reference = params if ref_params is None else ref_params
      self._reference = programs.place(reference, shapes)

  @property
  def params(self) -> Params:
    """The newest parameters. The next update donates them: copy what must last."""
    return self._state.params

  @property
  def model(self) -> Model:
    """The model, its activations pinned to the learner's mesh."""
    return self._spec.model

  @property
  def advantages(self) -> jax.Array | None:
    """Of the last batch, `[B, T]`, rows in the order of its groups, then padding.

    On the device until read; None before any, and for algorithms without.
    """
    return self._advantages

  @property
  def algorithm_state(self) -> Any:
    return self._state.algorithm_state

  def set_algorithm(self, algorithm: Algorithm) -> None:
    """Goes on with other options. Only numbers may differ: nothing is recompiled."""
    static, parts = compose.split_numbers(algorithm)
    if static != self._spec.algorithm:
      raise ValueError('only the numeric options of an algorithm can change in a run')
    self._parts = parts

  async def warmup(self) -> Metrics:
    """Compiles the programs of every bucket, so that no later step compiles."""
    return await self._dispatcher.run(self._warm_up)

  async def update(self, groups: Sequence[Group]) -> Metrics:
    """Learns from `groups`, all of them, and counts one step up. Returns metrics.

    Raises ValueError for rows that fit no bucket or no micro-batch, and
    FloatingPointError when the loss or the gradient is not finite.
    """
    return await self._dispatcher.run(self._update, groups)

  async def save(
    self, checkpointer: Checkpointer, data: Mapping[str, Any], *, wait: bool = False
  ) -> None:
    """Checkpoints this learner, and `data`, JSON, under the current step."""

    def run() -> None:
      meta = {'learner': {'step': self.step, 'seed': self.seed}, 'data': dict(data)}
      checkpointer.save(self.step, self._arrays(), meta)
      if wait:
        checkpointer.wait()

    await self._dispatcher.run(run)

  async def restore(
    self, checkpointer: Checkpointer, step: int | None = None
  ) -> dict[str, Any]:
    """Continues from checkpoint `step`, or the newest; returns the `data` saved."""

    def run() -> dict[str, Any]:
      arrays, meta = checkpointer.restore(self._arrays(), step)
      self._state = arrays['state']
      self._reference = arrays.get('reference')
      self.step, seed = meta['learner']['step'], meta['learner']['seed']
      if seed != self.seed:
        log.warning('seed is %d; the checkpoint was written with %d', self.seed, seed)
      return meta['data']

    return await self._dispatcher.run(run)

  def _arrays(self) -> dict[str, Any]:
    arrays = {'state': self._state}
    if self._reference is not None:
      arrays['reference'] = self._reference
    return arrays

  def _usual_shape(self, num_rows: int, length: int = 0) -> programs.Shape:
    bins = self._minibatches * self._spec.micro_batches
    size = dealing.atom_size(self._spec.algorithm)
    multiple = sharding.rows_multiple(self.mesh)
    rows = dealing.micro_rows(num_rows, bins, size, multiple)
    return programs.Shape(rows * bins, length, rows)

  def _numbers(self) -> dict[str, Any]:
    """The traced options, as arrays of fixed dtypes."""
    numbers = {
      'parts': self._parts,
      'temperature': self.temperature,
      'optimizer': self.optimizer.numbers(self.step),
    }
    kind = {int: np.int32, float: np.float32}
    return jax.tree.map(lambda x: kind[type(x)](x), numbers)

  def _programs(self, shape: programs.Shape) -> tuple[Any, Any]:
    """(prepare or None, train) for a shape; says so when it must compile them."""
    if shape not in self._warm:
      log.info(
        'compiling the train step for %d rows of %d tokens, %d a micro-batch',
        *(shape.rows, shape.length, shape.micro_rows),
      )
      self._warm.add(shape)
    made = programs.Programs(self._spec, self.mesh, self._numbers())
    prepare = made.prepare(shape) if self._spec.prepares else None
    return prepare, made.train(shape)

  def _warm_up(self) -> Metrics:
    start = time.perf_counter()
    with programs.CompileCounter() as counter:
      for length in self._buckets:
        self._programs(dataclasses.replace(self._shape, length=length))
    seconds = time.perf_counter() - start
    return {'time/warmup': seconds, 'compile/programs': float(counter.count)}

  def _update(self, groups: Sequence[Group]) -> Metrics:
    start = time.perf_counter()
    host, shape, indices = self._lay_out(groups)
    with programs.CompileCounter() as counter:
      prepare, train = self._programs(shape)
      numbers = self._numbers()
      batch = self._put(host)
      packed = time.perf_counter()
      before: dict[str, Any] = {}
      if prepare is not None:
        state = self._state
        changed, before = prepare(
          state.params, self._reference, state.algorithm_state, batch, numbers
        )
        batch = jax.block_until_ready(batch.replace(**changed))
        self._advantages = batch.advantages
      prepared = time.perf_counter()
      updates = []
      for index in indices:
        self._state, update = train(self._state, batch, index, numbers)
        updates.append(update)
      before, updates = jax.device_get((before, updates))
    end = time.perf_counter()
    metrics = reports.average(updates) | reports.average([before])
    metrics |= reports.of_groups(groups) | reports.of_batch(host, self.step)
    metrics |= {
      'optimizer/learning_rate': float(numbers['optimizer']['learning_rate']),
      'compile/programs': float(counter.count),
      'time/pack': packed - start,
      'time/prepare': prepared - packed,
      'time/train': end - prepared,
      'time/learn': end - start,
      'tokens/learned_per_second': metrics['tokens/total'] / (end - start),
    }
    self._check(metrics, host)
    self.step += 1
    return metrics

  def _lay_out(
    self, groups: Sequence[Group]
  ) -> tuple[Batch, programs.Shape, list[np.ndarray]]:
    """The batch on the host, its shape, and the rows of each update."""
    count = sum(len(group) for group in groups)
    shape = (
      self._usual_shape(max(count, 1)) if count > self._shape.rows else self._shape
    )
    bins = self._minibatches * self._spec.micro_batches
    while True:
      batch = pack(groups, self._buckets, shape.rows)
      indices = self._deal(batch, shape.micro_rows)
      if indices is not None:
        break
      rows = shape.micro_rows + sharding.rows_multiple(self.mesh)
      shape = programs.Shape(rows * bins, 0, rows)
    shape = dataclasses.replace(shape, length=batch.tokens.shape[1])
    if batch.expert_mask is None:
      batch = batch.replace(expert_mask=np.zeros(shape.rows, bool))
    return batch, shape, indices

  def _put(self, batch: Batch) -> Batch:
    """The columns that the programs take, on the devices, rows split."""
    keep = set(self._spec.batch_columns)
    drop = {f.name: None for f in dataclasses.fields(Batch) if f.name not in keep}
    return jax.device_put(batch.replace(**drop), sharding.rows(self.mesh))

  def _deal(self, batch: Batch, capacity: int) -> list[np.ndarray] | None:
    atoms = dealing.atoms(self._spec.algorithm, batch)
    indices = []
    for epoch in range(self._epochs):
      order = atoms
      if self._minibatches > 1:  # one minibatch holds every row in any order
        order = dealing.shuffled(atoms, self.seed, self.step, epoch)
      dealt = dealing.deal(order, self._minibatches, self._spec.micro_batches, capacity)
      if dealt is None:
        return None
      indices += [index for index in dealt if (index >= 0).any()]
    return indices

  def _check(self, metrics: Metrics, host: Batch) -> None:
    """Raises for what is not finite; warns once when the rollout's policy differs."""
    for name in ('loss/total', 'optimizer/grad_norm'):
      if not np.isfinite(metrics[name]):
        raise FloatingPointError(
          f'{name} is {metrics[name]} at step {self.step}: the parameters are '
          'spoilt. Resume from the last checkpoint, with a lower learning rate or '
          'clip_norm set'
        )
    if host.expert_mask.sum() == (host.task_ids >= 0).sum():
      for name in [name for name in metrics if name.startswith('mismatch/')]:
        del metrics[name]
      return
    difference = metrics['mismatch/logprob_difference']
    alarm = difference > self._mismatch_alarm
    metrics['mismatch/alarm'] = float(alarm)
    if alarm and not self._alarmed:
      log.warning(
        'step %d: the rollout engine and the learner disagree on the log-probs of '
        'the sampled tokens by %.3g on average (alarm at %.3g): stale or wrong '
        'weights, another temperature, or another precision',
        *(self.step, difference, self._mismatch_alarm),
      )
    self._alarmed = alarm


def _check_params(spec: Spec, mesh: Mesh, params: Params) -> None:
  """Raises ValueError, naming the parameter, where `params` do not fit the model."""
  if spec.algorithm.value_loss and not spec.model.config.value_head:
    raise ValueError('this algorithm trains a critic: set value_head=True in the model')
  wanted = programs.flat_shapes(programs.params_shapes(spec, mesh))
  found = programs.flat_shapes(params)
  for name in sorted(wanted.keys() | found.keys()):
    if wanted.get(name) != found.get(name):
      raise ValueError(
        f'parameter {name}: the model needs shape {wanted.get(name)}, '
        f'given is {found.get(name)}'
      )
