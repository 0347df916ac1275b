"""MkDocs hooks: add generated pages, resolve links into the repository, write llms.txt.

Pages in docs/ link to files of the repository as GitHub shows them, such as
`../jaxrl/loop.py`. In the site, each of these files has a page with its source code.
"""

import json
import pathlib
import posixpath
import re
import sys
from typing import Any

from mkdocs.config.defaults import MkDocsConfig
from mkdocs.structure.files import File, Files
from mkdocs.structure.pages import Page

ROOT = pathlib.Path(__file__).resolve().parents[2]
for folder in (ROOT, pathlib.Path(__file__).parent):
  if str(folder) not in sys.path:
    sys.path.insert(0, str(folder))

import reference  # noqa: E402

LINK = re.compile(r'(?<!!)(\[[^\]]*\]\()(?!https?:|mailto:|#)([^)\s#]+)([^)\s]*\))')
FENCE = re.compile(r'^(```.*?^```$)', re.MULTILINE | re.DOTALL)
MERMAID = re.compile(r'^```mermaid\n.*?^```$', re.MULTILINE | re.DOTALL)
NOTEBOOKS = (  # in the order in which to read them
  'first_run',
  'own_algorithm',
  'environment_with_tools',
  'trajectories_and_advantages',
  'agent_over_openai_api',
  'planning_a_pod',
)
ROOT_PAGES = {
  'README.md': 'index.md',
  'CHANGELOG.md': 'changelog.md',
  'CONTRIBUTING.md': 'contributing.md',
}
README_SECTIONS = {'#models': 'reference/components/model_families.md'}
_summaries: dict[str, tuple[str, str]] = {}  # of a page: its title and first sentence


def on_config(config: MkDocsConfig) -> MkDocsConfig:
  """Puts the entries of generated pages into the navigation."""
  names = {path.stem: f'notebooks/{path.stem}.md' for path in _notebooks()}
  generated = {
    'reference': reference.navigation(),
    'notebooks': [{_notebook_title(name): page} for name, page in names.items()],
  }
  config.nav = _fill(config.nav, generated)
  return config


def _fill(nav: Any, generated: dict[str, Any]) -> Any:
  if isinstance(nav, list):
    return [_fill(entry, generated) for entry in nav]
  if isinstance(nav, dict):
    return {title: _fill(value, generated) for title, value in nav.items()}
  return generated.get(nav, nav)


def on_files(files: Files, config: MkDocsConfig) -> Files:
  """Adds generated pages: the reference, notebooks, root files and source files."""
  pages = reference.pages()
  pages['where-it-has-run.md'] = _where_it_has_run()
  for name, page in ROOT_PAGES.items():
    if name != 'README.md':
      pages[page] = (ROOT / name).read_text()
  for path in _notebooks():
    pages[f'notebooks/{path.stem}.md'] = _notebook_page(path)
  texts = pages | {
    file.src_uri: file.content_string for file in files.documentation_pages()
  }
  linked = {
    target for uri, text in texts.items() for target in _repository_links(uri, text)
  }
  for target in sorted(linked):
    pages[_source_page(target)] = _source_text(target)
  for uri, text in pages.items():
    files.append(File.generated(config, uri, content=text))
  return files


def on_page_markdown(
  markdown: str, page: Page, config: MkDocsConfig, files: Files
) -> str:
  """Points links into the repository to pages, and draws the diagram."""
  uri = page.file.src_uri
  if uri.startswith('source/'):
    return markdown
  _summaries[uri] = _first_sentence(markdown)
  if uri == 'index.md':
    page.meta['hide'] = ['navigation']  # it has no siblings
  diagram = (ROOT / 'docs' / 'assets' / 'loop.svg').read_text()
  markdown = MERMAID.sub(lambda _: f'<div class="diagram">{diagram}</div>', markdown)
  pieces = FENCE.split(markdown)
  for i in range(0, len(pieces), 2):
    pieces[i] = LINK.sub(lambda match: _resolved(uri, match), pieces[i])
  return ''.join(pieces)


def on_page_content(html: str, page: Page, config: MkDocsConfig, files: Files) -> str:
  """Makes links of the papers that a page cites."""
  is_source = page.file.src_uri.startswith('source/')
  return html if is_source else reference.link_papers(html)


def on_post_build(config: MkDocsConfig) -> None:
  """Writes llms.txt, an index of the pages for language models."""
  lines = [f'# {config.site_name}', '', f'> {config.site_description}', '']
  lines += _index(config.nav)
  (pathlib.Path(config.site_dir) / 'llms.txt').write_text('\n'.join(lines) + '\n')


