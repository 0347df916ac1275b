"""The math environment: what counts as the answer, and when two answers agree."""

import subprocess
import sys
from pathlib import Path

import pytest

from jaxrl.data.dataset import GlobalDataset
from jaxrl.envs.graders.answer_marks import final_answer, marked_answer
from jaxrl.envs.graders.answer_matching import answers_match
from jaxrl.envs.math_env import MathEnv
from jaxrl.types import Task
from tests.calls import env_factory

SHARED = Path(__file__).parents[3] / 'shared' / 'data'


def grade(reply, answer='18', **options):
  env = MathEnv(**options)
  task = Task(seed=0, index=0, item={'question': 'How many?', 'answer': answer})
  question, _ = env.reset(seed=0, options={'task': task})
  assert question == 'How many?'
  _, reward, terminated, truncated, info = env.step(reply)
  assert terminated
  assert not truncated
  right = float(reward == options.get('reward', 1))
  assert info['metrics']['correct'] == info['metrics']['accuracy'] == right
  return reward


@pytest.mark.parametrize(
  'reply',
  [
    '9+9=18\n#### 18',
    '#### 18.0',
    '####18',
    '#### $18.00',
    'I first said #### 17\nno: #### 18',
    r'so \boxed{18}',
    r'\boxed{17} or rather \boxed{\ 18 }',
    'It is 18.',
    'First 3, then 18',
    '18',
  ],
)
def test_right_replies(reply):
  assert grade(reply) == 1


@pytest.mark.parametrize(
  'reply',
  [
    '',
    '####',
    '#### 17',
    '#### 180',
    '#### -18',
    'eighteen',
    r'\boxed{',
    '1 8',
    '#### 18+1',
  ],
)
def test_wrong_replies(reply):
  assert grade(reply) == 0


def test_gsm8k_answers_are_taken_from_their_working():
  assert grade('#### 70000', answer='50+20=70\n#### 70,000') == 1
  assert grade('70', answer='50+20=70\n#### 70,000') == 0


def test_a_mark_outweighs_a_number():
  assert grade('18\n#### 17') == 0
  assert grade('#### 17 and 18') == 0


def test_strict_and_format_reward():
  assert grade('It is 18', strict=True) == 0
  assert grade('#### 18', strict=True) == 1
  assert grade('#### 17', format_reward=0.1) == 0.1
  assert grade('17', format_reward=0.1) == 0
  for empty in ('#### $$', '####', r'\boxed{}', r'\boxed{$$}', '<answer> </answer>'):
    assert grade(f'It is 17. {empty}', format_reward=0.1) == 0
  assert grade('#### 18', reward=2.0, format_reward=0.1) == 2


@pytest.mark.parametrize(
  ('one', 'other'),
  [
    ('1/2', '0.5'),
    (r'\frac{1}{2}', '1/2'),
    (r'\dfrac{3}{4}', '.75'),
    ('1,234', '1234'),
    ('+3', '3'),
    ('-0', '0'),
    ('007', '7'),
    ('x + 1', 'x+1'),
    (r'\left( 1, 2 \right)', '(1,2)'),
    ('Yes', 'yes'),
    (r'$\pi$', r'\pi'),
    ('50%', '50'),
    ('12,34,567', '1234567'),
    ('-1,000.50', '-1000.5'),
    ('1 000 000', '1000000'),
    ('1,000/3', '1000/3'),
    ('18,', '18'),
    ('−18', '-18'),
    ('٤٢', '٤٢'),
    ('1 1/2', '1  1/2'),
    ('1e3', '1000'),
    ('50%', '0.5'),
    ('3 PM', '3:00 p.m.'),
    ('3 PM', '3'),
  ],
)
def test_same(one, other):
  assert answers_match(one, other)
  assert answers_match(other, one)


