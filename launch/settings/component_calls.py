"""Parse call strings that name one component each: `kind(option=value)`.

The functions that such a string may name, and their options, are registered beside the
component; here the text is read and checked against them.
"""

from collections.abc import Callable
from typing import Any

from jaxrl.call_strings import ConfigError, call
from jaxrl.data.store.store_options import STORE_URL_PREFIX
from jaxrl.models.lora import Lora, lora_adapters
from jaxrl.rollout.weights.weight_sync import SYNC_POLICIES, SyncPolicy
from jaxrl.training.batching.packing_plan import Packing, first_fit
from jaxrl.training.staleness import STALENESS_POLICIES, StalenessLimit


def parse_lora(text: str) -> Lora | None:
  """Parses `model.lora`, a call of `lora`; '' is None and trains every parameter.

  Raises:
    ConfigError: if the text or an option is wrong.
  """
  known = {'lora': lora_adapters}
  return call(text, known, 'kind of adapter', 'model.lora') if text else None


def parse_packing(text: str) -> Packing | None:
  """Parses `batch.packing`; '' is None and gives each sequence its own row.

  Raises:
    ConfigError: if the text or an option is wrong.
  """
  known = {'first_fit': first_fit}
  return call(text, known, 'packing', 'batch.packing') if text else None


def parse_sync_policy(text: str) -> SyncPolicy:
  """Parses `rollout.sync`, a call of one of `SYNC_POLICIES`.

  Raises:
    ConfigError: if the text or an option is wrong.
  """
  policy = call(text, SYNC_POLICIES, 'style', 'rollout.sync')
  if policy.interval < 1:
    raise ConfigError(f'--config.rollout.sync={text}: interval must be at least 1')
  return policy


def parse_staleness_limit(text: str) -> StalenessLimit | None:
  """Parses `rollout.staleness`, a call of one of `STALENESS_POLICIES`; '' is None.

  Raises:
    ConfigError: if the text is wrong, or `max` is negative.
  """
  if not text:
    return None
  limit = call(text, STALENESS_POLICIES, 'rule', 'rollout.staleness')
  if limit.max_age < 0:
    raise ConfigError(f'--config.rollout.staleness={text}: max must be at least 0')
  return limit


def parse_store_options(text: str, make_options: Callable[..., Any], key: str) -> Any:
  """Parses the text that names an experience store.

  Args:
    text: a URL, or a call string such as `store(url='sqlite:///…', uses=2)`.
    make_options: `reader_options` or `writer_options`.
    key: the config key of the text, for error messages.

  Returns:
    The options that `make_options` returned.

  Raises:
    ConfigError: if the text or an option is wrong.
  """
  plain = text.removeprefix(STORE_URL_PREFIX)
  try:
    if '://' in plain.partition('(')[0]:
      options = make_options(url=plain)
    else:
      options = call(text, {'store': make_options}, 'source', key)
  except ConfigError as error:
    where = f'--config.{key}={text}'
    if where in str(error):
      raise
    raise ConfigError(f'{where}: {error}') from error
  if not options.url:
    raise ConfigError(
      f"--config.{key}={text}: name the store: store(url='sqlite:///…')"
    )
  return options._replace(url=options.url.removeprefix(STORE_URL_PREFIX))
