"""Frozen, typed settings of a run, which `launch.settings.resolve` reads from a config.

Code below the commands takes these classes, never a `ConfigDict` and never a call
string. No field has a default here: defaults are written once, in the signatures that
the config is derived from.
"""

import contextlib
import dataclasses
from collections.abc import Mapping
from typing import Any

from ml_collections import ConfigDict

from jaxrl.call_strings import Component, ComponentCall, ConfigError
from jaxrl.data.chat_tokenizer import ChatOptions
from jaxrl.data.row_sources import RowSources
from jaxrl.data.store.store_options import ReaderOptions, WriterOptions
from jaxrl.models.exact import Exact
from jaxrl.models.lora import Lora
from jaxrl.models.model_config import ModelConfig
from jaxrl.rollout.engine.engine_base import EngineTraits
from jaxrl.rollout.weights.weight_sync import SyncPolicy
from jaxrl.training.batching.packing_plan import Packing
from jaxrl.training.staleness import StalenessLimit
from jaxrl.types import Algorithm
from launch.settings.call_syntax import naming_key

TEACHER_CHECKPOINT = '--config.teacher.checkpoint'


@dataclasses.dataclass(frozen=True)
class ModelSettings:
  """The model that the run trains or plays.

  Attributes:
    checkpoint: Hugging Face folder, or '' for a random model.
    random: shape of the random model; None if there is a checkpoint.
    dtype: floating-point type of activations and matrix products.
    remat: which activations the backward pass recomputes.
    lora: adapters to train; None trains every parameter.
    vision: what is trained of a vision tower: 'frozen', 'full' or 'lora'.
    kernels: 'auto' or 'reference', see `kernels.dispatch`.
    chat: how conversations are written, where that is not as the checkpoint says.
  """

  checkpoint: str
  random: ModelConfig | None
  dtype: str
  remat: ComponentCall
  lora: Lora | None
  vision: str
  kernels: str
  chat: ChatOptions

  @property
  def compute_options(self) -> dict[str, Any]:
    """Options of `TransformerLM` that say how it computes."""
    return {'dtype': self.dtype, 'remat': self.remat, 'kernels': self.kernels}

  def trained_shape(self, shape: ModelConfig) -> ModelConfig:
    """Returns the shape that the learner trains, which says what is trained.

    Args:
      shape: the shape of the model.

    Raises:
      ConfigError: for adapters or a tower that this model cannot have.
    """
    tower = shape.vision
    if tower is None and self.vision != 'frozen':
      raise ConfigError(
        f'--config.model.vision={self.vision}: this model, of family {shape.family}, '
        'has no vision tower: leave it out'
      )
    if tower is not None:
      tower = dataclasses.replace(tower, train=self.vision)
    try:
      return shape.replace(lora=self.lora, vision=tower)
    except ValueError as error:
      raise ConfigError(f'--config.model.{error}') from error

  @property
  def name(self) -> str:
    """The name of the model in dumped trajectories."""
    return self.checkpoint or 'random'


@dataclasses.dataclass(frozen=True)
class TaskSettings:
  """Rows that hold tasks.

  Attributes:
    limit: most rows; None for all.
    question_key: key of a row's question; '' if rows have none.
    answer_key: key of a row's answer; '' if rows have none.
    curriculum: which rows are drawn.
  """

  path: RowSources
  split: str
  limit: int | None
  question_key: str
  answer_key: str
  curriculum: ComponentCall

  @property
  def options(self) -> dict[str, Any]:
    """Options of `GlobalDataset`, beside the path."""
    options = as_options(self)
    del options['path']
    return options


@dataclasses.dataclass(frozen=True)
class DatasetSettings:
  """The rows of the run, and what they hold.

  Attributes:
    question_key: key of a row's question; '' if rows have none.
    answer_key: key of a row's answer; '' if rows have none.
    solution_key: a further key of a written response.
    keys: other unusual keys, as `RowFormat` takes them.
    experience_store: the store whose groups the run trains on; None if it plays them.
    expert_path: rows that samplers mix with rollouts; '' takes those of `sft` or
      `path`.
  """

  path: RowSources
  split: str
  limit: int | None
  question_key: str
  answer_key: str
  solution_key: str
  curriculum: ComponentCall
  keys: str
  system_prompt: str
  experience_store: ReaderOptions | None
  expert_path: RowSources


