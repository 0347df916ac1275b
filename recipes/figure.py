"""Figures of recipes: the median of each arm's seeds, and the range between them."""

import hashlib
import json
import pathlib
import re
from collections.abc import Mapping, Sequence
from typing import Any

import matplotlib

matplotlib.use('svg')
import matplotlib.pyplot as plt
import numpy as np

from recipes.recipe import TOKENS, Panel, Recipe

# Told apart by people who see colours differently, and by their brightness in print.
COLORS = (
  '#3b4cc0',
  '#e07b39',
  '#2a9d8f',
  '#c1375f',
  '#8f6bc9',
  '#8a8a3d',
  '#4fa3d9',
)
LONG_DECIMAL = re.compile(r'(?<!scale\()-?\b\d+\.\d{3,}')  # finer than a screen
TEXT, QUIET, GRID = '#22262e', '#6b7280', '#e5e7eb'
STYLE: dict[Any, Any] = {
  'font.family': 'DejaVu Sans',
  'font.size': 9,
  'axes.edgecolor': '#9ca3af',
  'axes.labelcolor': QUIET,
  'axes.spines.right': False,
  'axes.spines.top': False,
  'axes.titlecolor': TEXT,
  'axes.titlelocation': 'left',
  'axes.titlepad': 10,
  'axes.titlesize': 9.5,
  'grid.color': GRID,
  'grid.linewidth': 0.8,
  'savefig.facecolor': 'white',
  'svg.fonttype': 'path',
  'svg.hashsalt': 'jaxrl',  # the same figure has the same bytes
  'text.color': TEXT,
  'xtick.color': QUIET,
  'ytick.color': QUIET,
}


def data_digest(recipe: Recipe, data: Mapping[str, Any]) -> str:
  """Returns a digest of everything that a figure shows.

  Args:
    recipe: The recipe.
    data: The data of its runs.
  """
  drawn = [
    [label, [[run['seed'], run['series'].get(metric)] for run in runs]]
    for p in recipe.panels
    for metric in [p.metric, *([TOKENS] if p.over_tokens else [])]
    for label, runs in data['arms'].items()
  ]
  panels = [
    [p.metric, p.title, p.window, p.log, *([] if p.goal is None else [p.goal])]
    for p in recipe.panels
  ]
  text = json.dumps([panels, drawn])
  return hashlib.sha256(text.encode()).hexdigest()[:16]


def draw_figure(recipe: Recipe, data: Mapping[str, Any], path: pathlib.Path) -> None:
  """Draws the panels of a recipe side by side, as SVG.

  Args:
    recipe: The recipe.
    data: The data of its runs.
    path: The file.
  """
  with plt.rc_context(STYLE):
    count = len(recipe.panels)
    figure, axes = plt.subplots(
      1, count, figsize=(4.4 * count, 3.5), squeeze=False, layout='constrained'
    )
    for axis, panel in zip(axes[0], recipe.panels, strict=True):
      _draw_panel(axis, panel, data)
    handles, labels = axes[0][0].get_legend_handles_labels()
    figure.legend(
      handles,
      labels,
      loc='outside lower center',
      ncols=min(len(labels), 4),
      frameon=False,
      handlelength=1.6,
    )
    metadata = {'Date': None, 'Description': data_digest(recipe, data)}
    figure.savefig(path, format='svg', metadata=metadata)
    plt.close(figure)
  text = LONG_DECIMAL.sub(lambda number: f'{float(number[0]):.2f}', path.read_text())
  path.write_text('\n'.join(line.rstrip() for line in text.splitlines()) + '\n')


def _draw_panel(axis: Any, panel: Panel, data: Mapping[str, Any]) -> None:
  for index, (label, runs) in enumerate(data['arms'].items()):
    color = COLORS[index % len(COLORS)]
    steps, values = (token_curves if panel.over_tokens else seed_curves)(runs, panel)
    if not len(steps):  # the arm has no such metric
      axis.plot([], [], color=color, label=label, linewidth=1.8)
      continue
    low, median, high = values.min(0), np.median(values, 0), values.max(0)
    axis.fill_between(steps, low, high, color=color, alpha=0.13, linewidth=0)
    axis.plot(
      steps,
      median,
      color=color,
      label=label,
      linewidth=1.8,
      marker='o' if len(steps) < 10 and not panel.over_tokens else '',
      markersize=3.5,
    )
  axis.set_title(panel.title)
  axis.set_xlabel('generated tokens' if panel.over_tokens else 'training step')
  if panel.over_tokens:
    axis.xaxis.set_major_formatter(lambda x, _: f'{x:,.0f}')
  else:
    axis.xaxis.get_major_locator().set_params(integer=True)
  if panel.goal is not None:
    axis.axhline(panel.goal, color=QUIET, linewidth=1, linestyle=(0, (4, 3)))
  axis.grid(axis='y')
  axis.set_axisbelow(True)
  axis.margins(x=0.02)
  if panel.log:
    axis.set_yscale('log')


def seed_curves(
  runs: Sequence[Mapping[str, Any]], panel: Panel
) -> tuple[list[int], np.ndarray]:
  """Returns the steps of a panel, and a curve for each seed.

  Args:
    runs: The runs of an arm.
    panel: The panel.

  Returns:
    The steps, and values `[seeds, steps]`; no steps if the runs lack the metric.
  """
  series = [
    run['series'][panel.metric] for run in runs if panel.metric in run['series']
  ]
  if not series:
    return [], np.zeros((0, 0))
  common = sorted(set.intersection(*(set(steps) for steps, _ in series)))
  curves = []
  for steps, values in series:
    at = dict(zip(steps, values, strict=True))
    curves.append(_smooth([at[step] for step in common], panel.window))
  return common, np.array(curves)


def token_curves(
  runs: Sequence[Mapping[str, Any]], panel: Panel
) -> tuple[np.ndarray, np.ndarray]:
  """Returns numbers of generated tokens, and a curve over them for each seed.

  A seed's curve is a straight line between its own points. It ends where the seed
  that generated the fewest tokens ends.

  Args:
    runs: The runs of an arm.
    panel: The panel.

  Returns:
    The numbers, and values `[seeds, numbers]`; none if the runs lack the metric.
  """
  curves = []
  for run in runs:
    if panel.metric in run['series']:
      steps, values = run['series'][panel.metric]
      curves.append((tokens_before(run, steps), _smooth(values, panel.window)))
  if not curves:
    return np.zeros(0), np.zeros((0, 0))
  grid = np.linspace(0, min(tokens[-1] for tokens, _ in curves), 60)
  return grid, np.array([np.interp(grid, *curve) for curve in curves])


def tokens_before(run: Mapping[str, Any], steps: Sequence[int]) -> list[float]:
  """Returns how many tokens were generated before each of these steps.

  Args:
    run: The run.
    steps: The steps.
  """
  made, counts = run['series'][TOKENS]
  return [sum(n for at, n in zip(made, counts, strict=True) if at < s) for s in steps]


def _smooth(values: Sequence[float], window: int) -> list[float]:
  return [
    float(np.mean(values[max(0, i + 1 - window) : i + 1])) for i in range(len(values))
  ]
