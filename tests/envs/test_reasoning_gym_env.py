"""Reasoning Gym: generators by name, their options and their scorers."""

import inspect
import random
import re
import threading

import numpy as np
import pytest

from jaxrl.envs.adapters.reasoning_gym_env import EVAL_SCORERS
from jaxrl.envs.env_registry import env_factory
from jaxrl.options import ConfigError

pytest.importorskip('reasoning_gym')
pytestmark = pytest.mark.filterwarnings('ignore::SyntaxWarning')

NAMES = ('leg_counting', 'chain_sum', 'number_sorting', 'maze')


def play(name, seed, **options):
  """A question and the answer that its generator holds to be right."""
  env = env_factory('reasoning_gym', {'name': name, **options})()
  question, info = env.reset(seed=seed)
  return env, question, env._entry['answer'], info


@pytest.mark.parametrize('name', NAMES)
def test_the_generators_own_answer_scores_one(name):
  env, question, expected, info = play(name, 0)
  assert question
  assert info == {'suffix': 'Give your answer within <answer> tags.'}
  shown, reward, terminated, truncated, info = env.step(
    f'I think so.\n<answer>{expected}</answer>'
  )
  assert (shown, reward, terminated, truncated) == ('', 1.0, True, False)
  assert info['metrics'] == {
    'score': 1,
    'accuracy': 1,
    'success': 1,
    'too_long': 0,
    'scorer_failed': 0,
  }
  assert info['columns'] == {'given': expected, 'expected': expected}
  _, reward, terminated, _, info = env.step('<answer>surely not</answer>')
  assert (reward < 1, terminated, info['metrics']['success']) == (True, True, 0)


def test_scores_in_between_are_the_scorers():
  """Its default scorer divides by the length of an answer that holds the right one."""
  env, _, expected, _ = play('leg_counting', 3, threshold=0.5)
  answer = f'{expected} legs'
  _, reward, _, _, info = env.step(f'<answer>{answer}</answer>')
  assert reward == pytest.approx(env._generator.score_answer(answer, env._entry))
  assert 0 < reward < 1
  assert info['metrics']['success'] == float(reward >= 0.5)


def test_an_answer_that_is_too_long_scores_nothing():
  env, _, expected, _ = play('leg_counting', 0, max_chars=20)
  shown, reward, terminated, _, info = env.step(expected + ' ' * 20 + '.')
  assert (shown, reward) == ('An answer has at most 20 characters.', 0)
  assert (terminated, info['metrics']['too_long']) == (True, 1)
  assert len(info['columns']['given']) == 20


def test_a_scorer_that_raises_gives_nothing_and_says_so(monkeypatch):
  env, _, expected, _ = play('leg_counting', 0)
  monkeypatch.setattr(env._generator, 'score_answer', lambda answer, entry: 1 / 0)
  _, reward, terminated, _, info = env.step(expected)
  assert (reward, terminated, info['metrics']['scorer_failed']) == (0, True, 1)


def test_options_reach_the_generator():
  arguments = {'min_animals': 1, 'max_animals': 1, 'max_instances': 1}
  _, question, _, _ = play('leg_counting', 0, arguments=arguments)
  assert question.split('if you have ')[1].count(',') == 0
  assert question.split('if you have ')[1].startswith('1 ')


def test_sixteen_threads_ask_what_one_asks():
  def questions():
    return [play(name, seed)[1] for name in NAMES[:2] for seed in range(5)]

  alone, per_thread = questions(), []
  threads = [
    threading.Thread(target=lambda: per_thread.append(questions())) for _ in '1' * 16
  ]
  for thread in threads:
    thread.start()
  for thread in threads:
    thread.join()
  assert per_thread == [alone] * 16
  assert len(set(alone)) == 10


def test_the_global_generators_are_left_alone():
  random.seed(3)
  np.random.seed(3)
  before = (np.random.get_state()[1].tolist(), random.getstate())
  for name in NAMES:
    play(name, 0)
  assert before == (np.random.get_state()[1].tolist(), random.getstate())


@pytest.mark.parametrize(
  'options, why',
  [
    ({}, "no generator ''"),
    ({'name': 'leg_countin'}, "Did you mean 'leg_counting'"),
    ({'name': 'pool_matrix'}, 'would not repeat'),
    ({'name': 'composite'}, 'a tag of its own'),
    ({'name': 'leg_counting', 'arguments': {'min_animal': 1}}, "'min_animals'"),
    ({'name': 'leg_counting', 'arguments': {'seed': 1}}, "no argument 'seed'"),
    ({'name': 'leg_counting', 'arguments': {'min_animals': 0}}, 'must be positive'),
  ],
)
def test_config_errors(options, why):
  with pytest.raises(ConfigError, match=why):
    env_factory('reasoning_gym', options)


def test_scorers_that_evaluate_an_answer_want_consent():
  """The list is read off the package: no other scorer evaluates anything."""
  import reasoning_gym.factory as package

  evaluates = re.compile(
    r'eval\(answer\)|(?:sympy|sp)\.parse_expr|int\(parse_expr|float\(parse'
  )
  names = {
    name
    for name, (generator, _) in package.DATASETS.items()
    if evaluates.search(inspect.getsource(generator.score_answer))
  }
  assert names == EVAL_SCORERS
  for name in EVAL_SCORERS:
    with pytest.raises(ConfigError, match='unsafe=True'):
      play(name, 0)
  env, _, expected, _ = play('polynomial_multiplication', 0, unsafe=True)
  assert env.step(f'<answer>{expected}</answer>')[1] == 1


def test_step_before_reset():
  with pytest.raises(RuntimeError, match='reset'):
    env_factory('reasoning_gym', {'name': 'leg_counting'})().step('1')
