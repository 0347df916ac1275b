"""Sampler is the base class of all samplers; SamplerSource is what they draw from."""

from typing import Protocol

from jaxrl.training import staleness
from jaxrl.types import Group, StateDict

Metrics = dict[str, float]


class ExpertRows(Protocol):
  """Protocol: serves rows from files as groups, in an order that its state resumes."""

  async def next(self, step: int) -> list[Group]:
    """Returns the groups of a step."""
    ...

  def state_dict(self) -> StateDict:
    """Returns the position as JSON."""
    ...

  def load_state_dict(self, state: StateDict) -> None:
    """Restores the position."""
    ...


class SamplerSource(Protocol):
  """Protocol: provides played groups and expert rows to a sampler.

  Attributes:
    num_groups: The number of groups of a usual step.
    group_size: The number of rows per group of a usual step.
    seed: The seed of whatever the sampler draws at random.
    max_staleness: The maximum age, in steps, of a token that a sampler returns; None if
      unlimited.
  """

  num_groups: int
  group_size: int
  seed: int
  max_staleness: int | None

  async def take(self, step: int, min_version: int | None = None) -> list[Group]:
    """Waits for the step's `groups_from_queue` groups, of all tags.

    Args:
      step: The training step.
      min_version: Groups with a token of older weights are dropped and replaced.

    Returns:
      The groups; none if there are no more.
    """
    ...

  async def num_stale(self) -> int:
    """Returns how many groups were dropped as too old since the process started."""
    ...

  def experts(self, batch_size: int) -> ExpertRows:
    """Returns a source of expert rows.

    Args:
      batch_size: The number of rows per step, each a group of its own.

    Returns:
      The expert rows.

    Raises:
      ValueError: If the run has no expert data.
    """
    ...


class Sampler:
  """Returns the groups of every step, as a pure function of seed, step and arrivals.

  Args:
    source: What the sampler draws from.

  Attributes:
    groups_from_queue: The number of groups that are played for each step.
    expert_rows: The maximum number of rows of a step that come from files.
    reads_experts: Whether the sampler asks its source for rows that experts wrote; a
      fact of the class, which is known before there is a source.
    reuses: Whether the sampler returns groups again at later steps, which makes them
      older than playing alone does.
  """

  groups_from_queue: int = 0
  expert_rows: int = 0
  reads_experts: bool = False
  reuses: bool = False

  def __init__(self, source: SamplerSource):
    self.groups_from_queue = source.num_groups

  def plays(self, step: int) -> bool:
    """Returns whether `step` takes groups that must be played for it.

    Args:
      step: The training step.

    Returns:
      True if the step takes groups from the queue.
    """
    return True

  async def next(self, step: int) -> list[Group]:
    """Waits for the groups of a step.

    Args:
      step: The training step.

    Returns:
      The groups; none if there are no more.
    """
    raise NotImplementedError

  def metrics(self) -> Metrics:
    """Returns the metrics of the last step's groups, named sampler/…."""
    return {}

  def state_dict(self) -> StateDict:
    """Returns everything that the next steps depend on, as JSON, for the checkpoint."""
    return {}

  def load_state_dict(self, state: StateDict) -> None:
    """Restores the state that `state_dict` returned."""


def mean_age(groups: list[Group], step: int) -> Metrics:
  """Computes the mean age of groups.

  Args:
    groups: The groups.
    step: The training step.

  Returns:
    The metric sampler/mean_age: the mean number of steps since the oldest weights that
    wrote a group. It is empty if no group was played.
  """
  ages = [a for g in groups if (a := staleness.group_staleness(g, step)) is not None]
  return {'sampler/mean_age': sum(ages) / len(ages)} if ages else {}
