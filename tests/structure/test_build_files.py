"""Tests of the BUILD files: one for each top-level package, small, and complete."""

import re

from tests.structure.imports import PACKAGES, ROOT


def build_files():
  ignored = set((ROOT / '.bazelignore').read_text().split())
  return [
    path
    for path in ROOT.rglob('BUILD')
    if path.relative_to(ROOT).parts[0] not in {*ignored, '.git'}
  ]


def test_every_top_level_package_has_one_build_file():
  expected = {ROOT / 'BUILD', *(ROOT / package / 'BUILD' for package in PACKAGES)}
  assert set(build_files()) == expected


def test_build_files_stay_small():
  lines = sum(path.read_text().count('\n') for path in build_files())
  assert lines <= 300


def test_every_command_has_a_binary():
  text = (ROOT / 'launch' / 'BUILD').read_text()
  listed = set(re.findall(r'^    "(\w+)",$', text.partition('COMMANDS')[2], re.M))
  mains = {
    path.stem
    for path in (ROOT / 'launch').glob('[a-z]*.py')
    if "__name__ == '__main__'" in path.read_text()
  }
  assert mains <= listed
