"""A small model and made-up groups, shared by the tests of training."""

import functools

import jax
import numpy as np

from jaxrl.models.config import ModelConfig
from jaxrl.models.model import Model
from jaxrl.training.learner import Learner
from jaxrl.types import Trajectory

CONFIG = ModelConfig(
  vocab_size=64,
  hidden_size=32,
  num_layers=2,
  num_heads=4,
  num_kv_heads=2,
  head_dim=8,
  intermediate_size=48,
)


def model(**changes) -> Model:
  return Model(CONFIG.replace(**changes))


@functools.cache
def params(**changes):
  """Numpy, so that no test can donate another's."""
  made = model(**changes)
  return jax.tree.map(np.asarray, jax.jit(made.init)(jax.random.key(0)))


def trajectory(rng, length, **fields) -> Trajectory:
  tokens = rng.integers(0, 64, length).astype(np.int32)
  mask = np.arange(length) >= max(1, length // 3)
  rewards = np.zeros(length, np.float32)
  rewards[-1] = rng.normal()
  logprobs = np.where(mask, -4.0 + 0.1 * rng.normal(size=length), 0).astype(np.float32)
  version = np.where(mask, 0, -1).astype(np.int32)
  return Trajectory(tokens, mask, logprobs, rewards, version, **fields)


def groups(seed=0, sizes=(4, 4), lengths=(5, 15), **fields):
  rng = np.random.default_rng(seed)
  return [
    [
      trajectory(rng, rng.integers(*lengths), group_id=g, member=m, **fields)
      for m in range(size)
    ]
    for g, size in enumerate(sizes)
  ]


def learner(algorithm, *, changes=None, **options) -> Learner:
  changes = changes or {}
  options = {'num_rows': 8, 'buckets': (16,)} | options
  return Learner(model(**changes), params(**changes), algorithm, **options)
