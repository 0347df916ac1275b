"""Engine base: validates, deduplicates and tracks generation requests.

`JaxEngine` and `VllmEngine` derive from `EngineBase`, and so can an engine in a file of
your own. An engine says which weights it serves (`version`, `load`), how a request is
queued (`_enqueue`) and how it is taken out of service (`_finish`). It may replace
everything else.
"""

import asyncio
import dataclasses
import time
from collections.abc import Sequence
from typing import Any

import numpy as np

from jaxrl import spans
from jaxrl.types import (
  AnyArray,
  Completion,
  Params,
  Pixels,
  PromptTooLongError,
  SamplingParams,
)

# Tokens of context decoded beyond the longest stop string. They cover characters that
# are split over several tokens and what a tokenizer does at the start of a text.
STOP_CONTEXT_TOKENS = 8


class ImageError(RuntimeError):
  """An engine cannot take the images of a prompt; the message says why."""


@dataclasses.dataclass(frozen=True)
class EngineTraits:
  """What a run must know about a class of engines; its class attribute `traits`.

  Attributes:
    external: Whether it computes log-probs with another program than the learner's
      model, so that the two differ a little and training corrects for it.
    needs_ray: Whether it must be hosted by Ray actors.
    can_sleep: Whether `sleep` gives a GPU's memory back to other processes.
    receives_from_gpu: Whether the learner can send weights straight into its GPUs.
    constrains_output: Whether it can restrict what is drawn to a grammar.
    max_top_logprobs: How many of the likeliest tokens it can tell in each place.
  """

  external: bool = True
  needs_ray: bool = False
  can_sleep: bool = False
  receives_from_gpu: bool = False
  constrains_output: bool = False
  max_top_logprobs: int = 0


@dataclasses.dataclass(eq=False)
class EngineRequest:
  """One sequence that an engine is generating, with the tokens generated so far.

  Attributes:
    request_id: The caller's id.
    prompt: `[P]` int32 prompt token ids.
    sampling: How tokens are drawn.
    max_new_tokens: Most tokens that may be generated, limited by the context length.
    images: The prompt's images, in the order of their runs of placeholders.
    position_shift: What positions after the prompt differ by from indices of tokens.
    cache_name: Names the weights that cache the prompt, where an engine has several.
    future: Resolves to the request's `Completion`.
    tokens: Generated token ids.
    logprobs: The log-probability of each generated token.
    weights_versions: The weights version that drew each generated token.
    top_logprobs: The likeliest tokens in the place of each, if they were asked for.
    routed_pieces: Experts taken by the prompt's and the generated tokens, as pieces
      `[·, L, k]` in order; empty if the engine does not record them.
    num_waiters: Number of callers that wait for the request.
  """

  request_id: str
  prompt: np.ndarray
  sampling: SamplingParams
  max_new_tokens: int
  future: asyncio.Future
  images: tuple[Pixels, ...] = ()
  position_shift: int = 0
  cache_name: str = ''
  tokens: list[int] = dataclasses.field(default_factory=list)
  logprobs: list[float] = dataclasses.field(default_factory=list)
  weights_versions: list[int] = dataclasses.field(default_factory=list)
  top_logprobs: list[dict[int, float]] = dataclasses.field(default_factory=list)
  routed_pieces: list[np.ndarray] = dataclasses.field(default_factory=list)
  num_waiters: int = 0

  @property
  def prompt_key(self) -> bytes:
    """Returns the prompt, with its images, as a dictionary key."""
    digests = ''.join(image.digest for image in self.images)
    return self.prompt.tobytes() + digests.encode() + self.cache_name.encode()

  def has_prompt(self, prompt: np.ndarray, images: Sequence[Pixels]) -> bool:
    """Returns whether a prompt and its images are those of the request."""
    digests = [image.digest for image in images]
    same_images = digests == [image.digest for image in self.images]
    return same_images and np.array_equal(self.prompt, prompt)

  @property
  def generated_ids(self) -> list[int]:
    """Returns the whole completion, including the part already in the prompt."""
    resumed = self.sampling.num_generated
    return [*self.prompt[-resumed:].tolist(), *self.tokens] if resumed else self.tokens

  def append_tokens(
    self, tokens: list[int], logprobs: list[float], weights_version: int
  ) -> None:
    """Appends newly generated tokens.

    Args:
      tokens: New token ids.
      logprobs: Their log-probabilities.
      weights_version: The weights version that drew them.
    """
    self.tokens += tokens
    self.logprobs += logprobs
    self.weights_versions += [weights_version] * len(tokens)

  def truncate(self, length: int) -> None:
    """Drops every generated token after the first `length`."""
    per_token = self.tokens, self.logprobs, self.weights_versions, self.top_logprobs
    for values in per_token:
      del values[length:]

  def partial_output(self, finish_reason: str = 'abort') -> Completion:
    """Returns the tokens generated so far as a completion.

    Args:
      finish_reason: The completion's `finish_reason`.
    """
    num_fed = len(self.prompt) + len(self.tokens) - 1  # the last token was not fed
    routed = None
    if self.routed_pieces:
      routed = np.concatenate(self.routed_pieces)[:num_fed]
    return Completion(
      tokens=np.asarray(self.tokens, np.int32),
      logprobs=np.asarray(self.logprobs, np.float32),
      weights_versions=np.asarray(self.weights_versions, np.int32),
      finish_reason=finish_reason,
      routed_experts=routed,
      top_logprobs=tuple(self.top_logprobs) if self.sampling.top_logprobs else None,
    )

  def finish(self, finish_reason: str) -> None:
    """Resolves the future with the completion, unless it is already resolved."""
    if not self.future.done():
      self.future.set_result(self.partial_output(finish_reason))

  def fail(self, error: BaseException) -> None:
    """Resolves the future with `error`, unless it is already resolved."""
    if not self.future.done():
      self.future.set_exception(error)


