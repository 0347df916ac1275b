"""Graders by name, and sums of them: what a reply is worth in all, and part by part."""

import dataclasses
import math
from collections.abc import Callable, Iterable, Mapping
from typing import Any

from jaxrl import signature
from jaxrl.envs.graders.processes import GraderError, GraderFault, GraderTimeout, shared
from jaxrl.envs.graders.rules import Item, Part

GRADERS = {
  'code': 'jaxrl.envs.graders.code:code',
  'exact': 'jaxrl.envs.graders.rules:exact',
  'format': 'jaxrl.envs.graders.rules:form',
  'instructions': 'jaxrl.envs.graders.instructions:instructions',
  'math': 'jaxrl.envs.graders.math:math',
  'multiple_choice': 'jaxrl.envs.graders.rules:multiple_choice',
}


@dataclasses.dataclass(frozen=True)
class Grade:
  """What a reply is worth.

  score: Σ weight · part. parts: each part's own score by name, before its weight.
  faults: by name, why a part gave no score and counts as 0.
  """

  score: float
  parts: Mapping[str, float]
  faults: Mapping[str, GraderFault]

  @property
  def metrics(self) -> dict[str, float]:
    """reward/<part>, its score; grader/timeouts and grader/deaths, how many."""
    late = sum(isinstance(fault, GraderTimeout) for fault in self.faults.values())
    return {
      **{f'reward/{name}': score for name, score in self.parts.items()},
      'grader/timeouts': float(late),
      'grader/deaths': float(len(self.faults) - late),
    }

  @property
  def fault(self) -> str:
    """What went wrong, for dumps; '' for nothing."""
    return '; '.join(f'{name}: {fault}' for name, fault in self.faults.items())


@dataclasses.dataclass(frozen=True)
class Grader:
  """A weighted sum of parts, {name: (weight, part)}; may be used from many threads."""

  parts: Mapping[str, tuple[float, Part]]

  def __call__(self, reply: str, item: Item) -> Grade:
    """Grades a reply; a part that is stuck or dies scores 0, with its fault.

    Raises GraderError for a part that raises an error of its own, ValueError for an
    item that lacks what a part needs: such a score would be no one's fault but ours.
    """
    scores: dict[str, float] = {}
    faults: dict[str, GraderFault] = {}
    for name, (_, part) in self.parts.items():
      try:
        scores[name] = part(reply, item)
      except GraderFault as fault:
        scores[name], faults[name] = 0.0, fault
    total = sum(weight * scores[name] for name, (weight, _) in self.parts.items())
    return Grade(total, scores, faults)


def make_grader(spec: str) -> Grader:
  """The grader that a call string such as `math + format(tags='think', weight=.1)` is.

  Parts are names of GRADERS, each with its own options, or a function of your own,
  'package.module:function' or 'file.py:function': it takes (reply, item) and its
  options by keyword, returns a number, and runs in a process of at most 4 GiB that is
  killed after `timeout` seconds, so that it sees of the item what JSON can hold.
  Each part takes a `weight` (default 1; with 0 it is only logged). A name that comes
  again is called name_2, name_3 …

  Raises ConfigError for an empty spec, unknown names and options, and bad values.
  """
  parts: dict[str, tuple[float, Part]] = {}
  for name, weight, target, options in terms(spec):
    parts[name] = weight, make_part(target, options)
  if not parts:
    raise signature.ConfigError("grader: name at least one, as in 'math'")
  return Grader(parts)


def terms(spec: str) -> list[tuple[str, float, str, dict[str, Any]]]:
  """(name, weight, target, options) of each part of a sum; names are told apart.

  Raises ConfigError for a weight that is no number.
  """
  found: dict[str, tuple[str, float, str, dict[str, Any]]] = {}
  for target, options in signature.parse_calls(spec):
    weight = options.pop('weight', 1.0)
    if isinstance(weight, bool) or not isinstance(weight, int | float):
      raise signature.ConfigError(
        f'grader {target!r}: weight is {weight!r}; it must be a number'
      )
    name = plain = target.rpartition(':')[2]
    again = 1
    while name in found:
      again += 1
      name = f'{plain}_{again}'
    found[name] = name, float(weight), target, options
  return list(found.values())


def make_part(target: str, options: dict[str, Any], known: Iterable[str] = ()) -> Part:
  """One part by its name, or a function of one's own.

  known: more names, for whom a misspelt one may stand. Raises as `make_grader`.
  """
  where = f'grader {target!r}'
  if target in GRADERS:
    maker: Callable[..., Part] = signature.resolve(GRADERS[target])
    signature.check_options(maker, options, where)
    return maker(**options)
  if ':' not in target:
    raise signature.unknown(target, [*GRADERS, *known], 'grader', 'grader')
  limit = {'timeout': options.pop('timeout')} if 'timeout' in options else {}
  signature.check_options(_own, limit, where)
  signature.check_options(signature.resolve(target), options, where)
  return _own(target, options, **limit)


def _own(target: str, options: Mapping[str, Any], *, timeout: float = 5.0) -> Part:
  """A function of the user's own, called in a process that can be killed."""

  def grade(reply: str, item: Item) -> float:
    score = shared().call(target, reply, dict(item), options=options, limit=timeout)
    if isinstance(score, bool | int | float) and math.isfinite(score):
      return float(score)
    raise GraderError(f'grader {target!r} returned {score!r}; it must return a number')

  return grade
