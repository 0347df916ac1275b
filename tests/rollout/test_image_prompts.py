"""The JAX engine with images: what it draws is what the model says of the whole row."""

import asyncio
import dataclasses
import functools

import jax
import numpy as np
import pytest

from jaxrl.device_thread import DeviceThread
from jaxrl.models.transformer_lm import TransformerLM
from jaxrl.models.vision import image_places, vision_tower
from jaxrl.rollout.engine.engine_base import ImageError
from jaxrl.rollout.engine.jax_engine import JaxEngine
from jaxrl.types import SamplingParams
from tests.models import images
from tests.training.test_image_batches import config, params

GREEDY = SamplingParams(max_tokens=6, temperature=0.0)
OTHER = images.Picture(40, 16, seed=9)  # of the same size as WIDE


@functools.cache
def weights():
  return params(config())


def cut():
  return images.PatchProcessor(config().vision)


def engine(**options):
  options = {'max_length': 64, 'max_num_seqs': 4, 'decode_steps': 4} | options
  model = TransformerLM(config())
  return JaxEngine(model, device_thread=DeviceThread('engine'), **options)


def scored(prompt, pictures, completion):
  """The log-probs that the model gives a completion, by one forward pass."""
  row = np.concatenate([prompt, completion.tokens])
  places, patches = image_places.lay_out(cut(), [(row, pictures)], (1, len(row)))
  segment_ids = np.ones((1, len(row)), np.int32)
  kwargs = {'images': places} if pictures else {}
  logprobs = jax.jit(_logprobs)(weights(), patches, row[None], segment_ids, **kwargs)
  return np.asarray(logprobs)[0, len(prompt) :]


def _logprobs(params, patches, tokens, segment_ids, **images):
  model = TransformerLM(config())
  known = vision_tower.encode(model, params, patches)
  return model.policy_outputs(known, tokens, segment_ids, **images).logprobs


def close(actual, wanted):
  np.testing.assert_allclose(actual, wanted, atol=1e-4)


SAMPLING = SamplingParams(max_tokens=6, seed=3)


def prompts():
  """Prompts with two images, with none, and two that only differ in their image."""
  make = functools.partial(images.sequence, cut())
  return [
    (make(3, images.WIDE, 2, images.TALL, 4), (images.WIDE, images.TALL)),
    (make(9), ()),
    (make(2, images.WIDE, 3), (images.WIDE,)),
    (make(2, images.WIDE, 3), (OTHER,)),
  ]


async def complete(served, rows):
  return await asyncio.gather(
    *(
      served.generate(str(i), p, SAMPLING, pictures)
      for i, (p, pictures) in enumerate(rows)
    )
  )


@pytest.mark.slow
async def test_completions_are_those_of_the_whole_forward_pass():
  """Of all prompts at once; then the same image again."""
  served, rows = engine(), prompts()
  await served.load(0, weights())
  together = await complete(served, rows)
  for (prompt, pictures), completion in zip(rows, together, strict=True):
    assert len(completion.tokens) == 6
    close(completion.logprobs, scored(prompt, list(pictures), completion))
  # Equal tokens, and other images: no prompt is taken for the other.
  assert not np.array_equal(together[2].logprobs, together[3].logprobs)
  served.metrics()  # counts from here on
  again = await served.generate('again', *rows[2][:1], SAMPLING, rows[2][1])
  assert served._stats.num_prefilled == 0 and served._stats.num_reused > 0
  np.testing.assert_array_equal(again.logprobs, together[2].logprobs)


@pytest.mark.slow
@pytest.mark.extended
async def test_completions_alone_are_those_of_a_full_batch():
  served, rows = engine(), prompts()
  await served.load(0, weights())
  together = await complete(served, rows)
  alone = engine()
  await alone.load(0, weights())
  for i, (prompt, pictures) in enumerate(rows):
    one = await alone.generate(str(i), prompt, SAMPLING, pictures)
    np.testing.assert_array_equal(one.logprobs, together[i].logprobs)


@pytest.mark.slow
async def test_an_aborted_request_resumes_with_its_images():
  served = engine(decode_steps=1)
  await served.load(0, weights())
  prompt = images.sequence(cut(), 2, images.TALL, 3)
  sampling = SamplingParams(max_tokens=20, seed=5)
  whole = await served.generate('whole', prompt, sampling, [images.TALL])
  task = asyncio.create_task(served.generate('a', prompt, sampling, [images.TALL]))
  while not (await served.progress(['a'])).get('a', whole).tokens.shape[0] % 20:
    await asyncio.sleep(0)
  await served.abort('a')
  part = await task
  assert 0 < len(part.tokens) < 20 and part.finish_reason == 'abort'
  rest = dataclasses.replace(
    sampling, max_tokens=20 - len(part.tokens), num_generated=len(part.tokens)
  )
  resumed = np.concatenate([prompt, part.tokens])
  more = await served.generate('b', resumed, rest, [images.TALL])
  np.testing.assert_array_equal([*part.tokens, *more.tokens], whole.tokens)
  close([*part.logprobs, *more.logprobs], whole.logprobs)


async def test_new_weights_give_images_other_features():
  served = engine()
  await served.load(0, weights())
  prompt, pictures = images.sequence(cut(), 2, images.TALL, 3), [images.TALL]
  before = await served.generate('a', prompt, GREEDY, pictures)
  other = weights() | {'vision': {**weights()['vision']}}
  other['vision']['positions'] = 9.0 * other['vision']['positions']
  await served.load(1, other)
  after = await served.generate('b', prompt, GREEDY, pictures)
  assert not np.allclose(before.logprobs, after.logprobs)


@pytest.mark.parametrize(
  'parts, pictures, words',
  [
    ((2, images.TALL, 3), [images.SMALL], 'image 1 of 1 needs a run of 1 placeholder'),
    ((2, images.TALL, 3), [images.TALL] * 2, 'image 2 of 2 needs a run'),
    ((5,), [images.TALL], r'runs of \[\]'),
    ((2,), [images.Picture(900, 4)], 'too long and thin'),
  ],
)
async def test_images_that_do_not_fit_their_prompt_are_refused(parts, pictures, words):
  served = engine()
  await served.load(0, weights())
  with pytest.raises(ImageError, match=words) as error:
    await served.generate('a', images.sequence(cut(), *parts), GREEDY, pictures)
  assert '\n' not in str(error.value)


async def test_a_prompt_ends_with_text_and_a_model_must_see():
  served = engine()
  await served.load(0, weights())
  prompt = images.sequence(cut(), 2, images.TALL)[:-1]
  with pytest.raises(ImageError, match='its prompt ends with an image'):
    await served.generate('a', prompt, GREEDY, [images.TALL])
  with pytest.raises(ValueError, match='does not compute models that see images'):
    engine(exact=True)
  with pytest.raises(ValueError, match='decodes with one thread'):
    engine(decode_threads=2)
