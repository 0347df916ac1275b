"""A step on trees of tokens is the step on flat rows, for each kind of algorithm."""

import dataclasses

import jax
import numpy as np
import pytest

from jaxrl.algorithms import registry, requirements
from jaxrl.models.transformer_lm import TransformerLM
from jaxrl.training import batch_fields, monitoring
from jaxrl.training.batching import (
  packed_batch_builder,
  packing_plan,
  token_tree_placement,
)
from jaxrl.training.optimizers import OptimizerOptions
from jaxrl.training.parallelism.mesh import MeshOptions, make_mesh, single_device_mesh
from jaxrl.training.teacher_scoring import Teachers
from tests.calls import make_optimizer
from tests.marks import slow_in_gate
from tests.training import test_packing, toy
from tests.training.bag import Bag

LENGTH = 24
# The gradient itself is what one step changes.
PLAIN_STEP = {'learning_rate': 1.0, 'name': 'sgd', 'max_grad_norm': None}
SAME = ('time/', 'tokens/', 'compile/')  # what may differ begins with these


def first_fit(tokens=96, length=48, share_tree=True, **options):
  return packing_plan.first_fit(
    tokens=tokens, length=length, share_tree=share_tree, **options
  )


def branches(rng, count):
  """Random sequences that part anywhere; some continue others, or repeat them."""
  sequences = [rng.integers(0, 64, rng.integers(4, 12))]
  while len(sequences) < count:
    parent = sequences[rng.integers(len(sequences))]
    kept = parent[: rng.integers(1, len(parent) + 1)]
    added = rng.integers(0, 64, rng.integers(0, LENGTH - len(kept) + 1))
    sequences.append(np.concatenate([kept, added]))
  return sequences


def tries(algorithm, seed=0, sizes=(5, 4, 3), segments=False):
  """Groups of rows that are random tries; which tokens are actions differs by row."""
  rng = np.random.default_rng(seed)
  if algorithm.batch_unit == 'pair':
    sizes = (2,) * 5
  groups = []
  for g, size in enumerate(sizes):
    sequences = branches(rng, size)
    groups.append(
      [
        row(rng, algorithm, tokens, g, m, segments)
        for m, tokens in enumerate(sequences)
      ]
    )
  if algorithm.data_format in ('messages', 'text'):  # each row is a group of its own
    groups = [[one] for group in groups for one in group]
  return groups


def row(rng, algorithm, tokens, g, m, segments):
  length = max(len(tokens), 2)
  one = toy.trajectory(rng, length, env_group=g, sample_index=m)
  mask = rng.random(length) < 0.7
  mask[0], mask[-1] = False, True
  rewards = np.zeros(length, np.float32)
  rewards[-1] = m if algorithm.batch_unit == 'pair' else rng.normal()
  mixes = 'expert_mask' in requirements.fields_read(algorithm)
  extras = {
    'state_hash': int(rng.integers(2)),
    'teacher_logprobs': np.where(mask, -rng.random(length), 0).astype(np.float32),
    'teacher_topk_ids': rng.integers(0, 64, (length, 64)).astype(np.int32),
    'teacher_topk_logprobs': -6 * rng.random((length, 64)).astype(np.float32) - 1,
  }
  if segments and m % 2 and length > 3:
    extras['segments'] = [length - 2, 2]
  return dataclasses.replace(
    one,
    tokens=np.resize(tokens, length).astype(np.int32),
    action_mask=mask,
    rollout_logprobs=np.where(mask, one.rollout_logprobs, 0).astype(np.float32),
    weights_version=np.where(mask, 0, -1).astype(np.int32),
    rewards=rewards,
    is_expert=algorithm.data_format != 'rollout' or (mixes and g == 2),
    extras=extras,
  )


async def train(algorithm, groups, kind=TransformerLM, changes=None, **options):
  """Parameters after a step of plain gradient descent, and the step's metrics."""
  changes = {'value_head': True} if algorithm.value_loss else {}
  options = {'mesh': single_device_mesh(), 'log_entropy': True} | options
  if batch_fields.teacher_fields(algorithm):
    options['teachers'] = Teachers(algorithm, mesh=options['mesh'], chunk_rows=8)
  learner = toy.learner(
    algorithm,
    kind=kind,
    changes=changes,
    num_rows=16,
    optimizer=make_optimizer(OptimizerOptions(**PLAIN_STEP)),
    length_buckets=(LENGTH,),
    ref_params=toy.params(kind, seed=1, **changes),
    **options,
  )
  metrics = await learner.update(groups)
  return jax.tree.map(np.asarray, learner.params), metrics


def assert_same(flat, tree):
  jax.tree.map(
    lambda a, b: np.testing.assert_allclose(a, b, rtol=0, atol=1e-6), flat[0], tree[0]
  )
  names = {key for key in flat[1] if not key.startswith(SAME)}
  assert names == {key for key in tree[1] if not key.startswith(SAME)}
  for key in names:
    assert tree[1][key] == pytest.approx(flat[1][key], rel=2e-4, abs=1e-5), key


