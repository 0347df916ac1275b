"""Writes the reference pages of the site from the code, as Markdown by page address."""

import ast
import importlib
import inspect
import pathlib
import re
import typing
from collections.abc import Callable, Iterable, Iterator, Mapping
from typing import Any

from configs import base
from jaxrl.algorithms import registry, requirements
from jaxrl.component_table import join_calls
from jaxrl.config import describe_options, descriptions_of, option_types, to_config
from jaxrl.data.trajectory_writers.writer import DumpOptions
from jaxrl.functional import components
from jaxrl.functional.formulas import AGGREGATIONS, FORMULAS
from jaxrl.options import declared_ranges, defaults, descriptions
from jaxrl.run_options import RunOptions
from launch.__main__ import COMMANDS
from launch.settings import catalogue
from launch.settings.component_kinds import (
  KINDS,
  ComponentKind,
  component_docstring,
  defined_at,
  load_component,
)
from launch.settings.logging_settings import LoggingOptions

ROOT = pathlib.Path(__file__).resolve().parents[2]
LIBRARY = ('jaxrl', 'kernels')
SECTIONS = re.compile(
  r'\n(?:Args|Attributes|Returns|Yields|Raises|Keyword Args|Example):\n.*', re.DOTALL
)
_CODE_SPAN = re.compile(r'(`[^`]*`)')

Pages = dict[str, str]


def pages() -> Pages:
  """Returns every page of the reference: Markdown by address in the site."""
  made = {
    'reference/index.md': _overview(),
    'reference/commands.md': _commands(),
    'reference/config.md': _config_keys(),
    'reference/algorithms/index.md': _algorithms(),
  }
  for name in registry.names():
    made[f'reference/algorithms/{name}.md'] = _algorithm(name)
  for kind in component_kinds():
    made[f'reference/components/{kind.plural}.md'] = _kind(kind)
  for module in library_modules():
    made[api_page(module)] = f'# {module}\n\n::: {module}\n'
  return made


def navigation() -> list[Any]:
  """Returns the entries of the reference in the navigation, as in mkdocs.yml."""
  packages: dict[str, Any] = {}
  for module in library_modules():
    *parents, leaf = module.split('.')
    node = packages
    for parent in parents:
      node = node.setdefault(parent, {})
    node[leaf] = {'': api_page(module)} if _is_package(module) else api_page(module)
  return [
    'reference/index.md',
    {'Commands': 'reference/commands.md'},
    {'Config keys': 'reference/config.md'},
    {
      'Algorithms': [
        'reference/algorithms/index.md',
        *({name: f'reference/algorithms/{name}.md'} for name in registry.names()),
      ]
    },
    {
      'Components': [
        {_title(kind): f'reference/components/{kind.plural}.md'}
        for kind in component_kinds()
      ]
    },
    {'Python API': _nested(packages)},
  ]


def component_kinds() -> list[ComponentKind]:
  """Returns the kinds of components that have a page of their own."""
  return [kind for kind in KINDS if kind.name != 'algorithm' and kind.built_in()]


def library_modules() -> list[str]:
  """Returns the names of the library's modules that define something public."""
  names = []
  for package in LIBRARY:
    for file in sorted((ROOT / package).rglob('*.py')):
      parts = file.relative_to(ROOT).with_suffix('').parts
      is_package = parts[-1] == '__init__'
      name = '.'.join(parts[:-1] if is_package else parts)
      public = re.search(r'^(?:class|(?:async )?def) [a-zA-Z]', file.read_text(), re.M)
      if '.presets' not in name and public:
        names.append(name)
  return names


def api_page(module: str) -> str:
  """Returns the address of a module's page."""
  return f'reference/api/{module.replace(".", "/")}.md'


def module_summary(module: str) -> str:
  """Returns the sentence that a module's docstring begins with; '' if it has none."""
  path = ROOT / module.replace('.', '/')
  file = path / '__init__.py' if path.is_dir() else path.with_suffix('.py')
  text = ast.get_docstring(ast.parse(file.read_text())) or ''
  return text.partition('\n')[0]


