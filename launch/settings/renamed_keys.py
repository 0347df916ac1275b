"""Answer config keys of earlier versions with their new names.

`RENAMED_KEYS` has every key that was renamed, moved or merged. It is consulted for keys
that do not exist any more: on a command line, in a config file, and in the record of a
run's folder.
"""

import re
import shlex
from collections.abc import Iterable, Mapping
from typing import Any

from jaxrl.call_strings import ConfigError
from launch.settings.call_syntax import split_terms

# Old key → what is written today. {value} stands for the value, * for a part of the key
# that stays; without {value} the new key takes the value as it is.
RENAMED_KEYS: dict[str, str] = {
  'rollout.num_slots': 'rollout.max_num_seqs',
  'rollout.sync': 'weight_sync.policy',
  'cluster.weights': 'weight_sync.transport',
  'rollout.retries': 'rollout.max_retries',
  'rollout.min_members': 'rollout.min_group_size',
  'rollout.redundancy': 'rollout.extra_samples',
  'rollout.lease_timeout': 'rollout.episode_timeout',
  'rollout.max_lost': 'rollout.max_consecutive_drops',
  'rollout.mismatch_alarm': 'rollout.logprob_mismatch_warn',
  'rollout.shapers': 'rollout.reward_shaping',
  'algorithm.shapers': 'rollout.reward_shaping',
  'algorithm.filters': 'rollout.group_filter',
  'rollout.staleness': 'rollout.staleness_policy',
  'rollout.top_p': "rollout.sampling='top_p={value}'",
  'rollout.top_k': "rollout.sampling='top_k={value}'",
  'batch.minibatches': 'batch.num_minibatches',
  'batch.micro_batches': 'batch.num_micro_batches',
  'batch.epochs': 'batch.ppo_epochs',
  'batch.entropy': 'batch.log_entropy',
  'batch.buckets': 'batch.length_buckets',
  'optimizer.kind': 'optimizer.name',
  'optimizer.clip_norm': 'optimizer.max_grad_norm',
  'optimizer.schedule': 'optimizer.lr_schedule',
  'checkpoint.every': 'checkpoint.save_interval',
  'checkpoint.keep': 'checkpoint.max_to_keep',
  'eval.every': 'eval.interval',
  'data.source': 'dataset.experience_store',
  'expert.path': 'dataset.expert_path',
  'files.keys': 'dataset.keys',
  'files.system': 'dataset.system_prompt',
  'dataset.question_key': "dataset.keys='question={value}'",
  'dataset.answer_key': "dataset.keys='answer={value}'",
  'sft.solution_key': "dataset.keys='solution={value}'",
  'dump.path': 'trajectory_dump.path',
  'dump.columns': 'trajectory_dump.columns',
  'teacher.by_tag': 'teacher.checkpoint',
  'model.random.family': 'model.random',
  'model.random.*': "model.random='qwen3(*={value})'",
  'mesh.*': "mesh='*={value}'",
  'env.*.share': 'env.*.weight',
  'env.*.concurrency': 'env.*.max_concurrency',
  'env.*.formulation': 'env.*.row_format',
}
# Old keys whose value came on top of the algorithm's own, which today's key replaces.
ADDING_KEYS = ('rollout.shapers',)
# Old keys that no key replaces, and what to do instead.
REMOVED_KEYS: dict[str, str] = {
  'algorithm.behaviour': "algorithm.correction implies 'decoupled', and so does "
  "rollout.staleness_policy='recompute'; an algorithm of your own sets "
  'old_logprobs_source',
  'algorithm.schema': 'an algorithm decides what it learns from: name one that learns '
  'from files, or set data_format in an algorithm of your own',
  'algorithm.critic_warmup': 'an option of algorithms with a critic, such as ppo; an '
  'algorithm of your own sets critic_warmup',
}
# By key: old names and options in its call string, and the new ones.
RENAMED_CALLS: dict[str, dict[str, str]] = {
  'algorithm.advantage': {'best': 'best_of_group'},
}
RENAMED_OPTIONS: dict[str, dict[str, str]] = {
  'batch.packing': {'abreast': 'num_parallel'},
  'optimizer.name': {'moments': 'state_dtype'},
  'rollout.engine': {'lanes': 'decode_threads'},
}

_QUOTED = re.compile('"[^"\\n]*"|\'[^\'\\n]*\'')


