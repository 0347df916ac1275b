"""Generates README.md's tables of algorithms, models and environments from the code.

`python -m tests.structure.readme_tables` rewrites what stands between the markers
`<!-- begin NAME -->` and `<!-- end NAME -->`; a test compares it.
"""

import importlib
import re
from collections.abc import Iterable

from jaxrl.algorithms import registry
from jaxrl.envs.env_registry import ENVS
from jaxrl.models import families
from jaxrl.models.families.known_configs import KNOWN_CONFIGS
from launch.settings import catalogue
from tests.models import test_huggingface
from tests.models.families import cases
from tests.rollout.vllm import family_cases
from tests.structure.imports import ROOT

README = ROOT / 'README.md'


def table(header: str, rows: Iterable[Iterable[str]]) -> str:
  """Returns a Markdown table; `header` has its cells between bars."""
  lines = [f'| {header} |', '|---' * (header.count('|') + 1) + '|']
  return '\n'.join([*lines, *(f'| {" | ".join(row)} |' for row in rows)])


def paper_link(text: str) -> str:
  """Returns a link to the paper that a docstring cites, or the citation."""
  source = catalogue.source(text)
  number = re.search(r'\d{4}\.\d{5}', source)
  return f'[{number[0]}](https://arxiv.org/abs/{number[0]})' if number else source


def sentence(text: str) -> str:
  """Returns the first paragraph of a docstring, with a capital and without a period."""
  text = ' '.join(text.split('\n\n')[0].split()).removesuffix('.')
  return text[:1].upper() + text[1:]


def algorithms() -> str:
  """Returns the table of algorithms, in the order of `catalogue.FAMILIES`."""
  order = list(catalogue.FAMILIES)
  rows = []
  for name in registry.names():
    family, summary = catalogue.family(registry.make(name)), catalogue.summary(name)
    text = catalogue.SOURCE.sub('', summary)
    text = text.partition(': ')[2] or text
    values = registry.make(name).provenance
    row = f'`{name}`', sentence(text), paper_link(summary), values
    rows.append((order.index(family), catalogue.FAMILIES[family], row))
  rows.sort(key=lambda entry: entry[0])  # names are sorted already
  seen: set[str] = set()
  cells = []
  for _, title, row in rows:
    cells.append((title if title not in seen else '', *row))
    seen.add(title)
  return table('learns from | name | what it does | paper | defaults', cells)


def models() -> str:
  """Returns the table of model families."""
  rows = []
  sampled = set(map(family_cases.model_type, family_cases.CASES))
  sampled |= set(family_cases.WITH_IMAGES)
  for name, location in families.BUILT_IN.items():
    doc = importlib.import_module(location.partition(':')[0]).__doc__ or ''
    published = [
      model
      for model, config in KNOWN_CONFIGS.items()
      if families.family_name(config['model_type']) == name
    ]
    spec = families.find_family(name)
    text = catalogue.SOURCE.sub('', sentence(doc))
    compared = ', '.join(f'`{key}`' for key in compared_settings(spec.architecture))
    known = ', '.join(published)
    why = family_cases.OBSTACLES.get(name)
    vllm = 'compared' if name in sampled else f'no: {why}' if why else 'no'
    types = ', '.join(f'`{kind}`' for kind in [name, *read_as(name)])
    refused = ', '.join(refused_modes(spec.architecture)) or 'nothing'
    row = types, f'`{spec.architecture}`', text, compared, refused, vllm, known
    rows.append(row)
  header = (
    '`model_type` | class in transformers | what it is | compared, beside sizes, for | '
  )
  header += "refused | with vLLM's CPU build | shapes known to `plan`"
  return table(header, rows)


def read_as(name: str) -> list[str]:
  """Returns what else a folder's `model_type` may be that is read as a family."""
  pairs = [*families.ALIASES.items(), ('mistral3', 'ministral3')]
  pairs += [
    (kind, text_model['model_type'])
    for kind, text_model in families.TEXT_MODELS.items()
  ]
  return [kind for kind, parent in pairs if parent == name]


def refused_modes(architecture: str) -> list[str]:
  """Returns the options with which tests expect that a class is refused."""
  modes: dict[str, None] = {}
  for case in cases.CASES.values():
    if f'{case.name}{case.head}' == architecture:
      modes |= dict.fromkeys(['`mesh.context=…`'] if case.context_obstacle else [])
      modes |= dict.fromkeys(['`exact`'] if case.vision else [])
  return list(modes)


def compared_settings(architecture: str) -> list[str]:
  """Returns the settings in which tests compare a class with `transformers`."""
  name = architecture.partition('For')[0]
  case_settings = [case.settings for case in cases.CASES.values() if case.name == name]
  older = [
    settings for kind, settings in test_huggingface.CASES.values() if kind == name
  ]
  keys = {key for settings in case_settings + older for key in settings}
  keys = {'rope_parameters' if key == 'rope' else key for key in keys}
  return sorted(key for key in keys if not key.startswith(('num_', 'moe_', 'head_dim')))


def environments() -> str:
  """Returns the table of environments."""
  rows = []
  for name, location in ENVS.items():
    module_name, _, class_name = location.partition(':')
    module = importlib.import_module(module_name)
    env = getattr(module, class_name)
    tasks = 'a data set' if getattr(env, 'uses_dataset', True) else 'a seed'
    if hasattr(env, 'wraps'):
      tasks = 'the wrapped environment'
    rows.append((f'`{name}`', sentence(module.__doc__ or ''), tasks))
  return table('`env_type` | what it is | tasks come from', rows)


TABLES = {'algorithms': algorithms, 'models': models, 'environments': environments}


def generated(text: str) -> str:
  """Returns `text` with every table between markers generated anew."""
  for name, make in TABLES.items():
    begin, end = f'<!-- begin {name} -->', f'<!-- end {name} -->'
    head, _, rest = text.partition(begin)
    _, end_marker, tail = rest.partition(end)
    if not end_marker:
      raise ValueError(f'README.md has no {begin} … {end}')
    text = f'{head}{begin}\n{make()}\n{end}{tail}'
  return text


if __name__ == '__main__':
  README.write_text(generated(README.read_text()))
