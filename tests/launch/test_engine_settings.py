"""What `rollout.engine` may say."""

import json
import shutil
import sys

import pytest

from configs import debug, qwen3_0_6b
from jaxrl.model_loading import random_config
from jaxrl.models import huggingface
from jaxrl.options import ConfigError
from jaxrl.rollout.vllm import vllm_options
from launch.runtime import placement
from launch.runtime.placement import ClusterNode
from launch.settings.engine_settings import check_engine, check_model
from launch.settings.resolve import resolve_settings
from launch.settings.validation import validate
from tests.launch.test_bad_input import refused


def config(engine, ray=False):
  config_dict = debug.get_config()
  config_dict.rollout.engine, config_dict.cluster.ray = engine, ray
  return config_dict


@pytest.fixture
def installed(monkeypatch):
  """As where vLLM is installed, with a few of its options."""
  known = frozenset(vllm_options.RESERVED_OPTIONS) | {
    'tensor_parallel_size',
    'block_size',
  }
  monkeypatch.setattr(vllm_options, 'vllm_option_names', lambda: known)


def test_families_that_vllm_cannot_serve_are_refused():
  vllm_options.check_family(random_config())
  with pytest.raises(ConfigError, match="cannot serve family 'gpt_oss' ") as error:
    vllm_options.check_family(random_config(family='gpt_oss'))
  assert '\n' not in str(error.value) and "engine 'jax'" in str(error.value)


LATENTS = random_config(family='deepseek_v3')


@pytest.mark.parametrize(
  'changes, ignored',
  [
    ({'rope_interleaved': False}, 'rope_interleave=False'),
    ({'attention_bias': True}, 'attention_bias=True'),
  ],
)
def test_what_vllm_ignores_of_latent_attention_is_refused(changes, ignored):
  vllm_options.check_family(LATENTS)
  with pytest.raises(ConfigError, match=f'vLLM ignores {ignored} of a model with lat'):
    vllm_options.check_family(LATENTS.replace(**changes))


def test_queries_of_latents_are_not_rotated_by_the_cpu_kernel():
  native = {'custom_ops': ['-rotary_embedding']}
  assert vllm_options.cpu_compilation(random_config()) is None
  assert vllm_options.cpu_compilation(LATENTS) == native
  assert vllm_options.cpu_compilation(LATENTS, native | {'mode': 0}) == {
    **native,
    'mode': 0,
  }
  assert vllm_options.cpu_compilation(LATENTS, {'custom_ops': ['all']}) == {
    'custom_ops': ['all', '-rotary_embedding']
  }


def test_latent_attention_gets_the_cpu_backend_whose_weights_can_be_updated():
  eager = {'enforce_eager': True, 'kv_cache_memory_bytes': 9}
  assert vllm_options.cpu_options(random_config(), {}, 9) == eager
  assert vllm_options.cpu_options(LATENTS, {'seed': 1}, 9) == {
    **eager,
    'attention_backend': 'CPU_MLA',
    'compilation_config': {'custom_ops': ['-rotary_embedding']},
    'seed': 1,
  }
  chosen = {'attention_config': {'backend': 'AMX_MLA'}, 'enforce_eager': False}
  options = vllm_options.cpu_options(LATENTS, chosen, 9)
  assert options | chosen == options and 'attention_backend' not in options


def test_vllm_gets_no_folder_of_which_only_the_text_is_trained(tmp_path):
  file = tmp_path / 'config.json'
  file.write_text('{"model_type": "gemma4_text"}')
  vllm_options.check_folder(tmp_path)
  file.write_text('{"model_type": "gemma4"}')
  with pytest.raises(ConfigError, match='Save that in a folder of its own') as error:
    vllm_options.check_folder(tmp_path)
  assert '\n' not in str(error.value)


def test_sequences_beyond_longrope_are_refused():
  pairs = {
    'rope_type': 'longrope',
    'factor': 4.0,
    'original_max_position_embeddings': 64,
    'short_factor': (1.0,),
    'long_factor': (2.0,),
  }
  shape = random_config(family='phi3').replace(
    rope_scaling=tuple(sorted(pairs.items()))
  )
  config_dict = debug.get_config()
  config_dict.batch.max_length = 64
  check_model(resolve_settings(config_dict), shape.replace(max_position=64))
  message = r'max_length=64: LongRoPE is computed for at most 63 tokens'
  with pytest.raises(ConfigError, match=message):
    check_model(resolve_settings(config_dict), shape.replace(max_position=63))


