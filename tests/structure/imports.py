"""Reads the tree's own imports, for the tests of its laws and its BUILD files."""

import ast
import functools
import pathlib

ROOT = pathlib.Path(__file__).resolve().parents[2]
PACKAGES = ('jaxrl', 'kernels', 'configs', 'launch', 'examples', 'recipes', 'tests')


@functools.cache
def modules() -> dict[str, pathlib.Path]:
  """Dotted name → file, of every module of the project."""
  files = {}
  for package in PACKAGES:
    for file in sorted((ROOT / package).rglob('*.py')):
      parts = file.relative_to(ROOT).with_suffix('').parts
      name = '.'.join(parts[:-1] if parts[-1] == '__init__' else parts)
      files[name] = file
  return files


@functools.cache
def tree(file: pathlib.Path) -> ast.Module:
  return ast.parse(file.read_text(), str(file))


@functools.cache
def nodes(file: pathlib.Path) -> tuple[ast.AST, ...]:
  return tuple(ast.walk(tree(file)))


def _targets(node: ast.AST, file: pathlib.Path) -> list[str]:
  if isinstance(node, ast.Import):
    return [alias.name for alias in node.names]
  if isinstance(node, ast.ImportFrom):
    if node.level:
      raise SyntaxError(f'{file}:{node.lineno}: relative import; name it in full')
    known = modules()
    full = [f'{node.module}.{alias.name}' for alias in node.names]
    return [name if name in known else node.module or '' for name in full]
  return []


@functools.cache
def imported(file: pathlib.Path) -> frozenset[str]:
  """Returns every dotted name that `file` imports, in functions and for types too."""
  return frozenset(name for node in nodes(file) for name in _targets(node, file))


def first_party(file: pathlib.Path) -> set[str]:
  """Returns the project's own modules that `file` imports, itself left out."""
  known = modules()
  names = imported(file)
  return {name for name in names if name in known and known[name] != file}
