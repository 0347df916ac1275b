"""Tests that a filter, shaper, sampler or curriculum of another kind is refused."""

import pytest

from jaxrl.data.curricula import make_curriculum
from jaxrl.data.samplers import find_sampler
from jaxrl.rollout.queue.group_filters import make_group_filter
from jaxrl.rollout.queue.reward_shaping import make_reward_shaper
from tests.rollout.fakes import row


def drop(group):
  return len(group) < 2


def shape(group):
  return group


def nothing(group):
  del group


def empty(group):
  return group[:0]


def grade(reply, item):
  return float(reply == item)


class Env:
  def reset(self, *, seed=None, options=None): ...

  def step(self, action): ...


def needs_metric(group):
  return group[0].metrics['only in a run'] > 0


@pytest.mark.parametrize(
  ('function', 'message'),
  [
    (shape, "group filter 'shape' returns a list"),
    (nothing, "group filter 'nothing' returns None"),
    (grade, 'cannot be called as \\(group\\)'),
    (Env, 'Env has no filter'),
  ],
)
def test_what_is_no_group_filter_is_refused(function, message):
  with pytest.raises(ValueError, match=message):
    make_group_filter([function])


@pytest.mark.parametrize(
  ('function', 'message'),
  [
    (drop, "reward shaper 'drop' returns a bool"),
    (nothing, "reward shaper 'nothing' returns None"),
    (empty, "reward shaper 'empty' returns an empty list"),
    (grade, 'cannot be called as \\(group\\)'),
    (Env, 'Env is a class; a reward shaper is a function'),
  ],
)
def test_what_is_no_reward_shaper_is_refused(function, message):
  with pytest.raises(ValueError, match=message):
    make_reward_shaper([function])


def test_what_needs_rows_of_a_run_is_taken_as_it_is():
  assert make_group_filter([needs_metric]) is not None
  assert make_group_filter([drop]) is not None
  assert make_reward_shaper([shape]) is not None


def test_a_filter_of_the_wrong_kind_is_told_by_the_first_real_group():
  def late(group):
    return group if group[0].metrics['only in a run'] else None

  chain = make_group_filter([late])
  assert chain is not None
  with pytest.raises(KeyError):
    chain(0, 0, [row()])
  rows = [row()]
  rows[0].metrics['only in a run'] = 1.0
  with pytest.raises(ValueError, match="group filter 'late' returns a list"):
    chain(0, 0, rows)


@pytest.mark.parametrize('wrong', [drop, Env])
def test_what_is_no_sampler_or_curriculum_is_refused(wrong):
  with pytest.raises(ValueError, match='deriv'):
    find_sampler(wrong)
  with pytest.raises(ValueError, match='is not a curriculum: derive a class'):
    make_curriculum(wrong, [{'question': '1', 'answer': '1'}], 0)
