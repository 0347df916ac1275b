"""ATIF writer: stores trajectories in Harbor's Agent Trajectory Interchange Format.

The specification is `rfcs/0001-trajectory-format.md` of harbor-framework/harbor. A
document is one JSON object: the agent, and a list of steps that the system, the user or
the agent took.
"""

import json
import os
import pathlib
import re
import shutil
import urllib.parse
from collections.abc import Mapping, Sequence
from importlib import metadata
from typing import Any

from jaxrl.data import json_codec
from jaxrl.data.tool_formats import (
  THINK,
  THOUGHT_FORMATS,
  TOOL_FORMATS,
  UNKNOWN,
  InvalidToolCall,
  ThoughtFormat,
  ToolCall,
  ToolFormat,
)
from jaxrl.data.trajectory_writers.dump_columns import DumpRow
from jaxrl.data.trajectory_writers.file_writer import IMAGES, FileWriter
from jaxrl.options import JsonObject

SCHEMA_VERSION = 'ATIF-v1.7'
PATH_PREFIX = 'atif://'
AGENT = 'jaxrl'
# In the document's `extra`: what places the trajectory in its run.
ROW_FIELDS = (
  *('tag', 'env_group', 'episode_id', 'sample_index', 'turn', 'episode_seed'),
  *('stop_reason', 'is_expert', 'is_greedy', 'weight', 'metrics', 'columns'),
)
_SOURCES = {'system': 'system', 'developer': 'system', 'user': 'user'}
_IMAGE = re.compile(r'data:(image/(?:png|jpeg|gif|webp));base64,')
_MARK = re.compile('sha256:([0-9a-f]{64})')  # what stands for an image, by its digest
_UNSAFE = re.compile(r'[^\w.\-]')

Document = dict[str, Any]


class AtifWriter(FileWriter):
  """Writes parts as folders `FOLDER/MODE-NAME` with a JSON document per trajectory.

  Args:
    path: `atif://FOLDER`, a folder on this machine.
    mode: The mode of the rollout, which is part of the folders' names.
    types: The type of each column, by name.

  Raises:
    ValueError: If the path names no folder, or the columns lack `save_content`.
  """

  def __init__(self, path: str, mode: str, types: Mapping[str, str]):
    where, folder = f'trajectory_dump.path={path}', path.removeprefix(PATH_PREFIX)
    if not folder or '://' in folder:
      raise ValueError(f'{where}: name a folder of this machine, atif://FOLDER')
    if 'save_content' not in types:
      raise ValueError(
        f'{where}: trajectory_dump.columns must have save_content, which documents are '
        'made of'
      )
    super().__init__(folder, mode, types)
    self.path, self._suffix = path, ''

  def write(self, name: str, rows: Sequence[DumpRow]) -> None:
    """Writes a part as one folder, which is whole or not there."""
    part = self.name_of(urllib.parse.quote(name, safe=''))
    write_documents(pathlib.Path(part), rows)


def write_documents(folder: pathlib.Path, rows: Sequence[DumpRow]) -> None:
  """Writes a document `TRAJECTORY_ID.json` for each row into a new folder.

  Args:
    folder: The folder; it is replaced if it exists.
    rows: Rows of a dump, with `save_content`.

  Raises:
    ValueError: If a row's `save_content` is not the JSON of a trajectory.
  """
  partial = folder.with_name(f'{folder.name}.tmp')
  shutil.rmtree(partial, ignore_errors=True)
  partial.mkdir(parents=True)
  for row in rows:
    document = to_atif(row)
    path = partial / f'{_UNSAFE.sub("-", document["trajectory_id"])}.json'
    text = json.dumps(document, allow_nan=False, ensure_ascii=False)
    path.write_text(text + '\n', encoding='utf-8', errors='backslashreplace')
  shutil.rmtree(folder, ignore_errors=True)
  os.replace(partial, folder)


def to_atif(row: DumpRow) -> Document:
  """Converts a row of a dump to an ATIF document.

  Each message becomes a step; the results of tool calls belong to the step that made
  them. If the row has its tokens, steps of the agent have the ids and log-probs of what
  was sampled, and the ids of the prompt.

  Args:
    row: Columns of a dump; `save_content` is the trajectory's JSON. Others that are
      missing are left out.

  Returns:
    The document, as JSON values.

  Raises:
    ValueError: If `save_content` is not the JSON of a trajectory.
  """
  content = _read_content(row)
  replies = _sampled_replies(content)
  steps: list[Document] = []
  extras = content.get('extras') or {}
  thoughts = _named(THOUGHT_FORMATS, extras.get('thought_format'), THINK)
  tool_format = _named(TOOL_FORMATS, extras.get('tool_format'), UNKNOWN)
  for message in content['messages']:
    _add_message(steps, message, thoughts, tool_format)
  notes = _add_replies(steps, replies, _first_reply(content, steps, len(replies)))
  if not steps:
    steps = [{'step_id': 1, 'source': 'system', 'message': ''}]
    notes = 'the episode ended before its first message'
  step = row.get('step')
  extra = {name: content[name] for name in ROW_FIELDS if name in content}
  extra |= _present(mode=row.get('mode'), train_step=step)
  group = f'{content.get("tag", "")}_{content.get("env_group", 0)}'
  group += f'_{content.get("episode_id", 0)}_{content.get("episode_seed", 0)}'
  sample = f'{group}_{content.get("sample_index", 0)}'
  agent = {'name': AGENT, 'version': metadata.version('jaxrl')}
  return {
    'schema_version': SCHEMA_VERSION,
    'session_id': sample if step is None else f'{row.get("mode")}_{step}_{sample}',
    'trajectory_id': row.get('trajectory_id') or f'{sample}_{content.get("turn", 0)}',
    'agent': agent | _present(model_name=row.get('model_name')),
    'steps': steps,
    'final_metrics': _final_metrics(row, steps),
    'extra': extra,
    **_present(notes=notes or None),
  }


