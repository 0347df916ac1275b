"""A template that loses or changes a part of a message is refused, and no other."""

import pytest

from tests.data.test_chat_tokenizer import QUESTION, make_chat

HEAD = "{% for m in messages %}{{ '<|im_start|>' + m['role'] + '\\n' }}"
TAIL = (
  "{{ '<|im_end|>\\n' }}{% endfor %}"
  "{% if add_generation_prompt %}{{ '<|im_start|>assistant\\n' }}{% endif %}"
)
THOUGHT = "{% if m.reasoning %}{{ '<think>' + m.reasoning + '</think>' }}{% endif %}"
TEXT = '{{ m.content }}'
CALLS = (
  '{% for c in m.tool_calls or [] %}{% set f = c.function %}'
  """{{ '<tool_call>{"name": "' + f.name + '", "arguments": ' }}"""
  "{{ f.arguments | tojson }}{{ '}</tool_call>' }}{% endfor %}"
)
ADD = {'name': 'add', 'arguments': {'x': 1, 'why': 'It is "so".\n', 'to': [True, {}]}}
TWICE = [{'id': str(i), 'function': {**ADD, 'arguments': {'x': i}}} for i in range(2)]


def reply(content='4', **fields):
  return {'role': 'assistant', 'content': content, **fields}


def calling(*functions, **fields):
  calls = [{'type': 'function', 'function': one} for one in functions or [ADD]]
  return reply('', tool_calls=calls, **fields)


def learned(body, *messages):
  chat = make_chat(HEAD + body + TAIL)
  tokens, mask = chat.encode_with_mask([QUESTION, *messages])
  return chat.tokenizer.decode(tokens[mask])


@pytest.mark.parametrize(
  'message',
  [
    reply(),
    reply(' 4\n'),
    reply('a < b & "c" \\ \'d\'\n\n```\n  x\n```'),
    reply('4', reasoning='2+2=4'),
    reply('<think>2+2=4</think>4'),
    reply([{'type': 'text', 'text': '4'}]),
    calling(),
    calling(ADD, ADD),
    calling({'name': 'add', 'arguments': {}}),
    calling({'name': 'add', 'arguments': ''}),
    calling({'name': 'add', 'arguments': '{"x": "1", "y": null}'}),
    calling({'name': 'add', 'arguments': '{"x":"\\u00e9",\n"y":1.50}'}),
    calling({'name': 'add', 'arguments': None}),
    calling(ADD, reasoning='I add.'),
    reply('I add.', tool_calls=TWICE),
  ],
)
def test_what_is_written_whole_is_learned(message):
  text = TEXT.replace('m.content', 'm.content if m.content is string else "4"')
  if isinstance(message['content'], list):
    text = '{{ m.content if m.content is string else m.content[0].text }}'
  for body in (text, text.replace(' }}', ' | trim }}')):
    assert learned(THOUGHT + body + CALLS, message).endswith('<|im_end|>')
    as_text = CALLS.replace('{{ f.arguments | tojson }}', "{{ f.arguments + '' }}")
    assert learned(THOUGHT + body + as_text, message).endswith('<|im_end|>')


