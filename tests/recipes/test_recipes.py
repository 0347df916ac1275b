"""Recipes: their configs load, and figures and pages show what the data holds."""

import json
import os
import shlex
import statistics
import subprocess
import sys

import pytest

from launch.settings import command_line
from recipes import experiment, figure, results
from recipes.recipe import (
  BASES,
  ROOT,
  Goal,
  Panel,
  find_recipe,
  recipe_names,
  run_arguments,
)
from recipes.tasks import boxes
from tests.docs.blocks import blocks, check_make
from tests.marks import slow_except

NAMES = recipe_names()
REPEATED = 'group_size'


def arms(name):
  return find_recipe(name).arms.items()


def load(arguments):
  config = command_line.load(command_line.parse(arguments, {'workdir': ''}))
  command_line.check_algorithm(config)
  return config


@pytest.mark.parametrize('name', NAMES)
def test_every_arm_has_a_config_of_its_own(name):
  configs = [load(run_arguments(name, arm, 3)) for _, arm in arms(name)]
  keys = {experiment.run_key(run_arguments(name, arm, 3), {}) for _, arm in arms(name)}
  assert len(keys) == len({str(config) for config in configs}) == len(configs) > 1
  assert all(config.seed == 3 for config in configs)


@pytest.mark.parametrize('name', BASES)
def test_every_base_is_exported(name):
  config = load(BASES[name])
  assert config.checkpoint.export and config.seed == 0


@pytest.mark.parametrize('name', slow_except(('group_size',), NAMES))
def test_the_data_are_of_the_arms_as_they_are(name):
  data = experiment.read_data(name)['arms']
  assert list(data) == list(find_recipe(name).arms)
  for label, arm in arms(name):
    seeds = [run['seed'] for run in data[label]]
    assert seeds == list(range(len(seeds))) and seeds
    for run in data[label]:
      arguments = run_arguments(name, arm, run['seed'])
      # A run that recipes share was made by the first of them.
      assert run['key'] == experiment.run_key(arguments, run['start'])
      assert run['commit'] and run['seconds'] > 0 and run['tokens'] > 0
    digests = [run['digest'] for run in data[label]]
    assert len(set(digests)) == len(digests)
  assert experiment.data_path(name).stat().st_size < 300_000


@pytest.mark.parametrize('name', NAMES)
def test_the_page_and_its_figure_are_of_the_data(name):
  recipe, data = find_recipe(name), experiment.read_data(name)
  page = results.page_path(name)
  text = page.read_text()
  assert results.results_block(name, recipe, data) in text
  assert recipe.question in ' '.join(text.split()) and results.ANSWER.search(text)
  drawing = page.with_suffix('.svg')
  assert drawing.stat().st_size < 100_000
  assert figure.data_digest(recipe, data) in drawing.read_text()
  assert f' recipes/{name}.md\n' in (ROOT / 'mkdocs.yml').read_text()


def test_the_index_lists_all_of_them():
  text = (ROOT / 'docs' / 'recipes.md').read_text()
  assert results.index_block() in text
  assert text.count('](recipes/') == len(NAMES) >= 10


@pytest.mark.parametrize('name', slow_except(('group_size',), NAMES))
def test_the_commands_of_a_page_can_be_given(name):
  lines = [
    line for _, text in blocks(results.page_path(name)) for line in text.split('\n')
  ]
  for words in filter(None, map(shlex.split, lines)):
    if words[0] == 'make':
      check_make(words)
    elif 'launch.train' in words:
      assert words[:6] == ['taskset', '-c', '0-1', 'python', '-m', 'launch.train']
      load(words[6:])
    else:
      assert words == ['python', '-m', 'recipes', f'--verify={name}']


def test_a_figure_is_drawn_again_from_the_data(tmp_path):
  recipe, data = find_recipe(REPEATED), experiment.read_data(REPEATED)
  drawing = tmp_path / 'again.svg'
  figure.draw_figure(recipe, data, drawing)
  kept = results.page_path(REPEATED).with_suffix('.svg')
  assert drawing.read_text() == kept.read_text()


