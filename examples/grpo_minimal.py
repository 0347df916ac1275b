"""Trains a tiny language model with GRPO, in one process and under a minute.

The model starts from random weights. A prompt asks for letters or for digits, and the
reward is the share of the reply's characters that are of that kind. Nobody shows the
model an example: it discovers how to spell both, and to tell the two requests apart.

    python examples/grpo_minimal.py

Each step follows the data flow of the library, without its launcher and without Ray:

    EnvWorker (Env ⇄ JaxEngine) → GroupQueue → Learner → WeightStore ⟲

`jaxrl/loop.py` is the same loop with checkpoints, evaluation and asynchronous rollouts;
docs/concepts.md walks through one step of it.
"""

import asyncio
import sys
import time

try:
  import jax
  import numpy as np

  from jaxrl.algorithms.presets.grpo import grpo
except ModuleNotFoundError as error:
  sys.exit(f'error: {error}: run `make env` and `source .venv/bin/activate` first')

from jaxrl.data.chat_tokenizer import ChatTokenizer
from jaxrl.data.tokenizer import train_tokenizer
from jaxrl.device_thread import DeviceThread
from jaxrl.models.model_config import ModelConfig
from jaxrl.models.transformer_lm import TransformerLM
from jaxrl.rollout.engine.jax_engine import JaxEngine
from jaxrl.rollout.env_manager import EnvContext
from jaxrl.rollout.env_worker import EnvWorker, partition_envs
from jaxrl.rollout.queue.group_queue import GroupQueue
from jaxrl.rollout.thread_pool import ThreadPool
from jaxrl.rollout.weights.weight_store import InProcessWeightStore
from jaxrl.training.learner import Learner
from jaxrl.training.optimizers import OptimizerOptions, make_optimizer

SEED = 0
NUM_STEPS = 60
NUM_GROUPS = 8  # tasks per step
GROUP_SIZE = 8  # samples of each task
REPLY_TOKENS = 8
MAX_LENGTH = 32  # tokens of prompt and reply together
VOCAB_SIZE = 272


class LettersOrDigits:
  """An environment with Gymnasium's API over text. An episode has one turn."""

  def reset(self, *, seed, options=None):
    """Returns the request. All samples of a group have the same seed."""
    self.kind = ('letters', 'digits')[np.random.default_rng(seed).integers(2)]
    return self.kind, {}

  def step(self, action):
    """Returns (observation, reward, terminated, truncated, info) for a reply."""
    is_right = str.isdecimal if self.kind == 'digits' else str.isalpha
    hits = sum(character.isascii() and is_right(character) for character in action)
    return '', hits / max(len(action), 1), True, False, {}


def make_model(seed: int) -> tuple[ChatTokenizer, TransformerLM, dict]:
  """Returns a tokenizer, a tiny transformer, and random parameters for it."""
  words = ['letters', 'digits', 'user', 'assistant']
  chat = ChatTokenizer(train_tokenizer(words, VOCAB_SIZE))
  config = ModelConfig(
    vocab_size=VOCAB_SIZE,
    hidden_size=64,
    num_layers=2,
    num_heads=4,
    num_kv_heads=2,
    head_dim=16,
    intermediate_size=128,
  )
  model = TransformerLM(config)
  return chat, model, model.init(jax.random.key(seed))


def make_rollouts(
  engine: JaxEngine, chat: ChatTokenizer
) -> tuple[GroupQueue, EnvWorker]:
  """Returns a worker that plays all environments, and the queue that it fills."""
  queue = GroupQueue(
    num_groups=NUM_GROUPS, group_size=GROUP_SIZE, num_env_groups=NUM_GROUPS
  )
  context = EnvContext(
    make_env=LettersOrDigits, engine=engine, chat=chat, pool=ThreadPool(), queue=queue
  )
  (env_ids,) = partition_envs(NUM_GROUPS, GROUP_SIZE, num_workers=1)
  options = {'max_length': MAX_LENGTH, 'max_tokens_per_step': REPLY_TOKENS}
  return queue, EnvWorker(context, env_ids, options)


async def train(num_steps: int = NUM_STEPS, seed: int = SEED) -> list[float]:
  """Trains the model and prints a line per step.

  Args:
    num_steps: Number of steps.
    seed: Seed of the model and of the tasks. Equal seeds give equal runs.

  Returns:
    The mean reward of each step.
  """
  chat, model, params = make_model(seed)
  device_thread = DeviceThread()  # learner and engine take turns on it
  learner = Learner(
    model,
    params,
    grpo(group_size=GROUP_SIZE, kl_coef=0.0),
    num_rows=NUM_GROUPS * GROUP_SIZE,
    length_buckets=[MAX_LENGTH],
    optimizer=make_optimizer(OptimizerOptions(learning_rate=3e-3)),
    device_thread=device_thread,
    seed=seed,
  )
  engine = JaxEngine(model, device_thread=device_thread, max_length=MAX_LENGTH)
  weights = InProcessWeightStore(engine, device_thread=device_thread)
  queue, worker = make_rollouts(engine, chat)
  episodes = asyncio.create_task(worker.run({'seed': seed}))

  mean_rewards = []
  for step in range(num_steps):
    start = time.perf_counter()
    await weights.publish(step, learner.params)
    groups = await queue.get_batch(current_step=step)
    metrics = await learner.update(groups)
    mean_rewards.append(metrics['reward/mean'])
    prompt, reply = groups[0][0].messages  # of one sample
    print(
      f'step {step:2}  reward {mean_rewards[-1]:.3f}  '
      f'{time.perf_counter() - start:5.2f} s  '
      f'{prompt["content"]:7} → {reply["content"]!r}'
    )

  await queue.shutdown()  # ends the episodes
  await episodes
  device_thread.close()
  return mean_rewards


if __name__ == '__main__':
  asyncio.run(train())
