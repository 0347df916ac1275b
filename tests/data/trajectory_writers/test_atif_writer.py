"""Tests of ATIF documents: what each message becomes, and the format's own rules."""

import json

import atif
import numpy as np
import pytest

from jaxrl.data.tool_formats import TOOL_FORMATS
from jaxrl.data.trajectory_writers.atif_writer import to_atif
from jaxrl.data.trajectory_writers.dump_columns import DumpColumns
from jaxrl.data.trajectory_writers.writer import DumpOptions, open_dump
from jaxrl.types import Trajectory
from tests.data.trajectory_writers.dumps import row

CALL = '<tool_call>{"name": "add", "arguments": {"a": 1, "b": null}}</tool_call>'
MESSAGES = [
  {'role': 'system', 'content': 'Be brief.'},
  {'role': 'user', 'content': '1 + 1?'},
  {'role': 'assistant', 'content': f'<think>\nI add.\n</think>\n\nAdding.\n{CALL}'},
  {'role': 'tool', 'content': '2'},
  {'role': 'assistant', 'content': 'It is 2.'},
]


def played(mask, messages=MESSAGES, **more):
  """A trajectory whose sampled tokens are those of the mask, an 'x' for each."""
  on = np.array([letter == 'x' for letter in mask])
  count = len(mask)
  return Trajectory(
    tokens=np.arange(count, dtype=np.int32),
    action_mask=on,
    rollout_logprobs=np.where(on, -0.5 * np.arange(count, dtype=np.float32), 0),
    rewards=np.where(np.arange(count) == count - 1, 1.5, 0).astype(np.float32),
    weights_version=np.where(on, 7, -1).astype(np.int32),
    tag='t',
    messages=list(messages),
    **more,
  )


def document(trajectory, **columns):
  (record,) = DumpColumns(**columns).rows(
    [trajectory], step=3, model_name='m', mode='train'
  )
  data = to_atif(record)
  valid = atif.Trajectory.model_validate(data)
  assert valid.to_json_dict() == json.loads(json.dumps(data))  # nothing is left over
  return data


def test_each_message_becomes_a_step():
  data = document(played('..xxx..xx', stop_reason='max_steps'))
  system, user, first, last = data['steps']
  assert system == {'step_id': 1, 'source': 'system', 'message': 'Be brief.'}
  assert user == {'step_id': 2, 'source': 'user', 'message': '1 + 1?'}
  assert first['message'] == 'Adding.' and first['reasoning_content'] == 'I add.'
  assert first['tool_calls'] == [
    {
      'tool_call_id': 'call_3_1',
      'function_name': 'add',
      'arguments': {'a': 1, 'b': None},
    }
  ]
  results = [{'source_call_id': 'call_3_1', 'content': '2'}]
  assert first['observation'] == {'results': results}
  assert first['metrics'] == {
    'prompt_tokens': 2,
    'completion_tokens': 3,
    'prompt_token_ids': [0, 1],
    'completion_token_ids': [2, 3, 4],
    'logprobs': [-1.0, -1.5, -2.0],
  }
  assert last['metrics']['prompt_token_ids'] == list(range(7))
  assert last['metrics']['logprobs'] == [-3.5, -4.0]
  assert last['extra'] == {'reward': 1.5, 'weights_versions': [7]}
  assert data['agent']['model_name'] == 'm' and data['schema_version'] == 'ATIF-v1.7'
  assert data['trajectory_id'] == 'train_3_t_0_0_0_0_0'
  assert (
    data['extra']['stop_reason'] == 'max_steps' and data['extra']['train_step'] == 3
  )
  assert data['final_metrics'] == {
    'total_steps': 4,
    'total_prompt_tokens': 9,
    'total_completion_tokens': 5,
    'extra': {'score': 1.5},
  }


def test_calls_of_messages_keep_their_ids():
  calls = [
    {'id': 'x', 'function': {'name': 'f', 'arguments': '{"a": 1}'}},
    {'id': 'y', 'function': {'name': 'g', 'arguments': 'not JSON'}},
  ]
  messages = [
    {'role': 'assistant', 'content': None, 'tool_calls': calls},
    {'role': 'tool', 'tool_call_id': 'y', 'content': 'second'},
    {'role': 'tool', 'tool_call_id': 'x', 'content': 'first'},
  ]
  (step,) = document(played('xx', messages))['steps']
  assert [call['arguments'] for call in step['tool_calls']] == [
    {'a': 1},
    {'text': 'not JSON'},
  ]
  assert step['observation']['results'] == [
    {'source_call_id': 'y', 'content': 'second'},
    {'source_call_id': 'x', 'content': 'first'},
  ]


