"""Reads the pages' files in static/, and fills report.html, which needs no other file.

The live view serves these files as they are, as ES modules. In report.html the same
modules are laid end to end in one script.
"""

import functools
import importlib.resources
import re
from collections.abc import Mapping

FOLDER = importlib.resources.files('launch.report') / 'static'
IMPORT = re.compile(r"^import \{[^}]*\} from '\./(\w+\.js)';\n", re.M)
FIELD = re.compile(r'\{\{(\w+)\}\}')


@functools.cache
def read_asset(name: str) -> str:
  """Returns the text of a file in static/.

  Raises:
    FileNotFoundError: If there is no such file.
  """
  return (FOLDER / name).read_text('utf-8')


def asset_names() -> list[str]:
  """Returns the names of the files in static/."""
  return sorted(file.name for file in FOLDER.iterdir() if file.is_file())


def inline_modules(name: str) -> str:
  """Returns one script with a module and all modules that it imports, those first.

  Modules share one scope then, so no two may declare the same name at their top.
  """
  order: list[str] = []

  def visit(module: str) -> None:
    for other in IMPORT.findall(read_asset(module)):
      visit(other)
    if module not in order:
      order.append(module)

  visit(name)
  parts = [
    re.sub(r'^export ', '', IMPORT.sub('', read_asset(module)), flags=re.M)
    for module in order
  ]
  return "'use strict';\n" + ''.join(parts)


def fill_template(name: str, values: Mapping[str, str]) -> str:
  """Returns a file of static/ with values in the place of its `{{fields}}`.

  Args:
    name: Name of the file.
    values: The text of each field, which is inserted as it is.
  """
  return FIELD.sub(lambda field: values[field[1]], read_asset(name))
