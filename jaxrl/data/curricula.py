"""Curricula decide which row of a dataset an episode's seed draws.

A curriculum is constructed as `Curriculum(rows, seed)`, with its own options by
keyword. `draw` is a pure function of its arguments and, for curricula that learn, of
the reported results. A drawn row stays assigned to its seed until the result of its
group is reported, so that all samples of a group get the same row.
"""

from collections import OrderedDict
from collections.abc import Callable, Iterable, Sequence
from typing import Any, Literal

import numpy as np

from jaxrl.component_table import Component, ComponentTable, component_name
from jaxrl.data.row_sources import SOURCE_KEY, DataError, Row
from jaxrl.group_stats import GroupResult
from jaxrl.options import NOT_NEGATIVE, SHARE, Range, option_ranges
from jaxrl.types import StateDict

_BLOCK_DRAWS = 1000  # number of draws over which a mixture matches its weights exactly
_MAX_OUTSTANDING = 1 << 16  # number of draws whose results may be outstanding


class Curriculum:
  """Base class: chooses a row for every draw.

  Args:
    rows: The rows of the dataset.
    seed: The seed of everything that is drawn at random.

  Attributes:
    size: The number of rows.
    seed: The seed.
  """

  def __init__(self, rows: Sequence[Row], seed: int):
    self.size = len(rows)
    self.seed = seed
    self._permutations: OrderedDict[tuple[int, ...], np.ndarray] = OrderedDict()

  def draw(self, seed: int, position: int) -> int:
    """Returns the row for an episode.

    Args:
      seed: The episode's seed.
      position: The episode's number, counted from 0.

    Returns:
      The index of the row.
    """
    raise NotImplementedError

  def report(self, results: Iterable[GroupResult]) -> None:
    """Receives the results of groups once per learner step.

    Args:
      results: For each group its seed, mean accuracy and number of samples.
    """

  def state_dict(self) -> StateDict:
    """Returns everything that later draws depend on, as JSON."""
    return {}

  def load_state_dict(self, state: StateDict) -> None:
    """Restores the state that `state_dict` returned."""

  def _permutation(self, *parts: int, size: int, keep: int = 4) -> np.ndarray:
    """Returns the permutation identified by `parts`; the last `keep` are cached."""
    if parts not in self._permutations:
      rng = np.random.default_rng([self.seed, *parts])
      self._permutations[parts] = rng.permutation(size)
      while len(self._permutations) > keep:
        self._permutations.popitem(last=False)
    return self._permutations[parts]


class SequentialCurriculum(Curriculum):
  """Draws the rows in order, over and over."""

  def draw(self, seed: int, position: int) -> int:
    """Returns the row at `position`, modulo the number of rows."""
    return position % self.size


class ShuffleCurriculum(Curriculum):
  """Draws permutations: consecutive seeds meet each row once before any twice."""

  def draw(self, seed: int, position: int) -> int:
    """Returns the row for `seed` in the permutation of its epoch."""
    epoch, position_in_epoch = divmod(seed, self.size)
    return int(self._permutation(epoch, size=self.size)[position_in_epoch])


class RandomCurriculum(Curriculum):
  """Draws each row independently and uniformly."""

  def draw(self, seed: int, position: int) -> int:
    """Returns a uniformly drawn row for `seed`."""
    return int(np.random.default_rng([self.seed, seed]).integers(self.size))


class EasyToHardCurriculum(Curriculum):
  """Draws the rows in ascending order of a difficulty value, over and over.

  Args:
    rows: The rows of the dataset.
    seed: Unused; the order is fixed.
    key: The row's key that holds the difficulty. Rows with equal values keep their
      order.

  Raises:
    DataError: If a row lacks the key or its value is not a number.
  """

  def __init__(self, rows: Sequence[Row], seed: int, *, key: str = 'difficulty'):
    super().__init__(rows, seed)
    try:
      values = np.array([float(row[key]) for row in rows])
    except KeyError:
      keys = ', '.join(map(str, rows[0]))
      raise DataError(
        f'curriculum easy_to_hard: not every row has the key {key!r}; the first has '
        f'{keys}: choose one by key='
      ) from None
    except (TypeError, ValueError) as error:
      raise DataError(f'curriculum easy_to_hard: key {key!r}: {error}') from None
    self._order = np.argsort(values, kind='stable')

  def draw(self, seed: int, position: int) -> int:
    """Returns the row whose rank by difficulty is `position`, modulo their number."""
    return int(self._order[position % self.size])


