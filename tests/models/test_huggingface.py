"""Hugging Face folders: equal to transformers both ways, and nothing unaccounted."""

import json

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from safetensors.numpy import load_file, save_file

from jaxrl.models import huggingface
from jaxrl.models.transformer_lm import TransformerLM
from tests.marks import TORCH, slow_except
from tests.models import small

pytestmark = TORCH
COMMON = {
  'vocab_size': 67,
  'hidden_size': 24,
  'num_hidden_layers': 3,
  'num_attention_heads': 4,
  'num_key_value_heads': 2,
  'intermediate_size': 40,
  'max_position_embeddings': 256,
}
EXPERTS = {
  'head_dim': 16,
  'num_experts': 5,
  'num_experts_per_tok': 2,
  'moe_intermediate_size': 12,
}
YARN = {'rope_type': 'yarn', 'factor': 4.0, 'original_max_position_embeddings': 16}
CASES = {
  'qwen2-untied': ('Qwen2', {'tie_word_embeddings': False}),
  'qwen2-tied-linear': (
    'Qwen2',
    {'tie_word_embeddings': True, 'rope': {'rope_type': 'linear', 'factor': 2.0}},
  ),
  'qwen3-tied': ('Qwen3', {'tie_word_embeddings': True, 'head_dim': 16}),
  'qwen3-untied-yarn': ('Qwen3', {'head_dim': 8, 'rope': YARN}),
  'qwen3-biased': ('Qwen3', {'head_dim': 8, 'attention_bias': True}),
  'llama-llama3': ('Llama', {'head_dim': 16, 'rope': dict(small.LLAMA3)}),
  'qwen3-moe': ('Qwen3Moe', {**EXPERTS, 'norm_topk_prob': True}),
  'qwen3-moe-unnormed': (
    'Qwen3Moe',
    {**EXPERTS, 'norm_topk_prob': False, 'tie_word_embeddings': True},
  ),
  'llama-tied-biased': ('Llama', {'tie_word_embeddings': True, 'attention_bias': True}),
}
FAST = ('qwen2-untied', 'qwen3-untied-yarn', 'llama-llama3', 'qwen3-moe-unnormed')


def make_theirs(name):
  """A random model of transformers; biases and norms moved from their start too."""
  torch = pytest.importorskip('torch')
  import transformers

  family, settings = CASES[name]
  settings = dict(settings)
  rope = {'rope_type': 'default', 'rope_theta': 1000.0} | settings.pop('rope', {})
  kind = getattr(transformers, f'{family}Config')
  config = kind(**COMMON, **settings, rope_parameters=rope)
  torch.manual_seed(0)
  theirs = getattr(transformers, f'{family}ForCausalLM')(config).eval()
  with torch.no_grad():
    for parameter in theirs.parameters():
      parameter.add_(0.1 * torch.randn_like(parameter))
  return theirs


def their_logprobs(theirs, tokens):
  torch = pytest.importorskip('torch')
  with torch.no_grad():
    logits = theirs(torch.tensor(tokens, dtype=torch.long)).logits
  return torch.log_softmax(logits.float(), -1).numpy()


def our_logprobs(config, params, tokens):
  model = TransformerLM(config)
  ones = jnp.ones_like(tokens)

  @jax.jit
  def score(params):
    hidden = model.hidden(params, tokens, ones)
    return jax.nn.log_softmax(model.logits(params, hidden), -1)

  return np.asarray(score(params))


@pytest.mark.parametrize('name', slow_except(FAST, CASES))
def test_equal_to_transformers_both_ways(name, tmp_path):
  import transformers

  theirs = make_theirs(name)
  theirs.save_pretrained(tmp_path / 'theirs')
  config, params = huggingface.load(tmp_path / 'theirs')
  tokens = small.tokens(2, 50)
  expected = their_logprobs(theirs, tokens)
  np.testing.assert_allclose(our_logprobs(config, params, tokens), expected, rtol=1e-5)
  huggingface.save(tmp_path / 'ours', config, params)
  back, info = transformers.AutoModelForCausalLM.from_pretrained(
    tmp_path / 'ours', output_loading_info=True
  )
  assert not any(info.values()), info
  np.testing.assert_allclose(their_logprobs(back.eval(), tokens), expected, atol=1e-5)
  assert huggingface.load_config(tmp_path / 'ours') == config


