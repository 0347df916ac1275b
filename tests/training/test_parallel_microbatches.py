"""Micro-batches at once: the step of those one after the other, up to rounding."""

import contextlib
import dataclasses
import functools
import threading

import jax
import numpy as np
import pytest

from jaxrl.models import lora
from jaxrl.models.transformer_lm import TransformerLM
from jaxrl.options import ConfigError
from jaxrl.training.batching import packing_plan
from jaxrl.training.parallelism import parallel_microbatches
from jaxrl.training.parallelism.mesh import MeshOptions, make_mesh, single_device_mesh
from tests.calls import make_algorithm
from tests.marks import extended, slow
from tests.training import toy
from tests.training.bag import Bag
from tests.training.test_packing import LENGTH, assert_same, prompted, train

SIZES = (4, 3, 4, 2, 1)
USUAL = {'num_rows': 16}  # of more, micro-batches are one after the other


def parallel_packing(ways, tokens=48):
  return packing_plan.first_fit(tokens=tokens, length=tokens, num_parallel=ways)


@pytest.fixture
def seen(monkeypatch):
  """How many micro-batches at once, of every step that has several."""
  counts, real = [], parallel_microbatches.ParallelTrainStep.__call__

  def call(self, *arguments):
    counts.append(self._num_parallel)
    return real(self, *arguments)

  monkeypatch.setattr(parallel_microbatches.ParallelTrainStep, '__call__', call)
  return counts


async def test_more_rows_than_usual_are_done_one_after_the_other(seen):
  algorithm = make_algorithm('grpo')
  groups = prompted(algorithm, SIZES)
  few = {'num_rows': 8}
  one, two = [
    await train(algorithm, groups, packing=parallel_packing(ways), **few)
    for ways in (1, 2)
  ]
  assert not seen
  assert_same(one, two)


@pytest.mark.parametrize('name', ['ppo', *(slow(n) for n in ('grpo', 'cispo'))])
async def test_the_step_is_the_same(name, seen):
  algorithm = make_algorithm(name)
  groups = prompted(algorithm, SIZES)
  one, two, three = [
    await train(algorithm, groups, packing=parallel_packing(ways), **USUAL)
    for ways in (1, 2, 3)
  ]
  assert seen == [2, 2, 3, 3]
  count = one[1][0]['tokens/micro_batches']
  assert count >= 3  # not as many for every way
  assert_same(one, two)
  assert_same(one, three)


WHOLE = {'num_minibatches': 2, 'ppo_epochs': 2}


@pytest.mark.slow
@pytest.mark.parametrize(
  ('parts', 'changes', 'options'),
  [
    ({}, {}, WHOLE),
    ({}, {'lora': lora.lora_adapters(rank=2, targets='q,o,up')}, {}),
    extended({'name': 'ppo', 'critic_warmup': 1}, {}, {}),
    extended({'kl_controller': 'adaptive(target=1., horizon=50.)'}, {}, {}),
  ],
)
async def test_a_transformer_s_step_is_the_same(parts, changes, options, seen):
  parts = dict(parts)
  algorithm = make_algorithm(parts.pop('name', 'grpo'), parts)
  groups, kind = prompted(algorithm, SIZES), model_kind(**changes)
  one, two = [
    await train(
      algorithm, groups, kind, packing=parallel_packing(ways), **USUAL, **options
    )
    for ways in (1, 2)
  ]
  assert len(seen) >= 2 and set(seen) == {2}
  assert one[1][0]['tokens/micro_batches'] >= 2
  assert_same(one, two)


@pytest.mark.parametrize(
  'options',
  [
    {'packing': parallel_packing(2)},
    slow({'packing': parallel_packing(1)}),
    slow({'num_micro_batches': 2}),
  ],
)
async def test_unrolled_layers_train_as_scanned_ones(options):
  algorithm = make_algorithm('grpo')
  groups = prompted(algorithm, SIZES)
  unrolled, scanned = [
    await train(
      algorithm,
      groups,
      functools.partial(TransformerLM, unroll=layers),
      **USUAL,
      **options,
    )
    for layers in (toy.CONFIG.num_layers, 1)
  ]
  assert_same(unrolled, scanned)


def model_kind(**changes):
  """Model, or one with changes that `toy.learner` does not know of."""
  return functools.partial(_changed, changes)


def _changed(changes, config):
  return TransformerLM(config.replace(**changes))


@pytest.mark.slow
async def test_a_run_repeats_its_bits():
  algorithm = make_algorithm('grpo')
  groups = prompted(algorithm, SIZES)
  runs = [
    await train(
      algorithm, groups, TransformerLM, packing=parallel_packing(2), steps=3, **USUAL
    )
    for _ in range(2)
  ]
  first, second = (run[0] for run in runs)
  jax.tree.map(np.testing.assert_array_equal, first, second)


