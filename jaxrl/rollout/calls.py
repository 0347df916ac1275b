"""A request on its way through engines that may be lost under it."""

import asyncio
import dataclasses

import numpy as np

from jaxrl.rollout.episode import join
from jaxrl.types import Completion, SamplingParams


@dataclasses.dataclass(eq=False)
class Call:
  """parts: what earlier engines emitted. engine: the number of the one at work, None
  between two. seen: what it had emitted when it was last asked. attempt: counts them.
  """

  name: str
  prompt: list[int]
  sampling: SamplingParams
  parts: list[Completion] = dataclasses.field(default_factory=list)
  seen: Completion | None = None
  engine: int | None = None
  attempt: int = 0
  waiters: int = 0
  aborted: bool = False
  task: asyncio.Task | None = None

  @property
  def group(self) -> str:
    """The start of the id, `tag/group/episode`, that says whose prompt it is."""
    return '/'.join(self.name.split('/')[:3])

  @property
  def emitted(self) -> list[int]:
    """The tokens that no engine can take back."""
    return [t for part in self.parts for t in part.tokens.tolist()]

  def lose(self) -> None:
    """The engine is lost: what it is known to have emitted counts."""
    if self.seen is not None and len(self.seen.tokens):
      self.parts.append(self.seen)
    self.seen = self.engine = None

  def over(self) -> str | None:
    """Why there is nothing left to emit, if so."""
    if self.aborted:
      return 'abort'
    return 'length' if len(self.emitted) >= self.sampling.max_tokens else None

  def rest(self) -> tuple[list[int], SamplingParams]:
    """Prompt and sampling of what is left, for any engine."""
    emitted = self.emitted
    return self.prompt + emitted, dataclasses.replace(
      self.sampling,
      first=self.sampling.first + len(emitted),
      max_tokens=self.sampling.max_tokens - len(emitted),
    )

  def whole(self, reason: str | None = None) -> Completion:
    """All parts as one completion, ended for `reason`, by default the last part's."""
    parts = self.parts + ([] if self.seen is None else [self.seen])
    done = join(parts) if parts else _nothing()
    return dataclasses.replace(done, finish_reason=reason or done.finish_reason)


def _nothing() -> Completion:
  none = np.zeros(0, np.int32)
  return Completion(none, none.astype(np.float32), none, 'abort')
