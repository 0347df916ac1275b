"""RewardModel scores conversations with a transformer that has a value head."""

import asyncio
import collections
import dataclasses
import functools
import math
from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from jaxrl.data.chat_tokenizer import ChatTokenizer
from jaxrl.device_thread import DeviceThread
from jaxrl.models import layer_stack
from jaxrl.models.transformer_lm import TransformerLM
from jaxrl.rollout.engine.actor_proxy import maybe_await
from jaxrl.rollout.engine.model_runner import default_buckets
from jaxrl.rollout.rewards.reward_pipeline import (
  RewardInput,
  RewardOutput,
  ScoringError,
)
from jaxrl.types import Message, Params


def score_rows(
  model: TransformerLM, params: Params, tokens: jax.Array, lengths: jax.Array
) -> jax.Array:
  """Computes the value head's score of whole sequences.

  It is read after each row's last token. A row depends on no other row.

  Args:
    model: The transformer.
    params: Its parameters.
    tokens: `[B, T]` int32, left-aligned.
    lengths: `[B]` int32, at least 1.

  Returns:
    `[B]` float32.
  """
  time = jnp.arange(tokens.shape[1])
  segment_ids = (time < lengths[:, None]).astype(jnp.int32)
  hidden = model.hidden(params, tokens, segment_ids)
  last = jnp.take_along_axis(hidden, (lengths - 1)[:, None, None], axis=1)[:, 0]
  return layer_stack.embedding_and_head(model.config, params).value_head(last)


class RewardModel:
  """Scores conversations in batches.

  Every batch has the same number of rows, so that a score is the same bit for bit,
  whatever it is batched with. Conversations of similar length go together.
  """

  def __init__(
    self,
    model: TransformerLM,
    params: Params,
    chat: ChatTokenizer,
    *,
    device_thread: DeviceThread,
    pad_id: int | None = None,
    max_length: int = 4096,
    batch_size: int = 8,
    timeout: float = 600.0,
  ):
    """Creates a reward model on the first device.

    Args:
      model: The transformer.
      params: Its parameters, with a value head. The head's value after the last token
        is the score.
      chat: The chat tokenizer of the model.
      device_thread: Runs the device's work.
      pad_id: Trailing tokens of this id are ignored, as sequence classifiers of
        transformers do; None for no such id.
      max_length: Tokens a conversation may have.
      batch_size: Rows of every batch.
      timeout: Seconds to wait for a score, including the time in the queue.

    Raises:
      ValueError: If `max_length` or `batch_size` is less than 1.
    """
    if min(max_length, batch_size) < 1:
      raise ValueError('max_length and batch_size must be at least 1')
    self._chat = chat
    self._device_thread = device_thread
    self._pad_id = pad_id
    self._params = jax.device_put(params, jax.devices()[0])
    self._score = jax.jit(functools.partial(score_rows, model))
    self._max_length = max_length
    self._batch_size = batch_size
    self._timeout = timeout
    self._buckets = default_buckets(max_length)
    self._queue: collections.deque[_ScoreRequest] = collections.deque()
    self._task: asyncio.Task | None = None

  def encode(self, messages: Sequence[Message]) -> list[int]:
    """Tokenizes a whole conversation with its chat template.

    Args:
      messages: The conversation.

    Returns:
      Its token ids.

    Raises:
      ValueError: If it is longer than `max_length`.
    """
    tokens = self._chat.encode_conversation(messages)
    while self._pad_id is not None and tokens[1:] and tokens[-1] == self._pad_id:
      tokens.pop()
    if len(tokens) > self._max_length:
      raise ValueError(
        f'a conversation of {len(tokens)} tokens is longer than the max_length='
        f'{self._max_length} of the reward model'
      )
    return tokens

  async def score(self, messages: Sequence[Message]) -> float:
    """Scores a conversation.

    Args:
      messages: The conversation.

    Returns:
      Its score.

    Raises:
      ScoringError: If it takes longer than the timeout.
      ValueError: If the conversation is longer than `max_length`.
    """
    tokens = self.encode(messages)
    bucket = next(size for size in self._buckets if size >= len(tokens))
    future = asyncio.get_running_loop().create_future()
    self._queue.append(_ScoreRequest(tokens, bucket, future))
    if self._task is None or self._task.done():
      self._task = asyncio.create_task(self._score_queue())
    try:
      async with asyncio.timeout(self._timeout):
        return await future
    except TimeoutError:
      raise ScoringError(
        f'the reward model took more than {self._timeout:g} s'
      ) from None

  async def _score_queue(self) -> None:
    """Scores queued requests, batch by batch, until there are none."""
    while self._queue:
      await asyncio.sleep(0)  # lets requests of the same moment join the batch
      bucket = self._queue[0].bucket
      batch = [r for r in self._queue if r.bucket == bucket][: self._batch_size]
      for request in batch:
        self._queue.remove(request)
      batch = [request for request in batch if not request.future.done()]
      if not batch:
        continue  # nobody waits for them any more
      try:
        scores = await self._device_thread.run(self._score_batch, batch, bucket)
      except Exception as error:
        for request in batch:
          _resolve(request.future, error)
      else:
        for request, score in zip(batch, scores, strict=False):
          _resolve(request.future, float(score))

  def _score_batch(self, batch: 'list[_ScoreRequest]', bucket: int) -> np.ndarray:
    """Returns `[batch_size]` scores of padded rows; runs on the device thread."""
    tokens = np.zeros((self._batch_size, bucket), np.int32)
    lengths = np.ones(self._batch_size, np.int32)
    for i, request in enumerate(batch):
      tokens[i, : len(request.tokens)] = request.tokens
      lengths[i] = len(request.tokens)
    return np.asarray(self._score(self._params, tokens, lengths))


@dataclasses.dataclass(eq=False)
class _ScoreRequest:
  tokens: list[int]
  bucket: int
  future: asyncio.Future


def _resolve(future: asyncio.Future, outcome: float | Exception) -> None:
  if future.done():
    return
  if isinstance(outcome, Exception):
    future.set_exception(outcome)
  else:
    future.set_result(outcome)


class RewardModelTerm:
  """Uses a reward model as a reward function."""

  def __init__(self, scorer: Any, *, sigmoid: bool = False):
    """Creates the term.

    Args:
      scorer: Has `score(messages)`; may be remote.
      sigmoid: Whether the score is squashed into (0, 1), for models trained on
        comparisons.
    """
    self._scorer = scorer
    self._sigmoid = sigmoid

  async def __call__(self, episode: RewardInput) -> RewardOutput:
    """Scores the episode's conversation."""
    score = await maybe_await(self._scorer.score(episode.messages))
    if self._sigmoid and math.isfinite(score):
      score = 1 / (1 + math.exp(-score)) if score > -700 else 0.0
    return RewardOutput(score)
