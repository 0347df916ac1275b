"""Makes JSON data of one trajectory, or of the samples of a group, from a dump."""

import json
import pathlib
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np

from jaxrl.data import json_codec
from launch.logging.metric_sinks import Decode
from launch.report.dump_rows import read_row
from launch.report.message_text import (
  find_images,
  message_parts,
  readable,
  with_stored_images,
)
from launch.report.samples import round_finite, token_row, token_texts
from launch.report.trajectory_index import TrajectoryIndex

MAX_TOKENS = 4000  # of one answer
MAX_BRANCHES = 64  # rows of an episode that are compared
MAX_MEMBERS = 64  # samples of a group that are shown
MAX_CHARACTERS = 40_000  # of a sample beside others
# What a trajectory has beside its row; samples of the report have less of it.
NOTHING_SHOWN = {
  'columns': {},
  'metrics': {},
  'extras': {},
  'messages': [],
  'start': 0,
  'gap': None,
  'branches': [],
}


def load_decoder(folder: pathlib.Path, record: Mapping[str, Any]) -> Decode | None:
  """Returns what turns token ids of a run into text; None if it is not to be found."""
  model = (record.get('config') or {}).get('model') or {}
  checkpoint = str(model.get('checkpoint') or '')
  places = [folder / 'model', folder / 'export']
  if checkpoint:
    places += [pathlib.Path(checkpoint), *(p / checkpoint for p in folder.parents)]
  for place in places:
    path = place / 'tokenizer.json'
    if path.is_file():
      from tokenizers import Tokenizer

      try:
        tokenizer = Tokenizer.from_file(str(path))
      except Exception:  # the package's own, of any class
        continue
      return lambda ids: tokenizer.decode(ids, skip_special_tokens=False)
  return None


def show_trajectory(
  index: TrajectoryIndex, name: str, decode: Decode | None, *, start: int = 0
) -> dict[str, Any]:
  """Returns a trajectory with its tokens from `start` on, at most MAX_TOKENS.

  Raises:
    KeyError: If there is no such trajectory.
    ValueError: If the dump has changed, or has something else in its place.
  """
  entry = index.find(name)
  if entry is None:
    raise KeyError(name)
  row, path, place, size = entry
  columns = dict(read_row(path, place, size))
  shown = {**NOTHING_SHOWN, **row, 'source': path.name}
  member = columns.pop('sample', None)
  if isinstance(member, Mapping):  # of samples.json: its tokens, and no messages
    return shown | {
      'images': member.get('images', []),
      'tokens': member['tokens'],
      'num_tokens': member['length'],
      'gap': member['gap'],
      'decoded': True,
      'has_arrays': True,
    }
  content = _content(columns.pop('save_content', None), path)
  extras = content.get('extras') or {}
  tokens = _token_columns(content)
  return shown | {
    'columns': readable({**columns, **(content.get('columns') or {})}),
    'metrics': readable(content.get('metrics') or {}),
    'extras': readable(extras),
    'images': find_images(extras),
    'messages': _rewarded(_messages(content), tokens),
    'tokens': _tokens(tokens, decode, start),
    'start': start,
    'num_tokens': len(tokens['tokens']) if tokens else 0,
    'decoded': decode is not None,
    'branches': _branches(index, row, tokens),
    'has_arrays': bool(tokens),
  }


def show_group(index: TrajectoryIndex, name: str) -> list[dict[str, Any]]:
  """Returns the samples of a group with their conversations, to show side by side."""
  members = []
  for row in index.group(name)[:MAX_MEMBERS]:
    content, messages = {}, []
    entry = index.find(row['id'])
    if entry is not None:
      columns = read_row(*entry[1:])
      member = columns.get('sample')
      if isinstance(member, Mapping):
        messages = _sampled_messages(member)
      else:
        content = _content(columns.get('save_content'), entry[1])
        messages = _rewarded(_messages(content), _token_columns(content))
    members.append({**row, 'messages': _shorten(messages)})
  return members


def _sampled_messages(member: Mapping[str, Any]) -> list[dict[str, Any]]:
  """Returns the tokens of a sample as messages: what was given, what was written."""
  messages: list[dict[str, Any]] = []
  for text, _, acts, *_ in member['tokens']:
    role = 'assistant' if acts else 'given'
    if not messages or messages[-1]['role'] != role:
      messages.append({'role': role, 'parts': [{'kind': 'text', 'text': ''}]})
    messages[-1]['parts'][0]['text'] += text
  return messages


