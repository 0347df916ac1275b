"""FrozenLake: maps by seed alone, Gymnasium's rules, an expert that finds the way."""

import random
import threading

import numpy as np
import pytest

from jaxrl.envs.games.frozen_lake_env import (
  DIRECTION_HELP,
  FrozenLakeEnv,
  demonstrate,
  demonstrations,
  draw_map,
  look_around,
  parse_direction,
  render_map,
  shortest_move,
)

OPTIONS = {'map_size': 4, 'frozen': 0.8}


def replay(messages, seed):
  """Plays a conversation's replies; returns the last step's answer."""
  env = FrozenLakeEnv(split='train')
  shown, _ = env.reset(seed=seed)
  answer = (shown, 0.0, False, False, {})
  for prompt, reply in zip(messages[::2], messages[1::2], strict=True):
    assert not answer[2]
    assert prompt['content'] == answer[0]
    answer = env.step(reply['content'])
  return answer


def test_maps_follow_from_the_seed_and_can_be_solved():
  maps = [draw_map(seed, **OPTIONS) for seed in range(200)]
  assert maps == [draw_map(seed, **OPTIONS) for seed in range(200)]
  assert len({tuple(rows) for rows in maps}) > 60
  for rows in maps:
    state = 0
    for _ in range(16):
      if state == 15:
        break
      row, column = divmod(state, 4)
      move = shortest_move(rows, state)
      row += {'down': 1, 'up': -1}.get(move, 0)
      column += {'right': 1, 'left': -1}.get(move, 0)
      state = 4 * row + column
      assert rows[row][column] != 'H'
    assert state == 15


def test_train_and_test_have_no_map_in_common():
  train, test = (
    {tuple(draw_map(seed, split=split, **OPTIONS)) for seed in range(600)}
    for split in ('train', 'test')
  )
  assert not train & test
  assert len(test) > 40


def test_rougher_ice_gives_200_different_test_maps():
  for start in (0, 10**6, 2**31 - 300):
    maps = [
      tuple(draw_map(start + i, map_size=4, frozen=0.65, split='test'))
      for i in range(280)
    ]
    assert len(set(maps)) >= 200


def test_threads_draw_the_maps_that_one_thread_draws():
  alone = [draw_map(seed, **OPTIONS) for seed in range(320)]
  observations = {}

  def draw(part):
    for seed in range(part, 320, 16):
      env = FrozenLakeEnv()
      observations[seed] = env.reset(seed=seed)[0]

  threads = [threading.Thread(target=draw, args=(part,)) for part in range(16)]
  for thread in threads:
    thread.start()
  for thread in threads:
    thread.join()
  assert [observations[seed] for seed in range(320)] == [
    render_map(rows, 0) for rows in alone
  ]


def test_the_global_generators_are_left_alone():
  np.random.seed(3)
  random.seed(3)
  before = (np.random.get_state()[1].tolist(), random.getstate())
  env = FrozenLakeEnv(slippery=True)
  env.reset(seed=0)
  env.step('right')
  after = (np.random.get_state()[1].tolist(), random.getstate())
  assert before == after


def test_what_the_model_sees():
  rows = ['SFH', 'FFF', 'HFG']
  assert render_map(rows, 4) == '. . O\n. P .\nO . G'
  assert render_map(rows, 2) == '. . P\n. . .\nO . G'


def test_what_the_model_sees_around_it():
  rows = ['SFH', 'FFF', 'HFG']
  assert look_around(rows, 0) == 'left wall, down ice, right ice, up wall'
  assert look_around(rows, 3) == 'left wall, down hole, right ice, up ice'
  assert look_around(rows, 5) == 'left ice, down goal, right wall, up hole'
  env = FrozenLakeEnv(map_size=2, frozen=1.0, view='around')
  assert env.reset(seed=0)[0] == look_around(['SF', 'FG'], 0)
  assert env.step('down')[0] == look_around(['SF', 'FG'], 2)
  assert env.step('?')[0] == f'{DIRECTION_HELP}\n{look_around(["SF", "FG"], 2)}'


