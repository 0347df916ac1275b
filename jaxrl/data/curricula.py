"""Curricula: which row of a data set an episode's seed draws.

A curriculum is made as `Curriculum(rows, seed)`, with options of its own by keyword.
`draw` is a pure function of its arguments and, for one that learns, of what has been
reported; what is drawn stays the seed's until its group's result is reported, so that
all members of a group have one row.
"""

from collections import OrderedDict
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any, Literal

import numpy as np

from jaxrl import signature
from jaxrl.data.sources import SOURCE, DataError, Row

Result = tuple[int, float, int]  # a group's seed, its mean accuracy, its attempts
_BLOCK = 1000  # draws over which a mixture has its weights exactly
_GIVEN = 1 << 16  # draws whose results may be outstanding


class Curriculum:
  """A row for every draw.

  rows: the data set's. seed: of whatever is drawn at random.
  """

  def __init__(self, rows: Sequence[Row], seed: int):
    self.size, self.seed = len(rows), seed
    self._kept: OrderedDict[tuple[int, ...], np.ndarray] = OrderedDict()

  def draw(self, seed: int, position: int) -> int:
    """The row for an episode's seed; position: the episode's number, from 0 on."""
    raise NotImplementedError

  def report(self, results: Iterable[Result]) -> None:
    """How groups fared, once a learner step."""

  def state_dict(self) -> dict[str, Any]:
    """What later draws depend on, as JSON."""
    return {}

  def load_state_dict(self, state: Mapping[str, Any]) -> None:
    """Goes on from what `state_dict` gave."""

  def _permutation(self, *parts: int, size: int, keep: int = 4) -> np.ndarray:
    """A shuffle named by `parts`; the last `keep` are kept."""
    if parts not in self._kept:
      rng = np.random.default_rng([self.seed, *parts])
      self._kept[parts] = rng.permutation(size)
      while len(self._kept) > keep:
        self._kept.popitem(last=False)
    return self._kept[parts]


class Sequential(Curriculum):
  """The rows in their order, again and again."""

  def draw(self, seed: int, position: int) -> int:
    return position % self.size


class Shuffle(Curriculum):
  """Permutations of the rows: consecutive seeds meet each once before any twice."""

  def draw(self, seed: int, position: int) -> int:
    epoch, place = divmod(seed, self.size)
    return int(self._permutation(epoch, size=self.size)[place])


class Random(Curriculum):
  """Any row at any time, each draw by itself."""

  def draw(self, seed: int, position: int) -> int:
    return int(np.random.default_rng([self.seed, seed]).integers(self.size))


class EasyToHard(Curriculum):
  """The rows in the order of a number they hold, again and again.

  key: where it is; the least is the easiest. Equals keep their order.
  """

  def __init__(self, rows: Sequence[Row], seed: int, *, key: str = 'difficulty'):
    super().__init__(rows, seed)
    try:
      values = np.array([float(row[key]) for row in rows])
    except KeyError:
      keys = ', '.join(map(str, rows[0]))
      raise DataError(
        f'curriculum easy_to_hard: not every row has the key {key!r}; the first has '
        f'{keys}: name one by key='
      ) from None
    except (TypeError, ValueError) as error:
      raise DataError(f'curriculum easy_to_hard: key {key!r}: {error}') from None
    self._order = np.argsort(values, kind='stable')

  def draw(self, seed: int, position: int) -> int:
    return int(self._order[position % self.size])


