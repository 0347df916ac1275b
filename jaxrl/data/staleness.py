"""How old the weights were that wrote what is learned from, and how old they may be.

Staleness = step − the version of the oldest action token, where a version is the step
at which the weights were published. It is that of a row or, the oldest row's, of a
group; rows from files have none.

`rollout.staleness` is a call string, one of the functions here: what becomes of what
is older than `max` when the groups of a step are taken.
"""

from collections.abc import Iterable
from typing import Literal, NamedTuple

from jaxrl import signature
from jaxrl.data.trajectories import oldest_version
from jaxrl.types import Group

Action = Literal['drop', 'mask', 'recompute']


class Bound(NamedTuple):
  """most: steps that a token may be old. action: what becomes of older ones."""

  action: Action
  most: int

  def oldest(self, step: int) -> int:
    """The oldest version that `step` takes as it is."""
    return step - self.most


def drop(*, max: int = 2) -> Bound:
  """Groups with an older token are lost, and others are played in their place."""
  return Bound('drop', max)


def mask(*, max: int = 2) -> Bound:
  """Older tokens stay out of the loss.

  They leave the action mask after advantages are made: they keep their part in
  rewards, returns and baselines, and lose it in losses, in aggregation, in ratios of
  sequences and in what is reported of losses.
  """
  return Bound('mask', max)


def recompute(*, max: int = 2) -> Bound:
  """Rows with an older token start from log-probs that the learner computes anew.

  For them alone `old_logprobs` are those of the learner before the first update of the
  batch, a correction weighs them against the rollout's, and all others keep the
  rollout's, at which a correction is 1.
  """
  return Bound('recompute', max)


BOUNDS = {'drop': drop, 'mask': mask, 'recompute': recompute}


def parse(text: str) -> Bound | None:
  """The bound that a call string names; None for ''. Raises ConfigError."""
  if not text:
    return None
  bound = signature.call(text, BOUNDS, 'rule', 'rollout.staleness')
  if bound.most < 0:
    where = f'--config.rollout.staleness={text}'
    raise signature.ConfigError(f'{where}: max must be at least 0')
  return bound


def of_group(group: Group, step: int) -> int | None:
  """Steps since the oldest weights that wrote an action; None for rows from files."""
  version = oldest_version(group)
  return None if version is None else step - version


def check(groups: Iterable[Group], step: int, most: int) -> None:
  """Raises RuntimeError when a group is older than `most`: whoever took it erred."""
  for group in groups:
    age = of_group(group, step)
    if age is not None and age > most:
      raise RuntimeError(
        f'group {group[0].group_name} was taken for step {step} at staleness {age}, '
        f'past the bound of {most}: this is a fault of the queue, not of the settings'
      )