def _named(formats: Sequence[Any], name: Any, default: Any) -> Any:
  return next((one for one in formats if one.name == name), default)


def _read_content(row: DumpRow) -> Document:
  try:
    content = json.loads(row['save_content'])
    if not isinstance(content, dict) or not isinstance(content['messages'], list):
      raise ValueError('it has no messages')
    return content
  except (KeyError, TypeError, ValueError, RecursionError) as error:
    raise ValueError(
      f'trajectory {row.get("trajectory_id")}: save_content is not the JSON of a '
      f'trajectory: {error}'
    ) from error


def _present(**fields: object) -> Document:
  """Returns the fields that are not None; the format leaves the others out."""
  return {name: value for name, value in fields.items() if value is not None}


def _first_reply(content: Document, steps: list[Document], count: int) -> int:
  """Returns which of the agent's steps the row's first sampled reply is.

  Rows of single turns hold all messages of their episode, and sampled only some.
  """
  num_agent_steps = sum(step['source'] == 'agent' for step in steps)
  if num_agent_steps == count:
    return 0
  if 'agent/branches' in content.get('metrics', {}):  # the row ends a conversation
    return num_agent_steps - count
  return int(content.get('turn', 0))


def _add_replies(
  steps: list[Document], replies: Sequence[tuple[Document, Document]], first: int
) -> str:
  """Adds what was sampled to the agent's steps, and cuts off what followed it.

  Args:
    steps: The steps, which are changed.
    replies: Metrics and extra of each reply that the row sampled.
    first: Which of the agent's steps the first of them is.

  Returns:
    A note about replies that have no step; '' if there are none.
  """
  places = [i for i, step in enumerate(steps) if step['source'] == 'agent']
  if not replies:
    return ''
  if first < 0 or first + len(replies) > len(places):
    return (
      f'{len(replies)} replies were sampled, and {len(places)} messages are the '
      "agent's: they cannot be matched, so that steps have no tokens"
    )
  sampled_places = places[first : first + len(replies)]
  for place, (metrics, extra) in zip(sampled_places, replies, strict=True):
    steps[place]['metrics'] = metrics
    steps[place]['extra'] = extra
  for place in places:
    if place not in sampled_places:
      steps[place]['is_copied_context'] = True
  if sampled_places[-1] != places[-1]:
    steps[sampled_places[-1]].pop('observation', None)
    del steps[sampled_places[-1] + 1 :]
  return ''


def _sampled_replies(content: Document) -> list[tuple[Document, Document]]:
  """Returns the metrics and the extra of each run of tokens that the model wrote."""
  if 'tokens' not in content:
    return []
  decoded = {
    name: json_codec.decode_value(content[name], name).tolist()
    for name in (
      *('tokens', 'action_mask', 'rollout_logprobs', 'rewards', 'weights_version'),
    )
  }
  tokens, mask = decoded['tokens'], decoded['action_mask']
  lengths = content.get('extras', {}).get('segments') or [len(tokens)]
  begins = [sum(lengths[:i]) for i in range(len(lengths))]
  # A reply begins where the mask does, and no reply goes on in the next segment.
  starts = [
    i for i, on in enumerate(mask) if on and (i in begins or not (i and mask[i - 1]))
  ]
  replies = []
  for start in starts:
    stops = (i for i in range(start + 1, len(mask)) if not mask[i] or i in begins)
    end = next(stops, len(mask))
    begin = max(i for i in begins if i <= start)
    metrics = {
      'prompt_tokens': start - begin,
      'completion_tokens': end - start,
      'prompt_token_ids': tokens[begin:start],
      'completion_token_ids': tokens[start:end],
      'logprobs': decoded['rollout_logprobs'][start:end],
    }
    versions = decoded['weights_version'][start:end]
    extra = {
      'reward': sum(decoded['rewards'][start:end]),
      'weights_versions': sorted(set(versions)),
    }
    replies.append((metrics, extra))
  return replies


