"""A step on packed rows is the step on rectangles, for each kind of algorithm."""

import dataclasses
import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jaxrl.algorithms import registry, requirements
from jaxrl.component_calls import ComponentCall
from jaxrl.models.exact_mode import Exact
from jaxrl.models.transformer_lm import TransformerLM
from jaxrl.options import ConfigError
from jaxrl.training import (
  advantage_step,
  batch_fields,
  compiled_steps,
  forward_pass,
  monitoring,
  train_step,
)
from jaxrl.training.batching import (
  batch_builder,
  first_fit_placement,
  packed_batch_builder,
  packing_plan,
  unpacked_attention,
)
from jaxrl.training.optimizers import OptimizerOptions
from jaxrl.training.parallelism import sharding
from jaxrl.training.parallelism.mesh import MeshOptions, make_mesh, single_device_mesh
from jaxrl.training.teacher_scoring import Teachers
from tests.calls import make_optimizer, parse_packing
from tests.marks import slow, slow_in_gate
from tests.training import toy
from tests.training.bag import Bag

SMOOTH = {'learning_rate': 1e-2, 'name': 'adamw(eps=1e-2)'}
LENGTH, TOP_K = 24, 4
SAME = ('time/', 'tokens/', 'compile/')  # what may differ begins with these


def prompted(algorithm, sizes=(4, 3, 1), seed=0, segments=False):
  """Groups with a prompt each, unequal responses, and some with a turn between."""
  rng = np.random.default_rng(seed)
  if algorithm.batch_unit == 'pair':
    sizes = (2,) * 4
  groups = []
  for g, size in enumerate(sizes):
    prompt = rng.integers(0, 64, 3 + g).astype(np.int32)
    groups.append([one(rng, algorithm, prompt, g, m, segments) for m in range(size)])
  return groups


def one(rng, algorithm, prompt, g, m, segments):
  length = len(prompt) + int(rng.integers(4, 14))
  row = toy.trajectory(rng, length, env_group=g, sample_index=m)
  mask = np.arange(length) >= len(prompt)
  mask[len(prompt) + 1 : len(prompt) + 3] &= m % 2 == 0  # somebody else's words
  tokens = np.concatenate([prompt, row.tokens[len(prompt) :]])
  rewards = np.zeros(length, np.float32)
  rewards[-1] = m if algorithm.batch_unit == 'pair' else rng.normal()
  extras = {
    'state_hash': int(rng.integers(2)),
    'teacher_logprobs': np.where(mask, -rng.random(length), 0).astype(np.float32),
    'teacher_topk_ids': rng.integers(0, 64, (length, 64)).astype(np.int32),
    'teacher_topk_logprobs': -6 * rng.random((length, 64)).astype(np.float32) - 1,
  }
  if segments and m % 2:
    extras['segments'] = [len(prompt) + 2, length - len(prompt) - 2]
  return dataclasses.replace(
    row,
    tokens=tokens,
    action_mask=mask,
    rollout_logprobs=np.where(mask, row.rollout_logprobs, 0).astype(np.float32),
    weights_version=np.where(mask, 0, -1).astype(np.int32),
    rewards=rewards,
    is_expert=algorithm.data_format != 'rollout'
    or (algorithm_mixes(algorithm) and g == 2),
    extras=extras,
  )


def algorithm_mixes(algorithm):
  return 'expert_mask' in requirements.fields_read(algorithm)


async def train(algorithm, groups, kind=Bag, steps=2, **options):
  value_head = {'value_head': True} if algorithm.value_loss else {}
  options = {'mesh': single_device_mesh(), 'log_entropy': False} | options
  if batch_fields.teacher_fields(algorithm):
    options['teachers'] = Teachers(algorithm, mesh=options['mesh'], chunk_rows=8)
  learner = toy.learner(
    algorithm,
    kind=kind,
    changes=value_head,
    optimizer=make_optimizer(OptimizerOptions(**SMOOTH)),
    length_buckets=(LENGTH,),
    **options,
  )
  metrics = [await learner.update(groups) for _ in range(steps)]
  return jax.tree.map(np.asarray, learner.params), metrics