@dataclasses.dataclass
class DecodeResult:
  """A decode dispatch that is in flight or, after `_collect_decode`, on the host.

  Attributes:
    owners: The request in each slot.
    weights_version: The version that drew the tokens.
    tokens: `[D, S]` int32, −1 where a slot was idle. Where tokens are drafted, the
      first axis is longer, and each slot's tokens lie at its start.
    logprobs: `[D, S]` float32.
    routed_experts: `[D, S, L, k]` int16; None if they are not recorded.
    prompt_experts: Requests that started with the dispatch, with the experts taken by
      the tokens in their slots, `[C, L, k]`.
    dispatch_time: When it started, on `time.perf_counter`.
    draft_counts: `[3, S]` int32, steps, drafted tokens and accepted ones of each slot;
      None if tokens are not drafted.
  """

  owners: list[EngineRequest | None]
  weights_version: int
  tokens: AnyArray
  logprobs: AnyArray
  routed_experts: AnyArray
  prompt_experts: list[tuple[EngineRequest, AnyArray]]
  dispatch_time: float
  draft_counts: AnyArray = None


class EngineBase:
  """Base class of engines: validates, deduplicates and tracks requests by id.

  Attributes:
    traits: What a run must know about the class.
  """

  traits = EngineTraits()
  _processor: Any = None  # of images, where the model sees them

  def __init__(self, tokenizer: Any, *, max_length: int, vocab_size: int):
    """Initializes an engine without requests.

    Args:
      tokenizer: Only needed for stop strings; may be None.
      max_length: Context length, in tokens of prompt and completion together.
      vocab_size: The model's vocabulary size.
    """
    self._tokenizer = tokenizer
    self._max_length = max_length
    self._vocab_size = vocab_size
    self._requests: dict[str, EngineRequest] = {}
    self._held: dict[str, EngineRequest] | None = None  # waiting for `resume`

  @property
  def version(self) -> int | None:
    """Returns the weights version being served; None before the first one is loaded."""
    raise NotImplementedError

  async def load(self, version: int, params: Params) -> None:
    """Serves `params` as `version` from now on.

    Args:
      version: The weights version.
      params: The model's parameters, which must not be donated or changed.
    """
    raise NotImplementedError

  @property
  def seconds_since_progress(self) -> float:
    """Returns the seconds without progress while there is work; 0 if not measured."""
    return 0.0

  def metrics(self) -> dict[str, float]:
    """Returns metrics since the last call, by name; none unless an engine has some."""
    return {}

  async def warmup(self) -> None:
    """Prepares for requests, once weights are loaded; does nothing here."""

  async def drain(self) -> None:
    """Holds new requests back until `resume`; returns when the others have ended."""
    if self._held is None:
      self._held = {}
    while self._held is not None and (served := self._served_futures()):
      await asyncio.wait(served)

  async def pause(self) -> None:
    """Stops serving until `resume`; here like `drain`, which ends requests first."""
    await self.drain()

  async def sleep(self) -> None:
    """Stops serving until `resume` and frees what memory it can; here like `drain`."""
    await self.drain()

  async def resume(self) -> None:
    """Serves again after `pause`, `drain` or `sleep`."""
    held, self._held = self._held or {}, None
    for request in held.values():
      self._enqueue(request)

  def _served_futures(self) -> set[asyncio.Future]:
    held = self._held or {}
    return {r.future for r in self._requests.values() if r.request_id not in held}

  def _check_limits(self, prompt: np.ndarray, sampling: SamplingParams) -> str:
    """Says which of the engine's own limits a request breaks; '' if none."""
    return ''

  def _check_size(self, prompt: np.ndarray) -> str:
    """Says why a prompt is too long; '' if it is not."""
    if len(prompt) < self._max_length:
      return ''
    return (
      f'its prompt of {len(prompt)} tokens leaves no room in a window of '
      f'{self._max_length}; shorten it or raise max_length'
    )

  def _check_images(self, prompt: np.ndarray, images: tuple[Pixels, ...]) -> str:
    """Says what is wrong with the images of a request, if it has any; '' if nothing."""
    if self._processor is None:
      return 'it has images, and this engine serves a model that sees none'
    from jaxrl.rollout.engine import image_features  # few models see images

    return image_features.check_prompt(self._processor, prompt, images)

  def _enqueue(self, request: EngineRequest) -> None:
    """Queues a new request."""
    raise NotImplementedError

  def _finish(self, request: EngineRequest, finish_reason: str) -> None:
    """Ends a request that is queued or being served.

    Removes it from `_requests`, and calls its `finish`.
    """
    raise NotImplementedError

  def _abort(self, request: EngineRequest) -> None:
    """Ends a request, whether it is held back or was handed to `_enqueue`."""
    if self._held and self._held.pop(request.request_id, None) is not None:
      self._requests.pop(request.request_id, None)
      request.finish('abort')
    else:
      self._finish(request, 'abort')

  async def generate(
    self,
    request_id: str,
    token_ids: Sequence[int],
    sampling: SamplingParams,
    images: Sequence[Pixels] = (),
  ) -> Completion:
    """Generates a completion of `token_ids`.

    If a request with the same id, prompt, images and sampling parameters is being
    served, the call joins it. If the last waiting caller is cancelled, the request is
    aborted.

    Args:
      request_id: Identifies the request until it has ended.
      token_ids: The prompt.
      sampling: How tokens are drawn.
      images: The prompt's images, in the order of their runs of placeholders.

    Returns:
      The completion.

    Raises:
      PromptTooLongError: If the prompt does not fit.
      ValueError: If the request is invalid or breaks another limit of the engine.
      ImageError: If the engine cannot take its images.
      RuntimeError: If the engine has no weights yet.
      Exception: Whatever the device raised while it served the request.
    """
    prompt = np.array(token_ids, np.int32)
    problem = self._validate(prompt, sampling) or self._check_limits(prompt, sampling)
    if problem:
      raise ValueError(f'request {request_id!r}: {problem}')
    if problem := self._check_size(prompt):
      raise PromptTooLongError(f'request {request_id!r}: {problem}')
    if images and (problem := self._check_images(prompt, tuple(images))):
      raise ImageError(f'request {request_id!r}: {problem}')
    if self.version is None:
      raise RuntimeError('the engine has no weights yet: call load(version, params)')
    request = self._requests.get(request_id)
    if request is None:
      request = self._submit(request_id, prompt, sampling, tuple(images))
    elif request.sampling != sampling or not request.has_prompt(prompt, images):
      raise ValueError(
        f'request {request_id!r} is being served with another prompt or other '
        'sampling parameters; use a different id for this request'
      )
    request.num_waiters += 1
    try:
      return await asyncio.shield(request.future)
    finally:
      request.num_waiters -= 1
      if not request.num_waiters and not request.future.done():
        self._abort(request)

  async def abort(self, request_id: str) -> None:
    """Ends a request with the tokens it has so far; ignores unknown ids.

    Args:
      request_id: The id that was passed to `generate`.
    """
    request = self._requests.get(request_id)
    if request is not None:
      self._abort(request)
      await asyncio.wait({request.future})

  async def progress(self, request_ids: Sequence[str]) -> dict[str, Completion]:
    """Returns what requests have generated so far.

    Args:
      request_ids: The requests to look up.

    Returns:
      A partial completion for each of the requests that is being served.
    """
    return {
      request_id: self._requests[request_id].partial_output()
      for request_id in request_ids
      if request_id in self._requests
    }

  def _submit(
    self,
    request_id: str,
    prompt: np.ndarray,
    sampling: SamplingParams,
    images: tuple[Pixels, ...] = (),
  ) -> EngineRequest:
    """Registers and queues a request without awaiting, so no abort can come between."""
    request = EngineRequest(
      request_id,
      prompt,
      sampling,
      max_new_tokens=min(sampling.max_tokens, self._max_length - len(prompt)),
      future=asyncio.get_running_loop().create_future(),
      images=images,
    )
    self._requests[request_id] = request
    if self._held is None:
      self._enqueue(request)
    else:
      self._held[request_id] = request
    return request

  def _validate(self, prompt: np.ndarray, sampling: SamplingParams) -> str:
    """Says what is wrong with a request; '' if nothing is."""
    if prompt.ndim != 1 or not len(prompt):
      return (
        f'its prompt must be a non-empty row of token ids, not of shape {prompt.shape}'
      )
    if prompt.min() < 0 or prompt.max() >= self._vocab_size:
      return f'its prompt has token ids outside 0 … {self._vocab_size - 1}'
    if not 0 <= sampling.num_generated < len(prompt):
      return (
        f'num_generated={sampling.num_generated} must lie in 0 … {len(prompt) - 1} '
        'for its prompt'
      )
    if sampling.stop and self._tokenizer is None:
      return 'stop strings need an engine with a tokenizer'
    traits = self.traits
    if sampling.top_logprobs > traits.max_top_logprobs:
      return f'top_logprobs: this engine tells at most {traits.max_top_logprobs}'
    if sampling.constraint is not None and not traits.constrains_output:
      return 'this engine cannot constrain what it draws'
    return _validate_sampling(sampling)


