"""Episodes with images: from environments to prompts, the engine, rows and a step."""

import dataclasses
import functools
import types

import numpy as np
import pytest

from jaxrl import model_loading
from jaxrl.data.chat_tokenizer import ChatTokenizer
from jaxrl.data.dataset import GlobalDataset
from jaxrl.data.images import as_image, with_images
from jaxrl.data.tokenizer import IMAGE_PAD, train_tokenizer
from jaxrl.device_thread import DeviceThread
from jaxrl.envs.isolated_env import IsolatedEnv
from jaxrl.envs.math_env import MathEnv
from jaxrl.models.transformer_lm import TransformerLM
from jaxrl.models.vision.patch_processor import PatchProcessor
from jaxrl.rollout.engine.jax_engine import JaxEngine
from jaxrl.rollout.rewards.reward_pipeline import RewardInput
from jaxrl.training.learner import Learner
from jaxrl.training.learner_options import LearnerOptions
from tests.calls import make_algorithm, split_options
from tests.rollout.fakes import FakeEngine, play, world
from tests.training import test_image_batches
from tests.training.test_image_batches import params

WORDS = ['What is it? user assistant a square'] * 3
OPTIONS = {'max_steps': 4, 'max_length': 64, 'max_tokens_per_step': 3}


def image(seed=0, height=8, width=8):
  draw = np.random.default_rng(seed)
  return as_image(draw.integers(0, 256, (height, width, 3), np.uint8))


@functools.cache
def chat():
  """A chat tokenizer whose images have a token for each 8 × 8 pixels."""
  tokenizer = train_tokenizer(WORDS, 320, images=True)
  config = model_loading.with_image_tokens(test_image_batches.config(), tokenizer)
  assert config.vision is not None
  return ChatTokenizer(tokenizer, image_processor=PatchProcessor(config.vision))


def config():
  shape = test_image_batches.config(vocab_size=320)
  return shape.replace(vision=chat()._images.vision)


def parts(image, text='What is it?'):
  return [{'type': 'image', 'image': image}, {'type': 'text', 'text': text}]


class ShowEnv:
  """Shows an image per turn."""

  def __init__(self, turns=2, first=None):
    self.turns, self.first = turns, first

  def reset(self, *, seed, options=None):
    self.turn = 0
    return parts(image(0).array() if self.first is None else self.first), {}

  def step(self, action):
    self.turn += 1
    return parts(image(self.turn, width=16)), 1.0, self.turn == self.turns, False, {}


class SeeingEngine(FakeEngine):
  """Remembers the images of each request."""

  async def generate(self, request_id, token_ids, sampling, images=()):
    completion = await super().generate(request_id, token_ids, sampling)
    self.requests[-1] = (list(token_ids), list(images))
    return completion


def seeing_context(make_env=ShowEnv, served=None):
  context = world(make_env, served or SeeingEngine(lambda *_: 'ok'))
  return dataclasses.replace(context, chat=chat())


async def test_an_environments_images_reach_the_engine_the_row_and_the_learner():
  model = TransformerLM(config())
  thread = DeviceThread('engine')
  served = JaxEngine(model, device_thread=thread, max_length=64)
  await served.load(0, params(config()))
  (row,) = await play(
    seeing_context(served=served), turn_template='See {observation}', **OPTIONS
  )
  assert row.stop_reason == 'finish' and row.score == 2, row.extras
  assert row.images == [image(0), image(1, width=16)]
  first = row.messages[0]['content']
  assert first[0] == {'type': 'text', 'text': 'See '} and first[1]['image'] == image(0)
  text = chat().tokenizer.decode(row.tokens)
  assert text.count(IMAGE_PAD) == 1 + 2
  assert text.startswith('<|im_start|>user\nSee <|vision_start|><|image_pad|><|vis')
  algorithm = make_algorithm('grpo', {'kl_coef': 0.0})
  sizes = {'num_rows': 2, 'length_buckets': (64,)}
  learner = Learner(
    model, params(config()), algorithm, **split_options(LearnerOptions, sizes)
  )
  other = dataclasses.replace(row, sample_index=1, rewards=0 * row.rewards)
  metrics = await learner.update([[row, other]])
  # The learner saw what the engine saw.
  assert metrics['mismatch/logprob_difference'] < 1e-4, sorted(metrics)