def test_moves_and_goal():
  env = FrozenLakeEnv(map_size=2, frozen=1.0)
  shown, info = env.reset(seed=0)
  assert (shown, info['suffix']) == ('P .\n. G', DIRECTION_HELP)
  shown, reward, terminated, truncated, info = env.step('I go right')
  assert (shown, reward, terminated, truncated) == ('. P\n. G', 0, False, False)
  shown, reward, terminated, _, info = env.step('DOWN!')
  assert (shown, reward, terminated) == ('. .\n. P', 1, True)
  assert info['metrics'] == {'accuracy': 1, 'success': 1, 'invalid_actions': 0}


def test_a_hole_ends_it_without_reward():
  for seed in range(50):
    env = FrozenLakeEnv(frozen=0.5, step_reward=-0.1)
    shown = env.reset(seed=seed)[0]
    if shown[2] == 'O':
      break
  _, reward, terminated, _, info = env.step('right')
  assert (reward, terminated, info['metrics']['success']) == (0, True, 0)


def test_an_invalid_action_moves_nobody_and_says_what_is_valid():
  env = FrozenLakeEnv(invalid_reward=-0.2, step_reward=-0.1)
  first = env.reset(seed=0)[0]
  shown, reward, terminated, truncated, info = env.step('upwards, leftish')
  assert (shown, reward) == (f'{DIRECTION_HELP}\n{first}', -0.2)
  assert not terminated
  assert not truncated
  assert info['metrics']['invalid_actions'] == 1
  assert env.step('left')[1] == -0.1


def test_parse_takes_the_last_direction():
  assert parse_direction('not up but Down.') == 'down'
  assert parse_direction('<answer>left</answer>') == 'left'
  assert parse_direction('downup') is parse_direction('') is None


def test_slippery_lakes_repeat_by_seed():
  def walk(seed):
    env = FrozenLakeEnv(slippery=True)
    seen = [env.reset(seed=seed)[0]]
    for _ in range(10):
      seen.append(env.step('right')[0])
    return seen

  assert walk(0) == walk(0)
  assert len({tuple(walk(seed)) for seed in range(10)}) > 3


def test_the_expert_reaches_the_goal_by_a_shortest_way():
  for seed in range(50):
    messages = demonstrate(seed)
    answer = replay(messages, seed=seed)
    assert answer[1:3] == (1, True)
    assert len(messages) // 2 >= 6
  assert np.mean([len(demonstrate(s)) / 2 for s in range(50)]) < 7


def test_an_imperfect_expert_fails_at_times():
  outcomes = [replay(demonstrate(s, noise=0.5), seed=s)[1] for s in range(60)]
  assert 0.1 < np.mean(outcomes) < 0.9
  assert demonstrate(3, noise=0.5) == demonstrate(3, noise=0.5)


def test_a_hasty_guide_heads_right_and_down():
  for seed in range(20):
    hasty = [m['content'] for m in demonstrate(seed, haste=1.0)[1::2]]
    assert hasty == (['right'] * 3 + ['down'] * 3)[: len(hasty)]
  half = [replay(demonstrate(s, haste=0.5), seed=s)[1] for s in range(60)]
  none = [replay(demonstrate(s, haste=1.0), seed=s)[1] for s in range(60)]
  assert 0.1 < np.mean(none) < np.mean(half) < 0.9


def test_a_guide_is_seen_with_the_eyes_of_the_environment():
  for prompt in demonstrate(3, view='around')[::2]:
    assert prompt['content'].startswith('left ')


def test_demonstrations_are_a_function_of_the_seed():
  assert demonstrations(size=5) == demonstrations(size=5)
  assert demonstrations(size=5) != demonstrations(size=5, seed=1)
  assert all(len(r['messages']) <= 6 for r in demonstrations(size=9, max_moves=3))


def test_errors():
  with pytest.raises(ValueError, match='split'):
    FrozenLakeEnv(split='val')
  with pytest.raises(ValueError, match='view'):
    FrozenLakeEnv(view='above')
  with pytest.raises(ValueError, match='map_size'):
    FrozenLakeEnv(map_size=1)
  with pytest.raises(ValueError, match='no test map'):
    draw_map(0, map_size=2, frozen=1.0, split='test')
  with pytest.raises(RuntimeError, match='reset'):
    FrozenLakeEnv().step('up')


def test_the_direction_in_the_answer_counts():
  assert parse_direction('<answer>left</answer>, and not right') == 'left'
  assert parse_direction('<think>left</think> Right.') == 'right'
