"""Engines as Ray actors."""

import pathlib
from collections.abc import Callable, Sequence
from typing import Any

from jaxrl.data.tokenizer import load_tokenizer
from jaxrl.dispatch import Dispatcher
from jaxrl.models.model import Model
from jaxrl.rollout.jax_engine import JaxEngine
from jaxrl.rollout.weights.pulls import Puller
from jaxrl.rollout.weights.transport import Transport
from jaxrl.types import Completion, SamplingParams


class Watched:
  """What a class of engines needs, before it in the bases, to be looked after."""

  _ill = ''

  async def generate(
    self, request_id: str, token_ids: Sequence[int], sampling: SamplingParams
  ) -> Completion:
    try:
      return await super().generate(request_id, token_ids, sampling)  # pyright: ignore
    except (ValueError, FloatingPointError):  # of the request, or of the weights
      raise
    except Exception as error:
      self._ill = f'{type(error).__name__}: {error}'
      raise

  async def health(self, limit: float) -> str:
    """What is wrong with it, '' for nothing. limit: seconds for a dispatch."""
    if self.stalled > limit:  # pyright: ignore
      return f'a dispatch has taken more than {limit:g} s'
    return self._ill

  async def close(self) -> None:
    """Lets go of what would outlive its process."""


class EngineActor(Watched, JaxEngine):
  """A `JaxEngine` that makes what a process of its own needs."""

  def __init__(
    self,
    model: Model,
    folder: pathlib.Path,
    transport: Callable[[], Transport],
    *,
    parts: int = 1,
    **options: Any,
  ):
    tokenizer = load_tokenizer(folder)
    super().__init__(model, tokenizer, dispatcher=Dispatcher('engine'), **options)
    self._puller = Puller(transport(), self.load, parts=parts)

  async def pull(self, version: int, *, full: bool = False) -> str:
    """Loads `version` or a newer one; the digest of what it has loaded."""
    return await self._puller.pull(version, full=full)
