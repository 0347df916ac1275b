"""Tools as users write them, in one file."""

import time
from typing import Any, Literal


def shout(text: str, times: int = 1, *, mark: str = '!') -> str:
  """Says it aloud.

  text: what to say. times: how often.
  """
  return ' '.join([text.upper() + mark] * times)


def table(rows: list[int], kind: Literal['sum', 'max'], exact: bool = True) -> Any:
  """Works out a column."""
  return {'value': sum(rows) if kind == 'sum' else max(rows), 'exact': exact}


def doze(seconds: float) -> str:
  """Takes its time."""
  time.sleep(seconds)
  return 'awake'


def fail() -> str:
  """Raises an error."""
  raise LookupError('there is none')


def silent(text: str) -> str:
  return text


def many(*words: str) -> str:
  """Takes as many as there are."""
  return ' '.join(words)


def bound(text: str, *, needed: str) -> str:
  """Has an option without a default."""
  return text + needed


class Counter:
  """A tool with a memory of its own."""

  def __init__(self, *, by: int = 1):
    self._by, self._count, self.open = by, 0, False

  def start(self):
    self._count, self.open = 0, True
    function = {'name': 'count', 'description': '', 'parameters': {'properties': {}}}
    return [{'type': 'function', 'function': function}]

  def call(self, name, arguments, *, seconds):
    self._count += self._by
    return str(self._count)

  def close(self):
    self.open = False
