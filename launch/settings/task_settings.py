"""Resolve which rows the tasks of environment tags and evaluation sets come from.

A tag takes the run's data set, except for what `env.<tag>.dataset` says. An evaluation
set takes what it leaves open from its tag and from `eval`. Without `eval.sets`, each
tag is a set of its own name.
"""

from collections.abc import Mapping
from typing import Any

from configs import base
from jaxrl.call_strings import ConfigError, defaults, unknown_name_error
from launch.settings.call_syntax import parse_call, parse_row_sources, parse_setting
from launch.settings.component_calls import parse_row_keys
from launch.settings.run_settings import EvalSetSettings, EvalSettings, TaskSettings

Data = Mapping[str, Any]  # a config, or a section of one, as plain data


def tag_dataset(data: Data, tag: str) -> dict[str, Any]:
  """Returns a tag's `dataset` section, with the run's values for what it leaves open.

  Args:
    data: The config as plain data.
    tag: The environment tag.

  Raises:
    ConfigError: If the section has an unknown key.
  """
  known = defaults(base.tag_dataset_options)
  section = data['env'][tag].get('dataset', {})
  _check_keys(section, known, f'config.env.{tag}.dataset')
  return _inherit(section, {key: data['dataset'][key] for key in known})


def parse_tag_dataset(data: Data, tag: str) -> TaskSettings:
  """Parses a tag's `dataset` section.

  Args:
    data: The config as plain data.
    tag: The environment tag.

  Raises:
    ConfigError: If a text cannot be read.
  """
  section, tag_section = tag_dataset(data, tag), data['env'][tag].get('dataset', {})

  def where(key: str) -> str:
    return (
      f'env.{tag}.dataset.{key}' if _is_set(tag_section.get(key)) else f'dataset.{key}'
    )

  return TaskSettings(
    path=parse_setting(where('path'), section['path'], parse_row_sources),
    split=section['split'],
    limit=section['limit'],
    **_parse_task_keys(section['keys'], where('keys')),
    curriculum=parse_setting(where('curriculum'), section['curriculum'], parse_call),
  )


def eval_sets(data: Data) -> dict[str, dict[str, Any]]:
  """Returns the evaluation sets by name, each with a value for every key.

  Args:
    data: The config as plain data.

  Raises:
    ConfigError: If a set has an unknown key, or names no environment tag.
  """
  run, known = data['eval'], defaults(base.eval_set_options)
  named: Data = run.get('sets', {}) or {tag: {'tag': tag} for tag in data['env']}
  filled = {}
  for name, section in named.items():
    where = f'config.eval.sets.{name}'
    _check_keys(section, known, where)
    tag = section.get('tag') or (next(iter(data['env'])) if data['env'] else '')
    if tag not in data['env'] or (len(data['env']) > 1 and not section.get('tag')):
      raise unknown_name_error(
        section.get('tag', ''), data['env'], 'environment tag', f'--{where}.tag'
      )
    dataset = tag_dataset(data, tag)
    has_own_path = _is_set(data['env'][tag].get('dataset', {}).get('path'))
    filled[name] = _inherit(
      section,
      {
        'tag': tag,
        'path': '' if has_own_path else run['path'],
        'keys': dataset['keys'],
        **{key: run[key] for key in known if key not in ('tag', 'path', 'keys')},
      },
    )
  return filled


def parse_eval(data: Data) -> EvalSettings:
  """Parses the section `eval`.

  Args:
    data: The config as plain data.

  Raises:
    ConfigError: If a text cannot be read, or a set has no environment.
  """
  own_sets = data['eval'].get('sets', {})
  sets = {}
  for name, section in eval_sets(data).items():
    set_section = own_sets.get(name, {})
    key = f'eval.sets.{name}.path' if _is_set(set_section.get('path')) else 'eval.path'
    path = parse_setting(key, section.pop('path'), parse_row_sources)
    is_own = set_section.get('keys') not in (None, '', data['dataset']['keys'])
    key = f'eval.sets.{name}.keys' if is_own else 'dataset.keys'
    keys = _parse_task_keys(section.pop('keys'), key)
    sets[name] = EvalSetSettings(path=path, **keys, **section)
  return EvalSettings(sets)


def _parse_task_keys(text: str, where: str) -> dict[str, str]:
  """Returns the keys of a question and of an answer, under the names of settings."""
  keys = parse_row_keys(text, where)
  for term in text.split(',') if where != 'dataset.keys' else ():
    name = term.partition('=')[0].strip()
    if name not in ('question', 'answer', ''):
      raise ConfigError(
        f'--config.{where}={text}: a task has a question and an answer, and no {name}'
      )
  return {key: keys[key] for key in ('question_key', 'answer_key')}


def _check_keys(section: Data, known: Data, where: str) -> None:
  for key in section:
    if key not in known:
      raise unknown_name_error(key, known, 'key', where)


def _inherit(section: Data, inherited: Data) -> dict[str, Any]:
  """Returns `inherited`, with the values that `section` sets in their place."""
  return {
    **inherited,
    **{key: value for key, value in section.items() if _is_set(value)},
  }


def _is_set(value: Any) -> bool:
  return value is not None and value != ''