def assert_same(one, two):
  jax.tree.map(
    lambda a, b: np.testing.assert_allclose(a, b, rtol=0, atol=2e-6), one[0], two[0]
  )
  for before, after in zip(one[1], two[1], strict=True):
    assert {k for k in before if not k.startswith(SAME)} == {
      k for k in after if not k.startswith(SAME)
    }
    for key, value in before.items():
      if not key.startswith(SAME):
        assert after[key] == pytest.approx(value, rel=2e-4, abs=1e-5), key


def packed(tokens=48, length=48, **options):
  return packing_plan.first_fit(tokens=tokens, length=length, **options)


LIGHT = registry.make('grpo', {'kl_coef': 0.0})  # no scores before the first update

FAST = ('ppo',)
# By token, by turn, by step and by sequence; by group and by the whole batch; of pairs,
# of files, of teachers, of experts; with a critic and with a greedy attempt.
KINDS = (
  *('cod', 'cpt', 'distill', 'dpo', 'drgrpo', 'gigpo', 'grpo', 'gspo', 'kimi', 'm2po'),
  *('mix_chord', 'on_policy_distill', 'ppo', 'reinforce_plus_plus', 'remax', 'sft'),
  *('step_reinforce', 'topr'),
)
GATE = ('dpo', 'gigpo', 'grpo', 'gspo', 'mix_chord', 'on_policy_distill', 'remax')
NAMES = [*FAST, *slow_in_gate(GATE, [name for name in KINDS if name not in FAST])]
ONE_OF_EACH = ('grpo', 'gspo', 'ppo', 'dpo', 'on_policy_distill')


@pytest.fixture
def eagerly(monkeypatch, name):
  """Many programs are run an operation after the other: compiling each costs more."""
  if name in FAST:
    yield
    return

  def prepare(spec, mesh, shape, hparams_key):
    return functools.partial(
      advantage_step.score_and_compute_advantages, spec, shape.rows // shape.micro_rows
    )

  def train(spec, mesh, shape, hparams_key):
    return functools.partial(train_step.train_step, spec)

  monkeypatch.setattr(compiled_steps, '_compile_advantage_step', prepare)
  monkeypatch.setattr(compiled_steps, '_compile_train_step', train)
  jax.config.update('jax_disable_jit', True)
  yield
  jax.config.update('jax_disable_jit', False)


@pytest.mark.parametrize('name', NAMES)
async def test_packed_is_unpacked(name, eagerly):
  overrides = {
    'aggregation': ComponentCall('sequence_mean_token_sum_norm', {'length': 16})
  }
  algorithm = registry.make(name, overrides if name == 'drgrpo' else {})
  groups = prompted(algorithm)
  value_head = {'value_head': True} if algorithm.value_loss else {}
  options = {'steps': 1, 'ref_params': toy.params(Bag, seed=1, **value_head)}
  plain = await train(algorithm, groups, **options)
  packed_run = await train(algorithm, groups, packing=packed(), **options)
  assert_same(plain, packed_run)
  # No two rows of a group begin alike, or are there at all.
  single = algorithm.data_format in ('messages', 'text') or name == 'ppo'
  assert (packed_run[1][0]['tokens/shared_share'] > 0) == (not single)
  assert packed_run[1][0]['tokens/micro_batches'] > 1


@pytest.mark.parametrize('name', slow_in_gate(('grpo', 'ppo', 'dpo'), [*ONE_OF_EACH]))
async def test_a_transformer_on_packed_rows(name):
  """One of each: by token, by sequence, with a critic, of pairs, with a teacher."""
  algorithm, options = registry.make(name), {'num_minibatches': 2, 'ppo_epochs': 2}
  groups = prompted(algorithm, segments=algorithm.data_format == 'rollout')
  plain = await train(algorithm, groups, TransformerLM, **options)
  packed_run = await train(
    algorithm, groups, TransformerLM, packing=packed(96), **options
  )
  assert_same(plain, packed_run)