@option_ranges(
  target=SHARE, decay=Range(0, 1, excludes_low=True), candidates=NOT_NEGATIVE
)
class BanditCurriculum(Curriculum):
  """Draws rows whose estimated pass rate is close to `target`.

  Each row has a Beta posterior over its pass rate. Every reported group of n samples
  with mean accuracy x updates it: a += n·x, b += n·(1 − x). A draw examines some rows
  and takes the one whose pass rate is nearest to the target. The rate is either sampled
  from the posterior (Thompson sampling) or the posterior's mean.

  Args:
    rows: The rows of the dataset.
    seed: The seed of everything that is drawn at random.
    target: The preferred pass rate, in [0, 1].
    sampling: 'thompson' or 'mean'.
    prior: The parameters a and b before any result.
    decay: The factor applied to all counts at each report, as the policy changes; 1
      forgets nothing.
    candidates: The number of rows examined per draw; 0 examines all.

  Raises:
    DataError: If `prior` is not two positive numbers.
  """

  def __init__(
    self,
    rows: Sequence[Row],
    seed: int,
    *,
    target: float = 0.5,
    sampling: Literal['thompson', 'mean'] = 'thompson',
    prior: tuple[float, float] = (1.0, 1.0),
    decay: float = 1.0,
    candidates: int = 32,
  ):
    super().__init__(rows, seed)
    if not isinstance(prior, tuple | list) or len(prior) != 2 or min(prior) <= 0:
      raise DataError(f'curriculum bandit: prior={prior} must be two positive numbers')
    self._target = target
    self._sampling = sampling
    self._decay = decay
    self._prior = np.array(prior, float)
    self._candidates = min(candidates or self.size, self.size)
    self._counts = np.zeros((self.size, 2))  # right and wrong samples of each row
    self._rows_by_seed: dict[int, int] = {}

  def draw(self, seed: int, position: int) -> int:
    """Returns the row assigned to `seed`, choosing one on the first call."""
    if seed not in self._rows_by_seed:
      self._rows_by_seed[seed] = self._pick(np.random.default_rng([self.seed, seed]))
      if len(self._rows_by_seed) > _MAX_OUTSTANDING:
        # The oldest entry belongs to a group that was dropped.
        del self._rows_by_seed[next(iter(self._rows_by_seed))]
    return self._rows_by_seed[seed]

  def _pick(self, rng: np.random.Generator) -> int:
    rows = rng.choice(self.size, self._candidates, replace=False)
    a, b = (self._prior + self._counts[rows]).T
    rates = rng.beta(a, b) if self._sampling == 'thompson' else a / (a + b)
    return int(rows[np.argmin(np.abs(rates - self._target))])

  def report(self, results: Iterable[GroupResult]) -> None:
    """Updates the posteriors with the results of groups."""
    self._counts *= self._decay
    for seed, accuracy, attempts in results:
      row = self._rows_by_seed.pop(seed, None)
      if row is not None:
        right = attempts * min(max(accuracy, 0.0), 1.0)
        self._counts[row] += (right, attempts - right)

  def state_dict(self) -> StateDict:
    """Returns the counts of each row and the rows whose results are outstanding."""
    rows = np.flatnonzero(self._counts.any(axis=1))
    return {
      'seen': {str(row): self._counts[row].tolist() for row in rows},
      'given': {str(seed): row for seed, row in self._rows_by_seed.items()},
    }

  def load_state_dict(self, state: StateDict) -> None:
    """Restores the counts and the outstanding rows."""
    self._counts[:] = 0
    for row, counts in state['seen'].items():
      self._counts[int(row)] = counts
    self._rows_by_seed = {int(seed): row for seed, row in state['given'].items()}