def _add_message(
  steps: list[Document],
  message: Document,
  thoughts: ThoughtFormat,
  tool_format: ToolFormat,
) -> None:
  """Appends a message as a step, or as the result of a call to the step before."""
  role, content = str(message.get('role', 'user')), message.get('content')
  if role == 'tool' and steps and steps[-1]['source'] == 'agent':
    calls = [call['tool_call_id'] for call in steps[-1].get('tool_calls', ())]
    results = steps[-1].setdefault('observation', {'results': []})['results']
    call_id = message.get('tool_call_id')
    if call_id not in calls:  # those without an id come in the order of the calls
      call_id = calls[len(results)] if len(results) < len(calls) else None
    results.append(_present(source_call_id=call_id, content=_content(content)))
    return
  step: Document = {'step_id': len(steps) + 1, 'source': _SOURCES.get(role, 'user')}
  if role == 'assistant':
    fields = _agent_fields(step['step_id'], message, thoughts, tool_format)
    step |= {'source': 'agent', **fields}
  else:
    step['message'] = _content(content)
  if role not in (*_SOURCES, 'assistant'):
    step['extra'] = {'role': role}
  steps.append(step)


def _agent_fields(
  step_id: int,
  message: Document,
  thoughts: ThoughtFormat,
  tool_format: ToolFormat,
) -> Document:
  """Returns the message, the thought and the tool calls of what the agent wrote."""
  content = _content(message.get('content'))
  thought = message.get('reasoning_content')
  calls = [_call(call) for call in message.get('tool_calls') or ()]
  if isinstance(content, str):
    if thought is None:
      found, rest = thoughts.split(content, opened=False)
      if thoughts.has_channels or thoughts.closing.strip() in content:
        thought, content = found, rest
    if not calls:
      content, parsed_calls = _extract_calls(content, tool_format)
      calls = [(call['name'], call['arguments'], None) for call in parsed_calls]
  fields: Document = {'message': content}
  if thought:
    fields['reasoning_content'] = str(thought)
  if calls:
    fields['tool_calls'] = [
      {
        'tool_call_id': call_id or f'call_{step_id}_{number}',
        'function_name': name,
        'arguments': arguments,
      }
      for number, (name, arguments, call_id) in enumerate(calls, 1)
    ]
  return fields


def _extract_calls(text: str, tool_format: ToolFormat) -> tuple[str, list[ToolCall]]:
  """Splits a reply into its text and its tool calls, all or none.

  A reply with a call that cannot be read is returned as text, so that whoever reads
  the file sees what the model wrote.
  """
  content, calls = tool_format.parse(text)
  valid = [call for call in calls if not isinstance(call, InvalidToolCall)]
  return (content, valid) if calls and len(valid) == len(calls) else (text, [])


def _call(call: Document) -> tuple[str, JsonObject, str | None]:
  """Returns the name, the arguments and the id of a tool call of a message."""
  function = call.get('function', call)
  arguments = function.get('arguments', {})
  if isinstance(arguments, str):
    try:
      arguments = json.loads(arguments)
    except (ValueError, RecursionError):
      arguments = {'text': arguments}
  if not isinstance(arguments, dict):
    arguments = {'value': arguments}
  call_id = call.get('id')
  return str(function.get('name', '')), arguments, call_id and str(call_id)


def _content(content: object) -> str | list[Document]:
  """Returns text as it is, and other content as a list of parts of text and images."""
  if content is None or isinstance(content, str):
    return content or ''
  parts = [
    _part(piece) for piece in (content if isinstance(content, list) else [content])
  ]
  if all(part['type'] == 'text' for part in parts):
    return '\n'.join(part['text'] for part in parts)
  return parts


def _part(piece: object) -> Document:
  """Returns a part of a message; anything but text and images becomes its JSON."""
  if isinstance(piece, str):
    return {'type': 'text', 'text': piece}
  if isinstance(piece, Mapping):
    if isinstance(piece.get('text'), str):
      return {'type': 'text', 'text': piece['text']}
    image = piece.get('image_url', piece.get('image'))
    url = image.get('url') if isinstance(image, Mapping) else image
    if isinstance(url, str) and (match := _MARK.fullmatch(url)):
      source = {'media_type': 'image/png', 'path': f'../{IMAGES}/{match[1]}.png'}
      return {'type': 'image', 'source': source}
    if isinstance(url, str) and (match := _IMAGE.match(url)):
      return {'type': 'image', 'source': {'media_type': match[1], 'path': url}}
  return {'type': 'text', 'text': json.dumps(piece, ensure_ascii=False)}


def _final_metrics(row: DumpRow, steps: Sequence[Document]) -> Document:
  metrics = [step['metrics'] for step in steps if 'metrics' in step]
  totals: Document = {'total_steps': len(steps)}
  if metrics:
    totals |= {
      f'total_{name}': sum(one[name] for one in metrics)
      for name in ('prompt_tokens', 'completion_tokens')
    }
  if row.get('episode_score') is not None:
    totals['extra'] = {'score': row['episode_score']}
  return totals
