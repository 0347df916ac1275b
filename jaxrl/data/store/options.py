"""What names an experience store: a URL, or a call string with options.

`sqlite:////abs/path.db`, `postgresql://host/name` and any other URL of SQLAlchemy's;
before it may stand `experience+`, which tells it from the URLs of files; or
`store(url='…', uses=2)`, with the options of `reading` or `writing`.
"""

import math
from collections.abc import Callable
from typing import Any, NamedTuple

from jaxrl import signature
from jaxrl.signature import ConfigError

PREFIX = 'experience+'


class Reading(NamedTuple):
  """How a trainer reads; see `reading`."""

  url: str
  uses: int
  reader: str
  wait: float


class Writing(NamedTuple):
  """How an explorer writes; see `writing`."""

  url: str
  version: int


def reading(
  *, url: str = '', uses: int = 1, reader: str = 'trainer', wait: float = 600.0
) -> Reading:
  """uses: how often each group is trained on. reader: whose uses are counted; another
  name counts its own. wait: seconds without a new group after which training stops.
  """
  if uses < 1:
    raise ConfigError(f'uses={uses}: must be at least 1')
  if not 0 <= wait < math.inf:
    raise ConfigError(f'wait={wait}: must be at least 0, and finite')
  if not 0 < len(reader) <= 255:
    raise ConfigError('reader: must have 1 to 255 characters')
  return Reading(url, uses, reader, wait)


def writing(*, url: str = '', version: int = 0) -> Writing:
  """version: of the weights that play, which is the step they were published at."""
  if version < 0:
    raise ConfigError(f'version={version}: must be at least 0')
  return Writing(url, version)


def names_store(text: str) -> bool:
  """Whether a path of a dump is that of a store."""
  return text.startswith((PREFIX, 'store(')) or text == 'store'


def read(text: str, made: Callable[..., Any], key: str) -> Any:
  """What `made`, `reading` or `writing`, makes of a text. Raises ConfigError.

  key: the config key of the text.
  """
  plain = text.removeprefix(PREFIX)
  try:
    if '://' in plain.partition('(')[0]:
      found = made(url=plain)
    else:
      found = signature.call(text, {'store': made}, 'source', key)
  except ConfigError as error:
    where = f'--config.{key}={text}'
    if where in str(error):
      raise
    raise ConfigError(f'{where}: {error}') from error
  if not found.url:
    raise ConfigError(
      f"--config.{key}={text}: name the store: store(url='sqlite:///…')"
    )
  return found._replace(url=found.url.removeprefix(PREFIX))
