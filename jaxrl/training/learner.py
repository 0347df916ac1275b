"""The learner: owns the mesh and the train state, and turns groups into updates."""

import dataclasses
import functools
import logging
import time
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

import jax
import numpy as np
from jax.sharding import Mesh

from jaxrl.algorithms import checks, compose
from jaxrl.data.staleness import Bound
from jaxrl.dispatch import Dispatcher
from jaxrl.models import lora
from jaxrl.models.model import Model
from jaxrl.signature import ConfigError
from jaxrl.training import late, programs, routing, sharding, stale, teacher_columns
from jaxrl.training import metrics as reports
from jaxrl.training import packing as packings
from jaxrl.training.checkpoint import Checkpointer, CheckpointError
from jaxrl.training.health import Health
from jaxrl.training.mesh import single_device_mesh
from jaxrl.training.optimizer import Optimizer, make_optimizer
from jaxrl.training.packed_layout import layout_of
from jaxrl.training.per_device import on_mesh
from jaxrl.training.served import Served
from jaxrl.training.state import Spec
from jaxrl.types import Algorithm, Batch, Group, Params

if TYPE_CHECKING:  # it brings tokenizers, which a learner by itself does not need
  from jaxrl.training.teachers import Teachers

log = logging.getLogger(__name__)
Metrics = dict[str, float]


