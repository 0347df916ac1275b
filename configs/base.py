"""Builds the config that every config starts from; defaults come from signatures."""

from typing import Any

from ml_collections import ConfigDict

from jaxrl.algorithms import registry
from jaxrl.call_strings import ConfigError
from jaxrl.config import (
  Config,
  Options,
  describe_keys,
  describe_options,
  make_section,
  omit_options,
  pick_options,
)
from jaxrl.data.dataset import GlobalDataset
from jaxrl.data.file_sampler import FileSampler
from jaxrl.envs.env_registry import find_env
from jaxrl.rollout.engine.jax_engine import JaxEngine
from jaxrl.rollout.env_manager import EnvManager
from jaxrl.rollout.queue.group_queue import GroupQueue
from jaxrl.rollout.thread_pool import DEFAULT_NUM_THREADS
from jaxrl.training.checkpointing import Checkpointer
from jaxrl.training.learner import Learner
from jaxrl.training.optimizers import make_optimizer
from jaxrl.types import Algorithm

# Options of EnvManager that a run sets for all environment tags at once.
SHARED_OPTIONS = ('tag', 'max_length', 'temperature', 'top_p', 'top_k', 'timeouts')


def env_section(env_type: str, **overrides: Any) -> Config:
  """Returns an environment tag's section: EnvManager's options and the class's own.

  Args:
    env_type: The environment's short name, or its location.
    **overrides: Values for EnvManager's options; `env_config`, a dict, for the
      environment class's own; `dataset`, a dict, for rows of this tag's own.
  """
  env_config, dataset = overrides.pop('env_config', {}), overrides.pop('dataset', {})
  config = make_section(
    omit_options(EnvManager, *SHARED_OPTIONS), env_tag_options, **overrides
  )
  config.env_type = env_type
  describe_keys(config, {'env_type': 'The environment: its short name or location.'})
  env = find_env(env_type)
  config.env_config = make_section(env, **env_config)
  if getattr(env, 'uses_dataset', True):
    config.dataset = make_section(tag_dataset_options, **dataset)
  elif dataset:
    raise ConfigError(
      f'env_section({env_type!r}): takes no dataset: its tasks come from seeds'
    )
  return config


def tag_dataset_options(
  *,
  path: str = '',
  split: str = '',
  limit: int | None = None,
  keys: str = '',
  curriculum: str = '',
) -> None:
  """Options of the section `dataset` of an environment tag.

  Args:
    path: This tag's rows; '' for those of the run's dataset, as for the other keys.
    split: Split of the source.
    limit: Rows to use at most.
    keys: Keys of rows that differ from the usual ones, such as 'question=problem'.
    curriculum: Which rows are drawn.
  """


def env_tag_options(
  *,
  weight: float = 1.0,
  max_concurrency: int = DEFAULT_NUM_THREADS,
  row_format: str = 'auto',
  timeouts: str = '',
  manager: str = '',
) -> None:
  """Options of an environment tag beside EnvManager's.

  Args:
    weight: Share of each step's groups, relative to other tags; 0 only evaluates.
    max_concurrency: Environments that act at the same time in a worker.
    row_format: Training rows of an episode: 'trajectory', 'step', 'concatenated' or
      'auto', which the algorithm decides.
    timeouts: Seconds before a call is cancelled, 0 for no limit, as in
      'reset=60, step=60, generate=0'.
    manager: A class of your own that plays the episodes in place of EnvManager, such
      as 'file.py:Class(option=1)'; '' for ours.
  """


def run_options(
  *,
  seed: int = 0,
  num_steps: int = 100,
  num_epochs: float = 0.0,
  mesh: str = '',
  kernels: str = 'auto',
) -> None:
  """Options of a run that belong to no section.

  Args:
    seed: Seed that every random number of the run derives from.
    num_steps: Training steps.
    num_epochs: Passes over a file's rows, instead of num_steps, where above 0.
    mesh: How devices are shared out, such as 'fsdp=8, tensor=2', over the axes data,
      fsdp, tensor, context and expert; data takes those that are left.
    kernels: 'auto', or 'reference' for plain jnp implementations.
  """


