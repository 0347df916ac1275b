"""Run options are all that a config may set, section by section.

Sections of parts that have options of their own, such as `OptimizerOptions`, are those
classes. The options of an algorithm and of an environment class are those of its
signature, which `configs.base` adds.
"""

import dataclasses
import datetime
import functools
import pathlib
import re
from collections.abc import Mapping
from typing import Any

from jaxrl.component_calls import ComponentCall, split_terms
from jaxrl.data.row_sources import RowSources, parse_row_sources
from jaxrl.data.rows.task_rows import RowColumns
from jaxrl.model_loading import parse_random_config
from jaxrl.models.lora import ADAPTER_KINDS, Lora
from jaxrl.models.model_config import TOWER_TRAINING, ModelConfig
from jaxrl.options import (
  ConfigError,
  Keywords,
  OptionError,
  Options,
  error_prefix,
  option,
  section,
)
from jaxrl.rollout.env_manager import EpisodeOptions, SamplingOptions
from jaxrl.rollout.env_worker import ReplayOptions
from jaxrl.rollout.episodes.row_format import ROW_FORMATS
from jaxrl.rollout.opponents import OpponentOptions
from jaxrl.rollout.queue.group_queue import QueueOptions
from jaxrl.rollout.thread_pool import DEFAULT_NUM_THREADS
from jaxrl.rollout.weights.weight_sync import SYNC_POLICIES, SyncPolicy
from jaxrl.training.checkpointing import CheckpointOptions
from jaxrl.training.learner_options import LearnerOptions
from jaxrl.training.optimizers import OptimizerOptions
from jaxrl.training.parallelism.mesh import MeshOptions
from jaxrl.training.staleness import STALENESS_POLICIES, StalenessLimit
from kernels.dispatch import KERNEL_OPTIONS

DTYPES = ('float32', 'bfloat16', 'float16')
_WEIGHTED = re.compile(r'(.+)\(weight=(\d*\.?\d+)\)')
FROM_DATA = 'data'  # as a teacher's checkpoint: its outputs come with the rows


@dataclasses.dataclass(frozen=True)
class ModelOptions(Options):
  """The model that a run trains or plays."""

  checkpoint: str = option(
    '',
    "Folder or Hub name, such as 'Qwen/Qwen3-0.6B', to start from; '' for a random "
    'model.',
  )
  random: ComponentCall = option(
    ComponentCall('qwen3'),
    "Family and sizes of a random model, such as 'qwen3(num_layers=2)'; see "
    '`jaxrl.model_loading.random_config` for all sizes.',
  )
  dtype: str = option('float32', 'Data type of the parameters.', choices=DTYPES)
  remat: ComponentCall = option(
    ComponentCall('auto'),
    "Rematerialization policy of the layers; 'auto' recomputes only where memory needs "
    'it.',
  )
  scan_unroll: int = option(
    0,
    'Layers that the learner compiles one after the other; as many as the model has '
    'move fewer bytes, and take more memory and longer to compile. 0 compiles one, but '
    'all of a shallow model on a CPU.',
    low=0,
  )
  lora: ComponentCall | None = option(
    None,
    "Adapters to train instead of the model, such as 'lora(rank=16)'; '' for none.",
  )
  vision: str = option(
    'frozen',
    "What is trained of a vision tower: 'frozen' for nothing, 'full' for all, or "
    "'lora' for adapters, as lora describes them.",
    choices=tuple(TOWER_TRAINING),
  )
  chat_template: str = option(
    '',
    "File with a Jinja chat template, in place of the checkpoint's; '' for that one.",
  )
  stop_token_ids: tuple[int, ...] = option(
    (),
    'Ids of the tokens that end a reply; () for those that generation_config.json '
    'names, the eos token and the end that the template writes.',
  )
  date: str = option(
    '',
    "Day that a chat template takes for today, as in '2026-01-31'; '' for the day on "
    'which the run began.',
  )
  template_options: Mapping[str, Any] = option(
    {}, 'Options of the chat template, any name, as in enable_thinking=false.'
  )

  def __post_init__(self) -> None:
    super().__post_init__()
    if self.vision == 'lora' and self.lora is None:
      raise OptionError(
        'vision',
        'lora',
        'adapters in the tower are those that model.lora describes: set it, as in '
        "'lora(rank=16)'",
      )
    try:
      datetime.date.fromisoformat(self.date or '2026-01-31')
    except ValueError as error:
      problem = 'not a day; write it as in 2026-01-31'
      raise OptionError('date', self.date, problem) from error

  @functools.cached_property
  def adapters(self) -> Lora | None:
    """The adapters to train; None trains every parameter."""
    if self.lora is None:
      return None
    return ADAPTER_KINDS.build(self.lora)

  @functools.cached_property
  def random_config(self) -> ModelConfig:
    """Shape of the random model, which is used without a checkpoint."""
    return parse_random_config(self.random, f'model.random={self.random}')

  def read_template(self) -> str:
    """Returns the text of the file with a chat template; '' without one."""
    if not self.chat_template:
      return ''
    where = f'model.chat_template={self.chat_template}'
    with error_prefix(f'{where}: cannot be read', OSError):
      text = pathlib.Path(self.chat_template).read_text(encoding='utf-8')
    if not text.strip():
      raise ConfigError(f'{where}: the file is empty')
    return text

  def trained_shape(self, shape: ModelConfig) -> ModelConfig:
    """Returns the shape that the learner trains, which says what is trained.

    Args:
      shape: The shape of the model.

    Raises:
      ConfigError: For adapters or a tower that this model cannot have.
    """
    tower = shape.vision
    if tower is None and self.vision != 'frozen':
      raise ConfigError(
        f'model.vision={self.vision}: this model, of family {shape.family}, has no '
        'vision tower: leave it out'
      )
    if tower is not None:
      tower = dataclasses.replace(tower, train=self.vision)
    try:
      return shape.replace(lora=self.adapters, vision=tower)
    except ValueError as error:
      raise ConfigError(f'model.{error}') from error

  @property
  def name(self) -> str:
    """The name of the model in dumped trajectories."""
    return self.checkpoint or 'random'


