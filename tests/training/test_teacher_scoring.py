"""Teachers score their own rows, as a plain forward pass would, and only those."""

import functools
import pathlib

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jaxrl.algorithms import registry
from jaxrl.functional import advantages, losses
from jaxrl.model_loading import LoadedModel
from jaxrl.options import ConfigError
from jaxrl.training import monitoring, teacher_scoring
from jaxrl.training.batching.batch_builder import collate
from jaxrl.training.parallelism import sharding
from jaxrl.training.parallelism.mesh import MeshOptions, make_mesh, single_device_mesh
from jaxrl.training.teacher_scoring import Teachers
from jaxrl.types import Algorithm
from tests.training import toy

LENGTH, ROWS = 16, 12
BOTH = Algorithm(
  advantage=advantages.on_policy_distill,
  policy_loss=functools.partial(losses.distill, top_k=3),
)
ON_POLICY = Algorithm(
  advantage=advantages.on_policy_distill, policy_loss=losses.ppo_clip
)


def policy(seed, **changes):
  params = jax.tree.map(lambda x: 3 * x, toy.params(seed=seed, **changes))
  return LoadedModel(
    toy.model(**changes), params, None, pathlib.Path(f'teacher-{seed}')
  )


def teachers(algorithm=BOTH, default=None, by_tag=None, **options):
  options = {
    'mesh': single_device_mesh(),
    'chunk_rows': 3,
    'temperature': 0.7,
  } | options
  return Teachers(algorithm, default, by_tag, **options)


def groups(tags=('a', 'b', 'a')):
  batch_groups = toy.groups(sizes=(4, 2, 3)[: len(tags)])
  for group, tag in zip(batch_groups, tags, strict=True):
    for row in group:
      row.tag = tag
  return batch_groups


def packed(groups, mesh=None):
  mesh = mesh or single_device_mesh()
  batch = collate(groups, (LENGTH,), ROWS)
  return jax.device_put(batch, sharding.rows_sharding(mesh))


def plainly(policy, batch, top_k=3, temperature=0.7):
  run = jax.jit(
    lambda params, tokens, segments: policy.model.policy_outputs(
      params, tokens, segments, temperature=temperature, top_k=top_k
    )
  )
  return run(policy.params, np.asarray(batch.tokens), np.asarray(batch.segment_ids))


def check(columns, batch, row_policies):
  """Every row is as its own policy scores it; padding is 0."""
  plain = {id(p): plainly(p, batch) for p in row_policies}
  for i in range(ROWS):
    for name, key in (
      ('teacher_logprobs', 'logprobs'),
      ('teacher_topk_ids', 'topk_ids'),
      ('teacher_topk_logprobs', 'topk_logprobs'),
    ):
      if i < len(row_policies):
        wanted = getattr(plain[id(row_policies[i])], key)[i]
      else:
        wanted = np.zeros_like(columns[name][i])
      np.testing.assert_allclose(
        columns[name][i], wanted, rtol=1e-4, atol=1e-4, err_msg=name
      )


@pytest.mark.slow
@pytest.mark.extended
def test_rows_go_to_the_teacher_of_their_tag():
  one, other = policy(1), policy(2, num_layers=1)
  batch_groups = groups()
  batch = packed(batch_groups)
  columns = teachers(default=one, by_tag={'b': other}).score(batch, batch_groups)
  check(columns, batch, [one] * 4 + [other] * 2 + [one] * 3)
  assert columns['teacher_topk_ids'].dtype == jnp.int32
  swapped = teachers(default=other, by_tag={'b': one}).score(batch, batch_groups)
  gap = np.abs(columns['teacher_logprobs'] - swapped['teacher_logprobs'])
  assert (gap[:9].max(axis=1) > 0.1).all()


@pytest.mark.slow
def test_several_teachers_of_a_row_have_weights():
  """Σ w·log π; rows of a tag with one teacher have its log-probs alone."""
  one, other = policy(1), policy(2, num_layers=1)
  batch_groups = groups()
  batch = packed(batch_groups)
  both = ((one, 0.75), (other, 0.25))
  scorer = teachers(ON_POLICY, both, {'b': other})
  got = scorer.score(batch, batch_groups)['teacher_logprobs']
  a, b = (np.asarray(plainly(p, batch).logprobs) for p in (one, other))
  mixed = 0.75 * a + 0.25 * b
  is_b = np.arange(9)[:, None] // 2 == 2  # rows 4 and 5
  np.testing.assert_allclose(got[:9], np.where(is_b, b[:9], mixed[:9]), atol=1e-4)
  assert len(scorer.params) == 2
  with pytest.raises(ConfigError, match='no likeliest tokens in common'):
    teachers(BOTH, both)


def test_only_what_is_read_is_given():
  batch_groups = groups()
  batch = packed(batch_groups)
  both = teachers(default=policy(1)).score(batch, batch_groups)
  scorer = teachers(ON_POLICY, policy(1))
  assert scorer.top_k == 0 and scorer.fields == ('teacher_logprobs',)
  columns = scorer.score(batch, batch_groups)
  assert columns.keys() == {'teacher_logprobs'}
  np.testing.assert_allclose(
    columns['teacher_logprobs'], both['teacher_logprobs'], atol=1e-5
  )
  assert teachers(registry.make('grpo')).score(batch, batch_groups) == {}


