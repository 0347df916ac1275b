"""List the keys of a config for `--help`, with sections that are off in one line."""

import dataclasses
from collections.abc import Callable
from typing import Any

from ml_collections import ConfigDict

from jaxrl.call_strings import ConfigError
from jaxrl.config import descriptions_of
from launch.settings.command_line import OPEN_SECTIONS, check_algorithm, dotted_keys


@dataclasses.dataclass(frozen=True)
class OptionalSection:
  """A section whose keys have an effect only in some configs.

  Attributes:
    name: dotted key of the section.
    is_off: returns whether this config makes no use of it.
    used: says when it is used, for people.
    listed: keys that are listed even if it is off, such as the one that switches it on.
  """

  name: str
  is_off: Callable[[Any], bool]
  used: str
  listed: tuple[str, ...] = ()


def _asks_teacher(algorithm: Any) -> bool:
  from jaxrl.training import batch_fields  # imports JAX

  return algorithm is None or bool(batch_fields.teacher_fields(algorithm))


def _may_see_images(model: Any) -> bool:
  """Returns whether the model has a vision tower, or a checkpoint that may have one."""
  from launch.settings.component_calls import parse_random_model  # imports JAX

  if model.checkpoint:
    return True
  try:
    return parse_random_model(model.random).vision is not None
  except ConfigError:  # a run says what is wrong with it
    return False


OPTIONAL_SECTIONS = (
  OptionalSection(
    'cluster',
    lambda c: not c.cluster.ray,
    'used when cluster.ray=true',
    ('ray', 'placement'),
  ),
  OptionalSection(
    'dataset',
    lambda c: not c.dataset.path,
    'used when dataset.path is set',
    ('path', 'keys', 'system_prompt', 'experience_store', 'expert_path'),
  ),
  OptionalSection(
    'eval',
    lambda c: not c.eval.interval and not c.eval.sets,
    'used when eval.interval > 0',
    ('interval', 'sets'),
  ),
  OptionalSection(
    'logging',
    lambda c: not c.logging.trace_steps,
    'for traces of chosen steps',
    ('sinks', 'level'),
  ),
  OptionalSection(
    'model',
    lambda c: not _may_see_images(c.model),
    'for models that see images',
    (
      *('checkpoint', 'random', 'dtype', 'remat', 'lora'),
      *('chat_template', 'stop_token_ids', 'template_options', 'date'),
    ),
  ),
  OptionalSection(
    'sft', lambda c: not c.sft.num_steps, 'used when sft.num_steps > 0', ('num_steps',)
  ),
  OptionalSection(
    'teacher',
    lambda c: not _asks_teacher(check_algorithm(c)),
    'used by algorithms that distill',
  ),
  OptionalSection(
    'trajectory_dump',
    lambda c: not c.trajectory_dump.path,
    'used when trajectory_dump.path is set',
    ('path',),
  ),
)


def _tag_sections(tags: Any) -> list[OptionalSection]:
  """Returns what most tags leave as it is, and what later tags share with the first."""
  sections = []
  first, values = next(iter(tags.items()), ('', {}))
  for tag, section in tags.items():
    if tag != first:
      for name in ('', '.env_config'):
        tag_values, others = _section(section, name[1:]), _section(values, name[1:])
        listed = tuple(
          k for k, v in tag_values.items() if k not in others or v != others[k]
        )
        used = f'as those of env.{first}{name}'
        sections.append(
          OptionalSection(f'env.{tag}{name}', lambda _: True, used, listed)
        )
    elif 'manager' in section:
      sections.append(
        OptionalSection(
          f'env.{tag}',
          lambda c, tag=tag: not c.env[tag].manager,
          'for a class of your own that plays the episodes',
          tuple(key for key in section if key != 'manager'),
        )
      )
    if 'dataset' in section:
      sections.append(
        OptionalSection(
          f'env.{tag}.dataset',
          lambda c, tag=tag: all(v in ('', None) for v in c.env[tag].dataset.values()),
          "used in place of the run's dataset if set",
        )
      )
  return sections


def _section(root: Any, name: str) -> Any:
  """Returns the section under a dotted key, '' for the root; empty if there is none."""
  for part in name.split('.') if name else ():
    root = root.get(part, {})
  return root


def list_keys(config: ConfigDict, word: str = '') -> str:
  """Lists keys with their type, value and description.

  Args:
    config: The config.
    word: Lists only keys whose name or description contains it, whatever the case.
      '' lists all, but keys that have no effect in this config only as a number.

  Returns:
    Two lines for each key: how it is set, and what it does.
  """
  root: Any = config
  sections = [] if word else [*OPTIONAL_SECTIONS, *_tag_sections(root.get('env', {}))]
  hidden = {
    f'{section.name}.{key}': section
    for section in sections
    if _section(root, section.name) and section.is_off(config)
    for key in _section(root, section.name)
    if key not in section.listed
  }
  lines: list[str] = []
  if not word and 'algorithm' in config:
    lines.append(f'  algorithm {root.algorithm.name}; another: --config=FILE.py:NAME')
  summarized = set()
  for key in dotted_keys(config):
    if section := hidden.get(key):
      if section.name not in summarized:
        summarized.add(section.name)
        count = sum(other is section for other in hidden.values())
        lines.append(
          f'  --config.{section.name}.*  ({count} more key{"s"[: count > 1]}, '
          f'{section.used}; --help={section.name} lists them)'
        )
    elif word or key != 'algorithm.name':
      node = root
      *parents, leaf = key.split('.')
      for part in parents:
        node = node[part]
      lines += _describe_key(key, node, leaf, word)
  for key, description in OPEN_SECTIONS.items():
    if word.lower() in f'{key} {description}'.lower():
      lines += [f'  --config.{key}.NAME=…  (any)', f'      {description}']
  return '\n'.join(lines) or f'  No key and no description contains {word!r}.'


def _describe_key(key: str, section: Any, leaf: str, word: str) -> list[str]:
  """Returns the lines about one key of a section; none if they lack the word."""
  description = descriptions_of(section).get(leaf, '')
  if word.lower() not in f'{key} {description}'.lower():
    return []
  kind = section.get_type(leaf).__name__.replace('NoneType', 'any')
  value = str(section[leaf]).replace('\n', '\\n')
  lines = [f'  --config.{key}={value}  ({kind})']
  return [*lines, f'      {description}'] if description else lines