def model_options(
  *,
  checkpoint: str = '',
  random: str = 'qwen3',
  dtype: str = 'float32',
  remat: str = 'auto',
  lora: str = '',
  vision: str = 'frozen',
  chat_template: str = '',
  stop_token_ids: tuple[int, ...] = (),
  date: str = '',
) -> None:
  """Options of the section `model`.

  Args:
    checkpoint: Folder or Hub name, such as 'Qwen/Qwen3-0.6B', to start from; '' for a
      random model.
    random: Family and sizes of a random model, such as 'qwen3(num_layers=2)'; see
      `jaxrl.model_loading.random_config` for all sizes.
    dtype: Data type of the parameters.
    remat: Rematerialization policy of the layers; 'auto' recomputes only where memory
      needs it.
    lora: Adapters to train instead of the model, such as 'lora(rank=16)'; '' for none.
    vision: What is trained of a vision tower: 'frozen' for nothing, 'full' for all, or
      'lora' for adapters, as lora describes them.
    chat_template: File with a Jinja chat template, in place of the checkpoint's; '' for
      that one.
    stop_token_ids: Ids of the tokens that end a reply; () for those that
      generation_config.json names, the eos token and the end that the template writes.
    date: Day that a chat template takes for today, as in '2026-01-31'; '' for the day
      on which the run began.
  """


def dataset_options(
  *, keys: str = '', experience_store: str = '', expert_path: str = ''
) -> None:
  """Options of the section `dataset` beside GlobalDataset's.

  Args:
    keys: Keys of rows that differ from the usual ones, such as 'question=problem,
      answer=solution'; see `jaxrl.data.rows.row_formats`.
    experience_store: Experience store to learn from instead of playing; '' for none.
    expert_path: File of rows written by an expert, for samplers that mix them in.
  """


def batch_options(
  *,
  num_groups: int = 16,
  max_length: int = 512,
  length_buckets: tuple[int, ...] = (),
  num_micro_batches: int = 0,
) -> None:
  """Options of the section `batch` beside the learner's.

  Args:
    num_groups: Groups per training step.
    max_length: Tokens of the longest row, prompt and response together.
    length_buckets: Lengths that rows are padded to; () chooses them.
    num_micro_batches: Parts of a minibatch whose gradients are summed, to save memory;
      0 takes as many as the memory needs.
  """


def rollout_options(
  *,
  engine: str = 'jax',
  rewards: str = '',
  group_filter: str = '',
  reward_shaping: str = '',
  staleness_policy: str = '',
  sampling: str = '',
) -> None:
  """Options of the section `rollout` beside those of its parts.

  Args:
    engine: Rollout engine, such as 'jax' or 'vllm(gpu_memory_utilization=.5)'.
    rewards: Graders, judges and reward models whose scores are added to the
      environment's reward.
    group_filter: Filters, joined by +, that drop groups that are not worth training on,
      in place of the algorithm's own, which '' leaves and 'none' removes.
    reward_shaping: Reward shapers, joined by +, that change rewards or weights of
      samples, in place of the algorithm's own, which '' leaves and 'none' removes.
    staleness_policy: What happens to tokens of old weights: drop, mask or recompute; ''
      for nothing.
    sampling: Sampling beside the temperature, 'top_p=0.95, top_k=20', for commands
      that do not train.
  """


def checkpoint_options(*, save_interval: int = 0, export: bool = False) -> None:
  """Options of the section `checkpoint` beside Checkpointer's.

  Args:
    save_interval: Steps between checkpoints; 0 saves at the end only.
    export: Whether to write a Hugging Face folder at the end.
  """


def eval_options(
  *,
  interval: int = 0,
  path: str = '',
  split: str = 'test',
  num_tasks: int = -1,
  group_size: int = 1,
  temperature: float = 0.0,
) -> None:
  """Options of the section `eval`.

  Args:
    interval: Steps between evaluations; 0 for none.
    path: File with the tasks; '' for the file of `split` beside dataset.path.
    split: Split of the dataset to evaluate on.
    num_tasks: Tasks of an evaluation; -1 for each row of the dataset once.
    group_size: Samples per task.
    temperature: Sampling temperature; 0 is greedy.
  """


def eval_set(**overrides: Any) -> Config:
  """Returns the section of a named evaluation set, for `config.eval.sets`.

  Args:
    **overrides: Values for the options of `eval_set_options`.
  """
  return make_section(eval_set_options, **overrides)