# By token, by turn, by sequence and by group; of pairs, of files, of teachers and of
# experts; with a critic and with KL in the loss.
KINDS = (
  *('distill', 'dpo', 'gigpo', 'grpo', 'gspo', 'mix_chord', 'on_policy_distill'),
  *('ppo', 'sft'),
)


@pytest.mark.parametrize('name', [*slow_in_gate(KINDS, KINDS)])
async def test_a_step_on_trees_is_one_on_flat_rows(name):
  algorithm = registry.make(name)
  groups = tries(algorithm, segments=algorithm.data_format == 'rollout')
  flat = await train(algorithm, groups)
  tree = await train(algorithm, groups, packing=first_fit())
  assert tree[1]['tokens/in_trees'] == 1
  assert tree[1]['tokens/shared_share'] > (0.03 if name == 'distill' else 0.1)
  assert_same(flat, tree)


def test_the_gradient_through_trees_is_exact():
  """Log-probs of random tries, weighted at random, against those of the rectangle."""
  groups = tries(registry.make('grpo'), segments=True)
  value, wanted, _ = test_packing.scored(layout(None), groups)
  builder = layout(first_fit(tokens=120, length=120))
  result, gradient, slots = test_packing.scored(builder, groups)
  assert slots < sum(len(row.tokens) for group in groups for row in group)
  assert result == pytest.approx(float(value), rel=1e-6)
  jax.tree.map(
    lambda a, b: np.testing.assert_allclose(a, b, atol=2e-6 * np.abs(b).max()),
    gradient,
    wanted,
  )


@pytest.mark.slow
async def test_steps_of_several_minibatches_on_trees():
  """Scored before the first update by a plan of the whole batch."""
  algorithm = registry.make('ppo')
  options = {'kind': Bag, 'num_minibatches': 2, 'ppo_epochs': 2}
  groups = tries(algorithm)
  flat = await train(algorithm, groups, **options)
  tree = await train(algorithm, groups, packing=first_fit(tokens=48), **options)
  assert tree[1]['tokens/micro_batches'] > 1
  assert_same(flat, tree)


def layout(packing, algorithm='grpo', kind=Bag, longest=LENGTH, **options):
  return toy.learner(
    registry.make(algorithm),
    kind=kind,
    num_rows=16,
    length_buckets=(longest,),
    packing=packing,
    **options,
  )._batch_builder


def texts(batch, row):
  """The segments of a row: tuples of tokens."""
  ids = batch.segment_ids[row]
  return [
    tuple(batch.tokens[row][ids == n].tolist()) for n in range(1, int(ids.max()) + 1)
  ]


