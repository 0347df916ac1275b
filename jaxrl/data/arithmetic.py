"""Arithmetic word problems are drawn here from a seeded generator.

A problem is defined by its kind and its numbers; names and objects only dress it. The
train and test splits are separated by a hash of the problem, so no test problem is ever
seen in training, however it is dressed. Everything is a pure function of the seed.
"""

import operator
import re
import zlib
from collections.abc import Callable, Mapping, Sequence
from types import MappingProxyType

import numpy as np

from jaxrl.data.rows.row_readers import Row
from jaxrl.options import AT_LEAST_ONE, NOT_NEGATIVE, OptionValues, Range, option_ranges

PERSON_NAMES = ('Ann', 'Ben', 'Eva', 'Kim', 'Leo', 'Max', 'Mia', 'Sam', 'Tom', 'Zoe')
OBJECT_NAMES = ('pens', 'eggs', 'figs', 'nuts', 'caps', 'toys', 'keys', 'cups', 'books')
ROW_FORMS = ('worked', 'pairs', 'texts')
TEST_PROBLEM_SHARE = 0.2  # of all problems, kept for the test split

_SIGNS = {'+': operator.add, '-': operator.sub, '*': operator.mul}
Numbers = tuple[int, ...]
Steps = list[tuple[str, int]]  # ('3+4', 7): one worked step after another


def _add(n: Numbers) -> tuple[str, Steps]:
  a, b, _ = n
  return '{name} has {a} {obj} and gets {b} more. How many now?', [(f'{a}+{b}', a + b)]


def _sub(n: Numbers) -> tuple[str, Steps]:
  a, b, _ = n
  a += b
  text = f'{{name}} has {a} {{obj}} and gives away {b}. How many are left?'
  return text, [(f'{a}-{b}', a - b)]


def _mul(n: Numbers) -> tuple[str, Steps]:
  a, b, _ = n
  return '{name} has {a} bags of {b} {obj}. How many {obj}?', [(f'{a}*{b}', a * b)]


def _add_sub(n: Numbers) -> tuple[str, Steps]:
  a, b, c = n
  c = min(c, a + b)
  text = '{name} has {a} {obj}, gets {b} more and loses {c}. How many now?'
  steps = [(f'{a}+{b}', a + b), (f'{a + b}-{c}', a + b - c)]
  return text.replace('{c}', str(c)), steps


def _sub_add(n: Numbers) -> tuple[str, Steps]:
  a, b, c = n
  a += b
  text = f'{{name}} has {a} {{obj}}, loses {b} and gets {c} more. How many now?'
  return text, [(f'{a}-{b}', a - b), (f'{a - b}+{c}', a - b + c)]


def _compare(n: Numbers) -> tuple[str, Steps]:
  a, b, _ = n
  text = '{name} has {a} {obj}. {other} has {b} more. How many in all?'
  return text, [(f'{a}+{b}', a + b), (f'{a}+{a + b}', a + a + b)]


def _mul_add(n: Numbers) -> tuple[str, Steps]:
  a, b, c = n
  text = '{name} has {a} bags of {b} {obj} and {c} more. How many {obj}?'
  return text, [(f'{a}*{b}', a * b), (f'{a * b}+{c}', a * b + c)]


def _mul_sub(n: Numbers) -> tuple[str, Steps]:
  a, b, c = n
  c = min(c, a * b)
  text = '{name} has {a} bags of {b} {obj} and loses {c}. How many now?'
  steps = [(f'{a}*{b}', a * b), (f'{a * b}-{c}', a * b - c)]
  return text.replace('{c}', str(c)), steps


PROBLEM_KINDS: dict[str, Callable[[Numbers], tuple[str, Steps]]] = {
  'add': _add,
  'sub': _sub,
  'mul': _mul,
  'add_sub': _add_sub,
  'sub_add': _sub_add,
  'compare': _compare,
  'mul_add': _mul_add,
  'mul_sub': _mul_sub,
}


def draw_problem(
  rng: np.random.Generator,
  *,
  kinds: Sequence[str] = tuple(PROBLEM_KINDS),
  max_number: int = 20,
  max_factor: int = 9,
) -> Row:
  """Draws one problem.

  Args:
    rng: The source of randomness.
    kinds: Names of PROBLEM_KINDS to draw from.
    max_number: Terms lie in [1, max_number].
    max_factor: Factors lie in [2, max_factor].

  Returns:
    A dict with `question`, `answer` (a string), `solution` (worked, ending in `####
    answer`), `kind`, and `key`, which identifies the problem whatever its dressing.
  """
  kind = kinds[int(rng.integers(len(kinds)))]
  a, b, c = (int(x) for x in rng.integers(1, max_number + 1, size=3))
  if kind.startswith('mul'):
    a, b = (int(x) for x in rng.integers(2, max_factor + 1, size=2))
  template, steps = PROBLEM_KINDS[kind]((a, b, c))
  name, other = (
    PERSON_NAMES[int(i)] for i in rng.choice(len(PERSON_NAMES), 2, replace=False)
  )
  obj = OBJECT_NAMES[int(rng.integers(len(OBJECT_NAMES)))]
  answer = str(steps[-1][1])
  worked = '\n'.join(f'{left}={right}' for left, right in steps)
  return {
    'question': template.format(name=name, other=other, obj=obj, a=a, b=b, c=c),
    'answer': answer,
    'solution': f'{worked}\n#### {answer}',
    'kind': kind,
    'key': f'{kind}:' + ','.join(left for left, _ in steps),
  }


