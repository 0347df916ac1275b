"""Curricula: pure functions of seed and posterior, and what each is meant to give."""

import json
from collections import Counter

import numpy as np
import pytest

from jaxrl.data.curricula import CURRICULA, Curriculum
from jaxrl.data.dataset import GlobalDataset
from jaxrl.data.row_sources import SOURCE_KEY, DataError
from jaxrl.options import ConfigError
from tests.calls import load_rows, make_curriculum, parse_call, parse_row_sources

ROWS = [
  {
    'question': f'q{i}',
    'answer': '-',
    'difficulty': (7 * i) % 10,
    SOURCE_KEY: 'ab'[i > 6],
  }
  for i in range(10)
]
SPECS = ['easy_to_hard(key="difficulty")', *CURRICULA]


def draws(spec, numbers, rows=ROWS, seed=3, base=1000):
  curriculum = make_curriculum(spec, rows, seed)
  return [curriculum.draw(base + i, i) for i in numbers]


@pytest.mark.parametrize('spec', SPECS)
def test_every_one_is_a_function_of_the_seed_alone(spec):
  forward = draws(spec, range(40))
  assert forward == draws(spec, reversed(range(40)))[::-1]
  assert forward == [draws(spec, [i])[0] for i in range(40)]
  assert set(forward) <= set(range(10))


@pytest.mark.parametrize('spec', ['shuffle', 'random', 'bandit', 'mixture'])
def test_the_run_seed_matters_where_something_is_drawn(spec):
  assert draws(spec, range(40), seed=0) != draws(spec, range(40), seed=1)


def test_sequential():
  assert draws('sequential', range(13)) == [*range(10), 0, 1, 2]


def test_random_meets_rows_twice_before_it_has_met_all():
  counts = Counter(draws('random', range(3000)))
  assert len(set(draws('random', range(10)))) < 10
  assert len(counts) == 10 and max(counts.values()) < 1.3 * min(counts.values())


def test_easy_to_hard():
  order = draws('easy_to_hard', range(20))
  values = [ROWS[row]['difficulty'] for row in order]
  assert values == [*range(10)] * 2
  with pytest.raises(DataError, match=r"'level'.*question"):
    draws('easy_to_hard(key="level")', [0])
  with pytest.raises(DataError, match='could not convert'):
    draws('easy_to_hard(key="question")', [0])


def test_mixture_has_its_weights_and_passes_through_each_source():
  drawn = draws('mixture(weights=(1, 3))', range(4000))
  second = [row for row in drawn if row > 6]
  assert len(second) == 3000
  assert abs(sum(row > 6 for row in drawn[:200]) - 150) < 30
  for start in range(0, 300, 3):
    assert sorted(second[start : start + 3]) == [7, 8, 9]
  first = [row for row in drawn if row <= 6]
  assert sorted(first[:7]) == list(range(7))
  assert first[:7] != first[7:14]


def test_mixture_without_weights_goes_by_size():
  drawn = draws('mixture', range(1000))
  assert sum(row > 6 for row in drawn) == 300


@pytest.mark.parametrize(
  ('weights', 'words'),
  [
    ('(1,)', 'it has 2: a, b'),
    ('(1, -1)', 'none negative'),
    ('(0, 0)', 'not all 0'),
    ('(1, 0.00001)', 'less than one of 1000'),
  ],
)
def test_mixtures_that_cannot_be(weights, words):
  with pytest.raises(DataError, match=words):
    draws(f'mixture(weights={weights})', [0])
  assert draws('mixture(weights=(1, 0))', range(50))


@pytest.mark.parametrize('sampling', ['thompson', 'mean'])
def test_bandit_comes_to_prefer_rows_near_its_target(sampling):
  rates = np.linspace(0, 1, 21)
  rows = [{} for _ in rates]
  curriculum = make_curriculum(f"bandit(sampling='{sampling}', candidates=0)", rows, 0)
  last = []
  for step in range(60):
    seeds = range(8 * step, 8 * step + 8)
    drawn = [curriculum.draw(seed, seed) for seed in seeds]
    curriculum.report(
      [(s, rates[row], 16) for s, row in zip(seeds, drawn, strict=True)]
    )
    last += drawn if step >= 40 else []
  assert np.abs(rates[last] - 0.5).mean() < 0.15
  assert np.abs(rates - 0.5).mean() > 0.25  # by chance


def test_bandit_follows_the_posterior_by_hand():
  curriculum = make_curriculum(
    'bandit(sampling="mean", decay=0.5, candidates=0)', ROWS, 0
  )
  row = curriculum.draw(5, 0)
  curriculum.report([(5, 0.25, 8)])
  assert curriculum.state_dict() == {'seen': {str(row): [2, 6]}, 'given': {}}
  curriculum.report([])
  assert curriculum.state_dict()['seen'] == {str(row): [1, 3]}
  # 2/6 is off the target.
  assert all(curriculum.draw(seed, 0) != row for seed in range(50))


def test_what_is_in_flight_stays_with_its_seed():
  curriculum = make_curriculum('bandit', ROWS, 0)
  before = [curriculum.draw(seed, seed) for seed in range(30)]
  curriculum.report([(seed, 0.0, 8) for seed in range(15)])
  assert [curriculum.draw(seed, seed) for seed in range(15, 30)] == before[15:]
  again = [curriculum.draw(seed, seed) for seed in range(15)]
  assert again != before[:15]


