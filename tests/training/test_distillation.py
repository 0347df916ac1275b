"""Students come closer to their teachers, whichever way they are taught."""

import functools
import pathlib

import jax
import numpy as np
import pytest

from jaxrl.algorithms import registry
from jaxrl.model_loading import LoadedModel
from jaxrl.options import ConfigError
from jaxrl.training.learner import Learner
from jaxrl.training.learner_options import LearnerOptions
from jaxrl.training.optimizers import OptimizerOptions, make_optimizer
from jaxrl.training.parallelism.mesh import single_device_mesh
from jaxrl.training.teacher_scoring import Teachers
from jaxrl.types import Trajectory
from tests.calls import split_options
from tests.marks import extended, slow
from tests.training import toy

VOCABULARY, LENGTH, ROWS = 64, 6, 128
EVERY = np.broadcast_to(np.arange(VOCABULARY, dtype=np.int32), (ROWS, LENGTH, 64))
PROMPT = {'a': 1, 'b': 2}  # the first token of a tag's rows
MODEL = toy.model()


@functools.cache
def teacher(seed):
  """Surer of itself than a random student, and of other things."""
  sharp = jax.tree.map(lambda x: 4 * x, toy.params(seed=seed))
  return LoadedModel(MODEL, sharp, None, pathlib.Path(f'teacher-{seed}'))


@jax.jit
def distributions(params, tokens):
  """`[B, T, V]` log-probs of every token in every place but the first."""
  ones = np.ones((ROWS, LENGTH), np.int32)
  return MODEL.policy_outputs(params, tokens, ones, topk_ids=EVERY).topk_logprobs


def draw(rng, tags, params=None):
  """Rows of these tags in turn, by the policy of `params`, or by chance; as groups."""
  tag_of = [tags[i % len(tags)] for i in range(ROWS)]
  tokens = rng.integers(0, VOCABULARY, (ROWS, LENGTH)).astype(np.int32)
  tokens[:, 0] = [PROMPT[tag] for tag in tag_of]
  logprobs = np.zeros((ROWS, LENGTH), np.float32)
  for t in range(1, LENGTH) if params is not None else ():
    p = np.asarray(distributions(params, tokens)[:, t])
    tokens[:, t] = (p + rng.gumbel(size=p.shape)).argmax(axis=1)
    logprobs[:, t] = p[np.arange(ROWS), tokens[:, t]]
  mask = np.arange(LENGTH) > 0
  return [
    [
      Trajectory(
        tokens=tokens[i],
        action_mask=mask,
        rollout_logprobs=logprobs[i],
        rewards=np.zeros(LENGTH, np.float32),
        weights_version=np.where(mask, 0, -1).astype(np.int32),
        env_group=i,
        tag=tag_of[i],
        is_expert=params is None,
      )
    ]
    for i in range(ROWS)
  ]


def divergence(params, other, tags='ab'):
  """Mean KL(student‖teacher) per token, exact, where the student's own rows lead."""
  groups = draw(np.random.default_rng(99), tags, params)
  tokens = np.stack([group[0].tokens for group in groups])
  s, t = (np.asarray(distributions(x, tokens)) for x in (params, other.params))
  return float((np.exp(s) * (s - t)).sum(-1)[:, 1:].mean())


def learner_of(algorithm, default=None, by_tag=None, **options):
  teachers = Teachers(
    algorithm, default, by_tag, mesh=single_device_mesh(), chunk_rows=ROWS, tags='ab'
  )
  return Learner(
    MODEL,
    toy.params(),
    algorithm,
    num_rows=ROWS,
    length_buckets=(LENGTH,),
    optimizer=make_optimizer(OptimizerOptions(learning_rate=0.015)),
    teachers=teachers,
    **split_options(LearnerOptions, options),
  )


