"""Store options name an experience store by a URL or by a call string.

The URL is `sqlite:////abs/path.db`, `postgresql://host/name` or any other of
SQLAlchemy's. It may be prefixed by `experience+`, which distinguishes it from the URLs
of files. The call string is `store(url='…', uses=2)`, with the options of
`ReaderOptions` or `WriterOptions`.
"""

import dataclasses
import math
from typing import Any, TypeVar

from jaxrl.component_calls import parse_call
from jaxrl.component_table import ComponentTable
from jaxrl.options import ConfigError, OptionError, Options, option

STORE_URL_PREFIX = 'experience+'


@dataclasses.dataclass(frozen=True, kw_only=True)
class ReaderOptions(Options):
  """Describes how a trainer reads from a store."""

  url: str = option('', 'The URL of the store.')
  uses: int = option(1, 'How often each group is trained on.', low=1)
  reader: str = option(
    'trainer',
    'The name under which uses are counted; another name has its own count.',
  )
  wait: float = option(
    600.0, 'After this many seconds without a new group training stops.', low=0
  )

  def __post_init__(self):
    """Refuses an endless wait, and names that the store cannot hold."""
    super().__post_init__()
    if self.wait == math.inf:
      raise OptionError('wait', self.wait, 'must be finite')
    if not 0 < len(self.reader) <= 255:
      raise ConfigError('reader: must have 1 to 255 characters')


@dataclasses.dataclass(frozen=True, kw_only=True)
class WriterOptions(Options):
  """Describes how a rollout job writes into a store."""

  url: str = option('', 'The URL of the store.')
  version: int = option(
    0,
    'The version of the weights that play: the step at which they were published.',
    low=0,
  )


StoreOptions = TypeVar('StoreOptions', ReaderOptions, WriterOptions)


def is_store_path(text: str) -> bool:
  """Returns whether the path of a dump names an experience store.

  Args:
    text: The path.

  Returns:
    True for a URL with the store's prefix or a `store(…)` call string.
  """
  return text.startswith((STORE_URL_PREFIX, 'store(')) or text == 'store'


def parse_store_options(text: str, cls: type[StoreOptions], key: str) -> StoreOptions:
  """Reads the text that names an experience store.

  Args:
    text: A URL, or a call such as `store(url='sqlite:///…', uses=2)`.
    cls: The class of the options.
    key: The option that holds the text, for error messages.

  Returns:
    The options.

  Raises:
    ConfigError: If the text or an option is wrong.
  """
  plain, where = text.removeprefix(STORE_URL_PREFIX), f'{key}={text}'
  try:
    if '://' in plain.partition('(')[0]:
      options: Any = cls(url=plain)
    else:
      call = parse_call(text)
      options = ComponentTable('source', key, {'store': cls}).build(call)
  except ValueError as error:
    if where in str(error):
      raise
    raise ConfigError(f'{where}: {error}') from error
  if not options.url:
    raise ConfigError(f"{where}: name the store: store(url='sqlite:///…')")
  return options.replace(url=options.url.removeprefix(STORE_URL_PREFIX))
