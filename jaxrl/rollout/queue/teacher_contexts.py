"""Teacher contexts say what a self-teacher is shown beside the question.

A context is a class whose options are keyword arguments, called with the question, a
row, and the row's group once that is complete. It returns the teacher's question, or
None if there is nothing to show; the row is then not distilled. `TeacherPrompts`
writes it into the conversation that the student saw, and encodes the prompt.
"""

from collections.abc import Callable, Sequence
from typing import Any, ClassVar

import numpy as np

from jaxrl.component_table import Component, ComponentTable
from jaxrl.data.chat_tokenizer import ChatTokenizer
from jaxrl.group_stats import rows_by_sample, sample_score
from jaxrl.rollout.queue.group_pipeline import RewardShaperFn
from jaxrl.types import TASK_KEY, TEACHER_PROMPT_KEY, Group, SelfTeacher, Trajectory


class TeacherContext:
  """What a context is: derive your own from it, or write a class like it.

  Attributes:
    task_keys: Columns of the data set that rows bring in `extras['task']` for it.
  """

  task_keys: Sequence[str] = ()

  def build(self, question: str, row: Trajectory, group: Group) -> str | None:
    """Returns what the teacher is asked in place of the question.

    Args:
      question: The user's last message before the reply.
      row: The row, which holds one reply.
      group: The rows of all samples of the task.

    Returns:
      The text, or None if there is nothing to show for this row.
    """
    raise NotImplementedError


class Solution(TeacherContext):
  """Shows the reference solution, and asks to reason as one's own (OPSD)."""

  template: ClassVar[str] = (
    '{question}\n\nReference solution:\n\n{solution}\n\nUnderstand it, then solve the '
    'problem in your own words.'
  )

  def __init__(self, *, key: str = 'solution'):
    """Initializes the context.

    Args:
      key: Column of the data set with the solution.
    """
    self.key = key
    self.task_keys = (key,)

  def build(self, question: str, row: Trajectory, group: Group) -> str | None:
    """Returns question and solution; None if the task has none."""
    solution = str(row.extras.get(TASK_KEY, {}).get(self.key) or '').strip()
    if not solution:
      return None
    return self.template.format(question=question, solution=solution)


class Demonstration(Solution):
  """Shows the question and what the data set has for it, without a word more (SDFT)."""

  template: ClassVar[str] = '{question}\n\n{solution}'


class Sibling(TeacherContext):
  """Shows another sample of the task that succeeded, else what was wrong (SDPO)."""

  def __init__(
    self, *, min_reward: float = 1.0, feedback: str = '', use_self: bool = False
  ):
    """Initializes the context.

    Args:
      min_reward: A sample has succeeded from this score on.
      feedback: Column of the environment's info with its feedback as text, which is
        shown where no sample succeeded; '' for none.
      use_self: Whether a sample may be shown its own success.
    """
    self.min_reward = min_reward
    self.feedback = feedback
    self.use_self = use_self

  def build(self, question: str, row: Trajectory, group: Group) -> str | None:
    """Returns the question with a success or with feedback; None without either."""
    shown = ''
    for index, rows in rows_by_sample(group).items():
      is_usable = self.use_self or index != row.sample_index
      if is_usable and not rows[0].is_greedy and sample_score(rows) >= self.min_reward:
        shown = f'A correct solution:\n\n{rows[-1].messages[-1]["content"]}'
        break
    feedback = str(row.columns.get(self.feedback) or '').strip()
    if not shown and feedback:
      shown = f'Your last attempt was not right. What was said of it:\n\n{feedback}'
    if not shown:
      return None
    return f'{question}\n\n{shown}\n\nSolve the problem above correctly.'


class Feedback(Sibling):
  """Shows what the environment said of the sample, whatever became of the others."""

  def __init__(self, *, key: str = 'feedback'):
    """Initializes the context.

    Args:
      key: Column of the environment's info with its feedback as text.
    """
    super().__init__(min_reward=float('inf'), feedback=key)


TEACHER_CONTEXTS: ComponentTable[type] = ComponentTable(
  'teacher context',
  'algorithm.context',
  {
    'solution': Solution,
    'demonstration': Demonstration,
    'sibling': Sibling,
    'feedback': Feedback,
  },
  base=TeacherContext,
)


def task_keys(context: Component) -> tuple[str, ...]:
  """Returns the columns of the data set that rows must bring for a context."""
  return tuple(TEACHER_CONTEXTS.build(context).task_keys)


class TeacherPrompts:
  """Gives the rows of a complete group the prompts that their teacher reads.

  It stands before the reward shaper, and so sees the environment's own rewards.
  """

  def __init__(
    self,
    teacher: SelfTeacher,
    make_chat: Callable[[], ChatTokenizer],
    shaper: RewardShaperFn | None = None,
  ):
    """Initializes the prompts.

    Args:
      teacher: The self-teacher.
      make_chat: Returns the chat tokenizer that the rows' prompts were made with.
      shaper: What is done to the group afterwards.
    """
    self._teacher = teacher
    self._make_chat = make_chat
    self._shaper = shaper
    self._context: Any = None

  def __call__(self, group: Group) -> Group:
    """Returns the group, in whose extras the prompts are, where there is one.

    Args:
      group: The rows of all samples.

    Raises:
      ValueError: A row holds several replies, or its messages are not its tokens.
    """
    if self._context is None:  # where the queue lives, which may be another process
      self._context, self._chat = (
        TEACHER_CONTEXTS.build(self._teacher.context),
        self._make_chat(),
      )
    for row in group:
      prompt = None if row.is_greedy else self._prompt(row, group)
      if prompt is not None:
        row.extras[TEACHER_PROMPT_KEY] = np.asarray(prompt, np.int32)
    return group if self._shaper is None else self._shaper(group)

  def _prompt(self, row: Trajectory, group: Group) -> list[int] | None:
    actions = np.flatnonzero(row.action_mask)
    if not len(actions):
      return None
    is_reply = [message['role'] == 'assistant' for message in row.messages]
    if sum(is_reply) != 1 or not row.messages[-1]['role'] == 'assistant':
      raise ValueError(
        f'row {row.trajectory_id} has {sum(is_reply)} replies in '
        f"{len(is_reply)} messages; a self-teacher's rows have one, which ends them"
      )
    *before, last = row.messages[:-1]
    if last['role'] != 'user' or not isinstance(last['content'], str):
      raise ValueError(
        f'row {row.trajectory_id}: what comes before its reply is not a text of the '
        'user, so a self-teacher cannot be shown more'
      )
    seen = self._chat.encode_prompt([*before, last])
    if not np.array_equal(seen, row.tokens[: actions[0]]):
      raise ValueError(
        f'row {row.trajectory_id}: its messages do not give the tokens of its prompt, '
        'so a prompt for its teacher would differ by more than the context'
      )
    text = self._context.build(last['content'], row, group)
    if text is None:
      return None
    return self._chat.encode_prompt([*before, {**last, 'content': text}])