async def taught(learner, steps, *, plays, tags='ab'):
  await learner.warmup()
  rng = np.random.default_rng(0)
  for _ in range(steps):
    groups = draw(rng, tags, learner.params if plays else None)
    metrics = await learner.update(groups)
    assert metrics['compile/programs'] == 0
    if plays:
      assert metrics['mismatch/logprob_difference'] < 1e-4
  return metrics


@pytest.mark.parametrize(
  ('name', 'options'),
  [
    extended('on_policy_distill', {}),
    slow('jsd', {'beta': 0.1, 'policy_loss': 'importance_sampling'}),
    extended('grpo', {'advantage': 'grpo_distill', 'kl_loss': 'none'}),
    slow('distill', {'data_format': 'rollout', 'kind': 'reverse', 'top_k': 16}),
  ],
)
async def test_on_policy_the_student_comes_closer(name, options):
  learner = learner_of(registry.make(name, options), teacher(1))
  before = divergence(learner.params, teacher(1))
  metrics = await taught(learner, 50, plays=True)
  after = divergence(learner.params, teacher(1))
  assert before > 0.5 and after < 0.8 * before, (before, after)
  if name in ('on_policy_distill', 'jsd'):
    assert metrics['advantage/mean'] < 0  # of the student's own, on average


# That each of them leads to its teacher, tests/functional/test_distillation.py shows.
@pytest.mark.slow
@pytest.mark.parametrize('kind', ['forward', 'adaptive'])
async def test_from_files_the_student_comes_closer(kind):
  learner = learner_of(
    registry.make('distill', {'kind': kind, 'top_k': 16}), teacher(1)
  )
  before = divergence(learner.params, teacher(1))
  metrics = await taught(learner, 50, plays=False)
  after = divergence(learner.params, teacher(1))
  assert before > 0.5 and after < 0.8 * before, (before, after)
  assert 0 < metrics['loss/policy'] < before


@pytest.mark.slow
async def test_rows_follow_the_teacher_of_their_tag():
  by_tag = {'b': teacher(2)}
  learner = learner_of(registry.make('distill', {'top_k': 16}), teacher(1), by_tag)
  await taught(learner, 60, plays=False)
  for tag, mine, other in (('a', 1, 2), ('b', 2, 1)):
    near = divergence(learner.params, teacher(mine), tag)
    assert near < 0.75 * divergence(learner.params, teacher(other), tag)


@pytest.mark.slow
async def test_splits_change_no_update():
  """Minibatches of one batch, whole or in parts, and teachers asked in parts."""
  params = []
  for num_micro_batches in (1, 4):
    learner = learner_of(
      registry.make('distill', {'top_k': 8}),
      teacher(1),
      num_micro_batches=num_micro_batches,
    )
    await taught(learner, 2, plays=False)
    params.append(jax.device_get(learner.params))
  jax.tree.map(
    lambda a, b: np.testing.assert_allclose(a, b, rtol=1e-3, atol=1e-4), *params
  )


@pytest.mark.slow
async def test_words_that_come_with_the_data_teach_as_the_teacher_would():
  params = []
  for policy in (teacher(1), None):
    learner = learner_of(registry.make('on_policy_distill'), policy)
    groups = draw(np.random.default_rng(0), 'ab', learner.params)
    if policy is None:
      tokens = np.stack([group[0].tokens for group in groups])
      whole = np.asarray(distributions(teacher(1).params, tokens))
      chosen = np.take_along_axis(whole, tokens[..., None], -1)[..., 0]
      for group, teacher_logprobs in zip(groups, chosen, strict=True):
        group[0].extras['teacher_logprobs'] = teacher_logprobs
    await learner.update(groups)
    params.append(jax.device_get(learner.params))
  jax.tree.map(lambda a, b: np.testing.assert_allclose(a, b, atol=2e-3), *params)


def test_an_algorithm_without_its_teacher_is_told():
  with pytest.raises(ConfigError, match=r'teacher\.checkpoint'):
    toy.learner(registry.make('on_policy_distill'), kind=type(MODEL))
