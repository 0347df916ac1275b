"""Parse call strings that name one component each: `kind(option=value)`.

The functions that such a string may name, and their options, are registered beside the
component; here the text is read and checked against them.
"""

import re
from collections.abc import Callable, Mapping
from typing import Any

from jaxrl.call_strings import (
  ComponentCall,
  ConfigError,
  check_options,
  defaults,
  unknown_name_error,
)
from jaxrl.data.dataset import GlobalDataset
from jaxrl.data.rows.row_formats import RowFormat
from jaxrl.data.store.store_options import STORE_URL_PREFIX
from jaxrl.model_loading import random_config
from jaxrl.models import families
from jaxrl.models.lora import ADAPTER_KINDS, Lora
from jaxrl.models.model_config import ModelConfig
from jaxrl.rollout.env_manager import EnvManager
from jaxrl.rollout.weights.weight_sync import SYNC_POLICIES, SyncPolicy
from jaxrl.training.batching.packing_plan import PACKINGS, Packing
from jaxrl.training.parallelism.mesh import make_mesh
from jaxrl.training.staleness import STALENESS_POLICIES, StalenessLimit
from launch.settings.call_syntax import (
  naming_key,
  parse_call,
  parse_component,
  parse_setting,
)
from launch.settings.run_settings import MeshSettings


def parse_lora(text: str) -> Lora | None:
  """Parses `model.lora`, a call of `lora`; '' is None and trains every parameter.

  Raises:
    ConfigError: if the text or an option is wrong.
  """
  if not text:
    return None
  return parse_component(text, ADAPTER_KINDS, 'kind of adapter', 'model.lora')


def parse_packing(text: str) -> Packing | None:
  """Parses `batch.packing`; '' is None and gives each sequence its own row.

  Raises:
    ConfigError: if the text or an option is wrong.
  """
  return parse_component(text, PACKINGS, 'packing', 'batch.packing') if text else None


def parse_sync_policy(text: str) -> SyncPolicy:
  """Parses `weight_sync.policy`, a call of one of `SYNC_POLICIES`.

  Raises:
    ConfigError: if the text or an option is wrong.
  """
  policy = parse_component(text, SYNC_POLICIES, 'style', 'weight_sync.policy')
  if policy.interval < 1:
    raise ConfigError(
      f'--config.weight_sync.policy={text}: interval must be at least 1'
    )
  return policy


def parse_staleness_limit(text: str) -> StalenessLimit | None:
  """Parses `rollout.staleness_policy`, one of `STALENESS_POLICIES`; '' is None.

  Raises:
    ConfigError: if the text is wrong, or `max` is negative.
  """
  if not text:
    return None
  limit = parse_component(text, STALENESS_POLICIES, 'rule', 'rollout.staleness_policy')
  if limit.max_age < 0:
    raise ConfigError(
      f'--config.rollout.staleness_policy={text}: max must be at least 0'
    )
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
      options = parse_component(text, {'store': make_options}, 'source', key)
  except ConfigError as error:
    where = f'{key}={text}'
    if where in str(error):
      raise
    raise ConfigError(f'{where}: {error}') from error
  if not options.url:
    raise ConfigError(
      f"--config.{key}={text}: name the store: store(url='sqlite:///…')"
    )
  return options._replace(url=options.url.removeprefix(STORE_URL_PREFIX))


def parse_own_writer(path: str) -> ComponentCall | None:
  """Parses `trajectory_dump.path` if it names a class: `path/file.py:Name(option=1)`.

  Returns:
    The call; None for folders, files and URLs.

  Raises:
    ConfigError: if it names a class, but its options cannot be read.
  """
  location, _, name = path.partition('(')[0].strip().rpartition(':')
  is_module = all(map(str.isidentifier, location.split('.')))
  if not name.isidentifier() or not (location.endswith('.py') or is_module):
    return None
  return parse_setting('trajectory_dump.path', path, parse_call)


def parse_row_keys(text: str, key: str = 'dataset.keys') -> dict[str, str]:
  """Parses `dataset.keys`, such as 'question=problem, answer=solution'.

  `question`, `answer` and `solution` are the keys of a task's question, of its answer
  and of a written response; 'answer=' says that rows have none. The other names are
  those of `RowFormat`.

  Args:
    text: the value of the key.
    key: the dotted key, for messages.

  Returns:
    'question_key', 'answer_key', 'solution_key', and the other terms as 'keys'.

  Raises:
    ConfigError: if the text cannot be read, or a name is unknown.
  """
  keys = {
    'question': defaults(GlobalDataset)['question_key'],
    'answer': defaults(GlobalDataset)['answer_key'],
    'solution': defaults(RowFormat)['solution_key'],
  }
  others, seen = [], set()
  for term in filter(str.strip, text.split(',')):
    name, equals, row_key = (part.strip() for part in term.partition('='))
    if not equals:
      raise ConfigError(f'--config.{key}={text}: write name=KEY, name=KEY')
    if name in seen:
      raise ConfigError(f'--config.{key}={text}: {name!r} is given twice')
    seen.add(name)
    if name in keys:
      keys[name] = row_key
    else:
      others.append(term.strip())
  rest = ', '.join(others)
  with naming_key(key, text):
    RowFormat(keys=rest)
  return {f'{name}_key': row_key for name, row_key in keys.items()} | {'keys': rest}