def link_papers(html: str) -> str:
  """Returns HTML whose citations of arXiv papers are links."""
  return re.sub(
    r'(?<![>/])arXiv:? ?(\d{4}\.\d{5})',
    r'<a href="https://arxiv.org/abs/\1">arXiv \1</a>',
    html,
  )


def _is_package(module: str) -> bool:
  return (ROOT / module.replace('.', '/') / '__init__.py').exists()


def _nested(node: Mapping[str, Any]) -> list[Any]:
  """Returns a tree of modules as navigation entries."""
  entries: list[Any] = []
  for name, value in node.items():
    if isinstance(value, str):
      entries.append({name or 'package': value} if name else value)
    else:
      entries.append({name: _nested(value)})
  return entries


def _overview() -> str:
  rows = [
    ('[Commands](commands.md)', 'every `python -m launch.…` with its flags'),
    ('[Config keys](config.md)', 'type, default and meaning of every key'),
    ('[Metrics](../metrics.md)', 'meaning and healthy range of every metric'),
    ('[Algorithms](algorithms/index.md)', 'formula, options and paper of each'),
    *(
      (f'[{_title(kind)}](components/{kind.plural}.md)', _escape(kind.what))
      for kind in component_kinds()
    ),
  ]
  return (
    '# Reference\n\nThese pages are generated from the code each time the site is '
    'built. On a command line, `python -m launch.algorithms NAME` describes any '
    'algorithm or component, and `--help=WORD` searches the config keys.\n\n'
    + _table('page | what it lists', rows)
    + '\n\nThe **Python API** lists the public classes and functions of each module.\n'
  )


def _commands() -> str:
  text = '# Commands\n\n`python -m launch` lists them.\n\n'
  for name, summary in COMMANDS.items():
    module = importlib.import_module(f'launch.{name}')
    if hasattr(module, '__path__'):  # a package that is run
      module = importlib.import_module(f'launch.{name}.__main__')
    head, _, more = inspect.cleandoc(module.__doc__ or '').partition('\n\n')
    typed = re.search(r'`(python -m [^`]+)`', head)
    usage = getattr(module, 'USAGE', '') or more or (typed[1] if typed else '')
    text += f'## launch.{name}\n\nThis command {_escape(summary)}.\n\n'
    if usage != more and more:
      text += f'{_escape(" ".join(more.split()))}\n\n'
    text += f'```text\n{usage.rstrip()}\n```\n\n'
  return text + (
    'In every command that takes `--config`, `--config.KEY=VALUE` sets a '
    '[config key](config.md), `--help` lists the keys that have an effect, and '
    '`--help=WORD` searches all of them.\n'
  )


def config_sections() -> Iterator[tuple[str, str, Any]]:
  """Yields (name, sentence, section) of every section of the config."""
  config = base.get_config()
  tag = base.env_section('math')
  del tag.env_config
  top = {key for key in config if not isinstance(config[key], type(config))}
  yield '', 'Keys that belong to no section.', _only(config, top)
  for name in config:
    if name in top or name == 'env':
      continue
    section = config[name]
    if name == 'algorithm':
      fields = {key for key in section if key in _algorithm_keys()}
      yield (
        name,
        'Every algorithm has these keys, and its own options.',
        _only(section, fields),
      )
    else:
      yield from _with_inner(name, _section_sentence(name), section)
  yield from _with_inner('env.<tag>', 'One section for each environment tag.', tag)
  sentence = 'One section for each named evaluation set.'
  yield from _with_inner('eval.sets.<name>', sentence, base.eval_set())
  for name, options in (('logging', LoggingOptions), ('trajectory_dump', DumpOptions)):
    yield name, _section_sentence(name), to_config(options())


def _with_inner(
  name: str, sentence: str, section: Any
) -> Iterator[tuple[str, str, Any]]:
  """Yields a section and those in it; those that take keys of any name are empty."""
  yield name, sentence, section
  for key, value in section.items():
    if isinstance(value, type(section)) and len(value):
      sentence = descriptions_of(section).get(key, '')
      yield from _with_inner(f'{name}.{key}', sentence, value)


