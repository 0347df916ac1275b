"""Resolve a config into `RunSettings`: the one place that reads a `ConfigDict`.

Call strings are parsed here and in the modules beside this one. What the settings must
satisfy together is checked by `launch.settings.validation`.
"""

import copy
import copyreg
import dataclasses
import datetime
import logging
import pathlib
import warnings
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from configs import base
from jaxrl.algorithms import requirements
from jaxrl.call_strings import ConfigError, defaults, unknown_name_error
from jaxrl.config import Config
from jaxrl.data.chat_tokenizer import ChatOptions
from jaxrl.data.store import store_options
from jaxrl.envs.graders import composite
from jaxrl.models.model_config import TOWER_TRAINING
from jaxrl.rollout.env_manager import EnvManager
from jaxrl.types import Algorithm
from launch.settings import off_policy
from launch.settings.algorithm_options import build_algorithm
from launch.settings.call_syntax import (
  naming_key,
  parse_call,
  parse_calls,
  parse_row_sources,
  parse_setting,
)
from launch.settings.cluster_settings import parse_cluster, parse_transport
from launch.settings.component_calls import (
  parse_lora,
  parse_mesh,
  parse_own_writer,
  parse_packing,
  parse_random_model,
  parse_row_keys,
  parse_sampling,
  parse_staleness_limit,
  parse_store_options,
  parse_sync_policy,
  parse_teachers,
)
from launch.settings.engine_settings import parse_engine
from launch.settings.env_options import (
  parse_env_config,
  parse_env_manager,
  parse_grader_calls,
  parse_timeouts,
)
from launch.settings.run_settings import (
  TEACHER_CHECKPOINT,
  BatchSettings,
  CheckpointSettings,
  DatasetSettings,
  DumpSettings,
  EnvSettings,
  ModelSettings,
  OptimizerSettings,
  RewardTermSettings,
  RolloutSettings,
  RunSettings,
  TaskSettings,
  TeacherSettings,
  WarmStartSettings,
  WeightSyncSettings,
)
from launch.settings.task_settings import parse_eval, parse_tag_dataset

log = logging.getLogger(__name__)

# Sections that commands add to a config.
COMMAND_SECTIONS = ('plugins', 'logging', 'trajectory_dump', 'synthesis')
FROM_DATA = 'data'  # as a teacher's checkpoint: its outputs come with the rows


def resolve_settings(
  config: Config, *, day: str = '', warn: bool = True, check_machine: bool = True
) -> RunSettings:
  """Reads a config once, and parses every call string in it.

  Args:
    config: a `ConfigDict`, or its plain data.
    day: the day of the run, unless the config sets it; '' for the clock's.
    warn: whether doubts about the algorithm are logged.
    check_machine: whether this machine must have what the run needs.

  Returns:
    The settings, with the algorithm resolved for them.

  Raises:
    ConfigError: if a value cannot be read, with the key and what would be right.
  """
  data: dict[str, Any] = config.to_dict() if hasattr(config, 'to_dict') else config
  _check_keys(data)
  options = dict(data['algorithm'])
  name = options.pop('name')
  algorithm = _build_algorithm(name, options, warn=warn)
  model = _model(data['kernels'], day, **data['model'])
  rollout = _rollout(data['model'], data['batch'], **data['rollout'])
  settings = RunSettings(
    seed=data['seed'],
    num_steps=data['num_steps'],
    num_epochs=data['num_epochs'],
    algorithm=algorithm,
    algorithm_name=name,
    algorithm_options=options,
    model=model,
    dataset=_dataset(**data['dataset']),
    batch=_batch(**data['batch']),
    optimizer=_optimizer(**data['optimizer']),
    rollout=rollout,
    weight_sync=_weight_sync(
      **data['weight_sync'],
      ray=data['cluster']['ray'],
      engine=rollout.engine,
      adapters=model.lora,
      adapters_text=data['model']['lora'],
      check_machine=check_machine,
    ),
    env={
      tag: _env(tag, parse_tag_dataset(data, tag), **section)
      for tag, section in data['env'].items()
    },
    mesh=parse_mesh(data['mesh']),
    checkpoint=_section(CheckpointSettings, data, 'checkpoint'),
    eval=parse_eval(data),
    sft=_section(WarmStartSettings, data, 'sft', path=parse_row_sources),
    teacher=_teacher(**data['teacher']),
    cluster=parse_cluster(**data['cluster']),
    trajectory_dump=(
      _dump(**data['trajectory_dump']) if 'trajectory_dump' in data else None
    ),
    config=data,
  )
  return dataclasses.replace(settings, algorithm=_fit_algorithm(settings))


