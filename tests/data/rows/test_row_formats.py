"""Rows as users have them, and the one line that a broken row gets."""

import json

import pytest

from jaxrl.data.row_sources import DataError
from jaxrl.data.rows.row_formats import RowFormat
from jaxrl.data.rows.task_rows import RowColumns

USER = {'role': 'user', 'content': 'Hi'}
REPLY = {'role': 'assistant', 'content': 'Ho'}
UNTRAINED = USER | {'train': False}


def turns(messages):
  return [(m['role'], m['content'], m.get('train', True)) for m in messages]


@pytest.mark.parametrize(
  'row',
  [
    {'messages': [USER, REPLY]},
    {'messages': json.dumps([USER, REPLY])},
    {'messages': [USER | {'tool_calls': None}, REPLY | {'name': None}]},
    {'messages': [USER | {'content': [{'type': 'text', 'text': 'Hi'}]}, REPLY]},
    {
      'conversations': [
        {'from': 'human', 'value': 'Hi'},
        {'from': 'gpt', 'value': 'Ho'},
      ]
    },
  ],
)
def test_conversations(row):
  expected = [('user', 'Hi', True), ('assistant', 'Ho', True)]
  assert turns(RowFormat().conversation(row)) == expected


@pytest.mark.parametrize(
  'row',
  [
    {'prompt': 'Hi', 'response': 'Ho'},
    {'prompt': [USER], 'response': 'Ho'},
    {'prompt': [USER], 'completion': [REPLY]},
    {'question': 'Hi', 'solution': 'Ho', 'answer': '3'},
    {'instruction': 'Hi', 'input': '', 'output': 'Ho'},
  ],
)
def test_prompts_and_responses(row):
  """Whoever speaks in a prompt, only the response is to be learned."""
  expected = [('user', 'Hi', False), ('assistant', 'Ho', True)]
  assert turns(RowFormat().conversation(row)) == expected


def test_earlier_replies_in_a_prompt_are_not_learned():
  row = {'prompt': [USER, REPLY, USER], 'response': 'Ha'}
  trained = [m[2] for m in turns(RowFormat().conversation(row))]
  assert trained == [False, False, False, True]


def test_an_instruction_takes_its_input_along():
  row = {'instruction': 'Add.', 'input': '1 2', 'output': '3'}
  assert RowFormat().conversation(row)[0]['content'] == 'Add.\n\n1 2'
  row = {'task': 'Add.', 'query': '1 2', 'output': '3', 'input': 'x'}
  form = RowFormat(RowColumns(prompt='task', input='query'))
  assert form.conversation(row)[0]['content'] == 'Add.\n\n1 2'
  row = {'prompt': 'Add.', 'input': '1 2', 'response': '3'}
  assert RowFormat().conversation(row)[0]['content'] == 'Add.'


def test_arguments_of_tool_calls_may_be_text():
  call = {'type': 'function', 'function': {'name': 'add', 'arguments': '{"a": 1}'}}
  row = {'messages': [USER, {'role': 'assistant', 'tool_calls': [call]}]}
  message = RowFormat().conversation(row)[1]
  assert message['content'] == ''
  assert message['tool_calls'][0]['function'] == {'name': 'add', 'arguments': {'a': 1}}
  call['function']['arguments'] = '{"a": '
  with pytest.raises(DataError, match='arguments must be'):
    RowFormat().conversation(row)


def test_turns_may_be_left_out():
  row = {'messages': [USER, REPLY | {'train': False}, USER, REPLY | {'weight': 1}]}
  assert [m[2] for m in turns(RowFormat().conversation(row))] == [
    True,
    False,
    True,
    True,
  ]
  row = {'messages': [USER, REPLY | {'weight': 0}]}
  assert not turns(RowFormat().conversation(row))[1][2]


def test_system_messages():
  form, row = RowFormat(system_prompt='Be kind.'), {'prompt': 'Hi', 'response': 'Ho'}
  assert form.conversation(row)[0] == {'role': 'system', 'content': 'Be kind.'}
  assert form.conversation(row | {'system': 'Be terse.'})[0]['content'] == 'Be terse.'
  with_system = {'messages': [{'role': 'system', 'content': 'Own.'}, USER, REPLY]}
  assert [m['content'] for m in form.conversation(with_system)] == ['Own.', 'Hi', 'Ho']


def test_keys_that_a_row_does_not_have_leave_its_messages():
  form = RowFormat(RowColumns(prompt='ask', response='reply'))
  assert form.conversation({'messages': [USER, REPLY]}) == [USER, REPLY]


def test_keys_say_where_a_row_holds_what():
  row = {'messages': [USER, REPLY], 'ask': 'A', 'reply': 'B', 'score': '2', 'body': 'C'}
  form = RowFormat(
    RowColumns(prompt='ask', response='reply', reward='score', text='body')
  )
  assert [m['content'] for m in form.conversation(row)] == ['A', 'B']
  assert (form.reward(row), form.text(row)) == (2.0, 'C')