def _algorithm_keys() -> set[str]:
  shared = set(base.get_config('grpo').algorithm)
  for name in ('ppo', 'dpo', 'sft', 'raft'):
    shared &= set(base.get_config(name).algorithm)
  return shared


def _section_sentence(name: str) -> str:
  return descriptions(RunOptions).get(name, '')


def _only(section: Any, keys: Iterable[str]) -> dict[str, Any]:
  """Returns some keys of a section: name → (type, value, description)."""
  notes = descriptions_of(section)
  return {
    key: (section.get_type(key).__name__, section[key], notes.get(key, ''))
    for key in section
    if key in keys
  }


def _config_keys() -> str:
  text = (
    '# Config keys\n\nThe defaults of `configs/base.py`, from which every config '
    'starts. `--config.KEY=VALUE` sets one on the command line. A config of your own '
    'may set others, and `--help` shows the values that hold for it.\n\n'
  )
  for name, sentence, section in config_sections():
    keys = section if isinstance(section, dict) else _only(section, set(section))
    prefix = f'{name}.' if name else ''
    rows = [
      (f'`{prefix}{key}`', _type_name(kind), _value(value), _escape(note))
      for key, (kind, value, note) in keys.items()
      if not hasattr(value, 'keys')
    ]
    text += f'## {name or "The run"}\n\n'.replace('<', '&lt;')
    text += f'{_escape(sentence)}\n\n' if sentence else ''
    text += _table('key | type | default | meaning', rows) + '\n\n'
  return text + (
    'Options of an environment are keys too, `env.<tag>.env_config.*`: see '
    '[environments](components/envs.md). Options of an algorithm are '
    '`algorithm.*`: see [algorithms](algorithms/index.md).\n'
  )


def _type_name(kind: str) -> str:
  names = {'str': 'text', 'int': 'integer', 'bool': 'true / false', 'tuple': 'list'}
  return names.get(kind, kind.replace('NoneType', 'any'))


def _algorithms() -> str:
  rows: dict[str, list[tuple[str, ...]]] = {t: [] for t in catalogue.FAMILIES.values()}
  for name in registry.names():
    summary = catalogue.summary(name)
    text = catalogue.SOURCE.sub('', summary)
    text = (text.partition(': ')[2] or text).removesuffix('.')
    family = catalogue.FAMILIES[catalogue.family(registry.make(name))]
    cells = f'[{name}]({name}.md)', _escape(_capital(text)), _paper(summary)
    rows[family].append(cells)
  text = (
    '# Algorithms\n\n`--config=FILE.py:NAME` chooses an algorithm. Each is a '
    'composition of components, any of which can be replaced: see '
    '[extending](../../extending.md).\n\n'
  )
  for family, found in rows.items():
    text += f'## {family}\n\n{_table("name | what it does | paper", found)}\n\n'
  return text


