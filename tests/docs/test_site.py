"""The built site: its links lead somewhere, and it asks no other host for anything."""

import html.parser
import pathlib
import re
import subprocess
import sys
import urllib.parse

import pytest

from tests.docs.blocks import ROOT

pytest.importorskip('mkdocs', reason='needs the extra docs: make test-docs')
pytestmark = pytest.mark.slow

FETCHED = {
  'script': 'src',
  'img': 'src',
  'iframe': 'src',
  'source': 'src',
  'link': 'href',
}


@pytest.fixture(scope='module')
def site(tmp_path_factory):
  folder = tmp_path_factory.mktemp('docs') / 'site'
  done = subprocess.run(
    [sys.executable, '-m', 'mkdocs', 'build', '--quiet', '--site-dir', str(folder)],
    cwd=ROOT,
    capture_output=True,
    text=True,
    timeout=280,
  )
  assert done.returncode == 0, done.stdout + done.stderr
  return folder


class Reader(html.parser.HTMLParser):
  """Collects what a page fetches, links to and defines."""

  def __init__(self, path: pathlib.Path):
    super().__init__()
    self.fetched, self.links, self.ids, self.classes = [], [], set(), set()
    self.feed(path.read_text())

  def handle_starttag(self, tag, attrs):
    values = {name: value or '' for name, value in attrs}
    self.ids |= {values[name] for name in ('id', 'name') if name in values}
    self.classes |= set(values.get('class', '').split())
    if tag in FETCHED and FETCHED[tag] in values:
      self.fetched.append(values[FETCHED[tag]])
    if tag == 'a' and 'href' in values:
      self.links.append(values['href'])


def is_external(address):
  return bool(urllib.parse.urlsplit(address).netloc)


def test_nothing_is_fetched_from_other_hosts(site):
  pages = list(site.rglob('*.html'))
  assert len(pages) > 300
  for page in pages:
    reader = Reader(page)
    assert not [address for address in reader.fetched if is_external(address)], page
    assert 'mermaid' not in reader.classes, page  # its script would be fetched
  for style in site.rglob('*.css'):
    text = style.read_text()
    assert not re.search(r'(?:url\(|@import)\s*["\']?(?:https?:)?//', text), style


def test_formulas_are_typeset(site):
  page = (site / 'reference' / 'algorithms' / 'grpo.html').read_text()
  assert page.count('<math xmlns=') == page.count('</math>') == 4
  assert '<mfrac>' in page and '<p><math' not in page
  for path in (site / 'reference').rglob('*.html'):
    assert not re.search(r'<math.*?\\.*?</math>', path.read_text()), path  # no LaTeX


def test_every_link_within_the_site_leads_somewhere(site):
  readers = {page: Reader(page) for page in site.rglob('*.html')}
  for page, reader in readers.items():
    if page.name == '404.html':  # its links are those of a site at the root of a host
      continue
    for link in {*reader.links, *reader.fetched}:
      parts = urllib.parse.urlsplit(link)
      if parts.scheme or parts.netloc:
        continue
      path = urllib.parse.unquote(parts.path)
      target = (page.parent / path).resolve() if path else page
      assert target.exists(), f'{page.relative_to(site)}: {link}'
      if parts.fragment and target in readers:
        fragment = urllib.parse.unquote(parts.fragment)
        ids = readers[target].ids
        assert fragment in ids or fragment.startswith('__'), f'{page.name}: {link}'


def test_llms_txt_lists_pages_that_exist(site):
  text = (site / 'llms.txt').read_text()
  assert text.startswith('# jaxrl\n\n> ')
  links = re.findall(r'^- \[(.+?)\]\((.+?)\)', text, re.M)
  assert len(links) > 250
  for _, address in links:
    assert (site / address).exists(), address
  assert '```' not in text and ':::' not in text
  described = re.findall(r'^- \[.+?\]\((.+?)\): [\w`]', text, re.M)
  assert not {address for _, address in links} - set(described)


def test_pages_show_code_and_formulas(site):
  gspo = (site / 'reference' / 'algorithms' / 'gspo.html').read_text()
  assert 'L_t = max(−A·s' in gspo and 'arxiv.org/abs/2507.18071' in gspo
  loop = (site / 'source' / 'jaxrl' / 'loop.py.html').read_text()
  assert 'asyncio' in loop
  assert 'class="diagram"' in (site / 'concepts.html').read_text()
