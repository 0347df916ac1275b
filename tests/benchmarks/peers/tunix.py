"""Tunix's GRPOLearner on the toy, and its sampler with log-probs."""

import logging
import random
import sys
from typing import Any

import jax
import numpy as np
import optax
from flax import nnx
from jax.sharding import Mesh
from tunix.models.qwen3 import model as qwen3
from tunix.rl import rl_cluster
from tunix.rl.grpo import grpo_learner
from tunix.rl.rollout import base_rollout

from tests.benchmarks.peers import shape
from tests.benchmarks.peers.shape import Turns

NEVER = 1 << 20  # the token that ends a text: no one can say it


class Words:
  """A tokenizer: token i is the word i, and nothing begins or ends a text."""

  def encode(self, text: str, **_: Any) -> list[int]:
    return [int(word) for word in text.split()]

  def decode(self, ids: Any, **_: Any) -> str:
    return ' '.join(map(str, ids))

  def bos_id(self) -> int:
    return 0

  def eos_id(self) -> int:
    return NEVER

  def pad_id(self) -> int:
    return 0


def model() -> qwen3.Qwen3:
  m = shape.MODEL
  config = qwen3.ModelConfig(
    num_layers=m['num_layers'],
    vocab_size=m['vocab_size'],
    embed_dim=m['hidden_size'],
    hidden_dim=m['intermediate_size'],
    num_heads=m['num_heads'],
    num_kv_heads=m['num_kv_heads'],
    head_dim=m['head_dim'],
    rope_theta=1_000_000,
    norm_eps=1e-6,
    use_tied_embedding=True,
  )
  return qwen3.Qwen3(config, rngs=nnx.Rngs(0))


def cluster(mesh: Mesh) -> rl_cluster.RLCluster:
  rules = {
    'max_tokens_to_generate': shape.NEW,
    'max_prompt_length': shape.PROMPT,
    'kv_cache_size': shape.PROMPT + shape.NEW + 1,
    'temperature': 1.0,
    'top_p': 1.0,
    'eos_tokens': [NEVER],
  }
  rollouts = {
    rl_cluster.Mode.TRAIN: base_rollout.RolloutConfig(**rules),
    rl_cluster.Mode.EVAL: base_rollout.RolloutConfig(**rules, return_logprobs=True),
  }
  roles = rl_cluster.Role
  return rl_cluster.RLCluster(
    actor=model(),
    tokenizer=Words(),
    cluster_config=rl_cluster.ClusterConfig(
      role_to_mesh=dict.fromkeys((roles.ACTOR, roles.ROLLOUT), mesh),
      rollout_engine='vanilla',
      training_config=rl_cluster.RLTrainingConfig(
        actor_optimizer=optax.adamw(shape.LEARNING_RATE),
        eval_every_n_steps=1_000_000,
        max_steps=1_000_000,
        mini_batch_size=shape.PROMPTS,
        train_micro_batch_size=shape.PROMPTS,
        data_sharding_axis=('fsdp',),
      ),
      rollout_config=rollouts,
    ),
  )


def main() -> None:
  if shape.ENDS:
    sys.exit('its sampler ends samples by tokens alone, not at lengths that are given')
  logging.disable(logging.WARNING)
  mesh = Mesh(np.array(jax.devices()[:1]).reshape(1, 1), ('fsdp', 'tp'))
  draw = random.Random(0)
  with mesh:
    run = cluster(mesh)
    learner = grpo_learner.GRPOLearner(
      rl_cluster=run,
      reward_fns=lambda prompts, completions, **_: [draw.random() for _ in completions],
      algo_config=grpo_learner.GRPOConfig(num_generations=shape.SAMPLES, beta=0.0),
    )
  whole = run.generate

  def decode(rows: list[list[int]], lengths: list[int]) -> int:
    del lengths  # all are as long
    texts = [' '.join(map(str, row)) for row in rows]
    out = whole(texts, mode=rl_cluster.Mode.EVAL)
    return sum(len(logprobs) for logprobs in out.logprobs or ())

  def ready() -> None:
    jax.block_until_ready(nnx.state(run.actor_trainer.model))

  turns = Turns(decode, ready=ready)
  run.generate = turns.generating(whole)

  def batches():
    step = 0
    while turns.next():
      rows = shape.prompts(step, shape.PROMPTS)
      yield {'prompts': np.array([' '.join(map(str, row)) for row in rows])}
      step += 1

  with mesh:
    learner.train(batches())


if __name__ == '__main__':
  main()
