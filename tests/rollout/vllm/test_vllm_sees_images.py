"""A real vLLM on CPU draws after images as the learner scores, across an update."""

import asyncio

import jax
import numpy as np
import pytest
import pytest_asyncio

from jaxrl.data.images import as_image
from jaxrl.data.tokenizer import train_tokenizer
from jaxrl.model_loading import random_config, with_image_tokens
from jaxrl.models import huggingface
from jaxrl.models.transformer_lm import TransformerLM
from jaxrl.models.vision import image_places, vision_tower
from jaxrl.models.vision.patch_processor import PatchProcessor
from jaxrl.options import ConfigError
from jaxrl.rollout.engine.engine_base import ImageError
from jaxrl.types import SamplingParams
from tests.calls import parse_call
from tests.rollout.vllm import needs
from tests.rollout.vllm.conftest import TEXTS, sharpened

pytestmark = [*needs.VLLM, pytest.mark.slow, pytest.mark.asyncio(loop_scope='module')]
# A tied head, whose packed copy vLLM makes in its language model.
FAMILY = parse_call(
  'qwen3_vl(tie_embeddings=True, rope_sections=(6, 5, 5), tower_layers=2, '
  'tower_width=64, tower_mlp=96, deepstack_layers=(0,), num_positions=16, '
  'max_pixels=4096)'
)
DRAW = np.random.default_rng(0)
WIDE, TALL = (
  as_image(DRAW.integers(0, 256, (*size, 3), np.uint8)) for size in ((16, 48), (64, 32))
)
LENGTH = 256


class Learner:
  """The learner's model, and two versions of its weights that differ everywhere."""

  def __init__(self, folder):
    tokenizer = train_tokenizer(TEXTS, 320, images=True)
    shape = random_config(family=FAMILY, vocab_size=320, num_layers=2)
    shape = with_image_tokens(shape, tokenizer)
    assert shape.vision is not None
    self.model, self.processor = TransformerLM(shape), PatchProcessor(shape.vision)
    self.old, self.new = (
      jax.tree.map(np.asarray, sharpened(self.model.init(jax.random.key(seed)), 3.0))
      for seed in (3, 4)
    )
    huggingface.save(folder, shape, self.old, tokenizer)

  def shown(self, image) -> list[int]:
    vision, size = self.processor.vision, self.processor.num_tokens(image)
    return [vision.start_token, *[vision.image_token] * size, vision.end_token]

  def prompts(self):
    """Prompts with two images, with one of these, and with none."""
    return [
      ([20, *self.shown(WIDE), 21, 22, *self.shown(TALL), 23], [WIDE, TALL]),
      ([20, *self.shown(TALL), 21], [TALL]),
      ([20, 21, 22], []),
    ]

  def rescore(self, params, prompt, images, tokens) -> np.ndarray:
    """The learner's log-probs of `tokens` behind a prompt."""
    row = np.zeros(LENGTH, np.int32)
    row[: len(prompt) + len(tokens)] = [*prompt, *tokens]
    places, patches = image_places.lay_out(self.processor, [(row, images)], (1, LENGTH))
    there = (np.arange(LENGTH) < len(prompt) + len(tokens)).astype(np.int32)
    known = vision_tower.encode(self.model, params, patches)
    if patches is None:
      places = None
    logprobs = _score(self.model, known, row[None], there[None], places)
    return np.asarray(logprobs)[0, len(prompt) : len(prompt) + len(tokens)]


@jax.jit(static_argnums=0)
def _score(model, params, row, segments, places):
  return model.policy_outputs(params, row, segments, images=places).logprobs


@pytest_asyncio.fixture(scope='module', loop_scope='module')
async def served(tmp_path_factory):
  needs.prepare()
  from jaxrl.rollout.vllm.vllm_engine import VllmEngine

  folder = tmp_path_factory.mktemp('vllm') / 'model'
  learner = Learner(folder)
  with pytest.raises(ConfigError, match="'mm_device_do_normalize' cannot be set"):
    VllmEngine(folder, mm_device_do_normalize=True)
  engine = VllmEngine(folder, max_num_seqs=4, max_length=LENGTH)
  yield learner, engine
  engine.close()


async def test_log_probs_are_the_learners_before_and_after_an_update(served):
  learner, engine = served
  for version, params in ((1, learner.old), (2, learner.new)):
    await engine.load(version, params)
    for number, (prompt, images) in enumerate(learner.prompts()):
      rules = SamplingParams(max_tokens=12, seed=number)
      completion = await engine.generate(f'{version}/{number}', prompt, rules, images)
      learners = learner.rescore(params, prompt, images, completion.tokens)
      np.testing.assert_allclose(completion.logprobs, learners, atol=2e-4)
      assert np.ptp(completion.logprobs) > 0.5
  with pytest.raises(ImageError, match='needs a run of'):
    await engine.generate('wrong', [20, 21], SamplingParams(max_tokens=2), [TALL])


async def test_a_request_across_an_update_gets_features_of_both_versions(served):
  learner, engine = served
  prompt, images = learner.prompts()[0]
  await engine.load(3, learner.old)
  rules = SamplingParams(max_tokens=LENGTH - len(prompt) - 1, seed=5)
  task = asyncio.create_task(engine.generate('flight', prompt, rules, images))
  drawn = 0
  while not drawn:
    assert not task.done()
    await asyncio.sleep(0.001)
    progress = await engine.progress(['flight'])
    drawn = len(progress['flight'].tokens) if progress else 0
  await engine.pause()
  await engine.load(4, learner.new)
  await engine.resume()
  completion = await task
  assert set(completion.weights_versions) == {3, 4}
  for version, params in ((3, learner.old), (4, learner.new)):
    mask = completion.weights_versions == version
    learners = learner.rescore(params, prompt, images, completion.tokens)
    np.testing.assert_allclose(completion.logprobs[mask], learners[mask], atol=2e-4)