def test_results_of_unknown_seeds_are_ignored():
  curriculum = make_curriculum('bandit', ROWS, 0)
  curriculum.report([(99, 1.0, 4)])
  assert curriculum.state_dict()['seen'] == {}


def test_a_bandit_goes_on_from_its_state_to_the_bit():
  def play(curriculum, steps):
    for step in steps:
      drawn = [curriculum.draw(seed, seed) for seed in range(10 * step, 10 * step + 10)]
      results = [(10 * step + i, (row % 4) / 3, 3) for i, row in enumerate(drawn)]
      curriculum.report(results[:7])  # three stay in flight
      yield drawn

  whole = make_curriculum('bandit(decay=0.9)', ROWS, 1)
  expected = list(play(whole, range(12)))
  first = make_curriculum('bandit(decay=0.9)', ROWS, 1)
  list(play(first, range(5)))
  second = make_curriculum('bandit(decay=0.9)', ROWS, 1)
  second.load_state_dict(json.loads(json.dumps(first.state_dict())))
  assert list(play(second, range(5, 12))) == expected[5:]
  assert second.state_dict() == whole.state_dict()


def test_a_dataset_draws_by_its_curriculum_and_keeps_its_state():
  options = {'curriculum': parse_call('bandit(decay=0.5)'), 'mode': 'sample', 'seed': 2}
  one, other = (GlobalDataset(ROWS, **options) for _ in range(2))
  rows = [one.get_task(70 + i, i).index for i in range(5)]
  one.report([(70, 1.0, 4), (71, 0.0, 4)])
  other.load_state_dict(json.loads(json.dumps(one.state_dict())))
  assert other.state_dict() == one.state_dict()
  assert other.state_dict()['curriculum']['seen'].keys() == {str(r) for r in rows[:2]}
  later = [one.get_task(80 + i, i).index for i in range(9)]
  assert [other.get_task(80 + i, i).index for i in range(9)] == later


def test_traversal_knows_no_curriculum():
  options = {
    'curriculum': parse_call('easy_to_hard(key="absent")'),
    'mode': 'traversal',
  }
  data = GlobalDataset(ROWS, **options)
  assert [data.get_task(i, i).index for i in range(10)] == list(range(10))


def test_filters_of_a_dataset_come_before_its_curriculum():
  data = GlobalDataset(ROWS, curriculum='easy_to_hard')
  data.filter('hard', lambda row: row['difficulty'] > 5)
  difficulties = [data.get_data_item(i, i)['difficulty'] for i in range(4)]
  assert difficulties == [6, 7, 8, 9]


def test_sources_are_joined_and_rows_know_theirs(tmp_path):
  file = tmp_path / 'a+b.jsonl'
  file.write_text('\n'.join(json.dumps({'question': str(i)}) for i in range(8)))
  generated = 'generate:arithmetic(size=4, max_number=50)'
  rows = load_rows(f'{file} + {generated}')
  assert Counter(row[SOURCE_KEY] for row in rows) == {str(file): 8, generated: 4}
  assert SOURCE_KEY not in load_rows(str(file))[0]
  limited = load_rows(f'{file} + {generated}', limit=5)
  assert Counter(row[SOURCE_KEY] for row in limited) == {str(file): 3, generated: 2}
  with pytest.raises(DataError, match='twice'):
    load_rows(f'{file} + {file}')
  with pytest.raises(ConfigError, match='nothing on one side of'):
    load_rows(f'{file} + ')
  data = GlobalDataset(
    path=parse_row_sources(f'{file} + {generated}'),
    answer_key='',
    curriculum=parse_call('mixture(weights=(1, 1))'),
  )
  sources = Counter(data.get_data_item(i, i)[SOURCE_KEY] for i in range(1000))
  assert set(sources.values()) == {500}


class Backwards(Curriculum):
  """Somebody's own: the rows from the last on, every `stride`th."""

  def __init__(self, rows, seed, *, stride=1):
    super().__init__(rows, seed)
    self._stride = stride

  def draw(self, seed, position):
    return (self.size - 1 - self._stride * position) % self.size


def test_one_of_ones_own_plugs_in_by_its_path():
  path = f'{__name__}:Backwards'
  assert draws(path, range(4)) == [9, 8, 7, 6]
  data = GlobalDataset(ROWS, curriculum=parse_call(f'{path}(stride=3)'))
  assert [data.get_task(50 + i, i).index for i in range(4)] == [9, 6, 3, 0]
  with pytest.raises(ConfigError, match='stride'):
    draws(f'{path}(strid=3)', [0])


def test_wrong_names_and_options():
  with pytest.raises(ConfigError, match="Did you mean 'shuffle'"):
    draws('shufle', [0])
  with pytest.raises(ConfigError, match='target'):
    draws('bandit(targt=1)', [0])
  with pytest.raises(ConfigError, match='decay=0 must be in'):
    draws('bandit(decay=0)', [0])
  with pytest.raises(DataError, match='two positive numbers'):
    draws('bandit(prior=(0, 1))', [0])
