import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import PartitionSpec as P

from jaxrl.algorithms import registry, requirements
from jaxrl.training import compiled_steps, train_state
from jaxrl.training.batching import batch_builder
from jaxrl.training.parallelism import sharding
from jaxrl.training.parallelism.mesh import MeshOptions, make_mesh
from jaxrl.training.train_state import StepSpec
from tests.training import toy


def spec(**changes) -> StepSpec:
  algorithm = requirements.split_hparams(registry.make('grpo'))[0]
  return StepSpec(toy.model(**changes), algorithm)


def test_parameters_and_moments_follow_the_table():
  mesh = make_mesh(MeshOptions(fsdp=2, tensor=2))
  state = train_state.state_shapes(spec(), mesh)
  layout = train_state.shardings_of(state)
  for tree in (layout.params, layout.opt_state[0].mu, layout.opt_state[0].nu):
    attention = tree['layers']['attention']
    assert attention['q']['kernel'].spec == P(None, 'fsdp', 'tensor', None)
    assert attention['o']['kernel'].spec == P(None, 'tensor', None, 'fsdp')
    assert tree['layers']['mlp']['down']['kernel'].spec == P(None, 'tensor', 'fsdp')
    assert tree['embedding']['table'].spec == P(('tensor', 'fsdp'), None)
    assert tree['layers']['mlp_norm']['scale'].spec == P(None, None)


def test_a_fresh_state_has_sharded_moments():
  mesh = make_mesh(MeshOptions(fsdp=4, tensor=2))
  state = train_state.init_train_state(spec(), mesh, toy.params())
  moment = state.opt_state[0].mu['layers']['mlp']['up']['kernel']
  assert moment.addressable_shards[0].data.size == moment.size // 8


def test_an_odd_vocabulary_is_split_by_what_divides_it():
  mesh = make_mesh(MeshOptions(fsdp=4, tensor=2))
  layout = train_state.params_shapes(spec(vocab_size=66), mesh)
  assert layout['embedding']['table'].sharding.spec == P('tensor', None)


@pytest.mark.parametrize(
  'changes, sizes, message',
  [
    ({}, {'tensor': 4}, 'tensor=4 does not divide kv_heads=2 .*attention.k.kernel'),
    ({'hidden_size': 36}, {'fsdp': 8}, 'fsdp=8 does not divide embed=36'),
  ],
)
def test_a_mesh_that_does_not_divide_names_the_parameter(changes, sizes, message):
  with pytest.raises(ValueError, match=message):
    train_state.params_shapes(spec(**changes), make_mesh(MeshOptions(**sizes)))


def test_constrain_splits_activations():
  constrain = sharding.ShardingConstraint(make_mesh(MeshOptions(fsdp=4, tensor=2)))
  x = jnp.zeros((8, 3, 4, 5))
  y = jax.jit(lambda x: constrain(x, 'batch', 'length', 'heads', None))(x)
  shards = {shard.data.shape for shard in y.addressable_shards}
  assert shards == {(2, 3, 2, 5)}
  assert constrain == sharding.ShardingConstraint(
    make_mesh(MeshOptions(fsdp=4, tensor=2))
  )


def test_the_step_is_partitioned_without_rebuilding_activations(capfd):
  """The compiler complains on stderr when a layout forces whole copies."""
  shape = batch_builder.BatchShape(rows=8, length=16, micro_rows=8)
  numbers = {
    'parts': requirements.split_hparams(registry.make('grpo'))[1],
    'temperature': 1.0,
    'step': 0,
    'optimizer': dict.fromkeys(
      'learning_rate b1 b2 eps weight_decay max_grad_norm'.split(), 1e-3
    ),
  }
  numbers = jax.tree.map(jnp.float32, numbers) | {'seed': jnp.uint32(0)}
  compiled_steps.CompiledSteps(
    spec(), make_mesh(MeshOptions(data=1, fsdp=4, tensor=2)), numbers
  ).train_step(shape)
  assert 'rematerialization' not in capfd.readouterr().err


@pytest.mark.parametrize('spec', [P(), P('fsdp')])
def test_a_copy_shares_no_memory_with_its_source(spec):
  """A train step donates it: whoever else has the source must not lose it."""
  mesh = make_mesh(MeshOptions(data=1, fsdp=8))
  source = jnp.arange(1024.0) * 2
  alone = jax.sharding.SingleDeviceSharding(jax.devices()[0])
  for layout in (jax.sharding.NamedSharding(mesh, spec), alone):
    again = sharding.put_array(source, layout)
    for x in (source, again):
      copy = sharding.put_array(x, layout, copy=True)
      taken = {shard.data.unsafe_buffer_pointer() for shard in x.addressable_shards}
      copy_pointers = {
        shard.data.unsafe_buffer_pointer() for shard in copy.addressable_shards
      }
      assert (
        not taken & copy_pointers and (np.asarray(copy) == np.asarray(source)).all()
      )
