"""Folder splits say which files of a folder, or of a Hub data set, belong to a split.

A split is known by whole parts of a path: `train.jsonl`, `train-00000-of-02.parquet`,
`foo_train.jsonl` and `train/rows.csv` are training rows, `constraints.jsonl` is none.
What the header of a README.md says of its data files goes before names.
"""

import fnmatch
import re
from collections.abc import Mapping, Sequence
from typing import NamedTuple

from jaxrl.data.rows.row_readers import (
  FILE_READERS,
  DataError,
  file_stem,
  is_row_file,
)
from jaxrl.options import JsonObject

# The names that a split goes by, as on the Hub.
SPLIT_NAMES = {
  'train': ('train', 'training'),
  'validation': ('validation', 'valid', 'val', 'dev'),
  'test': ('test', 'testing', 'eval', 'evaluation'),
}
_SPLIT_BY_NAME = {name: split for split, names in SPLIT_NAMES.items() for name in names}
# Files of these names describe a data set, whatever their suffix.
_DESCRIPTIONS = frozenset(
  'readme license citation dataset_info dataset_infos dataset_dict metadata state '
  'schema stats config croissant manifest package'.split()
)
_PLAIN_FOLDERS = ('', 'data')  # that say nothing of the rows in them
_SHARD = re.compile(r'[-._ ]?\d+(?:[-._ ]?of[-._ ]?\d+)?$')
_TRAIN_WORD = re.compile(r'(?<![^\W_])train(?:ing)?(?![^\W_])', re.IGNORECASE)
_SEPARATOR = re.compile(r'[-._ ]+')


class _LabelledFile(NamedTuple):
  """A file with what its path says of it.

  Attributes:
    path: The path inside the folder, with slashes.
    split: The split, such as 'train' or 'train_sft'; '' if the path names none.
    subset: The folder that tells it from other subsets; '' for none.
    is_exact: Whether a part of the path is just the name of the split.
  """

  path: str
  split: str
  subset: str
  is_exact: bool = True


def list_row_files(paths: Sequence[str]) -> list[str]:
  """Returns the paths that may hold rows, without descriptions and hidden files.

  Args:
    paths: Paths inside the folder, with slashes.
  """
  return sorted(
    path
    for path in paths
    if is_row_file(path)
    and file_stem(path).lower() not in _DESCRIPTIONS
    and not any(part.startswith(('.', '_')) for part in path.split('/'))
  )


def choose_files(
  paths: Sequence[str], readme: str, split: str, part: str, where: str
) -> list[str]:
  """Returns the files that hold a split.

  Args:
    paths: The paths of all files inside the folder, with slashes.
    readme: The text of its README.md, or ''.
    split: The split that is wanted.
    part: A configuration, a folder or a file inside the folder; '' for all.
    where: How messages name the folder.

  Returns:
    Paths, in order. Files whose paths name no split are of any.

  Raises:
    DataError: If there are no such files, or it is not clear which they are.
  """
  if part and part in paths:
    return [part]
  files = list_row_files(paths)
  if not files:
    raise DataError(f'{where} holds no {", ".join(FILE_READERS)} file')
  configs, default = _read_configs(readme, files)
  inside = [path for path in files if path.startswith(f'{part}/')]
  if part in configs or (configs and not part):
    labelled = configs[part or _default_config(configs, default, where)]
  elif part and not inside:
    folders = sorted({path.split('/')[0] for path in files if '/' in path})
    listing = ', '.join([*configs][:20] or folders[:20] or files[:20])
    raise DataError(f'{where} has no part {part!r}: it has {listing}')
  else:
    labelled = [_label(path, part) for path in (inside if part else files)]
  chosen = _of_split(labelled, split, where)
  subsets = sorted({file.subset for file in chosen})
  if len(subsets) > 1:
    names = ', '.join(subset or 'its own files' for subset in subsets)
    example = next(filter(None, subsets))
    raise DataError(
      f'{where} holds several data sets ({names}), which are not mixed: name one, as '
      f'in {where}:{example}'
    )
  return [file.path for file in chosen]


def split_of_path(path: str) -> str:
  """Returns the split that a path names, such as 'train'; '' if it names none.

  Args:
    path: A file's path, with slashes.
  """
  return _label(path).split


def sibling_paths(path: str, split: str) -> list[str]:
  """Returns where the rows of another split may be, beside a file of training rows.

  Args:
    path: The path of a file, such as `train.jsonl` or `train/rows.jsonl`.
    split: The other split.

  Returns:
    Paths, the likeliest first; none if the path does not name the training split by a
    whole word.
  """
  *folders, name = path.rsplit('/', 2)[-2:]
  head = path[: len(path) - len('/'.join([*folders, name]))]
  words = SPLIT_NAMES.get(split, (split,))
  found = []
  for word in words:
    if _TRAIN_WORD.search(name):
      found.append('/'.join([*folders, _TRAIN_WORD.sub(word, name)]))
    elif folders and _TRAIN_WORD.search(folders[0]):
      found.append(f'{_TRAIN_WORD.sub(word, folders[0])}/{name}')
  return [head + other for other in found]