def describe_renamed_key(
  key: str, value: Any = None, config: Mapping[str, Any] | None = None
) -> str:
  """Returns what an old key is called today and how to write it.

  Args:
    key: a dotted key.
    value: the value it was given, as text; None if there is none.
    config: the config as nested mappings; what it sets of a merged key is kept.

  Returns:
    A sentence; '' for a key that was never renamed.
  """
  if advice := REMOVED_KEYS.get(key):
    return f'{key} is no key any more: {advice}'
  for old, new in RENAMED_KEYS.items():
    match = re.fullmatch(re.escape(old).replace(r'\*', r'([\w\-]+)'), key)
    if match is None:
      continue
    new = new.replace('*', match[1] if match.groups() else '')
    name, equals, _ = new.partition('=')
    shown = 'VALUE' if value is None else str(value)
    how = f'{new}={shlex.quote(shown)}'
    if equals:
      how = new.replace('{value}', shown)
      if current := _value(config or {}, name):
        merged = _merge_terms(current, how.partition('=')[2][1:-1])
        how = f'{name}={shlex.quote(merged)}'
    advice = f'{key} is now {name}: write --config.{how}'
    if key in ADDING_KEYS:
      advice += ", which replaces the algorithm's own"
    return advice
  return ''


def _merge_terms(current: str, term: str) -> str:
  """Returns a value of a merged key with one more option.

  Args:
    current: the value, such as 'qwen3(num_layers=2)' or 'fsdp=8'.
    term: the option in the same form, such as 'qwen3(head_dim=8)' or 'tensor=2'.
  """
  is_call = '(' in term
  name, _, options = current.partition('(') if is_call else ('', '', current)
  added = term.partition('(')[2].removesuffix(')') if is_call else term
  option = added.partition('=')[0]
  terms = split_terms(options.strip().removesuffix(')') if is_call else options, ',')
  kept = [t for t in terms if t.partition('=')[0].strip() != option]
  merged = ', '.join([*kept, added])
  return f'{name.strip()}({merged})' if is_call else merged


def find_renamed_keys(keys: Iterable[str], known: Iterable[str] = ()) -> list[str]:
  """Returns a sentence about each old key among some dotted keys.

  Args:
    keys: the keys.
    known: keys that exist today.
  """
  exists = set(known)
  sentences = (describe_renamed_key(key) for key in keys if key not in exists)
  return [sentence for sentence in sentences if sentence]


def find_renamed_in_line(line: str) -> str:
  """Returns a sentence about an old key that a line of a config file sets, or ''."""
  line = _QUOTED.sub("''", line)
  for old in (*RENAMED_KEYS, *REMOVED_KEYS):
    section, _, leaf = old.rpartition('.')
    if leaf == '*':
      if re.search(rf'\.{re.escape(section)}\.(\w+|update\()', line):
        word = re.search(rf'\.{re.escape(section)}\.(?:update\()?(\w+)', line)
        return describe_renamed_key(f'{section}.{word[1] if word else "VALUE"}')
    elif section == 'env.*':
      if 'env_section' in line and re.search(rf'\b{leaf}\s*=', line):
        return describe_renamed_key(old.replace('*', 'TAG'))
    elif re.search(rf'\.{section}\.(update\(.*\b)?{leaf}\s*=', line):
      return describe_renamed_key(old)
  return ''


def check_renamed_calls(config: Mapping[str, Any]) -> None:
  """Checks the call strings of a config for names and options of earlier versions.

  Args:
    config: the config, as nested mappings.

  Raises:
    ConfigError: for an old name, with the new one.
  """
  for table, pattern in (
    (RENAMED_CALLS, r'^\s*{}(?=\s*(\(|$))'),
    (RENAMED_OPTIONS, r'\b{}(?=\s*=)'),
  ):
    for key, names in table.items():
      text = _value(config, key)
      if ':' in text.partition('(')[0]:
        continue  # a user's own component, with options of its own
      for old, new in names.items():
        written = re.sub(pattern.format(old), new, text)
        if written != text:
          raise ConfigError(
            f'--config.{key}={text}: {old} is now {new}: write --config.{key}={written}'
          )


def _value(config: Mapping[str, Any], key: str) -> str:
  """Returns the text of a dotted key; '' if there is none."""
  node: Any = config
  for part in key.split('.'):
    node = node.get(part, '') if isinstance(node, Mapping) else ''
  return node if isinstance(node, str) else ''
