"""A model family from one file outside the repository is read, run and written."""

import json
import pathlib
import re

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jaxrl import model_loading
from jaxrl.models import families, hf_names, huggingface
from jaxrl.models.transformer_lm import TransformerLM
from jaxrl.models.vision import patch_processor
from jaxrl.options import ConfigError
from tests.calls import parse_call

TOY = """
from jaxrl.models.families import llama_style
from jaxrl.models.families.family_spec import FamilySpec


def read(data, where):
  fields = llama_style.read_settings(data, where, max_position=64)
  return fields | {'attention_bias': False, 'qk_norm': True}


def write(config):
  return llama_style.write_settings(config) | {'toy': True}


TOY = FamilySpec(
  model_type='toy',
  architecture='ToyForCausalLM',
  read_config=read,
  write_config=write,
  top_tensors={'embedding.table': 'words.weight', 'norm.scale': 'end.weight'},
  layer_tensors={
    name: text.replace('model.layers.', 'blocks.')
    for name, text in (
      llama_style.ATTENTION_TENSORS
      | llama_style.QK_NORM_TENSORS
      | llama_style.MLP_TENSORS
    ).items()
  },
  qk_norm=True,
)
TAKEN = FamilySpec('qwen3', 'A', read, write, {}, {})
NUMBER = 3
"""


@pytest.fixture
def location(tmp_path, monkeypatch):
  monkeypatch.setattr(families, '_registered', {})
  file = tmp_path / 'toy_family.py'
  file.write_text(TOY)
  return f'{file}:TOY'


@pytest.mark.slow  # the family that the docs show is one, too
def test_a_family_outside_the_repository(location, tmp_path):
  config = model_loading.random_config(
    family=location, hidden_size=16, head_dim=8, num_layers=2, vocab_size=32
  )
  model = TransformerLM(config)
  params = jax.device_get(model.init(jax.random.key(0)))
  folder = tmp_path / 'model'
  huggingface.save(folder, config, params)
  names = {tensor.name for tensor in hf_names.checkpoint_tensors(config)}
  assert 'words.weight' in names and 'blocks.1.mlp.up_proj.weight' in names
  data = json.loads((folder / 'config.json').read_text())
  assert data['model_type'] == 'toy' and data['architectures'] == ['ToyForCausalLM']
  # What was saved names its family, so any process can load it.
  loaded_config, loaded = huggingface.load(folder)
  assert loaded_config == config.replace(rope_theta=data['rope_theta'])
  jax.tree.map(np.testing.assert_array_equal, loaded, params)
  tokens = jnp.array([[1, 2, 3, 4]])
  outputs = model.policy_outputs(loaded, tokens, jnp.ones_like(tokens))
  assert np.all(np.isfinite(outputs.logprobs))


def test_the_family_that_the_docs_show(tmp_path):
  page = pathlib.Path(__file__).parents[2] / 'docs' / 'extending.md'
  blocks = re.findall(r'```python\n# lab/(\w+\.py)\n(.*?)```', page.read_text(), re.S)
  file = tmp_path / 'windowed_family.py'
  file.write_text(dict(blocks)[file.name])
  call = parse_call(f'{file}:WINDOWED(window=2)')
  config = model_loading.random_config(
    family=call, hidden_size=16, head_dim=8, num_layers=5, vocab_size=32
  )
  assert [layer.window for layer in config.layer_configs] == [0, 2, 2, 2, 0]
  params = jax.device_get(TransformerLM(config).init(jax.random.key(0)))
  huggingface.save(tmp_path / 'model', config, params)
  loaded_config, loaded = huggingface.load(tmp_path / 'model')
  jax.tree.map(np.testing.assert_array_equal, loaded, params)
  tokens = jnp.array([[1, 2, 3, 4, 5, 6]])
  run = jax.jit(TransformerLM(loaded_config).hidden)
  hidden = run(loaded, tokens, jnp.ones_like(tokens))
  assert loaded_config.layer(4).use_rope is False and np.all(np.isfinite(hidden))


def test_a_registered_family_is_known_by_its_model_type(location):
  data = {'model_type': 'toy', 'vocab_size': 8, 'hidden_size': 8}
  data |= {'num_hidden_layers': 1, 'num_attention_heads': 2, 'intermediate_size': 8}
  with pytest.raises(ValueError, match=r"'toy' is not supported.*families\.register"):
    huggingface.config_from_hf(data)
  assert families.register(location).model_type == 'toy'
  assert families.register(location).model_type == 'toy'  # twice is fine
  assert 'toy' in families.family_names()
  assert huggingface.config_from_hf(data).family == location


@pytest.mark.parametrize(
  'name, words',
  [('TAKEN', "'qwen3' is already that of"), ('NUMBER', 'is a int; a model family')],
)
def test_what_cannot_be_registered(location, name, words):
  with pytest.raises(ValueError, match=words):
    families.register(location.replace(':TOY', f':{name}'))


def test_every_built_in_family_is_named_after_its_model_type():
  for name in families.BUILT_IN:
    assert families.find_family(name).model_type == name
  with pytest.raises(ConfigError, match=r"no family 'qwen4'\. Did you mean 'qwen3'"):
    families.find_family('qwen4')


@pytest.mark.parametrize('name', families.BUILT_IN)
def test_a_random_model_of_every_family_is_what_its_folder_says(name, tmp_path):
  config = model_loading.random_config(family=name, num_layers=5, intermediate_size=128)
  data = huggingface.config_to_hf(config, 'float32')
  restored = huggingface.config_from_hf(json.loads(json.dumps(data)))
  if config.vision is not None:  # which has a second file
    settings = patch_processor.write_settings(config.vision)
    vision = patch_processor.read_settings(restored.vision, settings, 'folder')
    restored = restored.replace(vision=vision)
  assert restored == config
  assert {t.name for t in hf_names.checkpoint_tensors(config)}


@pytest.mark.parametrize(
  'sizes, message',
  [
    ({'hidden_size': -1}, 'hidden_size=-1 must be a whole number from 1 on'),
    ({'num_layers': 0}, 'num_layers=0 must be'),
    ({'num_heads': 0, 'num_kv_heads': 0}, 'num_heads=0 must be'),
    ({'vocab_size': 1.5}, r'vocab_size=1\.5 must be'),
    ({'hidden_size': 10**10}, r'about [\d.e+]+ parameters, which need [\d,]+ TiB'),
    ({'num_layers': 10**9}, 'TiB in float32'),
  ],
)
def test_sizes_that_make_up_no_model_are_refused_in_one_line(sizes, message):
  with pytest.raises(ConfigError, match=message) as error:
    model_loading.random_config(**sizes)
  assert '\n' not in str(error.value) and len(str(error.value)) < 400
