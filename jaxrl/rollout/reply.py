"""One reply of an engine that may be interrupted in it."""

import asyncio
import dataclasses
from collections.abc import Awaitable, Callable, Sequence

from jaxrl.rollout.episode import join
from jaxrl.rollout.handles import settle
from jaxrl.types import Completion, RolloutEngine, SamplingParams

_CONTINUATIONS = 16  # how often a reply interrupted by the engine is taken up again


async def whole_reply(
  request: Callable[[str, list[int], SamplingParams], Awaitable[Completion]],
  name: str,
  prompt: Sequence[int],
  sampling: SamplingParams,
) -> Completion:
  """Completes `prompt`; where the engine is interrupted, goes on from what it had.

  request: an engine's `generate`, or what stands for it. name: of the reply; that of
  each request begins with it.
  """
  parts: list[Completion] = []
  for part in range(_CONTINUATIONS):
    emitted = [t for p in parts for t in p.tokens.tolist()]
    rest = dataclasses.replace(
      sampling, max_tokens=sampling.max_tokens - len(emitted), first=len(emitted)
    )
    parts.append(await request(f'{name}/{part}', [*prompt, *emitted], rest))
    left = rest.max_tokens - len(parts[-1].tokens)
    if parts[-1].finish_reason != 'abort' or left < 1:
      break
  return join(parts)


async def request(
  engine: RolloutEngine,
  name: str,
  prompt: Sequence[int],
  sampling: SamplingParams,
  *,
  timeout: float | None = None,
) -> Completion:
  """One request, which never outlives the one who waits for it.

  Raises TimeoutError after `timeout` seconds.
  """
  answer = settle(engine.generate(name, prompt, sampling))
  try:
    return await asyncio.wait_for(answer, timeout)
  except (TimeoutError, asyncio.CancelledError):
    await settle(engine.abort(name))
    raise