@dataclasses.dataclass(frozen=True)
class BatchSettings:
  """The batch of an optimizer step, and how the learner divides it.

  Attributes:
    num_groups: groups of a step, all tags together.
    max_length: most tokens of a row, prompt and response together.
    length_buckets: lengths that batches are padded to; never empty.
    packing: how sequences share rows; None gives each sequence its own row.
  """

  num_groups: int
  max_length: int
  length_buckets: tuple[int, ...]
  num_minibatches: int
  num_micro_batches: int
  packing: Packing | None
  ppo_epochs: int
  log_entropy: bool


@dataclasses.dataclass(frozen=True)
class OptimizerSettings:
  """Options of `make_optimizer` for the algorithm's own steps."""

  learning_rate: float
  warmup_steps: int
  lr_schedule: ComponentCall
  max_grad_norm: float
  name: ComponentCall


@dataclasses.dataclass(frozen=True)
class EngineSettings:
  """The engine that generates responses.

  Attributes:
    kind: 'jax', 'vllm', or where a user's own class is.
    own_options: the options that the call string itself gives.
    options: all options of the engine, with those that other config keys give.
    exact: how the learner computes log-probs so that they equal the engine's bit by
      bit; None where that is not asked for.
    router_replay: the learner routes tokens to the experts that the engine chose.
    traits: what the run must know about the engine's class.
  """

  kind: str
  own_options: Mapping[str, Any]
  options: Mapping[str, Any]
  exact: Exact | None
  router_replay: bool
  traits: EngineTraits

  @property
  def num_devices(self) -> int:
    """Devices of one engine."""
    tensor = self.own_options.get('tensor_parallel_size', 1)
    return tensor * self.own_options.get('pipeline_parallel_size', 1)


@dataclasses.dataclass(frozen=True)
class RewardTermSettings:
  """One term of the sum that `rollout.rewards` adds to an episode's reward.

  Attributes:
    name: name of the term in metrics.
    target: 'env', 'judge', 'reward_model', a grader's name, or a function's path.
    options: the options of the target; the weight is not among them.
  """

  name: str
  weight: float
  target: str
  options: Mapping[str, Any]


@dataclasses.dataclass(frozen=True)
class RolloutSettings:
  """How episodes are played and collected.

  Attributes:
    staleness_policy: what becomes of rollouts that are too old; None leaves it to the
      queue.
    rewards: terms added to the environment's reward; empty for none.
    group_filter: filters in place of the algorithm's; () leaves those, 'none' is none.
    reward_shaping: the same of the algorithm's reward shapers.
  """

  engine: EngineSettings
  rewards: tuple[RewardTermSettings, ...]
  group_filter: tuple[ComponentCall, ...]
  reward_shaping: tuple[ComponentCall, ...]
  staleness_policy: StalenessLimit | None
  temperature: float
  top_p: float
  top_k: int
  max_num_seqs: int
  async_ratio: float
  max_retries: int
  min_group_size: int
  extra_samples: int
  episode_timeout: float
  max_consecutive_drops: int
  logprob_mismatch_warn: float

  @property
  def sampling(self) -> dict[str, Any]:
    """Options of `EnvManager` that say how tokens are sampled."""
    return {
      'temperature': self.temperature,
      'top_p': self.top_p,
      'top_k': self.top_k,
    }


@dataclasses.dataclass(frozen=True)
class EnvSettings:
  """One environment tag.

  Attributes:
    env_type: name or path of the environment class.
    env_config: options of that class.
    dataset: where its tasks come from, if they come from rows.
    weight: this tag's part of each step's groups, relative to the other tags; 0 for a
      tag that is only evaluated.
    max_concurrency: environments that act at once in one worker.
    row_format: 'auto', 'step' or 'concatenated'.
    manager: the user's own env manager; None for ours.
    manager_options: further options of `EnvManager`.
  """

  env_type: str
  env_config: Mapping[str, Any]
  dataset: TaskSettings
  weight: float
  max_concurrency: int
  row_format: str
  max_steps: int
  max_tokens_per_step: int
  manager: ComponentCall | None
  manager_options: Mapping[str, Any]


