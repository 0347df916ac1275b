"""Several engines as one: a group's requests go to the engine that holds its prompt."""

import asyncio
import zlib
from collections.abc import Sequence
from typing import Any

from jaxrl.rollout.handles import settle
from jaxrl.types import Completion, SamplingParams


class EngineRouter:
  """Spreads requests over engines by the episode in their id.

  An id is `tag/group/episode/…`: all members and turns of a group meet one engine, so
  that its prompt is computed once. Which engine serves a request changes no token.
  """

  def __init__(self, engines: Sequence[Any]):
    if not engines:
      raise ValueError('a router needs at least one engine')
    self._engines = list(engines)

  def __reduce__(self):
    return EngineRouter, (self._engines,)

  def _engine(self, request_id: str) -> Any:
    name = '/'.join(request_id.split('/')[:3])
    return self._engines[zlib.crc32(name.encode()) % len(self._engines)]

  async def generate(
    self, request_id: str, token_ids: Sequence[int], sampling: SamplingParams
  ) -> Completion:
    engine = self._engine(request_id)
    return await settle(engine.generate(request_id, token_ids, sampling))

  async def abort(self, request_id: str) -> None:
    await settle(self._engine(request_id).abort(request_id))

  async def pause(self) -> None:
    await asyncio.gather(*(settle(engine.pause()) for engine in self._engines))

  async def resume(self) -> None:
    await asyncio.gather(*(settle(engine.resume()) for engine in self._engines))

  async def warmup(self) -> None:
    await asyncio.gather(*(settle(engine.warmup()) for engine in self._engines))

  async def metrics(self) -> dict[str, float]:
    """Sums of the engines' counts and rates, means of times and shares."""
    reports = await asyncio.gather(*(settle(e.metrics()) for e in self._engines))
    total: dict[str, float] = {}
    for name in {name for report in reports for name in report}:
      values = [report[name] for report in reports if name in report]
      mean = name.startswith('time/') or name == 'rollout/busy_slots'
      total[name] = sum(values) / (len(values) if mean else 1)
    return total
