"""A reward model: a transformer with a head that scores whole conversations."""

import asyncio
import collections
import dataclasses
import math
from collections.abc import Sequence
from typing import Any

import jax
import numpy as np

from jaxrl.data.chat import Chat
from jaxrl.dispatch import Dispatcher
from jaxrl.models.model import Model
from jaxrl.rollout.handles import settle
from jaxrl.rollout.jax_engine import default_buckets
from jaxrl.rollout.rewards.stage import NoScore, Played, Word
from jaxrl.types import Message, Params


class RewardModel:
  """Scores conversations in batches.

  model, params: with a value head, whose word on the state after the last token is
  the score. pad_id: tokens of this id at the end are not looked at, as transformers'
  sequence classifiers do; None for none. max_length: tokens a conversation may have.
  batch_size: rows of every dispatch, so that a score is the same, bit for bit,
  whatever it is scored with; those of a like length go together. timeout: seconds that
  who asks will wait, the line before it included.
  """

  def __init__(
    self,
    model: Model,
    params: Params,
    chat: Chat,
    *,
    dispatcher: Dispatcher,
    pad_id: int | None = None,
    max_length: int = 4096,
    batch_size: int = 8,
    timeout: float = 600.0,
  ):
    if min(max_length, batch_size) < 1:
      raise ValueError('max_length and batch_size start at 1')
    self._chat, self._dispatcher, self._pad_id = chat, dispatcher, pad_id
    self._params = jax.device_put(params, jax.devices()[0])
    self._score = jax.jit(model.score)
    self._max_length, self._batch_size = max_length, batch_size
    self._timeout = timeout
    self._buckets = default_buckets(max_length)
    self._waiting: collections.deque[_Request] = collections.deque()
    self._task: asyncio.Task | None = None

  def encode(self, messages: Sequence[Message]) -> list[int]:
    """Ids of a whole conversation, as its template writes it.

    Raises ValueError for one that is longer than max_length.
    """
    tokens = self._chat.whole(messages)
    while self._pad_id is not None and tokens[1:] and tokens[-1] == self._pad_id:
      tokens.pop()
    if len(tokens) > self._max_length:
      raise ValueError(
        f'a conversation of {len(tokens)} tokens is longer than the max_length='
        f'{self._max_length} of the reward model'
      )
    return tokens

  async def score(self, messages: Sequence[Message]) -> float:
    """The score of a conversation. Raises NoScore where it takes too long."""
    tokens = self.encode(messages)
    bucket = next(size for size in self._buckets if size >= len(tokens))
    future = asyncio.get_running_loop().create_future()
    self._waiting.append(_Request(tokens, bucket, future))
    if self._task is None or self._task.done():
      self._task = asyncio.create_task(self._drive())
    try:
      return await asyncio.wait_for(future, self._timeout)
    except TimeoutError:
      raise NoScore(f'the reward model took more than {self._timeout:g} s') from None

  async def _drive(self) -> None:
    """Scores what waits, until nothing does."""
    while self._waiting:
      await asyncio.sleep(0)  # who asks in the same moment joins
      bucket = self._waiting[0].bucket
      batch = [one for one in self._waiting if one.bucket == bucket][: self._batch_size]
      for one in batch:
        self._waiting.remove(one)
      batch = [one for one in batch if not one.future.done()]
      if not batch:
        continue  # no one waits for them any more
      try:
        scores = await self._dispatcher.run(self._run, batch, bucket)
      except Exception as error:
        for one in batch:
          _settle(one.future, error)
      else:
        for one, score in zip(batch, scores, strict=False):
          _settle(one.future, float(score))

  def _run(self, batch: 'list[_Request]', bucket: int) -> np.ndarray:
    """On the device thread: scores `[batch_size]` of rows padded to the bucket."""
    tokens = np.zeros((self._batch_size, bucket), np.int32)
    lengths = np.ones(self._batch_size, np.int32)
    for i, one in enumerate(batch):
      tokens[i, : len(one.tokens)] = one.tokens
      lengths[i] = len(one.tokens)
    return np.asarray(self._score(self._params, tokens, lengths))


@dataclasses.dataclass(eq=False)
class _Request:
  tokens: list[int]
  bucket: int
  future: asyncio.Future


def _settle(future: asyncio.Future, outcome: float | Exception) -> None:
  if future.done():
    return
  if isinstance(outcome, Exception):
    future.set_exception(outcome)
  else:
    future.set_result(outcome)


class Scored:
  """A reward model as a part. scorer: has `score(messages)`; may be remote.

  sigmoid: the score is squashed into (0, 1), for models trained on comparisons.
  """

  def __init__(self, scorer: Any, *, sigmoid: bool = False):
    self._scorer, self._sigmoid = scorer, sigmoid

  async def __call__(self, played: Played) -> Word:
    score = await settle(self._scorer.score(played.messages))
    if self._sigmoid and math.isfinite(score):
      score = 1 / (1 + math.exp(-score)) if score > -700 else 0.0
    return Word(score)
