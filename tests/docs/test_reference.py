"""The generated reference says something of everything that it lists."""

import importlib.util
import re

import pytest

from jaxrl.algorithms import registry, requirements
from jaxrl.functional import aggregation
from jaxrl.functional.formulas import AGGREGATIONS, FORMULAS
from jaxrl.options import defaults
from jaxrl.training.diagnosis import RULES
from launch.__main__ import COMMANDS
from launch.settings.component_kinds import KINDS
from tests.configs import test_keys
from tests.docs.blocks import ROOT
from tests.launch import runs
from tests.marks import extended

# The meaning and the healthy range of each metric, by name.
METRICS = {
  name: (meaning, healthy)
  for name, meaning, healthy in re.findall(
    r'^\| `(\w+/.*?)` \| (.*?) \| (.*?) \|$',
    (ROOT / 'docs' / 'metrics.md').read_text(),
    re.M,
  )
}
HEALTHY_RANGES = {name: text for name, (_, text) in METRICS.items() if text != '–'}
FAMILIES = {name.partition('/')[0] for name in METRICS}
NAME = re.compile(rf"'((?:{'|'.join(FAMILIES)})/[a-z][a-z_@/]*)'")


@pytest.fixture(scope='module')
def reference():
  file = ROOT / 'docs' / 'generate' / 'reference.py'
  spec = importlib.util.spec_from_file_location('site_reference', file)
  module = importlib.util.module_from_spec(spec)
  spec.loader.exec_module(module)
  return module


@pytest.fixture(scope='module')
def pages(reference):
  return reference.pages()


def test_every_algorithm_has_its_formula_options_and_command(pages):
  for name in registry.names():
    page = pages[f'reference/algorithms/{name}.md']
    assert '!!! formula' in page, name
    for option in defaults(registry.builder(name)):
      assert f'`algorithm.{option}`' in page, (name, option)
    assert f'(/jaxrl/algorithms/presets/{name}.py)' in page


def test_every_part_of_a_loss_has_a_typeset_formula(pages, reference):
  kinds = {kind.name: kind for kind in KINDS}
  for kind, known in FORMULAS.items():
    assert set(known) == set(kinds[kind].built_in()), kind
    page = pages[f'reference/components/{kinds[kind].plural}.md']
    for name, formula in known.items():
      assert formula.count('{') == formula.count('}') and '  ' not in formula
      text = page.partition(f'\n## {name}\n')[2].partition('\n## ')[0]
      assert reference.typeset(formula).strip() in text, (kind, name)
  assert set(AGGREGATIONS) == set(aggregation.MODES)
  for name in registry.names():
    page = pages[f'reference/algorithms/{name}.md']
    parts = requirements.components_of(registry.make(name))
    shown = page.count('```latex\n') + page.count('<div class="math">')
    pairs = registry.make(name).batch_unit == 'pair'
    assert shown == len(parts) + (not pairs), name


def test_every_config_key_has_a_type_a_default_and_a_meaning(pages):
  rows = re.findall(
    r'^\| `(.*?)` \| (.*?) \| (.*?) \| (.*?) \|$', pages['reference/config.md'], re.M
  )
  listed = {key: cells for key, *cells in rows}
  config_keys = {key for key in test_keys.known() if '.env_config.' not in key}
  shared = set(listed) & config_keys
  # What is not here is an option of one algorithm, which its own page has.
  assert {
    key for key in config_keys - shared if not key.startswith('algorithm.')
  } == set()
  for key, cells in listed.items():
    assert all(cell.strip() for cell in cells), key


def test_every_command_is_listed_with_its_flags(pages):
  page = pages['reference/commands.md']
  assert {'train', 'serve', 'algorithms'} <= set(COMMANDS)
  for name in COMMANDS:
    text = page.partition(f'\n## launch.{name}\n')[2].partition('\n## ')[0]
    assert f'python -m launch.{name}' in text, name


def test_every_component_is_described(pages):
  for kind in KINDS:
    if kind.name == 'algorithm':
      continue
    for name in kind.built_in():
      page = pages[f'reference/components/{kind.plural}.md']
      text = page.partition(f'\n## {name}\n')[2].partition('\n## ')[0]
      assert 'Defined in' in text or 'not installed' in text, name
      assert len(text.split()) > 5, name


def test_every_public_module_of_the_library_has_a_page(pages):
  assert 'reference/api/jaxrl/functional/losses/clipped.md' in pages
  assert sum(name.startswith('reference/api/') for name in pages) > 150


