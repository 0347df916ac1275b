"""FrozenLake: Gymnasium's game over text, on a map drawn by seed, one move per turn.

The model sees either the map, one row per line, with `P` the player, `G` the goal, `O`
a hole and `.` ice; or what lies next to the player on each side; or a picture of the
map. It answers with a direction: up, down, left or right.
"""

import functools
import re
import zlib
from collections import deque

import numpy as np
from gymnasium.envs.toy_text.frozen_lake import FrozenLakeEnv as Lake
from gymnasium.envs.toy_text.frozen_lake import generate_random_map

from jaxrl.envs.env_registry import Info, MessageParts, Observation, ResetOptions
from jaxrl.envs.games import board_pictures
from jaxrl.envs.reply_parsing import tagged_answer
from jaxrl.options import AT_LEAST_ONE, NOT_NEGATIVE, SHARE, option_ranges

MOVES = {'left': 0, 'down': 1, 'right': 2, 'up': 3}  # Gymnasium's numbers
DIRECTIONS = {'left': (0, -1), 'down': (1, 0), 'right': (0, 1), 'up': (-1, 0)}
CELLS = {'S': 'ice', 'F': 'ice', 'H': 'hole', 'G': 'goal'}
MAP_SPLITS = ('', 'train', 'test')
DIRECTION_HELP = 'Say up, down, left or right.'
TEST_MAP_SHARE = 0.2  # of all maps, kept for the test split
_MAX_DRAWS = 1000
_DIRECTION_WORDS = re.compile(r'\b(left|down|right|up)\b', re.IGNORECASE)


class FrozenLakeEnv:
  """Plays one lake, whose map is a pure function of the seed and the options.

  Args:
    map_size: The number of cells per side.
    frozen: The share of cells that are ice.
    slippery: Whether moves may slide sideways, as in Gymnasium.
    split: 'train' and 'test' have no map in common; '' draws from all maps.
    view: 'map' shows the whole map, 'around' describes the four cells next to the
      player, and 'image' shows a picture of the map to a model that sees images.
    invalid_reward: The reward of a reply without a direction, which moves nobody.
    step_reward: The reward of any other move that neither wins nor drowns.

  Raises:
    ValueError: If an option is out of range.
  """

  uses_dataset = False  # its tasks are seeds

  def __init__(
    self,
    *,
    map_size: int = 4,
    frozen: float = 0.8,
    slippery: bool = False,
    split: str = '',
    view: str = 'map',
    invalid_reward: float = 0.0,
    step_reward: float = 0.0,
  ):
    _check(map_size, frozen, split, view)
    self._render = VIEWS[view]
    self._map_options = {'map_size': map_size, 'frozen': frozen, 'split': split}
    self._slippery = slippery
    self._invalid_reward = invalid_reward
    self._step_reward = step_reward
    self._map: list[str] = []
    self._lake: Lake | None = None
    self._num_invalid = 0

  def reset(
    self, *, seed: int, options: ResetOptions | None = None
  ) -> tuple[Observation, Info]:
    """Draws the map of `seed`."""
    self._map = draw_map(seed, **self._map_options)
    self._lake = Lake(desc=self._map, is_slippery=self._slippery)
    state, _ = self._lake.reset(seed=seed)
    self._num_invalid = 0
    return self._render(self._map, int(state)), {'suffix': DIRECTION_HELP}

  def step(self, action: str) -> tuple[Observation, float, bool, bool, Info]:
    """Moves the player in the direction that the reply names."""
    if self._lake is None:
      raise RuntimeError('call reset before step')
    move = parse_direction(action)
    if move is None:
      self._num_invalid += 1
      shown = self._render(self._map, int(self._lake.s))
      observation = board_pictures.with_text(DIRECTION_HELP, shown)
      return observation, self._invalid_reward, False, False, self._info(0.0)
    state, reward, terminated, _, _ = self._lake.step(MOVES[move])
    observation = self._render(self._map, int(state))
    if not terminated:
      reward = self._step_reward
    return (
      observation,
      float(reward),
      terminated,
      False,
      self._info(float(terminated and reward > 0)),
    )

  def _info(self, success: float) -> Info:
    metrics = {'accuracy': success, 'success': success}
    metrics['invalid_actions'] = float(self._num_invalid)
    return {'suffix': DIRECTION_HELP, 'metrics': metrics}


