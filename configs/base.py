"""Builds the config that every config starts from; defaults come from signatures."""

from typing import Any

from ml_collections import ConfigDict

from jaxrl.algorithms import registry
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
from jaxrl.model_loading import random_config
from jaxrl.rollout.engine.jax_engine import JaxEngine
from jaxrl.rollout.env_manager import EnvManager
from jaxrl.rollout.queue.group_queue import GroupQueue
from jaxrl.rollout.thread_pool import DEFAULT_NUM_THREADS
from jaxrl.training.checkpointing import Checkpointer
from jaxrl.training.learner import Learner
from jaxrl.training.optimizers import make_optimizer
from jaxrl.training.parallelism.mesh import make_mesh
from jaxrl.types import Algorithm

# What `Algorithm` calls otherwise.
SETTING_DESCRIPTIONS = {
  'behaviour': "Where old log-probs come from: 'rollout' or 'decoupled'.",
  'schema': "What is learned from: 'rollout', 'messages', 'preference' or 'text'.",
}


def env_section(env_type: str, **overrides: Any) -> Config:
  """Returns an environment tag's section: EnvManager's options and the class's own.

  Args:
    env_type: The environment's short name, or its location.
    **overrides: Values for EnvManager's options; `env_config`, a dict, for the
      environment class's own.
  """
  env_config = overrides.pop('env_config', {})
  shared = ('tag', 'max_length', 'temperature', 'top_p', 'top_k')
  config = make_section(omit_options(EnvManager, *shared), env_tag_options, **overrides)
  config.env_type = env_type
  describe_keys(config, {'env_type': 'The environment: its short name or location.'})
  config.env_config = make_section(find_env(env_type), **env_config)
  return config


def env_tag_options(
  *,
  share: float = 1.0,
  concurrency: int = DEFAULT_NUM_THREADS,
  formulation: str = 'auto',
) -> None:
  """Options of an environment tag beside EnvManager's.

  Args:
    share: Share of each step's groups, relative to other tags.
    concurrency: Environments that act at the same time in a worker.
    formulation: Training rows of an episode: 'trajectory', 'step', 'concatenated' or
      'auto', which the algorithm decides.
  """


def run_options(
  *, seed: int = 0, num_steps: int = 100, num_epochs: float = 0.0, kernels: str = 'auto'
) -> None:
  """Options of a run that belong to no section.

  Args:
    seed: Seed that every random number of the run derives from.
    num_steps: Training steps.
    num_epochs: Passes over a file's rows, instead of num_steps, where above 0.
    kernels: 'auto', or 'reference' for plain jnp implementations.
  """


def model_options(
  *, checkpoint: str = '', dtype: str = 'float32', remat: str = 'none', lora: str = ''
) -> None:
  """Options of the section `model`.

  Args:
    checkpoint: Hugging Face folder to start from; '' for a random model.
    dtype: Data type of the parameters.
    remat: Rematerialization policy of the layers.
    lora: Adapters to train instead of the model, such as 'lora(rank=16)'; '' for none.
  """


def data_options(*, source: str = '') -> None:
  """Options of the section `data`.

  Args:
    source: Experience store to learn from instead of playing; '' for none.
  """


def batch_options(
  *, num_groups: int = 16, max_length: int = 512, buckets: tuple[int, ...] = ()
) -> None:
  """Options of the section `batch` beside the learner's.

  Args:
    num_groups: Groups per training step.
    max_length: Tokens of the longest row, prompt and response together.
    buckets: Lengths that rows are padded to; () chooses them.
  """


def rollout_options(
  *,
  engine: str = 'jax',
  rewards: str = '',
  group_filter: str = '',
  shapers: str = '',
  sync: str = 'fixed',
  staleness: str = '',
) -> None:
  """Options of the section `rollout` beside those of its parts.

  Args:
    engine: Rollout engine, such as 'jax' or 'vllm(gpu_memory_utilization=.5)'.
    rewards: Graders, judges and reward models whose scores are added to the
      environment's reward.
    group_filter: Filters, joined by +, that drop groups that are not worth training on.
    shapers: Reward shapers, joined by +, that change rewards or weights of samples.
    sync: When engines get new weights: fixed, explorer, trainer or asynchronous.
    staleness: What happens to tokens of old weights: drop, mask or recompute; '' for
      nothing.
  """