@dataclasses.dataclass(frozen=True)
class MeshSettings:
  """Sizes of the mesh axes; −1 takes the devices that the others leave."""

  data: int
  fsdp: int
  tensor: int
  context: int
  expert: int


@dataclasses.dataclass(frozen=True)
class CheckpointSettings:
  """When checkpoints are written, how many stay, and whether a model is exported."""

  save_interval: int
  export: bool
  max_to_keep: int
  strict: bool


@dataclasses.dataclass(frozen=True)
class EvalSetSettings:
  """One evaluation set.

  Attributes:
    tag: the environment tag that plays it.
    path: where its rows come from; '' for the file of `split` beside the tag's.
    question_key: key of a row's question; '' if rows have none.
    answer_key: key of a row's answer; '' if rows have none.
    num_tasks: most tasks; -1 for each row once.
    group_size: samples per task.
    interval: steps between evaluations; 0 for none.
  """

  tag: str
  path: RowSources
  split: str
  question_key: str
  answer_key: str
  num_tasks: int
  group_size: int
  temperature: float
  interval: int


@dataclasses.dataclass(frozen=True)
class EvalSettings:
  """Evaluations during training, by the name that their metrics have."""

  sets: Mapping[str, EvalSetSettings]

  @property
  def active(self) -> dict[str, EvalSetSettings]:
    """The sets that are evaluated."""
    return {name: s for name, s in self.sets.items() if s.interval}


@dataclasses.dataclass(frozen=True)
class WarmStartSettings:
  """Supervised steps before the algorithm's own; `num_steps` = 0 for none."""

  num_steps: int
  path: RowSources
  limit: int
  batch_size: int
  learning_rate: float
  warmup_steps: int


@dataclasses.dataclass(frozen=True)
class TeacherSettings:
  """The teachers that a distillation algorithm asks.

  Attributes:
    folders: checkpoint folder by environment tag; '' stands for all other tags.
    from_data: the rows bring the teacher's outputs.
    named: the config names a teacher, or says that the data brings its outputs.
  """

  folders: Mapping[str, str]
  from_data: bool
  named: bool


@dataclasses.dataclass(frozen=True)
class WeightTransport:
  """How weights reach the engines.

  Attributes:
    name: name of the transport, never 'auto'.
    options: options of whoever publishes.
    folder: folder of the transport 'checkpoint'.
    durable: whether that folder's files are flushed to disk.
  """

  name: str
  options: Mapping[str, Any] = dataclasses.field(default_factory=dict)
  folder: str = ''
  durable: bool = True

  @property
  def direct(self) -> bool:
    """Whether the learner sends from its GPUs straight into the engines' GPUs."""
    return self.name in ('nccl', 'ipc')


@dataclasses.dataclass(frozen=True)
class PlacementSettings:
  """How learner and engines share the devices.

  Attributes:
    name: 'auto', 'split' or 'colocated'.
    options: options of that placement, defaults included.
  """

  name: str
  options: Mapping[str, Any]

  @property
  def sleeps(self) -> bool:
    """Whether the engine gives up its cache while the learner trains."""
    return self.options.get('sleep', False)


@dataclasses.dataclass(frozen=True)
class ClusterSettings:
  """The processes of the run. Without `ray` everything lives in one process."""

  ray: bool
  address: str
  num_engines: int
  num_workers: int
  placement: PlacementSettings


@dataclasses.dataclass(frozen=True)
class WeightSyncSettings:
  """When engines get new weights, and how these reach them."""

  policy: SyncPolicy
  transport: WeightTransport


@dataclasses.dataclass(frozen=True)
class DumpSettings:
  """Where trajectories are written.

  Attributes:
    path: folder, file, table or store; '' takes a folder of the run's own.
    columns: pairs of name and type; empty for all columns.
    save_arrays: whether the column save_content has the arrays of tokens.
    store: the experience store that `path` names; None for anything else.
    writer: the user's own trajectory writer that `path` names; None for anything else.
  """

  path: str
  columns: tuple[Any, ...]
  save_arrays: bool
  store: WriterOptions | None
  writer: ComponentCall | None


