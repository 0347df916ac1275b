"""Resolves a config into `RunSettings`: the one place that reads a `ConfigDict`.

A tag takes the run's data set, except for what `env.<tag>.dataset` says. An evaluation
set takes what it leaves open from its tag and from `eval`. Without `eval.sets`, each
tag is a set of its own name. What the settings must satisfy together is checked by
`launch.settings.validation`.
"""

import copy
import copyreg
import dataclasses
import datetime
import functools
import logging
import operator
import warnings
from collections.abc import Mapping
from typing import Any

from jaxrl.algorithms import requirements
from jaxrl.config import Config, from_config
from jaxrl.data.chat_tokenizer import ChatOptions
from jaxrl.data.store import store_options
from jaxrl.data.trajectory_writers.writer import DumpOptions
from jaxrl.envs.graders import composite
from jaxrl.options import ConfigError, error_prefix, unknown_name_error
from jaxrl.run_options import (
  EnvOptions,
  EvalSetOptions,
  ModelOptions,
  RunOptions,
  TagDatasetOptions,
)
from jaxrl.types import Algorithm
from launch.settings import off_policy
from launch.settings.cluster_settings import make_placement, make_transport
from launch.settings.component_options import (
  build_algorithm,
  check_env_manager,
  parse_env_config,
  parse_grader_calls,
)
from launch.settings.engine_settings import make_engine_settings
from launch.settings.run_settings import (
  EvalSetSettings,
  RewardTermSettings,
  RunSettings,
)

log = logging.getLogger(__name__)

# Sections that are read elsewhere: some are added to a config by commands.
OTHER_SECTIONS = ('algorithm', 'plugins', 'logging', 'trajectory_dump', 'synthesis')


def resolve_settings(
  config: Config, *, day: str = '', warn: bool = True, check_machine: bool = True
) -> RunSettings:
  """Reads a config once, and parses every call string in it.

  Args:
    config: A `ConfigDict`, or its plain data.
    day: The day of the run, unless the config sets it; '' for the clock's.
    warn: Whether doubts about the algorithm are logged.
    check_machine: Whether this machine must have what the run needs.

  Returns:
    The settings, with the algorithm resolved for them.

  Raises:
    ConfigError: If a value cannot be read, with the key and what would be right.
  """
  data: dict[str, Any] = config.to_dict() if hasattr(config, 'to_dict') else config
  options = read_options(data)
  env = {tag: _with_env_config(tag, env) for tag, env in options.env.items()}
  options = options.replace(env=env)
  algorithm_options = dict(data['algorithm'])
  name = algorithm_options.pop('name')
  engine = make_engine_settings(options)
  dump = data.get('trajectory_dump')
  settings = RunSettings(
    **options.as_dict(),
    algorithm=_build_algorithm(name, algorithm_options, warn=warn),
    algorithm_name=name,
    algorithm_options=algorithm_options,
    engine=engine,
    rewards=parse_rewards(options.rollout.rewards),
    transport=make_transport(options, engine, check_machine=check_machine),
    placement=make_placement(options.cluster),
    tasks={tag: tag_tasks(options, tag) for tag in options.env},
    evaluations=evaluation_sets(options),
    chat=_chat_options(options.model, day),
    experience_store=_experience_store(options.dataset.experience_store),
    trajectory_dump=(
      None if dump is None else from_config(DumpOptions, dump, 'trajectory_dump')
    ),
    config=data,
  )
  _build_components(settings)
  return dataclasses.replace(settings, algorithm=_fit_algorithm(settings))


def read_options(config: Config) -> RunOptions:
  """Returns the options of a config, but for those of its algorithm.

  Args:
    config: A `ConfigDict`, or its plain data.

  Raises:
    ConfigError: If a key is unknown, or its value cannot be.
  """
  own = {name: value for name, value in config.items() if name not in OTHER_SECTIONS}
  return from_config(RunOptions, own)


def _build_components(settings: RunSettings) -> None:
  """Builds what calls describe, for the errors."""
  model = settings.model
  _ = model.adapters, model.random_config, settings.batch.packing_plan
  _ = settings.weight_sync.sync_policy, settings.rollout.staleness_limit
  if settings.trajectory_dump is not None:
    _ = settings.trajectory_dump.store, settings.trajectory_dump.writer


def _with_env_config(tag: str, env: EnvOptions) -> EnvOptions:
  """Returns a tag's options with those of the environment's class parsed."""
  try:
    where = f'env.{tag}.env_config'
    env_config = parse_env_config(env.env_type, env.env_config, where)
  except ValueError as error:
    if f'env.{tag}' in str(error):
      raise
    raise ConfigError(f'env.{tag}: {error}') from error
  if env.manager is not None:
    check_env_manager(env.manager, tag, env.env_type, env_config)
  return env.replace(env_config=env_config)