@dataclasses.dataclass(frozen=True)
class DatasetOptions(Options):
  """The rows of the run, and what they hold."""

  path: RowSources = option(
    '',
    "File, folder, Hub name or 'generate:NAME(…)' that the rows come from, or several "
    'joined by +.',
    read=parse_row_sources,
  )
  split: str = option('train', 'Split of the source.')
  limit: int | None = option(None, 'Rows to use at most; none for all.', low=1)
  curriculum: ComponentCall = option(
    ComponentCall('shuffle'), 'Which rows are drawn; see `jaxrl.data.curricula`.'
  )
  columns: RowColumns = section(
    RowColumns, 'Which columns, or keys, of rows hold what.'
  )
  system_prompt: str = option(
    '', 'System message of conversations from files that have none.'
  )
  experience_store: str = option(
    '', "Experience store to learn from instead of playing; '' for none."
  )
  expert_path: RowSources = option(
    '',
    'File of rows written by an expert, for samplers that mix them in.',
    read=parse_row_sources,
  )


@dataclasses.dataclass(frozen=True)
class BatchOptions(LearnerOptions):
  """The batch of a training step, and how the learner divides it."""

  num_groups: int = option(16, 'Groups per training step.', low=1)
  max_length: int = option(
    512, 'Tokens of the longest row, prompt and response together.', low=2
  )
  length_buckets: tuple[int, ...] = option(
    (), 'Lengths that rows are padded to; () chooses them.'
  )
  num_micro_batches: int = option(
    0,
    'Parts of a minibatch whose gradients are summed, to save memory; 0 takes as many '
    'as the memory needs.',
    low=0,
  )

  def __post_init__(self) -> None:
    super().__post_init__()
    buckets, longest = self.length_buckets, self.max_length
    if not buckets:
      return
    if min(buckets) < 1:
      problem = 'each length must be at least 1'
    elif max(buckets) < longest:
      problem = f'the largest must hold batch.max_length={longest} tokens'
    elif max(buckets) > longest:
      problem = (
        f'{max(buckets)} is longer than any row may be, batch.max_length={longest}'
      )
    else:
      return
    raise OptionError('length_buckets', buckets, problem)

  @property
  def padded_lengths(self) -> tuple[int, ...]:
    """Lengths that batches are padded to; never empty."""
    return self.length_buckets or (self.max_length,)