def _check(map_size: int, frozen: float, split: str, view: str) -> None:
  if split not in MAP_SPLITS:
    raise ValueError(f'split must be one of {MAP_SPLITS}, not {split!r}')
  if view not in VIEWS:
    raise ValueError(f'view must be one of {tuple(VIEWS)}, not {view!r}')
  if map_size < 2 or not 0 < frozen <= 1:
    raise ValueError('map_size must be at least 2 and frozen within (0, 1]')


def draw_map(seed: int, *, map_size: int, frozen: float, split: str = '') -> list[str]:
  """Draws a map with a path from start to goal.

  Maps of the other split are drawn again, from seeds that follow from `seed`.

  Args:
    seed: The seed.
    map_size: The number of cells per side.
    frozen: The share of cells that are ice.
    split: 'train', 'test' or ''.

  Returns:
    Rows of Gymnasium's letters S, F, H and G.

  Raises:
    ValueError: If no map of the split was found.
  """
  for attempt in range(_MAX_DRAWS):
    map_seed = int(np.random.SeedSequence([seed, attempt]).generate_state(1)[0])
    rows = generate_random_map(map_size, frozen, seed=map_seed)
    in_test = zlib.crc32('/'.join(rows).encode()) < TEST_MAP_SHARE * 2**32
    if not split or in_test == (split == 'test'):
      return rows
  raise ValueError(
    f'no {split} map of size {map_size} with frozen={frozen} in {_MAX_DRAWS} draws; '
    'lower frozen or use a larger map'
  )


def render_map(rows: list[str], state: int) -> str:
  """Renders the map for the model: cells separated by spaces, rows by line breaks.

  Args:
    rows: The map.
    state: The player's cell, counted row by row.

  Returns:
    The text.
  """
  return '\n'.join(' '.join(row) for row in _symbols(rows, state))


def draw_picture(rows: list[str], state: int) -> MessageParts:
  """Draws the map for a model that sees images.

  Args:
    rows: The map.
    state: The player's cell, counted row by row.

  Returns:
    The parts of a message's content: one image.
  """
  return board_pictures.draw_board(_symbols(rows, state), _tiles())