@pytest.mark.parametrize('seed', range(8))
def test_each_shared_token_has_one_slot_and_sees_those_before_it(seed):
  """Against sets of beginnings, and what each token should see written down in full."""
  groups = tries(registry.make('grpo'), seed=seed, segments=True)
  batch, shape, (plan,) = layout(first_fit(tokens=120, length=120)).build_batch(
    groups, 0
  )
  assert shape.pack.tree and shape.pack.rows == 1 and plan.prefix_ids is None
  width = shape.pack.length
  placed = plan.micro_batch_rows[plan.micro_batch_rows >= 0]
  assert sorted(placed) == list(range(12))
  for micro in range(int(plan.num_micro_batches)):
    rows = plan.packed_rows(micro, LENGTH)
    members = plan.micro_batch_rows[micro]
    used = rows.origin[0] >= 0
    beginnings, others = set(), 0
    for member, row in enumerate(members):
      if row < 0:
        assert (rows.place[member] < 0).all()
        continue
      first, *rest = texts(batch, row)
      beginnings |= {first[:t] for t in range(1, len(first) + 1)}
      others += sum(map(len, rest))
      slots = rows.place[member][batch.segment_ids[row] > 0]
      source = rows.origin[0, slots]
      there = batch.tokens[members[source // LENGTH], source % LENGTH]
      assert (there == batch.tokens[row, : len(slots)]).all()
      for segment in range(1, 1 + len(rest) + 1):
        path = rows.place[member][batch.segment_ids[row] == segment]
        assert (rows.positions[0, path] == np.arange(len(path))).all()
        assert (rows.tree.previous[0, path] == [-1, *path[:-1]]).all()
        for t, slot in enumerate(path):
          is_seen = (np.arange(width) <= slot) & (rows.tree.ends[0] > slot)
          assert np.flatnonzero(is_seen).tolist() == path[: t + 1].tolist()
    assert used.sum() == len(beginnings) + others


def played(turns=6, episodes=2, seed=0):
  """Episodes with a row for each turn, which has all turns before it."""
  rng, groups = np.random.default_rng(seed), []
  for g in range(episodes):
    tokens = rng.integers(0, 64, 3 * turns).astype(np.int32)
    rows = []
    for turn in range(1, turns + 1):
      one = toy.trajectory(rng, 3 * turn, env_group=g)
      mask = np.arange(3 * turn) >= 3 * turn - 2
      rows.append(dataclasses.replace(one, tokens=tokens[: 3 * turn], action_mask=mask))
    groups.append(rows)
  return groups


def test_trees_are_chosen_where_they_save_a_fifth():
  builder = layout(first_fit(share_tree=None))
  batch, shape, plans = builder.build_batch(played(), 0)
  metrics = builder.packing_metrics(batch, shape, plans)
  assert metrics['tokens/in_trees'] == 1
  # 3 + 6 + … + 18 tokens of which only the last row's 18 have slots.
  assert metrics['tokens/shared_share'] == pytest.approx(1 - 18 / 63)
  apart = toy.groups(sizes=(4, 4))
  options = {'share_tree': None}, {'share_tree': False}
  plans = [layout(first_fit(**o)).build_batch(apart, 0)[1:] for o in options]
  assert not plans[0][0].pack.tree and plans[0][0] == plans[1][0]
  jax.tree.map(np.testing.assert_array_equal, plans[0][1], plans[1][1])
  kept = layout(first_fit(share_tree=False)).build_batch(played(), 0)[1]
  assert not kept.pack.tree


def test_rows_of_single_turns_are_warmed_up_and_planned_as_trees():
  assert all(
    s.pack.tree for s in layout(first_fit(share_tree=None), 'gigpo').warmup_shapes()
  )
  builder = layout(first_fit(share_tree=None), 'grpo')
  assert not any(shape.pack.tree for shape in builder.warmup_shapes())
  shape = layout(first_fit(share_tree=None), 'gigpo').batch_shape()
  shapes = packing_plan.plan_shapes(single_device_mesh(), shape.pack, 16, (16, LENGTH))
  assert shapes.place.shape == (16, LENGTH)
  warm = {dataclasses.replace(shape, pack=shape.pack._replace(tree=False))}
  assert 'share tokens in trees' in monitoring.recompile_reason(shape, warm)


def test_tokens_of_a_teacher_are_scored_for_each_row():
  """A teacher may rank other tokens in each row: only what is no action is shared."""
  groups = tries(registry.make('distill'))
  shared = {}
  for name in ('on_policy_distill', 'distill'):
    teachers = Teachers(registry.make(name), mesh=single_device_mesh(), chunk_rows=8)
    builder = layout(first_fit(), name, teachers=teachers)
    batch, shape, (plan,) = builder.build_batch(groups, 0)
    shared[name] = builder.packing_metrics(batch, shape, [plan])['tokens/shared_share']
  assert 0 < shared['distill'] < shared['on_policy_distill']
  lengths = token_tree_placement.measure_trees(batch, share_actions=False)
  for rank in range(1, len(lengths.common)):
    rows = np.flatnonzero(np.isin(lengths.rank, [rank - 1, rank]))
    assert not batch.action_mask[rows, : lengths.common[rank]].any()


def test_experts_that_differ_part_rows():
  groups = played(episodes=1)
  batch, _, _ = layout(first_fit()).build_batch(groups, 0)
  experts = np.zeros((*batch.tokens.shape, 2, 1), np.int16)
  experts[3, 4] = 1  # the fourth row goes another way at its fifth token
  lengths = token_tree_placement.measure_trees(batch.replace(routed_experts=experts))
  shared = [lengths.common[lengths.rank[row]] for row in range(6)]
  assert shared == [0, 3, 6, 4, 4, 15]
  assert lengths.shared[:6].tolist() == [3, 6, 6, 4, 15, 15]


def test_what_cannot_be_shared_in_trees_is_refused_or_told(caplog):
  with pytest.raises(ValueError, match='leave out share_prefix=False'):
    layout(first_fit(share_prefix=False))
  sizes = {'key_heads': 2, 'value_heads': 2, 'key_dim': 8, 'value_dim': 8}
  sizes = {f'linear_{name}': size for name, size in sizes.items()}
  deltas = toy.model(linear_attention=True, conv_width=4, **sizes)
  with pytest.raises(ValueError, match='the gated DeltaNet layers of this model'):
    packed_batch_builder._choose_trees(first_fit(), deltas)
  caplog.set_level('INFO')
  assert not packed_batch_builder._choose_trees(first_fit(share_tree=None), deltas)
  assert 'share prompts, not trees: the model has gated DeltaNet' in caplog.text


def test_no_kernel_of_an_accelerator_has_trees(caplog):
  caplog.set_level('INFO')
  for platform, share, chosen in (
    ('cpu', None, None),
    ('tpu', None, False),
    ('gpu', None, False),
    ('gpu', True, True),
    ('cpu', False, False),
  ):
    model = dataclasses.replace(toy.model(), platform=platform)
    packing = first_fit(share_tree=share)
    assert packed_batch_builder._choose_trees(packing, model) is chosen
  assert 'no kernel for tpu has trees' in caplog.text


@pytest.mark.slow
async def test_trees_on_four_devices():
  algorithm = registry.make('grpo', {'kl_coef': 0.0})
  groups = tries(algorithm)
  flat = await train(algorithm, groups)
  mesh = make_mesh(MeshOptions(data=1, fsdp=2, tensor=2), devices=jax.devices()[:4])
  tree = await train(algorithm, groups, packing=first_fit(), mesh=mesh)
  assert_same(flat, tree)
