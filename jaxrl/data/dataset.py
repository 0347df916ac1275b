"""GlobalDataset: one set of rows that all environments of a run share."""

import threading
from collections.abc import Callable, Hashable, Mapping, Sequence
from typing import Any

from jaxrl.component_table import Component
from jaxrl.data.curricula import (
  Curriculum,
  SequentialCurriculum,
  make_curriculum,
)
from jaxrl.data.row_sources import (
  DataError,
  Row,
  RowSources,
  describe_sources,
  load_rows,
)
from jaxrl.data.rows.task_rows import TaskReader
from jaxrl.data.seeds import starting_episode
from jaxrl.group_stats import GroupResult
from jaxrl.types import StateDict, Task

DATASET_MODES = ('sample', 'traversal')


class GlobalDataset:
  """Serves rows with a question and an answer by seed.

  Methods may be called from any thread.

  Args:
    rows: The rows themselves, instead of `path`.
    path: A source for `row_sources.load_rows`.
    split: The split of the source.
    mode: 'sample' draws the row that the curriculum has for the seed. 'traversal'
      returns each row once per pass, in order, and then None; the same seed gets the
      same row. An environment that opens such a data set itself gets the row of its
      episode's number, so that each process of the run may open one.
    question_key: The key of a row that holds the question, served as 'question' too;
      see `task_rows` for where else it is looked for, and its forms. An empty key means
      that rows have none.
    answer_key: The key of a row that holds the answer, served as 'answer' too. An empty
      key means that rows have none.
    limit: Use only the first `limit` rows.
    curriculum: Which rows are drawn; see `curricula`. 'shuffle' draws row
      permutation[seed // size][seed % size], so consecutive seeds meet every row once
      before any twice.
    seed: The seed of everything that the curriculum draws at random.

  Raises:
    DataError: If the source is empty, or the question or answer of a row is missing,
      empty or unusable.
  """

  def __init__(
    self,
    rows: list[Row] | None = None,
    *,
    path: RowSources = '',
    split: str = 'train',
    mode: str = 'sample',
    question_key: str = 'question',
    answer_key: str = 'answer',
    limit: int | None = None,
    curriculum: Component = 'shuffle',
    seed: int = 0,
  ):
    if mode not in DATASET_MODES:
      raise ValueError(f'mode must be one of {", ".join(DATASET_MODES)}, not {mode!r}')
    self.path = describe_sources(path)
    self.split = split
    self.mode = mode
    self.seed = seed
    self._lock = threading.RLock()
    self._rows = load_rows(path, split, limit) if rows is None else list(rows)[:limit]
    if not self._rows:
      raise DataError(f'dataset {self.path!r} is empty: it holds no rows')
    self._reader = TaskReader(question_key, answer_key)
    name = f'dataset {self.path!r}' if self.path else 'dataset'
    self._reader.check(self._rows if rows is None else rows[:limit], name)
    self._filters: list[str] = []
    self._curriculum_spec = curriculum
    self._curriculum = self._make_curriculum(curriculum)
    self._cursor = 0
    self._rows_by_seed: dict[int, int] = {}
    self._is_exhausted = False
    self._num_passes = 0  # that have ended

  @property
  def size(self) -> int:
    """Returns the number of rows that pass the filters."""
    return len(self._rows)

  def get_size(self) -> int:
    """Returns `size`, for callers that only hold an actor handle."""
    return self.size

  def fingerprints(self) -> list[int]:
    """Returns a number for each row's task; none if rows have no questions.

    Images and the answer count too: many rows of pictures ask the same question.
    """
    if not self._reader.has_questions:
      return []
    items = map(self._item, range(self.size))
    keys = 'question', 'answer', 'images'
    return [hash(repr([item.get(key) for key in keys])) for item in items]

  def get_task(self, seed: int, index: int | None = None) -> Task | None:
    """Returns the row for an episode's seed as a Task.

    Args:
      seed: The episode's seed.
      index: The episode's number, counted from 0 within its pass. If given, traversal
        goes by it, so that what an episode gets never depends on the order of calls.

    Returns:
      The task, or None when the pass is complete.
    """
    row = self._row_index(seed, index)
    return None if row is None else Task(seed=seed, index=row, item=self._item(row))

  def get_data_item(
    self, seed: int | None = None, index: int | None = None
  ) -> Row | None:
    """Returns the row for a seed as a dict.

    Args:
      seed: The episode's seed. Traversal returns the next row if it is None.
      index: The episode's number within its pass.

    Returns:
      The row, or None when the pass is complete.
    """
    row = self._row_index(seed, index)
    return None if row is None else self._item(row)

  def _item(self, row: int) -> Row:
    return self._reader.read(self._rows[row])

  def _row_index(self, seed: int | None, index: int | None) -> int | None:
    with self._lock:
      if self.mode == 'sample':
        if seed is None:
          raise ValueError("in mode 'sample' rows are drawn by seed: pass one")
        return self._curriculum.draw(seed, seed if index is None else index)
      row = self._next_row(seed) if index is None else index
      self._is_exhausted |= row >= self.size
      return row if row < self.size else None

  def _next_row(self, seed: int | None) -> int:
    """Returns the row of this pass for `seed`, or else the next one."""
    episode = starting_episode()
    if episode is not None and episode.seed == seed:  # an environment asks
      row = episode.number - self._num_passes * self.size
      return row if row >= 0 else row % self.size  # it began before the last pass ended
    if seed is not None and seed in self._rows_by_seed:
      return self._rows_by_seed[seed]
    if episode is not None and episode.is_trial:
      return self._cursor
    row, self._cursor = self._cursor, self._cursor + 1
    if seed is not None:
      self._rows_by_seed[seed] = row
    return row

  def _make_curriculum(self, spec: Component) -> Curriculum:
    if self.mode == 'traversal':
      return SequentialCurriculum(self._rows, self.seed)  # it goes by its own cursor
    return make_curriculum(spec, self._rows, self.seed)

  def filter(self, name: str, keep: Callable[[Row], bool]) -> int:
    """Keeps the rows for which `keep(item)` is true.

    The filter runs once per name, because every environment may ask for the same one.

    Args:
      name: The name of the filter.
      keep: Decides whether to keep a row.

    Returns:
      The number of remaining rows.

    Raises:
      DataError: If no row remains.
    """
    with self._lock:
      if name not in self._filters:
        kept_rows = [r for i, r in enumerate(self._rows) if keep(self._item(i))]
        if not kept_rows:
          raise DataError(f'filter {name!r} leaves no row of dataset {self.path!r}')
        self._rows = kept_rows
        self._filters.append(name)
        self._curriculum = self._make_curriculum(self._curriculum_spec)
      return self.size

  def report(self, results: Sequence[GroupResult]) -> None:
    """Passes the results of groups on to the curriculum.

    It is called once per learner step, before the draws of the next step.

    Args:
      results: For each group its seed, mean accuracy and number of samples.
    """
    with self._lock:
      self._curriculum.report(results)

  def reset(self) -> None:
    """Starts a new pass."""
    with self._lock:
      self._cursor = 0
      self._rows_by_seed.clear()
      self._num_passes += self._is_exhausted
      self._is_exhausted = False

  def state_dict(self) -> StateDict:
    """Returns what a resumed run needs to continue, as JSON."""
    with self._lock:
      return {
        'size': self.size,
        'cursor': self._cursor,
        'given': {str(seed): index for seed, index in self._rows_by_seed.items()},
        'curriculum': self._curriculum.state_dict(),
      }

  def load_state_dict(self, state: StateDict) -> None:
    """Restores the state that `state_dict` returned.

    Args:
      state: The saved state.

    Raises:
      DataError: If the number of rows has changed since then.
    """
    if state['size'] != self.size:
      raise DataError(
        f'dataset {self.path!r} has {self.size} rows, the checkpoint was written '
        f'with {state["size"]}; give it the same data to resume'
      )
    with self._lock:
      self._cursor = state['cursor']
      self._rows_by_seed = {int(seed): index for seed, index in state['given'].items()}
      self._curriculum.load_state_dict(state['curriculum'])


