"""Resumable generation: requests completions and continues interrupted ones."""

import asyncio
import dataclasses
import functools
from collections.abc import Awaitable, Callable, Sequence

import numpy as np

from jaxrl.rollout.engine.actor_proxy import maybe_await
from jaxrl.types import Completion, Pixels, SamplingParams, TokenGenerator

_MAX_PARTS = 16  # requests per completion, when the engine interrupts them


async def generate_with_resume(
  generate: Callable[[str, list[int], SamplingParams], Awaitable[Completion]],
  request_id: str,
  prompt: Sequence[int],
  sampling: SamplingParams,
) -> Completion:
  """Generates a completion, and continues it where the engine is interrupted.

  Args:
    generate: An engine's `generate`, or a function with its signature.
    request_id: Id of the completion; the ids of its requests begin with it.
    prompt: Prompt token ids.
    sampling: How tokens are drawn.

  Returns:
    The parts as one completion.
  """
  parts: list[Completion] = []
  for part_index in range(_MAX_PARTS):
    generated_ids = [token for part in parts for token in part.tokens.tolist()]
    remaining = dataclasses.replace(
      sampling,
      max_tokens=sampling.max_tokens - len(generated_ids),
      num_generated=len(generated_ids),
    )
    part = await generate(
      f'{request_id}/{part_index}', [*prompt, *generated_ids], remaining
    )
    parts.append(part)
    is_full = len(part.tokens) >= remaining.max_tokens
    if part.finish_reason != 'abort' or is_full:
      break
  return concat_completions(parts)


async def generate_or_abort(
  engine: TokenGenerator,
  request_id: str,
  prompt: Sequence[int],
  sampling: SamplingParams,
  images: Sequence[Pixels] = (),
  *,
  timeout: float | None = None,
) -> Completion:
  """Generates a completion with one request that never outlives its caller.

  Args:
    engine: An engine, or a handle of one.
    request_id: Id of the request.
    prompt: Prompt token ids.
    sampling: How tokens are drawn.
    images: The prompt's images, in the order of their runs of placeholders.
    timeout: Most seconds to wait; None waits forever.

  Returns:
    The completion.

  Raises:
    TimeoutError: If the completion takes longer than `timeout`. The request is aborted
      then, and also if the caller is cancelled.
  """
  image_args = [images] if images else []  # engines of text alone need not know of them
  completion = maybe_await(engine.generate(request_id, prompt, sampling, *image_args))
  try:
    async with asyncio.timeout(timeout):
      return await completion
  except (TimeoutError, asyncio.CancelledError):
    await maybe_await(engine.abort(request_id))
    raise


def concat_completions(parts: list[Completion]) -> Completion:
  """Joins the parts of an interrupted completion.

  Args:
    parts: At least one part, each generated from the prompt and all parts before it.

  Returns:
    One completion with the last part's `finish_reason`.
  """
  if len(parts) == 1:
    return parts[0]
  top = [part.top_logprobs for part in parts if part.top_logprobs is not None]
  return Completion(
    tokens=np.concatenate([part.tokens for part in parts]),
    logprobs=np.concatenate([part.logprobs for part in parts]),
    weights_versions=np.concatenate([part.weights_versions for part in parts]),
    finish_reason=parts[-1].finish_reason,
    routed_experts=functools.reduce(
      concat_routed_experts, [part.routed_experts for part in parts]
    ),
    top_logprobs=sum(top, ()) if len(top) == len(parts) else None,
  )


def concat_routed_experts(
  known: np.ndarray | None, extended: np.ndarray | None
) -> np.ndarray | None:
  """Extends the experts known of an episode's first tokens by those of later tokens.

  A token that a later prompt contains again keeps the experts that it took when the
  token after it was drawn.

  Args:
    known: `[n, L, k]` experts of the first n tokens; None if there are none yet.
    extended: `[m, L, k]` experts of the first m tokens, as a later completion has them.

  Returns:
    The experts of the first max(n, m) tokens; None if neither is known.
  """
  if known is None or extended is None:
    return extended if known is None else known
  return np.concatenate([known, extended[len(known) :]])


def pad_or_trim_experts(routed_experts: np.ndarray, length: int) -> np.ndarray:
  """Trims experts to `length` tokens, or pads them with −1 for tokens not fed.

  Args:
    routed_experts: `[n, L, k]`.
    length: The wanted number of tokens.

  Returns:
    `[length, L, k]`.
  """
  routed_experts = routed_experts[:length]
  padding = ((0, length - len(routed_experts)), (0, 0), (0, 0))
  return np.pad(routed_experts, padding, constant_values=-1)
