"""`python -m launch.algorithms` names every algorithm and part, and explains each."""

import inspect
import re

import pytest

from jaxrl.algorithms import registry, requirements
from jaxrl.functional import components
from jaxrl.options import defaults, unwrap
from launch import algorithms
from launch.settings import catalogue, component_kinds
from tests.algorithms.test_plugins import LOSSES, WHOLE
from tests.launch.runs import ROOT
from tests.launch.test_extensions import FILES

SOURCE = re.compile(r'arXiv \d{4}\.\d{5}|, (19|20)\d\d\)')
PARTS = {
  (slot, name): fn
  for slot in registry.COMPONENT_MODULES
  for name, fn in registry.parts_for(slot).items()
}


def output_of(capsys, *argv):
  assert algorithms.main(argv) == 0
  text = capsys.readouterr().out
  assert max(len(line) for line in text.splitlines()) <= catalogue.WIDTH
  return text


def test_lists_every_algorithm_in_a_line_with_its_paper_and_its_defaults(capsys):
  listing, _, _ = output_of(capsys).partition('Kinds of components')
  lines = listing.splitlines()
  rows = [line.split() for line in lines if re.match(r'  \w', line)]
  assert sorted(row[0] for row in rows) == list(registry.names())
  for name, *_, paper, provenance in rows:
    assert re.fullmatch(r'\d{4}\.\d{5}|(19|20)\d\d', paper), name
    assert provenance == registry.make(name).provenance


def test_lists_every_part_by_its_slot(capsys):
  text = output_of(capsys, '--parts')
  for (slot, name), _ in PARTS.items():
    title = component_kinds.find_kind(slot).plural
    assert re.search(rf'^{title}: ', text, re.MULTILINE), slot
    assert re.search(rf'^  {name} ', text, re.MULTILINE), name


@pytest.mark.parametrize('name', registry.names())
def test_explains_each(name, capsys):
  """Its paper, its options, and the formula and paper of each of its parts."""
  text = output_of(capsys, name)
  assert SOURCE.search(catalogue.summary(name)), 'say where it comes from'
  for option in registry.builder_options(name):
    assert option in text or option in (*registry.COMPONENT_MODULES, *registry.SETTINGS)
  for slot, part in requirements.components_of(registry.make(name)).items():
    first, *_ = inspect.getdoc(components.function_of(part)).splitlines()
    assert f'{slot} = ' in text and first in text
  assert 'needs ' in text


@pytest.mark.parametrize(('slot', 'name'), PARTS)
def test_a_part_says_its_formula_and_where_it_comes_from(slot, name, capsys):
  text = inspect.getdoc(PARTS[slot, name])
  assert SOURCE.search(text), f'{name}: name the paper'
  if slot != 'kl_controller':
    assert re.search(r'[=·−|\]]', text.split('(arXiv')[0]), f'{name}: give the formula'
  assert text in output_of(capsys, name)


def test_a_name_of_two_things_is_explained_twice(capsys):
  text = output_of(capsys, 'cispo')
  assert 'cispo: an algorithm' in text and 'cispo: policy_loss' in text
  assert 'kl_loss or kl_penalty' in output_of(capsys, 'k3')


def test_answers_an_unknown_name_with_the_nearest(capsys):
  assert algorithms.main(['grp0']) == 2
  assert "Did you mean 'grpo'" in capsys.readouterr().err


def test_knows_plugins_by_their_names(tmp_path, capsys):
  (tmp_path / 'my_losses.py').write_text(LOSSES)
  (tmp_path / 'whole.py').write_text(WHOLE)
  option = f'--plugins={tmp_path}'
  assert re.search(
    r'Your own\n  whole +All that.*\n  other ', output_of(capsys, option)
  )
  assert 'steep' in algorithms_of(capsys, option, '--parts')
  assert re.search('share += 0.5', algorithms_of(capsys, option, 'whole'))
  assert 'slope = 2.0' in algorithms_of(capsys, option, 'steep')


KIND_NAMES = {kind.plural: kind for kind in component_kinds.KINDS}
OTHERS = [
  (kind.name, name)
  for kind in component_kinds.KINDS
  for name in kind.built_in()
  if kind.name not in ('algorithm', *registry.COMPONENT_MODULES)
]