class Learner:
  """Trains `model` by `algorithm`, one `update` a step.

  params: a tree as `model.init` gives it; copied. Of its shapes alone a learner is made
  too, that can only tell its programs: see `traced`. mesh: default, the first device.
  dispatcher: runs the device work; default, one of its own. ref_params: the reference
  policy, if a part reads one; default, `params`; with LoRA its adapters alone, on the
  same frozen rest. teachers: who gives the columns that speak for a teacher, if a part
  reads any.
  num_rows: rows of a usual batch. buckets: lengths that rows are padded to.
  minibatches: optimizer updates a batch. micro_batches: parts of a minibatch whose
  gradients are summed, to save memory. packing: run the model on packed rows, whose
  tokens fill micro-batches; '': a sequence a row. epochs: passes over a batch.
  temperature: the one that rollouts are sampled at. seed: of the minibatches' order.
  entropy: report the exact entropy though no part reads it. mismatch_alarm: mean
  |Δlog-prob| between rollout and learner from which on it warns. bound: what becomes of
  tokens of weights that are too old.
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
    teachers: 'Teachers | None' = None,
    minibatches: int = 1,
    micro_batches: int = 1,
    packing: packings.Packing | str = '',
    epochs: int = 1,
    temperature: float = 1.0,
    seed: int = 0,
    entropy: bool = True,
    mismatch_alarm: float = 0.1,
    bound: Bound | None = None,
  ):
    _check_counts(minibatches=minibatches, micro_batches=micro_batches)
    self.mesh = mesh or single_device_mesh()
    model = on_mesh(model, self.mesh)
    self.optimizer = optimizer or make_optimizer()
    self.temperature, self.seed, self.step = temperature, seed, 0
    self._dispatcher = dispatcher or Dispatcher('learner')
    self._health = Health(mismatch_alarm)
    checks.refuse(algorithm)
    stale.check(bound, algorithm)
    self._bound = bound
    static, self._parts = compose.split_numbers(algorithm)
    top_k, memory = teacher_columns.top_k(algorithm), self.optimizer.kind.memory
    options = micro_batches, entropy, top_k, memory, bool(packing)
    self._spec = Spec(model, static, *options)
    self._layout = layout_of(packing, model, self.mesh, micro_batches)(
      algorithm=algorithm,
      num_rows=num_rows,
      multiple=sharding.rows_multiple(self.mesh),
      buckets=tuple(sorted(buckets)),
      minibatches=minibatches,
      micro_batches=micro_batches,
      epochs=epochs,
      seed=seed,
    )
    self.teachers = teachers
    self._warm: set[programs.Shape] = set()
    self._warmed = False
    _check_teachers(self._spec, teachers)
    _check_params(self._spec, self.mesh, params)
    self._served = Served(self._spec, self.mesh)
    self._state = programs.init_state(self._spec, self.mesh, params)
    self._advantages: jax.Array | None = None
    self._homes: dict[str, Any] | None = None  # where the state was before it rested
    self._reference = programs.reference_shapes(self._spec, self.mesh)
    if self._reference is not None:
      reference = lora.trained(model.config, ref_params or params)
      self._reference = programs.place(reference, self._reference)

  @property
  def params(self) -> Params:
    """The newest parameters. The next update donates them: copy what must last."""
    return self._state.params

  async def weights(self) -> Params:
    """What engines are given: `params`, or what `Served` makes of them and adapters."""
    if self._spec.model.config.lora is None:
      return self.params
    return await self._dispatcher.run(lambda: self._served.of(self._placed()))

  def merged(self) -> Params:
    """Of the model without adapters, for whoever is on the thread of the devices."""
    bare = self._spec.model.config.lora is None
    return self.params if bare else self._served.merge(self._placed())

  def _placed(self) -> Params:
    """The parameters on the devices, for programs, even while they rest elsewhere."""
    if self._homes is None:
      return self.params
    return jax.device_put(self.params, self._homes['state'].params)

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
  def algorithm_state(self) -> dict[str, Any]:
    """What the algorithm's parts carry from batch to batch, by slot."""
    return self._state.algorithm_state

  def set_algorithm(self, algorithm: Algorithm) -> None:
    """Goes on with other options. Only numbers may differ: nothing is recompiled."""
    static, parts = compose.split_numbers(algorithm)
    same_width = teacher_columns.top_k(algorithm) == self._spec.top_k
    if static != self._spec.algorithm or not same_width:
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
      own = {'step': self.step, 'seed': self.seed, 'frozen': self._frozen}
      meta = {'learner': own, 'data': dict(data)}
      checkpointer.save(self.step, self._kept(), meta)
      if wait:
        checkpointer.wait()

    await self._dispatcher.run(run)

  async def restore(
    self, checkpointer: Checkpointer, step: int | None = None
  ) -> dict[str, Any]:
    """Continues from checkpoint `step`, or the newest; returns the `data` saved."""

    def run() -> dict[str, Any]:
      arrays, meta = checkpointer.restore(self._kept(), step)
      if meta['learner'].get('frozen') != self._frozen:
        raise CheckpointError(
          f'the checkpoint in {checkpointer.directory} holds adapters of another model '
          'than this: name the one that they were trained on, model.checkpoint, and '
          'the base= that model.lora had'
        )
      state, config = arrays['state'], self._spec.model.config
      params = lora.join(config, self.params, state.params)
      self._state = dataclasses.replace(state, params=params)
      self._reference = arrays.get('reference')
      self.step, seed = meta['learner']['step'], meta['learner']['seed']
      if seed != self.seed:
        log.warning('seed is %d; the checkpoint was written with %d', self.seed, seed)
      return meta['data']

    return await self._dispatcher.run(run)

  async def rest(self) -> None:
    """Leaves the devices' memory to others: the state lies in the host's until `wake`.

    It can be saved there, but not learn. What a teacher holds stays on the devices.
    """
    if self._homes is None:
      await self._dispatcher.run(lambda: self._frozen)  # which may be saved meanwhile
      self._homes = jax.tree.map(lambda x: x.sharding, self._arrays())
      away = jax.tree.map(lambda s: s.with_memory_kind('pinned_host'), self._homes)
      await self._dispatcher.run(self._move, away)

  async def wake(self) -> None:
    """Brings the state back to where it was before `rest`, if it rests."""
    if self._homes is not None:
      homes, self._homes = self._homes, None
      await self._dispatcher.run(self._move, homes)

  def _move(self, places: dict[str, Any]) -> None:
    moved = jax.block_until_ready(jax.device_put(self._arrays(), places))
    self._state, self._reference = moved['state'], moved.get('reference')

  def _arrays(self) -> dict[str, Any]:
    arrays = {'state': self._state}
    if self._reference is not None:
      arrays['reference'] = self._reference
    return arrays

  def _kept(self) -> dict[str, Any]:
    """What a checkpoint holds: all that learns, and the reference of it."""
    params = lora.trained(self._spec.model.config, self.params)
    return {**self._arrays(), 'state': dataclasses.replace(self._state, params=params)}

  @functools.cached_property
  def _frozen(self) -> int | None:
    """A sum over the bits of what adapters leave frozen; None without them."""
    if self._spec.model.config.lora is None:
      return None
    return int(jax.jit(lora.fingerprint)(self.params))

  def _numbers(self) -> dict[str, Any]:
    """The traced options, as arrays of fixed dtypes."""
    if self.optimizer.kind.memory != self._spec.memory:
      raise ValueError('only the numbers of an optimizer can change in a run')
    numbers = {
      'parts': self._parts,
      'temperature': self.temperature,
      'optimizer': self.optimizer.numbers(self.step),
      'step': self.step,
    }
    kind = {int: np.int32, float: np.float32}
    numbers = jax.tree.map(lambda x: kind[type(x)](x), numbers)
    return numbers | {'seed': np.uint32(self.seed % 2**32)}

  def _programs(self, shape: programs.Shape) -> tuple[Any, Any]:
    """(prepare or None, train) for a shape; says so when it must compile them."""
    if shape not in self._warm:
      late.tell(shape, self._warm, warmed=self._warmed)
      self._warm.add(shape)
    made = programs.Programs(self._spec, self.mesh, self._numbers())
    prepare = made.prepare(shape) if self._spec.prepares else None
    return prepare, made.train(shape)

  @property
  def resident(self) -> dict[str, Any]:
    """What it holds on its devices between updates, by part, or the shapes of it."""
    teachers = {} if self.teachers is None else {'teachers': self.teachers.params}
    return self._arrays() | teachers

  @property
  def shapes(self) -> list[programs.Shape]:
    """Of usual batches: those that warm-up compiles for."""
    return self._layout.shapes()

  def traced(self, length: int) -> tuple[programs.Shape, dict[str, Any]]:
    """A usual batch of rows of this bucket, and the programs that learn from it.

    Each, by name, as JAX traced it: to be lowered and compiled, on any machine.
    """
    shape = self._layout.shape(length)
    made = programs.Programs(self._spec, self.mesh, self._numbers())
    return shape, made.traced(shape)

  def _warm_up(self) -> Metrics:
    start = time.perf_counter()
    with programs.CompileCounter() as counter:
      for shape in self.shapes:
        self._programs(shape)
        size, scored = (shape.rows, shape.length), 'old_logprobs' in self._spec.needs
        stale.warmup(self._bound, self.mesh, size, scored=scored)
        if self.teachers is not None:
          self.teachers.warmup(shape.rows, [shape.length])
    self._warmed = True
    seconds = time.perf_counter() - start
    return {'time/warmup': seconds, 'compile/programs': float(counter.count)}

  def _update(self, groups: Sequence[Group]) -> Metrics:
    start = time.perf_counter()
    host, shape, indices = self._layout.lay_out(groups, self.step)
    host = routing.filled(self._spec.model, host)
    new = self._warmed and shape not in self._warm
    with programs.CompileCounter() as counter:
      prepare, train = self._programs(shape)
      numbers = self._numbers()
      batch = self._put(host)
      packed = time.perf_counter()
      before, after = {}, {}
      if self.teachers is not None:
        batch = batch.replace(**self.teachers.score(batch, groups))
      if prepare is not None:
        state = self._state
        changed, after, before = prepare(
          *(state.params, self._reference, state.algorithm_state, batch, numbers),
          *self._layout.whole(self.mesh, host, shape, indices),
        )
        batch = jax.block_until_ready(batch.replace(**changed))
        self._advantages = batch.advantages
      aged = stale.mismatch(host, batch, self.step, self.mesh)
      batch, more = stale.settle(self._bound, host, batch, self.step, self.mesh)
      prepared = time.perf_counter()
      updates = []
      for index in indices:
        rows = self._layout.put(self.mesh, shape, index)
        self._state, update = train(self._state, batch, rows, numbers)
        updates.append(update)
      carried = {**self._state.algorithm_state, **after}
      self._state = dataclasses.replace(self._state, algorithm_state=carried)
      before, updates = jax.device_get((before, updates))
    end = time.perf_counter()
    metrics = reports.average(updates) | reports.average([before])
    metrics |= reports.of_groups(groups) | reports.of_batch(host, self.step)
    metrics |= aged | more | self._layout.metrics(host, shape, indices)
    metrics |= routing.metrics(self._spec.model, host)
    metrics |= {
      'optimizer/learning_rate': float(numbers['optimizer']['learning_rate']),
      'compile/programs': float(counter.count),
      'compile/late_shapes': float(new),
      'time/pack': packed - start,
      'time/prepare': prepared - packed,
      'time/train': end - prepared,
      'time/learn': end - start,
      'tokens/learned_per_second': metrics['tokens/total'] / (end - start),
    }
    self._health.check(metrics, host, self.step)
    self.step += 1
    return metrics

  def _put(self, batch: Batch) -> Batch:
    """The columns that the programs take, on the devices, rows split."""
    keep = set(self._spec.batch_columns)
    drop = {f.name: None for f in dataclasses.fields(Batch) if f.name not in keep}
    return jax.tree.map(self._place, batch.replace(**drop))

  def _place(self, rows: np.ndarray) -> jax.Array:
    """`[B, …]` on the devices, rows split."""
    return sharding.put(rows, sharding.rows(self.mesh))


def _check_counts(**counts: int) -> None:
  for name, value in counts.items():
    if value < 1:
      raise ValueError(f'{name}={value} must be at least 1')


def _check_teachers(spec: Spec, teachers: 'Teachers | None') -> None:
  if spec.teacher_columns and teachers is None:
    raise ConfigError(
      f'this algorithm reads {", ".join(spec.teacher_columns)}, and there is no '
      'teacher to give them: set --config.teacher.checkpoint'
    )


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