@pytest.mark.parametrize('option', ['draft_tokens', 'prompt_block'])
def test_options_of_a_cache_that_keeps_prompts_are_refused_without(option):
  settings = resolve_settings(config(f'jax({option}=4)'))
  check_model(settings, random_config())
  kinds = ('full', (('window', 0),)), ('windowed', (('window', 9),))
  shape = random_config(num_layers=2)
  shape = shape.replace(layer_types=('windowed', 'full'), layer_kinds=kinds)
  with pytest.raises(ConfigError, match=rf'jax\({option}=4\): {option}: .*windows'):
    check_model(settings, shape)
  check_model(resolve_settings(config(f'jax({option}=4, exact=True)')), shape)


def test_the_jax_engine_takes_its_own_options():
  engine = resolve_settings(config('jax(prefill_tokens=64, decode_steps=2)')).engine
  kind, options = engine.kind, engine.options
  assert kind == 'jax' and options['prefill_tokens'] == 64
  assert options['max_num_seqs'] == 16 and options['max_length'] == 64
  assert options['decode_steps'] == 2


def test_vllm_takes_its_options_by_name(installed):
  config_dict = config('vllm(tensor_parallel_size=2)', ray=True)
  engine = resolve_settings(config_dict).engine
  kind, options = engine.kind, engine.options
  assert kind == 'vllm' and options == {
    'max_num_seqs': 16,
    'max_length': 64,
    'dtype': 'float32',
    'tensor_parallel_size': 2,
  }


@pytest.mark.parametrize(
  'engine, ray, message',
  [
    ('vlm', True, "Did you mean 'vllm'"),
    ('jax(prefil_tokens=1)', False, "Did you mean 'prefill_tokens'"),
    ('jax(decode_steps=0)', False, 'decode_steps=0 must be at least 1'),
    (
      'jax(decode_threads=3)',
      False,
      'max_num_seqs=16 is not divisible by decode_threads=3',
    ),
    ('jax(decode_threads=2, exact=True)', False, 'not with decode_threads=2'),
    (
      "jax(exact=True, weights_dtype='bfloat16')",
      False,
      'exact keeps weights in float32',
    ),
    ("jax(exact=True, weights_dtype='int8')", False, 'exact keeps weights in float32'),
    ("jax(weights_dtype='int4')", False, 'weights_dtype'),
    ("jax(weights_dtype='int8', weights_block=0)", False, 'weights_block=0 must be at'),
    ('jax(weights_block=64)', False, "set weights_dtype='int8' too"),
    ("vllm(weights_dtype='int8')", True, 'weights_dtype'),
    ('jax(max_num_seqs=4)', False, 'rollout.max_num_seqs'),
    ('vllm', False, 'set --config.cluster.ray=true'),
    ('vllm(tensor_paralel_size=2)', True, "Did you mean 'tensor_parallel_size'"),
    ('vllm(max_num_seqs=2)', True, 'set rollout.max_num_seqs'),
    ('vllm(data_parallel_size=2)', True, 'set cluster.num_engines'),
    ('vllm(logprobs_mode="raw")', True, 'needs its own'),
    (f'vllm(python={sys.executable!r}, transfer="ipc")', True, 'weight_sync.transport'),
    ('vllm(python="/no/such/python")', True, "no program '/no/such/python'"),
  ],
)
def test_what_it_may_not_say(installed, engine, ray, message):
  with pytest.raises(ConfigError, match=message):
    check_engine(resolve_settings(config(engine, ray)))


def test_without_vllm_its_environment_must_be_named(monkeypatch):
  monkeypatch.setattr(vllm_options, 'vllm_option_names', frozenset)
  with pytest.raises(ConfigError, match='make env-vllm'):
    check_engine(resolve_settings(config('vllm', ray=True)))
  settings = resolve_settings(config('vllm(python="env", whatever=1)', ray=True))
  check_engine(settings)
  assert settings.engine.options['python'] == shutil.which('env')


