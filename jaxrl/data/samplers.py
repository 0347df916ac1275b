"""Samplers: where a step's groups come from."""

import inspect
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np

from jaxrl.data.chat import Chat
from jaxrl.data.sources import DataError, load_rows
from jaxrl.types import Group, Message, Trajectory


class FifoSampler:
  """Takes whole groups from the queue, in the order of their numbers."""

  def __init__(self, queue: Any, num_groups: int | None = None):
    self._queue, self._num_groups = queue, num_groups

  async def next(self, step: int) -> list[Group]:
    """The groups of `step`; waits for them."""
    taken = self._queue.get_batch(self._num_groups, step)
    return await taken if inspect.isawaitable(taken) else taken

  def state_dict(self) -> dict[str, Any]:
    return {}

  def load_state_dict(self, state: Mapping[str, Any]) -> None:
    """The queue keeps its own state; there is nothing here to load."""


class FileSampler:
  """Written conversations as expert trajectories, in shuffled epochs.

  rows: each has 'messages', a list of chat messages; or else a question and a worked
  solution under `question_key` and `solution_key`. path: a source of such rows
  instead. Rows longer than `max_length` tokens are left out and counted in `skipped`.
  The order is a pure function of `seed`, and `next` one of the step it is asked for.
  """

  def __init__(
    self,
    chat: Chat,
    rows: Sequence[Mapping[str, Any]] | None = None,
    *,
    path: str = '',
    split: str = 'train',
    limit: int | None = None,
    batch_size: int = 64,
    max_length: int = 1024,
    system: str = '',
    question_key: str = 'question',
    solution_key: str = 'solution',
    seed: int = 0,
  ):
    rows = load_rows(path, split, limit) if rows is None else rows[:limit]
    keys = (question_key, solution_key)
    encoded = [_encode(chat, _messages(row, keys, system, path)) for row in rows]
    self._rows = [row for row in encoded if len(row.tokens) <= max_length]
    self.skipped = len(encoded) - len(self._rows)
    if not self._rows:
      raise DataError(
        f'{path or "rows"}: no conversation fits in {max_length} tokens '
        f'({self.skipped} are longer)'
      )
    self._batch_size, self._seed, self._taken = batch_size, seed, 0
    self._order = (-1, np.zeros(0, int))  # an epoch and its permutation

  async def next(self, step: int) -> list[Group]:
    """The next `batch_size` conversations, a group each."""
    indices = range(self._taken, self._taken + self._batch_size)
    self._taken += self._batch_size
    return [[self._row(i)] for i in indices]

  def _row(self, i: int) -> Trajectory:
    epoch, place = divmod(i, len(self._rows))
    if epoch != self._order[0]:
      rng = np.random.default_rng([self._seed, epoch])
      self._order = (epoch, rng.permutation(len(self._rows)))
    return self._rows[int(self._order[1][place])]

  def state_dict(self) -> dict[str, Any]:
    return {'taken': self._taken, 'size': len(self._rows)}

  def load_state_dict(self, state: Mapping[str, Any]) -> None:
    """Raises DataError if the file has another number of rows than before."""
    if state['size'] != len(self._rows):
      raise DataError(
        f'{len(self._rows)} conversations, the checkpoint was written with '
        f'{state["size"]}; give it the same data to resume'
      )
    self._taken = state['taken']


def _messages(
  row: Mapping[str, Any], keys: tuple[str, str], system: str, path: str
) -> list[Message]:
  if 'messages' in row:
    messages = [dict(message) for message in row['messages']]
  elif all(key in row for key in keys):
    messages = [
      {'role': 'user', 'content': row[keys[0]]},
      {'role': 'assistant', 'content': row[keys[1]]},
    ]
  else:
    raise DataError(
      f'{path or "a row"} has neither messages nor {keys[0]!r} and {keys[1]!r}; '
      f'its keys are {", ".join(map(str, row))}'
    )
  if system and messages[0]['role'] != 'system':
    messages.insert(0, {'role': 'system', 'content': system})
  return messages


def _encode(chat: Chat, messages: list[Message]) -> Trajectory:
  tokens, mask = chat.conversation(messages)
  if not mask.any():
    raise DataError('a conversation has no assistant message to learn from')
  return Trajectory(
    tokens=tokens,
    action_mask=mask,
    rollout_logprobs=np.zeros(len(tokens), np.float32),
    rewards=np.zeros(len(tokens), np.float32),
    weights_version=np.full(len(tokens), -1, np.int32),
    is_expert=True,
    messages=messages,
  )
