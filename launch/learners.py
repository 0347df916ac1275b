"""The learner of each phase of a run: what it is made of, wherever it is to live."""

import dataclasses
import pathlib
from collections.abc import Mapping, Sequence
from typing import Any, Literal, Protocol

import jax
from jax.sharding import Mesh

from jaxrl.config import Config
from jaxrl.data import staleness
from jaxrl.data.seeds import fold
from jaxrl.dispatch import Dispatcher
from jaxrl.models import huggingface, lora, peft
from jaxrl.models.config import ModelConfig
from jaxrl.rollout import sync
from jaxrl.signature import ConfigError
from jaxrl.training import distributed
from jaxrl.training.checkpoint import Checkpointer
from jaxrl.training.learner import Learner
from jaxrl.training.mesh import make_mesh
from jaxrl.training.optimizer import Optimizer, make_optimizer
from jaxrl.training.policy import Policy
from jaxrl.types import Algorithm, Group, Params
from launch import engines
from launch.teachers import Staff

Metrics = dict[str, float]


@dataclasses.dataclass(frozen=True)
class Stage:
  """What tells a phase's learner from another's. num_rows: of a usual batch."""

  name: Literal['sft', 'train']
  num_rows: int
  num_steps: int


class AnyLearner(Protocol):
  """A `Learner`, or what stands for several processes of one."""

  step: int

  @property
  def params(self) -> Any: ...

  @property
  def advantages(self) -> Any: ...

  async def weights(self) -> Any:
    """What engines are given: adapters merged, here or, elsewhere, as they are sent."""
    ...

  async def warmup(self) -> Metrics: ...

  async def update(self, groups: Sequence[Group]) -> Metrics: ...

  async def save(
    self, checkpointer: Checkpointer, data: Mapping[str, Any], *, wait: bool = False
  ) -> None: ...

  async def restore(self, checkpointer: Checkpointer) -> dict[str, Any]: ...

  async def rest(self) -> None: ...

  async def wake(self) -> None: ...


class Learners(Protocol):
  """Makes the learners of a run where they are to live."""

  def describe(self) -> str:
    """Their devices, for people."""
    ...

  async def make(self, stage: Stage, *, follow: bool = False) -> AnyLearner:
    """The stage's learner, with the policy's parameters or, if it is to `follow`,
    those of the one before, which is then let go of.
    """
    ...

  async def export(self, folder: pathlib.Path) -> None:
    """Saves the parameters of the newest as a Hugging Face folder.

    Adapters are merged there, and lie by themselves in `adapter_folder`.
    """
    ...

  async def close(self) -> None: ...


def adapter_folder(folder: pathlib.Path) -> pathlib.Path:
  """Where adapters lie by themselves, of a model that is exported to `folder`."""
  return folder.with_name('adapter')


async def lasting(dispatcher: Dispatcher, params: Any) -> Any:
  """A copy of a learner's parameters, wherever they are, that no update donates."""
  hold = getattr(params, 'hold', None)
  return await (hold() if hold else sync.copy(dispatcher.run, params))


def model_options(config: Config) -> dict[str, Any]:
  """How the run's own model computes: options of `Model`."""
  own = config.model
  return {'dtype': own.dtype, 'remat': own.remat, 'kernels': config.kernels}


def mesh_of(config: Config) -> Mesh:
  """Raises ConfigError for a mesh that the devices do not make up."""
  try:
    return make_mesh(**config.mesh)
  except ValueError as error:
    raise ConfigError(f'--config.mesh: {error}') from error


class LocalLearners:
  """In this process: the whole of them, or this process's share."""

  def __init__(
    self,
    config: Config,
    policy: Policy,
    algorithm: Algorithm,
    mesh: Mesh,
    dispatcher: Dispatcher,
    staff: Staff | None,
  ):
    self.mesh = mesh
    self._config, self._policy, self._algorithm = config, policy, algorithm
    self._dispatcher, self._staff = dispatcher, staff
    self._learner: Learner | None = None

  @property
  def shape(self) -> ModelConfig:
    return self._policy.model.config

  def describe(self) -> str:
    kinds = sorted({device.device_kind for device in self.mesh.devices.flat})
    sizes = self.mesh.shape.items()
    axes = ' × '.join(f'{name} {size}' for name, size in sizes if size > 1)
    return f'{self.mesh.size} × {", ".join(kinds)} ({axes or "one device"})'

  async def make(self, stage: Stage, *, follow: bool = False) -> Learner:
    params = self._learner.params if follow and self._learner else self._policy.params
    self._learner = await self._dispatcher.run(self._make, stage, params)
    return self._learner

  def _make(self, stage: Stage, params: Params) -> Learner:
    from jaxrl.algorithms.sft import sft

    config, main = self._config, stage.name == 'train'
    algorithm = self._algorithm if main else sft()
    teachers = None
    if main and self._staff is not None:
      teachers = self._staff.placed(config, algorithm, self.mesh, stage.num_rows)
    batch, model = config.batch, self._policy.model
    if main and algorithm.schema == 'rollout':
      engines.check_model(config, model.config)
      own = {'exact': engines.exact(config), 'router_replay': engines.replays(config)}
      model = dataclasses.replace(model, **own)
    adapters = lora.parse(config.model.lora)
    if adapters:
      try:
        shape = model.config.replace(lora=adapters)
      except ValueError as error:
        raise ConfigError(f'--config.model.{error}') from error
      model = dataclasses.replace(model, config=shape)
      params = lora.add(model, params, jax.random.key(fold(config.seed, 'lora')))
    return Learner(
      model,
      params,
      algorithm,
      num_rows=stage.num_rows,
      buckets=batch.buckets or (batch.max_length,),
      mesh=self.mesh,
      optimizer=_optimizer(config, stage),
      dispatcher=self._dispatcher,
      teachers=teachers,
      minibatches=batch.minibatches,
      micro_batches=batch.micro_batches,
      packing=batch.packing,
      epochs=batch.epochs,
      temperature=config.rollout.temperature,
      seed=fold(config.seed, 'learner'),
      entropy=batch.entropy,
      mismatch_alarm=config.rollout.mismatch_alarm,
      bound=staleness.parse(config.rollout.staleness) if main else None,
    )

  async def export(self, folder: pathlib.Path) -> None:
    assert self._learner is not None
    newest = self._learner

    def run() -> None:
      config, params = newest.model.config, distributed.to_host(newest.merged())
      own = {}
      if config.lora is not None:
        own = distributed.to_host(lora.trained(config, newest.params))
      if jax.process_index() == 0:
        model, tokenizer = self._policy.model, self._policy.tokenizer
        huggingface.save(folder, model.config, params, tokenizer)
        if own:
          peft.save(adapter_folder(folder), config, own, str(self._policy.folder))

    await self._dispatcher.run(run)

  async def close(self) -> None:
    pass


def _optimizer(config: Config, stage: Stage) -> Optimizer:
  if stage.name == 'train':
    return make_optimizer(**config.optimizer, num_steps=stage.num_steps)
  settings = config.sft
  made = make_optimizer(
    learning_rate=settings.learning_rate,
    warmup_steps=settings.warmup_steps,
    schedule='cosine(final_fraction=.1)',
    kind=config.optimizer.kind,
    num_steps=settings.num_steps,
  )
  # The state has to fit as the main phase's does; its numbers are that phase's own.
  return dataclasses.replace(made, kind=made.kind.fresh())
