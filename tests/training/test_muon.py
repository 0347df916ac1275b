"""Muon for hidden matrices beside AdamW, against optax's own and float64."""

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from jax.sharding import PartitionSpec as P
from optax.contrib import MuonDimensionNumbers

from jaxrl.algorithms import registry, requirements
from jaxrl.training import muon_and_adam, optimizers, train_state
from jaxrl.training.parallelism.mesh import MeshOptions, make_mesh
from jaxrl.training.train_state import StepSpec
from tests import calls
from tests.training import toy

SPEC = calls.make_optimizer_spec('muon(momentum=.9, rms=.3, b2=.99, weight_decay=.1)')
# What a kernel's axes are: a layer's, an expert's, and those of heads.
AXES = {
  'up': MuonDimensionNumbers((1,), (2,)),
  'down': MuonDimensionNumbers((2,), (3,)),
  'q': MuonDimensionNumbers((1,), (2, 3)),
  'o': MuonDimensionNumbers((1, 2), (3,)),
}


def tree(make):
  """Parameters of all kinds, each made from its shape."""
  return {
    'embed': {'table': make(20, 8)},
    'layers': {
      'attention': {
        'q': {'kernel': make(2, 8, 2, 4)},
        'o': {'kernel': make(2, 2, 4, 8)},
      },
      'mlp': {
        'up': {'kernel': make(2, 8, 12), 'bias': make(2, 12)},
        'experts': {'down': {'kernel': make(2, 3, 6, 4)}},
      },
      'norm': {'scale': make(2, 8)},
      'mixer': {'q_conv': make(2, 4, 2, 4)},
    },
    'lm_head': {'kernel': make(8, 20)},
    'value_head': {'kernel': make(8)},
  }


def random_trees(count):
  rng = np.random.default_rng(0)
  return [
    tree(lambda *shape: jnp.asarray(rng.normal(size=shape), jnp.float32))
    for _ in range(count)
  ]


def dimension_numbers(params):
  def of(path, x):
    names = [key.key for key in path]
    is_matrix = names[0] == 'layers' and names[-1] == 'kernel'
    return AXES[names[-2]] if is_matrix else None

  return jax.tree_util.tree_map_with_path(of, params)


def apply(transformation, params, gradients):
  state, updates = transformation.init(params), []
  step = jax.jit(transformation.update)
  for gradient in gradients:
    update, state = step(gradient, state, params)
    updates.append(update)
  return updates, state


def test_updates_of_hidden_matrices_are_those_of_optax():
  params, *gradients = random_trees(4)
  ours = optimizers.make_transformation(SPEC.state_spec, SPEC.hparams)
  theirs = optax.contrib.muon(
    learning_rate=1.0,
    beta=0.9,
    weight_decay=0.1,
    weight_decay_mask=optimizers._decay_mask,
    adam_b1=0.9,
    adam_b2=0.99,
    adam_weight_decay=0.1,
    consistent_rms=0.3,
    muon_weight_dimension_numbers=dimension_numbers,
  )
  got, state = apply(ours, params, gradients)
  wanted, _ = apply(theirs, params, gradients)
  for ours_now, theirs_now in zip(got, wanted, strict=True):
    for (path, x), y in zip(
      jax.tree_util.tree_leaves_with_path(ours_now),
      jax.tree.leaves(theirs_now),
      strict=True,
    ):
      if muon_and_adam.matrix_axes(path, x.shape) is None:
        continue  # to optax the rest is NAdamW: see the next test
      np.testing.assert_allclose(x, -y, rtol=2e-4, atol=2e-5, err_msg=str(path))
  assert int(state[0].count) == 3


def test_the_rest_is_adamw():
  params, *gradients = random_trees(3)
  adamw = calls.make_optimizer_spec('adamw(b2=.99, weight_decay=.1)')
  for name, spec in (('muon', SPEC), ('adamw', adamw)):
    run = optimizers.make_transformation(spec.state_spec, spec.hparams)
    updates = apply(run, params, gradients)[0][-1]
    if name == 'muon':
      ours = updates
  assert not np.allclose(
    ours['layers']['mlp']['up']['kernel'], updates['layers']['mlp']['up']['kernel']
  )
  for rest in ('embed', 'lm_head', 'value_head'):
    jax.tree.map(np.testing.assert_array_equal, ours[rest], updates[rest])
  for path in (('norm', 'scale'), ('mixer', 'q_conv')):
    np.testing.assert_array_equal(
      ours['layers'][path[0]][path[1]], updates['layers'][path[0]][path[1]]
    )


