"""A question with a checkable answer; one turn."""

from collections.abc import Mapping
from typing import Any, ClassVar

from jaxrl.envs.graders.answers import final_answer, marked_answer, same
from jaxrl.envs.graders.combine import make_grader
from jaxrl.signature import ConfigError


class MathEnv:
  r"""Asks the task's question; rewards the right final answer.

  reward: for a right answer. format_reward: for a wrong one that is at least marked
  as final (`#### x` or `\boxed{x}`). strict: only marked answers count; otherwise
  the last number of the reply does.

  grader: '' compares answers as numbers, else as plain text. Otherwise a call string
  of graders (see graders.combine.make_grader): `math` decides what that leaves open by
  algebra, and `math(strict=True) + format(tags='think, answer', weight=.1)` gives
  `reward` times the weighted sum. Each part's score is a metric, `reward/<part>`; the
  first part says what is correct. A reply whose grader is stuck scores 0 there, counts
  in `grader/timeouts`, and the column `grader_fault` says why.
  """

  columns: ClassVar = {
    'given': 'string',
    'expected': 'string',
    'grader_fault': 'string',
  }

  def __init__(
    self,
    *,
    reward: float = 1.0,
    format_reward: float = 0.0,
    strict: bool = False,
    grader: str = '',
  ):
    if grader and (format_reward or strict):
      raise ConfigError(
        'the math environment: with a grader, write its options there, as in '
        "grader='math(strict=True) + format(tags='answer', weight=.1)', and leave "
        'format_reward and strict out'
      )
    self._reward, self._format_reward, self._strict = reward, format_reward, strict
    self._grader = make_grader(grader) if grader else None
    self._item: Mapping[str, Any] = {}
    self._answer = ''

  @classmethod
  def check(cls, **options: Any) -> None:
    """Raises ConfigError for a grader that cannot be made."""
    cls(**options)

  def reset(
    self, *, seed: int, options: Mapping[str, Any] | None = None
  ) -> tuple[str | None, dict[str, Any]]:
    task = (options or {}).get('task')
    if task is None or task.item is None:
      raise ValueError('the math environment needs a dataset: its tasks are questions')
    self._item = task.item
    # A grader says itself whether it needs an answer.
    answer = str(task.item.get('answer', '') if self._grader else task.item['answer'])
    self._answer = marked_answer(answer) or answer.strip()
    return str(task.item['question']), {}

  def step(self, action: str) -> tuple[str, float, bool, bool, dict[str, Any]]:
    if self._grader is not None:
      return self._graded(action)
    marked = marked_answer(action)
    given = marked if self._strict else final_answer(action)
    correct = same(given, self._answer)
    reward = self._reward if correct else 0.0
    if not correct and marked:
      reward = self._format_reward
    metrics = {'accuracy': float(correct), 'correct': float(correct)}
    metrics['marked'] = float(bool(marked))
    columns = {'given': given, 'expected': self._answer}
    return '', reward, True, False, {'metrics': metrics, 'columns': columns}

  def _graded(self, action: str) -> tuple[str, float, bool, bool, dict[str, Any]]:
    assert self._grader is not None
    grade = self._grader(action, self._item)
    correct = float(next(iter(grade.parts.values())) >= 1)
    metrics = {'accuracy': correct, 'correct': correct, **grade.metrics}
    metrics['marked'] = float(bool(marked_answer(action)))
    columns = {'given': final_answer(action), 'expected': self._answer}
    columns['grader_fault'] = grade.fault
    info = {'metrics': metrics, 'columns': columns}
    return '', self._reward * grade.score, True, False, info
