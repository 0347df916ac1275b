"""Answers config keys of other frameworks with ours, from docs/keys.md and migrate.md.

The tables of these two pages are read when a key is unknown, so there is no second list
that could differ from them.
"""

import pathlib
import re

PAGES = ('keys.md', 'migrate.md')
_DOCS = pathlib.Path(__file__).parents[2] / 'docs'
_MAX_LETTERS = 240


def describe_foreign_key(key: str, *, whole: bool = False) -> str:
  """Returns what stands in the place of another framework's key.

  Args:
    key: A dotted key, or a flag, as it was typed.
    whole: Whether only a name with all its parts counts, not its last part alone.

  Returns:
    A sentence; '' if no table has a key with this last part.
  """
  leaf = key.rpartition('.')[2]
  answers: dict[str, tuple[str, str]] = {}
  for page in PAGES:
    file = _DOCS / page
    if not file.is_file():  # an installed package has no pages
      continue
    system = ''
    for line in file.read_text().splitlines():
      cells = [cell.strip() for cell in re.split(r'(?<!\\)\|', line.strip().strip('|'))]
      if not line.startswith('|') or len(cells) != 2:
        continue
      if cells[1] == 'jaxrl':
        system = cells[0]
        continue
      names = re.findall(r'`([\w.\-]+)`', cells[0])
      names = [name.lstrip('-') for name in names]
      leaves = [] if whole else [name.rpartition('.')[2] for name in names]
      if system and (key in names or leaf in leaves):
        answers.setdefault(system, (page, cells[1]))
  if not answers:
    return ''
  system, (page, text) = next(iter(answers.items()))
  text = re.sub(r'\[([^\]]*)\]\([^)]*\)', r'\1', text).replace('`', '')
  if len(text) > _MAX_LETTERS:
    text = text[:_MAX_LETTERS].rpartition(' ')[0] + ' …'
  return f"{system}'s {leaf} is here: {text} (docs/{page})"
