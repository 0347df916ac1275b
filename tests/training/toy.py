"""Small models and made-up groups, shared by the tests of training."""

import dataclasses
import functools

import jax
import jax.numpy as jnp
import numpy as np

from jaxrl.models.layer_stack import unconstrained
from jaxrl.models.model_config import ModelConfig
from jaxrl.models.transformer_lm import TransformerLM
from jaxrl.training.learner import Learner
from jaxrl.training.learner_options import LearnerOptions
from jaxrl.types import PolicyOutputs, Trajectory
from tests.calls import split_options

CONFIG = ModelConfig(
  vocab_size=64,
  hidden_size=32,
  num_layers=2,
  num_heads=4,
  num_kv_heads=2,
  head_dim=8,
  intermediate_size=48,
)


@dataclasses.dataclass(frozen=True)
class Bigram:
  """A model in three lines, that compiles at once: the next token by the last one."""

  config: ModelConfig = CONFIG
  constrain: object = unconstrained

  def init(self, key):
    table = jax.random.normal(key, (64, 64))
    head = {'value_head': {'kernel': jnp.zeros(64)}} if self.config.value_head else {}
    return {'bigram': {'table': table}} | head

  def logical_axes(self):
    head = {'value_head': {'kernel': (None,)}} if self.config.value_head else {}
    return {'bigram': {'table': ('vocab', None)}} | head

  def policy_outputs(
    self,
    params,
    tokens,
    segment_ids,
    *,
    temperature=1.0,
    entropy=False,
    nec=False,
    sum_pi_squared=False,
    topk_ids=None,
  ):
    before, there = tokens[:, :-1], segment_ids[:, 1:] > 0
    logits = params['bigram']['table'][before]
    p = jax.nn.log_softmax(logits / temperature)
    chosen = jnp.take_along_axis(p, tokens[:, 1:, None], axis=-1)[..., 0]
    full = jax.nn.log_softmax(logits)

    h = -(jnp.exp(full) * full).sum(-1)

    def shift(x):
      x = jnp.where(there.reshape(there.shape + (1,) * (x.ndim - 2)), x, 0)
      return jnp.pad(x, ((0, 0), (1, 0)) + ((0, 0),) * (x.ndim - 2))

    topk = None
    if topk_ids is not None:
      topk = shift(jnp.take_along_axis(p, topk_ids[:, 1:], axis=-1))

    return PolicyOutputs(
      shift(chosen),
      shift(h) if entropy else None,
      shift(params['value_head']['kernel'][before]) if self.config.value_head else None,
      shift((jnp.exp(2 * full) * (h[..., None] + full)).sum(-1)) if nec else None,
      shift(jnp.exp(2 * full).sum(-1)) if sum_pi_squared else None,
      topk,
    )


def model(**changes) -> TransformerLM:
  return TransformerLM(CONFIG.replace(**changes))


@functools.cache
def params(kind=TransformerLM, seed=0, **changes):
  """Random numpy arrays, so that no test can donate another's and none compiles."""
  toy_model, rng = kind(CONFIG.replace(**changes)), np.random.default_rng(seed)

  def fill(path, x):
    noise = 0.02 * rng.normal(size=x.shape)
    return (noise + (path[-1].key == 'scale')).astype(np.float32)

  shapes = jax.eval_shape(toy_model.init, jax.random.key(0))
  return jax.tree_util.tree_map_with_path(fill, shapes)


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
      trajectory(rng, rng.integers(*lengths), env_group=g, sample_index=m, **fields)
      for m in range(size)
    ]
    for g, size in enumerate(sizes)
  ]


def learner(algorithm, *, kind=Bigram, changes=None, **options) -> Learner:
  changes = changes or {}
  options = {'num_rows': 8, 'length_buckets': (16,)} | options
  toy_model, weights = kind(CONFIG.replace(**changes)), params(kind, **changes)
  return Learner(
    toy_model, weights, algorithm, **split_options(LearnerOptions, options)
  )