def test_the_options_of_another_environment_are_read_off_its_source(tmp_path):
  python = tmp_path / 'bin' / 'python'
  python.parent.mkdir()
  python.symlink_to(sys.executable)
  source = tmp_path / 'lib/python3.11/site-packages/vllm/engine/arg_utils.py'
  source.parent.mkdir(parents=True)
  lines = [f'  option_{i}: int = {i}' for i in range(200)]
  lines += ['  block_size: int = 16', '  _api_process_count: int = 1']
  source.write_text('\n'.join(['class EngineArgs:', *lines]))
  good = f'vllm(python="{python}", block_size=8)'
  check_engine(resolve_settings(config(good, ray=True)))
  for name, guess in (
    ('blok_size', "Did you mean 'block_size'"),
    ('_api_process_count', 'option_'),
  ):
    bad = f'vllm(python="{python}", {name}=8)'
    with pytest.raises(ConfigError) as caught:
      resolve_settings(config(bad, ray=True))
    error = str(caught.value)
    assert f"no option '{name}'" in error and guess in error and len(error) < 500
    assert 'There are 201, of which these are closest: ' in error


def test_vllm_on_a_tpu_is_refused_in_one_line(tmp_path):
  packages = tmp_path / 'lib' / 'python3.12' / 'site-packages'
  (packages / 'vllm').mkdir(parents=True)
  python = tmp_path / 'bin' / 'python'
  python.parent.mkdir()
  python.symlink_to(sys.executable)
  settings = resolve_settings(config(f'vllm(python="{python}")', ray=True))
  check_engine(settings)
  (packages / 'tpu_inference').mkdir()
  with pytest.raises(ConfigError) as caught:
    check_engine(settings)
  error = str(caught.value)
  assert '\n' not in error and error.startswith('--config.rollout.engine=vllm(python=')
  assert 'refuses the seed of a request' in error
  assert "use rollout.engine='jax'" in error


@pytest.mark.vllm
def test_options_are_read_off_vllms_source():
  if not vllm_options.vllm_option_names():
    pytest.skip('vllm is not installed here')
  engine_options = {'folder', 'parts', 'transfer'}  # of the engine, not of vLLM
  assert (
    vllm_options.vllm_option_names()
    > vllm_options.RESERVED_OPTIONS.keys() - engine_options
  )
  few = {
    'tensor_parallel_size',
    'enable_lora',
    'quantization',
    'enable_chunked_prefill',
  }
  assert vllm_options.vllm_option_names() > few


@pytest.mark.parametrize('gpus, engines, learners', [(1, 1, 1), (8, 4, 4)])
def test_the_qwen3_config_fits_one_gpu_and_eight(gpus, engines, learners):
  config_dict = qwen3_0_6b.get_config()
  plan = placement.plan_placement(
    resolve_settings(config_dict), [ClusterNode(gpus=gpus)]
  )
  assert len(plan.engines) == engines and len(plan.learners) == 1
  share = sum(seat.memory for seat in (plan.engines[0], plan.learners[0]))
  if gpus == 1:
    assert share <= 0.9  # of the one device
  else:
    assert plan.bundles[0] == {'GPU': learners} and plan.bundles[1] == {'GPU': 1}


def test_the_qwen3_config_says_that_it_needs_a_checkpoint(tmp_path, capsys):
  path = qwen3_0_6b.__file__
  error = refused(tmp_path, capsys, '--config.dataset.path=x.jsonl', config=path)
  assert 'model.checkpoint=Qwen3-0.6B: no model in Qwen3-0.6B' in error


def test_the_qwen3_config_passes_all_checks(installed, tmp_path):
  shape = huggingface.config_to_hf(random_config(), 'float32')
  (tmp_path / 'config.json').write_text(json.dumps(shape))
  config_dict = qwen3_0_6b.get_config()
  config_dict.model.checkpoint = str(tmp_path)
  config_dict.dataset.path = 'generate:arithmetic()'
  settings = resolve_settings(config_dict)
  validate(settings)
  engine = settings.engine
  assert engine.kind == 'vllm'
  assert engine.options == {
    'max_num_seqs': 256,
    'max_length': 1024,
    'dtype': 'bfloat16',
  }
  assert (
    settings.algorithm.correction is not None
  )  # vLLM is another program than the learner


@pytest.mark.slow
def test_a_run_on_vllm_is_watched_with_the_engine_at_hand(capsys):
  from launch import play

  options = ("--config.rollout.engine=vllm(python='/usr/bin/env')",)
  options += (
    '--config.cluster.ray=true',
    '--config.weight_sync.transport=shared_memory',
  )
  assert play.main([f'--config={debug.__file__}', *options]) == 0
  assert 'reward' in capsys.readouterr().out