def test_every_page_is_in_the_navigation(pages, reference):
  def leaves(nav):
    if isinstance(nav, str):
      yield nav
    else:
      for entry in nav.values() if isinstance(nav, dict) else nav:
        yield from leaves(entry)

  assert set(leaves(reference.navigation())) == set(pages)


def test_docstrings_are_shown_as_they_are(reference):
  text = 'L = A*B_t [x] and `a*b` <tag> _under_ ε_low'
  shown = reference._escape(text)
  assert shown == r'L = A\*B_t \[x\] and `a*b` &lt;tag> \_under\_ ε_low'


def test_papers_become_links(reference):
  html = reference.link_papers('<p>GSPO (arXiv 2507.18071).</p>')
  assert html.count('href="https://arxiv.org/abs/2507.18071"') == 1
  assert reference.link_papers(html) == html


def sources():
  for package in ('jaxrl', 'launch'):
    for file in (ROOT / package).rglob('*.py'):
      yield file, file.read_text()


def describe_metric(name):
  """Returns what a metric means; '' if nothing is known of it."""

  def matches(key):
    return re.fullmatch('.+'.join(map(re.escape, re.split(r'<\w+>', key))), name)

  known = filter(matches, METRICS)
  best = max(known, key=lambda key: (key.count('<') == 0, len(key)), default='')
  return METRICS[best][0] if best else ''


def test_every_metric_that_the_code_names_is_described():
  named = {
    (name, file.name)
    for file, text in sources()
    for name in NAME.findall(text)
    if '/_' not in name and not name.endswith('/') and file.name != 'console.py'
  }
  assert len(named) > 70
  assert not {pair for pair in named if not describe_metric(pair[0])}


def test_every_description_is_of_a_metric_that_the_code_names():
  code = '\n'.join(text for _, text in sources())
  for name in METRICS:
    leaf = re.sub(r'<\w+>', '', name.rpartition('/')[2] or name)
    assert re.search(rf'\b{re.escape(leaf)}', code), name


def test_healthy_ranges_are_those_that_runs_are_judged_by():
  assert len(HEALTHY_RANGES) > 75
  assert HEALTHY_RANGES['policy/clip_fraction'] == 'below 0.2'
  assert 'tokens/total' not in HEALTHY_RANGES

  def limit(name):
    return float(re.search(r'(?:below|above) ([\d.]+)', HEALTHY_RANGES[name])[1])

  for rule, name in (
    ('updates clipped', 'policy/clip_fraction'),
    ('replies cut short', 'rollout/truncated'),
  ):
    seen = [RULES[rule].applies([{name: limit(name) + d}]) for d in (-0.01, 0.01)]
    assert seen == [False, True], name
  entropy = limit('policy/entropy')
  for d in (-0.01, 0.01):
    rows = [{'policy/entropy': x} for x in (2.0, *[entropy + d] * 9)]
    assert RULES['entropy collapsed'].applies(rows) == (d < 0)
  text = (ROOT / 'docs' / 'mismatch.md').read_text()
  for name in ('mismatch/logprob_difference', 'mismatch/kl'):
    match = re.search(rf'^\| `{name}` .* > (\S+) \|$', text, re.M)
    assert match and limit(name) == float(match[1]), name


@pytest.mark.slow
@pytest.mark.parametrize(
  ('algorithm', 'options'),
  [
    ('grpo', ()),
    (
      'ppo',
      (
        '--config.rollout.async_ratio=1',
        '--config.batch.packing=first_fit(tokens=512)',
        '--config.algorithm.correction=tis',
        '--config.rollout.reward_shaping=overlong',
      ),
    ),
    extended('dpo', ()),
    extended('mix', ()),
  ],
)
def test_every_metric_of_a_run_is_described(algorithm, options, tmp_path):
  config = f'{runs.DEBUG}:{algorithm}'
  assert runs.main(tmp_path, '--config.num_steps=2', *options, config=config) == 0
  recorded = {
    name
    for phase in ('sft', 'train')
    for row in runs.rows(tmp_path, phase)
    for name in row
  }
  names = recorded - {'step', 'phase'}
  assert len(names) > 15
  assert not {name for name in names if not describe_metric(name)}
  # Not only by a rule for many, but for what an environment or a grader names.
  metric_names = {
    name for name in names if not name.startswith(('eval/', 'queue/', 'reward/'))
  }
  assert not metric_names - set(METRICS)
