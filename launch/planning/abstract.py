"""The learner of a config, of shapes alone: nothing is allocated."""

import dataclasses
import pathlib
from collections.abc import Sequence
from typing import Any

import jax
from jax.sharding import Mesh

from jaxrl.algorithms import compose
from jaxrl.config import Config
from jaxrl.dispatch import Dispatcher
from jaxrl.models import hf_config, huggingface, published
from jaxrl.models.config import ModelConfig
from jaxrl.models.model import Model
from jaxrl.signature import ConfigError
from jaxrl.training import policy as policies
from jaxrl.training.learner import Learner
from jaxrl.training.mesh import make_mesh
from jaxrl.training.policy import Policy
from jaxrl.types import Algorithm, Params
from launch import learners, teachers
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

  def policy(self, shape: ModelConfig | None = None) -> Policy:
    """The policy, of shapes alone, and without a tokenizer."""
    model = Model(shape or self.shape, **learners.model_options(self.config))
    return Policy(model, shapes_of(model), None, pathlib.Path(self.source))


def read(config: Config) -> Run:
  """The run of `config`. Raises ConfigError for what cannot be."""
  algorithm = make_algorithm(config)
  teachers.check(config, algorithm)
  shape, source = model_shape(config.model.checkpoint, 'model.checkpoint')
  if shape is None:
    shape = policies.random_config(**config.model.random)
  shape = shape.replace(value_head=algorithm.value_loss is not None)
  return Run(config, algorithm, shape, source)


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


def make_learner(run: Run, mesh: Mesh) -> Learner:
  """The learner of the main phase as `launch.train` makes it, on a mesh of any devices.

  Raises ConfigError for a mesh that does not divide the model or the batch.
  """
  staff = None
  if found := teachers.folders(run.config):
    shapes = {
      tag: model_shape(folder, 'teacher.checkpoint')[0] for tag, folder in found.items()
    }
    staff = teachers.Staff({t: run.policy(s) for t, s in shapes.items()})
  stage = learners.Stage('train', run.num_rows, run.config.num_steps)
  own = run.config, run.policy(), run.algorithm, mesh, Dispatcher('plan'), staff
  return learners.LocalLearners(*own)._make(stage, run.policy().params)


def mesh_of(config: Config, devices: Sequence[Any]) -> Mesh:
  """Raises ConfigError for a mesh that the devices do not make up."""
  try:
    return make_mesh(**config.mesh, devices=devices)
  except ValueError as error:
    raise ConfigError(f'--config.mesh: {error}') from error
