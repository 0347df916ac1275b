"""Our tables of replies by the rules of lm-eval and OpenCompass, as the docs count.

Replies that another rule scores and we do not are the ones to look at, so each of them
must be of a kind that the docs explain.
"""

import pathlib

import pytest

from tests.envs.graders import choice_replies, code_replies, math_replies
from tests.marks import SANDBOXED
from tests.real import rules

pytestmark = pytest.mark.real
DOCS = pathlib.Path(__file__).parents[3] / 'docs' / 'graders.md'


def row(name, table, scores, right):
  """Returns the row of the docs' table."""
  agree = sum(score == wanted for score, wanted in zip(scores, right, strict=True))
  stricter = sum(score < wanted for score, wanted in zip(scores, right, strict=True))
  lenient = len(right) - agree - stricter
  return f'| {name} | `{table}` | {agree} of {len(right)} | {stricter} | {lenient} |'


@pytest.mark.parametrize('name', rules.MATH)
def test_math_differs_as_the_docs_say(name):
  replies, answers, right = zip(*math_replies.REPLIES, strict=True)
  scores = rules.MATH[name](replies, answers)
  assert row(name, 'math', scores, right) in DOCS.read_text()


@pytest.mark.parametrize('name', rules.CHOICE)
def test_choices_differ_as_the_docs_say(name):
  """A letter that the table has not, or another one, is more lenient."""
  replies = [reply for reply, _ in choice_replies.REPLIES]
  given = {
    letter: rules.CHOICE[name](replies, letter, choice_replies.CAPITALS)
    for letter in 'ABCD'
  }
  agree = stricter = lenient = 0
  for number, (_, letter) in enumerate(choice_replies.REPLIES):
    chosen = ''.join(option for option, found in given.items() if found[number])
    agree += chosen == letter
    stricter += chosen == '' and letter != ''
    lenient += chosen not in ('', letter)
  counts = f'{agree} of {len(replies)} | {stricter} | {lenient}'
  assert f'| {name} | `multiple_choice` | {counts} |' in DOCS.read_text()


CALLS = 'assert twice([1, 2]) == [2, 4]\nassert twice([]) == []\n'


@SANDBOXED
@pytest.mark.parametrize(
  ('table', 'name'),
  [('code', name) for name in rules.CODE]
  + [('humaneval', name) for name in rules.HUMANEVAL],
)
def test_programs_differ_as_the_docs_say(table, name):
  if table == 'code':
    rows, find_program, prompt = code_replies.REPLIES, rules.CODE[name], ''
  else:
    rows, find_program = code_replies.HUMANEVAL, rules.HUMANEVAL[name]
    prompt = code_replies.PROMPT
  replies, right = zip(*rows, strict=True)
  programs = [f'{prompt}{find_program(reply)}\n\n{CALLS}' for reply in replies]
  assert row(name, table, rules.run_programs(programs), right) in DOCS.read_text()


def test_the_rules_are_the_packages_own():
  score = rules.MATH['lm-eval, gsm8k, strict-match']
  assert score(['#### 18', '#### 1,800.', '####18'], ['18', '1800', '18']) == [1, 1, 0]
  score = rules.MATH['lm-eval, gsm8k, flexible-extract']
  assert score(['9 * 2 = $18', '18 Question: 5'], ['18', '18']) == [1, 1]
  assert rules.minerva(
    'Final Answer: The final answer is $2x$. I hope it is correct.', '2x'
  )
  assert rules.mbpp_program('\nx = 1\n```\n') == 'x = 1'
  assert rules.mbpp_program('def f(): pass\n```') == ' f(): pass'  # as the docs say
  solution = code_replies.fenced(code_replies.RIGHT)
  assert rules.compass_program(solution) == code_replies.RIGHT
