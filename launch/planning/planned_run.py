"""Builds the learner of a config from shapes alone, allocating nothing."""

import dataclasses
import functools
import pathlib
from collections.abc import Mapping, Sequence
from typing import Any

import jax
import jax.numpy as jnp
from jax.sharding import Mesh

from jaxrl.algorithms import requirements
from jaxrl.data import hub
from jaxrl.device_thread import DeviceThread
from jaxrl.model_loading import LoadedModel
from jaxrl.models import huggingface, lora
from jaxrl.models.families import known_configs
from jaxrl.models.model_config import ModelConfig
from jaxrl.models.transformer_lm import TransformerLM
from jaxrl.options import ConfigError, error_prefix
from jaxrl.rollout.engine import model_runner
from jaxrl.run_options import TeacherOptions
from jaxrl.training import batch_fields
from jaxrl.training.learner import Learner
from jaxrl.types import Params
from kernels.block_rounding import BlockFormat
from launch.learner import learner_factory, teacher_set
from launch.learner.learner_factory import MemoryChoice, PhaseSpec, make_run_mesh
from launch.planning import device_budget
from launch.settings.engine_settings import check_model
from launch.settings.resolve import override_settings
from launch.settings.run_settings import RunSettings
from launch.settings.validation import validate_consistency, validate_teachers

RANDOM = 'config.model.random'


@dataclasses.dataclass(frozen=True)
class PlannedRun:
  """Describes the part of a run that does not depend on the machine.

  Its engine is the one that the config names, whether or not it is installed here.

  Attributes:
    settings: Settings of the run.
    shape: The model's shape.
    source: Where that shape comes from, for people.
  """

  settings: RunSettings
  shape: ModelConfig
  source: str

  @property
  def num_rows(self) -> int:
    """Number of rows of a usual batch.

    Rows from files are not counted; a group is assumed to have one row, or two where
    the run learns from pairs.
    """
    groups = self.settings.batch.num_groups
    if self.settings.plays:
      return groups * requirements.rows_per_group(self.settings.algorithm)
    return groups * (2 if self.settings.algorithm.batch_unit == 'pair' else 1)

  @property
  def buckets(self) -> tuple[int, ...]:
    """The lengths that batches are padded to, the shortest first."""
    return tuple(sorted(self.settings.batch.padded_lengths))

  @property
  def trained_shape(self) -> ModelConfig:
    """The shape that the learner trains, with its adapters if it has any."""
    return self.settings.model.trained_shape(self.shape)

  @property
  def plays(self) -> bool:
    """Whether the run generates rollouts."""
    return self.settings.plays and bool(self.settings.env)

  @property
  def engine_dtype(self) -> str:
    """Dtype of the engine's products and cache."""
    engine, dtype = self.settings.engine, self.settings.model.dtype
    return engine.options['dtype'] if engine.kind == 'vllm' else dtype

  @property
  def weights_dtype(self) -> str | None:
    """Dtype of the engine's weights; None leaves each as it is published."""
    engine = self.settings.engine
    if engine.kind == 'vllm':
      return self.engine_dtype
    own = engine.own_options.get('weights_dtype') if not engine.weights_format else ''
    return own or self.settings.transport.options.dtype

  @property
  def prompt_buckets(self) -> tuple[int, ...]:
    """Prompt lengths that `JaxEngine` compiles for."""
    buckets = self.settings.engine.own_options.get('prompt_buckets')
    length = self.settings.batch.max_length
    return tuple(buckets or model_runner.default_buckets(length))

  @property
  def num_engines(self) -> int:
    """Number of rollout engines."""
    return max(1, self.settings.cluster.num_engines)

  @property
  def max_response_tokens(self) -> int:
    """The largest number of tokens that a response may have."""
    settings = self.settings
    limits = [settings.response_limit(tag) for tag in settings.training_tags]
    return min([settings.batch.max_length - 1, *limits])

  def with_overrides(self, overrides: Mapping[str, Any]) -> 'PlannedRun':
    """Returns the run with some keys of its config changed."""
    settings = override_settings(self.settings, overrides)
    return dataclasses.replace(self, settings=settings)

  def policy(self, shape: ModelConfig | None = None) -> LoadedModel:
    """Returns the policy made of shapes alone, without a tokenizer."""
    model = TransformerLM(shape or self.shape, **self.settings.compute_options)
    return LoadedModel(model, param_shapes(model), None, pathlib.Path(self.source))


def read_run(settings: RunSettings) -> PlannedRun:
  """Returns the run of these settings, with its model's shape.

  Args:
    settings: Settings of the run.

  Raises:
    ConfigError: For settings that contradict each other.
  """
  validate_consistency(settings)
  validate_teachers(settings)
  shape, source = model_shape(settings.model.checkpoint, 'model.checkpoint')
  if shape is None:
    shape = settings.model.random_config
    assert shape is not None
    teachers = teacher_shapes(settings.teacher)
    for teacher_shape in teachers.values():  # it takes the first one's vocabulary
      shape = shape.replace(vocab_size=teacher_shape.vocab_size)
      break
  shape = shape.replace(value_head=settings.algorithm.value_loss is not None)
  run = PlannedRun(settings, shape, source)
  _ = run.trained_shape  # raises for adapters that cannot be
  if settings.plays:
    check_model(settings, shape)
  return run


