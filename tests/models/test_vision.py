"""Models that see images: patches, places, and the tower against `transformers`."""

import dataclasses
import functools
import json

import jax
import numpy as np
import pytest

from jaxrl import model_loading
from jaxrl.data.tokenizer import train_tokenizer
from jaxrl.models import huggingface
from jaxrl.models.transformer_lm import TransformerLM
from jaxrl.models.vision import image_places, patch_processor, vision_tower
from jaxrl.options import ConfigError
from tests.marks import TORCH, slow
from tests.models import images
from tests.models.families import cases
from tests.models.families.test_against_transformers import fuse_experts

pytestmark = TORCH
LENGTH = 40


@functools.cache
def setting(name='qwen3-vl'):
  """Config, parameters, processor, rows, and where their images stand."""
  config, params = cases.ours(name)
  cut = images.processor(config)
  rows = images.sequences(cut)
  return config, params, cut, rows, image_places.lay_out(cut, rows, (3, LENGTH))


def their_inputs(cut, rows):
  """What the model of `transformers` takes."""
  torch = pytest.importorskip('torch')
  tokens, mask = images.padded(rows, LENGTH)
  pairs = [cut.patches(image) for _, pictures in rows for image in pictures]
  return {
    'input_ids': torch.tensor(tokens, dtype=torch.long),
    'attention_mask': torch.tensor(mask, dtype=torch.long),
    'mm_token_type_ids': torch.tensor(tokens == images.IMAGE, dtype=torch.int32),
    'pixel_values': torch.tensor(np.concatenate([patches for patches, _ in pairs])),
    'image_grid_thw': torch.tensor(np.array([grid for _, grid in pairs])),
  }


def logprobs_of(model, params, places, patches, tokens, segment_ids):
  params = vision_tower.encode(model, params, patches)
  return model.policy_outputs(params, tokens, segment_ids, images=places).logprobs


@pytest.mark.parametrize(
  'name',
  [
    'qwen3-vl',
    slow('qwen3_5-vl'),
    slow('qwen3_5-moe-vl'),
  ],
)
def test_logits_and_gradients_are_those_of_transformers(name):
  """Images of three sizes and text alone, in one batch; both trained."""
  torch = pytest.importorskip('torch')
  config, params, cut, rows, (places, patches) = setting(name)
  config = config.replace(vision=dataclasses.replace(config.vision, train='full'))
  model = TransformerLM(config, unroll=1)
  tokens, segment_ids = images.padded(rows, LENGTH)
  weights = np.random.default_rng(1).standard_normal(tokens.shape)
  weights[:, 1:] *= segment_ids[:, 1:]

  def total(params):
    row_logprobs = logprobs_of(model, params, places, patches, tokens, segment_ids)
    return (row_logprobs * weights).sum(), row_logprobs

  slopes, logprobs = jax.jit(jax.grad(total, has_aux=True))(params)
  theirs = cases.theirs(name)
  theirs.zero_grad()
  inputs = their_inputs(cut, rows)
  logits = theirs(**inputs).logits
  wanted = torch.log_softmax(logits, -1)[:, :-1]
  wanted = torch.gather(wanted, 2, inputs['input_ids'][:, 1:, None])[..., 0]
  shown = segment_ids[:, 1:] > 0
  np.testing.assert_allclose(
    logprobs[:, 1:][shown], wanted.detach().numpy()[shown], atol=1e-4, rtol=1e-3
  )
  (wanted * torch.tensor(weights[:, 1:])).sum().backward()
  slopes = dict(huggingface.export(config, jax.device_get(slopes)))
  fuse_experts(slopes)
  for name, parameter in theirs.named_parameters():
    grad, slope = parameter.grad.numpy(), slopes.pop(name)
    if name.endswith('embed_tokens.weight'):  # `transformers` trains no padding
      grad, slope = grad[1:], slope[1:]
    assert np.abs(grad).max() > 1e-4, name
    size = max(1.0, np.abs(grad).max())
    np.testing.assert_allclose(slope, grad, rtol=1e-3, atol=1e-4 * size, err_msg=name)
  assert not slopes


@pytest.mark.parametrize(
  'size', [(40, 16), (16, 25), (9, 9), (5, 6), (500, 5), (64, 64), (63, 90)]
)
def test_patches_are_those_of_transformers(size):
  pytest.importorskip('torch')
  from transformers.models.qwen2_vl import image_processing_pil_qwen2_vl as theirs

  cut = images.processor(setting()[0])
  picture = images.Picture(*size, seed=3)
  settings = patch_processor.write_settings(cut.vision)
  settings = {k: v for k, v in settings.items() if k not in NAMES}
  wanted = theirs.Qwen2VLImageProcessorPil(**settings)(
    images=[picture.array()], return_tensors='np'
  )
  patches, grid = cut.patches(picture)
  assert list(grid) == wanted['image_grid_thw'][0].tolist()
  np.testing.assert_array_equal(patches, wanted['pixel_values'])
  assert cut.num_tokens(picture) == len(patches) // 4


NAMES = ('image_processor_type', 'processor_class')


