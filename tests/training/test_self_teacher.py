"""A self-teacher scores the row's own tokens after another prompt, and only those."""

import dataclasses
import functools

import jax
import numpy as np
import pytest

from jaxrl.algorithms import registry
from jaxrl.component_calls import ComponentCall
from jaxrl.options import ConfigError
from jaxrl.training import monitoring, train_state
from jaxrl.training.batching.batch_builder import collate
from jaxrl.training.checkpointing import Checkpointer
from jaxrl.training.learner import Learner
from jaxrl.training.learner_options import LearnerOptions
from jaxrl.training.optimizers import OptimizerOptions, make_optimizer
from jaxrl.training.parallelism import sharding
from jaxrl.training.parallelism.mesh import MeshOptions, make_mesh, single_device_mesh
from jaxrl.training.self_teacher_scoring import SelfTeacherScorer
from jaxrl.training.train_state import StepSpec
from jaxrl.types import TEACHER_PROMPT_KEY
from tests.marks import slow
from tests.training import toy

LENGTH, ROWS, TOP_K = 16, 8, 5
PACKED = ComponentCall('first_fit', {'tokens': 2 * LENGTH})
MODEL, PARAMS = toy.model(), jax.tree.map(lambda x: 3 * x, toy.params(seed=1))
OTHER = jax.tree.map(lambda x: 3 * x, toy.params(seed=2))


def algorithm(name='sdpo', **options):
  return registry.make(name, {'top_k': TOP_K, **options})


def scorer(made, mesh=None, **options):
  spec = StepSpec(MODEL, made, top_k=TOP_K)
  options = {'chunk_rows': 3, 'longest': LENGTH, 'temperature': 0.7} | options
  return SelfTeacherScorer(spec, mesh or single_device_mesh(), **options)


def groups(prompted=(0, 1, 3, 5, 6)):
  """Eight rows, of which these have a prompt for their teacher."""
  rng, made = np.random.default_rng(3), toy.groups(sizes=(4, 4), lengths=(6, LENGTH))
  for i, row in enumerate(row for group in made for row in group):
    if i in prompted:
      prompt = rng.integers(1, 64, rng.integers(1, 20)).astype(np.int32)
      row.extras[TEACHER_PROMPT_KEY] = prompt
  return made


def on_devices(batch_groups, mesh=None):
  layout = sharding.rows_sharding(mesh or single_device_mesh())
  return jax.device_put(collate(batch_groups, (LENGTH,), ROWS), layout)


@functools.partial(jax.jit, static_argnames='top_k')
def run(params, tokens, segments, **options):
  return MODEL.policy_outputs(params, tokens, segments, temperature=0.7, **options)


def plainly(params, tokens, topk_ids=None, **options):
  """A forward pass of one row alone; `[T]` outputs."""
  size, room = len(tokens), 2 * LENGTH + LENGTH

  def padded(x):
    return np.pad(np.asarray(x, np.int32), [(0, room - size)] + [(0, 0)] * (x.ndim - 1))

  if topk_ids is not None:
    options['topk_ids'] = padded(topk_ids)[None]
  segments = padded(np.ones(size))[None]
  out = run(params, padded(np.asarray(tokens))[None], segments, **options)
  return jax.tree.map(lambda x: np.asarray(x)[0, :size], out)


@pytest.mark.parametrize(
  'support, who',
  [
    ('student', 'initial'),
    *(slow('student', 'live'), slow('teacher', 'live'), slow('teacher', 'initial')),
  ],
)
def test_rows_are_scored_after_the_prompt_of_their_teacher(support, who):
  """Row by row, as a forward pass of prompt and reply alone says."""
  made = algorithm('opsd' if support == 'teacher' else 'sdft', teacher_params=who)
  batch_groups = groups()
  scoring = scorer(made)
  scoring.follow(PARAMS, None if who == 'live' else OTHER)
  fields = scoring.score(on_devices(batch_groups), batch_groups)
  teacher = PARAMS if who == 'live' else OTHER
  rows = [row for group in batch_groups for row in group]
  for i, row in enumerate(rows):
    prompt = row.extras.get(TEACHER_PROMPT_KEY)
    assert np.all(np.asarray(fields['teacher_mask'])[i] == (prompt is not None))
    start, size = int(np.argmax(row.action_mask)), len(row.tokens)
    before = row.tokens[:start] if prompt is None else prompt
    tokens = np.concatenate([before, row.tokens[start:]])
    reply = slice(len(before), len(tokens))
    ids = plainly(PARAMS, row.tokens, top_k=TOP_K).topk_ids[start:]
    if support == 'teacher':
      ids = plainly(teacher, tokens, top_k=TOP_K).topk_ids[reply]
    asked = np.zeros((len(tokens), TOP_K), np.int32)
    asked[reply] = ids
    wanted = plainly(teacher, tokens, topk_ids=asked)
    got = {name: np.asarray(x)[i, start:size] for name, x in fields.items()}
    np.testing.assert_array_equal(got['teacher_topk_ids'], ids)
    np.testing.assert_allclose(
      got['teacher_topk_logprobs'], wanted.topk_logprobs[reply], atol=1e-4
    )


