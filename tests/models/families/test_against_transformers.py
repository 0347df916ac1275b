"""Every family computes what `transformers` does, and its folders come back unchanged.

What is measured is printed: `pytest -s` shows it.
"""

import contextlib
import dataclasses
import io
import json
import re

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from safetensors.numpy import load_file

from jaxrl.models import families, huggingface, kv_cache
from jaxrl.models.transformer_lm import TransformerLM
from tests.marks import TORCH, slow_except, slow_in_gate
from tests.models.families import cases

pytestmark = TORCH
WIDTH, STEPS = 36, 4
LENGTHS = np.array([20, 5, 36], np.int32)
every_case = pytest.mark.parametrize('name', cases.CASES)
fast_for_some = pytest.mark.parametrize('name', slow_except(cases.FAST, cases.CASES))


def logits_of(model, params, tokens):
  hidden = model.hidden(params, tokens, jnp.ones_like(tokens))
  return model.logits(params, hidden)


@fast_for_some
def test_logits_and_cached_decode(name):
  """The forward pass scans the layers' pattern; decode runs them one by one."""
  config, params = cases.ours(name)
  model = TransformerLM(config, unroll=1)
  tokens = cases.tokens(3, WIDTH + STEPS)
  wanted = cases.their_logits(cases.theirs(name), tokens)
  logits = np.asarray(jax.jit(logits_of, static_argnums=0)(model, params, tokens))
  print(name, 'logits differ by', np.abs(logits - wanted).max())
  np.testing.assert_allclose(logits, wanted, atol=1e-4, rtol=1e-3)
  slots = np.array([3, 0, 2])
  last, kept = jax.jit(model.prefill)(params, tokens[:, :WIDTH], LENGTHS)
  cache = jax.tree.map(lambda x: x + 7.0, model.init_cache(4, 64))  # stale
  cache = jax.jit(kv_cache.insert)(cache, kept, np.arange(3), slots)
  decode, out = jax.jit(model.decode), [last]
  for step in range(STEPS):
    fed, positions = np.zeros((2, 4), np.int32)
    positions[slots] = LENGTHS + step
    fed[slots] = tokens[np.arange(3), LENGTHS + step]
    last, cache = decode(params, cache, fed, positions, np.int32(64))
    out.append(last[slots])
  for row, length in enumerate(LENGTHS):
    wanted_row = wanted[row, length - 1 : length + STEPS]
    np.testing.assert_allclose(np.stack(out)[:, row], wanted_row, atol=2e-4)


@fast_for_some
def test_a_folder_comes_back_byte_for_byte(name, tmp_path):
  import transformers

  config, params = cases.ours(name)
  huggingface.save(tmp_path / 'ours', config, params)
  assert huggingface.load_config(tmp_path / 'ours') == config
  theirs, ours = (
    load_file(folder / 'model.safetensors')
    for folder in (cases.folder(name), tmp_path / 'ours')
  )
  assert theirs.keys() == ours.keys()
  for tensor, array in theirs.items():
    assert ours[tensor].tobytes() == array.tobytes(), tensor
  with contextlib.redirect_stderr(io.StringIO()):
    sees = cases.CASES[name].vision is not None
    kind = 'ImageTextToText' if sees else 'CausalLM'
    back, info = getattr(transformers, f'AutoModelFor{kind}').from_pretrained(
      tmp_path / 'ours', output_loading_info=True, attn_implementation='eager'
    )
  assert not any(info.values()), info
  tokens = cases.tokens(1, WIDTH)
  again = cases.their_logits(back.eval(), tokens)
  wanted = cases.their_logits(cases.theirs(name), tokens)
  np.testing.assert_allclose(again, wanted, atol=1e-5)


def test_every_family_has_a_case(tmp_path):
  for name in cases.CASES:
    cases.their_config(name).save_pretrained(tmp_path / name)
  tested = {huggingface.load_config(tmp_path / name).family for name in cases.CASES}
  assert tested == set(families.BUILT_IN)