def newton_schulz(x, steps=5):
  """The quintic iteration on a matrix, written out in float64."""
  x = x.T if x.shape[0] > x.shape[1] else x
  y = x / (np.linalg.norm(x) + 1e-8)
  for _ in range(steps):
    square = y @ y.T
    y = 3.4445 * y + (-4.7750 * square + 2.0315 * square @ square) @ y
  return y


def test_a_first_update_is_the_gradient_with_equal_singular_values():
  """At the first step momentum and look-ahead are the gradient, up to a factor."""
  (gradient,) = random_trees(1)
  spec = calls.make_optimizer_spec('muon')
  run = optimizers.make_transformation(spec.state_spec, spec.hparams)
  updates, _ = apply(run, gradient, [gradient])
  for layer in range(2):
    kernel = np.float64(gradient['layers']['mlp']['up']['kernel'][layer])
    update = np.float64(updates[0]['layers']['mlp']['up']['kernel'][layer])
    wanted = 0.2 * np.sqrt(12) * newton_schulz(kernel)
    np.testing.assert_allclose(update, wanted, atol=2e-4)
    values = np.linalg.svd(update / (0.2 * np.sqrt(12)), compute_uv=False)
    assert values.min() > 0.6 and values.max() < 1.25
    assert np.linalg.cond(kernel) > 2.5
    # Heads and their width are one side of a matrix.
    o = np.float64(updates[0]['layers']['attention']['o']['kernel'][layer])
    values = np.linalg.svd(o.reshape(8, 8) / (0.2 * np.sqrt(8)), compute_uv=False)
    assert values.max() < 1.25 and np.median(values) > 0.6


def test_state_is_sharded_like_the_parameters_and_known_to_plans():
  static = requirements.split_hparams(registry.make('grpo'))[0]
  spec = StepSpec(toy.model(), static, optimizer_state=SPEC.state_spec)
  mesh = make_mesh(MeshOptions(fsdp=2, tensor=2))
  shapes = train_state.state_shapes(spec, mesh)
  state = shapes.opt_state[0]
  up = state.mu['layers']['mlp']['up']['kernel']
  assert up.shape == (2, 32, 48) and up.sharding.spec == P(None, 'fsdp', 'tensor')
  assert state.nu['layers']['mlp']['up']['kernel'].shape == (1,)
  top, shard = jax.tree.leaves(state.nu['embedding']), shapes.params
  assert top[0].shape == jax.tree.leaves(shard['embedding'])[0].shape
  assert top[0].sharding.spec == P(('tensor', 'fsdp'), None)
  # Four bytes for each parameter, four more for what Adam updates.
  params, nu = jax.tree.leaves(shapes.params), jax.tree.leaves(state.nu)
  whole = sum(x.size for x in jax.tree.leaves(state.mu))
  assert whole == sum(x.size for x in params)
  assert sum(x.size for x in nu) < 0.6 * whole


def test_a_matrix_of_the_layers_is_found_by_its_place():
  paths = jax.tree_util.tree_leaves_with_path(
    tree(lambda *shape: jax.ShapeDtypeStruct(shape, jnp.float32))
  )
  found = {
    path[-2].key: axes
    for path, x in paths
    if (axes := muon_and_adam.matrix_axes(path, x.shape))
  }
  assert found == {
    name: (axes.reduction_axis, axes.output_axis) for name, axes in AXES.items()
  }


def test_a_run_without_hidden_matrices_is_refused():
  """As one that trains adapters alone is."""
  adapters = {'layers': {'q': {'lora_a': jnp.ones((2, 8, 4))}}}
  with pytest.raises(ValueError, match='trains none of them'):
    optimizers.init_optimizer_state(adapters, SPEC.state_spec)
  with pytest.raises(ValueError, match='ns_steps=0'):
    calls.make_optimizer_spec('muon(ns_steps=0)')
  with pytest.raises(ValueError, match=r'momentum=1.0 of muon must be in \[0, 1\)'):
    calls.make_optimizer_spec('muon(momentum=1.0)')
