"""A Recipe is a question, the arms of its comparison, and what its figure shows."""

import dataclasses
import importlib
import os
import pathlib
import pkgutil
from collections.abc import Mapping
from typing import Any

from recipes import catalogue

ROOT = pathlib.Path(__file__).resolve().parents[1]
NUM_CORES = 2  # that a run may use
TOKENS = 'tokens/generated'  # by the engines in a step
RUNS = 'runs/recipes'  # of the bases and of unfinished runs, in the current folder


@dataclasses.dataclass(frozen=True)
class Arm:
  """One side of a comparison: what it changes in the config of its recipe.

  Attributes:
    algorithm: The algorithm's name.
    changes: Values by dotted key of the config.
    is_exact: Whether a rerun reproduces the digest; asynchronous runs depend on which
      rollout ends first.
  """

  algorithm: str = 'grpo'
  changes: Mapping[str, Any] = dataclasses.field(default_factory=dict)
  is_exact: bool = True


@dataclasses.dataclass(frozen=True)
class Panel:
  """One chart of a figure: a metric against the training step, or generated tokens.

  Attributes:
    metric: Name of the metric, as in metrics.jsonl.
    title: What the chart shows.
    window: Steps that each point averages, itself and those before it.
    log: Whether the axis of the metric is logarithmic.
    over_tokens: Whether it is drawn against the tokens that were generated before.
    goal: A value that is marked; None for none.
  """

  metric: str
  title: str
  window: int = 1
  log: bool = False
  over_tokens: bool = False
  goal: float | None = None


@dataclasses.dataclass(frozen=True)
class Goal:
  """A value of a metric, to which the tokens that training generates are counted.

  Attributes:
    metric: Name of the metric.
    value: The value.
    window: Values that are averaged, the last one and those before it.
  """

  metric: str
  value: float
  window: int = 1


@dataclasses.dataclass(frozen=True)
class Recipe:
  """A comparison that `python -m recipes` can run again.

  Attributes:
    title: Heading of its page.
    question: What it answers.
    arms: What is compared, by label.
    panels: The charts of its figure.
    columns: Metrics whose last values are in the table, by heading.
    bases: Names of BASES whose weights the runs need.
    goal: What the table counts tokens to; None for nothing.
  """

  title: str
  question: str
  arms: Mapping[str, Arm]
  panels: tuple[Panel, ...]
  columns: Mapping[str, str]
  bases: tuple[str, ...] = ('sums',)
  goal: Goal | None = None

  @property
  def metrics(self) -> list[str]:
    """The metrics that are kept of each run."""
    drawn = [panel.metric for panel in self.panels]
    goal = [] if self.goal is None else [self.goal.metric, TOKENS]
    tokens = [TOKENS for panel in self.panels if panel.over_tokens]
    return list(dict.fromkeys([*drawn, *self.columns.values(), *goal, *tokens]))


# Runs whose weights others start from: the arguments of `launch.train`.
BASES: dict[str, tuple[str, ...]] = {
  'sums': ('--config=recipes/tasks/sums.py:sft',),
  'lake': ('--config=recipes/tasks/lake.py:sft',),
  'boxes': ('--config=recipes/tasks/boxes.py:sft',),
  'poker': ('--config=recipes/tasks/poker.py:sft',),
  'teacher': (
    '--config=recipes/tasks/sums.py:grpo',
    '--config.num_steps=80',
    '--config.checkpoint.export=True',
  ),
}


def limit_cores() -> None:
  """Leaves this process the first NUM_CORES of its cores, before JAX is imported.

  The engine and XLA split their work among cores, and sums that are split in another
  way are rounded in another way.
  """
  if hasattr(os, 'sched_setaffinity'):
    os.sched_setaffinity(0, sorted(os.sched_getaffinity(0))[:NUM_CORES])


def base_folder(name: str) -> str:
  """Returns the folder to which a base is exported.

  Args:
    name: One of BASES.
  """
  return f'{RUNS}/base/{name}/export'


def recipe_names() -> list[str]:
  """Returns the names of all recipes, in the order of the index."""
  names = [module.name for module in pkgutil.iter_modules(catalogue.__path__)]
  return sorted(names, key=lambda name: (_load(name).ORDER, name))


def find_recipe(name: str) -> Recipe:
  """Returns the recipe of a file in recipes/catalogue/.

  Args:
    name: The file's name, without `.py`.
  """
  return _load(name).RECIPE


def _load(name: str) -> Any:
  return importlib.import_module(f'recipes.catalogue.{name}')


def run_arguments(name: str, arm: Arm, seed: int) -> list[str]:
  """Returns the arguments with which `launch.train` makes a run of an arm.

  Args:
    name: Name of the recipe.
    arm: The arm.
    seed: Seed of the run.
  """
  changes = {**arm.changes, 'seed': seed}
  return [
    f'--config=recipes/catalogue/{name}.py:{arm.algorithm}',
    *(f'--config.{key}={value}' for key, value in changes.items()),
  ]
