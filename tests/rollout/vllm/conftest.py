"""One engine for all tests here: it takes most of a minute to start."""

import dataclasses
import itertools
import pathlib
from typing import Any

import jax
import numpy as np
import pytest
import pytest_asyncio

from jaxrl.data.tokenizer import train_tokenizer
from jaxrl.model_loading import random_config
from jaxrl.models import huggingface
from jaxrl.models.transformer_lm import TransformerLM
from jaxrl.types import Params
from tests.rollout.vllm import needs

TEXTS = ['the cat sat on the mat and saw that the hat was flat. ' * 20]
TEXTS += [''.join(map(chr, range(32, 127)))]


@dataclasses.dataclass
class World:
  """The engine, its model, and two versions of weights as unlike as can be."""

  engine: Any
  model: TransformerLM
  tokenizer: Any
  old: Params
  new: Params
  folder: pathlib.Path
  versions: Any

  def next(self) -> int:
    return next(self.versions)

  def rescore(self, params, prompt, tokens, temperature=1.0) -> np.ndarray:
    """The learner's log-probs of `tokens` behind `prompt`."""
    row = np.zeros((1, 256), np.int32)
    row[0, : len(prompt) + len(tokens)] = [*prompt, *tokens]
    there = np.arange(256)[None] < len(prompt) + len(tokens)
    logprobs = _score(self.model, params, row, there.astype(np.int32), temperature)
    return np.asarray(logprobs)[0, len(prompt) : len(prompt) + len(tokens)]


@jax.jit(static_argnums=0)
def _score(model, params, row, segments, temperature):
  return model.policy_outputs(params, row, segments, temperature=temperature).logprobs


def sharpened(params: Params, scale: float) -> Params:
  """Larger weights, so that distributions are far from flat and from each other."""

  def one(path, leaf):
    return leaf if path[-1].key == 'scale' else leaf * scale

  return jax.tree_util.tree_map_with_path(one, params)


@pytest_asyncio.fixture(scope='session', loop_scope='session')
async def world(tmp_path_factory):
  needs.prepare()
  from jaxrl.rollout.vllm.vllm_engine import VllmEngine

  tokenizer = train_tokenizer(TEXTS, 320)
  shape = random_config(vocab_size=320, hidden_size=64, num_layers=2)
  model = TransformerLM(shape)
  old, new = (
    jax.tree.map(np.asarray, sharpened(model.init(jax.random.key(seed)), 3.0))
    for seed in (1, 2)
  )
  folder = tmp_path_factory.mktemp('vllm') / 'model'
  huggingface.save(folder, shape, old, tokenizer)
  engine = VllmEngine(folder, tokenizer, max_num_seqs=16, max_length=256)
  try:
    with pytest.raises(RuntimeError, match='no weights yet'):
      await engine.generate('early', [1], needs_params())
    yield World(engine, model, tokenizer, old, new, folder, itertools.count(1))
  finally:
    engine.close()


def needs_params():
  from jaxrl.types import SamplingParams

  return SamplingParams(max_tokens=1)
