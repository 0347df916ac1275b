"""The instructions grader: how many verifiable instructions a reply keeps to."""

import functools
import inspect
from collections.abc import Callable, Iterable, Mapping
from typing import Any

from jaxrl import signature
from jaxrl.envs.graders.constraints import CONSTRAINTS
from jaxrl.envs.graders.rules import Item, Part

Check = Callable[[str], bool]


def instructions(*, rules: str = '', strict: bool = False) -> Part:
  """The share of instructions that the reply keeps to; strict: 1 for all, else 0.

  rules: a call string of constraints (see `constraints`), the same for every task, as
  in `number_words(num_words=50, relation='less than') + no_comma`. Without it the
  item names them as IFEval's files do: `instruction_id_list`, such as
  ['punctuation:no_comma'], and `kwargs`, a list of their options, of which those that
  are None are left out. An empty reply keeps to nothing.

  Raises ConfigError for unknown names and options: at once for `rules`, and for a
  task's own when it is graded, with ValueError where it has none.
  """
  fixed = [_check(name, options) for name, options in signature.parse_calls(rules)]

  def grade(reply: str, item: Item) -> float:
    checks = fixed or [_check(name, options) for name, options in _of(item)]
    kept = [bool(reply.strip()) and check(reply) for check in checks]
    return float(all(kept)) if strict else sum(kept) / len(kept)

  return grade


def _of(item: Item) -> Iterable[tuple[str, dict[str, Any]]]:
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
  for name, given in zip(names, options, strict=True):
    given = {key: value for key, value in (given or {}).items() if value is not None}
    yield name.rpartition(':')[2], given


def _check(name: str, options: Mapping[str, Any]) -> Check:
  """One constraint with its options, checked."""
  where = f"grader 'instructions', {name}"
  if name not in CONSTRAINTS:
    raise signature.unknown(name, CONSTRAINTS, 'constraint', "grader 'instructions'")
  constraint = CONSTRAINTS[name]
  signature.check_options(constraint, options, where)
  for option, parameter in inspect.signature(constraint).parameters.items():
    needed = parameter.kind is parameter.KEYWORD_ONLY
    if needed and parameter.default is parameter.empty and option not in options:
      raise signature.ConfigError(f'{where}: give it {option}=…')
  return functools.partial(constraint, **options)
