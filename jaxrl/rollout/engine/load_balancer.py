"""Load balancer: picks an engine for each request, by load and by cached prefix."""

import asyncio
import collections
import dataclasses
import time
from typing import Any

import numpy as np

from jaxrl.rollout.engine.resumable_generation import concat_completions
from jaxrl.types import Completion, Pixels, SamplingParams

MAX_TRACKED_GROUPS = 16_384  # groups whose last engine is remembered


@dataclasses.dataclass(eq=False)
class RoutedRequest:
  """A request that may move from engine to engine, with what has been generated of it.

  Attributes:
    request_id: The caller's id.
    prompt: Prompt token ids.
    sampling: How tokens are drawn.
    images: The prompt's images.
    parts: What engines that were lost, or have finished, generated.
    partial: What the current engine had generated when it was last polled.
    engine: The index of the current engine; None between two engines.
    attempt: How many engines have been tried.
    num_waiters: Number of callers that wait for the request.
    is_aborted: True once the caller has asked to end it.
    task: Serves the request.
  """

  request_id: str
  prompt: list[int]
  sampling: SamplingParams
  images: tuple[Pixels, ...] = ()
  parts: list[Completion] = dataclasses.field(default_factory=list)
  partial: Completion | None = None
  engine: int | None = None
  attempt: int = 0
  num_waiters: int = 0
  is_aborted: bool = False
  task: asyncio.Task[Completion] | None = None

  @property
  def group_key(self) -> str:
    """Returns the id's prefix that a group's requests share, `tag/group/episode`."""
    return '/'.join(self.request_id.split('/')[:3])

  @property
  def generated_ids(self) -> list[int]:
    """Returns the tokens of all parts, which a lost engine cannot take away."""
    return [token for part in self.parts for token in part.tokens.tolist()]

  def fail_over(self) -> None:
    """Leaves a lost engine, keeping what it is known to have generated."""
    if self.partial is not None and len(self.partial.tokens):
      self.parts.append(self.partial)
    self.partial = None
    self.engine = None

  def finished_reason(self) -> str | None:
    """Returns why nothing is left to generate; None if something is."""
    if self.is_aborted:
      return 'abort'
    is_full = len(self.generated_ids) >= self.sampling.max_tokens
    return 'length' if is_full else None

  def remaining(self) -> tuple[Any, ...]:
    """Returns the prompt, sampling parameters and any images of what is left."""
    generated_ids = self.generated_ids
    sampling = dataclasses.replace(
      self.sampling,
      num_generated=self.sampling.num_generated + len(generated_ids),
      max_tokens=self.sampling.max_tokens - len(generated_ids),
    )
    images = [self.images] if self.images else []
    return self.prompt + generated_ids, sampling, *images

  @property
  def digests(self) -> list[str]:
    """Returns the digests of the images."""
    return [image.digest for image in self.images]

  def completion(self, finish_reason: str | None = None) -> Completion:
    """Returns everything generated so far as one completion.

    Args:
      finish_reason: Why it ended; by default the last part's reason.
    """
    parts = self.parts + ([] if self.partial is None else [self.partial])
    joined = concat_completions(parts) if parts else _empty_completion()
    return dataclasses.replace(
      joined, finish_reason=finish_reason or joined.finish_reason
    )


def _empty_completion() -> Completion:
  empty = np.zeros(0, np.int32)
  return Completion(empty, empty.astype(np.float32), empty, 'abort')


class LoadBalancer:
  """Tracks what each engine serves and picks an engine for each request.

  Attributes:
    running: The requests that each engine serves.
  """

  def __init__(self, num_engines: int, affinity_slack: int):
    """Initializes idle engines.

    Args:
      num_engines: Number of engines.
      affinity_slack: An engine that has a group's prefix cached is picked while it
        serves at most this many requests more than the least loaded engine.
    """
    self.running: list[set[RoutedRequest]] = [set() for _ in range(num_engines)]
    self._affinity_slack = affinity_slack
    self._engine_of_group: collections.OrderedDict[str, int] = collections.OrderedDict()
    self._cooldown_ends: dict[int, float] = {}  # by engine, on time.monotonic

  @property
  def busy_engines(self) -> list[int]:
    """Returns the engines that serve any request."""
    return [i for i, requests in enumerate(self.running) if requests]

  def pick(self, request: RoutedRequest) -> int | None:
    """Assigns a request to an engine.

    Args:
      request: A request without an engine; its `engine` and `attempt` are updated.

    Returns:
      The engine's index; None while all engines are cooling down.
    """
    now = time.monotonic()
    cooling = {i for i, end in self._cooldown_ends.items() if end > now}
    loads = {
      i: len(requests) for i, requests in enumerate(self.running) if i not in cooling
    }
    if not loads:
      return None
    picked = min(loads, key=lambda i: (loads[i], i))
    last_engine = self._engine_of_group.pop(request.group_key, None)
    max_load = loads[picked] + self._affinity_slack
    if last_engine in loads and loads[last_engine] <= max_load:
      picked = last_engine
    self._engine_of_group[request.group_key] = picked  # as the most recent entry
    if len(self._engine_of_group) > MAX_TRACKED_GROUPS:
      self._engine_of_group.popitem(last=False)
    self.running[picked].add(request)
    request.engine = picked
    request.attempt += 1
    return picked

  def cool_down(self, engine: int, seconds: float) -> None:
    """Assigns no requests to an engine for a while.

    Args:
      engine: The engine's index.
      seconds: How long.
    """
    self._cooldown_ends[engine] = time.monotonic() + seconds

  def reset(self, engine: int) -> None:
    """Treats an engine as new: available, and without any cached prefix.

    Args:
      engine: The engine's index.
    """
    self._cooldown_ends.pop(engine, None)
    stale = [group for group, i in self._engine_of_group.items() if i == engine]
    for group in stale:
      del self._engine_of_group[group]

  def seconds_until_available(self) -> float:
    """Returns the seconds until the first engine has cooled down."""
    first_end = min(self._cooldown_ends.values(), default=0.0)
    return max(first_end - time.monotonic(), 0.0)
