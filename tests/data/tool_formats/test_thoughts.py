"""Thoughts are split from replies as each family marks them."""

import pytest

from jaxrl.data.tool_formats import THOUGHT_FORMATS, split_thought

FORMATS = {one.name: one for one in THOUGHT_FORMATS}


@pytest.mark.parametrize(
  'text, opened, expected',
  [
    ('<think>\n2+2\n</think>\n\n4', False, ('2+2', '4')),
    ('2+2\n</think>\n\n4', True, ('2+2', '4')),
    ('<think>2+2</think>4', True, ('2+2', '4')),
    ('2+2</think>4', False, ('2+2', '4')),
    ('<think>\n\n</think>\n\n4', False, ('', '4')),
    ('<think>cut', False, ('cut', '')),
    ('cut', True, ('cut', '')),
    (' 4\n', False, (None, ' 4\n')),
    ('The tag <think>a</think> is no thought', False, (None, None)),
  ],
)
def test_think_tags(text, opened, expected):
  thought, rest = split_thought(text, opened=opened)
  assert (thought, rest) == (expected[0], text if expected[1] is None else expected[1])


@pytest.mark.parametrize('name', FORMATS)
def test_each_familys_markers(name):
  one = FORMATS[name]
  text = f'{one.opening}why{one.closing}'
  assert one.split(text, opened=False) == ('why', '')
  if not one.has_channels:
    assert one.split(f'{text}\nso', opened=False) == ('why', 'so')
    assert one.is_opened_by(f'user: x\n{one.opening}')
    assert not one.is_opened_by(f'user: x\n{text}\n\n')


def test_harmonys_answer_is_plain_text():
  text = '<|channel|>analysis<|message|>why<|end|><|start|>assistant'
  text += '<|channel|>final<|message|>4<|return|>'
  one = FORMATS['GPT-OSS (harmony)']
  assert one.split(text, opened=False) == ('why', '4')
