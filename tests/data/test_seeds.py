"""Seeds fold in; none is special and none collides."""

from jaxrl.data.seeds import base_seed, fold_seed


def test_every_part_counts_and_zero_is_a_seed():
  seeds = {
    fold_seed(seed, episode, member, turn)
    for seed in range(3)
    for episode in range(20)
    for member in range(8)
    for turn in range(3)
  }
  assert len(seeds) == 3 * 20 * 8 * 3
  assert all(0 <= seed < 2**31 for seed in seeds)


def test_known_values_stay():
  """A change here changes every run: checkpoints would not repeat."""
  assert fold_seed(0) == 1484405855
  assert fold_seed(7, 'math', 3) == 1830694842
  assert base_seed(0, 'train', 'math') == 151795986


def test_base_seeds_differ_by_run_mode_and_tag():
  seeds = {
    base_seed(run, mode, tag)
    for run in range(10)
    for mode in ('train', 'val')
    for tag in ('', 'math', 'frozen_lake')
  }
  assert len(seeds) == 60
