"""Adapters in the learner: they alone move, are kept in checkpoints, and are merged."""

import re

import jax
import numpy as np
import pytest
from jax.sharding import PartitionSpec as P

from jaxrl.algorithms import registry
from jaxrl.models import lora
from jaxrl.models.model_config import Lora
from jaxrl.models.transformer_lm import TransformerLM
from jaxrl.training import train_state
from jaxrl.training.checkpointing import Checkpointer, CheckpointError, flatten_by_name
from jaxrl.training.learner import Learner
from jaxrl.training.learner_options import LearnerOptions
from jaxrl.training.optimizers import OptimizerOptions
from jaxrl.training.parallelism.mesh import MeshOptions, make_mesh
from tests.calls import make_optimizer, split_options
from tests.marks import slow
from tests.models.small import EXPERTS
from tests.training import toy
from tests.training.test_preference_pairs import pairs

OWN = lora.lora_adapters(rank=2, targets='q,o,up')
LAYERS = ('attention.q', 'attention.o', 'mlp.up')


def model(adapters: Lora | None = OWN, **changes):
  return TransformerLM(toy.CONFIG.replace(num_layers=1, lora=adapters, **changes))


def make_learner(
  algorithm='grpo', *, adapters: Lora | None = OWN, seed=0, changes=None, **options
):
  changes = changes or {}
  this = model(adapters, **changes)
  params = toy.params(TransformerLM, seed, num_layers=1, **changes)
  params = lora.add_adapters(this, params, jax.random.key(1))
  options = {'num_rows': 8, 'length_buckets': (16,)} | options
  algorithm = registry.make(algorithm) if isinstance(algorithm, str) else algorithm
  return Learner(
    this,
    params,
    algorithm,
    optimizer=make_optimizer(
      OptimizerOptions(learning_rate=1e-2, name='adamw(weight_decay=.1)')
    ),
    **split_options(LearnerOptions, options),
  )


def named(tree):
  return {name: np.array(x) for name, x in flatten_by_name(tree).items()}


def moved(before, after):
  return {name for name in before if (before[name] != after[name]).any()}


@pytest.mark.parametrize(
  'algorithm',
  ['grpo', *(slow(name) for name in ('ppo', 'sft', 'dpo'))],
)
async def test_only_adapters_and_a_value_head_move(algorithm):
  changes = {'value_head': True} if algorithm == 'ppo' else {}
  learner = make_learner(algorithm, changes=changes)
  groups = toy.groups()
  if algorithm == 'sft':
    groups = toy.groups(is_expert=True)
  if algorithm == 'dpo':
    groups = pairs(4)
  before = named(learner.params)
  for _ in range(2):  # A has no gradient before B has moved
    metrics = await learner.update(groups)
  assert np.isfinite(metrics['loss/total'])
  changed = moved(before, named(learner.params))
  want = {f'layers.{x}.lora_{y}' for x in LAYERS for y in 'ab'}
  assert changed - {'value_head.bias', 'value_head.kernel'} == want
  assert ('value_head.kernel' in changed) == (algorithm == 'ppo')
  kept = flatten_by_name(learner._state.opt_state[0].mu)
  assert not [name for name in kept if name.endswith('q.kernel')]


@pytest.mark.slow
async def test_experts_their_router_and_the_head_learn_by_adapters():
  adapters = lora.lora_adapters(rank=2, targets='gate,up,down,router,lm_head')
  learner = make_learner('sft', adapters=adapters, changes=EXPERTS)
  before = named(learner.params)
  for _ in range(2):
    metrics = await learner.update(toy.groups(is_expert=True))
  assert np.isfinite(metrics['loss/total'])
  layers = ('experts.gate', 'experts.up', 'experts.down', 'router')
  parts = [f'layers.mlp.{name}' for name in layers] + ['lm_head']
  assert moved(before, named(learner.params)) == {
    f'{part}.lora_{y}' for part in parts for y in 'ab'
  }


async def test_the_reference_is_the_start_and_costs_no_copy():
  learner = make_learner()
  assert set(flatten_by_name(learner._ref_params)) == set(
    flatten_by_name(lora.trainable_params(learner.model.config, learner.params))
  )
  first = await learner.update(toy.groups())
  second = await learner.update(toy.groups())
  assert first['kl/reference'] == 0 < second['kl/reference']