def test_a_mesh_changes_nothing():
  made, mesh = algorithm(), make_mesh(MeshOptions(data=2, fsdp=2, tensor=2))
  batch_groups, results = groups(), []
  for each in (None, mesh):
    scoring = scorer(made, each)
    spec = StepSpec(MODEL, made, top_k=TOP_K)
    shapes = train_state.params_shapes(spec, each or single_device_mesh())
    placed = [train_state.place_params(x, shapes) for x in (PARAMS, OTHER)]
    scoring.follow(*placed)
    fields = scoring.score(on_devices(batch_groups, each), batch_groups)
    results.append(jax.device_get(fields))
  mask = np.asarray(collate(batch_groups, (LENGTH,), ROWS).action_mask)
  for name, value in results[0].items():
    np.testing.assert_allclose(value[mask], results[1][name][mask], atol=1e-4)


def test_a_prompt_without_room_is_left_out_and_told(caplog):
  batch_groups = groups()
  longest = max(
    len(row.extras.get(TEACHER_PROMPT_KEY, ()))
    for group in batch_groups
    for row in group
  )
  scoring = scorer(algorithm(context_tokens=longest - 1, teacher_params='live'))
  for _ in range(2):
    scoring.follow(PARAMS, None)
    fields = scoring.score(on_devices(batch_groups), batch_groups)
    assert np.asarray(fields['teacher_mask']).any(axis=1).sum() == 4
  (record,) = caplog.records
  assert '1 rows of 8 are not distilled: their teacher' in record.getMessage()


def learner(made, params=PARAMS, **options):
  return Learner(
    MODEL,
    params,
    made,
    num_rows=ROWS,
    length_buckets=(LENGTH,),
    optimizer=make_optimizer(OptimizerOptions(learning_rate=0.01, warmup_steps=0)),
    options=LearnerOptions(**options),
  )


async def test_the_average_follows_and_resumes_to_the_bit(tmp_path):
  """(1 − r)·average + r·student before each batch; a checkpoint has it."""
  made, rate = algorithm(teacher_rate=0.25), 0.25
  one = learner(made)
  await one.warmup()
  average = PARAMS
  for step in range(3):
    move = lambda a, p: (1 - rate) * a + rate * p  # noqa: E731
    average = jax.tree.map(move, average, jax.device_get(one.params))
    metrics = await one.update(groups())
    assert metrics['compile/programs'] == 0
    assert 0 < metrics['policy/taught'] < 1 and metrics['optimizer/grad_norm'] > 0
    if step == 1:
      checkpointer = Checkpointer(tmp_path)
      await one.save(checkpointer, {}, wait=True)
  kept = one.device_arrays['reference']
  close = lambda a, b: np.testing.assert_allclose(a, b, rtol=1e-5, atol=1e-6)  # noqa: E731
  jax.tree.map(close, average, jax.device_get(kept))
  two = learner(made, OTHER)
  await two.restore(checkpointer)
  await two.update(groups())
  jax.tree.map(np.testing.assert_array_equal, kept, two.device_arrays['reference'])
  jax.tree.map(np.testing.assert_array_equal, one.params, two.params)


async def test_rows_without_a_prompt_teach_nothing():
  """A batch of them moves nothing; they stay out of a mean over tokens."""
  made = algorithm(teacher_params='live')
  still = learner(made)
  metrics = await still.update(groups(prompted=()))
  assert metrics['loss/policy'] == 0 == metrics['optimizer/grad_norm']
  whole, half = groups(prompted=range(4)), groups(prompted=range(4))
  results = []
  for each in (whole, half[:1]):
    one = learner(dataclasses.replace(made))
    results.append((await one.update(each))['loss/policy'])
  np.testing.assert_allclose(results[0], results[1], rtol=1e-4)


@pytest.mark.parametrize('options', [{'num_micro_batches': 2}, {'packing': PACKED}])
async def test_splits_and_packing_change_no_update(options):
  params = []
  for chosen in ({}, options):
    one = learner(algorithm(teacher_params='live'), **chosen)
    await one.update(groups())
    params.append(jax.device_get(one.params))
  jax.tree.map(lambda a, b: np.testing.assert_allclose(a, b, atol=2e-3), *params)


async def test_nothing_compiles_after_warmup():
  one = learner(algorithm('sdft'))
  await one.warmup()
  for prompted in ((), (0, 1), range(8)):
    with monitoring.CompileCounter() as counter:
      await one.update(groups(prompted))
    assert counter.count == 0


def test_what_cannot_be_is_told():
  with pytest.raises(ConfigError, match='the moving average and the reference'):
    registry.make('sdpo', {'kl_loss': 'k3'})
  with pytest.raises(ValueError, match=r'top_k=65: the policy only has 64 tokens'):
    spec = StepSpec(MODEL, algorithm(top_k=65), top_k=65)
    SelfTeacherScorer(spec, single_device_mesh(), chunk_rows=1, longest=8)