def _check_keys(data: Mapping[str, Any]) -> None:
  """Refuses keys that no part of a run reads, which a config file may add.

  The options of algorithms and environments are checked where they are built.
  """
  known = base.get_config().to_dict()
  own_checks = {'algorithm', 'env', *COMMAND_SECTIONS}
  for name, section in data.items():
    if name not in known and name not in own_checks:
      raise unknown_name_error(name, known, 'key', 'config')
    if name in own_checks:
      continue
    if isinstance(known[name], dict) != isinstance(section, Mapping):
      what = 'a section' if isinstance(known[name], dict) else 'a value'
      raise ConfigError(f'config.{name}={section!r} must be {what}')
    for key in section if isinstance(section, Mapping) else ():
      if key not in known[name]:
        raise unknown_name_error(key, known[name], 'key', f'config.{name}')
  manager_options = defaults(EnvManager).keys() - set(base.SHARED_OPTIONS)
  tag_keys = manager_options | defaults(base.env_tag_options).keys()
  tag_keys |= {'env_type', 'env_config', 'dataset'}
  for tag, section in data['env'].items():
    for key in section:
      if key not in tag_keys:
        raise unknown_name_error(key, tag_keys, 'key', f'config.env.{tag}')


def _pickle_as_config(settings: RunSettings) -> Any:
  """Pickles as the config: algorithms may hold functions of a user's own file."""
  return _resolve_again, (settings.config,)


def _resolve_again(config: Mapping[str, Any]) -> RunSettings:
  """Resolves, in another process, what the launcher has resolved and checked."""
  return resolve_settings(config, warn=False, check_machine=False)


copyreg.pickle(RunSettings, _pickle_as_config)


def override_settings(
  settings: RunSettings, overrides: Mapping[str, Any]
) -> RunSettings:
  """Returns the settings of the same config with other values for some keys.

  Args:
    settings: settings of the run.
    overrides: values by dotted key.

  Raises:
    ConfigError: if a value cannot be read.
  """
  data: dict[str, Any] = copy.deepcopy(dict(settings.config))
  for key, value in overrides.items():
    *parents, last = key.split('.')
    node = data
    for part in parents:
      node = node[part]
    node[last] = value
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


def _dataset(
  *,
  path: str,
  curriculum: str,
  experience_store: str,
  expert_path: str,
  keys: str,
  **fields: Any,
) -> DatasetSettings:
  store = None
  if experience_store:
    store = parse_store_options(
      experience_store, store_options.reader_options, 'dataset.experience_store'
    )
  key = 'dataset.expert_path'
  return DatasetSettings(
    path=parse_setting('dataset.path', path, parse_row_sources),
    curriculum=parse_setting('dataset.curriculum', curriculum, parse_call),
    expert_path=parse_setting(key, expert_path, parse_row_sources),
    experience_store=store,
    **parse_row_keys(keys),
    **fields,
  )


def _weight_sync(*, policy: str, transport: str, **options: Any) -> WeightSyncSettings:
  return WeightSyncSettings(
    policy=parse_sync_policy(policy), transport=parse_transport(transport, **options)
  )


def _dump(*, path: str, columns: Any, save_arrays: bool = True) -> DumpSettings:
  store = None
  if store_options.is_store_path(path):
    store = parse_store_options(
      path, store_options.writer_options, 'trajectory_dump.path'
    )
  writer = parse_own_writer(path)
  return DumpSettings(path, tuple(columns), save_arrays, store, writer)


def _section(
  cls: Any, data: Mapping[str, Any], name: str, **parsers: Callable[[str], Any]
) -> Any:
  """Returns a section of the config as a dataclass that has the same fields.

  `parsers` read the texts of some of them.
  """
  fields = {field.name for field in dataclasses.fields(cls)}
  for key in data[name]:
    if key not in fields:
      raise unknown_name_error(key, fields, 'key', f'config.{name}')
  missing = fields - set(data[name])
  if missing:
    raise ConfigError(f'config.{name} has no {", ".join(sorted(missing))}')
  parsed = {
    key: parse_setting(f'{name}.{key}', data[name][key], parse)
    for key, parse in parsers.items()
  }
  return cls(**{**data[name], **parsed})


