"""What an episode has produced so far: the rollout cache."""

import dataclasses
import functools
from typing import Any

import numpy as np

from jaxrl.data.collate import ROUTED
from jaxrl.rollout.group import Lease
from jaxrl.rollout.routing import joined
from jaxrl.types import FAILURES, Completion, Message, Task


@dataclasses.dataclass
class Turn:
  """One reply: tokens `[start, stop)` of the episode were written by the model.

  reward: what the environment gave for it. state_hash: of what the model was shown.
  """

  start: int
  stop: int
  state_hash: int
  reward: float = 0.0


@dataclasses.dataclass
class RolloutCache:
  """One attempt under way. Arrays of one entry per token of the history.

  chat: with the tools that the environment offers, if any.
  terminated, truncated: as Gymnasium has them; either ends the episode.
  """

  lease: Lease
  seed: int
  task: Task | None = None
  env: Any = None
  chat: Any = None
  tokens: list[int] = dataclasses.field(default_factory=list)
  mask: list[bool] = dataclasses.field(default_factory=list)
  logprobs: list[float] = dataclasses.field(default_factory=list)
  versions: list[int] = dataclasses.field(default_factory=list)
  turns: list[Turn] = dataclasses.field(default_factory=list)
  messages: list[Message] = dataclasses.field(default_factory=list)
  metrics: dict[str, float] = dataclasses.field(default_factory=dict)
  columns: dict[str, Any] = dataclasses.field(default_factory=dict)
  extras: dict[str, Any] = dataclasses.field(default_factory=dict)
  state_hash: int = 0
  terminated: bool = False
  truncated: bool = False
  stop_reason: str = 'finish'

  @property
  def done(self) -> bool:
    return self.terminated or self.truncated

  @property
  def failed(self) -> bool:
    """True when it broke and must not be trained on."""
    return self.stop_reason in FAILURES

  def hear(self, tokens: list[int]) -> None:
    """Appends what the model is shown."""
    self.tokens += tokens
    self.mask += [False] * len(tokens)
    self.logprobs += [0.0] * len(tokens)
    self.versions += [-1] * len(tokens)

  def say(self, completion: Completion) -> None:
    """Appends what the model wrote, as the engine returned it, as a new turn."""
    start = len(self.tokens)
    self.tokens += completion.tokens.tolist()
    self.mask += [True] * len(completion.tokens)
    self.logprobs += completion.logprobs.tolist()
    self.versions += completion.versions.tolist()
    if completion.routed_experts is not None:
      known = self.extras.get(ROUTED)
      self.extras[ROUTED] = joined(known, completion.routed_experts)
    self.turns.append(Turn(start, len(self.tokens), self.state_hash))

  def stop(self, reason: str, error: BaseException | str = '') -> None:
    """Cuts the episode short; a failure keeps what went wrong, for people."""
    self.truncated, self.stop_reason = True, reason
    if error:
      text = error if isinstance(error, str) else f'{type(error).__name__}: {error}'
      self.extras['error'] = text[:500]


def join(parts: list[Completion]) -> Completion:
  """Pieces of one reply that was interrupted, as one."""
  if len(parts) == 1:
    return parts[0]
  return Completion(
    tokens=np.concatenate([part.tokens for part in parts]),
    logprobs=np.concatenate([part.logprobs for part in parts]),
    versions=np.concatenate([part.versions for part in parts]),
    finish_reason=parts[-1].finish_reason,
    routed_experts=functools.reduce(joined, [part.routed_experts for part in parts]),
  )