class GlobalDatasetManager:
  """Holds all datasets of a run, one for each combination of name and options."""

  def __init__(self):
    self._datasets: dict[Hashable, Any] = {}

  def register(self, name: Hashable, dataset: Any, **options: object) -> Any:
    """Registers a dataset unless its key is already taken.

    Args:
      name: The name of the dataset.
      dataset: The dataset, or an actor handle of one.
      **options: Everything else that identifies the dataset.

    Returns:
      The dataset that was registered first under this key.
    """
    return self._datasets.setdefault(self._key(name, options), dataset)

  def get(self, name: Hashable, make: Callable[..., object], **options: object) -> Any:
    """Returns the dataset with this name and these options, creating it if needed.

    Args:
      name: The name of the dataset, such as its path.
      make: Called as `make(name, **options)` when there is no such dataset.
      **options: Everything else that identifies the dataset.

    Returns:
      The dataset.
    """
    key = self._key(name, options)
    if key not in self._datasets:
      self._datasets[key] = make(name, **options)
    return self._datasets[key]

  def reset(self) -> list[Any]:
    """Starts a new pass in every dataset.

    Returns:
      What each dataset's `reset` returned; Ray handles return references.
    """
    return [dataset.reset() for dataset in self._datasets.values()]

  @staticmethod
  def _key(name: Hashable, options: Mapping[str, object]) -> Hashable:
    return name, tuple(sorted((key, repr(value)) for key, value in options.items()))
