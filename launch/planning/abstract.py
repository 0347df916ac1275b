"""The learner of a config, of shapes alone: nothing is allocated."""

import dataclasses
import functools
import pathlib
from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp
from jax.sharding import Mesh

from jaxrl.algorithms import compose
from jaxrl.config import Config
from jaxrl.dispatch import Dispatcher
from jaxrl.models import hf_config, huggingface, lora, published
from jaxrl.models.config import ModelConfig
from jaxrl.models.model import Model
from jaxrl.signature import ConfigError
from jaxrl.training import policy as policies
from jaxrl.training import teacher_columns
from jaxrl.training.learner import Learner
from jaxrl.training.mesh import make_mesh
from jaxrl.training.policy import Policy
from jaxrl.types import Algorithm, Params
from launch import checks, engines, learners, teachers
from launch.algorithm import make_algorithm

RANDOM = 'config.model.random'


@dataclasses.dataclass(frozen=True)
class Run:
  """What of a run does not depend on the machine. source: of the model's shape."""

  config: Config
  algorithm: Algorithm
  shape: ModelConfig
  source: str

  @property
  def num_rows(self) -> int:
    """Rows of a usual batch; those from files are not counted, but taken as one a
    group, or two where pairs are learned from.
    """
    groups = self.config.batch.num_groups
    if self.algorithm.schema == 'rollout':
      return groups * compose.rows_per_group(self.algorithm)
    return groups * (2 if self.algorithm.atom == 'pair' else 1)

  @property
  def buckets(self) -> tuple[int, ...]:
    batch = self.config.batch
    return tuple(sorted(batch.buckets or (batch.max_length,)))

  @property
  def learned(self) -> ModelConfig:
    """The shape that the learner trains, with its adapters if it has any."""
    try:
      return self.shape.replace(lora=lora.parse(self.config.model.lora))
    except ValueError as error:
      raise ConfigError(f'--config.model.{error}') from error

  @property
  def sends(self) -> bool:
    """Whether every step may bring the engines a version of the weights."""
    return self.algorithm.schema == 'rollout'

  def policy(self, shape: ModelConfig | None = None) -> Policy:
    """The policy, of shapes alone, and without a tokenizer."""
    model = Model(shape or self.shape, **learners.model_options(self.config))
    return Policy(model, shapes_of(model), None, pathlib.Path(self.source))


def read(config: Config) -> Run:
  """The run of `config`. Raises ConfigError for what cannot be."""
  algorithm = make_algorithm(config)
  checks.agreement(config, algorithm)
  teachers.check(config, algorithm)
  shape, source = model_shape(config.model.checkpoint, 'model.checkpoint')
  if shape is None:
    shape = policies.random_config(**config.model.random)
    for theirs in teacher_shapes(config).values():  # whose vocabulary it takes
      shape = shape.replace(vocab_size=theirs.vocab_size)
      break
  shape = shape.replace(value_head=algorithm.value_loss is not None)
  run = Run(config, algorithm, shape, source)
  _ = run.learned  # raises for adapters that cannot be
  if run.sends:
    engines.check_model(config, shape)
  return run


def model_shape(folder: str, key: str) -> tuple[ModelConfig | None, str]:
  """A checkpoint's shape, by its config.json or, where there is no such folder, as its
  name was published; None where none is named. And where it is from, for people.
  """
  if not folder:
    return None, RANDOM
  if pathlib.Path(folder).exists():
    try:
      return huggingface.load_config(folder), f'{folder}/config.json'
    except (OSError, ValueError) as error:
      raise ConfigError(f'--config.{key}={folder}: {error}') from error
  data = published.find(folder)
  if data is None:
    names = ', '.join(published.MODELS)
    raise ConfigError(
      f'--config.{key}={folder}: there is no such folder, and no published shape of '
      f'that name (there are {names}). Its config.json alone, in a folder, is enough'
    )
  return hf_config.from_hf(data), f'{pathlib.Path(folder).name} as published'


def shapes_of(model: Model) -> Params:
  return jax.eval_shape(model.init, jax.random.key(0))


def served(run: Run, dtype: str | None) -> Params:
  """What engines are given: the parameters, adapters merged, in `dtype`, see `cast`."""
  policy = run.policy(run.learned)
  model = policy.model
  merge = functools.partial(lora.merged, model.config, dtype=model.dtype)
  return cast(jax.eval_shape(merge, policy.params), dtype)


def cast(shapes: Params, dtype: str | None) -> Params:
  """Floating-point arrays in `dtype`; None leaves each its own. Layouts stay."""

  def one(x: Any) -> jax.ShapeDtypeStruct:
    real = jnp.issubdtype(x.dtype, jnp.floating)
    kind = dtype if real and dtype else x.dtype
    return jax.ShapeDtypeStruct(x.shape, kind, sharding=x.sharding)

  return jax.tree.map(one, shapes)


def teacher_shapes(config: Config) -> dict[str, ModelConfig]:
  """Of the teachers in the config, by folder: tags that share one share a teacher."""
  found = {}
  for folder in teachers.folders(config).values():
    shape, _ = model_shape(folder, 'teacher.checkpoint')
    assert shape is not None  # each is named
    found[folder] = shape
  return found


def _staff(run: Run) -> teachers.Staff | None:
  """As `teachers.load` has it: vocabularies are cut to the student's."""
  if not teacher_columns.columns(run.algorithm):
    return None
  made, size = {}, run.shape.vocab_size
  for folder, shape in teacher_shapes(run.config).items():
    if shape.vocab_size < size:
      raise ConfigError(
        f'teacher {folder}: its table has {shape.vocab_size} rows; {size} are needed'
      )
    made[folder] = run.policy(shape.replace(vocab_size=size))
  found = teachers.folders(run.config)
  return teachers.Staff({tag: made[folder] for tag, folder in found.items()})


def make_learner(run: Run, mesh: Mesh) -> Learner:
  """The learner of the main phase as `launch.train` makes it, on a mesh of any devices.

  Raises ConfigError for a mesh that does not divide the model or the batch.
  """
  stage = learners.Stage('train', run.num_rows, run.config.num_steps)
  own = run.config, run.policy(), run.algorithm, mesh, Dispatcher('plan'), _staff(run)
  return learners.LocalLearners(*own)._make(stage, run.policy().params)


def mesh_of(config: Config, devices: Sequence[Any]) -> Mesh:
  """Raises ConfigError for a mesh that the devices do not make up."""
  try:
    return make_mesh(**config.mesh, devices=devices)
  except ValueError as error:
    raise ConfigError(f'--config.mesh: {error}') from error
