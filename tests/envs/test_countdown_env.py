"""Countdown: targets that can be reached, expressions read without evaluating code."""

from fractions import Fraction

import pytest

from jaxrl.envs.env_registry import env_factory
from jaxrl.envs.games.countdown_env import (
  EXPRESSION_HELP,
  CountdownEnv,
  draw_countdown,
  evaluate_expression,
)

OPTIONS = {'count': 4, 'largest': 50, 'largest_target': 100}


def fixed(**options):
  """An environment that asks for 10 from 2, 3 and 4."""
  env = CountdownEnv(count=3, **options)
  env.reset(seed=0)
  env._numbers, env._target = [2, 3, 4], 10
  return env


def test_every_target_is_reached_by_its_own_expression():
  for seed in range(200):
    numbers, target, text = draw_countdown(seed, **OPTIONS)
    value, used = evaluate_expression(text)
    assert (value, sorted(used)) == (target, sorted(numbers))
    assert 1 <= target <= 100
    env = CountdownEnv()
    question, _ = env.reset(seed=seed)
    assert question.startswith(f'Make {target} from the numbers {numbers[0]}, ')
    assert env.step(f'<answer>{text} = {target}</answer>')[1:3] == (1, True)


def test_tasks_follow_from_the_seed_and_differ():
  drawn = [draw_countdown(seed, **OPTIONS) for seed in range(200)]
  assert drawn == [draw_countdown(seed, **OPTIONS) for seed in range(200)]
  assert len({(tuple(n), t) for n, t, _ in drawn}) == 200
  assert len({t for _, t, _ in drawn}) > 50


@pytest.mark.parametrize(
  'text, value, numbers',
  [
    ('2+3*4', 14, [2, 3, 4]),
    ('(2 + 3) × 4', 20, [2, 3, 4]),
    ('8 − 2 - 1', 5, [8, 2, 1]),
    ('12 ÷ 3 / 2', 2, [12, 3, 2]),
    ('7/2', Fraction(7, 2), [7, 2]),
    ('-(2 - 5) * --1', 3, [2, 5, 1]),
    ('4 - -3 = 7', 7, [4, 3]),
  ],
)
def test_evaluate(text, value, numbers):
  assert evaluate_expression(text) == (value, numbers)


@pytest.mark.parametrize(
  'text, why',
  [
    ('', 'ends too early'),
    ('2 +', 'ends too early'),
    ('(2 + 3', 'not closed'),
    ('2 + 3)', r"from '\)' on"),
    ('2 3', "from '3' on"),
    ('2 ** 3', r"in place of '\*'"),
    ('1 / (2 - 2)', 'divides by zero'),
    ('1.5 + 2', "from '.5"),
    ('__import__("os")', 'Cannot read'),
    ('2e3', "from 'e3' on"),
    ('²', 'Cannot read'),
    ('(' * 101, 'more than 100'),
    ('(' * 100, 'ends too early'),
    ('-' * 100, 'ends too early'),
  ],
)
def test_what_is_no_expression(text, why):
  with pytest.raises(ValueError, match=why):
    evaluate_expression(text)


def test_one_attempt():
  _, reward, terminated, truncated, info = fixed(format_reward=0.1).step('2 * 3 + 4')
  assert (reward, terminated, truncated) == (1.0, True, False)
  assert info['metrics'] == {
    'accuracy': 1,
    'success': 1,
    'valid': 1,
    'invalid_actions': 0,
  }
  shown, reward, terminated, _, info = fixed(format_reward=0.1).step('2 + 3 + 4')
  assert (shown, reward, terminated) == ('That makes 9, not 10.', 0.1, True)
  assert (info['metrics']['valid'], info['metrics']['success']) == (1, 0)


@pytest.mark.parametrize(
  'reply, why',
  [
    ('10', 'Not given, or not so often: 10.'),
    ('2*2 + 2*3', 'Not given, or not so often: 2, 2.'),
    ('2 * 3', 'Not used: 4.'),
    ('2 * 3 + 4' + ' ' * 50 + '+', 'longer than 40'),
    ('exec("2")', 'Cannot read'),
  ],
)
def test_an_invalid_reply_costs_an_attempt_and_says_why(reply, why):
  env = fixed(attempts=2, invalid_reward=-0.5, format_reward=0.1, max_chars=40)
  shown, reward, terminated, _, info = env.step(reply)
  assert why in shown
  assert shown.endswith(EXPRESSION_HELP)
  assert (reward, terminated, info['metrics']['invalid_actions']) == (-0.5, False, 1)
  _, reward, terminated, _, _ = env.step('no')
  assert (reward, terminated) == (-0.5, True)


def test_several_attempts():
  env = fixed(attempts=3, format_reward=0.1)
  assert env.step('2 + 3 + 4')[:3] == ('That makes 9, not 10.', 0, False)
  assert env.step('4 / 3 - 2')[0] == 'That makes -2/3, not 10.'
  assert env.step('4 + 2 * 3')[1:3] == (1, True)


def test_not_all_need_be_used():
  env = fixed(use_all=False)
  env._target = 6
  assert env.step('2 * 3')[1:3] == (1, True)


def test_errors():
  with pytest.raises(ValueError, match='count'):
    CountdownEnv(count=1)
  with pytest.raises(ValueError, match='max_chars'):
    CountdownEnv(max_chars=5000)
  with pytest.raises(ValueError, match='must be at least 1'):
    CountdownEnv(attempts=0)
  with pytest.raises(ValueError, match='raise largest_target'):
    draw_countdown(0, count=2, largest=1, largest_target=1)
  with pytest.raises(RuntimeError, match='reset'):
    env_factory('countdown')().step('1')


@pytest.mark.parametrize(
  'reply',
  [
    '<answer>3 * 4 - 2</answer>',
    '**3 * 4 - 2**',
    'Answer: 3 * 4 - 2',
    r'The answer is $3 \times 4 - 2 = 10$.',
    'So:\n' r'\boxed{3 \cdot 4 - 2}',
    '```\n3 * 4 - 2\n```',
    '<think>2 * 4 + 3</think>3 * 4 - 2',
  ],
)
def test_expressions_as_models_write_them(reply):
  assert fixed().step(reply)[1:3] == (1, True)