def eval_set_options(
  *,
  tag: str = '',
  path: str = '',
  split: str = '',
  keys: str = '',
  num_tasks: int | None = None,
  group_size: int | None = None,
  temperature: float | None = None,
  interval: int | None = None,
) -> None:
  """Options of an evaluation set; those that are left open are the ones of `eval`.

  Args:
    tag: Environment tag that plays it; '' if there is only one.
    path: File with the tasks; '' for that of `eval`, or of `split` beside the tag's.
    split: Split of the dataset to evaluate on.
    keys: Keys of rows that differ from the usual ones; '' for those of the tag.
    num_tasks: Tasks of an evaluation; -1 for each row of the dataset once.
    group_size: Samples per task.
    temperature: Sampling temperature; 0 is greedy.
    interval: Steps between evaluations; 0 for none.
  """


def warm_start_options(
  *, num_steps: int = 0, path: str = '', limit: int = 10_000
) -> None:
  """Options of the section `sft`, a supervised start before the algorithm.

  Args:
    num_steps: Supervised steps; 0 for none.
    path: File or generator of the lessons.
    limit: Rows to read at most.
  """


def teacher_options(*, checkpoint: str = '') -> None:
  """Options of the section `teacher`, for distillation.

  Args:
    checkpoint: The teacher's Hugging Face folder, or one for each environment tag,
      'tag=FOLDER, other=FOLDER'; 'data' if rows bring the teacher's outputs.
  """


def cluster_options(
  *,
  ray: bool = False,
  address: str = '',
  num_engines: int = 1,
  num_workers: int = 1,
  placement: str = 'auto',
) -> None:
  """Options of the section `cluster`.

  Args:
    ray: Whether data, engines and environments run as Ray actors.
    address: Address of a running Ray cluster; '' starts one on this machine.
    num_engines: Rollout engines.
    num_workers: Environment workers.
    placement: Who has which devices, such as 'split(learners=2)' or 'colocated()'.
  """


def weight_sync_options(*, policy: str = 'fixed', transport: str = 'auto') -> None:
  """Options of the section `weight_sync`.

  Args:
    policy: When engines get new weights: fixed, explorer, trainer or asynchronous.
    transport: How weights reach them, such as 'object_store(dtype="bfloat16")'.
  """


def get_config(algorithm: str = 'grpo') -> Config:
  """Returns all sections at their defaults, for the algorithm of this name."""
  config: Config = make_section(run_options)
  config.model = make_section(model_options)
  # Open: every template has options of its own, so that any name may be set in it.
  config.model.template_options = ConfigDict()
  config.dataset = make_section(
    omit_options(GlobalDataset, 'mode', 'seed', 'question_key', 'answer_key'),
    pick_options(FileSampler, 'system_prompt'),
    dataset_options,
  )
  builder, options = registry.builder(algorithm), registry.builder_options(algorithm)
  components = Options(options, {}, describe_options(Algorithm))
  config.algorithm = make_section({'name': algorithm}, components, builder)
  describe_keys(config.algorithm, {'name': 'The algorithm; set by --config=FILE:NAME.'})
  config.batch = make_section(
    batch_options,
    pick_options(Learner, 'num_minibatches', 'packing'),
    pick_options(Learner, 'ppo_epochs', 'log_entropy'),
  )
  config.optimizer = make_section(omit_options(make_optimizer, 'num_steps'))
  config.rollout = make_section(
    rollout_options,
    pick_options(EnvManager, 'temperature'),
    pick_options(JaxEngine, 'max_num_seqs'),
    pick_options(GroupQueue, 'async_ratio', 'max_retries', 'min_group_size'),
    pick_options(GroupQueue, 'extra_samples', 'episode_timeout'),
    pick_options(GroupQueue, 'max_consecutive_drops'),
    pick_options(Learner, 'logprob_mismatch_warn'),
  )
  config.weight_sync = make_section(weight_sync_options)
  config.env = ConfigDict()
  config.checkpoint = make_section(checkpoint_options, Checkpointer)
  config.eval = make_section(eval_options)
  config.eval.sets = ConfigDict()
  config.sft = make_section(
    warm_start_options,
    pick_options(FileSampler, 'batch_size'),
    pick_options(make_optimizer, 'learning_rate', 'warmup_steps'),
    learning_rate=1e-3,
  )
  config.teacher = make_section(teacher_options)
  config.cluster = make_section(cluster_options)
  return config
