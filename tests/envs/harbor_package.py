"""Imports Harbor where `make env-adapters` put it, whatever Python runs the tests."""

import functools
import importlib
import importlib.machinery
import pathlib
import re
import sys
import typing

import typing_extensions

FOLDER = pathlib.Path(__file__).parents[2] / '.venv-harbor'
# Harbor asks for Python 3.12, of which its verifier only needs this: a replacement
# field of an f-string may go over several lines.
_FIELD_OVER_LINES = re.compile(r'\{\n\s+([^{}"\n]+?)\n\s*\}')


class _Loader(importlib.machinery.SourceFileLoader):
  def get_code(self, fullname):
    text = pathlib.Path(self.path).read_text()
    return compile(_FIELD_OVER_LINES.sub(r'{\1}', text), self.path, 'exec')


class _Finder:
  @staticmethod
  def find_spec(name, path, target=None):
    spec = importlib.machinery.PathFinder.find_spec(name, path, target)
    if name.partition('.')[0] == 'harbor' and spec and spec.origin:
      spec.loader = _Loader(name, spec.origin)
      return spec
    return None


@functools.cache
def harbor(module):
  """Returns a module of Harbor."""
  if sys.version_info < (3, 12):
    if not any(isinstance(finder, _Finder) for finder in sys.meta_path):
      sys.meta_path.insert(0, _Finder())
    typing.override = typing_extensions.override
    typing.TypedDict = typing_extensions.TypedDict
  if str(FOLDER) not in sys.path:
    sys.path.append(str(FOLDER))
  return importlib.import_module(f'harbor.{module}')
