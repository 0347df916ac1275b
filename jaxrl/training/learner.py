"""The learner trains a model: it owns mesh and train state, and learns from groups."""

import dataclasses
import functools
import logging
import time
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any

import jax
import numpy as np
from jax.sharding import Mesh

from jaxrl import spans
from jaxrl.algorithms import consistency, requirements
from jaxrl.device_thread import DeviceThread, trim_heap
from jaxrl.models import lora
from jaxrl.models.transformer_lm import TransformerLM
from jaxrl.options import ConfigError
from jaxrl.training import batch_fields, monitoring, staleness, train_state
from jaxrl.training.batch_fields import HParams
from jaxrl.training.batching.batch_builder import BatchBuilder, BatchShape
from jaxrl.training.batching.packing_plan import BatchIndex, Packing
from jaxrl.training.compiled_steps import CompiledSteps
from jaxrl.training.learner_options import LearnerOptions
from jaxrl.training.monitoring import CompileCounter, UpdateMonitor
from jaxrl.training.optimizers import Optimizer, make_optimizer
from jaxrl.training.parallelism import sharding
from jaxrl.training.parallelism.mesh import single_device_mesh
from jaxrl.training.parallelism.model_sharding import on_mesh
from jaxrl.training.staleness import StalenessLimit
from jaxrl.training.train_state import AlgorithmState, InferenceParams, StepSpec
from jaxrl.types import Algorithm, Batch, Group, Params, PyTree, StateDict
from kernels.dispatch import platform_of

if TYPE_CHECKING:
  from jaxrl.training.checkpointing import Checkpointer
  from jaxrl.training.self_teacher_scoring import SelfTeacherScorer
  from jaxrl.training.teacher_scoring import Teachers
  from kernels.block_rounding import BlockFormat

log = logging.getLogger(__name__)
Metrics = dict[str, float]


