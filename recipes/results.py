"""Results of recipes: the figure and the tables of each page, and the index of all.

Between two marks, a page holds what follows from the data of its runs. The rest is
written by people.
"""

import pathlib
import re
import shlex
import statistics
import textwrap
from collections.abc import Mapping, Sequence
from typing import Any

from recipes.experiment import read_data
from recipes.figure import draw_figure, tokens_before
from recipes.recipe import (
  BASES,
  NUM_CORES,
  ROOT,
  Goal,
  Recipe,
  find_recipe,
  recipe_names,
  run_arguments,
)

DOCS = ROOT / 'docs'
BEGIN, END = '<!-- begin results -->', '<!-- end results -->'
TRAIN = f'taskset -c 0-{NUM_CORES - 1} python -m launch.train'
ANSWER = re.compile(r'\*\*Answer\.\*\* (.+?)\n\n', re.DOTALL)


def page_path(name: str) -> pathlib.Path:
  """Returns the page of a recipe.

  Args:
    name: Name of the recipe.
  """
  return DOCS / 'recipes' / f'{name}.md'


def write_results(name: str) -> None:
  """Draws the figure of a recipe, and fills in its page.

  Args:
    name: Name of the recipe.
  """
  recipe, data = find_recipe(name), read_data(name)
  if not data['arms']:
    return
  page = page_path(name)
  page.parent.mkdir(exist_ok=True)
  draw_figure(recipe, data, page.with_suffix('.svg'))
  if not page.exists():
    page.write_text(f'# {recipe.title}\n\n{BEGIN}\n{END}\n')
  page.write_text(fill(page.read_text(), results_block(name, recipe, data)))


def write_index() -> None:
  """Fills in the table of docs/recipes.md."""
  page = DOCS / 'recipes.md'
  page.write_text(fill(page.read_text(), index_block()))


def fill(text: str, block: str) -> str:
  """Returns a page with a new text between its marks.

  Args:
    text: The page.
    block: The new text.
  """
  before, _, rest = text.partition(BEGIN)
  after = rest.partition(END)[2]
  return f'{before}{BEGIN}\n{block}\n{END}{after}'


def results_block(name: str, recipe: Recipe, data: Mapping[str, Any]) -> str:
  """Returns what a page says of the runs: figure, values, cost and digests.

  Args:
    name: Name of the recipe.
    recipe: The recipe.
    data: The data of its runs.
  """
  arms = data['arms']
  runs = [run for of_arm in arms.values() for run in of_arm]
  reach = [f'tokens to {recipe.goal.value:g}'] if recipe.goal else []
  costs = ['seconds', 'tokens', 'digest of seed 0']
  head = ['arm', 'seeds', *recipe.columns, *reach, *costs]
  table = [head, ['---'] * len(head)]
  for label, of_arm in arms.items():
    table.append(
      [
        label,
        str(len(of_arm)),
        *(_spread(final_values(of_arm, metric)) for metric in recipe.columns.values()),
        *_reach(of_arm, recipe.goal),
        f'{statistics.median(run["seconds"] for run in of_arm):.0f}',
        f'{statistics.median(run["tokens"] for run in of_arm):,.0f}',
        f'`{of_arm[0]["digest"]}`' if recipe.arms[label].is_exact else 'differs',
      ]
    )
  machines = sorted({run['machine'] for run in runs})
  commits = sorted({(run['commit'] or '')[:10] for run in runs})
  label, arm = next(iter(recipe.arms.items()))
  commands = [
    *(f'{TRAIN} {_words(BASES[base], base)}' for base in recipe.bases),
    f'{TRAIN} {shlex.join(run_arguments(name, arm, 0))}',
  ]
  return '\n'.join(
    [
      f'![{recipe.title}: the curves that the text describes]({name}.svg)',
      '',
      _wrap(_caption(recipe, arms)),
      '',
      *('| ' + ' | '.join(cells) + ' |' for cells in table),
      '',
      _wrap(
        f'Machine: {"; ".join(machines)}. Commit: {", ".join(commits)}. The runs '
        'shared two cores with other programs, so the seconds only tell what to '
        'expect.'
      ),
      '',
      '```sh',
      f'make recipes ONLY={name} SEEDS=5',
      f'python -m recipes --verify={name}',
      '```',
      '',
      _wrap(
        'The first command makes all runs, draws the figure and fills in the table. '
        f'The second makes the run “{label}” of seed 0 again and compares its digest. '
        'By hand, this run is:'
      ),
      '',
      '```sh',
      *commands,
      '```',
    ]
  )


