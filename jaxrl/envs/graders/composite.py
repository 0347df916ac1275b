"""Composite graders: graders by name and weighted sums of them."""

import dataclasses
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Annotated

from jaxrl.component_table import Component, ComponentTable
from jaxrl.envs.env_registry import MAX_REWARD, as_real_number, is_valid_reward
from jaxrl.envs.graders.grader_processes import (
  GraderError,
  GraderFailure,
  GraderTimeout,
  shared_grader_pool,
)
from jaxrl.envs.graders.rule_graders import GraderPart, TaskItem
from jaxrl.options import (
  POSITIVE,
  Keywords,
  OptionValues,
  check_options,
  error_prefix,
  option_ranges,
  unknown_name_error,
)
from jaxrl.user_code import import_object

GRADERS = ComponentTable(
  'grader',
  'grader',
  {
    'code': 'jaxrl.envs.graders.code_grader:make_code_grader',
    'exact': 'jaxrl.envs.graders.rule_graders:make_exact_grader',
    'format': 'jaxrl.envs.graders.rule_graders:make_format_grader',
    'humaneval': 'jaxrl.envs.graders.code_grader:make_humaneval_grader',
    'instructions': 'jaxrl.envs.graders.ifeval_grader:make_instructions_grader',
    'math': 'jaxrl.envs.graders.math_grader:make_math_grader',
    'multiple_choice': 'jaxrl.envs.graders.rule_graders:make_multiple_choice_grader',
  },
)
GraderTerm = tuple[str, float, str, Keywords]  # name, weight, target, options
# The type of an option that holds graders; GRADERS says whose options may be calls.
GraderCalls = Annotated[tuple[Component, ...], GRADERS]


@dataclasses.dataclass(frozen=True)
class Grade:
  """The grade of a reply.

  Attributes:
    score: Σ weight · part.
    parts: The score of each part by name, before its weight.
    errors: By name, why a part has no score and counts as 0.
  """

  score: float
  parts: Mapping[str, float]
  errors: Mapping[str, GraderFailure]

  @property
  def metrics(self) -> dict[str, float]:
    """Returns reward/<part> for each part, and how many timed out or crashed."""
    num_timeouts = sum(
      isinstance(error, GraderTimeout) for error in self.errors.values()
    )
    return {
      **{f'reward/{name}': score for name, score in self.parts.items()},
      'grader/timeouts': float(num_timeouts),
      'grader/deaths': float(len(self.errors) - num_timeouts),
    }

  @property
  def error(self) -> str:
    """Returns what went wrong, for dumps; '' if nothing did."""
    return '; '.join(f'{name}: {error}' for name, error in self.errors.items())


@dataclasses.dataclass(frozen=True)
class Grader:
  """A weighted sum of parts; may be used from many threads.

  Attributes:
    parts: For each name the weight and the part.
  """

  parts: Mapping[str, tuple[float, GraderPart]]

  def __call__(self, reply: str, item: TaskItem) -> Grade:
    """Grades a reply; a part that hangs or crashes scores 0 and reports why.

    Args:
      reply: The model's text.
      item: The dataset's row.

    Returns:
      The grade.

    Raises:
      GraderError: If a part raises an error of its own.
      ValueError: If the item lacks what a part needs.
    """
    scores: dict[str, float] = {}
    errors: dict[str, GraderFailure] = {}
    for name, (_, part) in self.parts.items():
      try:
        scores[name] = part(reply, item)
      except GraderFailure as error:
        scores[name], errors[name] = 0.0, error
    total = sum(weight * scores[name] for name, (weight, _) in self.parts.items())
    return Grade(total, scores, errors)


def make_grader(calls: Sequence[Component] | Component) -> Grader:
  """Builds a grader, the sum of its parts.

  A config writes the parts as `math + format(tags='think')`. They are names of GRADERS,
  each with its own options, or a user's own function, 'package.module:function' or
  'file.py:function'. Such a function takes (reply, item) and its options by keyword,
  and returns a number. A class takes its options by keyword, and its objects are called
  with (reply, item). Both run in a process of at most 4 GiB that is killed after
  `timeout` seconds, so they see only what JSON can hold of the item. Each part takes a
  `weight` (1 by default; with 0 it is only logged). A repeated name becomes name_2,
  name_3 and so on.

  Args:
    calls: The parts; the name of one is enough.

  Returns:
    The grader.

  Raises:
    ValueError: If there is no part or a name, option or value is wrong.
  """
  parts: dict[str, tuple[float, GraderPart]] = {}
  for name, weight, target, options in grader_terms(calls):
    parts[name] = weight, make_grader_part(target, options)
  if not parts:
    raise ValueError("grader: name at least one, as in 'math'")
  return Grader(parts)


def grader_terms(
  calls: Sequence[Component] | Component,
) -> list[GraderTerm]:
  """Separates the weights of a sum of graders; repeated names are numbered.

  Args:
    calls: The parts; the name of one is enough.

  Returns:
    A tuple (name, weight, target, options) for each part.

  Raises:
    ValueError: If a weight is not a number.
  """
  parts: dict[str, GraderTerm] = {}
  for target, options in GRADERS.calls(calls):
    weight = options.pop('weight', 1.0)
    if isinstance(weight, bool) or not isinstance(weight, int | float):
      raise ValueError(f'grader {target!r}: weight is {weight!r}; it must be a number')
    name = base_name = target.rpartition(':')[2]
    count = 1
    while name in parts:
      count += 1
      name = f'{base_name}_{count}'
    parts[name] = name, float(weight), target, options
  return list(parts.values())


def make_grader_part(
  target: str, options: OptionValues, known: Iterable[str] = ()
) -> GraderPart:
  """Builds one part by its name, or from a user's own function.

  Args:
    target: A name of GRADERS or a dotted path.
    options: The options of the part.
    known: Further names, to suggest for a misspelt one.

  Returns:
    The part.

  Raises:
    ValueError: If the name or an option is wrong.
  """
  where = f'grader {target!r}'
  if target in GRADERS:
    maker: Callable[..., GraderPart] = import_object(GRADERS[target])
    check_options(maker, options, where)
    with error_prefix(where):
      return maker(**options)
  if ':' not in target:
    raise unknown_name_error(target, [*GRADERS, *known], 'grader', 'grader')
  options = dict(options)
  timeout_option = {'timeout': options.pop('timeout')} if 'timeout' in options else {}
  check_options(_make_function_part, timeout_option, where)
  check_options(import_object(target, where), options, where)
  return _make_function_part(target, options, **timeout_option)


@option_ranges(timeout=POSITIVE)
def _make_function_part(
  target: str, options: OptionValues, *, timeout: float = 5.0
) -> GraderPart:
  """Calls a user's own function in a process that can be killed."""

  def grade(reply: str, item: TaskItem) -> float:
    score = shared_grader_pool().call(
      target, reply, dict(item), options=options, limit=timeout
    )
    number = as_real_number(score)
    if number is not None and is_valid_reward(number):
      return number
    raise GraderError(
      f'grader {target!r} returned {score!r:.80}; it must return a finite number of at '
      f'most ±{MAX_REWARD:g}'
    )

  return grade