async def test_a_run_resumes_to_the_bit_and_writes_no_frozen_weight(tmp_path):
  whole, first = make_learner(), make_learner()
  for step in range(3):
    await whole.update(toy.groups(step))
  for step in range(2):
    await first.update(toy.groups(step))
  checkpointer = Checkpointer(tmp_path)
  await first.save(checkpointer, {}, wait=True)
  names = set(first._checkpoint_arrays()['state'].params['layers'])
  assert names == {'attention', 'mlp'}
  assert not any(
    'kernel' in name for name in flatten_by_name(first._checkpoint_arrays())
  )
  second = make_learner()
  await second.restore(checkpointer)
  await second.update(toy.groups(2))
  want, got = named(whole._state), named(second._state)
  assert not moved(want, got)
  with pytest.raises(CheckpointError, match='trained on another model'):
    await make_learner(seed=1).restore(checkpointer)
  checkpointer.close()


@pytest.mark.slow
async def test_a_mesh_gives_the_same_and_adapters_lie_as_their_layers_do():
  mesh = make_mesh(MeshOptions(fsdp=2, tensor=2), devices=jax.devices()[:4])
  one, many = make_learner('sft'), make_learner('sft', mesh=mesh)
  for learner in (one, many):
    await learner.update(toy.groups(is_expert=True))
  for name, x in named(one.params).items():
    np.testing.assert_allclose(x, named(many.params)[name], rtol=1e-3, atol=1e-5)
  shapes = train_state.state_shapes(many._spec, mesh)
  for tree in (shapes.params, shapes.opt_state[0].mu):
    q = tree['layers']['attention']['q']
    assert q['lora_a'].sharding.spec == P(None, 'fsdp', None)
    assert q['lora_b'].sharding.spec == P(None, None, 'tensor', None)
  served, kept = await many.inference_params(), many.params
  kernel = served['layers']['attention']['q']['kernel']
  assert kernel.sharding == kept['layers']['attention']['q']['kernel'].sharding
  assert (kernel != kept['layers']['attention']['q']['kernel']).any()
  want = lora.merged(one.model.config, one.params)
  jax.tree.map(
    lambda x, y: np.testing.assert_allclose(x, y, rtol=1e-3, atol=1e-5), want, served
  )
  await many.offload()
  jax.tree.map(np.testing.assert_array_equal, served, await many.inference_params())


async def test_adapters_to_be_sent_are_given_with_their_base():
  learner = make_learner(
    adapters=lora.lora_adapters(rank=2, alpha=3.0, targets='q', send='adapters')
  )
  transfer = await learner.inference_params()
  assert lora.is_transfer(transfer) and transfer[lora.SCALE_KEY] == 1.5
  q = learner.params['layers']['attention']['q']
  assert transfer['layers']['attention']['q']['lora_a'] is q['lora_a']  # no copy
  await learner.offload()
  again = await learner.inference_params()
  jax.tree.map(np.testing.assert_array_equal, transfer, again)
  kinds = {x.sharding.memory_kind for x in jax.tree.leaves(again['layers'])}
  assert kinds == {'device'}


@pytest.mark.slow
async def test_a_base_in_bfloat16_learns():
  learner = make_learner('sft', adapters=lora.lora_adapters(rank=2, base='bfloat16'))
  before = named(learner.params)
  assert before['embedding.table'].dtype == 'bfloat16'
  metrics = await learner.update(toy.groups(is_expert=True))
  assert np.isfinite(metrics['optimizer/grad_norm'])
  changed = moved(before, named(learner.params))
  assert changed and all('lora_b' in name for name in changed if 'lora_a' not in name)


def test_no_gradient_is_computed_of_what_is_frozen():
  """Of the products in the program, none has the shape of a frozen kernel."""
  products = []
  for adapters in (None, OWN):
    learner = make_learner('sft', adapters=adapters, changes={'intermediate_size': 80})
    text = learner.trace(16)[1]['train'].lower().as_text()
    products.append(re.findall(r'dot_general.*-> tensor<(?:32x80|80x32)xf32>', text))
  assert len(products[0]) == 3 and not products[1]  # gate, up and down
