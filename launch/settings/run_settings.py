"""Frozen, typed settings of a run, which `launch.settings.resolve` reads from a config.

Code below the commands takes these classes, never a `ConfigDict` and never a call
string. No field has a default here: defaults are written once, in the signatures that
the config is derived from.
"""

import dataclasses
from collections.abc import Mapping
from typing import Any, Literal

from ml_collections import ConfigDict

from jaxrl.data.store.store_options import ReaderOptions, WriterOptions
from jaxrl.models.exact import Exact
from jaxrl.models.lora import Lora
from jaxrl.models.model_config import ModelConfig
from jaxrl.rollout.weights.weight_sync import SyncPolicy
from jaxrl.training.batching.packing_plan import Packing
from jaxrl.training.staleness import StalenessLimit
from jaxrl.types import Algorithm

TEACHER_CHECKPOINT = '--config.teacher.checkpoint'
TEACHER_BY_TAG = '--config.teacher.by_tag'


@dataclasses.dataclass(frozen=True)
class ModelSettings:
  """The model that the run trains or plays.

  Attributes:
    checkpoint: Hugging Face folder, or '' for a random model.
    random: shape of the random model; None if there is a checkpoint.
    dtype: floating-point type of activations and matrix products.
    remat: which activations the backward pass recomputes.
    lora: adapters to train; None trains every parameter.
    kernels: 'auto' or 'reference', see `kernels.dispatch`.
  """

  checkpoint: str
  random: ModelConfig | None
  dtype: str
  remat: str
  lora: Lora | None
  kernels: str

  @property
  def compute_options(self) -> dict[str, Any]:
    """Options of `TransformerLM` that say how it computes."""
    return {'dtype': self.dtype, 'remat': self.remat, 'kernels': self.kernels}

  @property
  def name(self) -> str:
    """The name of the model in dumped trajectories."""
    return self.checkpoint or 'random'


@dataclasses.dataclass(frozen=True)
class DatasetSettings:
  """The tasks of the run; the fields are options of `GlobalDataset`."""

  path: str
  split: str
  limit: int | None
  question_key: str
  answer_key: str
  curriculum: str


@dataclasses.dataclass(frozen=True)
class BatchSettings:
  """The batch of an optimizer step, and how the learner divides it.

  Attributes:
    num_groups: groups of a step, all tags together.
    max_length: most tokens of a row, prompt and response together.
    buckets: lengths that batches are padded to; never empty.
    packing: how sequences share rows; None gives each sequence its own row.
  """

  num_groups: int
  max_length: int
  buckets: tuple[int, ...]
  minibatches: int
  micro_batches: int
  packing: Packing | None
  epochs: int
  entropy: bool


@dataclasses.dataclass(frozen=True)
class OptimizerSettings:
  """Options of `make_optimizer` for the algorithm's own steps."""

  learning_rate: float
  warmup_steps: int
  schedule: str
  clip_norm: float
  kind: str


@dataclasses.dataclass(frozen=True)
class EngineSettings:
  """The engine that generates responses.

  Attributes:
    kind: 'jax' or 'vllm'.
    own_options: the options that the call string itself gives.
    options: all options of the engine, with those that other config keys give.
    exact: how the learner computes log-probs so that they equal the engine's bit by
      bit; None where that is not asked for.
    router_replay: the learner routes tokens to the experts that the engine chose.
  """

  kind: Literal['jax', 'vllm']
  own_options: Mapping[str, Any]
  options: Mapping[str, Any]
  exact: Exact | None
  router_replay: bool

  @property
  def external(self) -> bool:
    """Whether the engine is another program than the learner's model."""
    return self.kind != 'jax'

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
    sync: when the engines get new weights.
    staleness: what becomes of rollouts that are too old; None leaves it to the queue.
    rewards: terms added to the environment's reward; empty for none.
    group_filter: the config's own filters, beside those of the algorithm.
    shapers: the config's own reward shapers, beside those of the algorithm.
  """

  engine: EngineSettings
  rewards: tuple[RewardTermSettings, ...]
  group_filter: str
  shapers: str
  sync: SyncPolicy
  staleness: StalenessLimit | None
  temperature: float
  top_p: float
  top_k: int
  num_slots: int
  async_ratio: float
  retries: int
  min_members: int
  redundancy: int
  lease_timeout: float
  max_lost: int
  mismatch_alarm: float

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
    share: this tag's part of each step's groups, relative to the other tags.
    concurrency: environments that act at once in one worker.
    formulation: 'auto', 'step' or 'concatenated'.
    manager_options: further options of `EnvManager`.
  """

  env_type: str
  env_config: Mapping[str, Any]
  share: float
  concurrency: int
  formulation: str
  max_steps: int
  max_tokens_per_step: int
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

  every: int
  export: bool
  keep: int


