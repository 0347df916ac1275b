"""Staleness: of what, in which unit, and what a bound may be."""

import numpy as np
import pytest

from jaxrl.options import ConfigError
from jaxrl.training import staleness
from tests.calls import parse_staleness_limit
from tests.rollout.fakes import row


def of_versions(*versions):
  trajectory = row()
  trajectory.weights_version = np.array([-1, *versions], np.int32)
  trajectory.action_mask = trajectory.weights_version >= 0
  return trajectory


def test_it_is_that_of_the_oldest_action_token():
  group = [of_versions(4, 5), of_versions(5, 3), of_versions(5, 5)]
  assert staleness.group_staleness(group, 5) == 2
  assert [staleness.group_staleness([row], 6) for row in group] == [2, 3, 1]
  masked = of_versions(0, 5)
  masked.action_mask[1] = False  # written by the environment, whatever it says
  assert staleness.group_staleness([masked], 5) == 0
  assert staleness.group_staleness([of_versions()], 5) is None


def test_what_is_past_the_bound_is_never_taken():
  groups = [[of_versions(3)], [of_versions()]]
  staleness.check_groups(groups, 5, 2)
  with pytest.raises(RuntimeError, match='staleness 3, past the bound of 2'):
    staleness.check_groups(groups, 6, 2)


def test_bounds_are_calls_with_a_default():
  assert parse_staleness_limit('') is None
  assert parse_staleness_limit('drop') == ('drop', 2)
  assert parse_staleness_limit('mask(max=0)') == ('mask', 0)
  assert parse_staleness_limit('recompute(max=3)').oldest_allowed(10) == 7


@pytest.mark.parametrize(
  'text, message',
  [
    ('dorp(max=2)', "no rule 'dorp'.*Did you mean 'drop'"),
    ('drop(maxx=2)', "no option 'maxx'.*Did you mean 'max'"),
    ('mask(max=-1)', 'max must be at least 0'),
    ('mask(max=1.5)', 'must be a whole number'),
  ],
)
def test_what_is_no_bound_is_refused(text, message):
  with pytest.raises(ConfigError, match=message):
    parse_staleness_limit(text)
