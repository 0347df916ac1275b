"""Filters: by name, by call string, by dotted path, joined; never in validation."""

import numpy as np
import pytest

from jaxrl.group_stats import sample_scores
from jaxrl.rollout.queue import group_filters
from jaxrl.rollout.queue.group_pipeline import DropReason, GroupPipeline
from tests.calls import make_group_filter
from tests.rollout.fakes import row


class Odd:
  """A user's filter."""

  seen = ()

  def __init__(self, config, env_manager_config, mode, *, modulus: int = 2):
    Odd.seen = (config, env_manager_config, mode, modulus)

  def filter(self, group_id, episode_id, group):
    return group_id % self.seen[3] == 1


def group(*values, **fields):
  return [row(value, member, **fields) for member, value in enumerate(values)]


def judged(*pairs):
  """Members of (score, accuracy)."""
  return [
    row(value, member, metrics={'accuracy': accuracy})
    for member, (value, accuracy) in enumerate(pairs)
  ]


def dropped(spec, rows, **options):
  """The name of the filter that drops `rows`, or None."""
  drop = make_group_filter(spec, **options)(0, 0, rows)
  return drop and drop.name


def test_reward_std_drops_groups_without_a_difference():
  assert dropped('reward_std', group(1, 1, 1))
  assert dropped('reward_std', group(1))
  assert dropped('reward_std(threshold=0)', group(*[0.7] * 7))
  assert not dropped('reward_std', group(1, 0, 1))


def test_options_by_call_string():
  assert dropped('reward_std(threshold=0.6)', group(0, 1))
  assert not dropped('reward_std(threshold=0.6)', group(0, 2))


@pytest.mark.parametrize(
  ('of', 'kept'),
  [('mean', [False, True, False]), ('max', [False, False, False])],
)
def test_score_range(of, kept):
  spec = f"score_range(low=0.2, high=0.8, of='{of}')"
  assert [not dropped(spec, group(*g)) for g in ([0, 0], [0, 1], [1, 1])] == kept


def test_accuracy_goes_by_what_the_environment_says_not_by_the_reward():
  assert not dropped('accuracy', judged((1.0, 1), (1.0, 0)))
  assert dropped('accuracy', judged((0.3, 1), (1.0, 1), (-1, 1)))
  assert dropped('accuracy', judged((0.3, 0), (0.1, 0.5)))
  assert dropped('accuracy', group(0.1, 0.0, 0.5))  # none reaches 1
  assert not dropped('accuracy', group(0.1, 1.0))
  assert not dropped('accuracy(right=0.5)', group(0.1, 0.5))


def test_accuracy_counts_attempts_of_many_rows_once():
  wrong = [row(0, 0), row(0, 0, turn=1, metrics={'accuracy': 0})]
  right = [row(0, 1), row(0, 1, turn=1, metrics={'accuracy': 1})]
  assert not dropped('accuracy', wrong + right)
  assert dropped('accuracy', right)


def test_pass_rate():
  spec = 'pass_rate(low=0.25, high=0.5)'
  kept = [not dropped(spec, group(*[1] * n, *[0] * (4 - n))) for n in range(5)]
  assert kept == [False, True, True, False, False]


def test_greedy_attempts_are_shown_to_no_filter():
  baseline = row(1, 2, is_greedy=True)
  assert dropped('accuracy', [*group(0, 0), baseline]) == 'accuracy'
  assert dropped('reward_std', [*group(0, 0), baseline]) == 'reward_std'
  assert not dropped('accuracy', [*group(0, 1), baseline])


def test_scores_count_attempts_not_rows():
  rows = [row(1, 0), row(2, 0, turn=1), row(5, 1)]
  assert sample_scores(rows).tolist() == [3, 5]
  assert not dropped('reward_std', rows)


def test_several_are_asked_in_turn():
  spec = 'score_range(high=0.5) + accuracy'
  assert dropped(spec, group(1, 1)) == 'score_range'
  assert dropped(spec, group(0, 0)) == 'accuracy'
  assert not dropped(spec, group(0, 1))


