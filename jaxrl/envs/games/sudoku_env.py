"""Sudoku: fill in the blanks, some or all of them per turn.

The model sees one row per line, with `.` for a blank. It answers with cells, `r1c2=3
r4c1=2`, or with the whole grid, inside `<answer>` tags or on its last line.
"""

import itertools
import re
from collections.abc import Iterator

import numpy as np

from jaxrl.envs import reply_parsing
from jaxrl.envs.env_registry import Info, ResetOptions

MAX_BLANKS = {2: 11, 3: 54}  # by box; beyond these a unique solution gets rare
_MAX_DRAWS = 50
_CELL = re.compile(r'r\s*([0-9])\s*c\s*([0-9])\s*[=:]\s*([0-9])', re.IGNORECASE)
_GRID = re.compile(r'[0-9\s|,+\-\[\]]*')

Grid = list[list[int]]  # [size][size], 0 a blank


class SudokuEnv:
  """Plays one puzzle with exactly one solution, a pure function of the seed.

  A cell that was filled in may be filled again.

  Args:
    box: The number of cells per side of a box, 2 or 3; the grid has box² per side.
    blanks: The number of blanks.
    win_reward: The reward for the last right cell.
    step_reward: The reward of any other reply that fills cells.
    invalid_reward: The reward of a reply that fills none, because it names no cell, or
      one that is given or clashes with its row, column or box. It costs its turn, and
      the model is told what was wrong.
    max_chars: The maximum number of characters of an answer.

  Raises:
    ValueError: If an option is out of range.
  """

  uses_dataset = False  # its tasks are seeds

  def __init__(
    self,
    *,
    box: int = 3,
    blanks: int = 30,
    win_reward: float = 1.0,
    step_reward: float = 0.0,
    invalid_reward: float = 0.0,
    max_chars: int = 2000,
  ):
    if box not in MAX_BLANKS:
      raise ValueError(f'box must be 2 or 3, not {box}')
    if not 1 <= blanks <= MAX_BLANKS[box]:
      raise ValueError(f'blanks must be from 1 to {MAX_BLANKS[box]}, not {blanks}')
    self._box = box
    self._blanks = blanks
    self._max_chars = max_chars
    self._win_reward = win_reward
    self._step_reward = step_reward
    self._invalid_reward = invalid_reward
    self._puzzle: Grid = []
    self._grid: Grid = []
    self._solution: Grid = []
    self._num_invalid = 0

  @property
  def help(self) -> str:
    """Returns how to answer."""
    size = self._box**2
    return (
      f'Answer with cells as row, column, digit, such as r1c2=3 r{size}c1=2, or with '
      f'the whole grid, {size} lines of {size} digits within <answer> tags.'
    )

  def reset(
    self, *, seed: int, options: ResetOptions | None = None
  ) -> tuple[str, Info]:
    """Draws the puzzle of `seed`."""
    self._puzzle, self._solution = draw_puzzle(seed, box=self._box, blanks=self._blanks)
    self._grid = [list(row) for row in self._puzzle]
    self._num_invalid = 0
    size = self._box**2
    rules = (
      f'Fill the blanks (.) so that each row, each column and each box of {self._box} '
      f'by {self._box} holds every digit of 1 to {size} once.'
    )
    return f'{rules}\n{render_grid(self._grid)}', {'suffix': self.help}

  def step(self, action: str) -> tuple[str, float, bool, bool, Info]:
    """Fills in the cells that the reply names."""
    if not self._grid:
      raise RuntimeError('call reset before step')
    try:
      self._grid = self._fill_in(action)
    except ValueError as error:
      self._num_invalid += 1
      observation = f'{error} {self.help}\n{render_grid(self._grid)}'
      return observation, self._invalid_reward, False, False, self._info()
    won = self._grid == self._solution
    reward = self._win_reward if won else self._step_reward
    return render_grid(self._grid), reward, won, False, self._info()

  def _fill_in(self, action: str) -> Grid:
    """Returns the grid with the reply's cells; raises ValueError if they clash."""
    text = reply_parsing.tagged_answer(action)
    if len(text) > self._max_chars:
      raise ValueError(f'The answer is longer than {self._max_chars} characters.')
    size = self._box**2
    grid = [list(row) for row in self._grid]
    cells = read_cells(text, size)
    for row, column, digit in cells:
      where = f'r{row + 1}c{column + 1}'
      if not (0 <= row < size and 0 <= column < size and 1 <= digit <= size):
        raise ValueError(f'{where}={digit} is outside 1 to {size}.')
      if self._puzzle[row][column] not in (0, digit):
        raise ValueError(f'{where} is given as {self._puzzle[row][column]}.')
      grid[row][column] = digit
    for row, column, digit in cells:
      if digit in conflicting_digits(grid, row, column, self._box):
        raise ValueError(f'r{row + 1}c{column + 1}={digit} clashes with another cell.')
    if grid == self._grid:
      raise ValueError('That fills no blank.' if cells else 'That names no cell.')
    return grid

  def _info(self) -> Info:
    success = float(self._grid == self._solution)
    num_right = sum(
      puzzle_digit == 0 and digit == solution_digit
      for rows in zip(self._puzzle, self._grid, self._solution, strict=True)
      for puzzle_digit, digit, solution_digit in zip(*rows, strict=True)
    )
    metrics = {'accuracy': success, 'success': success}
    metrics['right_cells'] = num_right / self._blanks
    metrics['invalid_actions'] = float(self._num_invalid)
    return {'suffix': self.help, 'metrics': metrics}


