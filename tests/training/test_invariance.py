"""A step is the same however it is split, ordered, padded and spread over devices."""

import dataclasses
import functools

import jax
import numpy as np
import pytest

from jaxrl.models.transformer_lm import TransformerLM
from jaxrl.training.learner import Learner
from jaxrl.training.optimizers import OptimizerOptions
from jaxrl.training.parallelism.mesh import MeshOptions, make_mesh
from tests.calls import make_algorithm, make_optimizer
from tests.training import toy
from tests.training.test_preference_pairs import pairs
from tests.training.test_whole_batch import mixed

# A large eps makes the update a smooth function of the gradient, so that rounding
# stays rounding; Adam's own would turn a sign of 1e-9 into a whole step.
SMOOTH = {'learning_rate': 1e-2, 'name': 'adamw(eps=1e-2)'}
RAGGED = (4, 3)  # padding rows, unequal groups
ADAPTIVE = {'kl_controller': 'adaptive(target=.01, horizon=70.)', 'kl_coef': 0.1}
ALGORITHMS = {
  'grpo': ('grpo', {}),
  'gspo': ('gspo', {'clip_low': 0.1, 'clip_high': 0.1}),
  'ppo': ('ppo', {}),
  'dpo': ('dpo', {}),
  'mix': ('mix', {'mu': 0.3}),
  'm2po': ('m2po', {'threshold': 0.005}),
  'corrected': ('grpo', {'correction': 'icepop(low=.8, high=1.2)'}),
  'adaptive': ('grpo', ADAPTIVE),
  'opmd': ('opmd', {}),
  'sft': ('sft', {}),
}
# name: options of the learner, of one that must do the same, and what happens to rows
SPLITS = {
  'rows': ({}, {}, 'shuffled'),
  'padding': ({}, {'num_rows': 16, 'length_buckets': (32,)}, ''),
  'halves': ({}, {'num_micro_batches': 2}, ''),
  'quarters': ({}, {'num_micro_batches': 4}, 'shuffled'),
  'devices': ({}, {'mesh': {'fsdp': 4, 'tensor': 2}}, ''),
  'all': (
    {},
    {'mesh': {'data': 8}, 'num_micro_batches': 2, 'num_rows': 16},
    'shuffled',
  ),
  'order': (
    {'num_minibatches': 2},
    {'num_minibatches': 2, 'num_micro_batches': 2},
    'dealt',
  ),
}
# What must not be all or nothing, lest the test say little.
MASKS = {'m2po': ('policy/clip_fraction',), 'corrected': ('correction/masked',)}


def data(name):
  if name == 'dpo':
    return pairs(4)
  return mixed() if name == 'mix' else toy.groups(sizes=RAGGED)


def shuffled(groups):
  """Groups and their members in another order."""
  return [group[1:] + group[:1] for group in reversed(groups)]


class Dealt:
  """A layout that deals each minibatch's rows from the last to the first."""

  def __init__(self, layout):
    self._layout = layout

  def __getattr__(self, name):
    return getattr(self._layout, name)

  def build_batch(self, groups, step):
    batch, shape, indices = self._layout.build_batch(groups, step)
    return batch, shape, [np.flip(index) for index in indices]


async def train(name, kind, options, what=''):
  """Parameters and metrics of three updates; nothing compiles in any."""
  spec, overrides = ALGORITHMS[name]
  options = dict(options)
  if 'mesh' in options:
    options['mesh'] = make_mesh(MeshOptions(**options['mesh']))
  learner = toy.learner(
    make_algorithm(spec, overrides),
    kind=kind,
    changes={'value_head': True} if name == 'ppo' else {},
    optimizer=make_optimizer(OptimizerOptions(**SMOOTH)),
    **options,
  )
  if what == 'dealt':
    learner._batch_builder = Dealt(learner._batch_builder)
  groups = shuffled(data(name)) if what == 'shuffled' else data(name)
  await learner.warmup()
  metrics = [await learner.update(groups) for _ in range(3)]
  assert all(row['compile/programs'] == 0 for row in metrics)
  return jax.tree.map(np.asarray, learner.params), metrics


