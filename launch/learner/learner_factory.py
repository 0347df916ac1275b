"""Builds the learner of each phase of a run, wherever it is to live."""

import dataclasses
import pathlib
from collections.abc import Callable, Mapping, Sequence
from typing import TYPE_CHECKING, Literal, Protocol

import jax
from jax.sharding import Mesh

from jaxrl.component_calls import ComponentCall
from jaxrl.data.seeds import fold_seed
from jaxrl.device_thread import DeviceThread
from jaxrl.model_loading import LoadedModel
from jaxrl.models import huggingface, lora
from jaxrl.models.model_config import ModelConfig
from jaxrl.models.remat import RematPolicy
from jaxrl.options import error_prefix
from jaxrl.rollout.weights.weight_store import cast_copy
from jaxrl.training.checkpointing import Checkpointer
from jaxrl.training.learner import Learner
from jaxrl.training.optimizers import Optimizer, OptimizerOptions, make_optimizer
from jaxrl.training.parallelism.mesh import MeshOptions, make_mesh
from jaxrl.types import AnyArray, Group, Params, StateDict
from launch.settings.engine_settings import check_model
from launch.settings.run_settings import RunSettings

if TYPE_CHECKING:
  from launch.learner.teacher_set import TeacherSet

Metrics = dict[str, float]


@dataclasses.dataclass(frozen=True)
class PhaseSpec:
  """Says what distinguishes a phase's learner from another's.

  Attributes:
    name: The phase: 'sft' is the warm start, 'train' the algorithm's own steps.
    num_rows: Rows of a batch if each sample is one row.
    num_steps: Steps of the phase.
  """

  name: Literal['sft', 'train']
  num_rows: int
  num_steps: int


@dataclasses.dataclass(frozen=True)
class MemoryChoice:
  """Says how a phase divides its batches and what its backward pass recomputes.

  Attributes:
    num_micro_batches: Parts of a minibatch.
    remat: What the backward pass recomputes.
    text: The choice, for people.
  """

  num_micro_batches: int
  remat: RematPolicy
  text: str = ''


class LearnerHandle(Protocol):
  """Stands for a `Learner`, here or in several other processes.

  Attributes:
    step: Optimizer steps taken, which is also the version of the weights.
  """

  step: int

  @property
  def params(self) -> Params:
    """The parameters, or a handle of them."""
    ...

  @property
  def advantages(self) -> AnyArray | None:
    """The advantages of the last batch, for trajectory logs."""
    ...

  @property
  def old_logprobs(self) -> AnyArray | None:
    """The learner's log-probs of the last batch; None if it does not score them."""
    ...

  async def inference_params(self) -> Params:
    """Returns the parameters for engines, with adapters merged."""
    ...

  async def warmup(self) -> Metrics:
    """Compiles the steps, as far as their shapes are known."""
    ...

  async def update(self, groups: Sequence[Group]) -> Metrics:
    """Trains on the groups of a step."""
    ...

  async def save(
    self, checkpointer: Checkpointer, data: StateDict, *, wait: bool = False
  ) -> None:
    """Saves a checkpoint with further data."""
    ...

  async def restore(self, checkpointer: Checkpointer) -> StateDict:
    """Restores the newest checkpoint; returns its further data."""
    ...

  async def offload(self) -> None:
    """Moves the state to host memory, while engines use the devices."""
    ...

  async def reload(self) -> None:
    """Moves the state back to the devices."""
    ...


class LearnerFactory(Protocol):
  """Makes the learners of a run where they are to live."""

  def describe(self) -> str:
    """Names the devices in one line."""
    ...

  async def make(
    self, phase: PhaseSpec, *, continue_params: bool = False
  ) -> LearnerHandle:
    """Makes the learner of a phase.

    Args:
      phase: The phase.
      continue_params: Whether it continues with the parameters of the learner before,
        which is then released, instead of the policy's.
    """
    ...

  async def export(self, folder: pathlib.Path) -> None:
    """Saves the newest learner's parameters as a Hugging Face folder.

    Adapters are merged there, and saved by themselves in `adapter_folder`.
    """
    ...

  async def close(self) -> None:
    """Ends the learners."""
    ...


def adapter_folder(folder: pathlib.Path) -> pathlib.Path:
  """Returns the folder of the adapters of a model that is exported to `folder`."""
  return folder.with_name('adapter')


async def copy_params(device_thread: DeviceThread, params: Params) -> Params:
  """Copies a learner's parameters, wherever they live; no update donates the copy."""
  snapshot = getattr(params, 'snapshot', None)
  return await (snapshot() if snapshot else device_thread.run(cast_copy, params))


def make_run_mesh(
  options: MeshOptions, devices: Sequence[object] | None = None
) -> Mesh:
  """Returns the run's mesh.

  Args:
    options: The mesh of the run.
    devices: The devices of the mesh; None takes all devices of the process.

  Raises:
    ConfigError: For axis sizes that do not make up the devices.
  """
  with error_prefix('--config.mesh'):
    return make_mesh(options, devices=devices)