def fuse_experts(tensors):
  """Puts tensors of single experts together, as `transformers` does when it loads."""
  single = re.compile(r'(.*\.experts)\.\d+\.(gate|up|down)_proj\.weight')
  by_name: dict[tuple[str, str], list] = {}
  for name in [name for name in tensors if single.fullmatch(name)]:
    experts, kind = single.fullmatch(name).groups()
    by_name.setdefault((experts, kind), []).append(tensors.pop(name))
  for experts in {experts for experts, _ in by_name}:
    gate, up, down = (
      np.stack(by_name[experts, kind]) for kind in ('gate', 'up', 'down')
    )
    tensors[f'{experts}.gate_up_proj'] = np.concatenate([gate, up], axis=1)
    tensors[f'{experts}.down_proj'] = down


@pytest.mark.parametrize('name', slow_in_gate(cases.DISTINCT, cases.CASES))
def test_gradients(name):
  torch = pytest.importorskip('torch')
  config, params = cases.ours(name)
  tokens = cases.tokens(2, WIDTH)
  weights = np.random.default_rng(1).standard_normal(tokens.shape).astype(np.float32)

  def total(params):
    model = TransformerLM(config, unroll=1)
    outputs = model.policy_outputs(params, tokens, jnp.ones_like(tokens))
    return (outputs.logprobs * weights).sum()

  slopes = dict(huggingface.export(config, jax.jit(jax.grad(total))(params)))
  theirs = cases.theirs(name)
  theirs.zero_grad()
  fuse_experts(slopes)
  ids = torch.tensor(tokens, dtype=torch.long)
  logprobs = torch.log_softmax(theirs(ids).logits, -1)[:, :-1]
  chosen = torch.gather(logprobs, 2, ids[:, 1:, None])[..., 0]
  (chosen * torch.tensor(weights[:, 1:])).sum().backward()
  worst = 0.0
  for tensor, parameter in theirs.named_parameters():
    if tensor not in slopes:  # a tied head, whose gradient is the embedding's
      assert config.tie_embeddings and tensor == 'lm_head.weight'
      continue
    if parameter.grad is None:  # of a tower that has seen no image
      assert '.visual.' in tensor and not slopes[tensor].any()
      continue
    wanted = parameter.grad.numpy()
    if tensor.endswith('embed_tokens.weight'):  # `transformers` trains no padding
      wanted, slopes[tensor] = wanted[1:], slopes[tensor][1:]
    size = max(1.0, np.abs(wanted).max())
    worst = max(worst, np.abs(slopes[tensor] - wanted).max() / size)
    np.testing.assert_allclose(slopes[tensor], wanted, rtol=1e-3, atol=1e-4 * size)
  print(name, 'gradients differ by', worst)


@pytest.mark.parametrize('name', slow_in_gate(cases.DISTINCT, cases.CASES))
def test_bfloat16_is_as_close_as_theirs(name):
  import copy

  import torch

  config, params = cases.ours(name)
  tokens = cases.tokens(8, WIDTH)
  truth = cases.their_logits(cases.theirs(name), tokens)
  narrow = cases.their_logits(
    copy.deepcopy(cases.theirs(name)).to(torch.bfloat16), tokens
  )
  model = TransformerLM(config, dtype='bfloat16')
  logits = np.asarray(jax.jit(logits_of, static_argnums=0)(model, params, tokens))
  each = [np.mean((x - truth) ** 2, axis=-1) for x in (logits, narrow)]
  # Of a mixture's tokens the median: one that takes another expert is far off.
  typical = np.median if cases.CASES[name].has_experts else np.mean
  ours, theirs = (np.sqrt(typical(x)) for x in each)
  print(name, 'bfloat16 is off by', ours, 'theirs by', theirs)
  assert ours < 1.2 * theirs


