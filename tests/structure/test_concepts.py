"""Tests that docs/concepts.md leads through about 20 files that really exist."""

import ast
import re

import pytest

from tests.structure.imports import ROOT, tree

MAX_FILES, MAX_LINES = 20, 6300
LINK = re.compile(r'\[[^\]]+\]\(\.\./([\w/.]+\.py)\)')
TEXT = (ROOT / 'docs' / 'concepts.md').read_text()
# A row of the walk: | stage | `names` | [file](../file) |
ROWS = [
  (re.findall(r'`([\w.]+)`', cells[2]), LINK.search(cells[3])[1])
  for line in TEXT.partition('## One GRPO step')[2].splitlines()
  if len(cells := line.split('|')) == 5 and LINK.search(cells[3])
]


def defined(path: str) -> set[str]:
  """Names of functions and classes of a file, and of methods as `Class.method`."""
  kinds = (ast.FunctionDef, ast.AsyncFunctionDef, ast.ClassDef)
  names = set()
  for node in tree(ROOT / path).body:
    if isinstance(node, kinds):
      names.add(node.name)
    if isinstance(node, ast.ClassDef):
      names |= {f'{node.name}.{x.name}' for x in node.body if isinstance(x, kinds)}
  return names


@pytest.mark.parametrize(('names', 'path'), ROWS, ids=[path for _, path in ROWS])
def test_the_walk_names_functions_of_the_files_it_links(names, path):
  assert names and not set(names) - defined(path)


def test_the_walk_is_short():
  files = [path for _, path in ROWS]
  assert len(set(files)) == len(files)
  assert 15 < len(files) <= MAX_FILES
  lines = sum((ROOT / path).read_text().count('\n') for path in files)
  assert lines < MAX_LINES
  text = TEXT.replace('\n', ' ')
  assert f'{len(files)} files, of less than {MAX_LINES:,} lines together' in text


def test_the_example_is_short():
  lines = (ROOT / 'examples' / 'grpo_minimal.py').read_text().count('\n')
  assert lines <= 150
  assert f'in {lines} lines' in TEXT.replace('\n', ' ')