def parse_random_model(text: str) -> ModelConfig:
  """Parses `model.random`, such as 'qwen3(num_layers=2, tie_embeddings=False)'.

  The name is a family; the options are the sizes of `random_config` and those that the
  family itself takes.

  Raises:
    ConfigError: if the text or an option is wrong.
  """
  where = f'--config.model.random={text}'
  call = parse_setting('model.random', text, parse_call)
  family, options = call.name, call.options
  if ':' not in family and family not in families.family_names():
    raise unknown_name_error(family, families.family_names(), 'family', where)
  sizes = set(defaults(random_config)) - {'family'}
  try:
    family_defaults = defaults(families.find_family(family).random_options)
  except ConfigError as error:
    raise ConfigError(f'{where}: {error}') from error
  for name in options:
    if name not in sizes and name not in family_defaults:
      raise unknown_name_error(name, sizes | set(family_defaults), 'option', where)
  family_options = {k: v for k, v in options.items() if k not in sizes}
  chosen = {name: value for name, value in options.items() if name in sizes}
  check_options(random_config, chosen, where)
  return random_config(family=ComponentCall(family, family_options), **chosen)


def parse_teachers(text: str) -> dict[str, str]:
  """Parses `teacher.checkpoint`: FOLDER, or 'tag=FOLDER, other=FOLDER'.

  Returns:
    Folder by environment tag; '' stands for the tags that are not named.

  Raises:
    ConfigError: if a tag is named twice, or without a folder.
  """
  folders: dict[str, str] = {}
  for term in filter(str.strip, text.split(',')):
    match = re.fullmatch(r'\s*([\w\-]+)\s*=(.*)', term)
    tag, folder = match.groups() if match else ('', term)
    if not folder.strip() or tag in folders:
      raise ConfigError(
        f'--config.teacher.checkpoint={text}: write FOLDER, or tag=FOLDER, tag=FOLDER, '
        'each tag once'
      )
    folders[tag] = folder.strip()
  if text.strip() and not folders:
    raise ConfigError(
      f'--config.teacher.checkpoint={text}: a folder is missing: write '
      'FOLDER, or tag=FOLDER, tag=FOLDER'
    )
  return folders


def parse_options(text: str, known: Mapping[str, Any], key: str) -> dict[str, Any]:
  """Parses options such as 'fsdp=8, tensor=2'.

  Args:
    text: the value of the key; '' for no options.
    known: the options that there are, with their defaults.
    key: the config key of the text.

  Returns:
    All known options, those of the text in place of their defaults.

  Raises:
    ConfigError: if the text cannot be read, or an option or value is wrong.
  """
  where = f'--config.{key}={text}'
  try:
    options = parse_call(f'{key.rpartition(".")[2]}({text})').options
  except ConfigError as error:
    raise ConfigError(f'{where}: write name=NUMBER, name=NUMBER') from error
  for name, value in options.items():
    if name not in known:
      raise unknown_name_error(name, known, 'option', where)
    is_number = isinstance(value, int | float) and not isinstance(value, bool)
    if not is_number or (isinstance(known[name], int) and isinstance(value, float)):
      raise ConfigError(f'{where}: {name}={value!r} must be a number')
  return {**known, **options}


def parse_mesh(text: str) -> MeshSettings:
  """Parses `mesh`, such as 'fsdp=8, tensor=2'.

  `data` takes the devices that are left, unless the text gives them to another axis.

  Raises:
    ConfigError: if the text cannot be read, or names no axis.
  """
  axes = {name: size for name, size in defaults(make_mesh).items() if name != 'devices'}
  sizes = parse_options(text, axes, 'mesh')
  others_take_all = any(sizes[axis] == -1 for axis in sizes if axis != 'data')
  if others_take_all and not re.search(r'\bdata\s*=', text):
    sizes['data'] = 1
  for axis, size in sizes.items():
    if size < 1 and size != -1:
      raise ConfigError(
        f'--config.mesh={text}: {axis}={size} must be at least 1, or -1 for all '
        'devices that are left'
      )
  if sum(size == -1 for size in sizes.values()) > 1:
    free = ' and '.join(axis for axis, size in sizes.items() if size == -1)
    raise ConfigError(f'--config.mesh={text}: only one axis can be -1, and {free} are')
  return MeshSettings(**sizes)


def format_mesh(sizes: Mapping[str, int]) -> str:
  """Returns the value of `mesh` for these sizes of axes."""
  usual = defaults(make_mesh)
  return ', '.join(f'{axis}={n}' for axis, n in sizes.items() if n != usual[axis])


def parse_sampling(text: str) -> dict[str, Any]:
  """Parses `rollout.sampling`, such as 'top_p=0.95, top_k=20'.

  Raises:
    ConfigError: if the text cannot be read, or names no such option.
  """
  known = {name: defaults(EnvManager)[name] for name in ('top_p', 'top_k')}
  return parse_options(text, known, 'rollout.sampling')
