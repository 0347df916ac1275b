"""Lists the keys of a config for `--help`: those that most runs set, or all."""

import fnmatch
from typing import Any

from ml_collections import ConfigDict

from jaxrl.config import descriptions_of
from launch.settings.command_line import OPEN_SECTIONS, dotted_keys

ALL = 'all'  # as the word: lists every key
# What most runs set; * stands for a tag.
COMMON_KEYS = (
  'seed num_steps num_epochs mesh.fsdp mesh.tensor '
  'model.checkpoint model.random model.dtype model.lora '
  'dataset.path dataset.columns.question dataset.columns.answer dataset.limit '
  'algorithm.group_size algorithm.kl_coef '
  'batch.num_groups batch.max_length batch.packing '
  'optimizer.learning_rate optimizer.warmup_steps '
  'rollout.engine rollout.temperature rollout.max_num_seqs rollout.async_ratio '
  'rollout.rewards '
  'env.*.max_steps env.*.max_tokens_per_step env.*.turn_template '
  'env.*.env_config.grader '
  'checkpoint.save_interval checkpoint.export '
  'eval.interval eval.path eval.num_tasks '
  'cluster.ray cluster.num_engines logging.sinks'
).split()


def list_keys(config: ConfigDict, word: str = '') -> str:
  """Lists keys with their type, value and description.

  Args:
    config: The config.
    word: Lists only keys whose name or description contains it, whatever the case.
      '' lists those that most runs set, and 'all' every key.

  Returns:
    Two lines for each key: how it is set, and what it does.
  """
  root: Any = config
  lines: list[str] = []
  if 'algorithm' in config and not word:
    lines.append(f'  algorithm {root.algorithm.name}; another: --config=FILE.py:NAME')
  keys, num_left = list(dotted_keys(config)), 0
  for key in keys:
    node = root
    *parents, leaf = key.split('.')
    for part in parents:
      node = node[part]
    description = descriptions_of(node).get(leaf, '')
    is_common = any(fnmatch.fnmatch(key, pattern) for pattern in COMMON_KEYS)
    if word in ('', ALL):
      is_listed = (word == ALL or is_common) and key != 'algorithm.name'
    else:
      is_listed = word.lower() in f'{key} {description}'.lower()
    num_left += not is_listed
    if is_listed:
      lines += _describe_key(key, node, leaf, description)
  for key in OPEN_SECTIONS:
    section, _, leaf = key.rpartition('.')
    if section not in config:
      continue
    description = descriptions_of(root[section]).get(leaf, '')
    if word == ALL or (word and word.lower() in f'{key} {description}'.lower()):
      lines += [f'  --config.{key}.NAME=…  (any)', f'      {description}']
  if not word:
    lines.append(
      f'  … and {num_left} more: --help=all lists all keys, --help=WORD those with a '
      'word in their name or description.'
    )
  return '\n'.join(lines) or f'  No key and no description contains {word!r}.'


def _describe_key(key: str, section: Any, leaf: str, description: str) -> list[str]:
  kind = section.get_type(leaf).__name__.replace('NoneType', 'any')
  value = str(section[leaf]).replace('\n', '\\n')
  lines = [f'  --config.{key}={value}  ({kind})']
  return [*lines, f'      {description}'] if description else lines
