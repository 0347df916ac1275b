"""Errors about the value of a config key begin with the key."""

import contextlib
from collections.abc import Iterator
from typing import Any

from jaxrl.options import ConfigError


@contextlib.contextmanager
def naming_key(key: str, text: Any) -> Iterator[None]:
  """Makes the errors of a block begin with a config key and its value.

  Args:
    key: The dotted key.
    text: Its value.

  Raises:
    ConfigError: An error of the block, with the key.
  """
  try:
    yield
  except ConfigError as error:
    raise ConfigError(f'--config.{key}={text}: {error}') from error