@pytest.mark.parametrize(
  ('one', 'other'),
  [
    ('1/3', '0.33'),
    ('1/0', '2/0'),
    ('', ''),
    ('x', 'y'),
    ('1e9', '1'),
    ('nan', '1'),
    ('inf', '1'),
    ('infinity', 'inf'),
    ('٤٢', '42'),  # Arabic-Indic
    ('４２', '42'),  # full width
    ('𝟒𝟐', '42'),  # bold
    ('4²', '42'),
    (r'\frac{٤}{٢}', '2'),
    ('1_000', '1000'),
    ('1_000', '1'),
    ('0x2a', '42'),
    ('4,2', '42'),
    ('1,2', '12'),
    ('1,0000', '10000'),
    ('1 1/2', '11/2'),
    ('4 2', '42'),
    ('3 PM', '3 AM'),
    ('0.5%', '50%'),
    ('5 cm', '5 m'),
    ('x = 5, y = 3', '3'),
    ('−18', '18'),
  ],
)
def test_not_same(one, other):
  assert not answers_match(one, other)


@pytest.mark.parametrize('length', [10_000, 1_000_000])
def test_huge_replies_are_graded_at_once(length):
  for text in (
    '9' * length,
    '{' * length,
    r'\boxed{' * (length // 7),
    '1,' * length,
    '12,' * length,
    '1_' * length,
    '1 ' * length,
  ):
    assert grade(text) == 0
    assert grade(text + '\n#### 18') == 1
  assert not answers_match('1/' + '9' * length, '1')


def test_nested_braces():
  assert marked_answer(r'\boxed{\frac{1}{2}}') == r'\frac{1}{2}'
  assert marked_answer('a 3 b') == ''
  assert final_answer('a 3 b') == '3'
  assert final_answer(' yes ') == 'yes'
  assert final_answer('3 or ٤٢') == '٤٢'  # and not the 3
  assert final_answer('3 or 1_000.') == '1_000'  # and not 000
  assert final_answer('_18_') == '18'
  assert final_answer('x = −18.') == '−18'


def test_without_a_task_it_says_so():
  with pytest.raises(ValueError, match='needs a data set'):
    MathEnv().reset(seed=0)


@pytest.mark.skipif(not SHARED.exists(), reason='the shared data folder is not here')
def test_gsm8k_and_deepmath_score_their_own_answers():
  gsm8k = GlobalDataset(path=str(SHARED / 'gsm8k' / 'test.jsonl'), mode='traversal')
  deepmath = GlobalDataset(
    path=str(SHARED / 'deepmath' / 'math_deepmath_deal.jsonl'),
    mode='traversal',
    question_key='prompt',
    answer_key='ground_truth',
  )
  for data, reply in ((gsm8k, '{}'), (deepmath, r'So \boxed{{{}}}')):
    wrong = []
    for index in range(data.size):
      env, task = MathEnv(), data.get_task(index, index)
      env.reset(seed=0, options={'task': task})
      if env.step(reply.format(task.item['answer']))[1] != 1:
        wrong.append(task.item['answer'])
      env.reset(seed=0, options={'task': task})
      assert env.step('#### 123456789.5')[1] == 0
    assert not wrong


EMPTY_MARKS = (
  *('####', '#### ', '####\n', '**####**', '2+3=5\n####', '2+3=5\n#### \n\n'),
  *(r'So \boxed{}', r'$\boxed{ }$.'),
)


@pytest.mark.parametrize('grader', ['', 'math'])
@pytest.mark.parametrize('answer', EMPTY_MARKS)
def test_a_mark_without_an_answer_is_none(answer, grader):
  task = Task(seed=0, index=0, item={'question': 'What?', 'answer': answer})
  env = env_factory('math', {'grader': grader})()
  with pytest.raises(ValueError, match='ends with a mark and no answer'):
    env.reset(seed=0, options={'task': task})
  task = Task(seed=0, index=0, item={'question': 'What?', 'answer': '#### 7'})
  env.reset(seed=0, options={'task': task})
  _, reward, _, _, info = env.step(answer)
  assert (reward, info['metrics']['marked']) == (0, 0)


def test_environments_do_not_import_jax():
  code = 'import jaxrl.envs.env_registry, jaxrl.envs.math_env, '
  code += 'jaxrl.envs.games.frozen_lake_env, sys;'
  code += "sys.exit('jax' in sys.modules or 'ray' in sys.modules)"
  assert subprocess.run([sys.executable, '-c', code]).returncode == 0
