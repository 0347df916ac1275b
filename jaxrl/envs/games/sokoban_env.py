"""Sokoban: push every box onto a target, one move per turn.

Rooms are dug at random and then played backwards from the solved state, by pulling, so
that each can be solved. The model sees one row per line: `#` wall, `-` floor, `.`
target, `$` box, `*` box on a target, `@` player, `+` player on a target; or a picture
of the room. It answers with a direction: up, down, left or right.
"""

import dataclasses
import functools

import numpy as np

from jaxrl.envs.env_registry import Info, MessageParts, Observation, ResetOptions
from jaxrl.envs.games import board_pictures
from jaxrl.envs.games.frozen_lake_env import DIRECTION_HELP, DIRECTIONS, parse_direction

SOKOBAN_RULES = (
  'Push every box ($) onto a target (.). You are @, or + on a target; * is a box on a '
  'target, # a wall, - floor. Walking into a box pushes it, if what lies behind it is '
  'free; boxes cannot be pulled.'
)
PICTURE_RULES = (
  'Push every brown box onto a target, a red ring. You are the blue figure; a box on a '
  'target is green, walls are bricks. Walking into a box pushes it, if what lies '
  'behind it is free; boxes cannot be pulled.'
)
_MAX_DRAWS = 1000
_OPPOSITE = {'up': 'down', 'down': 'up', 'left': 'right', 'right': 'left'}

Cell = tuple[int, int]


@dataclasses.dataclass(frozen=True)
class SokobanRoom:
  """The state of a room.

  Attributes:
    height: The number of rows, including the outer walls.
    width: The number of columns, including the outer walls.
    floor: The cells that are not wall.
    targets: The target cells.
    boxes: The cells of the boxes.
    player: The player's cell.
    solution: The moves that solve the room from its initial state.
  """

  height: int
  width: int
  floor: frozenset[Cell]
  targets: frozenset[Cell]
  boxes: frozenset[Cell]
  player: Cell
  solution: tuple[str, ...] = ()


class SokobanEnv:
  """Plays one room, which is a pure function of the seed and the options.

  Args:
    height: The number of rows, including the outer walls.
    width: The number of columns, including the outer walls.
    boxes: The number of boxes.
    scramble: The number of backward moves; more make rooms harder.
    view: 'map' shows the room as text, 'image' as a picture, to a model that sees
      images.
    win_reward: The reward for the last box.
    box_reward: The reward for each box pushed onto a target, which is taken back when
      the box is pushed off.
    step_reward: The reward of any move.
    invalid_reward: The reward of a reply without a direction, which costs its turn.

  Raises:
    ValueError: If an option is out of range.
  """

  uses_dataset = False  # its tasks are seeds

  def __init__(
    self,
    *,
    height: int = 6,
    width: int = 6,
    boxes: int = 1,
    scramble: int = 60,
    view: str = 'map',
    win_reward: float = 1.0,
    box_reward: float = 0.0,
    step_reward: float = 0.0,
    invalid_reward: float = 0.0,
  ):
    _check(height, width, boxes, scramble)
    if view not in VIEWS:
      raise ValueError(f'view must be one of {tuple(VIEWS)}, not {view!r}')
    self._render, self._rules = VIEWS[view]
    self._options = {
      'height': height,
      'width': width,
      'boxes': boxes,
      'scramble': scramble,
    }
    self._win_reward = win_reward
    self._box_reward = box_reward
    self._step_reward = step_reward
    self._invalid_reward = invalid_reward
    self._room: SokobanRoom | None = None
    self._num_invalid = 0

  def reset(
    self, *, seed: int, options: ResetOptions | None = None
  ) -> tuple[Observation, Info]:
    """Draws the room of `seed`."""
    self._room = draw_room(seed, **self._options)
    self._num_invalid = 0
    observation = board_pictures.with_text(self._rules, self._render(self._room))
    return observation, {'suffix': DIRECTION_HELP}

  def step(self, action: str) -> tuple[Observation, float, bool, bool, Info]:
    """Moves the player in the direction that the reply names."""
    if self._room is None:
      raise RuntimeError('call reset before step')
    direction = parse_direction(action)
    if direction is None:
      self._num_invalid += 1
      shown = self._render(self._room)
      observation = board_pictures.with_text(DIRECTION_HELP, shown)
      return observation, self._invalid_reward, False, False, self._info()
    previous_room, self._room = self._room, move_player(self._room, direction)
    newly_placed = _num_placed(self._room) - _num_placed(previous_room)
    reward = self._step_reward + self._box_reward * newly_placed
    won = is_solved(self._room)
    if won:
      reward += self._win_reward
    blocked = 'Nothing moved.' if self._room == previous_room else ''
    observation = board_pictures.with_text(blocked, self._render(self._room))
    return observation, reward, won, False, self._info()

  def _info(self) -> Info:
    assert self._room is not None
    success = float(is_solved(self._room))
    metrics = {'accuracy': success, 'success': success}
    metrics['placed'] = _num_placed(self._room) / len(self._room.boxes)
    metrics['invalid_actions'] = float(self._num_invalid)
    return {'suffix': DIRECTION_HELP, 'metrics': metrics}


