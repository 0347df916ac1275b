"""Row sources: files, folders, data sets of the Hugging Face Hub, and generators."""

import bisect
import itertools
import json
import math
import re
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

from jaxrl.component_calls import ComponentCall, parse_call, split_terms
from jaxrl.component_table import ComponentTable
from jaxrl.data import hub
from jaxrl.data.rows.folder_splits import choose_files, matching_split
from jaxrl.data.rows.row_readers import DataError, Row, read_file
from jaxrl.options import JsonObject

# A file or folder; a call of a generator, see GENERATORS; or several of both.
RowSource = str | ComponentCall
RowSources = RowSource | tuple[RowSource, ...]
GENERATE_PREFIX = 'generate:'  # of a generator in a config
SOURCE_KEY = (
  'source_path'  # the key that holds the source of a row if there are several
)
# Called as fn(split, **options), with `size` among the options.
GENERATORS = ComponentTable(
  'generator',
  'dataset.path',
  {
    'arithmetic': 'jaxrl.data.arithmetic:arithmetic_rows',
    'frozen_lake': 'jaxrl.envs.games.frozen_lake_env:demonstrations',
    'picture_quiz': 'jaxrl.envs.games.picture_quiz_env:demonstrations',
  },
)
_MISSING = object()
_EMPTY_MARK = re.compile(
  r'(?:####|\\(?:boxed|fbox)\s*\{(?:[\s$*_`.…{}]|\\text\w*)*\}'
  r'|<answer>[\s$*_`.…]*</answer>)[\s*_.:$`#]*\Z'
)
NamedFile = tuple[Path, str]  # a file, and how messages name it


class RowList(list[Row]):
  """Holds rows and knows the file of each.

  Attributes:
    places: The first row's number of each file, with the file's name.
  """

  def __init__(self, rows: Iterable[Row] = (), places: Iterable[tuple[int, str]] = ()):
    super().__init__(rows)
    self.places = list(places)

  def __getitem__(self, index: Any) -> Any:
    """Returns a row; or the first rows, which keep their places."""
    found = super().__getitem__(index)
    is_start = isinstance(index, slice) and not index.start and index.step in (None, 1)
    return RowList(found, self.places) if is_start else found


def describe_row(rows: object, number: int, name: str) -> str:
  """Returns how messages name a row: by its file and its number there.

  Args:
    rows: All rows.
    number: The row's number among them.
    name: What they are called if they are of no file.
  """
  places = getattr(rows, 'places', None)
  if not places:
    return f'{name}, row {number}'
  start, file = places[bisect.bisect(places, number, key=lambda place: place[0]) - 1]
  return f'{file}, row {number - start}'


def get_field(row: Row, key: str, default: object = None) -> Any:
  """Returns what a row holds under a key, or under a path such as `reward_model.style`.

  Args:
    row: The row.
    key: The key. Where there is no such key, its parts between dots are keys of objects
      within each other.
    default: What is returned if there is no such thing.
  """
  if key in row:
    return row[key]
  value: Any = row
  for part in key.split('.') if '.' in key else ():
    if isinstance(value, str) and value[:1] == '{':  # as CSV stores objects
      try:
        value = json.loads(value)
      except ValueError:
        return default
    if not isinstance(value, dict) or part not in value:
      return default
    value = value[part]
  return default if value is row else value


def has_field(row: Row, key: str) -> bool:
  """Returns whether a row holds anything under a key, as `get_field` reads it.

  Args:
    row: The row.
    key: The key.
  """
  return get_field(row, key, _MISSING) is not _MISSING


def has_empty_mark(value: object) -> bool:
  r"""Returns whether a text ends with `####` or `\boxed{}` that holds no answer.

  Args:
    value: The text; anything else has none.
  """
  return isinstance(value, str) and bool(_EMPTY_MARK.search(value))


def is_empty(value: object) -> bool:
  """Returns whether a value says nothing: null, NaN, blank, or a list of such.

  Args:
    value: The value.
  """
  if value is None or (isinstance(value, float) and math.isnan(value)):
    return True
  if isinstance(value, str):
    return not value.strip()
  if isinstance(value, list | tuple):
    return all(map(is_empty, value))
  return isinstance(value, Mapping) and not value


def load_rows(
  path: RowSources, split: str = 'train', limit: int | None = None
) -> RowList:
  """Loads all rows of a source, or its first `limit` without reading more.

  `limit` is divided evenly among several sources; each row then holds under SOURCE_KEY
  the text of the source that it came from.

  Args:
    path: A file of one of the kinds in `row_readers`; a folder of such files, as
      `folder_splits` reads it; a folder written by Hugging Face's `save_to_disk`; the
      name of a data set of the Hub, such as `openai/gsm8k:main`; the call of a
      generator, one of GENERATORS or `package.module:function`, which makes `limit`
      rows unless its `size` is smaller; or a tuple of such sources. `:PART` after a
      folder or a name picks a configuration, a folder or a file inside.
    split: The split to load.
    limit: The maximum number of rows.

  Returns:
    The rows.

  Raises:
    DataError: If the source is missing, empty or malformed; the error names file and
      line.
  """
  if limit is not None and limit < 1:
    where = f'limit={limit} of dataset {describe_sources(path)!r}'
    raise DataError(f'{where} must be at least 1, or none')
  if isinstance(path, tuple):
    return _load_all(path, split, limit)
  if isinstance(path, ComponentCall):
    return RowList(_generate(path, split, limit))
  rows = _read_files(_find_files(path, split), limit)
  if not rows:
    raise DataError(f'dataset {path!r} is empty: it holds no rows')
  return rows


