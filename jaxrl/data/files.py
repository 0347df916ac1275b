"""Rows of files as groups of expert trajectories, in shuffled epochs."""

import math
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import numpy as np

from jaxrl.data.chat import Chat
from jaxrl.data.formats import SCHEMAS, Format
from jaxrl.data.sources import DataError, Row, load_rows
from jaxrl.signature import unknown
from jaxrl.types import Group, Message, Trajectory

NOUNS = {'messages': 'conversations', 'preference': 'pairs', 'text': 'windows of text'}


class FileSampler:
  """Written conversations, pairs or texts as expert trajectories, in shuffled epochs.

  rows: in one of the formats of `jaxrl.data.formats`. path, split: a source of such
  rows instead, of which the first `limit` are read. schema: what a group is.
    messages: a group is one conversation; its assistant's turns are actions. rated:
      rows have rewards, and those of one prompt are a group, to be compared.
    preference: a group is a pair, the chosen answer first, with reward 1.
    text: a group is one window of at most `max_length` tokens of a text; windows
      overlap by the one token that cannot be learned for want of a context.
  Conversations and pairs longer than `max_length` tokens are left out and counted in
  `skipped`. batch_size: groups a step. system, keys, question_key, solution_key: as
  `Format` has them. The order is a pure function of `seed`: each group comes once an
  epoch, and a batch that an epoch cannot fill goes on with the next one.

  Raises DataError naming file and row for what cannot be read or learned from.
  """

  def __init__(
    self,
    chat: Chat,
    rows: Sequence[Mapping[str, Any]] | None = None,
    *,
    path: str = '',
    split: str = 'train',
    limit: int | None = None,
    schema: str = 'messages',
    rated: bool = False,
    batch_size: int = 64,
    max_length: int = 1024,
    system: str = '',
    keys: str = '',
    question_key: str = 'question',
    solution_key: str = 'solution',
    seed: int = 0,
  ):
    if schema not in SCHEMAS:
      raise unknown(schema, SCHEMAS, 'schema', 'files')
    form = Format(
      keys=keys, question_key=question_key, solution_key=solution_key, system=system
    )
    rows = load_rows(path, split, limit) if rows is None else rows[:limit]
    read = Reader(chat, form, max_length, rated)
    found = read.rows(rows, schema, path or 'rows')
    self.skipped = sum(not groups for groups in found)
    self._groups = [group for groups in found for group in groups]
    if not self._groups:
      raise DataError(
        f'{path or "rows"}: nothing fits in {max_length} tokens ({self.skipped} rows '
        'are longer)'
      )
    self.noun = 'prompts' if rated else NOUNS[schema]  # what its groups are
    if rated:
      self._groups = _by_prompt(self._groups)
    self._batch_size, self._seed, self._taken = batch_size, seed, 0
    self._order = (-1, np.zeros(0, int))  # an epoch and its permutation

  @property
  def size(self) -> int:
    """The number of groups in an epoch."""
    return len(self._groups)

  @property
  def num_rows(self) -> int:
    """The most trajectories that any batch can hold."""
    sizes = sorted((len(group) for group in self._groups), reverse=True)
    top = np.cumsum([0, *sizes])

    def most(start: int) -> int:  # of a batch that begins there in an epoch
      first = min(self._batch_size, self.size - start)
      epochs, rest = divmod(self._batch_size - first, self.size)
      return int(top[first] + epochs * top[-1] + top[rest])

    starts = range(0, self.size, math.gcd(self.size, self._batch_size))
    return max(map(most, starts))

  def num_steps(self, epochs: float) -> int:
    """How many batches it takes to meet every group `epochs` times."""
    return -int(-epochs * self.size // self._batch_size)

  async def next(self, step: int) -> list[Group]:
    """The next `batch_size` groups."""
    indices = range(self._taken, self._taken + self._batch_size)
    self._taken += self._batch_size
    return [self._group(i) for i in indices]

  def metrics(self) -> dict[str, float]:
    """How often every group has been met by now."""
    return {'data/epoch': self._taken / self.size}

  def _group(self, i: int) -> Group:
    epoch, place = divmod(i, self.size)
    if epoch != self._order[0]:
      rng = np.random.default_rng([self._seed, epoch])
      self._order = (epoch, rng.permutation(self.size))
    return list(self._groups[int(self._order[1][place])])

  def state_dict(self) -> dict[str, Any]:
    return {'taken': self._taken, 'size': self.size}

  def load_state_dict(self, state: Mapping[str, Any]) -> None:
    """Raises DataError if the file has another number of groups than before."""
    if state['size'] != self.size:
      raise DataError(
        f'there are {self.size} {self.noun}, the checkpoint was written with '
        f'{state["size"]}; give it the same data to resume'
      )
    self._taken = state['taken']


class Reader:
  """Makes groups of rows. max_length: tokens; rated: a row must have a reward."""

  def __init__(self, chat: Chat, form: Format, max_length: int, rated: bool = False):
    self._chat, self._form = chat, form
    self._max_length, self._rated = max_length, rated

  def rows(
    self, rows: Sequence[Mapping[str, Any]], schema: str, where: str
  ) -> list[list[Group]]:
    """The groups of each row; none for a row that is too long."""
    read: Callable[[Row], list[Group]] = getattr(self, schema)
    found = []
    for i, row in enumerate(map(dict, rows)):
      try:
        groups = read(row)
      except ValueError as error:
        raise DataError(f'{where}, row {i}: {error}') from error
      for group in groups:
        for member, trajectory in enumerate(group):
          trajectory.group_id, trajectory.member = i, member
          trajectory.tag = self._form.tag(row)
      found.append(groups)
    return found

  def messages(self, row: Row) -> list[Group]:
    reward = self._form.reward(row, required=self._rated)
    trajectory = self._encode(row, self._form.conversation(row), reward)
    trajectory.extras.update(self._form.extras(row))
    return self._fitting([trajectory])

  def preference(self, row: Row) -> list[Group]:
    chosen, rejected = self._form.pair(row)
    pair = [self._encode(row, chosen, 1.0), self._encode(row, rejected, 0.0)]
    return self._fitting(pair)

  def text(self, row: Row) -> list[Group]:
    tokens = self._chat.document(self._form.text(row))
    if len(tokens) < 2:
      raise DataError('its text is empty')
    starts = range(0, len(tokens) - 1, self._max_length - 1)
    windows = [tokens[start : start + self._max_length] for start in starts]
    return [[_trajectory(w, np.arange(len(w)) > 0, 0.0, [])] for w in windows]

  def _fitting(self, group: Group) -> list[Group]:
    longest = max(len(row.tokens) for row in group)
    return [group] if longest <= self._max_length else []

  def _encode(self, row: Row, messages: list[Message], reward: float) -> Trajectory:
    tools = self._form.tools(row)
    chat = self._chat.with_options(tools=tools) if tools else self._chat
    tokens, mask = chat.conversation(messages)
    if not mask.any():
      raise DataError('it has no assistant message to learn from')
    return _trajectory(tokens, mask, reward, messages)


def _trajectory(
  tokens: np.ndarray, mask: np.ndarray, reward: float, messages: list[Message]
) -> Trajectory:
  """A row that someone wrote, with its reward on the last action token."""
  rewards = np.zeros(len(tokens), np.float32)
  rewards[np.flatnonzero(mask)[-1:]] = reward
  return Trajectory(
    tokens=tokens,
    action_mask=mask,
    rollout_logprobs=np.zeros(len(tokens), np.float32),
    rewards=rewards,
    weights_version=np.full(len(tokens), -1, np.int32),
    is_expert=True,
    messages=messages,
  )


def _by_prompt(groups: list[Group]) -> list[Group]:
  """One group for all rows whose tokens before the first action are the same."""
  found: dict[bytes, Group] = {}
  for (row,) in groups:
    prompt = row.tokens[: int(row.action_mask.argmax())].tobytes()
    members = found.setdefault(prompt, [])
    row.group_id = members[0].group_id if members else row.group_id
    row.member = len(members)
    members.append(row)
  return list(found.values())
