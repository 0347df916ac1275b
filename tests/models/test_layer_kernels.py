"""Models on a CPU run its kernels for norms and activations, and give the same."""

import dataclasses
import re

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jaxrl.component_calls import ComponentCall
from jaxrl.models import remat
from tests.marks import NEEDS_COMPILER
from tests.models import small

pytestmark = NEEDS_COMPILER
FAMILIES = {'silu': {}, 'gelu_tanh': {'family': 'gemma2', 'qk_norm': False}}
TOKENS = small.tokens(2, 9)


def names(**options):
  return ComponentCall('names', options)


def own_policy():
  return jax.checkpoint_policies.everything_saveable


KEEPS_INNER = names(save='attention, mlp')


def losses(activation, **options):
  """The loss of a model with each choice of kernels, and the parameters."""
  model, params = small.model_and_params(**FAMILIES[activation])

  def loss_of(kernels):
    of = dataclasses.replace(model, kernels=kernels, **options)
    segments = jnp.ones_like(TOKENS)
    return lambda params: of.policy_outputs(params, TOKENS, segments).logprobs.mean()

  return loss_of('auto'), loss_of('reference'), params


def calls(function, params):
  """What the program calls by name, with how often."""
  trace = str(jax.make_jaxpr(jax.grad(function))(params))
  found = re.findall(r'target_name=jaxrl_((?:norm|gate)\w*)', trace)
  return {name: found.count(name) for name in found}


@pytest.mark.parametrize('policy', ['none', 'products', KEEPS_INNER])
@pytest.mark.parametrize('activation', FAMILIES)
def test_values_and_gradients_are_the_same(activation, policy):
  native, plain, params = losses(activation, remat=policy)
  assert f'gate_{activation}_back' in calls(native, params)
  assert not calls(plain, params)
  found, wanted = (jax.jit(jax.value_and_grad(f))(params) for f in (native, plain))
  jax.tree.map(
    lambda x, y: np.testing.assert_allclose(x, y, rtol=1e-3, atol=1e-4), found, wanted
  )


def test_only_policies_that_name_it_keep_the_inner_activations():
  assert remat.may_keep(KEEPS_INNER, 'mlp') and remat.may_keep(own_policy, 'mlp')
  assert remat.may_keep(names(save='qkv', offload='attention, mlp'), 'mlp')
  others = names(save='qkv', offload='attention')
  for policy in ('none', 'auto', 'full', 'products', 'names', others):
    assert not remat.may_keep(policy, 'mlp')


@pytest.mark.parametrize('policy', ['none', 'full', KEEPS_INNER])
def test_inner_activations_are_kept_only_where_they_are_named(policy):
  """Without, the kernel of the backward pass makes them again."""
  native, _, params = losses('silu', remat=policy)
  residuals = jax.eval_shape(lambda p: jax.vjp(native, p)[1], params)
  width = small.config().intermediate_size
  wide = [x for x in jax.tree.leaves(residuals) if x.shape[-1:] == (width,)]
  activations = [x for x in wide if x.shape[-3:-1] == TOKENS.shape]
  # Those of gate and up in each layer, stacked if layers are scanned.
  count = sum(x.shape[0] if x.ndim == 4 else 1 for x in activations)
  of_layer = 1 if policy == KEEPS_INNER else {'none': 2, 'full': 0}[policy]
  assert count == of_layer * small.config().num_layers


def test_other_dtypes_and_meshes_stay_with_xla():
  native, _, params = losses('silu', dtype='bfloat16')
  assert not calls(native, params)

  def constrain(x, *names):
    return x

  constrain.mesh = jax.make_mesh((2,), ('fsdp',))
  native, _, params = losses('silu', constrain=constrain)
  assert not calls(native, params)