@pytest.mark.parametrize('axes', [{'data': 8}, {'data': 2, 'fsdp': 2, 'tensor': 2}])
def test_a_mesh_changes_nothing_but_the_layout(axes):
  one, other, mesh = policy(1), policy(2), make_mesh(MeshOptions(**axes))
  batch_groups = groups()
  batch_groups += groups()  # 18 rows
  batch = jax.device_put(
    collate(batch_groups, (LENGTH,), 24), sharding.rows_sharding(mesh)
  )
  scorer = teachers(default=one, by_tag={'b': other}, mesh=mesh)
  columns = scorer.score(batch, batch_groups)
  alone = teachers(default=one, by_tag={'b': other}).score(
    jax.device_put(collate(batch_groups, (LENGTH,), 24), jax.devices()[0]), batch_groups
  )
  for name, shape in scorer.field_shapes(24, LENGTH).items():
    assert columns[name].shape == shape.shape and columns[name].dtype == shape.dtype
    assert columns[name].sharding.is_equivalent_to(shape.sharding, len(shape.shape))
    np.testing.assert_allclose(columns[name], alone[name], atol=1e-4)


def test_nothing_compiles_after_warmup():
  scorer = teachers(default=policy(3, num_layers=1), by_tag={'b': policy(4)})
  scorer.warmup(ROWS, [LENGTH])
  for tags in (('a', 'b', 'a'), ('b', 'b', 'b'), ('a',)):
    batch_groups = groups(tags)
    batch = packed(batch_groups)
    with monitoring.CompileCounter() as counter:
      jax.block_until_ready(scorer.score(batch, batch_groups))
    assert counter.count == 0


def test_a_tag_without_a_teacher_is_told():
  wanted = r"tag 'c' has no teacher.*teacher.by_tag.c=FOLDER"
  with pytest.raises(ConfigError, match=wanted):
    teachers(by_tag={'b': policy(1)}, tags=['b', 'c'])
  scorer = teachers(by_tag={'b': policy(1)}, tags=['b'])
  batch_groups = groups()
  with pytest.raises(ConfigError, match=r"tag 'a' of row a_0_0_0_0_0 has no teacher"):
    scorer.score(packed(batch_groups), batch_groups)


def test_more_tokens_than_there_are_is_an_error():
  algorithm = registry.make('distill', {'top_k': 65})
  with pytest.raises(ConfigError, match=r'top_k=65.*only has 64 tokens'):
    teachers(algorithm, policy(1))
  with pytest.raises(ValueError, match='top_k=0: must be at least 1'):
    teachers(registry.make('distill', {'top_k': 0}), policy(1))


# ---- what comes with the data


def bring(batch_groups, width=3):
  """Puts made-up teachers' words beside every row."""
  rng = np.random.default_rng(0)
  for row in (row for group in batch_groups for row in group):
    shape = (len(row.tokens), width)
    row.extras['teacher_logprobs'] = rng.normal(size=shape[0])
    row.extras['teacher_topk_ids'] = rng.integers(0, 64, shape).tolist()
    row.extras['teacher_topk_logprobs'] = rng.normal(size=shape)
  return batch_groups


@pytest.mark.parametrize('default', [None, policy(1)])
def test_the_datas_own_are_used_as_they_are(default):
  batch_groups = bring(groups(), width=5)
  scorer = teachers(default=default)
  columns = scorer.score(packed(batch_groups), batch_groups)
  for name, shape in scorer.field_shapes(ROWS, LENGTH).items():
    assert columns[name].sharding == shape.sharding
    assert columns[name].dtype == shape.dtype
    scores = np.asarray(columns[name])
    for i, row in enumerate(row for group in batch_groups for row in group):
      column, size = np.asarray(row.extras[name]), len(row.tokens)
      column = column[:, :3] if column.ndim == 2 else column
      np.testing.assert_array_equal(scores[i, :size], column.astype(shape.dtype))
      assert not scores[i, size:].any()
    assert not scores[9:].any()


def test_rows_that_lack_them_are_named():
  batch_groups = bring(groups())
  del batch_groups[1][1].extras['teacher_topk_ids']
  scorer = teachers(default=policy(1))
  with pytest.raises(
    ValueError, match=r'row b_1_0_0_1_0.*lack teacher_topk_ids.*other'
  ):
    scorer.score(packed(batch_groups), batch_groups)
  batch_groups = groups()
  with pytest.raises(ValueError, match=r'row a_0_0_0_0_0.*there is no teacher to ask'):
    teachers().score(packed(batch_groups), batch_groups)


@pytest.mark.parametrize('name', ['teacher_logprobs', 'teacher_topk_logprobs'])
def test_brought_columns_of_another_length_are_told(name):
  batch_groups = bring(groups())
  batch_groups[0][2].extras[name] = batch_groups[0][2].extras[name][:-1]
  with pytest.raises(ValueError, match=rf'row a_0_0_0_2_0: {name}.*tokens ask for'):
    teachers().score(packed(batch_groups), batch_groups)


def test_fewer_brought_tokens_than_top_k_are_told():
  batch_groups = bring(groups(), width=2)
  with pytest.raises(ValueError, match='row a_0_0_0_0_0: teacher_topk_ids'):
    teachers().score(packed(batch_groups), batch_groups)


def test_on_a_gpu_rows_of_one_sequence_need_no_mask(monkeypatch):
  """Attention does without if it knows what a row holds."""
  monkeypatch.setattr(teacher_scoring, 'platform_of', lambda platform: 'gpu')
  known, compile_score = [], teacher_scoring._compile_score

  def remember(spec, *arguments):
    known.append(spec.model.row_segments)
    return compile_score(spec, *arguments)

  monkeypatch.setattr(teacher_scoring, '_compile_score', remember)
  scorer, rows = teachers(default=policy(1)), groups()
  scorer.score(packed(rows), rows)
  first = rows[0][0]
  first.extras['segments'] = [2, len(first.tokens) - 2]
  scorer.score(packed(rows), rows)
  assert known == [1, 0]
