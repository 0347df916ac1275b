"""Sudoku: one solution each, by seed alone; replies of cells and of whole grids."""

import threading

import pytest

from jaxrl.envs.env_registry import env_factory
from jaxrl.envs.games.sudoku_env import (
  SudokuEnv,
  conflicting_digits,
  draw_puzzle,
  iter_solutions,
  render_grid,
)

PUZZLE = [[1, 0, 3, 4], [3, 4, 0, 2], [2, 1, 4, 3], [4, 3, 2, 1]]
SOLUTION = [[1, 2, 3, 4], [3, 4, 1, 2], [2, 1, 4, 3], [4, 3, 2, 1]]


def small(**options):
  """An environment that stands before PUZZLE."""
  env = SudokuEnv(box=2, blanks=2, **options)
  env.reset(seed=0)
  env._puzzle, env._solution = PUZZLE, SOLUTION
  env._grid = [list(row) for row in PUZZLE]
  return env


@pytest.mark.parametrize('box, blanks, count', [(2, 9, 30), (3, 45, 8)])
def test_puzzles_have_their_blanks_and_one_solution(box, blanks, count):
  drawn = [draw_puzzle(seed, box=box, blanks=blanks) for seed in range(count)]
  for puzzle, solution in drawn:
    assert sum(row.count(0) for row in puzzle) == blanks
    assert list(iter_solutions(puzzle, box)) == [solution]
    for row in range(box**2):
      for column in range(box**2):
        assert solution[row][column] not in conflicting_digits(
          solution, row, column, box
        )
        assert puzzle[row][column] in (0, solution[row][column])
  assert len({render_grid(puzzle) for puzzle, _ in drawn}) == count


def test_the_solver_finds_every_solution():
  assert sum(1 for _ in iter_solutions([[0] * 4 for _ in range(4)], 2)) == 288
  assert list(iter_solutions([[1, 1, 0, 0]] + [[0] * 4] * 3, 2)) == []


def test_threads_draw_the_puzzles_that_one_draws():
  def puzzles():
    return [draw_puzzle(seed, box=2, blanks=8) for seed in range(20)]

  alone, per_thread = puzzles(), []
  threads = [
    threading.Thread(target=lambda: per_thread.append(puzzles())) for _ in range(16)
  ]
  for thread in threads:
    thread.start()
  for thread in threads:
    thread.join()
  assert per_thread == [alone] * 16


def test_cells_one_by_one():
  env = small(step_reward=0.1, win_reward=2.0)
  shown, reward, terminated, truncated, info = env.step('Let me see.\nr1c2=2')
  assert shown == '1 2 3 4\n3 4 . 2\n2 1 4 3\n4 3 2 1'
  assert (reward, terminated, truncated) == (0.1, False, False)
  assert info['metrics']['right_cells'] == 0.5
  shown, reward, terminated, _, info = env.step('<answer>R2 C3: 1</answer> done')
  assert (shown, reward, terminated) == (render_grid(SOLUTION), 2.0, True)
  assert info['metrics'] == {
    'accuracy': 1,
    'success': 1,
    'right_cells': 1,
    'invalid_actions': 0,
  }


def test_a_whole_grid():
  assert small().step(f'<answer>\n{render_grid(SOLUTION)}\n</answer>')[1:3] == (1, True)
  rows = '<answer>[[1,2,3,4],[3,4,1,2],[2,1,4,3],[4,3,2,1]]</answer>'
  assert small().step(rows)[1:3] == (1, True)
  assert small().step('r1c2=2 r2c3=1')[1:3] == (1, True)


@pytest.mark.parametrize(
  'reply, why',
  [
    ('I do not know', 'names no cell'),
    ('r1c2=5', 'r1c2=5 is outside 1 to 4'),
    ('r5c2=1', 'r5c2=1 is outside'),
    ('r0c2=1', 'is outside'),
    ('r1c1=2', 'r1c1 is given as 1'),
    ('r1c2=3', 'r1c2=3 clashes'),
    ('r1c2=2 r2c3=2', 'r2c3=2 clashes'),
    ('r1c1=1', 'fills no blank'),
    ('r1c2=2' + ' ' * 50 + '.', 'longer than 40'),
    ('<answer>' + '1 ' * 16 + '</answer>', 'given as 3'),
    ('the grid of 1234 3412 2143 4321', 'names no cell'),
  ],
)
def test_what_cannot_be_filled_costs_a_turn_and_says_why(reply, why):
  env = small(max_chars=40, invalid_reward=-0.5, step_reward=0.1)
  shown, reward, terminated, truncated, info = env.step(reply)
  assert why in shown
  assert env.help in shown
  assert shown.endswith(render_grid(PUZZLE))
  assert (reward, terminated, truncated) == (-0.5, False, False)
  assert info['metrics']['invalid_actions'] == 1
  assert env.step('r1c2=2 r2c3=1')[2]


def test_a_wrong_cell_may_be_filled_anew():
  env = SudokuEnv(box=2, blanks=11)
  env.reset(seed=1)
  row, column, wrong = next(
    (r, c, d)
    for r in range(4)
    for c in range(4)
    for d in range(1, 5)
    if not env._puzzle[r][c] and d not in {*conflicting_digits(env._grid, r, c, 2)}
    if d != env._solution[r][c]
  )
  _, reward, terminated, _, info = env.step(f'r{row + 1}c{column + 1}={wrong}')
  assert (reward, terminated, info['metrics']['right_cells']) == (0, False, 0)
  grid = render_grid(env._solution)
  assert env.step(f'<answer>{grid}</answer>')[1:3] == (1, True)


def test_errors():
  with pytest.raises(ValueError, match='box must be 2 or 3'):
    SudokuEnv(box=4)
  with pytest.raises(ValueError, match='from 1 to 54'):
    SudokuEnv(blanks=60)
  with pytest.raises(RuntimeError, match='reset'):
    env_factory('sudoku')().step('r1c1=1')