REFUSED = {
  'mistral': [
    ({'hidden_act': 'gelu'}, "hidden_act='gelu' is not supported, only 'silu'"),
    ({'layer_types': ['full_attention'] * 2}, "layer_types is not .*'ministral'"),
    ({'sliding_window': 0}, 'sliding_window=0 must be a number from 1 on'),
    ({'quantization_config': {'quant_method': 'fp8'}}, 'quantization_config='),
  ],
  'ministral': [
    ({'layer_types': ['linear_attention'] * 5}, "'linear_attention' is not supported"),
    ({'layer_types': ['full_attention']}, 'names 1 layers, not num_hidden_layers=5'),
  ],
  'ministral3': [
    (
      {'rope_parameters': {'llama_4_scaling_beta': 0.1}},
      'original_max_position_embeddings=None other than',
    ),
    ({'rope_parameters': {'rope_type': 'longrope', 'a': 1}}, "'longrope' is not"),
  ],
  'phi3': [
    ({'rope_parameters': {'type': 'longrope', 'long_factor': [1.0]}}, 'lacks short_fa'),
    (
      {
        'rope_parameters': {
          'type': 'longrope',
          'long_factor': [1.0] * 3,
          'short_factor': [1.0] * 4,
        }
      },
      'long_factor has 3 numbers, but 4 frequencies are rotated',
    ),
    ({'rope_parameters': {'rope_type': 'linear', 'factor': 2.0}}, "'linear' is not"),
    ({'resid_pdrop': 0.1}, r'resid_pdrop=0\.1 is not supported'),
  ],
  'smollm3': [
    ({'mlp_bias': True}, 'mlp_bias=True is not supported'),
    ({'no_rope_layers': [1]}, 'no_rope_layers names 1 layers'),
    (
      {'use_sliding_window': True, 'layer_types': [cases.SLIDING] * 9},
      'sliding-window',
    ),
  ],
  'gemma2': [
    ({'hidden_activation': 'gelu'}, "hidden_activation='gelu' is not supported"),
    ({'use_bidirectional_attention': True}, 'use_bidirectional_attention=True is not'),
  ],
  'gemma3': [
    ({'attn_logit_softcapping': 3.0}, r'attn_logit_softcapping=3\.0 is not'),
  ],
  'gemma4': [
    ({'enable_moe_block': True}, 'enable_moe_block=True needs num_experts, top_k_exp'),
    ({'use_bidirectional_attention': 'all'}, "use_bidirectional_attention='all' is no"),
    ({'vocab_size_per_layer_input': 9}, 'vocab_size_per_layer_input=9 is not'),
    ({'per_layer_config': {'1': {'sliding_window': 3}}}, 'per_layer_config may only'),
    ({'num_kv_shared_layers': 8}, 'leaves no sliding_attention layer'),
  ],
  'gpt-oss': [
    ({'swiglu_limit': 5.0}, r'swiglu_limit=5\.0 is not supported, only 7\.0'),
    ({'quantization_config': {'quant_method': 'fp8'}}, 'quantization_config='),
    ({'hidden_act': 'gelu'}, "hidden_act='gelu' is not supported"),
  ],
  'qwen3-next': [
    ({'layer_types': ['mamba'] * 4}, "'mamba' is not supported, only linear_attention"),
    ({'linear_num_value_heads': 3}, 'linear_value_heads=3 must be a multiple of'),
    ({'linear_conv_kernel_dim': 0}, 'conv_width=0 must be a whole number from 1 on'),
    ({'hidden_act': 'gelu'}, "hidden_act='gelu' is not supported, only 'silu'"),
    ({'use_sliding_window': True}, 'use_sliding_window=True is not supported'),
  ],
  'qwen3_5': [
    ({'attn_output_gate': False}, 'attn_output_gate=False is not supported, only True'),
    ({'mamba_ssm_dtype': 'bfloat16'}, "mamba_ssm_dtype='bfloat16' is not supported"),
  ],
  'qwen3_5-moe': [
    ({'norm_topk_prob': False}, 'norm_topk_prob=False is not supported, only True'),
  ],
  'glm4-moe': [
    ({'first_k_dense_replace': 4}, 'first_k_dense_replace=4 leaves none of 4 layers'),
    ({'n_group': 3}, 'router_groups=3, router_top_groups=2: 8 experts must be groups'),
    ({'topk_group': 1, 'num_experts_per_tok': 3}, 'of which 3 experts of a token'),
  ],
  'glm4-moe-lite': [
    ({'mlp_layer_types': ['dense'] * 4}, "must say 'dense' or 'sparse' for each of 4"),
    ({'partial_rotary_factor': 0.5}, 'partial_rotary_factor other than 1'),
  ],
  'deepseek-v3': [
    (
      {'quantization_config': {'quant_method': 'fp8', 'weight_block_size': [128, 128]}},
      "quantization_config='fp8' is not supported, only weights in bfloat16",
    ),
    ({'scoring_func': 'softmax'}, "scoring_func='softmax' is not supported, only 'sig"),
    ({'topk_method': 'greedy'}, "topk_method='greedy' is not supported"),
    ({'moe_layer_freq': 2}, 'moe_layer_freq=2 is not supported'),
    ({'num_key_value_heads': 2}, 'num_key_value_heads=2 is not supported'),
    ({'v_head_dim': 32}, 'value_dim at most that'),
    ({'kv_lora_rank': 0, 'q_lora_rank': None}, 'q_latent and value_dim are for'),
  ],
  'olmo3': [
    ({'rope_parameters': {'rope_theta': 1.0}}, 'must have full_attention and sliding'),
  ],
}


