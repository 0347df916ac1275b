"""The instructions grader counts the verifiable instructions that a reply follows."""

import functools
import inspect
from collections.abc import Callable, Iterable

from jaxrl.component_table import Component
from jaxrl.envs.graders.ifeval_constraints import CONSTRAINTS
from jaxrl.envs.graders.rule_graders import GraderPart, TaskItem
from jaxrl.options import OptionValues, check_options, unknown_name_error

ConstraintCheck = Callable[[str], bool]


def make_instructions_grader(
  *,
  rules: tuple[Component, ...] = (),
  strict: bool = False,
  loose: bool = False,
) -> GraderPart:
  """Builds a grader that scores the share of instructions that a reply follows.

  An empty reply follows none.

  Args:
    rules: Calls of constraints (see `ifeval_constraints`), the same for every task,
      which a config writes as `number_words(num_words=50, relation='less than') +
      no_comma`.
      Without it the item names them as IFEval's files do: `instruction_id_list`, such
      as ['punctuation:no_comma'], and `kwargs`, a list of their options, of which those
      that are None are ignored.
    strict: Whether to score 1 if all are followed, else 0.
    loose: Whether an instruction is also followed if the reply follows it without its
      first line, its last line, both, or its asterisks: IFEval's loose accuracy.

  Returns:
    The grader. It raises ValueError for an item's unknown names and options, and
    ValueError for an item without instructions.

  Raises:
    ValueError: If a name or option in `rules` is unknown.
  """
  fixed_checks = [_make_check(*call) for call in CONSTRAINTS.calls(rules)]

  def grade(reply: str, item: TaskItem) -> float:
    checks = fixed_checks or [
      _make_check(name, options) for name, options in _item_constraints(item)
    ]
    replies = _loose_variants(reply) if loose else [reply]
    replies = [text for text in replies if text.strip()]
    followed = [any(map(check, replies)) for check in checks]
    return float(all(followed)) if strict else sum(followed) / len(followed)

  return grade


def _loose_variants(reply: str) -> list[str]:
  """Returns the reply with and without first line, last line and asterisks."""
  lines = reply.split('\n')
  shortened = [lines, lines[1:], lines[:-1], lines[1:-1]]
  texts = ['\n'.join(part).strip() for part in shortened]
  return [reply, *texts[1:], *(text.replace('*', '') for text in [reply, *texts[1:]])]


def _item_constraints(item: TaskItem) -> Iterable[tuple[str, OptionValues]]:
  names = item.get('instruction_id_list')
  if not names:
    raise ValueError(
      "grader 'instructions': the task has no instruction_id_list; give rules='…'"
    )
  options = item.get('kwargs') or [{}] * len(names)
  if len(options) != len(names):
    raise ValueError(
      f"grader 'instructions': the task has {len(names)} instructions, but kwargs "
      f'for {len(options)}'
    )
  for name, kwargs in zip(names, options, strict=True):
    kwargs = {key: value for key, value in (kwargs or {}).items() if value is not None}
    yield name.rpartition(':')[2], kwargs


def _make_check(name: str, options: OptionValues) -> ConstraintCheck:
  """Returns one constraint with its options, validated."""
  where = f"grader 'instructions', {name}"
  if name not in CONSTRAINTS:
    raise unknown_name_error(name, CONSTRAINTS, 'constraint', "grader 'instructions'")
  constraint = CONSTRAINTS[name]
  check_options(constraint, options, where)
  for option, parameter in inspect.signature(constraint).parameters.items():
    is_option = parameter.kind is parameter.KEYWORD_ONLY
    if is_option and parameter.default is parameter.empty and option not in options:
      raise ValueError(f'{where}: give it {option}=…')
  return functools.partial(constraint, **options)