def _index(nav: Any, depth: int = 2, title: str = '') -> list[str]:
  """Returns the lines of llms.txt for a part of the navigation."""
  if isinstance(nav, str):
    name, sentence = _summaries.get(nav, ('', ''))
    label = name if not title or title == 'Home' else title
    address = nav.removesuffix('.md') + '.html'
    return [f'- [{label}]({address})' + (f': {sentence}' if sentence else '')]
  if isinstance(nav, list):
    return [line for entry in nav for line in _index(entry, depth)]
  lines: list[str] = []
  for name, value in nav.items():
    if isinstance(value, str):
      lines += _index(value, depth, name)
    elif depth <= 3:
      lines += ['', f'{"#" * depth} {name}', '', *_index(value, depth + 1)]
    else:
      lines += _index(value, depth)
  return lines


def _first_sentence(markdown: str) -> tuple[str, str]:
  """Returns the title of a page, and the sentence that its text begins with."""
  title, _, text = FENCE.sub('', markdown).partition('\n')
  if module := re.match(r'\s*::: ([\w.]+)', text):  # what is there is its docstring
    text = f'\n\n{reference.module_summary(module[1])}'
  paragraphs = [p for p in text.split('\n\n') if re.match(r'\s*[A-Za-z`*\[]', p)]
  plain = re.sub(r'\[([^\]]*)\]\([^)]*\)', r'\1', ' '.join(paragraphs[:1]))
  plain = ' '.join(plain.replace('**', '').split())
  sentence = re.match(r'.*?[.:](?= [A-Z]|$)', plain)
  return title.removeprefix('# ').strip(), (sentence[0] if sentence else plain)


def _repository_path(uri: str, target: str) -> str:
  """Returns the path in the repository that a link of a page leads to."""
  if target.startswith('/'):
    return target[1:]
  is_root_page = uri in ROOT_PAGES.values() and uri != 'index.md'
  folder = '' if is_root_page else posixpath.dirname(f'docs/{uri}')
  if uri == 'where-it-has-run.md':
    folder = ''
  return posixpath.normpath(posixpath.join(folder, target))


def _repository_links(uri: str, text: str) -> list[str]:
  """Returns the files outside docs/ that a page links to."""
  found = []
  for piece in FENCE.split(text)[::2]:
    for _, target, _ in LINK.findall(piece):
      path = _repository_path(uri, target)
      is_file = (ROOT / path).is_file() and path not in ROOT_PAGES
      if is_file and not path.startswith('docs/'):
        found.append(path)
  return found


def _resolved(uri: str, match: re.Match[str]) -> str:
  head, target, tail = match.groups()
  path = _repository_path(uri, target)
  anchor = tail.removesuffix(')')
  if path == 'README.md' and anchor in README_SECTIONS:
    page, tail = README_SECTIONS[anchor], ')'
  elif path in ROOT_PAGES:
    page = ROOT_PAGES[path]
  elif path.startswith('docs/'):
    page = path.removeprefix('docs/')
  elif (ROOT / path).is_file():
    page = _source_page(path)
  else:
    return match[0]  # MkDocs reports it
  return f'{head}{posixpath.relpath(page, posixpath.dirname(uri) or ".")}{tail}'


def _source_page(path: str) -> str:
  return f'source/{path}.md' if not path.endswith('.md') else f'source/{path}'


def _source_text(path: str) -> str:
  kind = {'.py': 'python', '.ipynb': 'json', '.md': 'markdown'}
  language = kind.get(posixpath.splitext(path)[1], 'text')
  text = (ROOT / path).read_text()
  return (
    f'---\nsearch:\n  exclude: true\nhide: [toc]\n---\n\n# {path}\n\n'
    f'``````{language} linenums="1"\n{text.rstrip()}\n``````\n'
  )


def _where_it_has_run() -> str:
  readme = (ROOT / 'README.md').read_text()
  start = readme.index('**Where it has run:**')
  paragraph = readme[start:].partition('\n\n## ')[0]
  return f'# Where it has run\n\n{paragraph}\n'


def _notebooks() -> list[pathlib.Path]:
  others = {path.stem for path in (ROOT / 'examples').glob('*.ipynb')} - {*NOTEBOOKS}
  names = *NOTEBOOKS, *sorted(others)
  return [ROOT / 'examples' / f'{name}.ipynb' for name in names]


def _cells(path: pathlib.Path) -> list[tuple[str, str]]:
  cells = json.loads(path.read_text())['cells']
  return [(cell['cell_type'], ''.join(cell['source'])) for cell in cells]


def _notebook_title(name: str) -> str:
  _, text = _cells(ROOT / 'examples' / f'{name}.ipynb')[0]
  return text.partition('\n')[0].removeprefix('# ')


def _notebook_page(path: pathlib.Path) -> str:
  blocks = [
    text if kind == 'markdown' else f'```python\n{text}\n```'
    for kind, text in _cells(path)
  ]
  note = f'Open `examples/{path.name}` to run it.'
  return '\n\n'.join([blocks[0], note, *blocks[1:]]) + '\n'