def full(*answers):
  return [USER, *({'role': 'assistant', 'content': text} for text in answers)]


@pytest.mark.parametrize(
  'row',
  [
    {'prompt': 'Hi', 'chosen': 'Yes', 'rejected': 'No'},
    {'question': 'Hi', 'chosen': 'Yes', 'rejected': 'No', 'answer': '1'},
    {'prompt': [USER], 'chosen': full('Yes')[1:], 'rejected': full('No')[1:]},
    {'prompt': 'Hi', 'chosen': full('Yes'), 'rejected': full('No'), 'messages': [USER]},
    {'chosen': full('Yes'), 'rejected': full('No')},
    {
      'chosen': '\n\nHuman: Hi\n\nAssistant: Yes',
      'rejected': '\n\nHuman: Hi\n\nAssistant: No',
    },
  ],
)
def test_pairs(row):
  chosen, rejected = RowFormat().pair(row)
  assert turns(chosen) == [('user', 'Hi', False), ('assistant', 'Yes', True)]
  assert turns(rejected) == [('user', 'Hi', False), ('assistant', 'No', True)]


def test_what_pairs_have_in_common_is_not_learned():
  common = [USER, REPLY, USER]
  row = {
    'chosen': [*common, *full('Yes')[1:], USER, REPLY],
    'rejected': [*common, *full('No')[1:]],
  }
  chosen, rejected = RowFormat(system_prompt='Be kind.').pair(row)
  assert [m['role'] for m in chosen[:2]] == ['system', 'user']
  assert [m.get('train', True) for m in chosen[1:]] == [*[False] * 3, *[True] * 3]
  assert [m.get('train', True) for m in rejected[1:]] == [*[False] * 3, True]


@pytest.mark.parametrize(
  'row, words',
  [
    ({'chosen': full('Yes')}, ["'rejected'", 'Its keys are chosen']),
    ({'chosen': full('Yes'), 'rejected': full('Yes')}, ['2 equal messages', 'ends']),
    (
      {'chosen': full('Yes'), 'rejected': [USER | {'content': 'Ha'}, REPLY]},
      ['share their prompt', '0 equal messages', 'one of user'],
    ),
    ({'chosen': 'Yes', 'rejected': 'No'}, ['no prompt', 'Human']),
    (
      {'prompt': 'Ha', 'chosen': full('Yes'), 'rejected': full('No')},
      ['nor with the prompt', "'Ha'"],
    ),
  ],
)
def test_pairs_that_are_none(row, words):
  with pytest.raises(DataError) as caught:
    RowFormat().pair(row)
  for word in words:
    assert word in str(caught.value)


@pytest.mark.parametrize(
  'row, words',
  [
    ({'prompt': 'x'}, ["'messages'", "'response'", 'Its keys are prompt']),
    ({}, ['Its keys are none']),
    ({'messages': []}, ['at least one']),
    ({'messages': 'Hi'}, ['JSON']),
    ({'messages': ['Hi']}, ['message 0', 'object, not str']),
    ({'messages': [USER, {'role': 'robot', 'content': 'x'}]}, ['message 1', "'robot'"]),
    ({'messages': [{'role': 'user', 'text': 'x'}]}, ['the keys role, text']),
    ({'messages': [USER | {'content': [{'type': 'image'}]}]}, ['more images']),
    ({'messages': [USER, REPLY | {'train': 0.5}]}, ['message 1', '0.5']),
  ],
)
def test_conversations_that_are_none(row, words):
  with pytest.raises(DataError) as caught:
    RowFormat().conversation(row)
  for word in words:
    assert word in str(caught.value)


def test_texts_and_rewards_that_are_none():
  with pytest.raises(DataError, match=r"text: 'text'.* Its keys are body"):
    RowFormat().text({'body': 'x'})
  with pytest.raises(DataError, match='reward'):
    RowFormat().reward({'prompt': 'x'}, required=True)
  for bad in ('high', float('nan'), '-inf', 1e300, 10**400):
    with pytest.raises(DataError, match='number'):
      RowFormat().reward({'reward': bad})
  assert RowFormat().reward({}) == 0.0


def test_every_text_of_a_row_is_found():
  row = {
    'conversations': [{'from': 'human', 'value': 'a'}],
    'prompt': [{'role': 'user', 'content': 'b'}],
    'chosen': 'c',
    'text': 'd',
    'note': 'e',
  }
  assert list(RowFormat().strings(row)) == ['a', 'b', 'c', 'd']


def test_tools_and_their_calls_are_texts_of_a_row():
  call = {'function': {'name': 'add', 'arguments': {'a': 1}}}
  reply = {'role': 'assistant', 'content': '', 'tool_calls': [call]}
  row = {'messages': [USER, reply], 'tools': [{'name': 'add'}]}
  assert list(RowFormat().strings(row)) == [
    '[{"name": "add"}]',
    USER['content'],
    '',
    '[{"function": {"name": "add", "arguments": {"a": 1}}}]',
  ]
  assert list(RowFormat().strings({'tools': '[]'})) == ['[]']


