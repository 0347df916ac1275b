"""Every family's parameters reach vLLM under the names of the one table."""

import jax
import numpy as np
import pytest

from jaxrl.model_loading import random_config
from jaxrl.models import huggingface
from jaxrl.models.transformer_lm import TransformerLM
from jaxrl.types import SamplingParams
from tests.calls import parse_call
from tests.rollout.vllm import needs
from tests.rollout.vllm.conftest import World, sharpened

pytestmark = [*needs.VLLM, pytest.mark.slow]


MIXTURE = {'num_experts': 8, 'num_experts_per_token': 2, 'moe_intermediate_size': 96}


@pytest.mark.parametrize(
  ('family', 'own'), [('qwen2', {}), ('llama', {}), ('qwen3_moe', MIXTURE)]
)
async def test_an_untied_model_scores_as_the_learner_does(family, own, tmp_path):
  needs.prepare()
  from jaxrl.rollout.vllm.vllm_engine import VllmEngine

  options = ', '.join(f'{k}={v}' for k, v in {'tie_embeddings': False, **own}.items())
  shape = random_config(
    family=parse_call(f'{family}({options})'),
    vocab_size=320,
    hidden_size=128,
    num_layers=2,
  )
  model = TransformerLM(shape)
  params = jax.tree.map(np.asarray, sharpened(model.init(jax.random.key(3)), 3.0))
  draw = np.random.default_rng(0)
  for name, part in params['layers']['attention'].items():
    if 'bias' in part:  # a random start has none to tell apart
      bias = draw.standard_normal(part['bias'].shape, np.float32)
      params['layers']['attention'][name] = {**part, 'bias': bias}
  huggingface.save(tmp_path / 'model', shape, params)
  engine = VllmEngine(tmp_path / 'model', max_num_seqs=4, max_length=256)
  try:
    await engine.load(0, jax.tree.map(np.zeros_like, params))
    await engine.load(1, params)
    rules = SamplingParams(max_tokens=60, seed=1)
    found = await engine.generate('family', [5, 6, 7], rules)
  finally:
    engine.close()
  world = World(None, model, None, params, params, tmp_path, None)
  learners = world.rescore(params, [5, 6, 7], found.tokens)
  np.testing.assert_allclose(found.logprobs, learners, atol=1e-4)
  assert np.ptp(found.logprobs) > 0.5
