"""Sokoban over text: push every box onto a target; one move a turn.

Rooms are dug at random and then played backwards from the solved state, by pulling, so
that each can be solved. The model sees a row a line: `#` wall, `-` floor, `.` target,
`$` box, `*` box on a target, `@` player, `+` player on a target. It answers with a
direction: up, down, left or right.
"""

import dataclasses
from collections.abc import Mapping
from typing import Any

import numpy as np

from jaxrl.envs.frozen_lake import HELP, STEPS, parse

RULES = (
  'Push every box ($) onto a target (.). You are @, or + on a target; * is a box on a '
  'target, # a wall, - floor. Walking into a box pushes it, if what lies behind it is '
  'free; boxes cannot be pulled.'
)
_TRIES = 1000
_OPPOSITE = {'up': 'down', 'down': 'up', 'left': 'right', 'right': 'left'}

Cell = tuple[int, int]


@dataclasses.dataclass(frozen=True)
class Room:
  """A room at some moment. solution: the moves that solve it as it was drawn."""

  height: int
  width: int
  floor: frozenset[Cell]
  targets: frozenset[Cell]
  boxes: frozenset[Cell]
  player: Cell
  solution: tuple[str, ...] = ()


class SokobanEnv:
  """One room. It is a pure function of the seed and of these options.

  height, width: cells, the outer walls among them. boxes: how many. scramble: moves
  of the backward play; more make rooms harder. win_reward: for the last box.
  box_reward: for each box pushed onto a target, and taken back when it is pushed off.
  step_reward: for any move. invalid_reward: for a reply without a direction, which
  costs its turn.
  """

  uses_dataset = False  # its tasks are seeds

  def __init__(
    self,
    *,
    height: int = 6,
    width: int = 6,
    boxes: int = 1,
    scramble: int = 60,
    win_reward: float = 1.0,
    box_reward: float = 0.0,
    step_reward: float = 0.0,
    invalid_reward: float = 0.0,
  ):
    _check(height, width, boxes, scramble)
    self._options = {
      'height': height,
      'width': width,
      'boxes': boxes,
      'scramble': scramble,
    }
    self._win_reward, self._box_reward = win_reward, box_reward
    self._step_reward, self._invalid_reward = step_reward, invalid_reward
    self._room: Room | None = None
    self._invalid = 0

  def reset(
    self, *, seed: int, options: Mapping[str, Any] | None = None
  ) -> tuple[str, dict[str, Any]]:
    self._room = draw_room(seed, **self._options)
    self._invalid = 0
    return f'{RULES}\n{render(self._room)}', {'suffix': HELP}

  def step(self, action: str) -> tuple[str, float, bool, bool, dict[str, Any]]:
    if self._room is None:
      raise RuntimeError('call reset before step')
    direction = parse(action)
    if direction is None:
      self._invalid += 1
      shown = f'{HELP}\n{render(self._room)}'
      return shown, self._invalid_reward, False, False, self._info()
    before, self._room = self._room, move(self._room, direction)
    gained = _placed(self._room) - _placed(before)
    reward = self._step_reward + self._box_reward * gained
    won = solved(self._room)
    if won:
      reward += self._win_reward
    blocked = 'Nothing moved.\n' if self._room == before else ''
    return f'{blocked}{render(self._room)}', reward, won, False, self._info()

  def _info(self) -> dict[str, Any]:
    assert self._room is not None
    success = float(solved(self._room))
    metrics = {'accuracy': success, 'success': success}
    metrics['placed'] = _placed(self._room) / len(self._room.boxes)
    metrics['invalid_actions'] = float(self._invalid)
    return {'suffix': HELP, 'metrics': metrics}


def _check(height: int, width: int, boxes: int, scramble: int) -> None:
  if min(height, width) < 5 or max(height, width) > 30:
    raise ValueError(f'height and width lie within 5 and 30, not {height} × {width}')
  most = (height - 2) * (width - 2) // 4
  if not 1 <= boxes <= most:
    raise ValueError(
      f'a room of {height} × {width} takes 1 to {most} boxes, not {boxes}'
    )
  if not 1 <= scramble <= 10_000:
    raise ValueError(f'scramble lies within 1 and 10000, not {scramble}')


