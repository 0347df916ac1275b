"""FileSampler serves rows of files as expert trajectories in shuffled epochs."""

import math
from collections.abc import Callable, Mapping, Sequence

import numpy as np

from jaxrl.data.chat_tokenizer import ChatTokenizer, has_images
from jaxrl.data.row_sources import (
  DataError,
  Row,
  RowSources,
  describe_row,
  describe_sources,
  load_rows,
)
from jaxrl.data.rows.row_formats import DATA_FORMATS, RowFormat
from jaxrl.data.rows.task_rows import USUAL_COLUMNS, RowColumns
from jaxrl.options import unknown_name_error
from jaxrl.types import Group, Message, StateDict, Trajectory

GROUP_NOUNS = {
  'messages': 'conversations',
  'preference': 'pairs',
  'text': 'windows of text',
}


class FileSampler:
  """Serves written conversations, pairs or texts as expert trajectories.

  The order is a pure function of `seed`. Each group comes once per epoch, and a batch
  that an epoch cannot fill continues with the next one. Conversations and pairs longer
  than `max_length` tokens are left out and counted in `skipped`.

  Args:
    chat: Tokenizes conversations.
    rows: Rows in one of the formats of `row_formats`.
    path: Where rows come from: a file, a folder, or `generate:NAME(…)`; instead of
      `rows`.
    split: The split of the source.
    limit: Read only the first `limit` rows.
    schema: What a group is. 'messages': one conversation, whose assistant turns are
      actions. 'preference': a pair, the chosen answer first, with reward 1. 'text': a
      window of at most `max_length` tokens of a text; windows overlap by the one token
      that cannot be learned for lack of context.
    rated: For 'messages': rows have rewards, and the rows of one prompt form a group.
    batch_size: The number of groups per step.
    max_length: The maximum number of tokens of a trajectory.
    system_prompt: The system message of conversations that have none.
    columns: Which columns of rows hold what.
    seed: The seed of the order.

  Attributes:
    skipped: How many rows were too long.
    group_noun: What the groups are, for messages to the user.

  Raises:
    DataError: If a row cannot be read or learned from; the error names file and row.
  """

  def __init__(
    self,
    chat: ChatTokenizer,
    rows: Sequence[Mapping[str, object]] | None = None,
    *,
    path: RowSources = '',
    split: str = 'train',
    limit: int | None = None,
    data_format: str = 'messages',
    rated: bool = False,
    batch_size: int = 64,
    max_length: int = 1024,
    system_prompt: str = '',
    columns: RowColumns = USUAL_COLUMNS,
    seed: int = 0,
  ):
    if data_format not in DATA_FORMATS:
      raise unknown_name_error(data_format, DATA_FORMATS, 'data format', 'data_format')
    row_format = RowFormat(columns, system_prompt=system_prompt)
    rows = load_rows(path, split, limit) if rows is None else rows[:limit]
    parser = RowParser(chat, row_format, max_length, rated)
    name = describe_sources(path) or 'rows'
    parsed = parser.rows(rows, data_format, name)
    self.skipped = sum(not groups for groups in parsed)
    self._groups = [group for groups in parsed for group in groups]
    if not self._groups:
      raise DataError(
        f'{name}: no row fits in {max_length} tokens ({self.skipped} rows are '
        'longer): raise batch.max_length'
      )
    self.group_noun = 'prompts' if rated else GROUP_NOUNS[data_format]
    if rated:
      self._groups = _by_prompt(self._groups)
    self._batch_size = batch_size
    self._seed = seed
    self._num_served = 0
    self._order = (-1, np.zeros(0, int))  # an epoch and its permutation

  @property
  def size(self) -> int:
    """Returns the number of groups in an epoch."""
    return len(self._groups)

  @property
  def num_rows(self) -> int:
    """Returns the largest number of trajectories that any batch can hold."""
    sizes = sorted((len(group) for group in self._groups), reverse=True)
    cumulative = np.cumsum([0, *sizes])

    def most_rows(start: int) -> int:  # in a batch that begins there in an epoch
      first = min(self._batch_size, self.size - start)
      epochs, rest = divmod(self._batch_size - first, self.size)
      return int(cumulative[first] + epochs * cumulative[-1] + cumulative[rest])

    starts = range(0, self.size, math.gcd(self.size, self._batch_size))
    return max(map(most_rows, starts))

  def num_steps(self, epochs: float) -> int:
    """Returns how many batches it takes to meet every group `epochs` times.

    Args:
      epochs: The number of epochs, which may be a fraction.

    Returns:
      The number of batches, rounded up.
    """
    return -int(-epochs * self.size // self._batch_size)

  async def next(self, step: int) -> list[Group]:
    """Returns the next `batch_size` groups.

    Args:
      step: The training step, which does not matter here.

    Returns:
      The groups.
    """
    indices = range(self._num_served, self._num_served + self._batch_size)
    self._num_served += self._batch_size
    return [self._group(i) for i in indices]

  def metrics(self) -> dict[str, float]:
    """Returns how often every group has been met so far."""
    return {'data/epoch': self._num_served / self.size}

  def _group(self, i: int) -> Group:
    epoch, position = divmod(i, self.size)
    if epoch != self._order[0]:
      rng = np.random.default_rng([self._seed, epoch])
      self._order = (epoch, rng.permutation(self.size))
    return list(self._groups[int(self._order[1][position])])

  def state_dict(self) -> StateDict:
    """Returns the position in the epochs, as JSON."""
    return {'taken': self._num_served, 'size': self.size}

  def load_state_dict(self, state: StateDict) -> None:
    """Restores the position in the epochs.

    Args:
      state: The saved state.

    Raises:
      DataError: If the file had another number of groups then.
    """
    if state['size'] != self.size:
      raise DataError(
        f'there are {self.size} {self.group_noun}, the checkpoint was written with '
        f'{state["size"]}; give it the same data to resume'
      )
    self._num_served = state['taken']


class RowParser:
  """Parses rows into groups of expert trajectories.

  Args:
    chat: Tokenizes conversations.
    form: Says where rows hold what.
    max_length: The maximum number of tokens of a trajectory.
    rated: Whether a row must have a reward.
  """

  def __init__(
    self,
    chat: ChatTokenizer,
    row_format: RowFormat,
    max_length: int,
    rated: bool = False,
  ):
    self._chat = chat
    self._row_format = row_format
    self._max_length = max_length
    self._rated = rated

  def rows(
    self, rows: Sequence[Mapping[str, object]], data_format: str, where: str
  ) -> list[list[Group]]:
    """Parses rows of one data format.

    Args:
      rows: The rows.
      data_format: The data format: 'messages', 'preference' or 'text'.
      where: The source of the rows, for error messages.

    Returns:
      The groups of each row; a row that is too long has none.

    Raises:
      DataError: If a row cannot be parsed; the error names it.
    """
    parse_row: Callable[[Row], list[Group]] = getattr(self, data_format)
    parsed = []
    for i, row in enumerate(map(dict, rows)):
      try:
        groups = parse_row(row)
      except ValueError as error:
        raise DataError(f'{describe_row(rows, i, where)}: {error}') from error
      for group in groups:
        for member, trajectory in enumerate(group):
          trajectory.env_group, trajectory.sample_index = i, member
          trajectory.tag = self._row_format.tag(row)
      parsed.append(groups)
    return parsed

  def messages(self, row: Row) -> list[Group]:
    """Parses a conversation into a group of one trajectory.

    Args:
      row: The row.

    Returns:
      One group, or none if the conversation is too long.
    """
    reward = self._row_format.reward(row, required=self._rated)
    trajectory = self._encode(row, self._row_format.conversation(row), reward)
    trajectory.extras.update(self._row_format.extras(row))
    return self._fitting([trajectory])

  def preference(self, row: Row) -> list[Group]:
    """Parses a preference pair into a group of two trajectories.

    Args:
      row: The row.

    Returns:
      One group, chosen before rejected, or none if either is too long.
    """
    chosen, rejected = self._row_format.pair(row)
    pair = [self._encode(row, chosen, 1.0), self._encode(row, rejected, 0.0)]
    return self._fitting(pair)

  def text(self, row: Row) -> list[Group]:
    """Splits a text into windows of at most `max_length` tokens.

    Args:
      row: The row.

    Returns:
      One group for each window.
    """
    tokens = self._chat.encode_document(self._row_format.text(row))
    if len(tokens) < 2:
      raise DataError('the text is empty')
    starts = range(0, len(tokens) - 1, self._max_length - 1)
    windows = [tokens[start : start + self._max_length] for start in starts]
    return [[_trajectory(w, np.arange(len(w)) > 0, 0.0, [])] for w in windows]

  def _fitting(self, group: Group) -> list[Group]:
    longest = max(len(row.tokens) for row in group)
    return [group] if longest <= self._max_length else []

  def _encode(self, row: Row, messages: list[Message], reward: float) -> Trajectory:
    tools = self._row_format.tools(row)
    chat = self._chat.with_options(tools=tools) if tools else self._chat
    tokens, mask = chat.encode_with_mask(messages)
    if not mask.any():
      raise DataError('there is no assistant message to learn from')
    trajectory = _trajectory(tokens, mask, reward, messages)
    if has_images(messages):
      from jaxrl.data.images import find_images  # text alone needs none

      # Messages after the last reply are in no row.
      count = len(chat.image_ends(tokens, messages))
      trajectory.images = list(find_images(messages))[:count]
    return trajectory


def _trajectory(
  tokens: np.ndarray, mask: np.ndarray, reward: float, messages: list[Message]
) -> Trajectory:
  """Builds an expert trajectory with its reward on the last action token."""
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
  """Groups rows whose tokens before the first action are equal."""
  by_prompt: dict[bytes, Group] = {}
  for (row,) in groups:
    prompt = row.tokens[: int(row.action_mask.argmax())].tobytes()
    prompt += ''.join(image.digest for image in row.images).encode()
    group = by_prompt.setdefault(prompt, [])
    row.env_group = group[0].env_group if group else row.env_group
    row.sample_index = len(group)
    group.append(row)
  return list(by_prompt.values())