@pytest.mark.slow
async def test_packed_rows_on_four_devices():
  groups = prompted(LIGHT)
  plain = await train(LIGHT, groups, TransformerLM)
  mesh = make_mesh(MeshOptions(data=1, fsdp=2, tensor=2), devices=jax.devices()[:4])
  packed_run = await train(LIGHT, groups, TransformerLM, packing=packed(96), mesh=mesh)
  assert_same(plain, packed_run)


def scored(layout, groups):
  """A transformer's weighted log-probs of groups, their gradient, slots that it took.

  On packed rows, or on the rectangle where the layout has no plan.
  """
  batch, _, (plan,) = layout.build_batch(groups, 0)
  weights = np.random.default_rng(1).normal(size=batch.tokens.shape)
  weights = np.where(batch.action_mask, weights, 0).astype(np.float32)
  plans = isinstance(plan, packing_plan.PackingPlan)

  def total(params):
    weighted_sum = 0.0
    for i in range(int(plan.num_micro_batches) if plans else 1):
      members = plan.micro_batch_rows[i] if plans else plan[0]
      columns = [jnp.asarray(x[members]) for x in (batch.tokens, batch.segment_ids)]
      rows = plan.packed_rows(i, LENGTH) if plans else None
      logprobs = forward_pass.compute_outputs(
        toy.model(), params, *columns, packed_rows=rows
      ).logprobs
      weighted_sum += (np.where(members >= 0, weights[members].T, 0).T * logprobs).sum()
    return weighted_sum

  slots = (plan.origin >= 0).sum() if plans else batch.tokens.size
  return *jax.jit(jax.value_and_grad(total))(toy.params()), slots


def attention_inputs(layout, groups, model):
  """Names of what the model is given beside packed rows of the first micro-batch."""
  batch, _, (plan,) = layout.build_batch(groups, 0)
  ids = batch.segment_ids[plan.micro_batch_rows[0]]
  names = []

  def trace(rows, ids):
    names.extend(forward_pass._attention_options(model, rows, ids))

  jax.eval_shape(trace, plan.packed_rows(0, LENGTH), ids)
  return names


def test_rows_attend_on_a_rectangle_where_that_is_less_and_on_one_device():
  groups = prompted(registry.make('grpo'), sizes=(4, 3), segments=True)
  builder = layout(8, LENGTH, packed(120, length=120))
  assert attention_inputs(builder, groups, toy.model()) == ['attend_with']
  assert not attention_inputs(
    layout(8, LENGTH, packed(192, length=40)), groups, toy.model()
  )
  for axis, taken in (('tensor', True), ('fsdp', False)):
    sizes = {'data': 1, 'fsdp': 1, 'tensor': 1} | {axis: 2}
    mesh = make_mesh(MeshOptions(**sizes), devices=jax.devices()[:2])
    model = dataclasses.replace(
      toy.model(), constrain=sharding.ShardingConstraint(mesh)
    )
    assert bool(attention_inputs(builder, groups, model)) == taken


@pytest.mark.parametrize(
  ('share', 'length'),
  [
    (True, 120),
    *(slow(*c) for c in ((True, 40), (False, 120))),
  ],
)
def test_the_gradient_through_packed_rows_is_exact(share, length):
  groups = prompted(registry.make('grpo'), sizes=(4, 3), segments=True)
  value, expected, _ = scored(layout(8, LENGTH, ''), groups)
  builder = layout(
    8, LENGTH, packed(max(length, 80), length=length, share_prefix=share)
  )
  packed_value, gradient, slots = scored(builder, groups)
  tokens = sum(len(row.tokens) for group in groups for row in group)
  assert slots < tokens if share else slots == tokens
  assert packed_value == pytest.approx(float(value), rel=1e-5)
  jax.tree.map(
    lambda a, b: np.testing.assert_allclose(a, b, atol=1e-5 * np.abs(b).max()),
    gradient,
    expected,
  )