def _validate_sampling(sampling: SamplingParams) -> str:
  """Says what is wrong with sampling parameters; '' if nothing is."""
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


def find_stop_string(
  tokenizer: Any, tokens: Sequence[int], num_new: int, stop_strings: Sequence[str]
) -> int | None:
  """Finds the first new token that completes a stop string.

  A token is at least one byte of text, so the number of bytes in the longest stop
  string limits how far back it can begin.

  Args:
    tokenizer: Decodes tokens.
    tokens: All generated tokens.
    num_new: Only the last `num_new` tokens can complete a stop string.
    stop_strings: The strings to look for.

  Returns:
    How many of `tokens` to keep, up to and including the token that completes a stop
    string; None if there is none.
  """
  if not stop_strings or not num_new:
    return None
  max_lookback = max(len(stop.encode()) for stop in stop_strings) + STOP_CONTEXT_TOKENS
  start = max(0, len(tokens) - num_new - max_lookback)

  def has_stopped(end: int) -> bool:
    text = tokenizer.decode(tokens[start:end], skip_special_tokens=False)
    return any(stop in text for stop in stop_strings)

  if not has_stopped(len(tokens)):
    return None
  first_new = len(tokens) - num_new
  return next(end for end in range(first_new + 1, len(tokens) + 1) if has_stopped(end))


