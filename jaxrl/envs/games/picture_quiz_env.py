"""PictureQuiz shows a picture, drawn by seed, and asks what only looking at it tells.

A picture has `side` × `side` coloured cells, numbered from 1 row by row. One of them is
red, and dots are drawn in some. The model answers with a number: which cell is red, or
how many dots there are.
"""

import zlib

import numpy as np

from jaxrl.data.images import Image, as_image
from jaxrl.data.seeds import fold_seed
from jaxrl.envs.env_registry import Info, MessageParts, ResetOptions
from jaxrl.envs.graders.answer_marks import final_answer
from jaxrl.envs.graders.answer_matching import answers_match
from jaxrl.envs.graders.answer_numbers import is_number_like
from jaxrl.options import AT_LEAST_ONE, NOT_NEGATIVE, SHARE, option_ranges

QUESTIONS = {'red': 'Which square is red?', 'dots': 'How many dots?'}
SPLITS = ('', 'train', 'test')
TEST_SHARE = 0.2  # of all pictures, kept for the test split
RED = (200, 40, 40)
COLOURS = ((40, 80, 200), (40, 160, 70), (220, 200, 60), (150, 150, 150))
DOT = (15, 15, 15)


class PictureQuizEnv:
  """Asks one question about a picture; both are pure functions of seed and options.

  Args:
    side: The cells of a side.
    cell_size: The pixels of a cell's side.
    questions: Which questions there are: 'red', 'dots', or 'red,dots'.
    split: 'train' and 'test' have no picture in common; '' draws from all.
    exchanged: Whether the picture is that of another seed, as a control: nothing can be
      learned from it.

  Raises:
    ValueError: If an option is out of range.
  """

  uses_dataset = False  # its tasks are seeds

  def __init__(
    self,
    *,
    side: int = 2,
    cell_size: int = 16,
    questions: str = 'red,dots',
    split: str = '',
    exchanged: bool = False,
  ):
    if split not in SPLITS:
      raise ValueError(f'split must be one of {SPLITS}, not {split!r}')
    if not 2 <= side <= 9 or not 4 <= cell_size <= 256:
      raise ValueError('side must be from 2 to 9, and cell_size from 4 to 256')
    names = [name.strip() for name in questions.split(',')]
    if unknown := set(names) - set(QUESTIONS):
      raise ValueError(f'questions: {sorted(unknown)} are none of {list(QUESTIONS)}')
    self._options = {'side': side, 'cell_size': cell_size, 'split': split}
    self._questions = names
    self._exchanged = exchanged
    self._answer: int | None = None

  def reset(
    self, *, seed: int, options: ResetOptions | None = None
  ) -> tuple[MessageParts, Info]:
    """Draws the picture of `seed`, and asks one of the questions."""
    picture, answers = draw_picture(seed, **self._options)
    if self._exchanged:
      picture, _ = draw_picture(fold_seed(seed, 'exchanged'), **self._options)
    number = np.random.default_rng([seed, 1]).integers(len(self._questions))
    question = self._questions[int(number)]
    self._answer = answers[question]
    return show(picture, QUESTIONS[question]), {}

  def step(self, action: str) -> tuple[str, float, bool, bool, Info]:
    """Rewards a reply whose final answer is the number, and ends the episode."""
    if self._answer is None:
      raise RuntimeError('call reset before step')
    answer = str(self._answer)
    given = final_answer(action, answer)
    right, is_number = float(answers_match(given, answer)), is_number_like(given)
    info = {'metrics': {'accuracy': right, 'invalid_actions': float(not is_number)}}
    return '', right, True, False, info


def show(picture: Image, question: str) -> MessageParts:
  """Returns the parts of a message: a picture, and a question about it.

  Args:
    picture: The picture.
    question: The question.
  """
  return [{'type': 'image', 'image': picture}, {'type': 'text', 'text': question}]


def draw_picture(
  seed: int, *, side: int, cell_size: int, split: str = ''
) -> tuple[Image, dict[str, int]]:
  """Draws a picture; one of the other split is drawn again.

  Args:
    seed: The seed.
    side: The cells of a side.
    cell_size: The pixels of a cell's side.
    split: 'train', 'test' or ''.

  Returns:
    The picture, and the right answer to each of QUESTIONS.
  """
  attempt = 0
  while True:
    rng = np.random.default_rng([seed, 0, attempt])
    pixels, answers = _draw(rng, side, cell_size)
    in_test = zlib.crc32(pixels.tobytes()) < TEST_SHARE * 2**32
    if not split or in_test == (split == 'test'):
      return as_image(pixels), answers
    attempt += 1


def _draw(
  rng: np.random.Generator, side: int, cell_size: int
) -> tuple[np.ndarray, dict[str, int]]:
  count = side * side
  red, dots = int(rng.integers(count)), int(rng.integers(1, count + 1))
  colours = np.array(COLOURS)[rng.integers(len(COLOURS), size=count)]
  colours[red] = RED
  colours = np.clip(colours + rng.integers(-25, 26, colours.shape), 0, 255)
  pixels = colours.reshape(side, side, 3).repeat(cell_size, 0).repeat(cell_size, 1)
  row, column = np.indices(pixels.shape[:2])
  radius = max(1.0, cell_size / 5)
  for cell in rng.permutation(count)[:dots]:
    shift = rng.uniform(-0.2, 0.2, 2) * cell_size
    middle = (np.array(divmod(int(cell), side)) + 0.5) * cell_size + shift
    near = (row + 0.5 - middle[0]) ** 2 + (column + 0.5 - middle[1]) ** 2
    pixels[near <= radius**2] = DOT
  return pixels.astype(np.uint8), {'red': red + 1, 'dots': dots}


@option_ranges(size=AT_LEAST_ONE, seed=NOT_NEGATIVE, haste=SHARE)
def demonstrations(
  split: str = 'train',
  *,
  size: int = 1000,
  seed: int = 0,
  side: int = 2,
  cell_size: int = 16,
  questions: str = 'red,dots',
  haste: float = 0.0,
) -> MessageParts:
  """Generates rows of a guide's answers, as a pure function of `seed`.

  Args:
    split: The split of the pictures.
    size: The number of rows.
    seed: The seed of all rows.
    side: The cells of a side.
    cell_size: The pixels of a cell's side.
    questions: Which questions there are.
    haste: How often the guide says 1 without looking.

  Returns:
    Rows with the key `messages`.
  """
  env = PictureQuizEnv(side=side, cell_size=cell_size, questions=questions, split=split)
  rows = []
  for number in np.random.SeedSequence([seed, 2]).generate_state(size):
    rng = np.random.default_rng([int(number), 3])
    observation, _ = env.reset(seed=int(number))
    answer = 1 if rng.random() < haste else env._answer
    reply = {'role': 'assistant', 'content': str(answer)}
    rows.append({'messages': [{'role': 'user', 'content': observation}, reply]})
  return rows
