"""What `rollout.engine` may say."""

import json
import sys

import pytest

from configs import debug, qwen3_0_6b
from jaxrl.models import hf_config
from jaxrl.rollout.vllm import arguments
from jaxrl.signature import ConfigError
from jaxrl.training.policy import random_config
from launch import build, checks, engines, placement
from launch.placement import Node
from tests.launch.test_bad_input import refused


def config(engine, ray=False):
  made = debug.get_config()
  made.rollout.engine, made.cluster.ray = engine, ray
  return made


@pytest.fixture
def installed(monkeypatch):
  """As where vLLM is installed, with a few of its options."""
  known = frozenset(arguments.OURS) | {'tensor_parallel_size', 'block_size'}
  monkeypatch.setattr(arguments, 'names', lambda: known)


def test_the_jax_engine_takes_its_own_options():
  kind, options = engines.parse(config('jax(prefill_tokens=64, decode_steps=2)'))
  assert kind == 'jax' and options['prefill_tokens'] == 64
  assert options['num_slots'] == 16 and options['max_length'] == 64
  assert options['decode_steps'] == 2


def test_vllm_takes_its_options_by_name(installed):
  made = config('vllm(tensor_parallel_size=2)', ray=True)
  kind, options = engines.parse(made)
  assert kind == 'vllm' and options == {
    'num_slots': 16,
    'max_length': 64,
    'dtype': 'float32',
    'tensor_parallel_size': 2,
  }


@pytest.mark.parametrize(
  'engine, ray, said',
  [
    ('vlm', True, "Did you mean 'vllm'"),
    ('jax(prefil_tokens=1)', False, "Did you mean 'prefill_tokens'"),
    ('jax(decode_steps=0)', False, 'decode_steps must be at least 1'),
    ('jax(lanes=3)', False, 'num_slots=16 does not divide into lanes=3'),
    ('jax(lanes=2, exact=True)', False, 'in one program, not in lanes=2'),
    ('jax(num_slots=4)', False, 'rollout.num_slots'),
    ('vllm', False, 'set --config.cluster.ray=true'),
    ('vllm(tensor_paralel_size=2)', True, "Did you mean 'tensor_parallel_size'"),
    ('vllm(max_num_seqs=2)', True, 'set --config.rollout.num_slots'),
    ('vllm(data_parallel_size=2)', True, 'set --config.cluster.num_engines'),
    ('vllm(logprobs_mode="raw")', True, 'needs its own'),
    (f'vllm(python={sys.executable!r}, transfer="ipc")', True, 'cluster.weights'),
    ('vllm(python="/no/such/python")', True, "no program '/no/such/python'"),
  ],
)
def test_what_it_may_not_say(installed, engine, ray, said):
  with pytest.raises(ConfigError, match=said):
    engines.parse(config(engine, ray))


def test_without_vllm_its_environment_must_be_named(monkeypatch):
  monkeypatch.setattr(arguments, 'names', frozenset)
  with pytest.raises(ConfigError, match='make env-vllm'):
    engines.parse(config('vllm', ray=True))
  text = f'vllm(python={sys.executable!r}, whatever=1)'
  assert engines.parse(config(text, ray=True))[1]['python'] == sys.executable


@pytest.mark.vllm
def test_options_are_read_off_vllms_source():
  if not arguments.names():
    pytest.skip('vllm is not installed here')
  own = {'folder', 'parts', 'transfer'}  # of the engine, not of vLLM
  assert arguments.names() > arguments.OURS.keys() - own
  few = {
    'tensor_parallel_size',
    'enable_lora',
    'quantization',
    'enable_chunked_prefill',
  }
  assert arguments.names() > few


@pytest.mark.parametrize('gpus, engines, learners', [(1, 1, 1), (8, 4, 4)])
def test_the_qwen3_config_fits_one_gpu_and_eight(gpus, engines, learners):
  made = qwen3_0_6b.get_config()
  plan = placement.plan(made, [Node(gpus=gpus)])
  assert len(plan.engines) == engines and len(plan.learners) == 1
  share = sum(seat.memory for seat in (plan.engines[0], plan.learners[0]))
  if gpus == 1:
    assert share <= 0.9  # of the one device
  else:
    assert plan.bundles[0] == {'GPU': learners} and plan.bundles[1] == {'GPU': 1}


def test_the_qwen3_config_says_that_it_needs_a_checkpoint(tmp_path, capsys):
  path = qwen3_0_6b.__file__
  said = refused(tmp_path, capsys, '--config.dataset.path=x.jsonl', config=path)
  assert 'model.checkpoint=Qwen3-0.6B: no model in Qwen3-0.6B' in said


def test_the_qwen3_config_passes_all_checks(installed, tmp_path):
  settings = hf_config.to_hf(random_config(), 'float32')
  (tmp_path / 'config.json').write_text(json.dumps(settings))
  made = qwen3_0_6b.get_config()
  made.model.checkpoint = str(tmp_path)
  made.dataset.path = 'generate:arithmetic()'
  algorithm = build.make_algorithm(made)
  checks.settings(made, algorithm)
  assert engines.parse(made) == (
    'vllm',
    {'num_slots': 256, 'max_length': 1024, 'dtype': 'bfloat16'},
  )
  assert algorithm.correction is not None  # vLLM is another program than the learner


@pytest.mark.slow
def test_a_run_on_vllm_is_watched_with_the_engine_at_hand(capsys):
  from launch import play

  options = ("--config.rollout.engine=vllm(python='/usr/bin/env')",)
  options += ('--config.cluster.ray=true', '--config.cluster.weights=shared_memory')
  assert play.main([f'--config={debug.__file__}', *options]) == 0
  assert 'reward' in capsys.readouterr().out
