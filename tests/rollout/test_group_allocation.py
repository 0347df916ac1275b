"""Groups shared among tags."""

import pytest

from jaxrl.rollout.queue.group_allocation import allocate_groups


@pytest.mark.parametrize(
  'count, shares, want',
  [
    (8, {'a': 1.0, 'b': 1.0}, [4, 4]),
    (7, {'a': 1.0, 'b': 1.0, 'c': 1.0}, [3, 2, 2]),
    (8, {'a': 3.0, 'b': 1.0}, [6, 2]),
    (10, {'a': 1.0, 'b': 2.0, 'c': 4.0}, [1, 3, 6]),
    (32, {'a': 0.1, 'b': 0.2, 'c': 0.1}, [8, 16, 8]),
  ],
)
def test_in_proportion_and_none_left_over(count, shares, want):
  allocation = allocate_groups(count, shares)
  assert list(allocation.values()) == want and sum(want) == count


def test_what_cannot_be_shared():
  with pytest.raises(ValueError, match=r'b gets none; raise it, or env\.b'):
    allocate_groups(4, {'a': 9.0, 'b': 1.0})
  with pytest.raises(ValueError, match=r'env\.a\.weight=0\.0: must be positive'):
    allocate_groups(4, {'a': 0.0, 'b': 1.0})
