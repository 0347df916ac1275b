"""Remat policies: the same gradients, of different memory, by name."""

import dataclasses
import math
import re

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jaxrl.models import remat
from jaxrl.models.transformer_lm import TransformerLM
from jaxrl.options import ConfigError
from launch.planning import flops
from tests.calls import parse_call
from tests.models import small

# From what keeps most to what keeps least.
POLICIES = (
  'none',
  'dots_batch',
  'dots',
  "names(save='attention, qkv')",
  "names(save='attention')",
  'full',
)
HOST = "names(save='', offload='attention, qkv')"
TOKENS = small.tokens(2, 8)


@pytest.fixture(scope='module')
def model_and_params():
  return small.model_and_params(num_layers=2)


def score_of(model, policy):
  this, ones = (
    dataclasses.replace(model, remat=parse_call(policy), kernels='reference'),
    jnp.ones_like(TOKENS),
  )
  return lambda params: this.policy_outputs(params, TOKENS, ones).logprobs.sum()


def kept(model_and_params, policy):
  """Bytes that the forward pass leaves to the backward one; nothing is compiled."""
  model, params = model_and_params
  left = jax.eval_shape(lambda p: jax.vjp(score_of(model, policy), p)[1], params)
  return sum(math.prod(x.shape) * x.dtype.itemsize for x in jax.tree.leaves(left))


@pytest.mark.slow
def test_no_policy_changes_a_gradient(model_and_params):
  model, params = model_and_params
  plain, *others = (
    jax.jit(jax.grad(score_of(model, policy)))(params)
    for policy in (*POLICIES, 'products', "names(save='mlp', offload='attention, qkv')")
  )
  for other in others:
    jax.tree.map(
      lambda a, b: np.testing.assert_allclose(a, b, rtol=1e-4, atol=1e-4), plain, other
    )


def test_each_keeps_less_than_the_one_before(model_and_params):
  sizes = {policy: kept(model_and_params, policy) for policy in POLICIES}
  byte_counts = list(sizes.values())
  assert byte_counts == sorted(set(byte_counts), reverse=True), sizes


def test_products_keep_what_takes_long_to_compute(model_and_params):
  """Rows are too short here for the scores that 'dots_batch' keeps to be many."""
  least, products, most = (
    kept(model_and_params, policy) for policy in ('dots', 'products', 'none')
  )
  assert least < products < 0.75 * most

  def work(policy):
    return flops.count_flops(jax.make_jaxpr(jax.grad(score_of(model, policy)))(params))

  model, params = model_and_params
  config, (rows, length) = model.config, TOKENS.shape
  scores = config.num_layers * rows * config.num_heads * length**2 * config.head_dim
  # Scores and their sum of values, which long rows compute again with 'none' too.
  assert work('products') == work('none') + 2 * 2 * scores < work('full')


def test_what_is_offloaded_lies_in_the_host(model_and_params):
  """The CPU's two memories are one, so the trace is asked where things go."""
  model, params = model_and_params
  trace = str(jax.make_jaxpr(jax.grad(score_of(model, HOST)))(params))
  offloaded = re.findall(r'f32<host>\[[\d,]*\]', trace)
  # [layers, B, T, heads, dim]
  assert 'f32<host>[2,2,8,4,16]' in offloaded, set(offloaded)


@pytest.mark.parametrize(
  'text, message',
  [
    ('ful', "no remat policy 'ful'. Did you mean 'full'"),
    ("names(save='atention')", "no activation 'atention'. Did you mean 'attention'"),
    ("names(keep='mlp')", "no option 'keep'"),
    ("names(save='mlp', offload='mlp')", 'mlp is both kept and offloaded'),
  ],
)
def test_wrong_names_say_the_nearest(text, message):
  with pytest.raises(ConfigError, match=re.escape(message)):
    TransformerLM(small.config(), remat=parse_call(text))


def test_a_policy_is_made_once():
  assert remat.policy('names') is remat.policy('names')