class EngineStats:
  """Accumulates what an engine did until `report` starts afresh.

  Attributes:
    prefill_seconds: Time spent computing prompts.
    decode_seconds: Time spent decoding.
    num_generated: Tokens generated.
    num_decode_steps: Decode steps in which any slot was busy.
    num_prefilled: Prompt tokens computed.
    num_reused: Prompt tokens that were cached already.
    num_slot_steps: Decode steps of all slots together in which they were busy.
    num_dispatches: Decode dispatches.
    num_drafted: Drafted tokens that were checked.
    num_accepted: Those of them that were drawn.
  """

  def __init__(self, num_slots: int, *, drafts: bool = False):
    """Initializes all counts with zero.

    Args:
      num_slots: How many requests can be decoded at the same time.
      drafts: Whether the engine drafts tokens, and `report` says so.
    """
    self._num_slots, self._drafts = num_slots, drafts
    self._last_result_time = 0.0
    self._clear()

  def _clear(self) -> None:
    self.prefill_seconds = 0.0
    self.decode_seconds = 0.0
    self.num_generated = 0
    self.num_decode_steps = 0
    self.num_prefilled = 0
    self.num_reused = 0
    self.num_slot_steps = 0
    self.num_dispatches = 0
    self.num_drafted = 0
    self.num_accepted = 0

  def record_prefill(self, start_time: float) -> None:
    """Counts prompts that have just been computed.

    Args:
      start_time: When the work began, on `time.perf_counter`.
    """
    now = time.perf_counter()
    self.prefill_seconds += now - start_time
    spans.record('engine', 'prefill', 'prefill', start_time, now)

  def record_decode(
    self,
    tokens: np.ndarray,
    dispatch_time: float,
    draft_counts: np.ndarray | None = None,
  ) -> None:
    """Counts a dispatch whose results have just arrived.

    Args:
      tokens: `[D, S]` int32, the tokens of D steps; −1 where a slot was idle.
      dispatch_time: When the dispatch began, on `time.perf_counter`.
      draft_counts: `[3, S]` int32, steps, drafted tokens and accepted ones of each
        slot; None if tokens are not drafted.
    """
    now = time.perf_counter()
    start_time = max(dispatch_time, self._last_result_time)
    self.decode_seconds += now - start_time
    self._last_result_time = now
    spans.record('engine', 'decode', 'decode', start_time, now)
    num_drawn = (tokens >= 0).sum(axis=0)
    steps, num_drafted, num_accepted = num_drawn, 0, 0
    if draft_counts is not None:
      steps, drafted, accepted = draft_counts
      num_drafted, num_accepted = int(drafted.sum()), int(accepted.sum())
    self.num_generated += int(num_drawn.sum())
    self.num_slot_steps += int(steps.sum())
    self.num_decode_steps += int(steps.max(initial=0))  # idle slots stay idle
    self.num_dispatches += 1
    self.num_drafted += num_drafted
    self.num_accepted += num_accepted

  def report(self) -> dict[str, float]:
    """Returns the metrics since the last report, by name, and resets them."""
    now = time.perf_counter()
    spans.record('engine', 'reports', 'report', now, now)
    seconds = self.prefill_seconds + self.decode_seconds
    max_tokens = max(self.num_decode_steps * self._num_slots, 1)
    metrics = {
      'tokens/generated': self.num_generated,
      'tokens/prefilled': self.num_prefilled,
      'tokens/prompt_reused': self.num_reused,
      'tokens/per_second': self.num_generated / seconds if seconds else 0.0,
      'time/prefill': self.prefill_seconds,
      'time/decode': self.decode_seconds,
      'rollout/decode_steps': self.num_decode_steps,
      'rollout/busy_slots': self.num_slot_steps / max_tokens,
    }
    if self._drafts:
      per_dispatch = self.num_generated / max(self.num_dispatches, 1)
      metrics |= {
        'tokens/drafted': self.num_drafted,
        'tokens/accepted': self.num_accepted,
        'rollout/tokens_per_dispatch': per_dispatch,
      }
    self._clear()
    return {name: float(value) for name, value in metrics.items()}
