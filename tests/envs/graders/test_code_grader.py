"""The code grader within sums: hidden tests by the same runner as the environment."""

import pytest

from jaxrl.envs.sandbox import local_sandbox
from jaxrl.options import ConfigError
from tests.calls import make_grader
from tests.envs.graders import code_replies
from tests.marks import SANDBOXED

TESTS = [{'input': f'{n}\n{n}\n', 'output': str(2 * n)} for n in range(4)]
ADD = '```python\nprint(int(input()) + int(input()))\n```'
HALF = '```python\nn = int(input()) + int(input())\nprint(n if n < 4 else 0)\n```'


def mostly_slow(rows):
  """Rows of a table, of which the fast suite tries every eighth: each has a sandbox."""
  return [
    pytest.param(*row, marks=[pytest.mark.slow] if i % 8 else [])
    for i, row in enumerate(rows)
  ]


@SANDBOXED
def test_a_sum_of_tests_and_a_form():
  item = {'answer': TESTS}
  grade = make_grader("code + format(pattern='.*```', weight=.5)")
  result = grade(ADD, item)
  assert (result.score, result.parts) == (1.5, {'code': 1, 'format': 1})
  assert result.metrics['reward/code'] == 1
  assert grade(HALF, item).parts['code'] == 0.5
  assert grade('no program', item).parts['code'] == 0


@SANDBOXED
def test_all_or_nothing_and_another_field():
  grade = make_grader("code(tests='hidden', all_or_nothing=True)")
  assert grade(ADD, {'hidden': TESTS}).score == 1
  assert grade(HALF, {'hidden': TESTS}).score == 0
  with pytest.raises(ValueError, match="no tests in its field 'hidden'"):
    grade(ADD, {'answer': TESTS})


def test_without_a_sandbox_it_is_refused(monkeypatch):
  monkeypatch.setattr(local_sandbox, 'unsupported_reason', lambda *_: 'no namespaces')
  with pytest.raises(ConfigError, match="grader 'code'"):
    make_grader('code')


# In the published form: a prompt with a helper, whose solution is the function's rest.
TWICE = {
  'prompt': (
    'from typing import List\n\n\ndef double(n: int) -> int:\n    """Doubles n."""\n'
    '    return 2 * n\n\n\ndef twice(numbers: List[int]) -> List[int]:\n'
    '    """Doubles each number.\n    >>> twice([1])\n    [2]\n    """\n'
  ),
  'entry_point': 'twice',
  'canonical_solution': '    return [double(n) for n in numbers]\n',
  'test': (
    '\n\ndef check(candidate):\n    assert candidate([1, 2]) == [2, 4]\n'
    '    assert candidate([]) == []\n'
  ),
}


@SANDBOXED
@pytest.mark.parametrize(
  ('reply', 'score'),
  [
    (TWICE['canonical_solution'], 1),  # what a model continues the prompt with
    (f'```python\n{TWICE["prompt"]}{TWICE["canonical_solution"]}```', 1),
    ('Use this:\n```python\ndef twice(n):\n  return [double(i) for i in n]\n```', 1),
    ('```python\nprint(1)\ndef twice(n):\n  return [2 * i for i in n]\n```', 1),
    ('```python\ndef twice(n):\n  return n\n```', 0),
    ('```python\ndef twice(n):\n  raise SystemExit(0)\n```', 0),
    ('```python\ndef twice(n):\n  while True: pass\n```', 0),
    ('```python\ndef check(f):\n  pass\ndef twice(n):\n  return n\n```', 0),
    ('I do not know.', 0),
    ('', 0),
  ],
)
def test_programs_are_checked_by_the_tests_of_humaneval(reply, score):
  grade = make_grader('humaneval(seconds=3)')
  assert grade(reply, TWICE).score == score


@SANDBOXED
@pytest.mark.parametrize(('reply', 'score'), mostly_slow(code_replies.HUMANEVAL))
def test_humaneval_replies_as_models_write_them(reply, score):
  grade = make_grader('humaneval(seconds=3)')
  assert grade(reply, {**TWICE, 'prompt': code_replies.PROMPT}).score == score


@SANDBOXED
@pytest.mark.slow  # a sandbox for each of 70 replies, once more
@pytest.mark.parametrize(
  ('reply', 'score'), [row for row in code_replies.REPLIES if 'Solution' not in row[0]]
)
def test_functions_are_also_replies_to_humaneval(reply, score):
  grade = make_grader('humaneval(seconds=3)')
  assert grade(reply, {**TWICE, 'prompt': code_replies.PROMPT}).score == score


CALLS = {'fn_name': 'twice', 'inputs': ['[1, 2]'], 'outputs': ['[2, 4]']}


@SANDBOXED
@pytest.mark.parametrize(('reply', 'score'), mostly_slow(code_replies.REPLIES))
def test_functions_as_models_write_them(reply, score):
  assert make_grader('code(seconds=3)')(reply, {'answer': CALLS}).score == score


@SANDBOXED
@pytest.mark.parametrize(('reply', 'score'), mostly_slow(code_replies.PRINTED))
def test_programs_as_models_write_them(reply, score):
  grade = make_grader('code(seconds=3, all_or_nothing=True)')
  assert grade(reply, {'answer': TESTS}).score == score


@SANDBOXED
def test_humaneval_needs_its_fields():
  grade = make_grader('humaneval')
  with pytest.raises(ValueError, match="no text in its field 'test'"):
    grade('x', {**TWICE, 'test': None})