def test_settings_come_from_the_folder_and_return_there(tmp_path):
  config, params, *_ = setting()
  vision = dataclasses.replace(
    config.vision, min_pixels=99, max_pixels=999, mean=(0.4, 0.5, 0.6), std=(0.2,) * 3
  )
  config = config.replace(vision=vision)
  huggingface.save(tmp_path / 'model', config, params)
  assert huggingface.load_config(tmp_path / 'model') == config
  settings = patch_processor.write_settings(vision)
  older = settings | {'size': None, 'min_pixels': 64, 'max_pixels': 128}
  read = patch_processor.read_settings(vision, older, 'folder')
  assert (read.min_pixels, read.max_pixels) == (64, 128)
  for changes, message in (
    ({'patch_size': 14}, 'folder: patch_size=14 is not supported, only 4'),
    ({'do_resize': False}, 'do_resize=False is not supported'),
  ):
    with pytest.raises(ValueError, match=message):
      patch_processor.read_settings(vision, settings | changes, 'folder')


def test_settings_may_be_those_of_a_whole_processor(tmp_path):
  """As `transformers` 5 writes them, which prefers them to the older file."""
  from transformers import Qwen2VLImageProcessor

  config, params, *_ = setting()
  huggingface.save(tmp_path / 'model', config, params)
  written = patch_processor.write_settings(config.vision)
  theirs = Qwen2VLImageProcessor(
    **{k: v for k, v in written.items() if k not in NAMES}
    | {'size': {'shortest_edge': 64, 'longest_edge': 128}, 'image_mean': [0.4] * 3}
  )
  settings = {
    'image_processor': theirs.to_dict(),
    'processor_class': 'Qwen3VLProcessor',
  }
  for older_file in ('there', 'gone'):
    file = tmp_path / 'model' / huggingface.PROCESSOR
    file.write_text(json.dumps(settings))
    vision = huggingface.load_config(tmp_path / 'model').vision
    assert (vision.min_pixels, vision.max_pixels) == (64, 128), older_file
    assert vision.mean == (0.4,) * 3
    (tmp_path / 'model' / huggingface.IMAGES).unlink(missing_ok=True)
  file.write_text('{}')
  assert huggingface.load_config(tmp_path / 'model').vision.mean == (0.5,) * 3


def test_a_thin_image_is_refused():
  cut = images.processor(setting()[0])
  with pytest.raises(ValueError, match='700 × 3 pixels is too long and thin'):
    cut.grid(images.Picture(700, 3))


def test_a_drawn_placeholder_is_no_image():
  """Only a run of an image's own length is one; the others are tokens of text."""
  _, _, cut, _, _ = setting()
  tokens = np.array([5, images.IMAGE, 6, images.START, *[images.IMAGE] * 4, 7])
  grid = (1, 4, 4)
  starts, positions, shift = image_places.place_images(cut.vision, tokens, [grid])
  assert starts == [4] and shift == -2
  assert positions.tolist() == [
    *([i] * 3 for i in range(4)),
    *([4, 4 + row, 4 + column] for row in range(2) for column in range(2)),
    [6] * 3,
  ]
  with pytest.raises(ValueError, match=r'image 2 of 2 needs a run of 4 .* \[1, 4\]'):
    image_places.place_images(cut.vision, tokens, [grid, grid])


def test_long_rows_are_done_in_blocks_of_queries(monkeypatch):
  draw = np.random.default_rng(0)
  q, k, v = draw.standard_normal((3, 2, 16, 2, 4)).astype(np.float32)
  ids = np.array([[1] * 5 + [2] * 11, [1] * 12 + [0] * 4])

  def run():  # a function of its own each time, or jax would take the first program
    loss = lambda *x: (vision_tower.attend(*x, ids) ** 2).sum()  # noqa: E731
    return jax.jit(jax.value_and_grad(loss, argnums=(0, 1, 2)))(q, k, v)

  wanted = run()
  monkeypatch.setattr(vision_tower, 'QUERY_BLOCK', 4)
  jax.tree.map(
    functools.partial(np.testing.assert_allclose, rtol=1e-4, atol=1e-5),
    run(),
    wanted,
  )


@pytest.mark.slow
def test_a_random_model_has_the_tokens_of_its_tokenizer(tmp_path):
  config = model_loading.random_config(
    family='qwen3_vl', vocab_size=300, hidden_size=32, num_layers=1
  )
  options = {'value_head': False, 'dtype': 'float32', 'remat': 'none'}
  created = model_loading.create_model(
    tmp_path / 'model', config, ['some text'], jax.random.key(0), **options
  )
  vision, tokenizer = created.model.config.vision, created.tokenizer
  assert vision.max_pixels == config.vision.max_pixels
  parts = [{'type': 'image'}, {'type': 'text', 'text': 'ab'}]
  messages = [{'role': 'user', 'content': content} for content in (parts, 'ab', '')]
  text = tokenizer.apply_chat_template(messages, tokenize=False)
  start, end = '<|im_start|>user\n', '<|im_end|>\n'
  image = '<|vision_start|><|image_pad|><|vision_end|>'
  assert text == f'{start}{image}ab{end}{start}ab{end}{start}{end}'
  ids = tokenizer(image)['input_ids']
  assert ids == [vision.start_token, vision.image_token, vision.end_token]
  words = tokenizer.convert_ids_to_tokens([vision.video_token])
  assert words == ['<|video_pad|>']
  plain = train_tokenizer(['some text'], 300)
  with pytest.raises(ConfigError, match=r'this one lacks <.image_pad.>'):
    model_loading.with_image_tokens(config, plain)