def matching_split(splits: Sequence[str], split: str, where: str) -> str:
  """Returns the name that a wanted split has among those that there are.

  Args:
    splits: The names.
    split: The split that is wanted.
    where: How messages name the source.

  Raises:
    DataError: If there is none, or more than one.
  """
  names = sorted(set(splits))
  if split in names:
    return split
  wanted = _SPLIT_BY_NAME.get(split.lower(), split.lower())
  canonical = {name: _SPLIT_BY_NAME.get(name.lower(), name.lower()) for name in names}
  found = [name for name in names if canonical[name] == wanted]
  if not found:
    aliases = set(SPLIT_NAMES.get(wanted, (wanted,)))
    found = [n for n in names if aliases & set(_SEPARATOR.split(_words(n)))]
  if len(found) == 1:
    return found[0]
  problem = 'has no' if not found else 'has more than one'
  listing = ', '.join(names) or 'none'
  raise DataError(
    f'{where} {problem} split {split!r}; it has {listing}: set split to one of them'
  )


def _of_split(
  files: Sequence[_LabelledFile], split: str, where: str
) -> list[_LabelledFile]:
  splits = [file.split for file in files if file.split]
  if not splits:
    return list(files)
  name = matching_split(splits, split, where)
  chosen = [file for file in files if file.split == name]
  exact = [file for file in chosen if file.is_exact]
  return exact or chosen


def _words(text: str) -> str:
  return text.lower().replace('_', ' ')


def _tokens(text: str) -> list[str]:
  return [token for token in _SEPARATOR.split(_words(text)) if token]


def _label(path: str, root: str = '') -> _LabelledFile:
  """Returns a file with the split and the subset that its path below a root names."""
  inside = path.removeprefix(f'{root}/') if root else path
  folders, stem = inside.split('/')[:-1], file_stem(inside)
  # The part that stands nearest to the rows decides; whole names go before others.
  parts = [_SHARD.sub('', stem), *reversed(folders)]
  split, named = '', ''
  for part in parts:
    if split := _SPLIT_BY_NAME.get(part.lower(), ''):
      break
  is_exact = bool(split)
  for part in () if is_exact else parts:
    if split := _split_within(part):
      named = part
      break
  subset = '/'.join(
    folder
    for folder in (_SHARD.sub('', f) for f in folders if f != named)
    if folder.lower() not in (*_PLAIN_FOLDERS, *_SPLIT_BY_NAME)
  )
  return _LabelledFile(path, split, subset, is_exact)


def _split_within(part: str) -> str:
  """Returns the split that a name such as `foo_train` or `train_sft` says it is of.

  The word at the end of a name decides. A name that begins with the word is a split of
  its own: `train_sft` and `train_gen` are two.
  """
  tokens = _tokens(part)
  while tokens and (tokens[-1].isdigit() or re.fullmatch(r'[a-z]|v?\d+', tokens[-1])):
    tokens.pop()  # the number of a shard or a version
  named = [i for i, token in enumerate(tokens) if token in _SPLIT_BY_NAME]
  if not named:
    return ''
  if named[-1] == len(tokens) - 1:
    return _SPLIT_BY_NAME[tokens[-1]]
  return '_'.join(tokens[named[0] :])


# ---- README.md


def _read_configs(
  readme: str, files: Sequence[str]
) -> tuple[dict[str, list[_LabelledFile]], str]:
  """Returns the files of each configuration in a README.md, and the default's name."""
  match = re.match(r'\ufeff?---\s*\n(.*?)\n---\s*(\n|$)', readme, re.DOTALL)
  if match is None:
    return {}, ''
  import yaml

  try:
    header = yaml.safe_load(match[1])
  except yaml.YAMLError:
    return {}, ''
  entries = header.get('configs') if isinstance(header, Mapping) else None
  configs, default = {}, 'default'
  for entry in entries if isinstance(entries, list) else []:
    if isinstance(entry, Mapping) and (found := _files_of_entry(entry, files)):
      name = str(entry.get('config_name') or 'default')
      configs[name] = found
      default = name if entry.get('default') else default
  return configs, default


def _files_of_entry(
  entry: Mapping[str, object], files: Sequence[str]
) -> list[_LabelledFile]:
  """Returns the files of one configuration with their splits."""
  folder = str(entry.get('data_dir') or '').strip('./')
  prefix = f'{folder}/' if folder else ''
  data_files = entry.get('data_files')
  if data_files is None:
    inside = [path for path in files if path.startswith(prefix)]
    labelled = [_label(path, folder) for path in inside]
    return [file._replace(subset='') for file in labelled]
  if isinstance(data_files, Mapping):
    data_files = [{'split': k, 'path': v} for k, v in data_files.items()]
  found = []
  for item in data_files if isinstance(data_files, list) else [data_files]:
    has_split = isinstance(item, Mapping)
    patterns = item.get('path') if has_split else item
    for pattern in patterns if isinstance(patterns, list) else [patterns]:
      for path in files:
        if _matches(path, prefix + str(pattern)):
          split = str(item.get('split') or 'train') if has_split else ''
          file = _LabelledFile(path, split or _label(path, folder).split, '')
          found += [file] if file not in found else []
  return found


def _matches(path: str, pattern: str) -> bool:
  """Returns whether a path fits a pattern, of which `**/` may be no folder at all."""
  pattern = pattern.removeprefix('./')
  return any(
    fnmatch.fnmatchcase(path, form) for form in {pattern, pattern.replace('**/', '')}
  )


def _default_config(configs: JsonObject, default: str, where: str) -> str:
  """Returns the default configuration, or the only one."""
  if default in configs:
    return default
  if len(configs) > 1:
    raise DataError(
      f'{where} holds several data sets ({", ".join(configs)}), which are not mixed: '
      f'name one, as in {where}:{next(iter(configs))}'
    )
  return next(iter(configs))