@dataclasses.dataclass(frozen=True)
class RolloutOptions(QueueOptions, SamplingOptions):
  """How episodes are played and collected."""

  engine: ComponentCall = option(
    ComponentCall('jax'),
    "Rollout engine, such as 'jax' or 'vllm(gpu_memory_utilization=.5)'.",
  )
  max_num_seqs: int = option(64, 'Sequences that one engine generates at once.', low=1)
  rewards: str = option(
    '',
    'Graders, judges and reward models whose scores are added to the '
    "environment's reward.",
  )
  group_filter: tuple[ComponentCall, ...] = option(
    (),
    'Filters, joined by +, that drop groups that are not worth training on, in place '
    "of the algorithm's own, which '' leaves and 'none' removes.",
  )
  reward_shaping: tuple[ComponentCall, ...] = option(
    (),
    'Reward shapers, joined by +, that change rewards or weights of samples, in place '
    "of the algorithm's own, which '' leaves and 'none' removes.",
  )
  staleness_policy: ComponentCall | None = option(
    None,
    "What happens to tokens of old weights: drop, mask or recompute; '' for nothing.",
  )

  @functools.cached_property
  def staleness_limit(self) -> StalenessLimit | None:
    """What becomes of rollouts that are too old; None leaves it to the queue."""
    if self.staleness_policy is None:
      return None
    key = 'rollout.staleness_policy'
    limit = STALENESS_POLICIES.build(self.staleness_policy)
    if limit.max_age < 0:
      raise ConfigError(f'{key}={self.staleness_policy}: max must be at least 0')
    return limit

  @property
  def sampling(self) -> Keywords:
    """Options of an env manager that say how tokens are sampled."""
    return {field.name: getattr(self, field.name) for field in _SAMPLING_FIELDS}


_SAMPLING_FIELDS = dataclasses.fields(SamplingOptions)


@dataclasses.dataclass(frozen=True)
class WeightSyncOptions(Options):
  """When engines get new weights, and how these reach them."""

  policy: ComponentCall = option(
    ComponentCall('fixed'),
    'When engines get new weights: fixed, explorer, trainer or asynchronous.',
  )
  transport: ComponentCall = option(
    ComponentCall('auto'),
    'How weights reach them, such as \'object_store(dtype="bfloat16")\'.',
  )

  @functools.cached_property
  def sync_policy(self) -> SyncPolicy:
    """When engines get new weights."""
    key = 'weight_sync.policy'
    policy = SYNC_POLICIES.build(self.policy)
    if policy.interval < 1:
      raise ConfigError(f'{key}={self.policy}: interval must be at least 1')
    return policy


@dataclasses.dataclass(frozen=True)
class TaskColumns(Options):
  """The columns of some tasks' rows, where they differ from those of other rows."""

  question: str | None = option(None, 'Column of the question; none for the usual one.')
  answer: str | None = option(None, 'Column of the answer; none for the usual one.')

  def or_else(self, usual: 'TaskColumns | RowColumns') -> 'TaskColumns':
    """Returns these columns, with the usual ones where these are None.

    Args:
      usual: The columns of the other rows.
    """
    question = usual.question if self.question is None else self.question
    answer = usual.answer if self.answer is None else self.answer
    return TaskColumns(question=question, answer=answer)


@dataclasses.dataclass(frozen=True)
class TagDatasetOptions(Options):
  """The rows of one environment tag; what is left open is as in `dataset`."""

  path: RowSources = option(
    '',
    "This tag's rows; '' for those of the run's dataset, as for the other keys.",
    read=parse_row_sources,
  )
  split: str = option('', 'Split of the source.')
  limit: int | None = option(None, 'Rows to use at most.', low=1)
  columns: TaskColumns = section(
    TaskColumns, "Which columns of this tag's rows hold what."
  )
  curriculum: ComponentCall | None = option(None, 'Which rows are drawn.')

  @property
  def task_options(self) -> Keywords:
    """Options of `GlobalDataset`, beside the path, where nothing is left open."""
    return {
      **{name: getattr(self, name) for name in ('split', 'limit', 'curriculum')},
      'question_key': self.columns.question or '',
      'answer_key': self.columns.answer or '',
    }


@dataclasses.dataclass(frozen=True)
class EnvOptions(EpisodeOptions, ReplayOptions, OpponentOptions):
  """One environment tag: what it plays, how, and which share of the groups."""

  env_type: str = option('', 'The environment: its short name or location.')
  env_config: Mapping[str, Any] = option({}, "The environment class's own options.")
  dataset: TagDatasetOptions = section(TagDatasetOptions, 'Rows of this tag.')
  weight: float = option(
    1.0,
    "Share of each step's groups, relative to other tags; 0 only evaluates.",
    low=0,
  )
  max_concurrency: int = option(
    DEFAULT_NUM_THREADS, 'Environments that act at the same time in a worker.', low=1
  )
  row_format: str = option(
    'auto',
    "Training rows of an episode: 'trajectory', 'step', 'concatenated' or 'auto', "
    'which the algorithm decides.',
    choices=('auto', *ROW_FORMATS),
  )
  manager: ComponentCall | None = option(
    None, "A class of your own in EnvManager's place, 'file.py:Class()'; '' for ours."
  )

  @property
  def episode(self) -> Keywords:
    """The options of `EpisodeOptions` by name."""
    fields = dataclasses.fields(EpisodeOptions)
    return {field.name: getattr(self, field.name) for field in fields}