@pytest.mark.parametrize(
  ('name', 'changes', 'message'),
  [(name, *pair) for name, pairs in REFUSED.items() for pair in pairs],
)
def test_what_is_not_computed_is_refused_by_name(name, changes, message):
  data = json.loads((cases.folder(name) / 'config.json').read_text())
  with pytest.raises(ValueError, match=message) as error:
    huggingface.config_from_hf(data | changes)
  assert '\n' not in str(error.value)


def test_layers_that_predict_several_tokens_are_skipped(tmp_path, caplog):
  """A folder of Kimi K2 is one of DeepSeek-V3 under another name."""
  from safetensors.numpy import save_file

  name = 'deepseek-v3'
  tensors = load_file(cases.folder(name) / 'model.safetensors')
  data = json.loads((cases.folder(name) / 'config.json').read_text())
  (tmp_path / 'config.json').write_text(json.dumps(data | {'model_type': 'kimi_k2'}))
  tensors['model.layers.4.eh_proj.weight'] = np.ones((32, 64), np.float32)
  save_file(tensors, tmp_path / 'model.safetensors')
  config, params = huggingface.load(tmp_path)
  assert config == cases.ours(name)[0]
  jax.tree.map(np.testing.assert_array_equal, params, cases.ours(name)[1])
  assert 'left out 1 tensors of the layers that predict several tokens' in caplog.text
  tensors['model.layers.3.eh_proj.weight'] = tensors.pop(
    'model.layers.4.eh_proj.weight'
  )
  save_file(tensors, tmp_path / 'model.safetensors')
  with pytest.raises(ValueError, match=r'layers\.3\.eh_proj\.weight does not b'):
    huggingface.load(tmp_path)


def test_the_bias_that_chooses_experts_stays_float32(tmp_path):
  config, params = cases.ours('deepseek-v3')
  huggingface.save(tmp_path, config, params, dtype='bfloat16')
  kinds = {
    name: array.dtype.name
    for name, array in load_file(tmp_path / 'model.safetensors').items()
  }
  wide = {name for name, kind in kinds.items() if kind == 'float32'}
  assert wide == {f'model.layers.{i}.mlp.gate.e_score_correction_bias' for i in (2, 3)}
  correction = huggingface.load(tmp_path)[1]['layers']['sparse']['mlp']['correction']
  wanted = params['layers']['sparse']['mlp']['correction']
  np.testing.assert_array_equal(correction, wanted)
  assert np.abs(wanted).min() > 0


