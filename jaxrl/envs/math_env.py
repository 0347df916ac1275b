"""MathEnv asks a question with a checkable answer; an episode has one turn."""

from collections.abc import Mapping
from typing import Any, ClassVar

from jaxrl.data.row_sources import has_empty_mark
from jaxrl.envs.env_registry import Info, Observation, ResetOptions
from jaxrl.envs.graders.answer_marks import final_answer, marked_answer
from jaxrl.envs.graders.answer_matching import answers_match
from jaxrl.envs.graders.composite import GraderCalls, make_grader
from jaxrl.envs.graders.rule_graders import GENERATION_PROMPT


class MathEnv:
  r"""Asks the task's question and rewards the right final answer.

  Args:
    reward: The reward of a right answer.
    format_reward: The reward of a wrong answer that is at least marked as final (`####
      x` or `\boxed{x}`).
    strict: Whether only marked answers count; otherwise the last number of the reply
      counts.
    grader: Without one, answers are compared as numbers, else as plain text. Otherwise
      the sum of graders (see `composite.make_grader`): `math` decides by algebra what
      that leaves open; `math(strict=True) + format(tags='think, answer', weight=.1)` in
      a config gives `reward` times the weighted sum. The score of each part is a
      metric, `reward/<part>`; the first part says what is correct. A reply whose grader
      hangs scores 0 there, counts in `grader/timeouts`, and the column `grader_fault`
      says why.
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
    grader: GraderCalls = (),
  ):
    if grader and (format_reward or strict):
      raise ValueError(
        'with a grader, write its options there, as in '
        "grader='math(strict=True) + format(tags='answer', weight=.1)', and leave "
        'format_reward and strict out'
      )
    self._reward = reward
    self._format_reward = format_reward
    self._strict = strict
    self._grader = make_grader(grader) if grader else None
    self._item: Mapping[str, Any] = {}
    self._answer = ''

  @classmethod
  def check(cls, **options: Any) -> None:
    """Checks the options.

    Raises:
      ValueError: If the grader cannot be built.
    """
    cls(**options)

  def reset(
    self, *, seed: int, options: ResetOptions | None = None
  ) -> tuple[Observation, Info]:
    """Returns the task's question, text or messages, with the row's `images`."""
    task = (options or {}).get('task')
    if task is None or task.item is None:
      raise ValueError(
        'the math environment needs a data set of questions: set dataset.path'
      )
    prompt = str((options or {}).get(GENERATION_PROMPT, ''))
    self._item = {GENERATION_PROMPT: prompt, **task.item}
    # A grader says itself whether it needs an answer.
    answer = str(task.item.get('answer', '') if self._grader else task.item['answer'])
    if has_empty_mark(answer):
      raise ValueError(
        f'the answer of the task ends with a mark and no answer: {answer!r:.60}; '
        'write it after ####, or without any mark'
      )
    self._answer = marked_answer(answer) or answer.strip()
    question: Any = task.item['question']
    question = question if isinstance(question, list) else str(question)
    if not task.item.get('images'):
      return question, {}
    from jaxrl.data.rows.chat_messages import place_images  # few questions have images

    is_text = isinstance(question, str)
    messages = [{'role': 'user', 'content': question}] if is_text else question
    placed = place_images(messages, task.item['images'])
    return (placed[0]['content'] if is_text else placed), {}

  def step(self, action: str) -> tuple[str, float, bool, bool, Info]:
    """Grades the reply and ends the episode."""
    if self._grader is not None:
      return self._grade_reply(action)
    marked = marked_answer(action, self._answer)
    candidate = marked if self._strict else final_answer(action, self._answer)
    correct = answers_match(candidate, self._answer)
    reward = self._reward if correct else 0.0
    if not correct and marked:
      reward = self._format_reward
    metrics = {'accuracy': float(correct), 'correct': float(correct)}
    metrics['marked'] = float(bool(marked))
    columns = {'given': candidate, 'expected': self._answer}
    return '', reward, True, False, {'metrics': metrics, 'columns': columns}

  def _grade_reply(self, action: str) -> tuple[str, float, bool, bool, Info]:
    assert self._grader is not None
    grade = self._grader(action, self._item)
    correct = float(next(iter(grade.parts.values())) >= 1)
    metrics = {'accuracy': correct, 'correct': correct, **grade.metrics}
    metrics['marked'] = float(bool(marked_answer(action, self._answer)))
    columns = {'given': final_answer(action, self._answer), 'expected': self._answer}
    columns['grader_fault'] = grade.error
    info = {'metrics': metrics, 'columns': columns}
    return '', self._reward * grade.score, True, False, info
