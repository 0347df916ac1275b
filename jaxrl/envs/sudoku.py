"""Sudoku over text: fill in the blanks, some or all of them a turn.

The model sees a row a line, `.` a blank. It answers with cells, `r1c2=3 r4c1=2`, or
with the whole grid, inside `<answer>` tags or on its last line.
"""

import itertools
import re
from collections.abc import Iterator, Mapping
from typing import Any

import numpy as np

from jaxrl.envs import replies

MOST_BLANKS = {2: 11, 3: 54}  # by box; beyond these a unique solution gets rare
_TRIES = 50
_CELL = re.compile(r'r\s*(\d)\s*c\s*(\d)\s*[=:]\s*(\d)', re.IGNORECASE)
_GRID = re.compile(r'[\d\s|,+\-\[\]]*')

Grid = list[list[int]]  # [size][size], 0 a blank


class SudokuEnv:
  """One puzzle with exactly one solution, a pure function of the seed and options.

  box: cells a side of a box, 2 or 3; the grid has box² a side. blanks: how many.
  win_reward: for the last right cell. step_reward: for any other reply that fills
  cells. invalid_reward: for a reply that fills none, because it names no cell or one
  that is given or clashes with its row, column or box; it costs its turn and says what
  was wrong. max_chars: characters an answer may have. A filled cell may be filled anew.
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
    if box not in MOST_BLANKS:
      raise ValueError(f'box is 2 or 3, not {box}')
    if not 1 <= blanks <= MOST_BLANKS[box]:
      raise ValueError(f'blanks lie within 1 and {MOST_BLANKS[box]}, not {blanks}')
    self._box, self._blanks, self._max_chars = box, blanks, max_chars
    self._win_reward, self._step_reward = win_reward, step_reward
    self._invalid_reward = invalid_reward
    self._puzzle: Grid = []
    self._grid: Grid = []
    self._solution: Grid = []
    self._invalid = 0

  @property
  def help(self) -> str:
    size = self._box**2
    return (
      f'Answer with cells as row, column, digit, such as r1c2=3 r{size}c1=2, or with '
      f'the whole grid, {size} lines of {size} digits within <answer> tags.'
    )

  def reset(
    self, *, seed: int, options: Mapping[str, Any] | None = None
  ) -> tuple[str, dict[str, Any]]:
    self._puzzle, self._solution = draw_puzzle(seed, box=self._box, blanks=self._blanks)
    self._grid = [list(row) for row in self._puzzle]
    self._invalid = 0
    size = self._box**2
    rules = (
      f'Fill the blanks (.) so that each row, each column and each box of {self._box} '
      f'by {self._box} holds every digit of 1 to {size} once.'
    )
    return f'{rules}\n{render(self._grid)}', {'suffix': self.help}

  def step(self, action: str) -> tuple[str, float, bool, bool, dict[str, Any]]:
    if not self._grid:
      raise RuntimeError('call reset before step')
    try:
      self._grid = self._filled(action)
    except ValueError as error:
      self._invalid += 1
      shown = f'{error} {self.help}\n{render(self._grid)}'
      return shown, self._invalid_reward, False, False, self._info()
    won = self._grid == self._solution
    reward = self._win_reward if won else self._step_reward
    return render(self._grid), reward, won, False, self._info()

  def _filled(self, action: str) -> Grid:
    """The grid with the reply's cells; ValueError says why it cannot be."""
    text = replies.answer(action)
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
      if digit in peers(grid, row, column, self._box):
        raise ValueError(f'r{row + 1}c{column + 1}={digit} clashes with another cell.')
    if grid == self._grid:
      raise ValueError('That fills no blank.' if cells else 'That names no cell.')
    return grid

  def _info(self) -> dict[str, Any]:
    success = float(self._grid == self._solution)
    right = sum(
      given == 0 and now == then
      for rows in zip(self._puzzle, self._grid, self._solution, strict=True)
      for given, now, then in zip(*rows, strict=True)
    )
    metrics = {'accuracy': success, 'success': success}
    metrics['right_cells'] = right / self._blanks
    metrics['invalid_actions'] = float(self._invalid)
    return {'suffix': self.help, 'metrics': metrics}


def read_cells(text: str, size: int) -> list[tuple[int, int, int]]:
  """(row, column, digit) from 0, 0, 1 for each cell that an answer names.

  A whole grid names them all; anything else that is not of the form r1c2=3 none.
  """
  cells = [(int(r) - 1, int(c) - 1, int(d)) for r, c, d in _CELL.findall(text)]
  digits = re.findall(r'\d', text)
  if cells or len(digits) != size**2 or not _GRID.fullmatch(text):
    return cells
  return [(i // size, i % size, int(digit)) for i, digit in enumerate(digits)]


def peers(grid: Grid, row: int, column: int, box: int) -> set[int]:
  """The digits of the cell's row, column and box, its own left out."""
  top, left = row - row % box, column - column % box
  cells = {(row, i) for i in range(box**2)} | {(i, column) for i in range(box**2)}
  cells |= {(top + i, left + j) for i in range(box) for j in range(box)}
  return {grid[r][c] for r, c in cells - {(row, column)}} - {0}


def draw_puzzle(seed: int, *, box: int, blanks: int) -> tuple[Grid, Grid]:
  """A puzzle and its one solution. Raises ValueError when none is found."""
  size = box**2
  for again in range(_TRIES):
    rng = np.random.default_rng([seed, again])
    solution = next(solutions([[0] * size for _ in range(size)], box, rng))
    puzzle, left = [list(row) for row in solution], blanks
    for place in rng.permutation(size**2):
      row, column = divmod(int(place), size)
      puzzle[row][column] = 0
      found = solutions(puzzle, box)
      if next(found, None) is not None and next(found, None) is None:
        left -= 1
      else:
        puzzle[row][column] = solution[row][column]
      if left == 0:
        return puzzle, solution
  raise ValueError(f'no puzzle of {blanks} blanks in {_TRIES} draws; ask for fewer')


def solutions(
  puzzle: Grid, box: int, rng: np.random.Generator | None = None
) -> Iterator[Grid]:
  """All solutions, one by one; `rng` orders the digits that are tried."""
  size = box**2
  best: tuple[int, int] | None = None
  fits: list[int] = []
  for row, column in itertools.product(range(size), repeat=2):
    if puzzle[row][column]:
      continue
    taken = peers(puzzle, row, column, box)
    free = [digit for digit in range(1, size + 1) if digit not in taken]
    if best is None or len(free) < len(fits):
      best, fits = (row, column), free
    if len(fits) < 2:
      break
  if best is None:
    yield puzzle
    return
  if rng is not None:
    fits = [int(digit) for digit in rng.permutation(fits)]
  for digit in fits:
    tried = [list(row) for row in puzzle]
    tried[best[0]][best[1]] = digit
    yield from solutions(tried, box, rng)


def render(grid: Grid) -> str:
  """The grid as the model sees it: cells apart by spaces, rows by lines."""
  return '\n'.join(' '.join(str(digit or '.') for digit in row) for row in grid)
