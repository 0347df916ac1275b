"""Store options name an experience store by a URL or by a call string.

The URL is `sqlite:////abs/path.db`, `postgresql://host/name` or any other of
SQLAlchemy's. It may be prefixed by `experience+`, which distinguishes it from the URLs
of files. The call string is `store(url='…', uses=2)`, with the options of
`reader_options` or `writer_options`.
"""

import math
from collections.abc import Callable
from typing import Any, NamedTuple

from jaxrl.component_calls import parse_call
from jaxrl.component_table import ComponentTable
from jaxrl.options import ConfigError

STORE_URL_PREFIX = 'experience+'


class ReaderOptions(NamedTuple):
  """Holds the options of a trainer's access; see `reader_options`."""

  url: str
  uses: int
  reader: str
  wait: float


class WriterOptions(NamedTuple):
  """Holds the options of a writer's access; see `writer_options`."""

  url: str
  version: int


def reader_options(
  *, url: str = '', uses: int = 1, reader: str = 'trainer', wait: float = 600.0
) -> ReaderOptions:
  """Describes how a trainer reads from a store.

  Args:
    url: The URL of the store.
    uses: How often each group is trained on.
    reader: The name under which uses are counted; another name has its own count.
    wait: After this many seconds without a new group training stops.

  Returns:
    The options.

  Raises:
    ConfigError: If an option is out of range.
  """
  if uses < 1:
    raise ConfigError(f'uses={uses}: must be at least 1')
  if not 0 <= wait < math.inf:
    raise ConfigError(f'wait={wait}: must be at least 0, and finite')
  if not 0 < len(reader) <= 255:
    raise ConfigError('reader: must have 1 to 255 characters')
  return ReaderOptions(url, uses, reader, wait)


def writer_options(*, url: str = '', version: int = 0) -> WriterOptions:
  """Checks how a rollout job writes into a store.

  Args:
    url: The URL of the store.
    version: The version of the weights that play: the step at which they were
      published.

  Returns:
    The options.

  Raises:
    ConfigError: If an option is out of range.
  """
  if version < 0:
    raise ConfigError(f'version={version}: must be at least 0')
  return WriterOptions(url, version)


def is_store_path(text: str) -> bool:
  """Returns whether the path of a dump names an experience store.

  Args:
    text: The path.

  Returns:
    True for a URL with the store's prefix or a `store(…)` call string.
  """
  return text.startswith((STORE_URL_PREFIX, 'store(')) or text == 'store'


def parse_store_options(text: str, make_options: Callable[..., Any], key: str) -> Any:
  """Reads the text that names an experience store.

  Args:
    text: A URL, or a call such as `store(url='sqlite:///…', uses=2)`.
    make_options: `reader_options` or `writer_options`.
    key: The option that holds the text, for error messages.

  Returns:
    The options that `make_options` returned.

  Raises:
    ConfigError: If the text or an option is wrong.
  """
  plain, where = text.removeprefix(STORE_URL_PREFIX), f'{key}={text}'
  try:
    if '://' in plain.partition('(')[0]:
      options = make_options(url=plain)
    else:
      call = parse_call(text)
      options = ComponentTable('source', key, {'store': make_options}).build(call)
  except ValueError as error:
    if where in str(error):
      raise
    raise ConfigError(f'{where}: {error}') from error
  if not options.url:
    raise ConfigError(f"{where}: name the store: store(url='sqlite:///…')")
  return options._replace(url=options.url.removeprefix(STORE_URL_PREFIX))
