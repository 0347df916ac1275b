"""The tutorial is followed from its first command to its last; other pages' too."""

import json
import re
import shlex
import socket
import subprocess
import sys
import time

import pytest

from launch.settings import command_line
from tests.docs.blocks import ROOT, blocks, check_make, environment, lay_out, run
from tests.launch.runs import rows
from tests.processes import free_port

TUTORIAL = blocks(ROOT / 'docs' / 'tutorial.md')
PORT = '8123'  # of the tutorial; the test takes a free one
KEY = {'JAXRL_API_KEY': 'a key of the test'}


def follow(kind, text, folder):
  """Runs a block; what it printed."""
  if kind == 'python':
    return '' if text.startswith('# ') else run([sys.executable, '-c', text], folder)
  printed = ''
  for line in text.splitlines():
    words = shlex.split(line)
    if words[0] == 'make':
      check_make(words)
    elif words[0] == 'python':
      printed += run([sys.executable, *words[1:]], folder)
    else:
      assert words == ['source', '.venv/bin/activate']
  return printed


@pytest.mark.slow
@pytest.mark.extended
def test_the_tutorial_can_be_followed(tmp_path):
  lay_out(tmp_path, TUTORIAL)
  *before, (_, serve), (_, client) = TUTORIAL
  printed = [follow(kind, text, tmp_path) for kind, text in before]
  assert sum('Finished.' in text for text in printed) == 4
  assert (tmp_path / 'runs' / 'first' / 'report.html').exists()
  for path in ('first/config.json', 'first/checkpoints', 'first/export'):
    assert (tmp_path / 'runs' / path).exists(), path
  named = {name for row in rows(tmp_path / 'runs' / 'brief') for name in row}
  assert {'reward/env', 'reward/brevity'} <= named
  scores = json.loads((tmp_path / 'scores.json').read_text())
  assert 'pass@4' in json.dumps(scores)
  port = str(free_port())
  words = shlex.split(serve.replace(PORT, port))
  server = subprocess.Popen(
    [sys.executable, *words[1:]],
    cwd=tmp_path,
    env=environment(tmp_path) | KEY,
    stdout=subprocess.DEVNULL,
  )
  try:
    deadline = time.monotonic() + 120
    while socket.socket().connect_ex(('127.0.0.1', int(port))):
      assert server.poll() is None and time.monotonic() < deadline
      time.sleep(0.5)
    code = client.replace(PORT, port)
    run([sys.executable, '-c', code], tmp_path, **KEY)
  finally:
    server.terminate()
    assert server.wait(60) == 0


@pytest.mark.slow
@pytest.mark.parametrize('name', ['index', 'datasets', 'memory'])
def test_the_commands_of_a_page_run(name, tmp_path):
  page_blocks = blocks(ROOT / 'docs' / f'{name}.md')
  lay_out(tmp_path, page_blocks)
  for kind, text in page_blocks:
    if kind == 'json':
      (tmp_path / 'sums.jsonl').write_text(text)
  for kind, text in page_blocks:
    if kind in ('sh', 'python'):
      follow(kind, text, tmp_path)


def test_the_commands_that_need_a_checkpoint_name_what_there_is():
  (page,) = [ROOT / 'docs' / 'models.md']
  text = ' '.join(text for _, text in blocks(page)).replace('\\\n', ' ')
  commands = [line for line in text.splitlines() if line.strip()]
  assert len(commands) == 3
  for line in commands:
    words = shlex.split(line)
    assert words[:2] == ['python', '-m']
    module = ROOT / f'{words[2].replace(".", "/")}.py'
    assert module.exists()
    command = command_line.parse(words[3:], {'checkpoint': ''})
    command_line.load(command)


def test_every_page_is_in_the_navigation():
  nav = (ROOT / 'mkdocs.yml').read_text().partition('\nnav:')[2]
  for page in (ROOT / 'docs').glob('*.md'):
    assert re.search(rf' {re.escape(page.name)}$', nav, re.M), page.name


def test_the_glossary_is_sorted_and_repeats_no_word_of_the_vocabulary():
  def words(name):
    rows = re.findall(r'^\| (.*?) \|', (ROOT / 'docs' / name).read_text(), re.M)
    return rows[1:]

  glossary = words('glossary.md')
  assert len(glossary) > 30
  assert glossary == sorted(glossary, key=str.lower)
  assert not set(glossary) & set(words('concepts.md'))


def test_the_drawn_diagram_has_what_the_diagram_of_the_concepts_has():
  drawn = (ROOT / 'docs' / 'assets' / 'loop.svg').read_text()
  (mermaid,) = [t for k, t in blocks(ROOT / 'docs' / 'concepts.md') if k == 'mermaid']
  labels = re.findall(r'\[(.*?)\]', mermaid) + re.findall(r'-- (.*?) -->', mermaid)
  assert len(labels) > 15
  shown = re.findall(r'<text[^>]*>(.*?)</text>', drawn)
  assert set(labels) == set(shown)