def test_the_index_counts_every_kind(capsys):
  _, _, text = output_of(capsys).partition('Kinds of components')
  for name, kind in KIND_NAMES.items():
    assert re.search(
      rf'^  {name} +{len(kind.built_in())}  {kind.what[:20]}', text, re.M
    )


@pytest.mark.parametrize('plural', KIND_NAMES)
def test_a_kind_lists_its_components(plural, capsys):
  kind, text = KIND_NAMES[plural], output_of(capsys, plural)
  for name in kind.built_in():
    assert re.search(rf'^  {name} +\S', text, re.M), name
  if kind.name != 'algorithm':
    assert all(f'--config.{key}' in text.replace('\n', ' ') for key in kind.keys)
  assert ('all are built in' in text) == (kind.accepts is None)


@pytest.mark.parametrize(('kind', 'name'), OTHERS)
def test_a_component_says_its_options_and_where_it_is_defined(kind, name, capsys):
  """Each option has its default and, from the docstring, a description."""
  text = output_of(capsys, name)
  component = component_kinds.find_kind(kind).built_in()[name]
  pages = re.split('─{20,}', text)
  (page,) = [page for page in pages if page.strip().startswith(f'{name}: {kind}')]
  place = page.rpartition('defined in  ')[2].strip()
  if name == 'vllm':
    assert place.startswith('jaxrl/rollout/vllm/vllm_engine.py')
    return
  value = component_kinds.load_component(component)
  options = defaults(value) if callable(value) else {}
  words = ' '.join(page.split())
  assert len(component_kinds.component_docstring(value)) > 10 if callable(value) else 1
  for option, default in options.items():
    assert f' {option} = {" ".join(repr(default).split())} ' in f'{words} ', option
  file, _, line = place.partition(':')
  source = (ROOT / file).read_text().splitlines()
  if callable(value):
    here = ' '.join(source[int(line) - 1 : int(line) + 14])  # below its decorators
    assert unwrap(value).__name__ in here


@pytest.mark.parametrize(
  'names',
  [
    'judge reward_model drop trainer object_store shared_memory first_fit adamw cosine',
    'split python mcp search lora names docker shell store token_mean concatenated',
  ],
)
def test_what_a_config_names_has_a_page(names, capsys):
  text = output_of(capsys, *names.split())
  for name in names.split():
    assert re.search(rf'^{name}: [a-z_]+$', text, re.M), name


def test_a_judge_has_the_options_of_all_its_parts(capsys):
  text = output_of(capsys, 'judge')
  for option in ('url', 'checkpoint', 'votes', 'retries', 'dtype', 'weight'):
    assert re.search(rf'^  {option} = .+\w', text, re.M), option


def test_ranges_are_those_that_are_enforced(capsys):
  assert re.search(r'clip_high += .* must be at least 0', output_of(capsys, 'cispo'))
  assert 'must be' not in output_of(capsys, 'warmup').partition('options')[2]


def test_the_catalogue_includes_plugins_of_every_kind(tmp_path, capsys):
  (tmp_path / 'reversed_sampler.py').write_text(FILES['reversed_sampler.py'])
  option = f'--plugins={tmp_path}'
  assert re.search(r'samplers +5 \+ 1 of your own', algorithms_of(capsys, option))
  listing = algorithms_of(capsys, option, 'samplers')
  assert re.search(r'Your own\n  Reversed +Learns from the groups', listing)
  page = algorithms_of(capsys, option, 'Reversed')
  assert 'note = 0' in page and f'defined in  {tmp_path}/reversed_sampler.py:4' in page
  location = f'{tmp_path}/reversed_sampler.py:Reversed'
  assert 'Reversed: sampler' in algorithms_of(capsys, location)


def algorithms_of(capsys, *argv):
  """What is said where a folder's own long path may be in it."""
  assert algorithms.main(argv) == 0
  return capsys.readouterr().out


def test_opmd_says_why_its_sampler_is_not_that_of_trinity(capsys):
  text = output_of(capsys, 'opmd')
  assert 'sampler fifo' in text and "algorithm.sampler='warmup(steps=10)'" in text