class Learner:
  """Trains a model with an algorithm, one `update` per step.

  Args:
    model: The model.
    params: Its parameters, as `model.init` returns them; they are copied. They may be
      `ShapeDtypeStruct`s; the learner can then only be traced.
    algorithm: The algorithm.
    options: How it divides a batch, and what it reports.
    num_rows: Rows of a batch if each sample is one row.
    rows_per_sample: The rows that a sample usually is.
    length_buckets: Lengths that rows are padded to.
    mesh: The devices; default, the first device.
    optimizer: The optimizer; default, that of `make_optimizer`.
    device_thread: Runs the device work; default, a new one.
    ref_params: The reference policy, if a component reads it; default, `params`. With
      LoRA only its adapters are used, on the same base model.
    teachers: Score the teacher fields, if a component reads any.
    temperature: The temperature that rollouts are sampled at.
    seed: Seed of the order of minibatches and of stochastic rounding.
    staleness_limit: What happens to tokens that were sampled by old weights.
    weights_format: How engines keep matrices in 8 bits, if they do.

  Attributes:
    mesh: The devices.
    optimizer: The optimizer; only its hyperparameters may be changed.
    temperature: The temperature that rollouts are sampled at.
    seed: The seed.
    step: The number of updates so far.
    teachers: The teachers, if any.
  """

  def __init__(
    self,
    model: TransformerLM,
    params: Params,
    algorithm: Algorithm,
    *,
    options: LearnerOptions = LearnerOptions(),
    num_rows: int,
    rows_per_sample: int = 1,
    length_buckets: Sequence[int],
    mesh: Mesh | None = None,
    optimizer: Optimizer | None = None,
    device_thread: DeviceThread | None = None,
    ref_params: Params | None = None,
    teachers: 'Teachers | None' = None,
    temperature: float = 1.0,
    seed: int = 0,
    staleness_limit: StalenessLimit | None = None,
    weights_format: 'BlockFormat | None' = None,
  ):
    if (count := options.num_micro_batches) < 1:
      raise ValueError(f'num_micro_batches={count} must be at least 1')
    packing = options.packing_plan
    consistency.validate(algorithm)
    staleness.check_limit(staleness_limit, algorithm)
    self.mesh = mesh or single_device_mesh()
    self.optimizer = optimizer or make_optimizer()
    self.temperature = temperature
    self.seed = seed
    self.step = 0
    self._device_thread = device_thread or DeviceThread('learner')
    self._monitor = UpdateMonitor(options.logprob_mismatch_warn)
    self._staleness_limit = staleness_limit
    if options.engine_rounding:
      model = train_state.with_rounding(model, weights_format)
    model = on_mesh(model, self.mesh)
    static_algorithm, self._component_hparams = requirements.split_hparams(algorithm)
    self._spec = StepSpec(
      model,
      static_algorithm,
      num_micro_batches=options.num_micro_batches,
      entropy=options.log_entropy,
      top_k=batch_fields.teacher_top_k(algorithm),
      optimizer_state=self.optimizer.spec.state_spec,
      packed=bool(packing),
    )
    self._batch_builder = _make_batch_builder(
      packing,
      model,
      self.mesh,
      algorithm=algorithm,
      num_rows=num_rows,
      rows_per_sample=rows_per_sample,
      row_multiple=sharding.num_row_shards(self.mesh),
      buckets=tuple(sorted(length_buckets)),
      num_minibatches=options.num_minibatches,
      num_micro_batches=options.num_micro_batches,
      num_epochs=options.ppo_epochs,
      seed=seed,
      counts_segments=platform_of(self.mesh.devices.flat[0].platform) == 'gpu',
    )
    self._compiled_shapes: set[BatchShape] = set()
    self._is_warm = False
    batch_sizes = num_rows, options, max(length_buckets)
    self.teachers = teachers or _make_self_teacher(
      self._spec, self.mesh, *batch_sizes, temperature
    )
    train_state.check_params(self._spec, self.mesh, params)
    self._inference_params = InferenceParams(self._spec, self.mesh, weights_format)
    self._state = train_state.init_train_state(self._spec, self.mesh, params)
    self._advantages: jax.Array | None = None
    self._old_logprobs: jax.Array | None = None
    # Where the arrays lie on the devices, while they are offloaded.
    self._device_shardings: dict[str, PyTree] | None = None
    self._ref_params = train_state.reference_shapes(self._spec, self.mesh)
    if self._ref_params is not None:
      reference = lora.trainable_params(model.config, ref_params or params)
      self._ref_params = train_state.place_params(reference, self._ref_params)

  @property
  def params(self) -> Params:
    """Returns the newest parameters.

    The next update donates them: copy those that must outlive it.
    """
    return self._state.params

  async def inference_params(self) -> Params:
    """Returns what inference engines are given; see `InferenceParams`."""
    served = self._inference_params
    if self._spec.model.config.lora is None and served.weights_format is None:
      return self.params
    return await self._device_thread.run(
      lambda: self._inference_params.build(self._params_on_device())
    )

  def merged_params(self) -> Params:
    """Returns the parameters with adapters merged. Device thread only."""
    if self._spec.model.config.lora is None:
      return self.params
    return self._inference_params.merge(self._params_on_device())

  def _params_on_device(self) -> Params:
    """Returns the parameters on the devices, even while they are offloaded."""
    if self._device_shardings is None:
      return self.params
    return jax.device_put(self.params, self._device_shardings['state'].params)

  @property
  def model(self) -> TransformerLM:
    """Returns the model, with its activations pinned to the learner's mesh."""
    return self._spec.model

  @property
  def advantages(self) -> jax.Array | None:
    """Returns the advantages of the last batch, `[B, T]`.

    Rows are in the order of its groups, then padding. They stay on the devices until
    read. None before any batch, and for algorithms without advantages.
    """
    return self._advantages

  @property
  def old_logprobs(self) -> jax.Array | None:
    """Returns the learner's log-probs of the last batch before its update, `[B, T]`.

    Rows are as those of `advantages`. None if the algorithm does not score them.
    """
    return self._old_logprobs

  @property
  def algorithm_state(self) -> AlgorithmState:
    """Returns the state that components carry from batch to batch, by component."""
    return self._state.algorithm_state

  def set_algorithm(self, algorithm: Algorithm) -> None:
    """Continues with other numeric options; nothing is recompiled.

    Args:
      algorithm: The same algorithm with other numbers.

    Raises:
      ValueError: More than numbers differ.
    """
    static_algorithm, component_hparams = requirements.split_hparams(algorithm)
    same_top_k = batch_fields.teacher_top_k(algorithm) == self._spec.top_k
    if static_algorithm != self._spec.algorithm or not same_top_k:
      raise ValueError('only the numeric options of an algorithm can change in a run')
    self._component_hparams = component_hparams

  async def warmup(self) -> Metrics:
    """Compiles the programs of every usual batch, so that no later step compiles.

    Returns:
      'time/warmup' and 'compile/programs'.
    """
    return await self._device_thread.run(self._warm_up)

  async def update(self, groups: Sequence[Group]) -> Metrics:
    """Learns from all of `groups` and increments the step.

    Args:
      groups: The trajectories of a step, by group.

    Returns:
      Metrics by name.

    Raises:
      ValueError: A row fits no bucket or no micro-batch.
      EmptyBatchError: No row has an action token.
      FloatingPointError: The loss or the gradient is not finite.
      NothingLearnedError: For several steps, settings have left no token to learn from.
    """
    return await self._device_thread.run(self._update, groups)

  async def save(
    self, checkpointer: 'Checkpointer', data: StateDict, *, wait: bool = False
  ) -> None:
    """Writes a checkpoint of the current step.

    Args:
      checkpointer: Where to.
      data: JSON that is saved with it.
      wait: Wait until it is complete.
    """

    def run() -> None:
      learner = {
        'step': self.step,
        'seed': self.seed,
        'frozen': self._frozen_fingerprint,
      }
      meta = {'learner': learner, 'data': dict(data)}
      checkpointer.save(self.step, self._checkpoint_arrays(), meta)
      if wait:
        checkpointer.wait()

    await self._device_thread.run(run)

  async def restore(
    self, checkpointer: 'Checkpointer', step: int | None = None
  ) -> StateDict:
    """Continues from a checkpoint.

    Args:
      checkpointer: Where from.
      step: The checkpoint's step; default, the newest.

    Returns:
      The `data` that was saved with it.

    Raises:
      CheckpointError: There is no such checkpoint, or it is of another model.
    """

    def run() -> StateDict:
      arrays, meta = checkpointer.restore(self._checkpoint_arrays(), step)
      learner = meta['learner']
      if learner.get('frozen') != self._frozen_fingerprint:
        from jaxrl.training.checkpointing import CheckpointError

        raise CheckpointError(
          f'the checkpoint in {checkpointer.directory} was trained on another model, '
          'of which parts are frozen: set model.checkpoint, model.vision, and base of '
          'model.lora, as in that run'
        )
      state, config = arrays['state'], self._spec.model.config
      params = lora.merge_trainable(config, self.params, state.params)
      self._state = dataclasses.replace(state, params=params)
      self._ref_params = arrays.get('reference')
      self.step = learner['step']
      if learner['seed'] != self.seed:
        log.warning(
          'seed is %d; the checkpoint was written with %d', self.seed, learner['seed']
        )
      return meta['data']

    return await self._device_thread.run(run)

  async def offload(self) -> None:
    """Moves the state to the host's memory until `reload`, to free the devices.

    An offloaded learner can be saved but cannot learn. Teachers stay on the devices.
    """
    if self._device_shardings is None:
      # Saving needs the fingerprint, which is computed on the devices.
      await self._device_thread.run(lambda: self._frozen_fingerprint)
      self._device_shardings = jax.tree.map(lambda x: x.sharding, self._arrays())
      host_shardings = jax.tree.map(
        lambda s: s.with_memory_kind('pinned_host'), self._device_shardings
      )
      await self._device_thread.run(self._move, host_shardings)

  async def reload(self) -> None:
    """Moves the state back to the devices, if it is offloaded."""
    if self._device_shardings is not None:
      shardings, self._device_shardings = self._device_shardings, None
      await self._device_thread.run(self._move, shardings)

  def _move(self, shardings: dict[str, PyTree]) -> None:
    moved = jax.block_until_ready(jax.device_put(self._arrays(), shardings))
    self._state = moved['state']
    self._ref_params = moved.get('reference')

  def _arrays(self) -> dict[str, PyTree]:
    arrays = {'state': self._state}
    if self._ref_params is not None:
      arrays['reference'] = self._ref_params
    return arrays

  def _checkpoint_arrays(self) -> dict[str, PyTree]:
    """Returns the arrays of a checkpoint: all that is trained, and the reference."""
    params = lora.trainable_params(self._spec.model.config, self.params)
    return {**self._arrays(), 'state': dataclasses.replace(self._state, params=params)}

  @functools.cached_property
  def _frozen_fingerprint(self) -> int | None:
    """Returns a sum over the bits of the frozen parameters; None if there are none."""
    config = self._spec.model.config
    if lora.trains_all(config):
      return None
    return int(jax.jit(functools.partial(lora.fingerprint, config=config))(self.params))

  @property
  def device_arrays(self) -> dict[str, PyTree]:
    """Returns the arrays held on devices between updates, by part, or their shapes."""
    teachers = {} if self.teachers is None else {'teachers': self.teachers.params}
    return self._arrays() | teachers

  @property
  def warmup_shapes(self) -> list[BatchShape]:
    """Returns the shapes of usual batches, which warm-up compiles for.

    There are none if the model sees images: their sizes are not known before.
    """
    if train_state.sees_images(self._spec.model):
      return []
    return self._batch_builder.warmup_shapes()

  def trace(self, length: int) -> tuple[BatchShape, dict[str, jax.stages.Traced]]:
    """Traces the programs that learn from a usual batch.

    If the model sees images, each group has one of its own, of 512 × 512 pixels or what
    half a row has room for.

    Args:
      length: Tokens of a row, one of the buckets.

    Returns:
      The batch's shape, and the traced programs by name, to be lowered and compiled on
      any machine.
    """
    shape = self._batch_builder.batch_shape(length)
    if train_state.sees_images(self._spec.model):
      from jaxrl.training.batching import batch_images  # few models do

      builder, group_size = self._batch_builder, self._spec.algorithm.group_size
      images = -(-shape.rows // group_size), builder.row_multiple
      patches = batch_images.planned_patches(builder.vision, shape.length, *images)
      shape = dataclasses.replace(shape, patches=patches)
    return shape, CompiledSteps(self._spec, self.mesh, self._hparams()).trace(shape)

  def compile(self, length: int) -> tuple[BatchShape, dict[str, Callable[..., PyTree]]]:
    """Compiles the programs that learn from a usual batch.

    They are those that `update` runs, and are kept for it. Where it would run several
    micro-batches in parallel, the update is one program here.

    Args:
      length: Tokens of a row, one of the buckets.

    Returns:
      The batch's shape, and the compiled programs by name.
    """
    shape = self._batch_builder.batch_shape(length)
    if shape.num_parallel > 1 or train_state.sees_images(self._spec.model):
      shape, traced = self.trace(length)
      return shape, {name: one.lower().compile() for name, one in traced.items()}
    return shape, CompiledSteps(self._spec, self.mesh, self._hparams()).compile(shape)

  def _hparams(self) -> HParams:
    """Returns the traced options, as arrays of fixed dtypes."""
    if self.optimizer.spec.state_spec != self._spec.optimizer_state:
      raise ValueError('only the numbers of an optimizer can change in a run')
    hparams = {
      'parts': self._component_hparams,
      'temperature': self.temperature,
      'optimizer': self.optimizer.hparams(self.step),
      'step': self.step,
    }
    dtypes = {int: np.int32, float: np.float32}
    hparams = jax.tree.map(lambda x: dtypes[type(x)](x), hparams)
    return hparams | {'seed': np.uint32(self.seed % 2**32)}

  def _compiled_programs(self, shape: BatchShape) -> dict[str, Callable[..., PyTree]]:
    """Returns the compiled programs for a shape, as `CompiledSteps.compile` does."""
    if shape not in self._compiled_shapes:
      monitoring.log_recompile(shape, self._compiled_shapes, is_warm=self._is_warm)
      self._compiled_shapes.add(shape)
    return CompiledSteps(self._spec, self.mesh, self._hparams()).compile(shape)

  def _warm_up(self) -> Metrics:
    start = time.perf_counter()
    scored = 'old_logprobs' in self._spec.scored_fields
    shapes = self.warmup_shapes
    with CompileCounter() as counter:
      for shape in shapes:
        self._compiled_programs(shape)
        staleness.compile_limit_programs(
          self._staleness_limit, self.mesh, (shape.rows, shape.length), scored=scored
        )
        if self.teachers is not None:
          self.teachers.warmup(shape.rows, [shape.length])
    trim_heap()
    self._is_warm = bool(shapes)
    seconds = time.perf_counter() - start
    return {'time/warmup': seconds, 'compile/programs': float(counter.count)}

  def _update(self, groups: Sequence[Group]) -> Metrics:
    """Builds the batch, scores it, and updates the state from each minibatch."""
    start = time.perf_counter()
    monitoring.check_action_tokens(groups, self.step)
    host_batch, shape, indices = self._batch_builder.build_batch(groups, self.step)
    replay = None
    if getattr(self._spec.model, 'router_replay', False):
      # Imported here because only mixtures of experts have routers.
      from jaxrl.training.batching import router_replay as replay

      host_batch = replay.add_to_batch(self._spec.model, host_batch)
    is_recompile = self._is_warm and shape not in self._compiled_shapes
    with CompileCounter() as counter:
      programs = self._compiled_programs(shape)
      hparams = self._hparams()
      batch = self._put(host_batch)
      packed = time.perf_counter()
      batch, next_state, step_metrics = self._score(
        groups, host_batch, batch, shape, indices, programs.get('prepare')
      )
      batch, staleness_metrics = self._apply_staleness_limit(host_batch, batch)
      prepared = time.perf_counter()
      updates = []
      for index in indices:
        index = self._batch_builder.device_index(self.mesh, shape, index)
        self._state, update_metrics = programs['train'](
          self._state, batch, index, hparams
        )
        updates.append(update_metrics)
      algorithm_state = {**self._state.algorithm_state, **next_state}
      self._state = dataclasses.replace(self._state, algorithm_state=algorithm_state)
      step_metrics, updates = jax.device_get((step_metrics, updates))
    end = time.perf_counter()
    for lane, name, since, until in (
      ('update', 'learn', start, end),
      ('phases', 'pack', start, packed),
      ('phases', 'prepare', packed, prepared),
      ('phases', 'train', prepared, end),
    ):
      spans.record('learner', lane, name, since, until, step=self.step)
    metrics = monitoring.average_updates(updates)
    metrics |= monitoring.average_updates([step_metrics])
    metrics |= monitoring.reward_metrics(groups)
    metrics |= monitoring.batch_metrics(host_batch, self.step)
    metrics |= staleness_metrics
    metrics |= self._batch_builder.packing_metrics(host_batch, shape, indices)
    if replay is not None:
      metrics |= replay.replay_metrics(self._spec.model, host_batch)
    metrics |= {
      'optimizer/learning_rate': float(hparams['optimizer']['learning_rate']),
      'compile/programs': float(counter.count),
      'compile/recompiles': float(is_recompile),
      'time/pack': packed - start,
      'time/prepare': prepared - packed,
      'time/train': end - prepared,
      'time/learn': end - start,
      'tokens/learned_per_second': metrics['tokens/total'] / (end - start),
    }
    self._monitor.check(metrics, self.step)
    self.step += 1
    return metrics

  def _score(
    self,
    groups: Sequence[Group],
    host_batch: Batch,
    batch: Batch,
    shape: BatchShape,
    indices: Sequence[BatchIndex],
    advantage_step: Callable[..., PyTree] | None,
  ) -> tuple[Batch, AlgorithmState, dict[str, jax.Array]]:
    """Adds the fields of teachers and of the advantage step to a batch.

    Returns the batch, the next state of components, and the advantage step's metrics.
    """
    if self.teachers is not None:
      if batch.patch_rows is not None:
        raise ValueError('teachers see no images, and the rows of this batch have some')
      self._ref_params = self.teachers.follow(self.params, self._ref_params)
      batch = batch.replace(**self.teachers.score(batch, groups))
    if advantage_step is None:
      return batch, {}, {}
    changed, next_state, metrics = advantage_step(
      self._state.params,
      self._ref_params,
      self._state.algorithm_state,
      batch,
      self._hparams(),
      *self._batch_builder.scoring_arguments(self.mesh, host_batch, shape, indices),
    )
    batch = jax.block_until_ready(batch.replace(**changed))
    self._advantages = batch.advantages
    self._old_logprobs = batch.old_logprobs
    return batch, next_state, metrics

  def _apply_staleness_limit(
    self, host_batch: Batch, batch: Batch
  ) -> tuple[Batch, Metrics]:
    mismatch = staleness.mismatch_by_age(host_batch, batch, self.step, self.mesh)
    batch, metrics = staleness.apply_limit(
      self._staleness_limit, host_batch, batch, self.step, self.mesh
    )
    return batch, mismatch | metrics

  def _put(self, batch: Batch) -> Batch:
    """Copies the fields that the programs read to the devices, rows split."""
    names = set(self._spec.input_fields)
    unread = {f.name: None for f in dataclasses.fields(Batch) if f.name not in names}
    layout = sharding.rows_sharding(self.mesh)
    return jax.tree.map(
      lambda rows: sharding.put_array(rows, layout), batch.replace(**unread)
    )


def _make_batch_builder(
  packing: Packing | None, model: TransformerLM, mesh: Mesh, **options: Any
) -> BatchBuilder:
  options['vision'] = getattr(getattr(model, 'config', None), 'vision', None)
  if packing is None:
    return BatchBuilder(**options)
  # Imported here because a row usually holds one sequence.
  from jaxrl.training.batching import packed_batch_builder

  return packed_batch_builder.make_packed_batch_builder(packing, model, mesh, **options)


def _make_self_teacher(spec: StepSpec, *arguments: Any) -> 'SelfTeacherScorer | None':
  if spec.algorithm.self_teacher is not None:
    from jaxrl.training import self_teacher_scoring  # few algorithms have one

    return self_teacher_scoring.make_self_teacher(spec, *arguments)
  if spec.teacher_fields:
    raise ConfigError(
      f'this algorithm reads {", ".join(spec.teacher_fields)}, and there is no '
      'teacher to give them: set teacher.checkpoint'
    )
  return None