def _chat_options(model: ModelOptions, day: str) -> ChatOptions:
  date = model.date or day
  return ChatOptions(
    template_options=dict(model.template_options),
    chat_template=model.read_template(),
    stop_token_ids=model.stop_token_ids,
    date=datetime.date.fromisoformat(date) if date else None,
  )


def _experience_store(text: str) -> store_options.ReaderOptions | None:
  if not text:
    return None
  return store_options.parse_store_options(
    text, store_options.ReaderOptions, 'dataset.experience_store'
  )


def parse_rewards(text: str) -> tuple[RewardTermSettings, ...]:
  """Parses `rollout.rewards`, terms joined by +, each with an optional weight.

  Raises:
    ConfigError: If the text is not such a sum.
  """
  with error_prefix(f'--config.rollout.rewards={text}'):
    terms = composite.grader_terms(parse_grader_calls(text))
    return tuple(RewardTermSettings(*term) for term in terms)


def _resolve_again(config: Mapping[str, Any]) -> RunSettings:
  """Resolves, in another process, what the launcher has resolved and checked."""
  return resolve_settings(config, warn=False, check_machine=False)


# As the config, since algorithms may hold functions of a user's own file.
copyreg.pickle(RunSettings, lambda settings: (_resolve_again, (settings.config,)))


def override_settings(
  settings: RunSettings, overrides: Mapping[str, Any]
) -> RunSettings:
  """Returns the settings of the same config with other values for some keys.

  Args:
    settings: Settings of the run.
    overrides: Values by dotted key.

  Raises:
    ConfigError: If a value cannot be read.
  """
  data: dict[str, Any] = copy.deepcopy(dict(settings.config))
  for key, value in overrides.items():
    *parents, last = key.split('.')
    functools.reduce(operator.getitem, parents, data)[last] = value
  return resolve_settings(data, warn=False)


def _build_algorithm(name: str, options: Mapping[str, Any], *, warn: bool) -> Algorithm:
  """Returns the algorithm as its options say; logs what is doubtful about it."""
  with warnings.catch_warnings(record=True) as doubts:
    warnings.simplefilter('always')
    algorithm = build_algorithm(name, options)
  for doubt in doubts if warn else ():
    log.warning('%s', doubt.message)
  return algorithm


def _fit_algorithm(settings: RunSettings) -> Algorithm:
  """Returns the algorithm with what it leaves to the run: a correction, a length."""
  algorithm = off_policy.apply_defaults(settings)
  tags = settings.training_tags if settings.plays else ()
  limits = [settings.response_limit(tag) for tag in tags]
  return requirements.with_length(algorithm, max(limits or [settings.batch.max_length]))


def tag_tasks(options: RunOptions, tag: str) -> TagDatasetOptions:
  """Returns where the tasks of an environment tag come from, with nothing left open.

  Args:
    options: The options of the run.
    tag: The environment tag.
  """
  own, run = options.env[tag].dataset, options.dataset
  return own.replace(
    path=own.path or run.path,
    split=own.split or run.split,
    limit=run.limit if own.limit is None else own.limit,
    columns=own.columns.or_else(run.columns),
    curriculum=own.curriculum or run.curriculum,
  )


def evaluation_sets(options: RunOptions) -> dict[str, EvalSetSettings]:
  """Returns the evaluation sets by name, with what they leave open filled in.

  Args:
    options: The options of the run.

  Raises:
    ConfigError: If a set names no environment tag.
  """
  run = options.eval
  sets = run.sets or {tag: EvalSetOptions(tag=tag) for tag in options.env}
  filled = {}
  for name, own in sets.items():
    tag = own.tag or next(iter(options.env), '')
    if tag not in options.env or (len(options.env) > 1 and not own.tag):
      key = f'--config.eval.sets.{name}.tag'
      raise unknown_name_error(own.tag, options.env, 'environment tag', key)
    rows = options.env[tag].dataset
    open_fields = {
      field: getattr(run, field)
      for field in ('num_tasks', 'group_size', 'temperature', 'interval')
      if getattr(own, field) is None
    }
    choices = {
      'tag': tag,
      'path': own.path or ('' if rows.path else run.path),
      'split': own.split or run.split,
      'columns': own.columns.or_else(rows.columns).or_else(options.dataset.columns),
    }
    filled[name] = EvalSetSettings(**own.as_dict() | choices | open_fields)
  return filled