def drawn(rng, groups, size, longest):
  """Groups of lengths as GSM8K's: log-normal, questions shorter than answers."""
  drawn_groups = []
  for g in range(groups):
    prompt = int(np.clip(rng.lognormal(4.5, 0.35), 30, 250))
    prefix = rng.integers(0, 64, prompt).astype(np.int32)
    rows = []
    for m in range(size):
      length = prompt + int(np.clip(rng.lognormal(5.0, 0.5), 20, longest - prompt))
      row = toy.trajectory(rng, length, env_group=g, sample_index=m)
      row.tokens[:prompt] = prefix
      mask = np.arange(length) >= prompt
      rows.append(dataclasses.replace(row, action_mask=mask))
    drawn_groups.append(rows)
  return drawn_groups


def layout(num_rows, longest, packing, algorithm='grpo', **options):
  learner = toy.learner(
    registry.make(algorithm),
    num_rows=num_rows,
    length_buckets=(longest,),
    packing=packing,
    **options,
  )
  return learner._batch_builder


@pytest.mark.parametrize('share', [False, True])
def test_little_is_padding(share):
  builder = layout(512, 1024, packing_plan.first_fit(share_prefix=share))
  rng, empty = np.random.default_rng(0), []
  for i in range(3):
    groups = drawn(rng, 64, 8, 1024)
    batch, shape, plans = builder.build_batch(groups, i)
    metrics = builder.packing_metrics(batch, shape, plans)
    empty.append(metrics['tokens/padding_share'])
    assert (metrics['tokens/shared_share'] > 0.2) == share
    # Every action is told of once.
    (plan,) = plans
    targets = plan.origin if plan.output_origin is None else plan.output_origin
    for i in range(int(plan.num_micro_batches)):
      members = plan.micro_batch_rows[i]
      there = targets[i][targets[i] >= 0]
      assert len(np.unique(there)) == len(there)
      row, time = members[there // 1024], there % 1024
      seen = np.zeros_like(batch.action_mask)
      seen[row, time] = True
      inside = members[members >= 0]
      assert seen[inside][batch.action_mask[inside]].all()
    assert sorted(plan.micro_batch_rows[plan.micro_batch_rows >= 0]) == list(range(512))
  assert np.mean(empty) <= 0.05, empty


async def varied(steps, ways=1):
  """Programs that so many steps compile, of batches that are all different."""
  rng = np.random.default_rng(0)
  with monitoring.CompileCounter() as counter:
    packing = packed(192, num_parallel=ways)
    options = {'num_rows': 16, 'packing': packing, 'log_entropy': False}
    learner = toy.learner(LIGHT, kind=Bag, length_buckets=(LENGTH,), **options)
    warmup_metrics = await learner.warmup()
    start = counter.count
    late = []
    for step in range(steps):
      sizes = rng.integers(1, 6, rng.integers(2, 7))
      metrics = await learner.update(prompted(LIGHT, sizes, seed=step))
      late.append(metrics['compile/recompiles'])
  return warmup_metrics['compile/programs'] + counter.count - start, late


@pytest.mark.slow
@pytest.mark.parametrize('ways', [1, 2])
async def test_varied_steps_compile_few_programs(ways):
  count, late = await varied(40, ways)
  assert count <= 8
  assert 0 < sum(late) < 4


@pytest.mark.slow
@pytest.mark.parametrize('ways', [1, 2])
async def test_two_hundred_varied_steps_compile_at_most_eight_programs(ways):
  count, _ = await varied(200, ways)
  assert count <= 8


async def test_a_late_compilation_says_why(caplog):
  options = {'num_rows': 4, 'log_entropy': False}
  learner = toy.learner(LIGHT, length_buckets=(16,), **options)
  await learner.warmup()
  await learner.update(toy.groups(sizes=(4,)))
  assert 'after warm-up' not in caplog.text
  metrics = await learner.update(toy.groups(sizes=(4, 4)))
  assert metrics['compile/recompiles'] == 1 and metrics['compile/programs'] > 0
  assert 'compiling the train step for 8 rows of 16 tokens, 8 a micro' in caplog.text
  assert 'after warm-up: a batch of 8 rows, more than the usual 4' in caplog.text


@pytest.mark.parametrize('packing', ['', packed(48), packed(48, num_parallel=2)])
async def test_rows_for_each_player_are_compiled_for_and_change_no_bit(packing):
  options = {'num_rows': 4, 'log_entropy': False, 'length_buckets': (16,)}
  options |= {'packing': packing} if packing else {}
  steps = []
  for count in (1, 2):
    learner = toy.learner(LIGHT, kind=Bag, rows_per_sample=count, **options)
    await learner.warmup()
    steps.append(await learner.update(toy.groups(sizes=(4, 4))))
  assert [metrics['compile/recompiles'] for metrics in steps] == [1, 0]
  for name in ('loss/total', 'optimizer/grad_norm'):
    assert steps[0][name] == steps[1][name] != 0


def test_why_packed_rows_compile_late():
  pack = packing_plan.PackShape(4, 16, 2, 96, True)
  warm = {batch_builder.BatchShape(16, 24, 16, pack)}
  more = batch_builder.BatchShape(
    32, 24, 32, pack._replace(max_micro_batches=8, rows=1)
  )
  reason = monitoring.recompile_reason(more, warm)
  assert 'a batch of 32 rows, more than the usual 16' in reason
  assert 'room for 8 micro-batches an update, more than 4' in reason
  assert 'micro-batches of 1 packed rows' in reason


@pytest.mark.parametrize(
  'plan_options, options, words',
  [
    ({'tokens': 16}, {}, 'set at least tokens=24'),
    ({'tokens': 48, 'length': 20}, {}, 'length=24'),
    ({'tokens': 48, 'length': 64}, {}, 'set at least tokens=64'),
    ({'tokens': 48}, {'num_micro_batches': 2}, 'leave it at 1'),
    ({'tokens': 48, 'sequences': -1}, {}, 'at least 1'),
  ],
)
def test_what_cannot_be_is_refused(plan_options, options, words):
  packing = packing_plan.first_fit(**plan_options)
  with pytest.raises(ConfigError, match=words):
    toy.learner(
      registry.make('grpo'),
      kind=Bag,
      length_buckets=(LENGTH,),
      packing=packing,
      **options,
    )._batch_builder.warmup_shapes()


def test_exact_mode_is_refused():
  model = dataclasses.replace(toy.model(), exact=Exact())
  with pytest.raises(ConfigError, match='packing and exact mode'):
    packed_batch_builder.make_packed_batch_builder(
      packed(), model, single_device_mesh(), num_micro_batches=1
    )
  with pytest.raises(ValueError, match='without prefix_ids'):
    ids = jnp.ones((1, 4), jnp.int32)
    model.policy_outputs(toy.params(), ids, ids, prefix_ids=ids)


def test_rows_that_are_cut_are_refused():
  mesh = make_mesh(MeshOptions(data=1, context=2), devices=jax.devices()[:2])
  with pytest.raises(ConfigError, match=r'leave context out of the mesh'):
    packed_batch_builder.make_packed_batch_builder(
      packed(), toy.model(), mesh, num_micro_batches=1
    )


def test_an_atom_larger_than_a_micro_batch_is_told():
  builder = layout(2, LENGTH, packed(48))
  batch, shape, _ = builder.build_batch(prompted(registry.make('grpo'), (2,)), 0)
  sizes = first_fit_placement.measure_rows(batch, share=False)
  large = dataclasses.replace(sizes, tokens=sizes.tokens + 40)
  with pytest.raises(ValueError, match='ask for more tokens in'):
    first_fit_placement.fill_bins([np.arange(2)], large, shape.pack)


def test_a_packed_row_has_no_more_sequences_than_attention_is_told():
  pack = packing_plan.PackShape(1, 64, 4, 64, False)
  ones, rows = np.ones(40, int), np.arange(40)
  lengths = first_fit_placement.RowLengths(ones, 0 * ones, rows, longest=64)
  bins = first_fit_placement.fill_bins(list(rows[:, None]), lengths, pack)
  counts = [sum(map(len, groups.values())) for groups in bins.rows_by_group]
  assert counts == [16, 16, 8, 0]
  assert packing_plan.most_sequences_per_row(64, 64, 64) == 16


@pytest.mark.parametrize('share', [False, True])
def test_a_micro_batch_has_as_many_sequences_as_asked_for(share):
  rows = drawn(np.random.default_rng(3), 8, 8, 512)
  roomy = packing_plan.first_fit(tokens=4096, length=2048, share_prefix=share)
  tight = dataclasses.replace(roomy, sequences=16)
  of = {}
  for name, packing in (('roomy', roomy), ('tight', tight)):
    _, shape, (plan,) = layout(64, 512, packing).build_batch(rows, 0)
    of[name] = shape.pack.sequences
    inside = plan.micro_batch_rows[: int(plan.num_micro_batches)]
    assert ((inside >= 0).sum(axis=1) <= shape.pack.sequences).all()
    assert sorted(inside[inside >= 0]) == list(range(64))
  assert of['roomy'] == 64 and of['tight'] <= 16
  # So few that attention is on a rectangle of them.
  packs = [shape.pack for shape in layout(64, 512, tight).warmup_shapes()]
  assert [(p.sequences, p.rows, p.length) for p in packs] == [
    (16, 2, 2048),
    (8, 1, 2048),
  ]
  for pack in packs:
    shapes = packing_plan.plan_shapes(single_device_mesh(), pack, 64, (64, 512))
    zero = jax.tree.map(lambda x: np.zeros(x.shape, np.int32), shapes)
    assert unpacked_attention.is_cheaper(zero.packed_rows(0, 512), 'gpu')


@pytest.mark.slow
@pytest.mark.extended
async def test_few_sequences_a_micro_batch_teach_the_same():
  groups = prompted(LIGHT)
  packings = packed(96, num_parallel=1), packed(96, sequences=3, num_parallel=1)
  results = [
    await train(LIGHT, groups, TransformerLM, packing=packing) for packing in packings
  ]
  assert_same(*results)
  assert results[1][1][0]['tokens/micro_batches'] >= 3  # of 8 sequences
  assert results[0][1][0]['tokens/micro_batches'] < 3


def test_pairs_for_which_there_is_no_room_are_refused_before_any_step():
  pairs = layout(8, LENGTH, packed(28, 28), 'dpo')
  with pytest.raises(ConfigError, match='at least tokens=56'):
    pairs.warmup_shapes()
  assert layout(8, LENGTH, packed(48), 'dpo').warmup_shapes()
  with pytest.raises(
    ConfigError, match=r'keeps 2 sequences together.* at least sequences=2'
  ):
    layout(8, LENGTH, packed(48, sequences=1), 'dpo').warmup_shapes()


def test_what_has_a_row_a_group_shares_no_prompts():
  shared = [
    layout(8, LENGTH, packed(48), name).batch_shape().pack.share_prefix
    for name in ('sft', 'grpo')
  ]
  assert shared == [False, True]


def test_prompts_are_shared_as_far_as_they_take_the_same_experts():
  builder = layout(2, LENGTH, packed(48))
  batch, _, _ = builder.build_batch(prompted(registry.make('grpo'), (2,)), 0)
  most = int(first_fit_placement.measure_rows(batch, share=True).shared[0])
  routed = np.zeros((*batch.tokens.shape, 2, 2), np.int16)
  assert most > 1
  for place, shared in ((LENGTH - 1, most), (1, 0)):
    routed[1, place:] = 1
    measured = first_fit_placement.measure_rows(
      batch.replace(routed_experts=routed), share=True
    )
    assert measured.shared.tolist() == [shared] * 2


def test_the_call_string():
  assert parse_packing('') is None
  assert parse_packing('first_fit(tokens=64)') == packing_plan.first_fit(tokens=64)
  with pytest.raises(ConfigError, match='packing'):
    parse_packing('best_fit')