def _placed(room: Room) -> int:
  return len(room.boxes & room.targets)


def solved(room: Room) -> bool:
  return room.boxes == room.targets


def _beside(cell: Cell, direction: str) -> Cell:
  return (cell[0] + STEPS[direction][0], cell[1] + STEPS[direction][1])


def move(room: Room, direction: str) -> Room:
  """The room after a move; the same room where a wall or a second box is in the way."""
  ahead = _beside(room.player, direction)
  if ahead not in room.floor:
    return room
  if ahead not in room.boxes:
    return dataclasses.replace(room, player=ahead)
  behind = _beside(ahead, direction)
  if behind not in room.floor or behind in room.boxes:
    return room
  return dataclasses.replace(room, player=ahead, boxes=room.boxes - {ahead} | {behind})


def draw_room(seed: int, *, height: int, width: int, boxes: int, scramble: int) -> Room:
  """A room that can be solved, with no box on a target.

  Raises ValueError when no such room is found.
  """
  for again in range(_TRIES):
    rng = np.random.default_rng([seed, again])
    floor = _dig(rng, height, width)
    if len(floor) < 3 * boxes + 1:
      continue
    cells = sorted(floor)
    order = rng.permutation(len(cells))
    targets = frozenset(cells[i] for i in order[:boxes])
    start = Room(height, width, floor, targets, targets, cells[order[boxes]])
    room = _scramble(rng, start, scramble)
    if room is not None:
      return room
  raise ValueError(
    f'no room of {height} × {width} with {boxes} boxes in {_TRIES} draws; '
    'make it larger, or scramble longer'
  )


def _dig(rng: np.random.Generator, height: int, width: int) -> frozenset[Cell]:
  """Floor that hangs together: the trail of a random walk within the outer walls."""
  cell = (int(rng.integers(1, height - 1)), int(rng.integers(1, width - 1)))
  floor = {cell}
  for step in rng.integers(4, size=2 * height * width):
    row, column = _beside(cell, list(STEPS)[step])
    if 0 < row < height - 1 and 0 < column < width - 1:
      cell = (row, column)
      floor.add(cell)
  return frozenset(floor)


def _scramble(rng: np.random.Generator, room: Room, moves: int) -> Room | None:
  """Backward play; the state farthest from solved, or None if a box never left.

  A backward move steps away and may pull along the box that lay on the other side;
  forwards that is a step back, with a push.
  """
  names, pulled = list(STEPS), False
  best, farthest, back = None, 0, []
  for step in rng.integers(4, size=moves):
    there = _beside(room.player, names[step])
    if there not in room.floor or there in room.boxes:
      continue
    box = _beside(room.player, _OPPOSITE[names[step]])
    boxes, pulled = room.boxes, box in room.boxes
    if pulled:
      boxes = boxes - {box} | {room.player}
    room = dataclasses.replace(room, player=there, boxes=boxes)
    back.append(_OPPOSITE[names[step]])
    if solved(room):
      back = []  # what led around to here is no part of a way out
    distance = 0 if boxes & room.targets else _distance(room)
    if pulled and distance > farthest:
      farthest = distance
      best = dataclasses.replace(room, solution=tuple(reversed(back)))
  return best


def _distance(room: Room) -> int:
  """Over all boxes, the cells to the nearest target."""
  return sum(
    min(abs(row - r) + abs(column - c) for r, c in room.targets)
    for row, column in room.boxes
  )


def render(room: Room) -> str:
  """The room as the model sees it: cells apart by spaces, rows by lines."""
  rows = [
    [_sign(room, (row, column)) for column in range(room.width)]
    for row in range(room.height)
  ]
  return '\n'.join(' '.join(row) for row in rows)


def _sign(room: Room, cell: Cell) -> str:
  on_target = cell in room.targets
  if cell == room.player:
    return '+' if on_target else '@'
  if cell in room.boxes:
    return '*' if on_target else '$'
  if on_target:
    return '.'
  return '-' if cell in room.floor else '#'