@contextlib.contextmanager
def around(monkeypatch, wrap):
  """In the place of a step's program of micro-batches `wrap` of it runs."""
  real = parallel_microbatches.ParallelTrainStep.__call__

  def call(self, *arguments):
    with monkeypatch.context() as patched:
      patched.setattr(self, '_add_micro_batch', wrap(self._add_micro_batch))
      return real(self, *arguments)

  with monkeypatch.context() as patched:
    patched.setattr(parallel_microbatches.ParallelTrainStep, '__call__', call)
    yield


async def test_micro_batches_run_at_the_same_time(monkeypatch):
  threads, both = set(), threading.Barrier(2)

  def wrap(inner):
    def wait_for_other(*rest):
      if threading.get_ident() not in threads:
        threads.add(threading.get_ident())
        both.wait(60)  # breaks unless another comes meanwhile
      return inner(*rest)

    return wait_for_other

  algorithm = make_algorithm('grpo')
  groups = prompted(algorithm, SIZES)
  with around(monkeypatch, wrap):
    await train(algorithm, groups, packing=parallel_packing(2), steps=1, **USUAL)
  assert len(threads) == 2 and threading.get_ident() not in threads


async def test_an_error_in_one_thread_leaves_the_state_as_it_was(monkeypatch):
  """What a step is given is donated by its last program alone."""
  algorithm = make_algorithm('grpo')
  options = {
    'kind': Bag,
    'length_buckets': (LENGTH,),
    'packing': parallel_packing(2),
    **USUAL,
  }
  one, two = (toy.learner(algorithm, **options) for _ in range(2))
  groups = prompted(algorithm, SIZES)

  def wrap(inner):
    def broken(*rest):
      if rest[-1] == 1:
        raise RuntimeError('a broken micro-batch')
      return inner(*rest)

    return broken

  await one.update(groups)
  await two.update(groups)
  fails = pytest.raises(RuntimeError, match='a broken micro-batch')
  with around(monkeypatch, wrap), fails:
    await one.update(groups)
  again, wanted = [await learner.update(groups) for learner in (one, two)]
  assert again['loss/total'] == wanted['loss/total']
  jax.tree.map(np.testing.assert_array_equal, one.params, two.params)


def test_how_many_are_chosen(monkeypatch):
  monkeypatch.setattr(parallel_microbatches, 'cpu_count', lambda: 8)
  model, one = toy.model(), single_device_mesh()
  assert (
    parallel_microbatches.choose_num_parallel(0, model, one)
    == parallel_microbatches.MAX_PARALLEL
  )
  assert parallel_microbatches.choose_num_parallel(5, model, one) == 5
  assert (
    parallel_microbatches.choose_num_parallel(
      0, dataclasses.replace(model, unroll=1), one
    )
    == parallel_microbatches.MAX_PARALLEL
  )
  for deep in ({'remat': 'full'}, {'remat': 'full', 'unroll': 2}):
    assert (
      parallel_microbatches.choose_num_parallel(
        0, dataclasses.replace(model, **deep), one
      )
      == 1
    )
  several = make_mesh(MeshOptions(data=2), devices=jax.devices()[:2])
  assert parallel_microbatches.choose_num_parallel(0, model, several) == 1
  with pytest.raises(ConfigError, match='the mesh has 2 of cpu: leave it at 0'):
    parallel_microbatches.choose_num_parallel(2, model, several)
  monkeypatch.setattr(parallel_microbatches, 'cpu_count', lambda: 1)
  assert parallel_microbatches.choose_num_parallel(0, model, one) == 1


def test_one_micro_batch_has_nobody_beside_it():
  def ways(num_parallel, **options):
    packing = packing_plan.first_fit(**options, num_parallel=num_parallel)
    learner = toy.learner(
      make_algorithm('grpo'), num_rows=4, length_buckets=(LENGTH,), packing=packing
    )
    return {shape.pack.num_parallel for shape in learner.warmup_shapes}

  assert ways(2, tokens=48) == {2}
  assert ways(2, tokens=4 * LENGTH) == {1}  # in fine micro-batches as in usual ones
  assert ways(2, tokens=4 * LENGTH, sequences=2) == {2}
  assert ways(64, tokens=2 * LENGTH) == {2}  # there are no more


def test_fewer_than_none_are_refused_before_any_learner():
  with pytest.raises(ConfigError, match=r'num_parallel=-1\): must be at least 1, or 0'):
    packing_plan.check_packing(
      packing_plan.first_fit(num_parallel=-1),
      exact=False,
      context=1,
      num_micro_batches=1,
    )