def model_shape(folder: str, key: str) -> tuple[ModelConfig | None, str]:
  """Reads the shape of a checkpoint.

  Args:
    folder: Folder of the checkpoint, whose config.json is read; if there is no such
      folder, the name of a published model or one on the Hub; '' for none.
    key: Config key that names the folder, for error messages.

  Returns:
    The shape, None where no checkpoint is named, and its origin for people.

  Raises:
    ConfigError: If the shape is neither readable nor known.
  """
  if not folder:
    return None, RANDOM
  if pathlib.Path(folder).exists():
    with error_prefix(f'--config.{key}={folder}', OSError):
      return huggingface.load_config(folder), f'{folder}/config.json'
  data = known_configs.find_known_config(folder)
  if data is None:
    names = ', '.join(known_configs.KNOWN_CONFIGS)
    problem = (
      f'--config.{key}={folder}: there is neither such a folder nor a known '
      f'model of this name ({names} are known)'
    )
    if hub.parse_name(folder) is None:
      raise ConfigError(f'{problem}. A folder that holds only config.json is enough')
    with error_prefix(problem, OSError):
      place = hub.find_checkpoint(folder, only_config=True)
      return huggingface.load_config(place), f'{folder} on the Hub'
  return huggingface.config_from_hf(data), f'{pathlib.Path(folder).name} as published'


def param_shapes(model: TransformerLM) -> Params:
  """Returns the shapes of a model's parameters."""
  return jax.eval_shape(model.init, jax.random.key(0))


def served_params(run: PlannedRun, dtype: str | None) -> Params:
  """Returns the shapes that engines receive: parameters with merged adapters.

  Args:
    run: The run.
    dtype: Dtype of floating-point arrays; None keeps the dtype of each.
  """
  policy = run.policy(run.trained_shape)
  model = policy.model
  merge = functools.partial(lora.merged, model.config, dtype=model.dtype)
  return cast_shapes(jax.eval_shape(merge, policy.params), dtype)


def encoded_shapes(shapes: Params, form: BlockFormat | None) -> Params:
  """Returns the shapes of parameters whose matrices are in 8 bits.

  Args:
    shapes: Shapes of parameters without adapters.
    form: The format; None changes nothing.
  """
  if form is None:
    return shapes
  from jaxrl.models.decoding import eight_bit_weights  # few engines have them

  return jax.eval_shape(lambda params: eight_bit_weights.encode(params, form), shapes)


def cast_shapes(shapes: Params, dtype: str | None) -> Params:
  """Replaces the dtype of floating-point arrays and keeps their shardings.

  Args:
    shapes: Pytree of `ShapeDtypeStruct`s.
    dtype: The new dtype; None keeps the dtype of each.
  """

  def cast_one(x: Any) -> jax.ShapeDtypeStruct:
    real = jnp.issubdtype(x.dtype, jnp.floating)
    kind = dtype if real and dtype else x.dtype
    return jax.ShapeDtypeStruct(x.shape, kind, sharding=x.sharding)

  return jax.tree.map(cast_one, shapes)


def teacher_shapes(teacher: TeacherOptions) -> dict[str, ModelConfig]:
  """Returns the shapes of the teachers by folder; several tags may share one."""
  shapes = {}
  weighted = teacher.weighted.values()
  for folder in (folder for terms in weighted for folder, _ in terms):
    shape, _ = model_shape(folder, 'teacher.checkpoint')
    assert shape is not None  # each is named
    shapes[folder] = shape
  return shapes


def _teachers(run: PlannedRun) -> teacher_set.TeacherSet | None:
  """Returns the teachers; their vocabularies are cut to the student's."""
  if not batch_fields.asks_other_models(run.settings.algorithm):
    return None
  policies, size = {}, run.shape.vocab_size
  for folder, shape in teacher_shapes(run.settings.teacher).items():
    if shape.vocab_size < size:
      raise ConfigError(
        f'teacher {folder}: its table has {shape.vocab_size} rows; {size} are needed'
      )
    policies[folder] = run.policy(shape.replace(vocab_size=size))
  weighted = run.settings.teacher.weighted
  return teacher_set.TeacherSet(teacher_set.with_models(weighted, policies))


def make_learner(
  run: PlannedRun,
  mesh: Mesh,
  phase: PhaseSpec | None = None,
  choice: MemoryChoice | None = None,
) -> Learner:
  """Builds a phase's learner as `launch.train` does, on a mesh of any devices.

  Args:
    run: The run.
    mesh: The devices.
    phase: The phase; None is the main one.
    choice: How it divides its batches; None is as the settings say.

  Raises:
    ConfigError: For a mesh that does not divide the model or the batch.
  """
  phase = phase or PhaseSpec('train', run.num_rows, run.settings.num_steps)
  teachers = _teachers(run) if phase.name == 'train' else None
  policy, kept = run.policy(), device_budget.kept_bytes(run.settings, mesh)
  model = dataclasses.replace(policy.model, kept_bytes=kept)
  factory = learner_factory.LocalLearnerFactory(
    run.settings,
    dataclasses.replace(policy, model=model),
    mesh,
    DeviceThread('plan'),
    teachers,
  )
  return factory.build_learner(phase, policy.params, choice)


def planned_mesh(run: PlannedRun, devices: Sequence[Any]) -> Mesh:
  """Returns the mesh of the run on these devices, see `make_run_mesh`."""
  return make_run_mesh(run.settings.mesh, devices)
