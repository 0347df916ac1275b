"""docs/migrate.md and docs/memory.md: every key that they name exists."""

import re

import pytest

from jaxrl.component_calls import parse_calls
from launch.settings.component_kinds import KINDS
from tests.configs import test_keys
from tests.docs.blocks import ROOT


def keys_of(page):
  text = (ROOT / 'docs' / page).read_text()
  keys = test_keys.known()
  sections = '|'.join(sorted({key.split('.')[0] for key in keys}))
  if page == 'migrate.md':  # what is on the left is theirs
    rows = [line for line in text.splitlines() if line.startswith('| ')]
    rows = [row.rstrip('|').rpartition(' | ')[2] for row in rows]
    text = '\n'.join(rows)
  return keys, re.findall(rf'`((?:{sections})(?:\.[a-z_.<>]+)?)(=[^`]*)?`', text)


@pytest.mark.parametrize(('page', 'least'), [('migrate.md', 90), ('memory.md', 15)])
def test_every_key_exists(page, least):
  keys, mentions = keys_of(page)
  tops = {key for key in keys if '.' not in key}
  assert len(mentions) > least
  named = {key for key, _ in mentions if '.' in key or key in tops}
  assert not {key for key in named if key not in keys}


@pytest.mark.parametrize('page', ['migrate.md', 'memory.md'])
def test_every_component_that_is_named_exists(page):
  names = {name for kind in KINDS for name in (*kind.built_in(), *kind.other_names)}
  names |= {'file.py:name', 'none'}
  checked = 0
  for key, value in keys_of(page)[1]:
    if value.startswith("='"):
      text = value[2:].partition("'")[0].replace('(…)', '').replace('…', '1')
      calls = parse_calls(text)
      assert not {call.name for call in calls} - names, (key, value)
      checked += 1
  assert checked >= (20 if page == 'migrate.md' else 3)