class Bandit(Curriculum):
  """Rows whose pass rate is about `target`, by what has been seen of them.

  Each row has a Beta posterior over its pass rate, which every reported group of n
  attempts with mean accuracy x moves: a += n·x, b += n·(1 − x). A draw looks at some
  rows and takes the one whose pass rate is nearest to the target: a rate sampled from
  the posterior (Thompson sampling), or the posterior's mean.

  sampling: 'thompson' or 'mean'. prior: a and b before anything is seen. decay: by
  which all that was seen is multiplied at each report, as the policy moves on; 1
  forgets nothing. candidates: rows looked at in a draw, 0 = all.
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
    good = isinstance(prior, tuple | list) and len(prior) == 2 and min(prior) > 0
    if not good or not 0 <= target <= 1 or not 0 < decay <= 1 or candidates < 0:
      raise DataError(
        f'curriculum bandit: target={target} must lie within [0, 1], decay={decay} '
        f'within (0, 1], prior={prior} be two positive numbers, and '
        f'candidates={candidates} not negative'
      )
    self._target, self._sampling, self._decay = target, sampling, decay
    self._prior = np.array(prior, float)
    self._candidates = min(candidates or self.size, self.size)
    self._seen = np.zeros((self.size, 2))  # attempts right and wrong
    self._given: dict[int, int] = {}

  def draw(self, seed: int, position: int) -> int:
    if seed not in self._given:
      self._given[seed] = self._pick(np.random.default_rng([self.seed, seed]))
      if len(self._given) > _GIVEN:  # those of groups that were lost
        del self._given[next(iter(self._given))]
    return self._given[seed]

  def _pick(self, rng: np.random.Generator) -> int:
    rows = rng.choice(self.size, self._candidates, replace=False)
    a, b = (self._prior + self._seen[rows]).T
    rates = rng.beta(a, b) if self._sampling == 'thompson' else a / (a + b)
    return int(rows[np.argmin(np.abs(rates - self._target))])

  def report(self, results: Iterable[Result]) -> None:
    self._seen *= self._decay
    for seed, accuracy, attempts in results:
      row = self._given.pop(seed, None)
      if row is not None:
        right = attempts * min(max(accuracy, 0.0), 1.0)
        self._seen[row] += (right, attempts - right)

  def state_dict(self) -> dict[str, Any]:
    rows = np.flatnonzero(self._seen.any(axis=1))
    return {
      'seen': {str(row): self._seen[row].tolist() for row in rows},
      'given': {str(seed): row for seed, row in self._given.items()},
    }

  def load_state_dict(self, state: Mapping[str, Any]) -> None:
    self._seen[:] = 0
    for row, counts in state['seen'].items():
      self._seen[int(row)] = counts
    self._given = {int(seed): row for seed, row in state['given'].items()}


class Mixture(Curriculum):
  """Several sources in given shares, each shuffled and passed through by itself.

  weights: one for each term of dataset.path, in its order; () weighs them by their
  rows. Of every thousand draws each source has its share.
  """

  def __init__(
    self, rows: Sequence[Row], seed: int, *, weights: tuple[float, ...] = ()
  ):
    super().__init__(rows, seed)
    by_source: dict[Any, list[int]] = {}
    for index, row in enumerate(rows):
      by_source.setdefault(row.get(SOURCE, ''), []).append(index)
    self._sources = list(by_source.values())
    shares = np.array(weights or [len(found) for found in self._sources], float)
    if len(shares) != len(self._sources) or (shares < 0).any() or not shares.sum():
      sources = ', '.join(map(str, by_source))
      raise DataError(
        f'curriculum mixture: weights={tuple(weights)} must be one number for each '
        f'term of dataset.path, none negative and not all 0; it has {len(by_source)}'
        + (f': {sources}' if SOURCE in rows[0] else ", joined by ' + '")
      )
    exact = _BLOCK * shares / shares.sum()
    self._quota = np.floor(exact).astype(int)
    rest = np.argsort(self._quota - exact, kind='stable')
    self._quota[rest[: _BLOCK - self._quota.sum()]] += 1
    if ((self._quota == 0) & (shares > 0)).any():
      raise DataError(
        f'curriculum mixture: weights={tuple(weights)}: the smallest is below one in '
        f'{_BLOCK} draws'
      )
    self._block = np.repeat(np.arange(len(shares)), self._quota)

  def draw(self, seed: int, position: int) -> int:
    block, place = divmod(position, _BLOCK)
    keep = 4 * len(self._sources) + 4
    order = self._block[self._permutation(block, size=_BLOCK, keep=keep)]
    source = int(order[place])
    before = int((order[:place] == source).sum())
    rows = self._sources[source]
    epoch, index = divmod(block * int(self._quota[source]) + before, len(rows))
    shuffled = self._permutation(epoch, source, size=len(rows), keep=keep)
    return rows[shuffled[index]]


CURRICULA: dict[str, Callable[..., Curriculum]] = {
  'sequential': Sequential,
  'shuffle': Shuffle,
  'random': Random,
  'easy_to_hard': EasyToHard,
  'bandit': Bandit,
  'mixture': Mixture,
}


def make_curriculum(spec: str, rows: Sequence[Row], seed: int) -> Curriculum:
  """The curriculum that a call string names, or a dotted path; ConfigError if none."""
  name, options = signature.parse_call(spec)
  if name not in CURRICULA and ':' not in name:
    raise signature.unknown(name, CURRICULA, 'curriculum', 'dataset.curriculum')
  made = CURRICULA.get(name) or signature.resolve(name)
  signature.check_options(made, options, f'curriculum {name!r}')
  return made(rows, seed, **options)