@dataclasses.dataclass(frozen=True)
class EvalSettings:
  """Evaluations during training; `every` = 0 means there are none."""

  every: int
  path: str
  split: str
  num_tasks: int
  group_size: int
  temperature: float


@dataclasses.dataclass(frozen=True)
class FileSettings:
  """Where rows of files hold what; options of `FileSampler` and `Format`."""

  keys: str
  system: str


@dataclasses.dataclass(frozen=True)
class WarmStartSettings:
  """Supervised steps before the algorithm's own; `num_steps` = 0 for none."""

  num_steps: int
  path: str
  limit: int
  batch_size: int
  solution_key: str
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
  weights: WeightTransport
  placement: PlacementSettings


@dataclasses.dataclass(frozen=True)
class DumpSettings:
  """Where trajectories are written.

  Attributes:
    path: folder, file, table or store; '' takes a folder of the run's own.
    columns: pairs of name and type; empty for all columns.
    store: the experience store that `path` names; None for anything else.
  """

  path: str
  columns: tuple[Any, ...]
  store: WriterOptions | None


@dataclasses.dataclass(frozen=True)
class RunSettings:
  """All settings of a run.

  Attributes:
    num_epochs: passes over the files; 0 counts `num_steps` instead.
    algorithm: the resolved algorithm.
    algorithm_name: the name that the config gives it.
    algorithm_options: the config's own options of it; '' leaves one to the algorithm.
    env: settings by environment tag.
    experience_store: the store whose groups the run trains on; None if it plays them.
    expert_path: rows that samplers mix with rollouts; '' takes those of `sft` or
      `dataset`.
    dump: where trajectories are written; None for commands that never write any.
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
  experience_store: ReaderOptions | None
  batch: BatchSettings
  optimizer: OptimizerSettings
  rollout: RolloutSettings
  env: Mapping[str, EnvSettings]
  mesh: MeshSettings
  checkpoint: CheckpointSettings
  eval: EvalSettings
  files: FileSettings
  sft: WarmStartSettings
  expert_path: str
  teacher: TeacherSettings
  cluster: ClusterSettings
  dump: DumpSettings | None
  config: Mapping[str, Any]

  @property
  def plays(self) -> bool:
    """Whether the algorithm learns from rollouts."""
    return self.algorithm.data_format == 'rollout'

  @property
  def evaluates(self) -> bool:
    """Whether the run plays evaluations."""
    return bool(self.eval.every and self.env)

  def text(self, key: str) -> Any:
    """Returns what the config says under a dotted key, to quote it in a message."""
    value: Any = self.config
    for part in key.split('.'):
      value = value[part]
    return value

  def env_manager_config(self, tag: str) -> ConfigDict:
    """Returns a tag's section as group filters are given it."""
    return ConfigDict(dict(self.config['env'][tag]))

  @property
  def group_filters(self) -> str:
    """The filters of the algorithm and of the config, as one call string."""
    return _join_terms(self.algorithm.filters, self.rollout.group_filter)

  @property
  def reward_shapers(self) -> str:
    """The reward shapers of the algorithm and of the config, as one call string."""
    return _join_terms(self.algorithm.shapers, self.rollout.shapers)

  def response_limit(self, tag: str) -> int:
    """Returns the most tokens of one episode of a tag, all of its turns together."""
    env = self.env[tag]
    return min(self.batch.max_length, env.max_steps * env.max_tokens_per_step)


def _join_terms(*texts: str) -> str:
  return ' + '.join(text for text in texts if text.strip())


def as_options(settings: Any) -> dict[str, Any]:
  """Returns a section's fields by name, as keyword arguments; nothing is copied."""
  fields = dataclasses.fields(settings)
  return {field.name: getattr(settings, field.name) for field in fields}