class MixtureCurriculum(Curriculum):
  """Draws from several sources in fixed shares; each source is shuffled on its own.

  Of every thousand draws each source has its exact share.

  Args:
    rows: The rows of the dataset, marked with their source.
    seed: The seed of the permutations.
    weights: One weight for each term of dataset.path, in its order; () weighs sources
      by their number of rows.

  Raises:
    DataError: If the weights do not fit the sources.
  """

  def __init__(
    self, rows: Sequence[Row], seed: int, *, weights: tuple[float, ...] = ()
  ):
    super().__init__(rows, seed)
    by_source: dict[Any, list[int]] = {}
    for index, row in enumerate(rows):
      by_source.setdefault(row.get(SOURCE_KEY, ''), []).append(index)
    self._sources = list(by_source.values())
    shares = np.array(weights or [len(indices) for indices in self._sources], float)
    if len(shares) != len(self._sources) or (shares < 0).any() or not shares.sum():
      sources = ', '.join(map(str, by_source))
      raise DataError(
        f'curriculum mixture: weights={tuple(weights)} must be one number for each '
        f'term of dataset.path, none negative and not all 0; it has {len(by_source)}'
        + (f': {sources}' if SOURCE_KEY in rows[0] else ", joined by ' + '")
      )
    exact_quota = _BLOCK_DRAWS * shares / shares.sum()
    self._quota = np.floor(exact_quota).astype(int)
    largest_remainders = np.argsort(self._quota - exact_quota, kind='stable')
    self._quota[largest_remainders[: _BLOCK_DRAWS - self._quota.sum()]] += 1
    if ((self._quota == 0) & (shares > 0)).any():
      raise DataError(
        f'curriculum mixture: weights={tuple(weights)}: the smallest gets less '
        f'than one of {_BLOCK_DRAWS} draws: raise it, or set it to 0'
      )
    self._block = np.repeat(np.arange(len(shares)), self._quota)

  def draw(self, seed: int, position: int) -> int:
    """Returns the row at `position` of the mixture."""
    block, position_in_block = divmod(position, _BLOCK_DRAWS)
    keep = 4 * len(self._sources) + 4
    order = self._block[self._permutation(block, size=_BLOCK_DRAWS, keep=keep)]
    source = int(order[position_in_block])
    draws_before = int((order[:position_in_block] == source).sum())
    rows = self._sources[source]
    epoch, index = divmod(block * int(self._quota[source]) + draws_before, len(rows))
    shuffled = self._permutation(epoch, source, size=len(rows), keep=keep)
    return rows[shuffled[index]]


CURRICULA: ComponentTable[Callable[..., Curriculum]] = ComponentTable(
  'curriculum',
  'dataset.curriculum',
  {
    'sequential': SequentialCurriculum,
    'shuffle': ShuffleCurriculum,
    'random': RandomCurriculum,
    'easy_to_hard': EasyToHardCurriculum,
    'bandit': BanditCurriculum,
    'mixture': MixtureCurriculum,
  },
)


def check_curriculum_class(value: Any, where: str) -> None:
  """Checks that a component is a curriculum.

  Args:
    value: The component.
    where: What error messages begin with.

  Raises:
    ValueError: If it is not a class derived from `Curriculum`.
  """
  if not isinstance(value, type) or not issubclass(value, Curriculum):
    raise ValueError(
      f'{where}: {component_name(value)} is not a curriculum: derive a class from '
      'jaxrl.data.curricula.Curriculum'
    )


def make_curriculum(
  curriculum: Component, rows: Sequence[Row], seed: int
) -> Curriculum:
  """Builds a curriculum.

  Args:
    curriculum: A call such as `ComponentCall('bandit', {'target': 0.4})`, a name such
      as `my_lab.rows:Newest`, or the class itself.
    rows: The rows of the dataset.
    seed: The seed of everything that is drawn at random.

  Returns:
    The curriculum.

  Raises:
    ValueError: If there is no such curriculum or it has no such option.
  """
  _, curriculum_class, options = CURRICULA.find(curriculum)
  check_curriculum_class(curriculum_class, 'dataset.curriculum')
  return curriculum_class(rows, seed, **options)