def _check(height: int, width: int, boxes: int, scramble: int) -> None:
  if min(height, width) < 5 or max(height, width) > 30:
    raise ValueError(f'height and width must be from 5 to 30, not {height} × {width}')
  max_boxes = (height - 2) * (width - 2) // 4
  if not 1 <= boxes <= max_boxes:
    raise ValueError(
      f'a room of {height} × {width} takes 1 to {max_boxes} boxes, not {boxes}'
    )
  if not 1 <= scramble <= 10_000:
    raise ValueError(f'scramble must be from 1 to 10000, not {scramble}')


def _num_placed(room: SokobanRoom) -> int:
  return len(room.boxes & room.targets)


def is_solved(room: SokobanRoom) -> bool:
  """Returns whether every box is on a target.

  Args:
    room: The room.

  Returns:
    True if it is solved.
  """
  return room.boxes == room.targets


def _neighbour(cell: Cell, direction: str) -> Cell:
  return (cell[0] + DIRECTIONS[direction][0], cell[1] + DIRECTIONS[direction][1])


def move_player(room: SokobanRoom, direction: str) -> SokobanRoom:
  """Moves the player, pushing a box if there is one.

  Args:
    room: The room.
    direction: 'up', 'down', 'left' or 'right'.

  Returns:
    The new room; the same room if a wall or a second box is in the way.
  """
  ahead = _neighbour(room.player, direction)
  if ahead not in room.floor:
    return room
  if ahead not in room.boxes:
    return dataclasses.replace(room, player=ahead)
  behind = _neighbour(ahead, direction)
  if behind not in room.floor or behind in room.boxes:
    return room
  return dataclasses.replace(room, player=ahead, boxes=room.boxes - {ahead} | {behind})


def draw_room(
  seed: int, *, height: int, width: int, boxes: int, scramble: int
) -> SokobanRoom:
  """Draws a room that can be solved, with no box on a target.

  Args:
    seed: The seed.
    height: The number of rows.
    width: The number of columns.
    boxes: The number of boxes.
    scramble: The number of backward moves.

  Returns:
    The room.

  Raises:
    ValueError: If no such room was found.
  """
  for attempt in range(_MAX_DRAWS):
    rng = np.random.default_rng([seed, attempt])
    floor = _dig(rng, height, width)
    if len(floor) < 3 * boxes + 1:
      continue
    cells = sorted(floor)
    order = rng.permutation(len(cells))
    targets = frozenset(cells[i] for i in order[:boxes])
    start = SokobanRoom(height, width, floor, targets, targets, cells[order[boxes]])
    room = _scramble(rng, start, scramble)
    if room is not None:
      return room
  raise ValueError(
    f'no room of {height} × {width} with {boxes} boxes in {_MAX_DRAWS} draws; '
    'make it larger, or scramble longer'
  )


