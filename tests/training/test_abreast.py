"""Micro-batches at once: the step of those one after the other, up to rounding."""

import dataclasses
import threading

import jax
import numpy as np
import pytest

from jaxrl.algorithms import compose
from jaxrl.models.model import Model
from jaxrl.signature import ConfigError
from jaxrl.training import abreast, packing, programs
from jaxrl.training.mesh import make_mesh, single_device_mesh
from tests.training import toy
from tests.training.test_packing import LENGTH, assert_same, prompted, train

SIZES = (4, 3, 4, 2, 1)


def asked(ways, tokens=48):
  return packing.first_fit(tokens=tokens, length=tokens, abreast=ways)


@pytest.mark.parametrize('name', ['grpo', 'ppo', 'cispo'])
async def test_the_step_is_the_same(name):
  algorithm = compose.make(name)
  groups = prompted(algorithm, SIZES)
  one, two, three = [
    await train(algorithm, groups, packing=asked(ways)) for ways in (1, 2, 3)
  ]
  count = one[1][0]['tokens/micro_batches']
  assert count >= 3  # not as many for every way
  assert_same(one, two)
  assert_same(one, three)


async def test_a_run_repeats_its_bits_and_leaves_what_it_was_given():
  algorithm = compose.make('grpo')
  groups, params = prompted(algorithm, SIZES), toy.params()
  before = jax.tree.map(lambda x: x.copy(), params)
  runs = [
    await train(algorithm, groups, Model, packing=asked(2), steps=3) for _ in range(2)
  ]
  first, second = (run[0] for run in runs)
  jax.tree.map(np.testing.assert_array_equal, first, second)
  jax.tree.map(np.testing.assert_array_equal, params, before)


async def test_micro_batches_run_at_the_same_time(monkeypatch):
  seen, both = set(), threading.Barrier(2)
  real = abreast.Step.__call__

  def call(self, *arguments):
    inner = self._micro_batch

    def told(*rest):
      if threading.get_ident() not in seen:
        seen.add(threading.get_ident())
        both.wait(60)  # breaks unless another comes meanwhile
      return inner(*rest)

    self._micro_batch = told
    try:
      return real(self, *arguments)
    finally:
      self._micro_batch = inner

  monkeypatch.setattr(abreast.Step, '__call__', call)
  algorithm = compose.make('grpo')
  await train(algorithm, prompted(algorithm, SIZES), packing=asked(2), steps=1)
  assert len(seen) == 2 and threading.get_ident() not in seen


async def test_an_error_in_one_thread_is_the_step_s(monkeypatch):
  def broken(self, *_):
    raise RuntimeError('a broken micro-batch')

  algorithm = compose.make('grpo')
  monkeypatch.setattr(
    abreast.Step, '__init__', _breaking(abreast.Step.__init__, broken)
  )
  programs._compile_train.cache_clear()
  with pytest.raises(RuntimeError, match='a broken micro-batch'):
    await train(algorithm, prompted(algorithm, SIZES), packing=asked(2))
  programs._compile_train.cache_clear()


def _breaking(init, broken):
  def made(self, *arguments):
    init(self, *arguments)
    self._micro_batch = broken.__get__(self)

  return made


def test_how_many_are_chosen(monkeypatch):
  monkeypatch.setattr(abreast, '_processors', lambda: 8)
  model, one = toy.model(), single_device_mesh()
  assert abreast.ways(0, model, one) == abreast.WAYS
  assert abreast.ways(5, model, one) == 5
  assert abreast.ways(0, dataclasses.replace(model, remat='full'), one) == 1
  several = make_mesh(data=2, devices=jax.devices()[:2])
  assert abreast.ways(0, model, several) == 1
  for ways, mesh in ((2, several), (-1, one)):
    with pytest.raises(ConfigError, match='leave it at 0'):
      abreast.ways(ways, model, mesh)
  monkeypatch.setattr(abreast, '_processors', lambda: 1)
  assert abreast.ways(0, model, one) == 1


def test_one_micro_batch_has_nobody_beside_it():
  def pack(tokens):
    learner = toy.learner(
      compose.make('grpo'), num_rows=4, buckets=(LENGTH,), packing=asked(2, tokens)
    )
    return learner._layout.shape().pack

  assert pack(48).abreast == 2 and pack(4 * LENGTH).abreast == 1
