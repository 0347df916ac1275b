"""GlobalDataset: one set of rows, shared by every environment of a run."""

import threading
from collections.abc import Callable, Hashable, Mapping, Sequence
from typing import Any

from jaxrl.data.curricula import Curriculum, Result, Sequential, make_curriculum
from jaxrl.data.sources import DataError, Row, load_rows
from jaxrl.types import Task

MODES = ('sample', 'traversal')


class GlobalDataset:
  """Rows with a question and an answer, given out by seed.

  path: a source of `sources.load_rows`; or rows: the rows themselves.
  mode: 'sample' draws the row that the curriculum has for the seed. 'traversal'
    gives each row once a pass, in order, then None; the same seed gets the same row.
  curriculum: a call string, see `curricula`. 'shuffle' draws row
    permutation[seed // size][seed % size]: consecutive seeds meet every row once
    before any twice.
  question_key, answer_key: where a row holds them; they are also given out as
    'question' and 'answer'. An empty key means that the rows have no such thing.
  limit: use only so many rows. seed: of what the curriculum draws at random.

  Methods may be called from any thread.
  """

  def __init__(
    self,
    rows: list[Row] | None = None,
    *,
    path: str = '',
    split: str = 'train',
    mode: str = 'sample',
    question_key: str = 'question',
    answer_key: str = 'answer',
    limit: int | None = None,
    curriculum: str = 'shuffle',
    seed: int = 0,
  ):
    if mode not in MODES:
      raise ValueError(f'mode must be one of {", ".join(MODES)}, not {mode!r}')
    self.path, self.split, self.mode, self.seed = path, split, mode, seed
    self._lock = threading.RLock()
    self._rows = load_rows(path, split, limit) if rows is None else list(rows)[:limit]
    if not self._rows:
      raise DataError(f'dataset {path!r} is empty: it holds no rows')
    self._keys = {'question': question_key, 'answer': answer_key}
    self._check_keys()
    self._filters: list[str] = []
    self._spec, self._curriculum = curriculum, self._make_curriculum(curriculum)
    self._cursor = 0
    self._given: dict[int, int] = {}

  def _check_keys(self) -> None:
    for key in filter(None, self._keys.values()):
      for i, row in enumerate(self._rows):
        if key not in row:
          raise DataError(
            f'row {i} of dataset {self.path!r} has no key {key!r}; its keys are '
            f'{", ".join(map(str, row))}: set question_key and answer_key'
          )

  @property
  def size(self) -> int:
    """The number of rows, filters applied."""
    return len(self._rows)

  def get_size(self) -> int:
    """`size` as a method, for those who hold only a handle."""
    return self.size

  def get_task(self, seed: int, index: int | None = None) -> Task | None:
    """The row for an episode's seed, as a Task; None when the pass is over.

    index: the episode's number, counted from 0 within its pass. Traversal goes by
    it where given, so that what an episode gets never depends on who asked first.
    """
    row = self._row_index(seed, index)
    return None if row is None else Task(seed=seed, index=row, item=self._item(row))

  def get_data_item(
    self, seed: int | None = None, index: int | None = None
  ) -> dict[str, Any] | None:
    """The row itself; without a seed, traversal gives the next one."""
    row = self._row_index(seed, index)
    return None if row is None else self._item(row)

  def _item(self, row: int) -> Row:
    item = dict(self._rows[row])
    item.update({name: item[key] for name, key in self._keys.items() if key})
    return item

  def _row_index(self, seed: int | None, index: int | None) -> int | None:
    with self._lock:
      if self.mode == 'sample':
        if seed is None:
          raise ValueError("in mode 'sample' a row is drawn by its seed: give one")
        return self._curriculum.draw(seed, seed if index is None else index)
      row = self._next_row(seed) if index is None else index
      return row if row < self.size else None

  def _next_row(self, seed: int | None) -> int:
    """The row this pass gave `seed` before, else the next one of the pass."""
    if seed is not None and seed in self._given:
      return self._given[seed]
    row, self._cursor = self._cursor, self._cursor + 1
    if seed is not None:
      self._given[seed] = row
    return row

  def _make_curriculum(self, spec: str) -> Curriculum:
    if self.mode == 'traversal':
      return Sequential(self._rows, self.seed)  # it goes by its own cursor
    return make_curriculum(spec, self._rows, self.seed)

  def filter(self, name: str, keep: Callable[[Row], bool]) -> int:
    """Keeps the rows for which `keep(item)` holds; returns how many are left.

    Done once per name: every environment may ask for the same filter.
    """
    with self._lock:
      if name not in self._filters:
        kept = [r for i, r in enumerate(self._rows) if keep(self._item(i))]
        if not kept:
          raise DataError(f'filter {name!r} leaves no row of dataset {self.path!r}')
        self._rows = kept
        self._filters.append(name)
        self._curriculum = self._make_curriculum(self._spec)
      return self.size

  def report(self, results: Sequence[Result]) -> None:
    """Tells the curriculum how groups fared: (seed, mean accuracy, attempts) of each.

    Once a learner step, before the draws of the next.
    """
    with self._lock:
      self._curriculum.report(results)

  def reset(self) -> None:
    """Starts a new pass."""
    with self._lock:
      self._cursor = 0
      self._given.clear()

  def state_dict(self) -> dict[str, Any]:
    """What a resumed run needs to go on, as JSON."""
    with self._lock:
      return {
        'size': self.size,
        'cursor': self._cursor,
        'given': {str(seed): index for seed, index in self._given.items()},
        'curriculum': self._curriculum.state_dict(),
      }

  def load_state_dict(self, state: Mapping[str, Any]) -> None:
    """Raises DataError if the dataset has changed its size since."""
    if state['size'] != self.size:
      raise DataError(
        f'dataset {self.path!r} has {self.size} rows, the checkpoint was written '
        f'with {state["size"]}; give it the same data to resume'
      )
    with self._lock:
      self._cursor = state['cursor']
      self._given = {int(seed): index for seed, index in state['given'].items()}
      self._curriculum.load_state_dict(state['curriculum'])


class GlobalDatasetManager:
  """All datasets of a run, one per key; a key is everything that makes it."""

  def __init__(self):
    self._datasets: dict[Hashable, Any] = {}

  def register(self, name: str, dataset: Any, **options: Any) -> Any:
    """Registers `dataset` and returns the one registered under this key first."""
    return self._datasets.setdefault(self._key(name, options), dataset)

  def get(self, name: str, make: Callable[..., Any], **options: Any) -> Any:
    """The dataset of this name and these options, made by `make(name, **options)`."""
    key = self._key(name, options)
    if key not in self._datasets:
      self._datasets[key] = make(name, **options)
    return self._datasets[key]

  def reset(self) -> list[Any]:
    """Starts a new pass everywhere; returns what the handles' `reset` returned."""
    return [dataset.reset() for dataset in self._datasets.values()]

  @staticmethod
  def _key(name: str, options: Mapping[str, Any]) -> Hashable:
    return name, tuple(sorted((key, repr(value)) for key, value in options.items()))