def _dig(rng: np.random.Generator, height: int, width: int) -> frozenset[Cell]:
  """Returns a connected floor: the trail of a random walk within the outer walls."""
  cell = (int(rng.integers(1, height - 1)), int(rng.integers(1, width - 1)))
  floor = {cell}
  for step in rng.integers(4, size=2 * height * width):
    row, column = _neighbour(cell, list(DIRECTIONS)[step])
    if 0 < row < height - 1 and 0 < column < width - 1:
      cell = (row, column)
      floor.add(cell)
  return frozenset(floor)


def _scramble(
  rng: np.random.Generator, room: SokobanRoom, moves: int
) -> SokobanRoom | None:
  """Plays backwards; returns the state farthest from solved, or None if none is.

  A backward move steps away and may pull along the box on the other side. Played
  forwards, that is a step back with a push.
  """
  names, pulled = list(DIRECTIONS), False
  best, best_distance, reversed_moves = None, 0, []
  for step in rng.integers(4, size=moves):
    destination = _neighbour(room.player, names[step])
    if destination not in room.floor or destination in room.boxes:
      continue
    box = _neighbour(room.player, _OPPOSITE[names[step]])
    boxes, pulled = room.boxes, box in room.boxes
    if pulled:
      boxes = boxes - {box} | {room.player}
    room = dataclasses.replace(room, player=destination, boxes=boxes)
    reversed_moves.append(_OPPOSITE[names[step]])
    if is_solved(room):
      reversed_moves = []  # the moves since then formed a loop
    distance = 0 if boxes & room.targets else _distance(room)
    if pulled and distance > best_distance:
      best_distance = distance
      best = dataclasses.replace(room, solution=tuple(reversed(reversed_moves)))
  return best


def _distance(room: SokobanRoom) -> int:
  """Returns the summed distance from each box to its nearest target."""
  return sum(
    min(abs(row - r) + abs(column - c) for r, c in room.targets)
    for row, column in room.boxes
  )


def render_room(room: SokobanRoom) -> str:
  """Renders the room for the model: cells separated by spaces, rows by line breaks.

  Args:
    room: The room.

  Returns:
    The text.
  """
  return '\n'.join(' '.join(row) for row in _symbols(room))


def draw_picture_of_room(room: SokobanRoom) -> MessageParts:
  """Draws the room for a model that sees images.

  Args:
    room: The room.

  Returns:
    The parts of a message's content: one image.
  """
  return board_pictures.draw_board(_symbols(room), _tiles())


def _symbols(room: SokobanRoom) -> list[list[str]]:
  return [
    [_cell_symbol(room, (row, column)) for column in range(room.width)]
    for row in range(room.height)
  ]


@functools.cache
def _tiles() -> dict[str, np.ndarray]:
  floor, player = (232, 224, 200), (board_pictures.FIGURE, (32, 64, 208))
  target = (board_pictures.RING, (208, 32, 32))
  return {
    '#': board_pictures.make_tile(
      (152, 152, 152), (board_pictures.BRICKS, (88, 88, 88))
    ),
    '-': board_pictures.make_tile(floor),
    '.': board_pictures.make_tile(floor, target),
    '$': board_pictures.make_tile(floor, (board_pictures.CRATE, (136, 80, 32))),
    '*': board_pictures.make_tile(floor, (board_pictures.CRATE, (32, 144, 48))),
    '@': board_pictures.make_tile(floor, player),
    '+': board_pictures.make_tile(floor, target, player),
  }


def _cell_symbol(room: SokobanRoom, cell: Cell) -> str:
  on_target = cell in room.targets
  if cell == room.player:
    return '+' if on_target else '@'
  if cell in room.boxes:
    return '*' if on_target else '$'
  if on_target:
    return '.'
  return '-' if cell in room.floor else '#'


VIEWS = {
  'map': (render_room, SOKOBAN_RULES),
  'image': (draw_picture_of_room, PICTURE_RULES),
}