@pytest.fixture
def folder(tmp_path):
  model, params = small.model_and_params(tie_embeddings=False)
  huggingface.save(tmp_path / 'model', model.config, params)
  return tmp_path / 'model'


def edit_weights(folder, change):
  tensors = load_file(folder / 'model.safetensors')
  change(tensors)
  save_file(tensors, folder / 'model.safetensors')


def edit_config(folder, **changes):
  path = folder / 'config.json'
  path.write_text(json.dumps(json.loads(path.read_text()) | changes))


def assert_same(left, right):
  jax.tree.map(np.testing.assert_array_equal, left, right)


def test_shards_hold_the_same(tmp_path):
  model, params = small.model_and_params(value_head=True)
  huggingface.save(tmp_path, model.config, params, max_shard_bytes=20_000)
  files = sorted(path.name for path in tmp_path.glob('*.safetensors'))
  assert len(files) > 2 and files[0] == f'model-00001-of-{len(files):05}.safetensors'
  assert all((tmp_path / file).stat().st_size < 25_000 for file in files)
  config, loaded = huggingface.load(tmp_path)
  assert config == model.config
  assert_same(loaded, params)


@pytest.mark.parametrize('dtype', ['bfloat16', 'float16'])
def test_narrow_types_are_widened(dtype, tmp_path):
  model, params = small.model_and_params()
  huggingface.save(tmp_path, model.config, params, dtype=dtype)
  _, loaded = huggingface.load(tmp_path)
  assert {leaf.dtype for leaf in jax.tree.leaves(loaded)} == {np.dtype('float32')}
  assert_same(loaded, jax.tree.map(lambda x: x.astype(dtype), params))


def test_value_head_on_demand(folder):
  config, params = huggingface.load(folder, value_head=True)
  assert config.value_head and not params['value_head']['kernel'].any()
  params['value_head']['kernel'] += 2.0
  huggingface.save(folder, config, params)
  assert huggingface.load(folder)[1]['value_head']['kernel'][0] == 2.0
  assert 'value_head' not in huggingface.load(folder, value_head=False)[1]


NAME = 'model.layers.1.mlp.up_proj.weight'


def test_bad_tensors_are_named(folder):
  path = r'.*model\.safetensors'
  edit_weights(folder, lambda t: t.update(stray=np.zeros(3, np.float32)))
  with pytest.raises(
    ValueError, match=f'{path}: tensor stray does not belong to a qwen3'
  ):
    huggingface.load(folder)
  edit_weights(folder, lambda t: (t.pop('stray'), t.update({NAME: t[NAME][:-1]})))
  with pytest.raises(
    ValueError, match=rf'{path}: tensor {NAME} .*\[39, 24\].*\[40, 24'
  ):
    huggingface.load(folder)
  edit_weights(folder, lambda t: t.update({NAME: np.zeros((40, 24), np.int8)}))
  with pytest.raises(ValueError, match=f'{path}: tensor {NAME} is I8'):
    huggingface.load(folder)
  edit_weights(folder, lambda t: t.pop(NAME))
  with pytest.raises(ValueError, match=f'missing tensor {NAME}'):
    huggingface.load(folder)


def test_tied_head_must_agree(folder):
  edit_config(folder, tie_word_embeddings=True)
  with pytest.raises(ValueError, match=r'lm_head\.weight differs'):
    huggingface.load(folder)

  def agree(tensors):
    tensors['lm_head.weight'] = tensors['model.embed_tokens.weight']

  edit_weights(folder, agree)
  config, params = huggingface.load(folder)
  assert config.tie_embeddings and 'lm_head' not in params


def test_index_must_agree(tmp_path):
  model, params = small.model_and_params()
  huggingface.save(tmp_path, model.config, params, max_shard_bytes=20_000)
  path = tmp_path / 'model.safetensors.index.json'
  index = json.loads(path.read_text())
  del index['weight_map'][NAME]
  path.write_text(json.dumps(index))
  with pytest.raises(ValueError, match=f'tensor {NAME} is not listed'):
    huggingface.load(tmp_path)
  index['weight_map'][NAME] = 'elsewhere.safetensors'
  path.write_text(json.dumps(index))
  with pytest.raises(FileNotFoundError, match=r'elsewhere\.safetensors'):
    huggingface.load(tmp_path)


