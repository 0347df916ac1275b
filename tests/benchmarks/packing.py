"""A train step on rectangles, on packed rows, with shared prompts, and on trees."""

import asyncio
import statistics
from typing import Any

import jax
import numpy as np

from jaxrl.algorithms import registry
from jaxrl.model_loading import random_config
from jaxrl.models.transformer_lm import TransformerLM
from jaxrl.training.batching.packing_plan import first_fit
from jaxrl.training.learner import Learner
from jaxrl.training.learner_options import LearnerOptions
from jaxrl.types import Group, Trajectory
from tests.calls import split_options

WIDE = {
  'hidden_size': 256,
  'num_heads': 4,
  'num_kv_heads': 2,
  'head_dim': 64,
  'intermediate_size': 768,
}
ASKED = {
  'rectangle': {'num_micro_batches': 4},
  'packed': {'share_prefix': False},
  'shared': {'share_prefix': True, 'share_tree': False},
  'tree': {},
}


def _rows(prompt: int, responses: list[int], rng: Any, group: int) -> Group:
  question = rng.integers(0, 512, prompt).astype(np.int32)
  rows = []
  for member, length in enumerate(responses):
    answer = rng.integers(0, 512, length).astype(np.int32)
    mask = np.arange(prompt + length) >= prompt
    rewards = np.zeros(len(mask), np.float32)
    rewards[-1] = rng.normal()
    rows.append(
      Trajectory(
        tokens=np.concatenate([question, answer]),
        action_mask=mask,
        rollout_logprobs=np.where(mask, -6.2, 0).astype(np.float32),
        rewards=rewards,
        weights_version=np.where(mask, 0, -1).astype(np.int32),
        env_group=group,
        sample_index=member,
      )
    )
  return rows


def long_prompts(rng: Any) -> list[Group]:
  """Prompt to response as 4:1, sixteen responses each."""
  return [_rows(256, [64] * 16, rng, 0)]


def drawn(rng: Any) -> list[Group]:
  """Lengths as those of GSM8K: short questions, answers of many lengths."""
  groups = []
  for g in range(4):
    prompt = int(np.clip(rng.lognormal(4.0, 0.35), 20, 120))
    answers = np.clip(rng.lognormal(4.4, 0.5, 4), 16, 320 - prompt).astype(int)
    groups.append(_rows(prompt, answers.tolist(), rng, g))
  return groups


def _paths(paths: list[list[Any]], rng: Any, group: int) -> Group:
  """Rows that are spans of tokens joined; the last span of each is its actions."""
  rows = []
  for member, spans in enumerate(paths):
    tokens = np.concatenate(spans).astype(np.int32)
    mask = np.arange(len(tokens)) >= len(tokens) - len(spans[-1])
    rewards = np.zeros(len(mask), np.float32)
    rewards[-1] = rng.normal()
    rows.append(
      Trajectory(
        tokens=tokens,
        action_mask=mask,
        rollout_logprobs=np.where(mask, -6.2, 0).astype(np.float32),
        rewards=rewards,
        weights_version=np.where(mask, 0, -1).astype(np.int32),
        env_group=group,
        sample_index=member,
      )
    )
  return rows


def games(rng: Any) -> list[Group]:
  """Four episodes of 20 turns of 32 tokens, a row for each turn with all before it."""
  groups = []
  for g in range(4):
    spans = [rng.integers(0, 512, 16) for _ in range(40)]
    groups.append(_paths([spans[: 2 * turn + 2] for turn in range(20)], rng, g))
  return groups


def sessions(rng: Any) -> list[Group]:
  """Two sessions of twelve turns of 48 tokens, each with two branches after each."""
  groups = []
  for g in range(2):
    spans = [rng.integers(0, 512, 64 if i == 0 else 48) for i in range(13)]
    paths = [
      [*spans[: turn + 1], rng.integers(0, 512, 48)]
      for turn in range(1, 13)
      for _ in range(2)
    ]
    groups.append(_paths([spans, *paths], rng, g))
  return groups


# The longest row, and the options of packing. Packed rows are as long as a prompt and
# its sixteen responses; the usual ones; and as long as two episodes, or a session.
DATA = {
  'prompt:response 4:1, n 16': (long_prompts, 320, {'tokens': 1312, 'length': 1312}),
  'lengths as drawn, n 4': (drawn, 320, {'tokens': 1280}),
  'games of 20 turns': (games, 640, {'tokens': 2560, 'length': 1280}),
  'branched sessions': (sessions, 704, {'tokens': 3584, 'length': 1792}),
}


def measure(repeats: int = 5) -> dict[str, dict[str, float]]:
  """Case and way → seconds of the fastest and the median step, and what is empty."""
  return asyncio.run(_measure(repeats))


async def _measure(repeats: int) -> dict[str, dict[str, float]]:
  model = TransformerLM(random_config(**WIDE))
  params = model.init(jax.random.key(0))
  algorithm = registry.make('grpo', {'kl_coef': 0.0})
  figures = {}
  for case, (make, longest, sizes) in DATA.items():
    groups = make(np.random.default_rng(0))
    rows = sum(len(group) for group in groups)
    learners = {}
    for way, overrides in ASKED.items():
      options = dict(overrides)
      if way != 'rectangle':
        options = {'packing': first_fit(**sizes, **overrides)}
      learner = Learner(
        model,
        params,
        algorithm,
        num_rows=rows,
        length_buckets=(longest,),
        **split_options(
          LearnerOptions,
          {'log_entropy': False, 'logprob_mismatch_warn': 1.0, **options},
        ),
      )
      learners[way] = learner, [await learner.update(groups)]
    for _ in range(repeats):  # in turns, for the machine's speed wanders
      for learner, metrics in learners.values():
        metrics.append(await learner.update(groups))
    for way, (_, metrics) in learners.items():
      seconds = [one['time/learn'] for one in metrics[1:]]
      figures[f'{case}: {way}'] = {
        'seconds': min(seconds),
        'median_s': statistics.median(seconds),
        'padding_share': metrics[0]['tokens/padding_share'],
        'shared_share': metrics[0].get('tokens/shared_share', 0.0),
        'in_trees': metrics[0].get('tokens/in_trees', 0.0),
        'loss': metrics[0]['loss/total'],
        'gradient': metrics[0]['optimizer/grad_norm'],
      }
  return figures