def _check_num_tasks(num_tasks: int | None) -> None:
  if num_tasks == 0:
    raise OptionError('num_tasks', 0, 'must be at least 1, or -1 for all')


@dataclasses.dataclass(frozen=True)
class EvalSetOptions(Options):
  """One evaluation set; what is left open is as in `eval`."""

  tag: str = option('', "Environment tag that plays it; '' if there is only one.")
  path: RowSources = option(
    '',
    "File with the tasks; '' for that of `eval`, or of `split` beside the tag's.",
    read=parse_row_sources,
  )
  split: str = option('', 'Split of the dataset to evaluate on.')
  columns: TaskColumns = section(
    TaskColumns, "Which columns of the set's rows hold what."
  )
  num_tasks: int | None = option(
    None, 'Tasks of an evaluation; -1 for each row of the dataset once.', low=-1
  )
  group_size: int | None = option(None, 'Samples per task.', low=1)
  temperature: float | None = option(None, 'Sampling temperature; 0 is greedy.', low=0)
  interval: int | None = option(None, 'Steps between evaluations; 0 for none.', low=0)

  def __post_init__(self) -> None:
    super().__post_init__()
    _check_num_tasks(self.num_tasks)


@dataclasses.dataclass(frozen=True)
class EvalOptions(Options):
  """Evaluations during training."""

  interval: int = option(0, 'Steps between evaluations; 0 for none.', low=0)
  path: RowSources = option(
    '',
    "File with the tasks; '' for the file of `split` beside dataset.path.",
    read=parse_row_sources,
  )
  split: str = option('test', 'Split of the dataset to evaluate on.')
  num_tasks: int = option(
    -1, 'Tasks of an evaluation; -1 for each row of the dataset once.', low=-1
  )
  group_size: int = option(1, 'Samples per task.', low=1)
  temperature: float = option(0.0, 'Sampling temperature; 0 is greedy.', low=0)
  sets: Mapping[str, EvalSetOptions] = option({}, 'Named evaluation sets.')

  def __post_init__(self) -> None:
    super().__post_init__()
    _check_num_tasks(self.num_tasks)


@dataclasses.dataclass(frozen=True)
class WarmStartOptions(Options):
  """Supervised steps before the algorithm's own."""

  num_steps: int = option(0, 'Supervised steps; 0 for none.', low=0)
  path: RowSources = option(
    '', 'File or generator of the lessons.', read=parse_row_sources
  )
  limit: int = option(10_000, 'Rows to read at most.', low=1)
  batch_size: int = option(64, 'Rows per step.', low=1)
  learning_rate: float = option(1e-3, 'The highest learning rate.', low=0)
  warmup_steps: int = option(0, 'Learner steps of a linear warm-up.', low=0)


@dataclasses.dataclass(frozen=True)
class TeacherOptions(Options):
  """The teachers that a distillation algorithm asks."""

  checkpoint: str = option(
    '',
    "The teacher's Hugging Face folder or Hub name, or several, 'A(weight=.7) + "
    "B(weight=.3)'; 'data' if rows bring its outputs.",
  )
  by_tag: Mapping[str, Any] = option(
    {}, 'Teachers of single environment tags, or tags of rows: a checkpoint for each.'
  )

  def __post_init__(self) -> None:
    super().__post_init__()
    if self.from_data and self.by_tag:
      tag, folder = next(iter(self.by_tag.items()))
      problem = "the rows hold the teacher's outputs (checkpoint='data'): name either"
      raise OptionError(f'by_tag.{tag}', folder, problem)
    for tag, folder in self.by_tag.items():
      if not isinstance(folder, str) or not folder.strip():
        raise OptionError(f'by_tag.{tag}', folder, 'must be a checkpoint')
    for tag, folder in self.folders.items():
      try:
        _parse_weighted(folder)
      except ValueError as error:
        option_name = f'by_tag.{tag}' if tag else 'checkpoint'
        raise OptionError(option_name, folder, str(error)) from error

  @functools.cached_property
  def folders(self) -> Mapping[str, str]:
    """Checkpoints by environment tag; '' stands for all other tags."""
    usual = {'': self.checkpoint} if self.checkpoint and not self.from_data else {}
    return {**usual, **self.by_tag}

  @functools.cached_property
  def weighted(self) -> Mapping[str, tuple[tuple[str, float], ...]]:
    """Checkpoints and their weights, which sum up to 1, by tag as in `folders`."""
    return {tag: _parse_weighted(folder) for tag, folder in self.folders.items()}

  @property
  def from_data(self) -> bool:
    """Whether the rows bring the teacher's outputs."""
    return self.checkpoint == FROM_DATA

  @property
  def named(self) -> bool:
    """Whether the config names a teacher, or says that the data brings its outputs."""
    return self.from_data or bool(self.folders)