def wrong_solution(solution: str) -> str:
  """Returns the worked solution of a solver who takes every loss for a gain.

  Args:
    solution: A correct worked solution.

  Returns:
    The solution with each minus sign replaced by a plus sign and the results adjusted.
  """
  *steps, _ = solution.split('\n')
  lines: list[str] = []
  result = ''
  for step in steps:
    left, _, right = step.split('=')[0].replace('-', '+').partition('+')
    result, left = str(int(result or left) + int(right)), result or left
    lines.append(f'{left}+{right}={result}')
  return '\n'.join([*lines, f'#### {result}'])


def flipped_sign_solution(solution: str) -> str:
  """Returns the worked solution of a solver who gets the first sign wrong.

  Args:
    solution: A correct worked solution.

  Returns:
    The solution with another first sign, whose result is carried through all later
    steps.
  """
  *steps, _ = solution.split('\n')
  lines: list[str] = []
  original_result = wrong_result = ''  # the last step's results
  for step in steps:
    left, right = step.split('=')
    a, sign, b = re.split(r'([-+*])', left)
    if lines and a == original_result:
      a = wrong_result
    elif lines:
      b = wrong_result
    else:
      sign = {'-': '+', '+': '-', '*': '-'}[sign]
    original_result, wrong_result = right, str(_SIGNS[sign](int(a), int(b)))
    lines.append(f'{a}{sign}{b}={wrong_result}')
  return '\n'.join([*lines, f'#### {wrong_result}'])


def is_test_problem(key: str) -> bool:
  """Returns whether the problem identified by `key` belongs to the test split.

  Args:
    key: The problem's `key` as `draw_problem` returns it.

  Returns:
    True for the test split, which has TEST_PROBLEM_SHARE of all problems.
  """
  return zlib.crc32(key.encode()) < TEST_PROBLEM_SHARE * 2**32


def _draw_distinct(
  rng: np.random.Generator, split: str, size: int, options: OptionValues
) -> list[Row]:
  """Draws problems of a split until there are `size` different questions."""
  by_question: dict[str, Row] = {}
  for _ in range(50 * size + 2000):
    if len(by_question) == size:
      break
    candidate = draw_problem(rng, **options)
    if is_test_problem(candidate['key']) == (split == 'test'):
      by_question.setdefault(candidate['question'], candidate)
  if len(by_question) < size:
    raise ValueError(
      f'only {len(by_question)} of {size} different {split} questions exist for kinds='
      f'{tuple(options["kinds"])}, max_number={options["max_number"]}, '
      f'max_factor={options["max_factor"]}; allow larger numbers or ask for fewer'
    )
  return list(by_question.values())


@option_ranges(
  size=AT_LEAST_ONE, seed=NOT_NEGATIVE, max_number=AT_LEAST_ONE, max_factor=Range(2)
)
def arithmetic_rows(
  split: str = 'train',
  *,
  size: int = 10_000,
  seed: int = 0,
  kinds: Sequence[str] = tuple(PROBLEM_KINDS),
  max_number: int = 20,
  max_factor: int = 9,
  misread_share: Mapping[str, float] = MappingProxyType({}),
  form: str = 'worked',
) -> list[Row]:
  """Generates `size` distinct questions of a split.

  The result is a pure function of the arguments.

  Args:
    split: 'train' or 'test'.
    size: The number of rows.
    seed: The seed of the generator.
    kinds: Names of PROBLEM_KINDS to draw from.
    max_number: Terms lie in [1, max_number].
    max_factor: Factors lie in [2, max_factor].
    misread_share: For each kind, the share of worked solutions that are wrong in the
      way of `wrong_solution`. Answers stay right.
    form: 'worked' rows hold question, answer and solution. 'pairs' rows also hold
      `chosen` (the solution) and `rejected` (one with a mistake). 'texts' rows also
      hold `text` (question and solution).

  Returns:
    The rows.

  Raises:
    ValueError: If the split, a kind or the form is unknown, or if the numbers are too
      small for `size` distinct questions.
  """
  if split not in ('train', 'test'):
    raise ValueError(f"split is 'train' or 'test', not {split!r}")
  if form not in ROW_FORMS:
    raise ValueError(f'form is one of {", ".join(ROW_FORMS)}, not {form!r}')
  unknown = [kind for kind in (*kinds, *misread_share) if kind not in PROBLEM_KINDS]
  if unknown or not kinds:
    raise ValueError(f'unknown kinds {unknown}; there are {", ".join(PROBLEM_KINDS)}')
  rng = np.random.default_rng([seed, int(split == 'test')])
  options = {'kinds': kinds, 'max_number': max_number, 'max_factor': max_factor}
  rows = _draw_distinct(rng, split, size, options)
  draws = np.random.default_rng([seed, 2]).random(len(rows))
  for row, draw in zip(rows, draws, strict=True):
    if draw < misread_share.get(row['kind'], 0.0):
      row['solution'] = wrong_solution(row['solution'])
  if form == 'pairs':
    for row in rows:
      row |= {
        'chosen': row['solution'],
        'rejected': flipped_sign_solution(row['solution']),
      }
  elif form == 'texts':
    for row in rows:
      row['text'] = f'{row["question"]}\n{row["solution"]}'
  return rows
