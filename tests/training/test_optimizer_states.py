"""Every kind of optimizer: sharded like its parameters, resumed to the bit."""

import jax
import numpy as np
import pytest
from jax.sharding import PartitionSpec as P

from jaxrl.algorithms import registry, requirements
from jaxrl.models.transformer_lm import TransformerLM
from jaxrl.training import optimizers, train_state
from jaxrl.training.checkpointing import Checkpointer, CheckpointError
from jaxrl.training.optimizers import OptimizerOptions
from jaxrl.training.parallelism.mesh import MeshOptions, make_mesh, single_device_mesh
from jaxrl.training.train_state import StepSpec
from tests.calls import make_optimizer, make_optimizer_spec
from tests.training import toy

KINDS = (
  "adamw(state_dtype='bfloat16')",
  'adafactor(min_size=8)',
  "lion(state_dtype='bfloat16')",
  'sgd',
  'muon',
)


def make_learner(kind):
  optimizer = make_optimizer(OptimizerOptions(learning_rate=1e-2, name=kind))
  # Muon is for the matrices of layers, which a bigram does not have.
  model = TransformerLM if kind == 'muon' else toy.Bigram
  return toy.learner(registry.make('sft'), kind=model, optimizer=optimizer)


def groups(seed=0):
  return toy.groups(seed, is_expert=True)


def bits(learner):
  return [np.array(x).tobytes() for x in jax.tree.leaves(learner._state)]


@pytest.mark.parametrize('kind', KINDS)
async def test_a_run_resumes_to_the_bit(kind, tmp_path):
  whole, first = make_learner(kind), make_learner(kind)
  before = bits(whole)
  for step in range(3):
    metrics = await whole.update(groups(step))
  assert np.isfinite(metrics['optimizer/grad_norm']) and bits(whole) != before
  for step in range(2):
    await first.update(groups(step))
  checkpointer = Checkpointer(tmp_path)
  await first.save(checkpointer, {}, wait=True)
  second = make_learner(kind)
  await second.restore(checkpointer)
  await second.update(groups(2))
  assert bits(second) == bits(whole)
  if 'adamw' in kind:
    with pytest.raises(CheckpointError, match='is bfloat16, this run needs float32'):
      await make_learner('adamw').restore(checkpointer)
  checkpointer.close()


async def test_numbers_change_without_compiling_and_the_kind_cannot():
  learner = make_learner(KINDS[1])
  await learner.update(groups())
  learner.optimizer = make_optimizer(
    OptimizerOptions(name='adafactor(min_size=8, decay_rate=.7)')
  )
  assert (await learner.update(groups()))['compile/programs'] == 0
  learner.optimizer = make_optimizer(OptimizerOptions(name='adamw'))
  with pytest.raises(ValueError, match='only the numbers of an optimizer'):
    await learner.update(groups())


@pytest.mark.parametrize('kind', KINDS[1:3])
async def test_a_critic_warms_up_with_any_kind(kind):
  learner = toy.learner(
    registry.make('ppo', {'critic_warmup': 1}),
    changes={'value_head': True},
    optimizer=make_optimizer(OptimizerOptions(learning_rate=1e-2, name=kind)),
  )
  seen = [jax.tree.map(np.array, learner.params)]
  for step in range(2):
    await learner.update(toy.groups(step))
    seen.append(jax.tree.map(np.array, learner.params))
  table = [x['bigram']['table'] for x in seen]
  assert (table[0] == table[1]).all() and (table[1] != table[2]).any()
  assert (seen[0]['value_head']['kernel'] != seen[1]['value_head']['kernel']).any()


def test_factored_moments_lie_along_the_axes_that_are_left():
  static = requirements.split_hparams(registry.make('grpo'))[0]
  spec = StepSpec(
    toy.model(), static, optimizer_state=make_optimizer_spec(KINDS[1]).state_spec
  )
  mesh = make_mesh(MeshOptions(fsdp=2, tensor=2))
  shapes = train_state.state_shapes(spec, mesh).opt_state[0][0]

  def specs(tree):  # up: [layers, embed, mlp] = [2, 32, 48], fsdp and tensor
    return tree['layers']['mlp']['up']['kernel']

  assert specs(shapes.v_row).shape == (2, 32)
  assert specs(shapes.v_row).sharding.spec == P(None, 'fsdp')
  assert specs(shapes.v_col).shape == (2, 48)
  assert specs(shapes.v_col).sharding.spec == P(None, 'tensor')
  assert specs(shapes.v).sharding.spec == P()
  scale = shapes.v['layers']['mlp_norm']['scale']
  assert scale.shape == (2, 32) and scale.sharding.spec == P(None, None)


@pytest.mark.parametrize('kind', KINDS[:2])
def test_a_mesh_changes_nothing_but_rounding(kind):
  memory = make_optimizer_spec(kind).state_spec
  # Unclipped: a norm's last bit, of the order of sums, could turn a rounding around.
  optimizer = make_optimizer(
    OptimizerOptions(learning_rate=1.0, name=kind, max_grad_norm=None)
  )
  numbers = optimizer.hparams(0) | {'seed': 3}
  params, results = toy.params(toy.Bigram), []
  step = jax.jit(
    lambda p, s, g: optimizers.apply_gradients(p, s, g, numbers, memory)[:2]
  )
  static = requirements.split_hparams(registry.make('sft'))[0]
  spec = StepSpec(toy.Bigram(), static, optimizer_state=memory)  # pyright: ignore
  for mesh in (single_device_mesh(), make_mesh(MeshOptions(fsdp=4, tensor=2))):
    state = train_state.init_train_state(spec, mesh, params)
    gradients = train_state.place_params(params, train_state.params_shapes(spec, mesh))
    now = step(state.params, state.opt_state, gradients)
    now = step(*now, gradients)
    results.append(jax.tree.map(lambda x: np.asarray(x, np.float32), now))
  jax.tree.map(lambda x, y: np.testing.assert_allclose(x, y, rtol=1e-5), *results)
