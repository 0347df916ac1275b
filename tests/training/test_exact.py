"""Exact mode: sampler, rescoring and training forward agree to the last bit."""

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from configs import debug
from jaxrl.models.exact_mode import Exact, with_gradient_of
from jaxrl.models.transformer_lm import TransformerLM
from jaxrl.options import ConfigError
from jaxrl.training.parallelism.mesh import MeshOptions, make_mesh
from jaxrl.training.parallelism.model_sharding import on_mesh
from launch.settings.resolve import resolve_settings
from tests.benchmarks import mismatch
from tests.launch import runs
from tests.training import toy

TEMPERATURE = 0.7


@pytest.fixture(scope='module')
def exact():
  return mismatch.model_and_params(True, toy.CONFIG.replace(num_layers=1))


@pytest.fixture(scope='module')
def drawn(exact):
  (drawn,) = mismatch.draw(*exact, 2000, [TEMPERATURE])
  return drawn


def _same(comparison):
  assert comparison['tokens'] >= 2000
  assert (comparison['bytes'], comparison['max']) == (0, 0), comparison


@pytest.mark.optimized
def test_rescoring_finds_the_bits_of_the_sampler(exact, drawn):
  model, params = exact
  for token in (mismatch.PAD, *mismatch.STOPS):
    assert (drawn.tokens[drawn.mask] == token).any()
  rescore = mismatch.rescore(model)
  _same(mismatch.compare(rescore, params, drawn, 40, TEMPERATURE))


@pytest.mark.optimized
@pytest.mark.slow
@pytest.mark.parametrize('remat', ['none', 'full'])
def test_the_forward_of_a_gradient_finds_them_on_a_mesh(exact, drawn, remat):
  """Rows over four shares of the devices, and matrices over all of them."""
  model, params = exact
  mesh = make_mesh(MeshOptions(data=2, fsdp=2, tensor=2))
  model = on_mesh(dataclasses.replace(model, remat=remat), mesh)
  forward = mismatch.first_forward(model)
  _same(mismatch.compare(forward, params, drawn, 24, TEMPERATURE))


@pytest.mark.optimized
def test_the_fast_mode_does_not(exact, drawn):
  model, params = exact
  forward = mismatch.rescore(dataclasses.replace(model, exact=None))
  comparison = mismatch.compare(forward, params, drawn, 40, TEMPERATURE)
  assert comparison['differ'] > 0.01
  assert comparison['max'] < 1e-4


def test_the_gradient_is_the_fast_modes():
  tokens = np.random.default_rng(0).integers(0, 64, (3, 12)).astype(np.int32)
  ids = (np.arange(12) < [[12], [7], [3]]).astype(np.int32)

  def slope(exact):
    model = TransformerLM(toy.CONFIG.replace(num_layers=1), exact=exact)

    def loss(params):
      outputs = model.policy_outputs(params, tokens, ids, temperature=TEMPERATURE)
      return (outputs.logprobs**2).sum()

    return jax.jit(jax.grad(loss))(toy.params(num_layers=1))

  exact_grads, wanted = slope(Exact(rows=8)), slope(None)
  jax.tree.map(
    lambda x, y: np.testing.assert_allclose(x, y, rtol=1e-4, atol=1e-5),
    exact_grads,
    wanted,
  )


def test_a_value_takes_anothers_slope():
  value, slope = jax.value_and_grad(
    lambda x: with_gradient_of(jax.lax.stop_gradient(3 * x), x * x)
  )(jnp.float32(5))
  assert (value, slope) == (15, 10)


@pytest.mark.optimized
@pytest.mark.slow
def test_a_run_reports_no_mismatch(tmp_path):
  """With a critic, micro-batches and another temperature, on eight devices."""
  options = (
    '--config.rollout.engine=jax(exact=True)',
    '--config.rollout.temperature=0.7',
    '--config.batch.num_micro_batches=2',
    '--config.num_steps=2',
    '--config.sft.num_steps=0',
    '--config.eval.interval=0',
    '--config.checkpoint.save_interval=0',
    runs.ONE_LAYER,
  )
  assert runs.main(tmp_path, *options, config=f'{runs.DEBUG}:ppo') == 0
  rows = runs.rows(tmp_path)
  assert len(rows) == 2
  for row in rows:
    assert row['mismatch/logprob_difference'] == 0.0
    assert row['mismatch/kl'] == 0.0
    assert row['policy/logprob'] < 0


def test_engine_and_learner_get_their_shapes_from_one_config():
  config = debug.get_config()
  config.rollout.engine = 'jax(exact=True)'
  config.rollout.max_num_seqs = 20
  engine = resolve_settings(config).engine
  assert engine.kind == 'jax' and engine.options['exact']
  assert engine.options['max_num_seqs'] == 20
  assert engine.exact == Exact.for_slots(20) == Exact(rows=24)
  config.rollout.engine = 'jax'
  assert resolve_settings(config).engine.exact is None


def test_other_precisions_are_refused():
  with pytest.raises(ValueError, match='float32'):
    TransformerLM(toy.CONFIG, dtype='bfloat16', exact=Exact())
  with pytest.raises(ValueError, match='multiple of 8'):
    Exact(rows=12)
  config = debug.get_config()
  config.rollout.engine = 'jax(exact=True)'
  config.model.dtype = 'bfloat16'
  with pytest.raises(ConfigError, match='float32'):
    resolve_settings(config)


@pytest.mark.optimized
@pytest.mark.slow
def test_ten_thousand_tokens():
  for comparison in mismatch.figures(True, 10_000).values():
    assert comparison['tokens'] >= 10_000
    assert (comparison['bytes'], comparison['max']) == (0, 0), comparison