def _wrap(text: str) -> str:
  return textwrap.fill(text, 100, break_on_hyphens=False)


def _words(arguments: Sequence[str], base: str) -> str:
  return shlex.join([*arguments, f'--workdir=runs/recipes/base/{base}'])


def _seeds(arms: Mapping[str, Sequence[Any]]) -> str:
  counts = sorted({len(runs) for runs in arms.values()})
  return ' or '.join('one seed' if n == 1 else f'{n} seeds' for n in counts)


def _caption(recipe: Recipe, arms: Mapping[str, Sequence[Any]]) -> str:
  times = any(metric.startswith('time/') for metric in recipe.columns.values())
  of_times = ', of times the median of all steps' if times else ''
  return (
    f'Lines are medians over {_seeds(arms)}, and the shaded bands reach from the '
    'lowest seed to the highest. The table has the last value of each run (of rewards '
    f'the mean of the last 5 steps{of_times}): the median and, in brackets, the lowest '
    'and the highest. Seconds and generated tokens are medians of a run.'
  )


def final_values(runs: Sequence[Mapping[str, Any]], metric: str) -> list[float]:
  """Returns the last value of a metric for each run.

  For rewards it is the mean of the last 5 steps, and for times, which vary from step to
  step for other reasons than the run's, the median of all.

  Args:
    runs: The runs of an arm.
    metric: The metric.
  """
  values = [run['series'][metric][1] for run in runs if metric in run['series']]
  if metric.startswith('time/'):
    return [statistics.median(of_run) for of_run in values]
  window = 5 if metric == 'reward/mean' else 1
  return [statistics.fmean(of_run[-window:]) for of_run in values]


def _spread(values: Sequence[float]) -> str:
  if not values:
    return '–'
  low, middle, high = min(values), statistics.median(values), max(values)
  return f'{middle:.2f} ({low:.2f}–{high:.2f})'


def tokens_to(run: Mapping[str, Any], goal: Goal) -> float | None:
  """Returns how many tokens training generated before a run reached a goal.

  Args:
    run: The run.
    goal: The goal.

  Returns:
    The number at the first value that reaches it, averaged over the goal's window; None
    if the run does not.
  """
  steps, values = run['series'][goal.metric]
  for i in range(goal.window - 1, len(values)):
    if statistics.fmean(values[i + 1 - goal.window : i + 1]) >= goal.value:
      return tokens_before(run, [steps[i]])[0]
  return None


def _reach(runs: Sequence[Mapping[str, Any]], goal: Goal | None) -> list[str]:
  """Returns the cell of the tokens to a goal, or how many runs reach it."""
  if goal is None:
    return []
  found = [tokens_to(run, goal) for run in runs]
  known = sorted(count for count in found if count is not None)
  if len(known) < len(found):
    return [f'{len(known)} of {len(found)} runs reach it']
  middle = statistics.median(known)
  return [f'{middle:,.0f} ({known[0]:,.0f}–{known[-1]:,.0f})']


def index_block() -> str:
  """Returns the table of all recipes that have data."""
  lines = ['| recipe | question | answer | cost of a run |', '|---|---|---|---|']
  for name in recipe_names():
    recipe, data = find_recipe(name), read_data(name)
    runs = [run for of_arm in data['arms'].values() for run in of_arm]
    page = page_path(name)
    if not runs or not page.exists():
      continue
    answer = ANSWER.search(page.read_text())
    answer_text = ' '.join(answer[1].split()) if answer else ''
    seconds = statistics.median(run['seconds'] for run in runs)
    lines.append(
      f'| [{recipe.title}](recipes/{name}.md) | {recipe.question} | {answer_text} | '
      f'{seconds:.0f} s, {len(recipe.arms)} arms |'
    )
  return '\n'.join(lines)