@functools.cache
def plain_results():
  return {}


async def plain(name, kind=TransformerLM, options=None):
  options = options or {}
  key = (name, kind, tuple(options.items()))
  if key not in plain_results():
    plain_results()[key] = await train(name, kind, options)
  return plain_results()[key]


async def assert_same(name, kind, base, options, what=''):
  params, metrics = await plain(name, kind, base)
  others, other_metrics = await train(name, kind, options, what)
  start = toy.params(kind, **({'value_head': True} if name == 'ppo' else {}))
  moved = jax.tree.map(lambda a, b: float(np.abs(a - b).max()), params, start)
  assert max(jax.tree.leaves(moved)) > 1e-3  # else equality says nothing
  jax.tree.map(
    lambda a, b: np.testing.assert_allclose(a, b, rtol=0, atol=2e-6), params, others
  )
  for before, after in zip(metrics, other_metrics, strict=True):
    assert before.keys() == after.keys()
    for key, value in before.items():
      if not key.startswith(('time/', 'tokens/', 'compile/')):
        assert after[key] == pytest.approx(value, rel=2e-4, abs=1e-5), key


MATRIX = [
  (name, split) for name in ('grpo', 'gspo', 'ppo', 'dpo') for split in SPLITS
] + [
  (name, split)
  for name in ('mix', 'm2po', 'corrected', 'adaptive')
  for split in ('quarters', 'all', 'order')
]
# The rest of the matrix is slow by its number alone.
FAST = {
  'grpo': ('padding', 'quarters', 'devices', 'order'),
  'gspo': ('all',),
  'ppo': ('all',),
  'dpo': ('all',),
  'mix': ('all',),
  'm2po': ('quarters',),
  'corrected': ('all',),
  'adaptive': (),
}


def marked(name, split, fast, *more):
  """An algorithm's splits run in one process, where they share its plain results."""
  slow = () if fast else (pytest.mark.slow, *more)
  group = pytest.mark.xdist_group(f'invariance-{name}')
  return pytest.param(name, split, marks=(group, *slow))


@pytest.mark.parametrize(
  'name, split', [marked(*case, case[1] in FAST[case[0]]) for case in MATRIX]
)
async def test_splitting_changes_nothing(name, split):
  await assert_same(name, toy.Bigram, *SPLITS[split])
  _, metrics = await plain(name, toy.Bigram)
  for key in MASKS.get(name, ()):
    assert 0 < metrics[0][key] < 1, key


# All splits at once, divided tensors, and another order of the rows. The arithmetic of
# each split alone is in the matrix above, and formulas are tested in tests/functional.
WHOLE = [
  *((name, 'all') for name in ALGORITHMS),
  *(('grpo', 'devices'), ('grpo', 'order'), ('dpo', 'order')),
]


GATE = (('grpo', 'all'), ('ppo', 'all'), ('corrected', 'all'), ('dpo', 'order'))


@pytest.mark.parametrize(
  'name, split',
  [
    marked(*case, False, *(() if case in GATE else (pytest.mark.extended,)))
    for case in WHOLE
  ],
)
async def test_splitting_a_transformers_batch_changes_nothing(name, split):
  await assert_same(name, TransformerLM, *SPLITS[split])


@pytest.mark.slow
@pytest.mark.xdist_group('invariance-grpo')
async def test_bfloat16_compute_keeps_float32_state():
  model, sft = dataclasses.replace(toy.model(), dtype='bfloat16'), make_algorithm('sft')
  learner = Learner(model, toy.params(), sft, num_rows=8, length_buckets=(16,))
  low = await learner.update(toy.groups(sizes=RAGGED))
  full = (await plain('grpo'))[1][0]
  assert {x.dtype.name for x in jax.tree.leaves(learner.params)} == {'float32'}
  assert low['policy/logprob'] == pytest.approx(full['policy/logprob'], abs=0.02)
  assert low['policy/logprob'] != full['policy/logprob']
