"""Tool calls as models write them, and as they should not."""

import json

import hypothesis.strategies as st
import pytest
from hypothesis import given, settings

from jaxrl.data.tool_formats import UNKNOWN, InvalidToolCall

OPEN_TAG, CLOSE_TAG = '<tool_call>', '</tool_call>'
ADD = '<tool_call>\n{"name": "add", "arguments": {"x": 1}}\n</tool_call>'


def test_several_calls_in_order():
  text = f'I add.\n{ADD}\n{ADD.replace("add", "sub")}'
  before, calls = UNKNOWN.parse(text)
  assert before == 'I add.'
  assert calls == [
    {'name': 'add', 'arguments': {'x': 1}},
    {'name': 'sub', 'arguments': {'x': 1}},
  ]


def test_a_reply_without_a_call_is_text():
  assert UNKNOWN.parse(' no call \n') == (' no call \n', [])


LLAMA = '{"name": "add", "parameters": {"x": 1}}'


@pytest.mark.parametrize('text', [LLAMA, f'\n{LLAMA} ', f'<|python_tag|>{LLAMA}'])
def test_a_reply_that_is_nothing_but_a_call_as_llama_writes_them(text):
  assert UNKNOWN.parse(text) == ('', [{'name': 'add', 'arguments': {'x': 1}}])
  assert UNKNOWN.may_begin(text)


@pytest.mark.parametrize(
  'text',
  [
    f'So: {LLAMA}',
    f'{LLAMA} {LLAMA}',
    '{"name": "add"}',
    '{"name": "add", "parameters": [1]}',
    '{"name": 3, "parameters": {}}',
    '{"name": "add", "parameters": {}, "why": "x"}',
    '{"answer": 7}',
    '{' * 10**5 + '}',
  ],
)
def test_other_json_is_an_answer(text):
  assert UNKNOWN.parse(text) == (text, [])


@pytest.mark.parametrize(
  'call, reason',
  [
    ('<tool_call>{"name": "add"}', 'does not end'),
    ('<tool_call>{"name": "add"</tool_call>', 'not JSON'),
    ('<tool_call></tool_call>', 'not JSON'),
    ('<tool_call>[1]</tool_call>', 'an object'),
    ('<tool_call>{"name": 3}</tool_call>', 'an object'),
    ('<tool_call>{"name": "a", "arguments": [1]}</tool_call>', '"arguments"'),
    pytest.param(f'{OPEN_TAG}{"[" * 10**5}{CLOSE_TAG}', 'not JSON', id='deep'),
    pytest.param(f'{OPEN_TAG}{"1" * 10**5}{CLOSE_TAG}', 'not JSON', id='digits'),
  ],
)
def test_what_cannot_be_read_says_why_and_spares_its_neighbours(call, reason):
  _, (first, second, third) = UNKNOWN.parse(ADD + call + ADD)
  assert first == third == {'name': 'add', 'arguments': {'x': 1}}
  assert isinstance(second, InvalidToolCall) and reason in second.reason


@settings(max_examples=200, deadline=None, derandomize=True)
@given(
  st.lists(
    st.sampled_from(
      [OPEN_TAG, CLOSE_TAG, '{"name": "a"', ', "arguments": {}}', '{', '"', '\n']
    )
    | st.text(max_size=5),
    max_size=12,
  )
)
def test_any_text_is_read(parts):
  text = ''.join(parts)
  _, calls = UNKNOWN.parse(text)
  assert len(calls) == text.count(OPEN_TAG)
  for call in calls:
    if not isinstance(call, InvalidToolCall):
      assert set(call) == {'name', 'arguments'}
      json.dumps(call)
