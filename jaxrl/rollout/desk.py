"""The front of an engine: requests are checked, joined, awaited and told of."""

import asyncio
from collections.abc import Sequence
from typing import Any

import numpy as np

from jaxrl.rollout.slots import Request
from jaxrl.types import Completion, SamplingParams


class Desk:
  """Keeps the requests being served, by id. An engine says how they begin and end.

  tokenizer: needed for stop strings only. window: tokens that prompt and completion
  have together. vocab_size: of the model.
  """

  def __init__(self, tokenizer: Any, *, window: int, vocab_size: int):
    self._tokenizer, self._window, self._vocab = tokenizer, window, vocab_size
    self._requests: dict[str, Request] = {}

  @property
  def version(self) -> int | None:
    """The version that is served; None before the first."""
    raise NotImplementedError

  def _refuse(self, prompt: np.ndarray, sampling: SamplingParams) -> str:
    """What else is wrong with a request, by the engine's own bounds; '' if nothing."""
    return ''

  def _begin(self, request: Request) -> None:
    """Puts a new request in line."""
    raise NotImplementedError

  def _end(self, request: Request, reason: str) -> None:
    """Ends a request that is in line or being served."""
    raise NotImplementedError

  async def abort(self, request_id: str) -> None:
    """Ends a request at once, with the tokens it has; unknown ids are ignored."""
    request = self._requests.get(request_id)
    if request is not None:
      self._end(request, 'abort')
      await asyncio.wait({request.future})

  async def progress(self, request_ids: Sequence[str]) -> dict[str, Completion]:
    """What these requests have emitted so far, but for those not being served."""
    served = self._requests
    return {name: served[name].so_far() for name in request_ids if name in served}

  async def generate(
    self, request_id: str, token_ids: Sequence[int], sampling: SamplingParams
  ) -> Completion:
    """Completes `token_ids`.

    An id that is being served joins the running request if prompt and sampling are
    the same. Raises ValueError for a request that cannot be served, and whatever the
    device raised while serving it. Cancelling the last waiter aborts the request.
    """
    prompt = np.array(token_ids, np.int32)
    wrong = self._wrong(prompt, sampling) or self._refuse(prompt, sampling)
    if wrong:
      raise ValueError(f'request {request_id!r}: {wrong}')
    if self.version is None:
      raise RuntimeError('the engine has no weights yet: call load(version, params)')
    request = self._requests.get(request_id)
    if request is None:
      request = self._submit(request_id, prompt, sampling)
    elif request.sampling != sampling or not np.array_equal(request.prompt, prompt):
      raise ValueError(
        f'request {request_id!r} is being served with another prompt or other '
        'sampling parameters; give this one an id of its own'
      )
    request.waiters += 1
    try:
      return await asyncio.shield(request.future)
    finally:
      request.waiters -= 1
      if not request.waiters and not request.future.done():
        self._end(request, 'abort')

  def _submit(self, name: str, prompt: np.ndarray, sampling: SamplingParams) -> Request:
    """Registers and queues in one step: no await, so no abort can fall between."""
    request = Request(
      name,
      prompt,
      sampling,
      budget=min(sampling.max_tokens, self._window - len(prompt)),
      future=asyncio.get_running_loop().create_future(),
    )
    self._requests[name] = request
    self._begin(request)
    return request

  def _wrong(self, prompt: np.ndarray, sampling: SamplingParams) -> str:
    if prompt.ndim != 1 or not len(prompt):
      return f'its prompt must be a row of token ids, not of shape {prompt.shape}'
    if len(prompt) >= self._window:
      return (
        f'its prompt of {len(prompt)} tokens leaves no room in a window of '
        f'{self._window}; shorten it or raise max_length'
      )
    if prompt.min() < 0 or prompt.max() >= self._vocab:
      return f'its prompt holds token ids outside 0 … {self._vocab - 1}'
    if not 0 <= sampling.first < len(prompt):
      return f'first={sampling.first} must lie in 0 … {len(prompt) - 1} of its prompt'
    if sampling.stop and self._tokenizer is None:
      return 'stop strings need an engine with a tokenizer'
    return _wrong_sampling(sampling)


def _wrong_sampling(sampling: SamplingParams) -> str:
  """What is wrong with these parameters; '' when nothing is."""
  if sampling.max_tokens < 1:
    return f'max_tokens={sampling.max_tokens} must be at least 1'
  if sampling.temperature < 0:
    return f'temperature={sampling.temperature} must be 0 or more'
  if not 0 < sampling.top_p <= 1:
    return f'top_p={sampling.top_p} must lie in (0, 1]'
  if sampling.top_k < 0:
    return f'top_k={sampling.top_k} must be 0 or more'
  if not 0 <= sampling.seed < 2**64:
    return f'seed={sampling.seed} must lie in 0 … 2**64 − 1'
  if '' in sampling.stop:
    return 'an empty stop string would stop before the first token'
  return ''
