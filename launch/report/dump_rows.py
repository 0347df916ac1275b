"""Reads the rows of dumps and of samples.json: where they are, and what they say."""

import contextlib
import json
import pathlib
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from jaxrl.data import json_codec
from launch.report.message_text import count_tool_calls, message_texts

SAMPLES = 'samples.json'
PREVIEW = 160  # characters


def dump_patterns(record: Mapping[str, Any], folder: pathlib.Path) -> list[str]:
  """Returns patterns of the files in which a run's trajectories are, on this machine.

  Args:
    record: Content of config.json.
    folder: Folder of the run.

  Returns:
    Paths with `*`; none for a dump in another place, such as an object store.
  """
  config = record.get('config') or {}
  dump = config.get('trajectory_dump')
  path = str(dump.get('path') or '') if isinstance(dump, Mapping) else ''
  patterns = [
    str(folder / 'trajectories' / f'*.{kind}') for kind in ('jsonl', 'parquet')
  ]
  path = path.removeprefix('file://')
  if not path or '://' in path:
    return patterns
  stem, dot, kind = pathlib.Path(path).name.rpartition('.')
  is_file = bool(dot and stem and kind in ('jsonl', 'parquet'))
  # A relative path begins where the command was started, which is not recorded.
  places = [
    pathlib.Path(path),
    *(parent / path for parent in (folder, *folder.parents)),
  ]
  for place in places:
    home = place.parent if is_file else place
    if home.is_dir():
      names = [f'{stem}-*.{kind}'] if is_file else ['*.jsonl']
      return [str(home.absolute() / name) for name in names] + patterns
  return patterns


def read_part(
  path: pathlib.Path,
) -> Iterator[tuple[int, int, Mapping[str, Any] | None]]:
  """Reads the rows of a part of a dump, or of samples.json.

  Yields:
    The place of each row (its byte, or its number), its size, and its columns; None for
    a line that is not a row.

  Raises:
    ValueError: If the file is not of its format.
  """
  if path.name == SAMPLES:
    for number, row in enumerate(sampled_rows(json.loads(path.read_text('utf-8')))):
      yield number, 0, row
  elif path.suffix == '.parquet':
    import pyarrow.parquet

    number = 0
    for batch in pyarrow.parquet.ParquetFile(path).iter_batches(256):
      for row in batch.to_pylist():
        yield number, 0, row
        number += 1
  else:
    place = 0
    with path.open('rb') as file:
      for line in file:
        row = None
        with contextlib.suppress(ValueError, RecursionError):
          row = json.loads(line)
        yield place, len(line), row if isinstance(row, dict) else None
        place += len(line)


def read_row(path: pathlib.Path, place: int, size: int) -> Mapping[str, Any]:
  """Reads one row of a part again.

  Args:
    path: The file.
    place: Its place, as `read_part` gave it.
    size: Its size.

  Raises:
    ValueError: If the file has changed since.
  """
  if path.name == SAMPLES or path.suffix == '.parquet':
    for number, _, row in read_part(path):
      if number == place and row is not None:
        return row
    raise ValueError(f'{path} has changed')
  with path.open('rb') as file:
    file.seek(place)
    row = json.loads(file.read(size))
  if not isinstance(row, dict):
    raise ValueError(f'{path} has changed')
  return row


def sampled_rows(snapshots: Sequence[Mapping[str, Any]]) -> Iterator[dict[str, Any]]:
  """Yields the trajectories of samples.json, as rows of a dump with a key `sample`."""
  for snapshot in snapshots:
    mode = 'val' if snapshot.get('kind') == 'eval' else 'train'
    for group in snapshot['groups']:
      for member in group['members']:
        yield {
          'trajectory_id': f'{mode}_{snapshot["step"]}_{member["id"]}',
          'step': snapshot['step'],
          'mode': mode,
          'stop_reason': member['stop'],
          'episode_score': member['score'],
          'sample': member,
        }


# What tells a row of a dump, whatever columns were chosen for it, from other JSON.
DUMP_COLUMNS = frozenset(
  'trajectory_id task_idx model_name save_content step turn stop_reason mode '
  'episode_score'.split()
)


def describe_row(row: Mapping[str, Any], place: str = '') -> dict[str, Any] | None:
  """Returns what the index holds of a row of a dump; None if it is not one.

  Args:
    row: The columns of the row, as far as the dump has them.
    place: What names the row where the dump has no `trajectory_id`.
  """
  if not DUMP_COLUMNS & row.keys():
    return None
  name = row.get('trajectory_id')
  if isinstance(name, str):
    # The id ends with the number of the sample and of the turn.
    group, *numbers = name.rsplit('_', 2)
    sample, turn = (int(n) if n.isdecimal() else None for n in (*numbers, '', '')[:2])
  elif place and 'trajectory_id' not in row:
    name = place
    group, sample, turn = _group_without_id(row, place), None, row.get('turn')
  else:
    return None
  values: dict[str, Any] = {
    'id': name,
    'mode': row.get('mode'),
    'step': row.get('step'),
    'grp': group,
    'sample': sample,
    'turn': turn,
    'score': row.get('episode_score'),
    'stop': row.get('stop_reason'),
    'text': '',
  }
  if isinstance(row.get('sample'), Mapping):
    return values | _describe_sample(row['sample'])
  content = row.get('save_content')
  if not isinstance(content, str):
    return values
  try:
    return values | _describe_content(json.loads(content))
  except (ValueError, TypeError, KeyError, AttributeError, RecursionError):
    return None


def _group_without_id(row: Mapping[str, Any], place: str) -> str:
  """Returns the name of the group of a row without an id: its task at its step."""
  task = row.get('task_idx')
  if task is None:
    return place
  words = [row.get('mode'), row.get('step'), 'task', task]
  return '_'.join(str(word) for word in words if word is not None)


def _describe_sample(member: Mapping[str, Any]) -> dict[str, Any]:
  tokens = member['tokens']
  return {
    'tag': member['tag'],
    'length': member['length'],
    'actions': member['actions'],
    'tools': 0,
    'version': max(member['versions'], default=None),
    'preview': ''.join(str(token[0]) for token in tokens if token[2])[:PREVIEW],
    'text': ''.join(str(token[0]) for token in tokens),
  }


def _describe_content(content: Mapping[str, Any]) -> dict[str, Any]:
  messages = content.get('messages') or []
  texts = message_texts(messages)
  written = [text for role, text in texts if role == 'assistant'] or ['']
  values: dict[str, Any] = {
    'tag': content.get('tag'),
    'tools': count_tool_calls(messages),
    'preview': written[-1].strip()[:PREVIEW],
    'text': '\n'.join(text for _, text in texts),
  }
  if 'tokens' in content:  # arrays may have been left out
    mask, versions = (
      json_codec.decode_value(content[name], name)
      for name in ('action_mask', 'weights_version')
    )
    newest = int(versions.max(initial=-1))
    values['length'], values['actions'] = len(mask), int(mask.sum())
    values['version'] = newest if newest >= 0 else None
  return values
