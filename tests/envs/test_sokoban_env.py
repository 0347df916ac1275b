"""Sokoban: rooms by seed alone, each with a way to solve it, the usual rules."""

import random
import threading

import numpy as np
import pytest

from jaxrl.envs.env_registry import env_factory
from jaxrl.envs.games.frozen_lake_env import DIRECTION_HELP
from jaxrl.envs.games.sokoban_env import (
  SOKOBAN_RULES,
  SokobanEnv,
  SokobanRoom,
  draw_room,
  is_solved,
  move_player,
  render_room,
)

OPTIONS = {'height': 7, 'width': 8, 'boxes': 2, 'scramble': 80}


def room(*rows):
  """The room that `render` would show so."""
  cells = {
    (r, c): sign for r, row in enumerate(rows) for c, sign in enumerate(row.split())
  }
  return SokobanRoom(
    height=len(rows),
    width=len(rows[0].split()),
    floor=frozenset(cell for cell, sign in cells.items() if sign != '#'),
    targets=frozenset(cell for cell, sign in cells.items() if sign in '.*+'),
    boxes=frozenset(cell for cell, sign in cells.items() if sign in '$*'),
    player=next(cell for cell, sign in cells.items() if sign in '@+'),
  )


def test_every_room_is_solved_by_its_own_solution():
  lengths = []
  for seed in range(60):
    drawn = draw_room(seed, **OPTIONS)
    assert len(drawn.boxes) == len(drawn.targets) == 2
    assert not drawn.boxes & drawn.targets
    assert drawn.boxes | drawn.targets | {drawn.player} <= drawn.floor
    env = SokobanEnv(**OPTIONS)
    assert env.reset(seed=seed)[0] == f'{SOKOBAN_RULES}\n{render_room(drawn)}'
    answers = [env.step(direction) for direction in drawn.solution]
    assert [answer[2] for answer in answers].index(True) == len(answers) - 1
    assert answers[-1][1] == 1
    lengths.append(len(answers))
  assert np.mean(lengths) > 10


def test_rooms_follow_from_the_seed_and_differ():
  shown = [render_room(draw_room(seed, **OPTIONS)) for seed in range(60)]
  assert shown == [render_room(draw_room(seed, **OPTIONS)) for seed in range(60)]
  assert len(set(shown)) == 60


def test_sixteen_threads_draw_the_rooms_that_one_draws():
  alone = [SokobanEnv(**OPTIONS).reset(seed=seed)[0] for seed in range(64)]
  per_thread = [{} for _ in range(16)]

  def draw(part):
    env = SokobanEnv(**OPTIONS)
    for seed in range(64):
      per_thread[part][seed] = env.reset(seed=seed)[0]

  threads = [threading.Thread(target=draw, args=(part,)) for part in range(16)]
  for thread in threads:
    thread.start()
  for thread in threads:
    thread.join()
  assert all([part[seed] for seed in range(64)] == alone for part in per_thread)


def test_the_global_generators_are_left_alone():
  np.random.seed(3)
  random.seed(3)
  before = (np.random.get_state()[1].tolist(), random.getstate())
  SokobanEnv().reset(seed=0)
  assert before == (np.random.get_state()[1].tolist(), random.getstate())


def test_a_push_needs_room_behind_the_box():
  start = room('# # # # # #', '# @ $ - . #', '# # # # # #')
  pushed = move_player(start, 'right')
  assert render_room(pushed).split('\n')[1] == '# - @ $ . #'
  done = move_player(pushed, 'right')
  assert render_room(done).split('\n')[1] == '# - - @ * #'
  assert is_solved(done)
  assert move_player(done, 'right') == done
  assert render_room(move_player(done, 'left')).split('\n')[1] == '# - @ - * #'
  assert move_player(start, 'up') == move_player(start, 'left') == start
  two = room('# # # # # #', '# @ $ $ . #', '# . # # # #')
  assert move_player(two, 'right') == two


def test_a_player_on_a_target_is_seen_and_walks_off():
  start = room('# # # # #', '# + $ - #', '# # # # #')
  assert render_room(start).split('\n')[1] == '# + $ - #'
  assert render_room(move_player(start, 'right')).split('\n')[1] == '# . @ $ #'


def test_rewards():
  env = SokobanEnv(
    step_reward=-0.1, box_reward=0.5, win_reward=2.0, invalid_reward=-0.3
  )
  env.reset(seed=0)
  env._room = room('# # # # # #', '# @ $ - . #', '# # # # # #')
  shown, reward, terminated, truncated, info = env.step('over there, upwards')
  assert shown == f'{DIRECTION_HELP}\n# # # # # #\n# @ $ - . #\n# # # # # #'
  assert (reward, terminated, truncated) == (-0.3, False, False)
  assert info['metrics']['invalid_actions'] == 1
  shown, reward, *_ = env.step('left')
  assert shown.startswith('Nothing moved.\n')
  assert reward == -0.1
  assert env.step('I push right')[1] == -0.1
  _, reward, terminated, _, info = env.step('right')
  assert (reward, terminated) == (pytest.approx(2.4), True)
  assert info['metrics'] == {
    'accuracy': 1,
    'success': 1,
    'placed': 1,
    'invalid_actions': 1,
  }


def test_errors():
  with pytest.raises(ValueError, match='height'):
    SokobanEnv(height=4)
  with pytest.raises(ValueError, match='1 to 4 boxes'):
    SokobanEnv(boxes=5)
  with pytest.raises(ValueError, match='scramble'):
    SokobanEnv(scramble=0)
  with pytest.raises(ValueError, match='no room'):
    draw_room(0, height=5, width=5, boxes=2, scramble=1)
  with pytest.raises(RuntimeError, match='reset'):
    env_factory('sokoban')().step('up')