@dataclasses.dataclass(frozen=True)
class RunSettings:
  """All settings of a run.

  Attributes:
    num_epochs: passes over the files; 0 counts `num_steps` instead.
    algorithm: the resolved algorithm.
    algorithm_name: the name that the config gives it.
    algorithm_options: the config's own options of it; '' leaves one to the algorithm.
    env: settings by environment tag.
    trajectory_dump: where trajectories are written; None for commands that write none.
    config: the config as plain data, for records and for group filters.
  """

  seed: int
  num_steps: int
  num_epochs: float
  algorithm: Algorithm
  algorithm_name: str
  algorithm_options: Mapping[str, Any]
  model: ModelSettings
  dataset: DatasetSettings
  batch: BatchSettings
  optimizer: OptimizerSettings
  rollout: RolloutSettings
  weight_sync: WeightSyncSettings
  env: Mapping[str, EnvSettings]
  mesh: MeshSettings
  checkpoint: CheckpointSettings
  eval: EvalSettings
  sft: WarmStartSettings
  teacher: TeacherSettings
  cluster: ClusterSettings
  trajectory_dump: DumpSettings | None
  config: Mapping[str, Any]

  @property
  def experience_store(self) -> ReaderOptions | None:
    """The store whose groups the run trains on; None if it plays them."""
    return self.dataset.experience_store

  @property
  def plays(self) -> bool:
    """Whether the algorithm learns from rollouts."""
    return self.algorithm.data_format == 'rollout'

  @property
  def evaluates(self) -> bool:
    """Whether the run plays evaluations."""
    return bool(self.eval.active)

  @property
  def training_tags(self) -> list[str]:
    """The environment tags that training plays."""
    return [tag for tag, env in self.env.items() if env.weight]

  def text(self, key: str) -> Any:
    """Returns what the config says under a dotted key, to quote it in a message."""
    value: Any = self.config
    for part in key.split('.'):
      value = value[part]
    return value

  def task_key(self, tag: str, field: str) -> str:
    """Returns the key that sets a field of a tag's tasks, such as 'path'."""
    own_section = self.text(f'env.{tag}').get('dataset', {})
    section = f'env.{tag}.dataset' if own_section.get(field) else 'dataset'
    return f'{section}.{field}'

  def eval_task_key(self, name: str, field: str) -> str:
    """Returns the key that sets a field of an evaluation set's tasks."""
    if self.text('eval').get('sets', {}).get(name, {}).get(field):
      return f'eval.sets.{name}.{field}'
    evaluation = self.eval.sets[name]
    if field == 'path' and evaluation.path:
      return 'eval.path'
    return self.task_key(evaluation.tag, field)

  def naming(self, key: str) -> contextlib.AbstractContextManager[None]:
    """Makes the errors of a block begin with a config key and its value.

    Args:
      key: the dotted key.
    """
    return naming_key(key, self.text(key))

  def env_manager_config(self, tag: str) -> ConfigDict:
    """Returns a tag's section as group filters are given it."""
    return ConfigDict(dict(self.config['env'][tag]))

  @property
  def group_filters(self) -> tuple[Component, ...]:
    """The config's filters, or else the algorithm's."""
    return _override(self.algorithm.filters, self.rollout.group_filter)

  @property
  def reward_shapers(self) -> tuple[Component, ...]:
    """The config's reward shapers, or else the algorithm's."""
    return _override(self.algorithm.shapers, self.rollout.reward_shaping)

  def response_limit(self, tag: str) -> int:
    """Returns the most tokens of one episode of a tag, all of its turns together."""
    env = self.env[tag]
    return min(self.batch.max_length, env.max_steps * env.max_tokens_per_step)


def _override(
  default: tuple[Component, ...], chosen: tuple[ComponentCall, ...]
) -> tuple[Component, ...]:
  """Returns `chosen`, or the algorithm's `default` if empty; 'none' empties both."""
  is_none = [call.name for call in chosen] == ['none']
  return () if is_none else chosen or default


def as_options(settings: Any) -> dict[str, Any]:
  """Returns a section's fields by name, as keyword arguments; nothing is copied."""
  fields = dataclasses.fields(settings)
  return {field.name: getattr(settings, field.name) for field in fields}