def checkpoint_options(*, every: int = 0, export: bool = False) -> None:
  """Options of the section `checkpoint` beside Checkpointer's.

  Args:
    every: Steps between checkpoints; 0 saves at the end only.
    export: Whether to write a Hugging Face folder at the end.
  """


def eval_options(
  *,
  every: int = 0,
  path: str = '',
  split: str = 'test',
  num_tasks: int = -1,
  group_size: int = 1,
  temperature: float = 0.0,
) -> None:
  """Options of the section `eval`.

  Args:
    every: Steps between evaluations; 0 for none.
    path: File with the tasks; '' for the file of `split` beside dataset.path.
    split: Split of the dataset to evaluate on.
    num_tasks: Tasks of an evaluation; -1 for each row of the dataset once.
    group_size: Samples per task.
    temperature: Sampling temperature; 0 is greedy.
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


def expert_options(*, path: str = '') -> None:
  """Options of the section `expert`.

  Args:
    path: File of rows written by an expert, for samplers that mix them in.
  """


def teacher_options(*, checkpoint: str = '', by_tag: str = '') -> None:
  """Options of the section `teacher`, for distillation.

  Args:
    checkpoint: The teacher's Hugging Face folder.
    by_tag: A teacher for each environment tag: 'tag=FOLDER, other=FOLDER'.
  """


def cluster_options(
  *,
  ray: bool = False,
  address: str = '',
  num_engines: int = 1,
  num_workers: int = 1,
  weights: str = 'auto',
  placement: str = 'auto',
) -> None:
  """Options of the section `cluster`.

  Args:
    ray: Whether data, engines and environments run as Ray actors.
    address: Address of a running Ray cluster; '' starts one on this machine.
    num_engines: Rollout engines.
    num_workers: Environment workers.
    weights: How weights reach the engines, such as 'object_store(dtype="bfloat16")'.
    placement: Who has which devices, such as 'split(learners=2)' or 'colocated()'.
  """


def get_config(algorithm: str = 'grpo') -> Config:
  """Returns all sections at their defaults, for the algorithm of this name."""
  config: Config = make_section(run_options)
  config.model = make_section(model_options)
  config.model.random = make_section(random_config)
  config.dataset = make_section(omit_options(GlobalDataset, 'mode', 'seed'))
  config.data = make_section(data_options)
  builder, options = registry.builder(algorithm), registry.builder_options(algorithm)
  components = Options(options, {}, describe_options(Algorithm) | SETTING_DESCRIPTIONS)
  config.algorithm = make_section({'name': algorithm}, components, builder)
  describe_keys(config.algorithm, {'name': 'The algorithm; set by --config=FILE:NAME.'})
  config.batch = make_section(
    batch_options,
    pick_options(
      Learner, 'minibatches', 'micro_batches', 'packing', 'epochs', 'entropy'
    ),
  )
  config.optimizer = make_section(omit_options(make_optimizer, 'num_steps'))
  config.rollout = make_section(
    rollout_options,
    pick_options(EnvManager, 'temperature', 'top_p', 'top_k'),
    pick_options(JaxEngine, 'num_slots'),
    pick_options(GroupQueue, 'async_ratio', 'retries', 'min_members', 'redundancy'),
    pick_options(GroupQueue, 'lease_timeout', 'max_lost'),
    pick_options(Learner, 'mismatch_alarm'),
  )
  config.env = ConfigDict()
  config.mesh = make_section(omit_options(make_mesh, 'devices'))
  config.checkpoint = make_section(checkpoint_options, Checkpointer)
  config.eval = make_section(eval_options)
  config.files = make_section(pick_options(FileSampler, 'keys', 'system'))
  config.sft = make_section(
    warm_start_options,
    pick_options(FileSampler, 'batch_size', 'solution_key'),
    pick_options(make_optimizer, 'learning_rate', 'warmup_steps'),
    learning_rate=1e-3,
  )
  config.expert = make_section(expert_options)
  config.teacher = make_section(teacher_options)
  config.cluster = make_section(cluster_options)
  return config