@dataclasses.dataclass(eq=False)
class LocalLearnerFactory:
  """Makes learners in this process: the whole of them, or this process's share."""

  settings: RunSettings
  policy: LoadedModel
  mesh: Mesh
  device_thread: DeviceThread
  teachers: 'TeacherSet | None'
  choose_memory: Callable[[PhaseSpec], MemoryChoice] | None = None
  learner: Learner | None = dataclasses.field(default=None, init=False)

  @property
  def shape(self) -> ModelConfig:
    """The model's shape."""
    return self.policy.model.config

  def describe(self) -> str:
    """Names the devices in one line."""
    kinds = sorted({device.device_kind for device in self.mesh.devices.flat})
    return f'{self.mesh.size} × {", ".join(kinds)} ({mesh_text(self.mesh.shape)})'

  async def make(self, phase: PhaseSpec, *, continue_params: bool = False) -> Learner:
    """Makes the learner of a phase, see `LearnerFactory.make`."""
    params = (
      self.learner.params if continue_params and self.learner else self.policy.params
    )
    self.learner = await self.device_thread.run(self.build_learner, phase, params)
    if phase.name == 'train':  # the last phase: no learner begins with these again
      self.policy = self.policy.without_params()
    return self.learner

  def build_learner(
    self, phase: PhaseSpec, params: Params, choice: MemoryChoice | None = None
  ) -> Learner:
    """Builds a learner on the calling thread.

    Args:
      phase: The phase that it trains.
      params: The model's parameters, or their shapes alone.
      choice: How it divides its batches; None asks the factory's `choose_memory`.

    Raises:
      ConfigError: For adapters that this model cannot have.
    """
    if choice is None and self.choose_memory is not None:
      choice = self.choose_memory(phase)
    settings, main = with_choice(self.settings, choice), phase.name == 'train'
    algorithm = settings.algorithm
    if not main:
      from jaxrl.algorithms.presets.sft import sft  # only a warm start needs it

      algorithm = sft()
    rollout, batch = settings.rollout, settings.batch
    model = dataclasses.replace(
      self.policy.model,
      remat=settings.model.remat,
      unroll=min(settings.model.scan_unroll, self.policy.model.config.num_layers),
    )
    if main and settings.plays:
      check_model(settings, model.config)
      model = dataclasses.replace(
        model, exact=settings.engine.exact, router_replay=settings.engine.router_replay
      )
    shape = settings.model.trained_shape(model.config)
    model = dataclasses.replace(model, config=shape)
    if settings.model.adapters:
      params = lora.add_adapters(
        model, params, jax.random.key(fold_seed(settings.seed, 'lora'))
      )
    teachers = None
    if main and self.teachers is not None:
      teachers = self.teachers.place(settings, self.mesh, phase.num_rows)
    return Learner(
      model,
      params,
      algorithm,
      num_rows=phase.num_rows,
      rows_per_sample=settings.rows_per_sample if main else 1,
      length_buckets=batch.padded_lengths,
      mesh=self.mesh,
      optimizer=_make_optimizer(settings, phase),
      device_thread=self.device_thread,
      teachers=teachers,
      temperature=rollout.temperature,
      seed=fold_seed(settings.seed, 'learner'),
      staleness_limit=rollout.staleness_limit if main else None,
      weights_format=settings.engine.weights_format,
      options=batch,
    )

  async def export(self, folder: pathlib.Path) -> None:
    """Saves the newest learner's parameters, see `LearnerFactory.export`."""
    # Imported here because a model is exported after training.
    from jaxrl.models import peft_export
    from jaxrl.training.parallelism import distributed

    assert self.learner is not None
    newest = self.learner

    def run() -> None:
      config = newest.model.config
      params = distributed.gather_to_host(newest.merged_params())
      adapters = {}
      if config.lora is not None:
        adapters = distributed.gather_to_host(
          lora.trainable_params(config, newest.params)
        )
      if jax.process_index() == 0:
        model, tokenizer = self.policy.model, self.policy.tokenizer
        huggingface.save(folder, model.config, params, tokenizer)
        if adapters:
          base = str(self.policy.folder)
          peft_export.save_peft(adapter_folder(folder), config, adapters, base)

    await self.device_thread.run(run)

  async def close(self) -> None:
    """Does nothing: the learner lives as long as this process."""


# Settings, policy, mesh, the thread of the devices, and the teachers, if there are any.
MakeLearners = Callable[
  [RunSettings, LoadedModel, Mesh, DeviceThread, 'TeacherSet | None'],
  LocalLearnerFactory,
]


def mesh_text(sizes: Mapping[str, int]) -> str:
  """Formats the mesh axes that are larger than 1, as in 'data 2 × fsdp 4'."""
  axes = [f'{name} {size}' for name, size in sizes.items() if size > 1]
  return ' × '.join(axes) or 'one device'


def with_choice(settings: RunSettings, choice: MemoryChoice | None) -> RunSettings:
  """Returns settings with what was chosen; without a choice, with what costs no time.

  Args:
    settings: Settings of the run.
    choice: What was chosen for a phase, if anything was.
  """
  batch, model = settings.batch, settings.model
  if choice is None:
    choice = MemoryChoice(max(1, batch.num_micro_batches), model.remat)
  return settings.replace(
    batch=batch.replace(num_micro_batches=choice.num_micro_batches),
    model=model.replace(remat=choice.remat),
  )


def _make_optimizer(settings: RunSettings, phase: PhaseSpec) -> Optimizer:
  if phase.name == 'train':
    return make_optimizer(settings.optimizer, num_steps=phase.num_steps)
  optimizer = make_optimizer(
    OptimizerOptions(
      learning_rate=settings.sft.learning_rate,
      warmup_steps=settings.sft.warmup_steps,
      lr_schedule=ComponentCall('cosine', {'final_fraction': 0.1}),
      name=settings.optimizer.name,
    ),
    num_steps=settings.sft.num_steps,
  )
  # Its state must fit the main phase's, but its hyperparameters are the defaults.
  return dataclasses.replace(optimizer, spec=optimizer.spec.with_default_hparams())
