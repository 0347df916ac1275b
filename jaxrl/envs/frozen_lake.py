"""Gymnasium's FrozenLake over text: a map drawn by seed, one move a turn.

What the model sees is either the map, a row a line, with `P` the player, `G` the goal,
`O` a hole and `.` ice; or what lies next to the player on each side. It answers with a
direction: up, down, left or right.
"""

import functools
import re
import zlib
from collections import deque
from collections.abc import Mapping
from typing import Any

import numpy as np
from gymnasium.envs.toy_text.frozen_lake import FrozenLakeEnv as Lake
from gymnasium.envs.toy_text.frozen_lake import generate_random_map

MOVES = {'left': 0, 'down': 1, 'right': 2, 'up': 3}  # Gymnasium's numbers
STEPS = {'left': (0, -1), 'down': (1, 0), 'right': (0, 1), 'up': (-1, 0)}
CELLS = {'S': 'ice', 'F': 'ice', 'H': 'hole', 'G': 'goal'}
SPLITS = ('', 'train', 'test')
HELP = 'Say up, down, left or right.'
TEST_SHARE = 0.2  # of all maps, kept for the test split
_TRIES = 1000
_WORDS = re.compile(r'\b(left|down|right|up)\b', re.IGNORECASE)


class FrozenLakeEnv:
  """One lake. The map is a pure function of the seed and of these options.

  map_size: cells a side. frozen: share of cells that are ice. slippery: moves may
  slide sideways, as in Gymnasium. split: 'train' and 'test' have no map in common.
  view: 'map' shows all of it, 'around' the four cells next to the player, in words.
  invalid_reward: for a reply without a direction, which moves nobody. step_reward:
  for any other move that neither wins nor drowns.
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
    self._show = SHOW[view]
    self._map_options = {'map_size': map_size, 'frozen': frozen, 'split': split}
    self._slippery = slippery
    self._invalid_reward, self._step_reward = invalid_reward, step_reward
    self._map: list[str] = []
    self._lake: Lake | None = None
    self._invalid = 0

  def reset(
    self, *, seed: int, options: Mapping[str, Any] | None = None
  ) -> tuple[str, dict[str, Any]]:
    self._map = draw_map(seed, **self._map_options)
    self._lake = Lake(desc=self._map, is_slippery=self._slippery)
    state, _ = self._lake.reset(seed=seed)
    self._invalid = 0
    return self._show(self._map, int(state)), {'suffix': HELP}

  def step(self, action: str) -> tuple[str, float, bool, bool, dict[str, Any]]:
    if self._lake is None:
      raise RuntimeError('call reset before step')
    move = parse(action)
    if move is None:
      self._invalid += 1
      shown = f'{HELP}\n{self._show(self._map, int(self._lake.s))}'
      return shown, self._invalid_reward, False, False, self._info(0.0)
    state, reward, terminated, _, _ = self._lake.step(MOVES[move])
    shown = self._show(self._map, int(state))
    if not terminated:
      reward = self._step_reward
    return (
      shown,
      float(reward),
      terminated,
      False,
      self._info(float(terminated and reward > 0)),
    )

  def _info(self, success: float) -> dict[str, Any]:
    metrics = {'accuracy': success, 'success': success}
    metrics['invalid_actions'] = float(self._invalid)
    return {'suffix': HELP, 'metrics': metrics}


def _check(map_size: int, frozen: float, split: str, view: str) -> None:
  if split not in SPLITS:
    raise ValueError(f'split must be one of {SPLITS}, not {split!r}')
  if view not in SHOW:
    raise ValueError(f'view must be one of {tuple(SHOW)}, not {view!r}')
  if map_size < 2 or not 0 < frozen <= 1:
    raise ValueError('map_size must be at least 2 and frozen within (0, 1]')


def draw_map(seed: int, *, map_size: int, frozen: float, split: str = '') -> list[str]:
  """A map with a way from start to goal, rows of Gymnasium's S, F, H and G.

  Maps of the other split are drawn again, from seeds that follow from `seed`.
  """
  for again in range(_TRIES):
    drawn = int(np.random.SeedSequence([seed, again]).generate_state(1)[0])
    rows = generate_random_map(map_size, frozen, seed=drawn)
    in_test = zlib.crc32('/'.join(rows).encode()) < TEST_SHARE * 2**32
    if not split or in_test == (split == 'test'):
      return rows
  raise ValueError(
    f'no {split} map of size {map_size} with frozen={frozen} in {_TRIES} draws; '
    'lower frozen or use a larger map'
  )


def render(rows: list[str], state: int) -> str:
  """The map as the model sees it: cells apart by spaces, rows by lines."""
  signs = [['O' if c == 'H' else 'G' if c == 'G' else '.' for c in row] for row in rows]
  signs[state // len(rows)][state % len(rows)] = 'P'
  return '\n'.join(' '.join(row) for row in signs)


def look_around(rows: list[str], state: int) -> str:
  """The cells next to the player, in words: `left wall, down ice, …`."""
  row, column = divmod(state, len(rows))
  seen = [f'{m} {_cell(rows, row + dr, column + dc)}' for m, (dr, dc) in STEPS.items()]
  return ', '.join(seen)


def _cell(rows: list[str], row: int, column: int) -> str:
  inside = 0 <= row < len(rows) and 0 <= column < len(rows)
  return CELLS[rows[row][column]] if inside else 'wall'


SHOW = {'map': render, 'around': look_around}


def parse(action: str) -> str | None:
  """The last direction that the reply names, or None."""
  words = _WORDS.findall(action[-1000:])
  return words[-1].lower() if words else None


def shortest_move(rows: list[str], state: int) -> str:
  """The first move of a shortest safe way to the goal."""
  size = len(rows)
  distance = {(size - 1, size - 1): 0}
  line = deque(distance)
  while line:
    here = line.popleft()
    for dr, dc in STEPS.values():
      cell = (here[0] - dr, here[1] - dc)
      inside = 0 <= cell[0] < size and 0 <= cell[1] < size
      if inside and rows[cell[0]][cell[1]] != 'H' and cell not in distance:
        distance[cell] = distance[here] + 1
        line.append(cell)
  place = divmod(state, size)
  around = {m: (place[0] + dr, place[1] + dc) for m, (dr, dc) in STEPS.items()}
  return min(
    (m for m in around if around[m] in distance), key=lambda m: distance[around[m]]
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
) -> list[dict[str, str]]:
  """A guide's conversation on the map of `seed`, as messages.

  The guide knows the shortest way. noise: how often a move is drawn at random instead;
  haste: how often the guide heads right, or at the wall down, without a look. Both may
  drown. Ends at the goal, in a hole, or after `max_moves`.
  """
  rng = np.random.default_rng([seed, 1])
  env = FrozenLakeEnv(map_size=map_size, frozen=frozen, split=split, view=view)
  shown, _ = env.reset(seed=seed)
  messages, done = [], False
  while not done and len(messages) < 2 * max_moves:
    assert env._lake is not None
    state = int(env._lake.s)
    move = shortest_move(env._map, state)
    draw = rng.random()
    if draw < noise:
      move = list(MOVES)[int(rng.integers(len(MOVES)))]
    elif draw < noise + haste:
      move = 'right' if (state + 1) % map_size else 'down'
    messages.append({'role': 'user', 'content': shown})
    messages.append({'role': 'assistant', 'content': move})
    shown, _, done, _, _ = env.step(move)
  return messages


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
) -> list[dict[str, Any]]:
  """`size` rows with the messages of `demonstrate`, a pure function of `seed`."""
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
