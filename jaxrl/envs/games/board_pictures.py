"""Board pictures: draws the boards of games as images, the same bits everywhere.

A tile is a background with figures of 8 × 8 cells over it.
"""

from collections.abc import Mapping, Sequence

import numpy as np

from jaxrl.envs.env_registry import MessageParts

TILE_SIZE = 32  # pixels of a tile's side
_CELLS = 8  # of a figure's side
# Figures: every letter but a dot is drawn.
DISC = (
  '........',
  '..oooo..',
  '.oooooo.',
  '.oooooo.',
  '.oooooo.',
  '.oooooo.',
  '..oooo..',
  '........',
)
RING = (
  '........',
  '..oooo..',
  '.o....o.',
  '.o....o.',
  '.o....o.',
  '.o....o.',
  '..oooo..',
  '........',
)
FIGURE = (
  '...oo...',
  '...oo...',
  '.oooooo.',
  '...oo...',
  '...oo...',
  '..o..o..',
  '..o..o..',
  '........',
)
FLAG = (
  '..oooo..',
  '..ooooo.',
  '..oooo..',
  '..o.....',
  '..o.....',
  '..o.....',
  '..o.....',
  '........',
)
CRATE = (
  '........',
  '.oooooo.',
  '.oo..oo.',
  '.o.oo.o.',
  '.o.oo.o.',
  '.oo..oo.',
  '.oooooo.',
  '........',
)
BRICKS = (
  'oooooooo',
  '...o....',
  '...o....',
  'oooooooo',
  '.o.....o',
  '.o.....o',
  'oooooooo',
  '...o....',
)
Color = tuple[int, int, int]
Figure = tuple[Sequence[str], Color]


def make_tile(background: Color, *figures: Figure) -> np.ndarray:
  """Draws a tile.

  Args:
    background: The color below.
    *figures: Patterns and their colors, the topmost last.

  Returns:
    The pixels, uint8 `[TILE_SIZE, TILE_SIZE, 3]`.
  """
  tile = np.full((_CELLS, _CELLS, 3), background, np.uint8)
  for pattern, color in figures:
    drawn = np.array([[cell != '.' for cell in line] for line in pattern])
    tile[drawn] = color
  scale = TILE_SIZE // _CELLS
  return tile.repeat(scale, axis=0).repeat(scale, axis=1)


def draw_board(
  rows: Sequence[Sequence[str]], tiles: Mapping[str, np.ndarray]
) -> MessageParts:
  """Draws a board, as an observation.

  Args:
    rows: The symbols of the board's cells, by row.
    tiles: The tile of each symbol.

  Returns:
    The parts of a message's content: one image, with a thin line between cells.
  """
  from jaxrl.data.images import as_image  # boards shown as text need none

  pixels = np.block([[[tiles[symbol]] for symbol in row] for row in rows])
  pixels[::TILE_SIZE] = pixels[:, ::TILE_SIZE] = 96
  return [{'type': 'image', 'image': as_image(pixels)}]


def with_text(text: str, observation: str | MessageParts) -> str | MessageParts:
  """Puts a line of text before an observation.

  Args:
    text: The text; an empty one changes nothing.
    observation: A text, or parts of a message's content.

  Returns:
    The observation, of the same kind.
  """
  if not text:
    return observation
  if isinstance(observation, str):
    return f'{text}\n{observation}'
  return [{'type': 'text', 'text': f'{text}\n'}, *observation]
