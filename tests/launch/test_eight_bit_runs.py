"""Runs whose engine has 8-bit weights: mismatch, bytes, and what is refused."""

import re

import jax
import numpy as np
import pytest

from jaxrl.device_thread import DeviceThread
from jaxrl.models.decoding import eight_bit_weights
from jaxrl.options import ConfigError
from jaxrl.rollout.engine.jax_engine import JaxEngine
from jaxrl.rollout.weights.subscriber import VersionReader
from jaxrl.rollout.weights.transport import FolderTransport
from kernels.block_rounding import BlockFormat
from launch.planning import cost, engine_decode, planned_run, publish_memory, targets
from launch.settings.validation import validate_consistency
from tests.launch import runs
from tests.launch.test_planned_memory import learner_of, whole
from tests.launch.test_planning import small

INT8 = "--config.rollout.engine=jax(weights_dtype='int8', weights_block=16)"
FLOAT8 = "--config.rollout.engine=jax(weights_dtype='float8_e4m3fn', weights_block=16)"
ROUNDING = '--config.batch.engine_rounding=true'
SHORT = '--config.sft.num_steps=0 --config.eval.interval=0'.split()


async def held_bytes(run):
  """The bytes of weights that an engine of the run has after a load."""
  policy, device_thread = run.policy(), DeviceThread('test')
  options = dict(run.settings.engine.options) | {'device_thread': device_thread}
  engine = JaxEngine(policy.model, **options)
  params = policy.model.init(jax.random.key(0))
  form = run.settings.engine.weights_format
  held = []
  for version, given in enumerate((params, eight_bit_weights.to_send(params, form))):
    await engine.load(version, given)
    held.append(whole(engine._loaded_weights()[1]))
  device_thread.close()
  return held


@pytest.mark.parametrize('engine', [INT8, FLOAT8], ids=['int8', 'float8'])
async def test_the_planner_counts_what_the_engine_holds(engine):
  run = small(engine)
  counted = cost.engine_memory(run, 'cpu')["engine's weights"]
  assert await held_bytes(run) == [counted, counted]
  plain = small()
  full = cost.engine_memory(plain, 'cpu')
  assert counted < full["engine's weights"]
  params = engine_decode.trace_decode(run, jax.devices()[:1]).in_avals[0][0]
  assert whole(params) == counted
  estimate = cost.estimate_publish(run, targets.parse_target('cpu:1'))
  form = run.settings.engine.weights_format
  assert estimate.bytes == counted and form.dtype in estimate.description


def test_the_planner_counts_what_is_sent():
  run = small(INT8)
  learner = learner_of(run)
  params = planned_run.param_shapes(learner.model)
  form = run.settings.engine.weights_format
  sent = jax.eval_shape(lambda params: eight_bit_weights.to_send(params, form), params)
  memory = publish_memory.PublishMemory(run, learner).publishing()
  assert memory['rounded weights'] == whole(eight_bit_weights.parts(sent))
  assert memory['temporaries'] == whole(sent)


@pytest.mark.parametrize(
  'options, message',
  [
    ([ROUNDING], 'engine=jax has no 8-bit weights: set jax'),
    ([ROUNDING, INT8, '--config.model.lora=lora(rank=2)'], 'leave one of the two out'),
  ],
)
def test_what_cannot_be_is_refused(options, message):
  with pytest.raises(ConfigError, match=re.escape('--config.batch.engine_rounding')):
    try:
      validate_consistency(small(*options).settings)
    except ConfigError as error:
      assert message in str(error)
      raise
  validate_consistency(small(INT8, '--config.model.lora=lora(rank=2)').settings)


@pytest.mark.slow
def test_a_run_sends_8_bits_after_every_step(tmp_path):
  """The engine's log-probs are the learner's at each version that it gets."""
  through = (
    f'--config.weight_sync.transport=checkpoint(folder="{tmp_path}/w",durable=False)'
  )
  options = *SHORT, '--config.num_steps=2', through, INT8, ROUNDING
  recorder = runs.record(tmp_path / 'run', *options)
  first, second = (row for _, row in recorder.metrics[:2])
  for row in first, second:
    assert row['mismatch/logprob_difference'] < 1e-5
  assert second['optimizer/grad_norm'] > 0 and second['weights/changed'] > 0
  late = VersionReader(FolderTransport(tmp_path / 'w'))
  late.poll()
  params = late.params()
  assert params['layers']['mlp']['up']['codes'].dtype == np.int8
  assert params['embedding']['table'].dtype == np.float32
  assert first['weights/full_bytes'] == whole(params)


@pytest.mark.slow
@pytest.mark.parametrize('engine', [INT8, FLOAT8], ids=['int8', 'float8'])
def test_the_alarm_is_silent_with_the_same_rounding_alone(tmp_path, engine):
  """Its usual threshold, 0.1, is far above what 8 bits do to so small a model."""
  options = *SHORT, '--config.num_steps=1', '--config.batch.logprob_mismatch_warn=1e-4'
  rows = []
  for name, more in (('plain', ()), ('rounded', (ROUNDING,))):
    recorder = runs.record(tmp_path / name, *options, engine, *more)
    rows.append(recorder.metrics[0][1])
  plain, rounded = rows
  assert plain['mismatch/alarm'] == 1 and rounded['mismatch/alarm'] == 0
  assert rounded['mismatch/logprob_difference'] < 1e-5
  assert plain['mismatch/logprob_difference'] > 1e-4


def test_the_format_is_that_of_the_engine():
  settings = small(INT8, ROUNDING).settings
  assert settings.engine.weights_format == BlockFormat('int8', 16)
  model = learner_of(small(INT8, ROUNDING)).model
  assert model.rounding == BlockFormat('int8', 16)
  assert learner_of(small(INT8)).model.rounding is None