def read_cells(text: str, size: int) -> list[tuple[int, int, int]]:
  """Parses the cells that an answer names.

  A whole grid names them all; anything else that is not of the form r1c2=3 names none.

  Args:
    text: The answer.
    size: The number of cells per side of the grid.

  Returns:
    Tuples (row, column, digit), with rows and columns counted from 0.
  """
  cells = [(int(r) - 1, int(c) - 1, int(d)) for r, c, d in _CELL.findall(text)]
  digits = re.findall('[0-9]', text)
  if cells or len(digits) != size**2 or not _GRID.fullmatch(text):
    return cells
  return [(i // size, i % size, int(digit)) for i, digit in enumerate(digits)]


def conflicting_digits(grid: Grid, row: int, column: int, box: int) -> set[int]:
  """Returns the digits that a cell may not have.

  Args:
    grid: The grid.
    row: The cell's row.
    column: The cell's column.
    box: The number of cells per side of a box.

  Returns:
    The digits of the cell's row, column and box, except its own.
  """
  top, left = row - row % box, column - column % box
  cells = {(row, i) for i in range(box**2)} | {(i, column) for i in range(box**2)}
  cells |= {(top + i, left + j) for i in range(box) for j in range(box)}
  return {grid[r][c] for r, c in cells - {(row, column)}} - {0}


def draw_puzzle(seed: int, *, box: int, blanks: int) -> tuple[Grid, Grid]:
  """Draws a puzzle and its only solution.

  Args:
    seed: The seed.
    box: The number of cells per side of a box.
    blanks: The number of blanks.

  Returns:
    The puzzle and the solution.

  Raises:
    ValueError: If no such puzzle was found.
  """
  size = box**2
  for attempt in range(_MAX_DRAWS):
    rng = np.random.default_rng([seed, attempt])
    solution = next(iter_solutions([[0] * size for _ in range(size)], box, rng))
    puzzle, num_left = [list(row) for row in solution], blanks
    for cell in rng.permutation(size**2):
      row, column = divmod(int(cell), size)
      puzzle[row][column] = 0
      found_solutions = iter_solutions(puzzle, box)
      if (
        next(found_solutions, None) is not None and next(found_solutions, None) is None
      ):
        num_left -= 1
      else:
        puzzle[row][column] = solution[row][column]
      if num_left == 0:
        return puzzle, solution
  raise ValueError(f'no puzzle of {blanks} blanks in {_MAX_DRAWS} draws; ask for fewer')


def iter_solutions(
  puzzle: Grid, box: int, rng: np.random.Generator | None = None
) -> Iterator[Grid]:
  """Yields all solutions of a puzzle, one by one.

  Args:
    puzzle: The puzzle, with 0 for blanks.
    box: The number of cells per side of a box.
    rng: Orders the digits that are tried; None tries them in ascending order.

  Yields:
    The solved grids.
  """
  size = box**2
  best: tuple[int, int] | None = None
  candidates: list[int] = []
  for row, column in itertools.product(range(size), repeat=2):
    if puzzle[row][column]:
      continue
    taken = conflicting_digits(puzzle, row, column, box)
    free = [digit for digit in range(1, size + 1) if digit not in taken]
    if best is None or len(free) < len(candidates):
      best, candidates = (row, column), free
    if len(candidates) < 2:
      break
  if best is None:
    yield puzzle
    return
  if rng is not None:
    candidates = [int(digit) for digit in rng.permutation(candidates)]
  for digit in candidates:
    guess = [list(row) for row in puzzle]
    guess[best[0]][best[1]] = digit
    yield from iter_solutions(guess, box, rng)


def render_grid(grid: Grid) -> str:
  """Renders the grid for the model: cells separated by spaces, rows by line breaks.

  Args:
    grid: The grid.

  Returns:
    The text.
  """
  return '\n'.join(' '.join(str(digit or '.') for digit in row) for row in grid)