def describe_sources(path: RowSources) -> str:
  """Returns how messages name a source: as a config writes it."""
  return ' + '.join(map(str, path)) if isinstance(path, tuple) else str(path)


def _load_all(sources: tuple[RowSource, ...], split: str, limit: int | None) -> RowList:
  if len(set(sources)) < len(sources):
    raise DataError(f'dataset {describe_sources(sources)!r} names a source twice')
  rows, count = RowList(), len(sources)
  for i, source in enumerate(sources):
    share = None if limit is None else (limit + count - 1 - i) // count
    if share != 0:
      loaded = load_rows(source, split, share)
      places = loaded.places or [(0, str(source))]
      rows.places += [(start + len(rows), file) for start, file in places]
      rows += [{**row, SOURCE_KEY: str(source)} for row in loaded]
  return rows


def _generate(call: ComponentCall, split: str, limit: int | None) -> list[Row]:
  where = f'dataset {str(call)!r}'
  _, generate, options = GENERATORS.find(call, where)
  if limit is not None:
    options['size'] = min(limit, options.get('size', limit))
  try:
    return generate(split, **options)
  except ValueError as error:
    raise DataError(f'{where}: {error}') from error


def _read_files(files: Iterable[NamedFile], limit: int | None) -> RowList:
  rows = RowList()
  for file, name in files:
    start = len(rows)
    left = None if limit is None else limit - start
    if left == 0:
      break
    rows += itertools.islice(read_file(file), left)
    rows.places.append((start, name))
  return rows


def _find_files(path: str, split: str) -> list[NamedFile]:
  """Returns the files of a source that is a file, a folder or a name on the Hub."""
  location, part = Path(path).expanduser(), ''
  if not location.exists() and ':' in path:
    folder, _, inside = path.rpartition(':')
    if Path(folder).expanduser().is_dir():
      location, part = Path(folder).expanduser(), inside
  if location.is_dir():
    return _find_in_folder(location, split, part)
  if location.exists():
    return [(location, str(location))]
  name = hub.parse_name(path)
  if name is None:
    hint = ''
    if path.startswith(GENERATE_PREFIX) or ' + ' in path:
      hint = '. In Python, several sources are a tuple, and a generator a ComponentCall'
    raise DataError(f'dataset {path!r} does not exist (looked in {Path.cwd()}){hint}')
  return _find_on_hub(name, split)


def _find_in_folder(folder: Path, split: str, part: str) -> list[NamedFile]:
  if not part and (saved := _saved_files(folder, split)) is not None:
    return [(file, str(file)) for file in saved]
  paths = [
    file.relative_to(folder).as_posix() for file in folder.rglob('*') if file.is_file()
  ]
  readme = folder / 'README.md'
  text = readme.read_text('utf-8', 'replace') if readme.is_file() else ''
  chosen = choose_files(paths, text, split, part, str(folder))
  return [(folder / path, str(folder / path)) for path in chosen]


def _find_on_hub(name: hub.HubName, split: str) -> list[NamedFile]:
  repo = hub.open_repo(name, 'dataset')
  where = str(name._replace(part=''))
  readme = repo.read_text('README.md') if 'README.md' in repo.files else ''
  try:
    chosen = choose_files(repo.files, readme, split, name.part, where)
  except DataError as error:
    if repo.is_cached:
      raise DataError(
        f'{error}. This is what the cache has: the Hub cannot be reached'
      ) from error
    if not any(path.endswith('.py') for path in repo.files):
      raise
    raise DataError(
      f'{error}. Its loading script is not run; its rows may be found under '
      f'{where.partition("@")[0]}@refs/convert/parquet'
    ) from error
  folder = repo.download(chosen)
  return [(folder / path, f'{where}/{path}') for path in chosen]


def _saved_files(folder: Path, split: str) -> list[Path] | None:
  """Returns the files of a folder that `save_to_disk` wrote; None for any other."""
  if (folder / 'dataset_dict.json').is_file():
    splits = _read_description(folder / 'dataset_dict.json').get('splits') or []
    return _saved_files(folder / matching_split(splits, split, str(folder)), split)
  state_file = folder / 'state.json'
  if not state_file.is_file():
    return None
  state = _read_description(state_file)
  files = [entry.get('filename') for entry in state.get('_data_files') or []]
  if not files:
    return None
  if state.get('_indices_data_files') or state.get('_indices_files'):
    raise DataError(
      f'{folder}: an old version of `datasets` saved only which rows were selected: '
      'load it there and save it again'
    )
  if (own := state.get('_split')) and re.fullmatch(r'\w+', own):
    matching_split([own], split, str(folder))
  return [folder / str(file) for file in files]


def _read_description(file: Path) -> JsonObject:
  try:
    data = json.loads(file.read_text('utf-8'))
  except (OSError, ValueError) as error:
    raise DataError(f'{file} cannot be read: {error}') from error
  return data if isinstance(data, dict) else {}


def parse_row_sources(text: str) -> RowSources:
  """Parses where rows come from: one or more sources, joined by ` + `.

  Args:
    text: Paths, and call strings of generators, `generate:name(option=value)`.

  Returns:
    A path, the call of a generator, or a tuple of both. A call's text is the term.

  Raises:
    ValueError: If it cannot be read.
  """
  sources = tuple(map(_parse_row_source, split_terms(text, ' + ')))
  return sources if len(sources) > 1 else _parse_row_source(text)


def _parse_row_source(term: str) -> str | ComponentCall:
  if not term.startswith(GENERATE_PREFIX):
    return term
  call = parse_call(term.removeprefix(GENERATE_PREFIX))
  return ComponentCall(call.name, call.options, term)