@pytest.mark.parametrize(
  ('body', 'message', 'words'),
  [
    # What is left out occurs elsewhere in the reply or in its header.
    (THOUGHT + '{{ m.content if not m.reasoning }}', reply(reasoning='2+2=4'), 'text'),
    (TEXT, reply('2+2=4', reasoning='4'), 'its thought'),
    (TEXT, reply('assistant', reasoning='assistant'), 'its thought'),
    (THOUGHT + TEXT, reply(reasoning='a', thinking='b'), 'its thought'),
    ("{{ m.content.split('</think>')[-1] }}", reply('<think>4</think>4'), 'its text'),
    (TEXT, reply('add', tool_calls=TWICE), 'its tool calls'),
    (TEXT + CALLS.replace('f.arguments', '{}'), calling(), 'its tool calls'),
    (
      TEXT + CALLS.replace('or []', 'or [])[:1]').replace('in m', 'in (m'),
      reply(tool_calls=TWICE),
      'its tool calls',
    ),
    (TEXT + CALLS.replace('| tojson', '| list | tojson'), calling(), 'its tool calls'),
    (
      TEXT + CALLS.replace('f.arguments', '(f.arguments.values() | list)'),
      calling(),
      'its tool calls',
    ),
    # What is changed.
    ('{{ m.content[:12] }}', reply('The answer is 42.'), 'changes what'),
    ("{{ m.content | replace('is', 'was') }}", reply('It is 4.'), 'changes what'),
    ('{{ m.content | escape }}', reply('a < b'), 'changes what'),
    ("{{ m.content.split() | join(' ') }}", reply('a\n  b'), 'changes what'),
    (
      THOUGHT.replace('.reasoning +', ".reasoning.split('.')[0] +") + TEXT,
      reply(reasoning='First. Then.'),
      'changes what',
    ),
    (TEXT + CALLS.replace('f.name +', 'f.name[:2] +'), calling(), 'its tool calls'),
    (
      TEXT + CALLS.replace('f.arguments | tojson', '(f.arguments | tojson)[:25]'),
      calling(),
      'changes',
    ),
    (
      TEXT + CALLS.replace('| tojson', "| tojson | replace('so', 'no')"),
      calling(),
      'changes',
    ),
  ],
)
def test_what_is_lost_or_changed_is_refused(body, message, words):
  with pytest.raises(ValueError, match=words):
    learned(body, message)


RESULT = {'role': 'tool', 'name': 'add', 'content': 'It is "so":\n5 < 6'}


@pytest.mark.parametrize(
  ('body', 'words'),
  [
    (TEXT, ''),
    ("{{ m.content | tojson if m.role == 'tool' else m.content }}", ''),
    ("{{ m.content if m.role != 'tool' }}", 'leaves out the results'),
    ("{{ m.content[:9] if m.role == 'tool' else m.content }}", 'changes the results'),
    ("{{ m.content | replace('5', '') }}", 'changes the results'),
    ("{{ m.content.split()[-1] if m.role == 'tool' else m.content }}", 'changes'),
  ],
)
def test_results_of_tools_are_written_whole(body, words):
  messages = [QUESTION, calling(), RESULT, reply('So it is.')]
  chat = make_chat(HEAD + body + CALLS + TAIL)
  if not words:
    assert chat.encode_with_mask(messages)[1].any()
    assert chat.encode_next_prompt([RESULT, RESULT], reply=[])
    return
  with pytest.raises(ValueError, match=words):
    chat.encode_with_mask(messages)
  with pytest.raises(ValueError, match=words):
    chat.encode_next_prompt([RESULT], reply=[])


def test_messages_of_one_kind_are_rendered_for_the_check_once(monkeypatch):
  chat = make_chat(HEAD + TEXT + CALLS + TAIL)
  rendered, render = [], chat._template.render
  monkeypatch.setattr(
    chat._template, 'render', lambda *a, **b: rendered.append(a) or render(*a, **b)
  )
  counts = []
  for text in ('4', 'assistant', '"tool"\n', 'a longer text ' * 200):
    rendered.clear()
    for prompt in (True, False):
      ids = chat.encode_next_prompt(
        [{'role': 'tool', 'content': text}], reply=[chat.end_id], prompt=prompt
      )
      assert text.strip() in chat.decode_all(ids)
      assert chat.decode_all(ids).endswith('assistant\n') == prompt
    call = {'name': 'add', 'arguments': {'x': text}}
    chat.encode_with_mask([QUESTION, calling(call)])
    counts.append(len(rendered))
  assert counts[1:] == [counts[0] - 6] * 3


def test_a_text_is_checked_that_the_template_changes_for_what_it_says():
  body = "{{ m.content | replace('bad', 'good') }}"
  chat = make_chat(HEAD + body + TAIL)
  for text, is_kept in (('fine', True), ('bad', False), ('fine too', True)):
    message = {'role': 'tool', 'content': text}
    if is_kept:
      chat.encode_next_prompt([message], reply=[chat.end_id])
      chat.encode_with_mask([QUESTION, reply(text)])
      continue
    with pytest.raises(ValueError, match='changes the results'):
      chat.encode_next_prompt([message], reply=[chat.end_id])
    with pytest.raises(ValueError, match='changes what a reply says'):
      chat.encode_with_mask([QUESTION, reply(text)])