def _shorten(messages: Sequence[dict[str, Any]]) -> list[dict[str, Any]]:
  """Cuts the texts of a long conversation; its own page has all of it."""
  left = MAX_CHARACTERS
  for message in messages:
    for part in message['parts']:
      for key in ('text', 'arguments'):
        if key in part:
          if len(part[key]) > left:
            part[key] = part[key][:left] + ' …'
          left = max(0, left - len(part[key]))
  return list(messages)


def _content(text: Any, path: pathlib.Path | None = None) -> dict[str, Any]:
  """Reads save_content, with the images of messages that lie beside the dump."""
  content = json.loads(text) if isinstance(text, str) else {}
  if not isinstance(content, dict):
    raise ValueError('save_content is not a trajectory')
  if path is not None and content.get('images'):
    content['messages'] = with_stored_images(content.get('messages'), path.parent)
  return content


def _messages(content: Mapping[str, Any]) -> list[dict[str, Any]]:
  return [
    {'role': str(message.get('role', '')), 'parts': message_parts(message)}
    for message in content.get('messages') or ()
    if isinstance(message, Mapping)
  ]


def _rewarded(
  messages: list[dict[str, Any]], columns: Mapping[str, np.ndarray]
) -> list[dict[str, Any]]:
  """Adds to each reply of the model the sum of its rewards, as `reward`.

  Replies in the prompt are not the model's, so that the last ones are those of the
  stretches of tokens that it wrote.
  """
  replies = [message for message in messages if message['role'] == 'assistant']
  acts = np.asarray(columns.get('action_mask', ()), bool)
  if not acts.any():
    return messages
  starts = np.flatnonzero(acts & ~np.concatenate([[False], acts[:-1]]))
  if len(starts) > len(replies):
    return messages
  sums = np.add.reduceat(np.asarray(columns['rewards'], np.float64), starts)
  for message, reward in zip(replies[-len(starts) :], sums, strict=True):
    message['reward'] = round_finite(reward) or 0
  return messages


def _token_columns(content: Mapping[str, Any]) -> dict[str, np.ndarray]:
  """Returns the arrays with one entry for each token; {} if the dump has none."""
  names = ('tokens', 'action_mask', 'rollout_logprobs', 'rewards', 'weights_version')
  if any(name not in content for name in names):
    return {}
  extras = content.get('extras') or {}
  arrays = {name: json_codec.decode_value(content[name], name) for name in names}
  for name in ('advantages', 'old_logprobs'):
    if isinstance(extras.get(name), Mapping):
      arrays[name] = json_codec.decode_value(extras[name], name)
  length = len(arrays['tokens'])
  return {name: array for name, array in arrays.items() if len(array) == length}


def _tokens(
  columns: Mapping[str, np.ndarray], decode: Decode | None, start: int
) -> list[list[Any]]:
  """Returns tokens as static/tokens.js takes them."""
  if not columns:
    return []
  ids = columns['tokens'][start : start + MAX_TOKENS].tolist()
  texts = token_texts(ids, decode)
  return [token_row(columns, at, text) for at, text in enumerate(texts, start)]


def _branches(
  index: TrajectoryIndex, row: Mapping[str, Any], columns: Mapping[str, np.ndarray]
) -> list[dict[str, Any]]:
  """Returns the other rows of the same episode, and the token where each parts."""
  rows = [
    other
    for other in index.group(row['grp'])
    if other['sample'] == row['sample'] and other['sample'] is not None
  ]
  branches = []
  for other in rows[:MAX_BRANCHES] if len(rows) > 1 else ():
    parts_at = None
    entry = index.find(other['id'])
    if entry is not None and columns and other['id'] != row['id']:
      theirs = _token_columns(_content(read_row(*entry[1:]).get('save_content')))
      if theirs:
        parts_at = _common_length(columns['tokens'], theirs['tokens'])
    branches.append({**other, 'parts_at': parts_at})
  return branches


def _common_length(a: np.ndarray, b: np.ndarray) -> int:
  length = min(len(a), len(b))
  different = np.flatnonzero(a[:length] != b[:length])
  return int(different[0]) if len(different) else length