def _algorithm(name: str) -> str:
  function, made = registry.builder(name), registry.make(name)
  summary = catalogue.summary(name)
  body = SECTIONS.sub('', '\n' + (inspect.getdoc(function) or '')).strip()
  text = f'# {name}\n\n{_escape(summary)}\n\n{_escape(body)}\n\n'
  text += f'```sh\npython -m launch.train --config=configs/debug.py:{name}\n```\n\n'
  text += '## Formula\n\n'
  if made.batch_unit != 'pair':  # whose loss is a mean over pairs
    text += typeset(AGGREGATIONS[made.aggregation.name])
  for slot, piece in requirements.components_of(made).items():
    part = components.function_of(piece)
    formula = SECTIONS.sub('', '\n' + (inspect.getdoc(part) or '')).strip()
    call = components.call_string(piece)
    shown = FORMULAS.get(slot, {}).get(getattr(part, '__name__', ''), '')
    text += _admonition(f'{slot} = {call}', formula, typeset(shown))
  text += _escape(catalogue.SYMBOLS.replace('\n', ' '))
  text += ' m: 1 at action tokens. B: the rows that have any.\n\n'
  text += '## Options\n\n' + _options(function, name, prefix='algorithm.') + '\n\n'
  if made.provenance:
    text += f'Defaults: {_escape(catalogue.PROVENANCE[made.provenance])}.\n\n'
  needs = [catalogue.NEEDS.get(x, x) for x in sorted(requirements.needs(made))]
  settings = [
    ('data format', made.data_format),
    ('samples per task', made.group_size),
    ('aggregation', made.aggregation),
    ('old log-probs', made.old_logprobs_source),
    ('sampler', made.sampler),
    ('kept together', made.batch_unit),
    ('group filters', join_calls(made.filters)),
    ('reward shapers', join_calls(made.shapers)),
    ('critic warm-up, steps', made.critic_warmup),
    ('needs', ' · '.join(needs)),
  ]
  shown = [(n, _escape(str(value))) for n, value in settings if value]
  text += '## How it runs\n\n' + _table('setting | value', shown) + '\n\n'
  paper = _paper(summary)
  text += f'Paper: {paper}. ' if paper else ''
  return text + f'Defined in {_source_link(function)}.\n'


def _kind(kind: ComponentKind) -> str:
  keys = ', '.join(f'`{key}`' for key in kind.keys)
  text = f'# {_title(kind)}\n\n{_escape(_capital(kind.what))}. Named by {keys}'
  text += '; more can be joined by `+`.' if kind.name in _JOINED else '.'
  if kind.accepts:
    text += ' Your own: [extending](../../extending.md).\n\n'
  else:
    text += ' All are built in; a file of your own cannot add one.\n\n'
  if kind.name in describe_slots():
    text += _escape(catalogue.SYMBOLS.replace('\n', ' ')) + '\n\n'
  formulas = {**FORMULAS, 'aggregation': AGGREGATIONS}.get(kind.name, {})
  for name, component in kind.built_in().items():
    shown = formulas.get(name, '')
    text += _component(name, component, typeset(shown)) + '\n'
  return text


_JOINED = ('group_filter', 'reward_shaper', 'grader', 'metric_sink', 'tool')


def describe_slots() -> set[str]:
  """Returns the kinds of components that are parts of an algorithm."""
  return set(registry.COMPONENT_MODULES)


def typeset(formula: str) -> str:
  """Returns a formula as Markdown: MathML, which browsers draw without a script.

  Args:
    formula: LaTeX; '' for none.

  Returns:
    A paragraph; the LaTeX itself where the package that converts it is not installed.
  """
  if not formula:
    return ''
  try:
    from latex2mathml import converter
  except ImportError:
    return f'```latex\n{formula}\n```\n\n'
  return f'<div class="math">{converter.convert(formula, display="block")}</div>\n\n'


def _component(
  name: str, component: Callable[..., Any] | str, formula: str = ''
) -> str:
  text = f'## {name}\n\n{formula}'
  try:
    value = load_component(component)
  except ImportError as error:
    return text + f'Needs a package that is not installed here: {_escape(str(error))}\n'
  if callable(value):
    doc = component_docstring(value)
  else:  # a model family, whose file describes it
    module = importlib.import_module(str(component).rpartition(':')[0])
    doc = inspect.getdoc(module) or ''
  body = SECTIONS.sub('', '\n' + doc).strip()
  text += _escape(body) + '\n\n'
  if callable(value):
    text += _options(value, name) + '\n\n'
  if components.fields_of(value) if inspect.isfunction(value) else ():
    text += 'Reads ' + ', '.join(f'`{f}`' for f in components.fields_of(value)) + '. '
  return text + f'Defined in {_source_link(component)}.\n'