CALL = {'name': 'add', 'arguments': {'a': 1}}


def said(message):
  return {'role': 'assistant', 'content': '', **message}


@pytest.mark.parametrize(
  'message',
  [
    {'tool_calls': [{'type': 'function', 'function': CALL}]},
    {'tool_calls': json.dumps([{'type': 'function', 'function': CALL}])},
    {'function_call': {'name': 'add', 'arguments': '{"a": 1}'}, 'content': None},
    {'from': 'function_call', 'value': json.dumps(CALL), 'role': None, 'content': None},
    {'from': 'tool_call', 'value': json.dumps([CALL]), 'role': None, 'content': None},
  ],
)
def test_calls_as_they_are_written_elsewhere(message):
  result = {'from': 'observation', 'value': '2'}
  row = {'messages': [USER, said(message), result, REPLY]}
  _, call, result, _ = RowFormat().conversation(row)
  assert (call['role'], call['content'], result['role']) == ('assistant', '', 'tool')
  assert call['tool_calls'] == [{'type': 'function', 'function': CALL}]


@pytest.mark.parametrize('arguments', ['', ' ', None, {}, '{}'])
def test_a_call_without_arguments_has_none(arguments):
  call = {'type': 'function', 'function': {'name': 'now', 'arguments': arguments}}
  row = {'messages': [USER, said({'tool_calls': [call]})]}
  (found,) = RowFormat().conversation(row)[1]['tool_calls']
  assert found['function'] == {'name': 'now', 'arguments': {}}


@pytest.mark.parametrize(
  'message',
  [
    {'reasoning_content': 'Hm.'},
    {'reasoning': 'Hm.'},
    {'thinking': 'Hm.', 'reasoning_content': None},
    {'content': [{'type': 'thinking', 'thinking': 'Hm.'}, {'text': 'Ho'}]},
  ],
)  # fmt: skip
def test_thoughts_have_one_name(message):
  found = RowFormat().conversation({'messages': [USER, REPLY | message]})[1]
  assert found == {**REPLY, 'reasoning_content': 'Hm.'}


def test_roles_in_capitals():
  said = [{'from': 'Human', 'value': 'a'}, {'from': 'GPT', 'value': 'b'}]
  found = turns(RowFormat().conversation({'conversations': said}))
  assert found == [('user', 'a', True), ('assistant', 'b', True)]


def test_paths_within_rows():
  """The rows that verl writes for GSM8K, for supervised training."""
  row = {'data_source': 'gsm8k', 'extra_info': {'question': 'Hi', 'answer': 'Ho'}}
  form = RowFormat(
    RowColumns(prompt='extra_info.question', response='extra_info.answer')
  )
  assert [m['content'] for m in form.conversation(row)] == ['Hi', 'Ho']


@pytest.mark.parametrize(
  'row',
  [
    {
      'conversations': [{'from': 'human', 'value': 'Hi'}],
      'chosen': {'from': 'gpt', 'value': 'Yes'},
      'rejected': {'from': 'gpt', 'value': 'No'},
    },
    {'messages': [USER], 'chosen': 'Yes', 'rejected': 'No'},
    {
      'input': {'messages': [USER], 'tools': [], 'parallel_tool_calls': True},
      'preferred_output': full('Yes')[1:],
      'non_preferred_output': full('No')[1:],
    },
    {
      'prompt': json.dumps([USER]),
      'chosen': json.dumps(full('Yes')[1:]),
      'rejected': json.dumps(full('No')),
    },
  ],
)  # fmt: skip
def test_pairs_of_other_frameworks(row):
  chosen, rejected = RowFormat().pair(row)
  assert turns(chosen) == [('user', 'Hi', False), ('assistant', 'Yes', True)]
  assert turns(rejected) == [('user', 'Hi', False), ('assistant', 'No', True)]


EMPTY = [float('nan'), '', ' \n', [], [None]]


@pytest.mark.parametrize('empty', EMPTY, ids=repr)
@pytest.mark.parametrize('key', ['prompt', 'response', 'chosen', 'rejected'])
def test_what_is_empty_is_refused(key, empty):
  row = {'prompt': 'a', 'response': 'b', 'chosen': 'c', 'rejected': 'd', key: empty}
  read = RowFormat().conversation if key == 'response' else RowFormat().pair
  with pytest.raises(DataError, match=f'its {key} is empty'):
    read(row)


def test_an_empty_message_is_refused_unless_it_is_not_learned():
  for bad in (REPLY | {'content': ''}, REPLY | {'content': ' \n'}):
    with pytest.raises(DataError, match='message 1, of the assistant, is empty'):
      RowFormat().conversation({'messages': [USER, bad]})
    untrained = bad | {'train': False}
    assert RowFormat().conversation({'messages': [USER, untrained, USER, REPLY]})
  with pytest.raises(DataError, match='no message before the replies'):
    RowFormat().conversation({'messages': [USER | {'content': ''}, REPLY]})
