"""What every sampler is, and what it draws from."""

from collections.abc import Mapping
from typing import Any, Protocol

from jaxrl.data import staleness
from jaxrl.types import Group

Metrics = dict[str, float]


class Files(Protocol):
  """Rows that someone wrote, as groups, in an order that its state resumes."""

  async def next(self, step: int) -> list[Group]: ...

  def state_dict(self) -> dict[str, Any]: ...

  def load_state_dict(self, state: Mapping[str, Any]) -> None: ...


class Source(Protocol):
  """What a sampler draws from.

  num_groups, group_size: of a usual step; group_size counts rows. seed: of whatever
  the sampler draws at random. max_staleness: steps that a token may be old at most in
  what a sampler gives; None where no rule says so.
  """

  num_groups: int
  group_size: int
  seed: int
  max_staleness: int | None

  async def take(self, step: int, min_version: int | None = None) -> list[Group]:
    """Waits for the step's `groups_from_queue` groups, of all tags.

    min_version: groups with a token of older weights are lost and replaced.
    """
    ...

  async def num_stale(self) -> int:
    """How many groups have been lost so, since the process began."""
    ...

  def experts(self, batch_size: int) -> Files:
    """Expert rows, `batch_size` at a time, a group each. Raises ConfigError."""
    ...


class Sampler:
  """Gives the groups of every step; a pure function of seed, step and arrivals.

  groups_from_queue: groups that are played for each step. expert_rows: the most rows
  of a step that come from files. reuses: whether it gives groups again at later steps,
  which makes them older than playing alone does.
  """

  groups_from_queue: int = 0
  expert_rows: int = 0
  reuses: bool = False

  def __init__(self, source: Source):
    self.groups_from_queue = source.num_groups

  def plays(self, step: int) -> bool:
    """Whether `step` takes groups that must be played for it."""
    return True

  async def next(self, step: int) -> list[Group]:
    """The groups of `step`; waits for them. Empty when there are no more."""
    raise NotImplementedError

  def metrics(self) -> Metrics:
    """What to report of the last step's groups, as sampler/…"""
    return {}

  def state_dict(self) -> dict[str, Any]:
    """All that the next steps depend on, as JSON; it goes into the checkpoint."""
    return {}

  def load_state_dict(self, state: Mapping[str, Any]) -> None:
    """Goes on from what `state_dict` gave."""


def mean_age(groups: list[Group], step: int) -> Metrics:
  """Steps between the oldest weights that wrote a group and now, on average."""
  ages = [a for g in groups if (a := staleness.of_group(g, step)) is not None]
  return {'sampler/mean_age': sum(ages) / len(ages)} if ages else {}