def test_a_curve_is_the_mean_of_the_last_steps():
  runs = [
    {'series': {'x': [[0, 1, 2], [1.0, 3.0, 8.0]]}},
    {'series': {'x': [[1, 2, 3], [4.0, 6.0, 7.0]]}},
  ]
  steps, curves = figure.seed_curves(runs, Panel('x', '', window=2))
  assert steps == [1, 2] and curves.tolist() == [[3.0, 5.5], [4.0, 5.0]]
  assert results.final_values(runs, 'x') == [8.0, 7.0]


def test_tokens_are_counted_up_to_a_goal():
  run = {
    'series': {
      'x': [[0, 2, 4], [0.0, 1.0, 0.5]],
      'tokens/generated': [[0, 1, 2, 3], [10, 20, 30, 40]],
    }
  }
  assert figure.tokens_before(run, [0, 2, 4]) == [0, 30, 100]
  assert results.tokens_to(run, Goal('x', 0.9)) == 30
  assert results.tokens_to(run, Goal('x', 0.75, window=2)) == 100
  assert results.tokens_to(run, Goal('x', 0.5, window=3)) == 100
  assert results.tokens_to(run, Goal('x', 0.51, window=3)) is None
  grid, curves = figure.token_curves([run], Panel('x', '', over_tokens=True))
  assert (grid[0], grid[-1]) == (0, 100) and curves[0][-1] == 0.5
  assert curves[0].max() == pytest.approx(1, abs=0.03)  # at 30 tokens


def test_a_digest_tells_the_last_bit_but_not_the_time():
  row = {'step': 1, 'phase': 'train', 'loss/policy': 0.1, 'time/step': 1.0}
  same = experiment.digest_of([row | {'time/step': 2.0, 'memory/process_gb': 1.0}])
  assert experiment.digest_of([row]) == same
  assert experiment.digest_of([row | {'loss/policy': 0.1 + 2e-17}]) != same


def test_a_look_shows_what_is_in_the_box():
  call = json.dumps(boxes.CALL)
  look = f'<tool_call>{call}</tool_call>'
  env = boxes.BoxEnv(call_reward=-0.2)
  question, _ = env.reset(seed=3)
  (shown,), reward, ended, _, info = env.step(look)
  assert 'closed' in question and shown['content'] in boxes.THINGS
  assert (reward, ended, info['metrics']['calls']) == (-0.2, False, 1.0)
  assert env.step(f'{shown["content"]}\n')[1:3] == (1.0, True)
  assert env.reset(seed=3)[0] == question and env.step('box')[1:3] == (0.0, True)
  blind = boxes.BoxEnv(is_open=True, has_tool=False)
  assert f'open: {shown["content"]}.' in blind.reset(seed=3)[0]
  (refused,), *_, info = blind.step(look)
  assert (refused['content'], info['metrics']['calls']) == ('Error', 0.0)


@pytest.mark.slow
@pytest.mark.extended
def test_seed_0_is_reproduced(tmp_path):
  """To the last bit on the same processor, and within the seeds' range on another."""
  (tmp_path / 'recipes').symlink_to(ROOT / 'recipes')
  code = (
    'import json; from recipes import experiment, recipe\n'
    'recipe.limit_cores()\n'
    f'result = experiment.repeat_run({REPEATED!r}, print)\n'
    'print(json.dumps(result))'
  )
  done = subprocess.run(
    [sys.executable, '-c', code],
    cwd=tmp_path,
    env={**os.environ, 'XLA_FLAGS': '', 'PYTHONPATH': str(ROOT)},
    capture_output=True,
    text=True,
  )
  assert done.returncode == 0, done.stderr
  result, kept = experiment.json.loads(done.stdout.splitlines()[-1])
  if result['machine'] == kept['machine']:
    assert result['digest'] == kept['digest']
  label = next(iter(find_recipe(REPEATED).arms))
  ended = results.final_values(
    experiment.read_data(REPEATED)['arms'][label], 'reward/mean'
  )
  (value,) = results.final_values([result], 'reward/mean')
  spread = max(ended) - min(ended)
  assert abs(value - statistics.median(ended)) <= 2 * spread
