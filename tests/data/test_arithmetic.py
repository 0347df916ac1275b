"""Word problems: right answers, no overlap of the splits, functions of the seed."""

import re

import numpy as np
import pytest

from jaxrl.data import arithmetic
from jaxrl.data.arithmetic import PROBLEM_KINDS, arithmetic_rows, is_test_problem


@pytest.fixture(scope='module')
def splits():
  return arithmetic_rows('train', size=3000), arithmetic_rows('test', size=700)


def test_answers_follow_from_the_question(splits):
  """Solved again from the words alone, without the generator's own arithmetic."""
  signs = {
    'add': lambda a, b: a + b,
    'sub': lambda a, b: a - b,
    'mul': lambda a, b: a * b,
    'add_sub': lambda a, b, c: a + b - c,
    'sub_add': lambda a, b, c: a - b + c,
    'compare': lambda a, b: a + a + b,
    'mul_add': lambda a, b, c: a * b + c,
    'mul_sub': lambda a, b, c: a * b - c,
  }
  seen = set()
  for row in splits[0]:
    numbers = [int(n) for n in re.findall(r'\d+', row['question'])]
    assert int(row['answer']) == signs[row['kind']](*numbers) >= 0, row
    seen.add(row['kind'])
  assert seen == set(PROBLEM_KINDS)


def test_solutions_are_worked_and_end_in_the_answer(splits):
  for row in splits[0]:
    *steps, last = row['solution'].split('\n')
    assert last == f'#### {row["answer"]}'
    assert 1 <= len(steps) <= 2
    for step in steps:
      left, right = step.split('=')
      assert eval(left) == int(right)
    assert steps[-1].endswith(f'={row["answer"]}')


def test_no_problem_is_in_both_splits(splits):
  """By kind and worked steps, which names and objects do not change."""
  train, test = ({(r['kind'], r['solution']) for r in rows} for rows in splits)
  assert not train & test
  assert len(test) > 400


def test_no_question_comes_twice(splits):
  for rows in splits:
    assert len({row['question'] for row in rows}) == len(rows)


def test_the_share_of_test_problems_is_as_stated():
  share = np.mean(
    [is_test_problem(f'add:{a}+{b}') for a in range(60) for b in range(60)]
  )
  assert abs(share - arithmetic.TEST_PROBLEM_SHARE) < 0.03


def test_pure_function_of_the_seed():
  one, other = arithmetic_rows(size=50, seed=0), arithmetic_rows(size=50, seed=1)
  assert one == arithmetic_rows(size=50, seed=0)
  assert one[:20] == arithmetic_rows(size=20, seed=0)
  assert one != other


def test_options_bound_kinds_and_numbers():
  rows = arithmetic_rows(size=100, kinds=('add', 'mul'), max_number=30, max_factor=12)
  assert {row['kind'] for row in rows} == {'add', 'mul'}
  numbers = [int(n) for r in rows for n in re.findall(r'\d+', r['question'])]
  assert 20 < max(numbers) <= 30


def test_bad_options():
  with pytest.raises(ValueError, match=r'unknown kinds.*add'):
    arithmetic_rows(kinds=('power',))
  with pytest.raises(ValueError, match=r'only .* different'):
    arithmetic_rows(size=150, kinds=('mul',), max_factor=2)
  with pytest.raises(ValueError, match='split'):
    arithmetic_rows('val')
  with pytest.raises(ValueError, match='form is one of worked, pairs, texts'):
    arithmetic_rows(form='pair')


@pytest.mark.parametrize(
  'solution, wrong',
  [
    ('3+4=7\n#### 7', '3-4=-1\n#### -1'),
    ('9-4=5\n5+4=9\n#### 9', '9+4=13\n13+4=17\n#### 17'),
    ('2+5=7\n2+7=9\n#### 9', '2-5=-3\n2+-3=-1\n#### -1'),
    ('2*2=4\n4-4=0\n#### 0', '2-2=0\n0-4=-4\n#### -4'),
  ],
)
def test_a_mistake_is_carried_on(solution, wrong):
  assert arithmetic.flipped_sign_solution(solution) == wrong


def test_pairs_and_texts_are_the_same_problems_in_other_forms():
  plain, pairs, texts = (
    arithmetic_rows(size=400, form=form) for form in arithmetic.ROW_FORMS
  )
  for row, pair, text in zip(plain, pairs, texts, strict=True):
    assert row.items() <= pair.items() and row.items() <= text.items()
    assert pair['chosen'] == row['solution'] != pair['rejected']
    assert pair['rejected'].count('\n') == pair['chosen'].count('\n')
    assert text['text'] == f'{row["question"]}\n{row["solution"]}'
  wrong = [pair['rejected'].split('#### ')[1] != pair['answer'] for pair in pairs]
  assert np.mean(wrong) > 0.95