def _symbols(rows: list[str], state: int) -> list[list[str]]:
  symbols = [
    ['O' if c == 'H' else 'G' if c == 'G' else '.' for c in row] for row in rows
  ]
  symbols[state // len(rows)][state % len(rows)] = 'P'
  return symbols


@functools.cache
def _tiles() -> dict[str, np.ndarray]:
  ice = (208, 232, 248)
  return {
    '.': board_pictures.make_tile(ice),
    'O': board_pictures.make_tile(ice, (board_pictures.DISC, (24, 40, 88))),
    'G': board_pictures.make_tile(ice, (board_pictures.FLAG, (32, 144, 48))),
    'P': board_pictures.make_tile(ice, (board_pictures.FIGURE, (208, 32, 32))),
  }


def look_around(rows: list[str], state: int) -> str:
  """Describes the cells next to the player: `left wall, down ice, …`.

  Args:
    rows: The map.
    state: The player's cell, counted row by row.

  Returns:
    The text.
  """
  row, column = divmod(state, len(rows))
  descriptions = [
    f'{m} {_cell(rows, row + dr, column + dc)}' for m, (dr, dc) in DIRECTIONS.items()
  ]
  return ', '.join(descriptions)


def _cell(rows: list[str], row: int, column: int) -> str:
  inside = 0 <= row < len(rows) and 0 <= column < len(rows)
  return CELLS[rows[row][column]] if inside else 'wall'


VIEWS = {'map': render_map, 'around': look_around, 'image': draw_picture}


def parse_direction(action: str) -> str | None:
  """Returns the last direction that a reply, or its `<answer>`, names.

  Args:
    action: The reply.

  Returns:
    'left', 'down', 'right', 'up' or None.
  """
  text = tagged_answer(action) if '</answer>' in action else action
  words = _DIRECTION_WORDS.findall(text[-1000:])
  return words[-1].lower() if words else None


def shortest_move(rows: list[str], state: int) -> str:
  """Returns the first move of a shortest safe path to the goal.

  Args:
    rows: The map.
    state: The player's cell, counted row by row.

  Returns:
    The direction.
  """
  size = len(rows)
  distance = {(size - 1, size - 1): 0}
  queue = deque(distance)
  while queue:
    current = queue.popleft()
    for dr, dc in DIRECTIONS.values():
      cell = (current[0] - dr, current[1] - dc)
      inside = 0 <= cell[0] < size and 0 <= cell[1] < size
      if inside and rows[cell[0]][cell[1]] != 'H' and cell not in distance:
        distance[cell] = distance[current] + 1
        queue.append(cell)
  position = divmod(state, size)
  neighbours = {
    m: (position[0] + dr, position[1] + dc) for m, (dr, dc) in DIRECTIONS.items()
  }
  return min(
    (m for m in neighbours if neighbours[m] in distance),
    key=lambda m: distance[neighbours[m]],
  )


def demonstrate(
  seed: int,
  *,
  map_size: int = 4,
  frozen: float = 0.8,
  split: str = 'train',
  view: str = 'map',
  noise: float = 0.0,
  haste: float = 0.0,
  max_moves: int = 16,
) -> MessageParts:
  """Plays a guide's episode on the map of `seed` and returns it as messages.

  The guide knows the shortest path. The episode ends at the goal, in a hole, or after
  `max_moves`.

  Args:
    seed: The seed of the map and of the guide.
    map_size: The number of cells per side.
    frozen: The share of cells that are ice.
    split: The split of the map.
    view: What the observations show.
    noise: How often a move is drawn at random instead, which may drown.
    haste: How often the guide heads right, or down at the wall, without looking, which
      may drown.
    max_moves: The maximum number of moves.

  Returns:
    The messages.
  """
  rng = np.random.default_rng([seed, 1])
  env = FrozenLakeEnv(map_size=map_size, frozen=frozen, split=split, view=view)
  observation, _ = env.reset(seed=seed)
  messages, done = [], False
  while not done and len(messages) < 2 * max_moves:
    assert env._lake is not None
    state = int(env._lake.s)
    move = shortest_move(env._map, state)
    uniform = rng.random()
    if uniform < noise:
      move = list(MOVES)[int(rng.integers(len(MOVES)))]
    elif uniform < noise + haste:
      move = 'right' if (state + 1) % map_size else 'down'
    messages.append({'role': 'user', 'content': observation})
    messages.append({'role': 'assistant', 'content': move})
    observation, _, done, _, _ = env.step(move)
  return messages


@option_ranges(size=AT_LEAST_ONE, seed=NOT_NEGATIVE, noise=SHARE, haste=SHARE)
def demonstrations(
  split: str = 'train',
  *,
  size: int = 1000,
  seed: int = 0,
  map_size: int = 4,
  frozen: float = 0.8,
  view: str = 'map',
  noise: float = 0.0,
  haste: float = 0.0,
  max_moves: int = 16,
) -> MessageParts:
  """Generates rows with the messages of `demonstrate`, as a pure function of `seed`.

  Args:
    split: The split of the maps.
    size: The number of rows.
    seed: The seed of all episodes.
    map_size: The number of cells per side.
    frozen: The share of cells that are ice.
    view: What the observations show.
    noise: See `demonstrate`.
    haste: See `demonstrate`.
    max_moves: The maximum number of moves.

  Returns:
    Rows with the key `messages`.
  """
  seeds = np.random.SeedSequence([seed, 2]).generate_state(size)
  play = functools.partial(
    demonstrate,
    map_size=map_size,
    frozen=frozen,
    split=split,
    view=view,
    noise=noise,
    haste=haste,
    max_moves=max_moves,
  )
  return [{'messages': play(int(s))} for s in seeds]