def test_experts_in_mxfp4_are_read(tmp_path):
  """Each code and powers of two around 1, as `transformers` reads them."""
  torch = pytest.importorskip('torch')
  from safetensors.numpy import save_file
  from transformers.integrations.mxfp4 import convert_moe_packed_tensors

  tensors = load_file(cases.folder('gpt-oss') / 'model.safetensors')
  draw = np.random.default_rng(0)
  wanted = {}
  for name in [name for name in tensors if name.endswith('up_proj')]:
    experts, width, outputs = tensors.pop(name).shape
    blocks = draw.integers(0, 256, (experts, outputs, width // 32, 16), np.uint8)
    scales = draw.integers(120, 130, blocks.shape[:-1], np.uint8)
    tensors |= {f'{name}_blocks': blocks, f'{name}_scales': scales}
    halves = torch.tensor(blocks), torch.tensor(scales)
    value = convert_moe_packed_tensors(*halves, dtype=torch.float32)
    wanted[name] = value.numpy()
  assert len(wanted) == 4
  save_file(tensors, tmp_path / 'model.safetensors')
  data = json.loads((cases.folder('gpt-oss') / 'config.json').read_text())
  data['quantization_config'] = {'quant_method': 'mxfp4', 'modules_to_not_convert': []}
  (tmp_path / 'config.json').write_text(json.dumps(data))
  config, params = huggingface.load(tmp_path)
  assert config == cases.ours('gpt-oss')[0]
  exported = dict(huggingface.export(config, params))
  for name, value in wanted.items():
    np.testing.assert_array_equal(exported[name], value)
  name = next(iter(wanted))
  tensors[f'{name}_scales'] = tensors[f'{name}_scales'][:, :-1]
  save_file(tensors, tmp_path / 'model.safetensors')
  with pytest.raises(ValueError, match=f'tensor {name} in MXFP4 has blocks'):
    huggingface.load(tmp_path)
  del tensors[f'{name}_scales']
  save_file(tensors, tmp_path / 'model.safetensors')
  with pytest.raises(ValueError, match=f'missing tensor {name}'):
    huggingface.load(tmp_path)


@pytest.mark.parametrize('name', ['qwen3_5-vl', 'qwen3_5-moe-vl'])
def test_a_published_folder_of_qwen3_5_is_read(name, tmp_path, caplog):
  """It has a head beside, which is left out, and its experts in one tensor."""
  from safetensors.numpy import save_file

  tensors = load_file(cases.folder(name) / 'model.safetensors')
  fuse_experts(tensors)
  some = np.ones((3, 2), np.float32)
  tensors |= {'mtp.fc.weight': some, 'mtp.norm.weight': some}
  save_file(tensors, tmp_path / huggingface.SINGLE)
  data = (cases.folder(name) / 'config.json').read_text()
  (tmp_path / 'config.json').write_text(data)
  config, params = huggingface.load(tmp_path)
  assert config == cases.ours(name)[0]
  jax.tree.map(np.testing.assert_array_equal, params, cases.ours(name)[1])
  lines = '\n'.join(record.getMessage() for record in caplog.records)
  assert 'left out 2 tensors of the multi-token-prediction head, such as mtp.' in lines
  with pytest.raises(ValueError, match='needs a text_config'):
    huggingface.config_from_hf({'model_type': config.family})


def test_an_unknown_family_says_which_there_are_and_how_to_add_one():
  with pytest.raises(
    ValueError, match=r"'gpt2' is not supported; these are: "
  ) as error:
    huggingface.config_from_hf({'model_type': 'gpt2'})
  text = str(error.value)
  assert all(name in text for name in [*families.BUILT_IN, 'kimi_k2', 'gemma4'])
  assert 'register' in text and 'docs/extending.md' in text and '\n' not in text


def test_the_config_says_which_kinds_of_layers_there_are():
  config, _ = cases.ours('olmo3')
  for changes, message in (
    ({'num_layers': 4}, 'names the kinds of 5 layers, but num_layers=4'),
    ({'layer_kinds': config.layer_kinds[:1]}, "'full_attention' is in one of them"),
    (
      {'layer_kinds': (('sliding_attention', (('a', 1),)), ('full_attention', ()))},
      "'sliding_attention' sets 'a', which is not a field",
    ),
  ):
    with pytest.raises(ValueError, match=message):
      dataclasses.replace(config, **changes)


SMALL_TOWER = {
  'hidden_size': 24,
  'num_hidden_layers': 1,
  'num_attention_heads': 2,
  'intermediate_size': 40,
  'patch_size': 4,
}
# Case → what makes up the model that has it as its text model.
AROUND = {
  'gemma3': ('Gemma3', {'image_size': 16}, {'mm_tokens_per_image': 4}),
  'ministral3': (
    'Mistral3',
    {'model_type': 'pixtral', 'image_size': 16, 'head_dim': 12},
    {'tie_word_embeddings': False},
  ),
  'gemma4': (
    'Gemma4',
    {'num_key_value_heads': 2, 'head_dim': 12, 'position_embedding_size': 16},
    {},
  ),
}


@pytest.mark.parametrize('name', AROUND)
def test_the_text_model_of_a_model_that_sees_is_read(name, tmp_path, caplog):
  import transformers
  from safetensors.numpy import save_file

  kind, tower, options = AROUND[name]
  text = cases.theirs(name)
  config = getattr(transformers, f'{kind}Config')(
    text_config=text.config.to_dict(), vision_config=SMALL_TOWER | tower, **options
  )
  with contextlib.redirect_stderr(io.StringIO()):
    whole = getattr(transformers, f'{kind}ForConditionalGeneration')(config)
    whole.model.language_model.load_state_dict(text.model.state_dict())
    whole.lm_head.load_state_dict(text.lm_head.state_dict())
    whole.save_pretrained(tmp_path)
  file = tmp_path / huggingface.SINGLE
  tensors = load_file(file)
  if name == 'gemma4':  # published folders have these of layers that do not use them
    unused = 'model.language_model.layers.6.self_attn.k_proj.weight'
    tensors[unused] = np.ones((32, 32), np.float32)
    save_file(tensors, file)
  loaded, params = huggingface.load(tmp_path)
  assert loaded == cases.ours(name)[0]
  jax.tree.map(np.testing.assert_array_equal, params, cases.ours(name)[1])
  lines = '\n'.join(record.getMessage() for record in caplog.records)
  assert 'tensors of what sees or hears, such as ' in lines
  assert ('1 tensors of layers that read the keys' in lines) == (name == 'gemma4')
  data = json.loads((tmp_path / 'config.json').read_text())
  for changes, message in (
    ({'text_config': None}, f'model_type {config.model_type!r} needs a text_config'),
    ({'quantization_config': {'quant_method': 'fp8'}}, "quantization_config='fp8' is"),
  ):
    with pytest.raises(ValueError, match=message):
      huggingface.config_from_hf(data | changes)
  save_file(tensors | {'other.weight': tensors[next(iter(tensors))]}, file)
  with pytest.raises(ValueError, match=r'tensor other\.weight does not belong'):
    huggingface.load(tmp_path)


@pytest.mark.slow
def test_gemma3_says_little_of_its_text_model():
  """As published: what `transformers` assumes is left out."""
  text_config = {
    'hidden_size': 2560,
    'intermediate_size': 10240,
    'num_hidden_layers': 34,
  }
  text_config |= {'model_type': 'gemma3_text', 'sliding_window': 1024}
  text_config |= {'rope_scaling': {'factor': 8.0, 'rope_type': 'linear'}}
  config = huggingface.config_from_hf(
    {'model_type': 'gemma3', 'text_config': text_config}
  )
  assert (config.vocab_size, config.num_heads, config.num_kv_heads) == (262208, 8, 4)
  assert dict(config.layer(5).rope_scaling) == {'factor': 8.0, 'rope_type': 'linear'}
  assert config.layer(0).rope_scaling is None and config.layer(0).window == 1024


@pytest.mark.slow
def test_gemma4_may_have_heads_of_one_size():
  data = json.loads((cases.folder('gemma4') / 'config.json').read_text())
  del data['per_layer_config']
  for overrides, size in (
    ({'global_head_dim': 16}, 16),
    ({'per_layer_config': {}}, 16),
  ):
    config = huggingface.config_from_hf(data | overrides)
    assert {layer.head_dim for layer in config.layer_configs} == {size}