def test_a_row_of_one_turn_ends_with_it():
  data = document(played('..xxx', turn=0))
  assert [step['source'] for step in data['steps']] == ['system', 'user', 'agent']
  assert 'metrics' in data['steps'][2] and 'observation' not in data['steps'][2]
  steps = document(played('.......xx', turn=1))['steps']
  assert steps[2]['is_copied_context'] and 'metrics' not in steps[2]
  assert 'is_copied_context' not in steps[3] and 'metrics' in steps[3]


def test_packed_turns_have_prompts_of_their_own():
  trajectory = played('.x..x', extras={'segments': [2, 3]})
  first, last = document(trajectory)['steps'][2:]
  assert first['metrics']['prompt_token_ids'] == [0]
  assert last['metrics']['prompt_token_ids'] == [2, 3]


def test_images_stay_in_the_document():
  url = 'data:image/png;base64,AAAA'
  content = [{'type': 'text', 'text': 'See'}, {'image_url': {'url': url}}]
  data = document(played('x', [{'role': 'user', 'content': content}]))
  assert data['steps'][0]['message'] == [
    {'type': 'text', 'text': 'See'},
    {'type': 'image', 'source': {'media_type': 'image/png', 'path': url}},
  ]
  assert 'cannot be matched' in data['notes']  # something was sampled without a message


def test_what_is_not_there_is_left_out():
  bare = document(played('xx'), save_arrays=False)
  assert not any('metrics' in step for step in bare['steps'])
  empty = document(played('', [], stop_reason='env_reset_failed'))
  assert empty['steps'] == [{'step_id': 1, 'source': 'system', 'message': ''}]
  assert 'before its first message' in empty['notes']
  with pytest.raises(ValueError, match='t1: save_content'):
    to_atif({'trajectory_id': 't1', 'save_content': '{}'})


def test_a_part_is_a_folder_with_a_document_for_each_trajectory(tmp_path):
  path = f'atif://{tmp_path}/out'
  columns, writer = open_dump('train', tmp_path, DumpOptions(path))
  writer.check(fresh=True)
  for rewards in ((0.0, 1.0), (0.0, 2.0)):  # the second replaces the first
    trajectories = [row(sample_index=i, rewards=rewards, tag='a/b') for i in range(2)]
    writer.write('a/b-step000001', columns.rows(trajectories, mode='train'))
  (folder,) = (tmp_path / 'out').iterdir()
  documents = [
    atif.Trajectory.model_validate_json(p.read_text()) for p in folder.iterdir()
  ]
  assert len(documents) == 2
  assert {one.final_metrics.extra['score'] for one in documents} == {2.0}
  with pytest.raises(ValueError, match='parts of another run'):
    open_dump('train', tmp_path, DumpOptions(path))[1].check(fresh=True)
  with pytest.raises(ValueError, match='save_content'):
    open_dump('train', tmp_path, DumpOptions(path, (('task_idx', 'bigint'),)))


@pytest.mark.parametrize('tool_format', TOOL_FORMATS, ids=lambda one: one.name)
def test_calls_are_read_as_the_run_s_model_writes_them(tool_format):
  call = {'name': 'add', 'arguments': {'a': 'one "word"'}}
  messages = [
    {'role': 'user', 'content': 'Add.'},
    {'role': 'assistant', 'content': tool_format.render([call])},
    {'role': 'tool', 'content': '2'},
  ]
  columns = DumpColumns()
  columns.formats = {'tool_format': tool_format.name}
  record = columns.rows([played('x', messages)], model_name='m', mode='train')[0]
  step = to_atif(record)['steps'][1]
  (made,) = step['tool_calls']
  assert (made['function_name'], made['arguments']) == ('add', call['arguments'])
  assert step['observation']['results'][0]['source_call_id'] == made['tool_call_id']
  assert step['message'] == ''