def _options(function: Callable[..., Any], name: str, prefix: str = '') -> str:
  """Returns a table of a function's options."""
  options, notes = defaults(function), describe_options(function)
  if not options:
    return 'It has no options.'
  types = option_types(function)
  rows = []
  for option, value in options.items():
    is_number = isinstance(value, int | float) and not isinstance(value, bool)
    limits = declared_ranges(function).get(option)
    if limits is None and is_number and _is_of_algorithms(function):
      limits = components.allowed_range(name, option)
    note = _escape(notes.get(option, ''))
    note += f' ({_escape(str(limits))})' if limits else ''
    rows.append(
      (f'`{prefix}{option}`', _annotation(types, option), _value(value), note)
    )
  return _table('option | type | default | meaning', rows)


def _is_of_algorithms(function: Callable[..., Any]) -> bool:
  """Returns whether OPTION_RANGES is about a function's options."""
  return function.__module__.startswith(('jaxrl.algorithms.', 'jaxrl.functional.'))


def _annotation(types: Mapping[str, Any], option: str) -> str:
  """Returns the type of an option, for people."""
  hint = types.get(option)
  if hint is None:
    return ''
  if typing.get_origin(hint) is typing.Annotated:  # the rest is for the call's parser
    hint = typing.get_args(hint)[0]
  text = hint.__name__ if isinstance(hint, type) and '[' not in str(hint) else str(hint)
  text = re.sub(r'\b(?:typing|jaxrl|collections|abc)(?:\.\w+)*\.', '', text)
  return f'`{text.replace("ComponentCall", "call string")}`'


def _admonition(title: str, text: str, formula: str = '') -> str:
  title = title.replace('"', "'")
  lines = f'{formula}{_escape(text)}'.splitlines()
  body = '\n'.join(f'    {line}' for line in lines)
  return f'!!! formula "`{title}`"\n\n{body}\n\n'


def _source_link(component: Callable[..., Any] | str) -> str:
  """Returns a link to a component's file, as those of pages in docs/ are."""
  path = defined_at(component).partition(':')[0]
  return f'[{path}](/{path})' if (ROOT / path).exists() else f'`{path}`'


def _paper(text: str) -> str:
  source = catalogue.source(text)
  number = re.search(r'\d{4}\.\d{5}', source)
  if number is None:
    return _escape(source)
  return f'[{number[0]}](https://arxiv.org/abs/{number[0]})'


def _title(kind: ComponentKind) -> str:
  names = {'env': 'Environments', 'kl_loss': 'KL losses', 'kl_penalty': 'KL penalties'}
  names |= {'kl_controller': 'KL controllers', 'lr_schedule': 'Learning rate schedules'}
  return names.get(kind.name) or _capital(kind.plural.replace('_', ' '))


def _capital(text: str) -> str:
  return text[:1].upper() + text[1:]


def _value(value: Any) -> str:
  if callable(value):
    value = getattr(value, '__name__', value)
  text = "''" if value == '' else str(value)
  text = text if len(text) < 60 else text[:57] + '…'
  return '`' + text.replace('\n', '⏎').replace('`', "'") + '`'


def _escape(text: str) -> str:
  """Returns a docstring's text as Markdown that shows it unchanged."""
  parts = _CODE_SPAN.split(text)
  for i in range(0, len(parts), 2):
    part = parts[i].replace('&', '&amp;').replace('<', '&lt;')
    parts[i] = re.sub(r'([*\[\]]|(?<!\w)_|_(?!\w))', r'\\\1', part)
  return ''.join(parts)


def _table(header: str, rows: Iterable[Iterable[str]]) -> str:
  lines = [f'| {header} |', '|---' * (header.count('|') + 1) + '|']
  for row in rows:
    cells = [_bars_escaped(' '.join(cell.split())) for cell in row]
    lines.append(f'| {" | ".join(cells)} |')
  return '\n'.join(lines)


def _bars_escaped(cell: str) -> str:
  """Returns a cell whose bars outside code end no column; those in code never do."""
  parts = _CODE_SPAN.split(cell)
  parts[::2] = [part.replace('|', r'\|') for part in parts[::2]]
  return ''.join(parts)