def _model(
  kernels: str,
  day: str,
  *,
  checkpoint: str,
  dtype: str,
  remat: str,
  lora: str,
  vision: str,
  random: str,
  chat_template: str,
  template_options: Mapping[str, Any],
  stop_token_ids: Sequence[int],
  date: str,
) -> ModelSettings:
  random_model = parse_random_model(random)  # a wrong one is an error in any case
  if vision not in TOWER_TRAINING:
    raise unknown_name_error(
      vision, TOWER_TRAINING, 'way to train a tower', '--config.model.vision'
    )
  if vision == 'lora' and not lora:
    raise ConfigError(
      '--config.model.vision=lora: adapters in the tower are those that model.lora '
      "describes: set it, as in 'lora(rank=16)'"
    )
  return ModelSettings(
    checkpoint=checkpoint,
    random=None if checkpoint else random_model,
    dtype=dtype,
    remat=parse_setting('model.remat', remat, parse_call),
    lora=parse_lora(lora),
    vision=vision,
    kernels=kernels,
    chat=ChatOptions(
      template_options=dict(template_options),
      chat_template=_read_template(chat_template),
      stop_token_ids=tuple(stop_token_ids),
      date=_read_date(date or day),
    ),
  )


def _read_date(text: str) -> datetime.date | None:
  try:
    return datetime.date.fromisoformat(text) if text else None
  except ValueError:
    raise ConfigError(
      f'--config.model.date={text}: not a day; write it as in 2026-01-31'
    ) from None


def _read_template(path: str) -> str:
  """Returns the text of a file with a chat template; '' without one."""
  if not path:
    return ''
  try:
    text = pathlib.Path(path).read_text(encoding='utf-8')
  except (OSError, ValueError) as error:
    raise ConfigError(
      f'--config.model.chat_template={path}: cannot be read: {error}'
    ) from error
  if not text.strip():
    raise ConfigError(f'--config.model.chat_template={path}: the file is empty')
  return text


def _optimizer(*, name: str, lr_schedule: str, **fields: Any) -> OptimizerSettings:
  return OptimizerSettings(
    name=parse_setting('optimizer.name', name, parse_call),
    lr_schedule=parse_setting('optimizer.lr_schedule', lr_schedule, parse_call),
    **fields,
  )


def _batch(*, length_buckets: Any, max_length: int, packing: str, **fields: Any) -> Any:
  return BatchSettings(
    max_length=max_length,
    length_buckets=tuple(length_buckets) or (max_length,),
    packing=parse_packing(packing),
    **fields,
  )


def _rollout(
  model: Mapping[str, Any],
  batch: Mapping[str, Any],
  *,
  engine: str,
  rewards: str,
  group_filter: str,
  reward_shaping: str,
  staleness_policy: str,
  sampling: str,
  **fields: Any,
) -> RolloutSettings:
  return RolloutSettings(
    engine=parse_engine(
      engine,
      max_num_seqs=fields['max_num_seqs'],
      max_length=batch['max_length'],
      dtype=model['dtype'],
    ),
    rewards=parse_rewards(rewards),
    group_filter=parse_setting('rollout.group_filter', group_filter, parse_calls),
    reward_shaping=parse_setting('rollout.reward_shaping', reward_shaping, parse_calls),
    staleness_policy=parse_staleness_limit(staleness_policy),
    **parse_sampling(sampling),
    **fields,
  )


def parse_rewards(text: str) -> tuple[RewardTermSettings, ...]:
  """Parses `rollout.rewards`, terms joined by +, each with an optional weight.

  Raises:
    ConfigError: if the text is no such sum.
  """
  with naming_key('rollout.rewards', text):
    terms = composite.grader_terms(parse_grader_calls(text))
    return tuple(RewardTermSettings(*term) for term in terms)


def _env(
  tag: str,
  tasks: TaskSettings,
  *,
  env_type: str,
  env_config: Mapping[str, Any],
  weight: float,
  max_concurrency: int,
  row_format: str,
  max_steps: int,
  max_tokens_per_step: int,
  timeouts: str,
  manager: str,
  dataset: Any = None,  # parsed as `tasks`
  **manager_options: Any,
) -> EnvSettings:
  try:
    env_options = parse_env_config(env_type, env_config, f'env.{tag}.env_config')
  except ConfigError as error:
    if f'env.{tag}' in str(error):
      raise
    raise ConfigError(f'env.{tag}: {error}') from error
  return EnvSettings(
    env_type,
    env_options,
    tasks,
    weight,
    max_concurrency,
    row_format,
    max_steps,
    max_tokens_per_step,
    parse_env_manager(manager, tag, env_type),
    {**manager_options, 'timeouts': parse_timeouts(timeouts, tag)},
  )


def _teacher(*, checkpoint: str) -> TeacherSettings:
  folders = parse_teachers(checkpoint)
  from_data = folders.get('') == FROM_DATA
  if from_data and len(folders) > 1:
    raise ConfigError(
      f"{TEACHER_CHECKPOINT}={checkpoint}: 'data' means that the rows hold "
      "the teacher's outputs, so it excludes folders: name either"
    )
  return TeacherSettings({} if from_data else folders, from_data, bool(checkpoint))
