"""The config that every config starts from; each default is some signature's own."""

from typing import Any

from ml_collections import ConfigDict

from jaxrl.algorithms import compose
from jaxrl.config import Config, leave, section, take
from jaxrl.data.dataset import GlobalDataset
from jaxrl.data.files import FileSampler
from jaxrl.envs.base import find
from jaxrl.rollout.call_pool import THREADS
from jaxrl.rollout.env_manager import EnvManager
from jaxrl.rollout.group_queue import GroupQueue
from jaxrl.rollout.jax_engine import JaxEngine
from jaxrl.training.checkpoint import Checkpointer
from jaxrl.training.learner import Learner
from jaxrl.training.mesh import make_mesh
from jaxrl.training.optimizer import make_optimizer
from jaxrl.training.policy import random_config


def env_section(env_type: str, **overrides: Any) -> Config:
  """An environment tag's section: EnvManager's options, and the class's own.

  overrides: of EnvManager's options; `env_config`, a dict, of the class's own.
  """
  own = overrides.pop('env_config', {})
  shared = ('tag', 'max_length', 'temperature', 'top_p', 'top_k')
  # share: of each step's groups, beside those of other tags. concurrency: environments
  # that act at once in a worker. formulation: single steps for algorithms that tell
  # them apart.
  auto = {'share': 1.0, 'concurrency': THREADS, 'formulation': 'auto'}
  config = section(leave(EnvManager, *shared), auto, **overrides)
  config.env_type = env_type
  config.env_config = section(find(env_type), **own)
  return config


def get_config(algorithm: str = 'grpo') -> Config:
  """All sections at their defaults, for the algorithm that `algorithm` names."""
  config: Config = ConfigDict()
  config.seed = 0
  config.num_steps = 100
  config.num_epochs = 0.0
  config.model = section(
    {'checkpoint': '', 'dtype': 'float32', 'remat': 'none', 'lora': ''},
  )
  config.model.random = section(random_config)
  config.kernels = 'auto'  # or 'reference': plain jnp, see kernels/dispatch.py
  config.dataset = section(leave(GlobalDataset, 'mode', 'seed'))
  config.data = section({'source': ''})
  maker, options = compose.maker(algorithm), compose.maker_options(algorithm)
  config.algorithm = section({'name': algorithm}, options, maker)
  config.batch = section(
    {'num_groups': 16, 'max_length': 512, 'buckets': ()},
    take(Learner, 'minibatches', 'micro_batches', 'packing', 'epochs', 'entropy'),
  )
  config.optimizer = section(leave(make_optimizer, 'num_steps'))
  config.rollout = section(
    {'engine': 'jax', 'rewards': '', 'group_filter': '', 'shapers': ''},
    {'sync': 'fixed', 'staleness': ''},
    take(EnvManager, 'temperature', 'top_p', 'top_k'),
    take(JaxEngine, 'num_slots'),
    take(GroupQueue, 'async_ratio', 'retries', 'min_members', 'redundancy'),
    take(GroupQueue, 'lease_timeout', 'max_lost'),
    take(Learner, 'mismatch_alarm'),
  )
  config.env = ConfigDict()
  config.mesh = section(leave(make_mesh, 'devices'))
  config.checkpoint = section({'every': 0, 'export': False}, Checkpointer)
  config.eval = section(
    {'every': 0, 'path': '', 'split': 'test', 'num_tasks': -1, 'group_size': 1},
    {'temperature': 0.0},
  )
  config.files = section(take(FileSampler, 'keys', 'system'))
  config.sft = section(
    {'num_steps': 0, 'path': '', 'limit': 10_000},
    take(FileSampler, 'batch_size', 'solution_key'),
    take(make_optimizer, 'learning_rate', 'warmup_steps'),
    learning_rate=1e-3,
  )
  config.expert = section({'path': ''})
  config.teacher = section({'checkpoint': '', 'by_tag': ''})
  config.cluster = section(
    {'ray': False, 'address': '', 'num_engines': 1, 'num_workers': 1},
    {'weights': 'auto', 'placement': 'auto'},
  )
  return config