def test_torn_files_are_named(folder):
  path = folder / 'model.safetensors'
  path.write_bytes(path.read_bytes()[:-100])
  with pytest.raises(ValueError, match=r'model\.safetensors is not a complete'):
    huggingface.load(folder)
  path.unlink()
  with pytest.raises(FileNotFoundError, match=r'model\.safetensors is not there'):
    huggingface.load(folder)
  with pytest.raises(FileNotFoundError, match='no model in'):
    huggingface.load(folder / 'absent')


@pytest.mark.parametrize(
  ('changes', 'message'),
  [
    ({'model_type': 'gpt2'}, "model_type 'gpt2'"),
    ({'hidden_act': 'gelu'}, "hidden_act='gelu'"),
    ({'hidden_size': None}, 'hidden_size must be given'),
    ({'num_key_value_heads': 3}, 'num_kv_heads=3'),
    ({'attention_dropout': 0.1}, 'attention_dropout=0.1'),
    ({'quantization_config': {'bits': 4}}, 'quantization_config'),
    ({'use_sliding_window': True, 'max_window_layers': 1}, 'sliding-window'),
    ({'layer_types': ['sliding_attention'] * 3}, 'sliding-window'),
    ({'rope_scaling': {'type': 'dynamic', 'factor': 2}}, "rope scaling 'dynamic'"),
    ({'rope_scaling': {'type': 'linear'}}, "rope scaling 'linear' lacks factor"),
    ({'rope_scaling': {'type': 'linear', 'factor': 2, 'x': 1}}, 'does not know x'),
    ({'rope_parameters': {'full_attention': {}}}, 'per layer type'),
  ],
)
def test_unsupported_settings_are_named(folder, changes, message):
  edit_config(folder, **changes)
  with pytest.raises(ValueError, match=r'config\.json: .*' + message):
    huggingface.load_config(folder)


def test_saving_replaces_a_model_whole_and_nothing_else(folder, tmp_path, monkeypatch):
  model, params = small.model_and_params(seed=5, tie_embeddings=False)
  before = huggingface.load(folder)[1]

  def fail(*args, **kwargs):
    raise OSError('disk full')

  with monkeypatch.context() as patch:
    patch.setattr(huggingface, 'save_file', fail)
    with pytest.raises(OSError, match='disk full'):
      huggingface.save(folder, model.config, params)
  assert_same(huggingface.load(folder)[1], before)
  huggingface.save(folder, model.config, params)
  assert_same(huggingface.load(folder)[1], params)
  assert [path.name for path in tmp_path.iterdir()] == ['model']
  (tmp_path / 'notes').mkdir()
  (tmp_path / 'notes' / 'a.txt').write_text('mine')
  with pytest.raises(FileExistsError, match='not a model'):
    huggingface.save(tmp_path / 'notes', model.config, params)


def test_parameters_without_a_place_are_refused(tmp_path):
  model, params = small.model_and_params()
  with pytest.raises(ValueError, match=r'adapter\.a has no place'):
    huggingface.save(tmp_path / 'm', model.config, {**params, 'adapter': {'a': 1.0}})
  wrong = {**params, 'norm': {'scale': jnp.ones(7)}}
  with pytest.raises(ValueError, match=r'norm\.scale has shape \(7,\)'):
    huggingface.save(tmp_path / 'm', model.config, wrong)
  assert not list(tmp_path.iterdir())


def test_tokenizer_travels_along(tmp_path):
  from jaxrl.data.tokenizer import load_tokenizer, train_tokenizer

  tokenizer = train_tokenizer(['some text'], 300)
  model, params = small.model_and_params(vocab_size=300)
  huggingface.save(tmp_path, model.config, params, tokenizer)
  assert load_tokenizer(tmp_path).encode('a text') == tokenizer.encode('a text')
  data = json.loads((tmp_path / 'config.json').read_text())
  assert (data['eos_token_id'], data['pad_token_id']) == (2, 0)