def _parse_weighted(text: str) -> tuple[tuple[str, float], ...]:
  """Reads `A(weight=.7) + B(weight=.3)`; a text without a weight is one checkpoint."""
  if '(weight=' not in text:
    return ((text, 1.0),)
  terms = [_WEIGHTED.fullmatch(term) for term in split_terms(text)]
  if None in terms:
    raise ValueError('several teachers need a weight each: A(weight=.7) + B(weight=.3)')
  pairs = [(term[1], float(term[2])) for term in terms if term]
  total = sum(weight for _, weight in pairs)
  if min(weight for _, weight in pairs) <= 0:
    raise ValueError('the weight of a teacher must be above 0')
  return tuple((folder, weight / total) for folder, weight in pairs)


@dataclasses.dataclass(frozen=True)
class ClusterOptions(Options):
  """The processes of the run. Without `ray` everything lives in one process."""

  ray: bool = option(False, 'Whether data, engines and environments run as Ray actors.')
  address: str = option(
    '', "Address of a running Ray cluster; '' starts one on this machine."
  )
  host_timeout: float = option(
    30.0,
    'Seconds after which a host of the cluster that does not answer is given up.',
    low=1,
  )
  num_engines: int = option(
    1, 'Rollout engines; 0 for as many as there are devices for.', low=0
  )
  num_workers: int = option(1, 'Environment workers.', low=1)
  placement: ComponentCall = option(
    ComponentCall('auto'),
    "Who has which devices, such as 'split(learners=2)' or 'colocated()'.",
  )

  def __post_init__(self) -> None:
    super().__post_init__()
    for name, alone in (('num_engines', 1), ('num_workers', 1), ('address', '')):
      value = getattr(self, name)
      if not self.ray and value != alone:
        raise OptionError(
          name,
          value,
          'needs cluster.ray=true, as a single process has one engine and one worker',
        )
    if not self.address and self.host_timeout != 30.0:
      raise OptionError(
        'host_timeout',
        self.host_timeout,
        'needs cluster.address, as a run on this machine alone has no other host',
      )


@dataclasses.dataclass(frozen=True)
class RunOptions(Options):
  """All options of a run, but for those of its algorithm."""

  seed: int = option(0, 'Seed that every random number of the run derives from.', low=0)
  num_steps: int = option(100, 'Training steps.', low=0)
  num_epochs: float = option(
    0.0, "Passes over a file's rows, instead of num_steps, where above 0.", low=0
  )
  kernels: str = option(
    'auto',
    "'auto', or 'reference' for plain jnp implementations.",
    choices=KERNEL_OPTIONS,
  )
  mesh: MeshOptions = section(MeshOptions, 'How devices are shared out.')
  model: ModelOptions = section(ModelOptions, 'The model.')
  dataset: DatasetOptions = section(DatasetOptions, 'The rows.')
  batch: BatchOptions = section(BatchOptions, 'The batch.')
  optimizer: OptimizerOptions = section(OptimizerOptions, 'The optimizer.')
  rollout: RolloutOptions = section(RolloutOptions, 'How episodes are played.')
  weight_sync: WeightSyncOptions = section(WeightSyncOptions, 'How weights travel.')
  env: Mapping[str, EnvOptions] = option({}, 'The environments by tag.')
  checkpoint: CheckpointOptions = section(CheckpointOptions, 'Checkpoints.')
  eval: EvalOptions = section(EvalOptions, 'Evaluations.')
  sft: WarmStartOptions = section(WarmStartOptions, 'A supervised start.')
  teacher: TeacherOptions = section(TeacherOptions, 'Teachers.')
  cluster: ClusterOptions = section(ClusterOptions, 'Processes and devices.')

  @property
  def compute_options(self) -> Keywords:
    """Options of `TransformerLM` that say how it computes."""
    return {
      'dtype': self.model.dtype,
      'remat': self.model.remat,
      'kernels': self.kernels,
    }