def test_reasons_say_what_was_seen_and_what_helps():
  drop = make_group_filter('accuracy')(0, 0, group(0, 0, 0))
  assert drop.reason.startswith('0 of 3 samples are right')
  assert 'group_size' in drop.hint and 'too hard' in drop.hint
  assert 'too easy' in make_group_filter('accuracy')(0, 0, group(1, 1)).hint


def gate(spec, least=1, greedy=False):
  return GroupPipeline(
    make_group_filter(spec), None, min_samples=least, needs_greedy=greedy
  )


def test_invalid_attempts_leave_their_group():
  rows = group(0.5, np.inf, 3.0, 1.0, -2)
  kept, drop = gate('invalid_reward(low=-1, high=2)').process(0, 0, rows)
  assert drop is None
  assert [r.sample_index for r in kept] == [0, 3]
  kept, drop = gate('invalid_reward').process(0, 0, rows)
  assert [r.sample_index for r in kept] == [0, 2, 3, 4]


def test_a_group_with_too_few_valid_attempts_is_dropped():
  same, drop = gate('invalid_reward', least=2).process(0, 0, group(np.nan, 1.0))
  assert isinstance(drop, DropReason) and drop.name == 'invalid_reward'
  assert 'nan' in drop.reason and len(same) == 2
  baseline = row(np.nan, 2, is_greedy=True)
  _, drop = gate('invalid_reward', 1, greedy=True).process(0, 0, [*group(1), baseline])
  assert drop is not None


@pytest.mark.parametrize('bad', [np.nan, np.inf, -1e30])
def test_a_group_whose_shaped_rewards_cannot_be_trained_on_is_dropped(bad):
  def shape(rows):
    return [rows[0], row(bad, 1)]

  pipeline = GroupPipeline(None, shape, min_samples=1, needs_greedy=False)
  same, drop = pipeline.process(0, 0, group(0, 1))
  assert drop is not None and drop.name == 'invalid_reward'
  assert 'after reward shaping' in drop.reason
  assert [r.score for r in same] == [0, 1]


def test_invalid_attempts_are_gone_before_others_are_asked():
  _, drop = gate('invalid_reward + accuracy').process(0, 0, group(1, np.inf, 1))
  assert drop is not None and drop.name == 'accuracy'


def test_a_users_class():
  spec = 'tests.rollout.test_group_filters:Odd(modulus=3)'
  drops = make_group_filter(spec, {'a': 1}, {'b': 2})
  from tests.rollout.test_group_filters import (
    Odd as ResolvedOdd,
  )  # the class that was resolved

  assert ResolvedOdd.seen == ({'a': 1}, {'b': 2}, 'train', 3)
  assert [bool(drops(g, 0, [])) for g in range(3)] == [False, True, False]
  assert spec.partition('(')[0] in drops(1, 0, []).reason


def drop_long(group, *, limit=2):
  return len(group) > limit


def test_a_users_function():
  spec = 'tests.rollout.test_group_filters:drop_long'
  drops = make_group_filter(f'{spec}(limit=3)')
  assert drops(0, 0, group(1, 1, 1)) is None
  assert spec in drops(0, 0, group(1, 1, 1, 1)).reason
  assert group_filters.make_group_filter(drop_long)(0, 0, group(1, 1, 1))


def test_none_and_never_in_validation():
  assert make_group_filter('') is None
  assert make_group_filter('reward_std', mode='val') is None


def test_wrong_names_and_options():
  with pytest.raises(ValueError, match='reward_std'):
    make_group_filter('reward_sdt')
  with pytest.raises(ValueError, match='threshold'):
    make_group_filter('reward_std(min=1)')
  with pytest.raises(ValueError, match='drops every group of 1'):
    make_group_filter('accuracy', group_size=1)
  assert make_group_filter('pass_rate', group_size=1)