async def test_rows_of_turns_have_the_images_that_came_before_them():
  engine = SeeingEngine(lambda *_: 'ok')
  rows = await play(seeing_context(served=engine), row_format='step', **OPTIONS)
  both = [image(0), image(1, width=16)]
  assert [row.images for row in rows] == [both[:1], both]
  assert [images for _, images in engine.requests] == [both[:1], both]
  assert engine.requests[1][0] == rows[1].tokens[: len(engine.requests[1][0])].tolist()
  (row,) = await play(
    seeing_context(), row_format='concatenated', **OPTIONS | {'max_length': 128}
  )
  assert row.images == [*both[:1], *both]


@pytest.mark.parametrize(
  'first, words',
  [
    (b'junk', 'neither PNG nor JPEG'),
    (np.zeros((5000, 5000), np.uint8), 'there may be 1 to'),
    ('https://example.org/x.png', 'nothing is fetched'),
    (image(0, height=4, width=900), 'too long and thin'),
  ],
)
async def test_a_broken_or_huge_image_fails_its_episode_with_the_reason(first, words):
  (row,) = await play(seeing_context(lambda: ShowEnv(first=first)), **OPTIONS)
  assert (row.stop_reason, row.failed) == ('env_reset_failed', True)
  assert words in row.extras['error'] and not row.images


async def test_a_model_without_a_tower_refuses_images():
  context = dataclasses.replace(seeing_context(), chat=ChatTokenizer(chat().tokenizer))
  (row,) = await play(context, **OPTIONS)
  assert row.failed and 'the model sees none' in row.extras['error']


@pytest.mark.parametrize('length', range(6, 64, 3))
async def test_an_image_beyond_the_window_is_not_of_the_row(length):
  (row,) = await play(seeing_context(), **OPTIONS | {'max_length': length})
  assert len(row.tokens) <= length
  batch_places(row)


def batch_places(row):
  """Lays a row out as batches are; raises if placeholders and images differ."""
  from jaxrl.models.vision import image_places

  sequences = [(row.tokens, row.images)]
  image_places.lay_out(chat()._images, sequences, (1, len(row.tokens)))


def test_texts_with_placeholders_are_no_images():
  seen = chat()
  message = {'role': 'user', 'content': parts(image(0), f'say {IMAGE_PAD}{IMAGE_PAD}')}
  tokens = seen.encode_prompt([message, {'role': 'user', 'content': IMAGE_PAD}])
  text = seen.tokenizer.decode(tokens)
  assert text.count(IMAGE_PAD) == 1 and text.count('<image_pad>') == 3
  (end,) = seen.image_ends(tokens, [message])
  assert tokens[end - 1] == seen._images.image_token_id
  blind = train_tokenizer(WORDS, 320, images=True)
  text = "{% if m['content'] is string %}{{ m['content'] }}{% endif %}"
  blind.chat_template = f'{{% for m in messages %}}{text}{{% endfor %}}'
  with pytest.raises(ValueError, match='renders 0 of 1 images'):
    ChatTokenizer(blind, image_processor=seen._images).encode_prompt([message])


@pytest.mark.parametrize('text', ['<image>', '<<image>>', 'a <image><image> b'])
def test_a_placeholder_without_bars_is_no_image_in_a_text(text):
  tokenizer = train_tokenizer(WORDS, 320, images=True)
  tokenizer.add_special_tokens({'additional_special_tokens': ['<image>']})
  tokenizer.chat_template = tokenizer.chat_template.replace(IMAGE_PAD, '<image>')
  mark = tokenizer.convert_tokens_to_ids('<image>')
  seen = types.SimpleNamespace(image_token_id=mark, num_tokens=lambda image: 3)
  message = {'role': 'user', 'content': parts(image(0), text)}
  tokens = ChatTokenizer(tokenizer, image_processor=seen).encode_prompt([message])
  assert tokens.count(mark) == 3
  assert '< image>' in tokenizer.decode(tokens)


async def test_questions_of_a_data_set_have_their_images():
  item = {'question': 'Is <image> it?', 'answer': '1', 'images': [image(3).png]}
  context = dataclasses.replace(seeing_context(MathEnv), dataset=GlobalDataset([item]))
  (row,) = await play(context, **OPTIONS)
  assert row.images == [image(3)] and row.stop_reason == 'finish', row.extras
  shown = [part.get('text') for part in row.messages[0]['content']]
  assert shown == ['Is ', None, ' it?']
  played = RewardInput(row.messages, {}, seed=0, name='a', pool=context.pool)
  assert played.question == 'Is [image] it?'


def test_an_isolated_environment_passes_images_on():
  env = IsolatedEnv(f'{__name__}:ShowEnv', {})
  try:
    observation, _ = env.reset(seed=0)
    assert with_images([{'content': observation}])[0]['content'][0]['image'] == image(0)
  finally:
    env.kill()
