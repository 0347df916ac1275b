"""The BUILD files say what the imports say."""

import pytest

from tests.structure.build_files import contents
from tests.structure.imports import ROOT


@pytest.mark.parametrize('path', sorted(contents()), ids=lambda p: str(p.parent.name))
def test_build_file_matches_imports(path):
  assert path.exists(), f'{path}: missing; run python -m tests.structure.build_files'
  assert path.read_text() == contents()[path], (
    f'{path}: differs; run python -m tests.structure.build_files'
  )


def test_no_build_file_without_a_package():
  known = {*contents(), ROOT / 'BUILD'}
  found = {
    p
    for house in ('jaxrl', 'kernels', 'configs', 'launch', 'tests')
    for p in (ROOT / house).rglob('BUILD')
  }
  assert found <= known, found - known
