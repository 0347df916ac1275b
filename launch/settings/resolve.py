"""Resolve a config into `RunSettings`: the one place that reads a `ConfigDict`.

Call strings are parsed here and in the modules beside this one. What the settings must
satisfy together is checked by `launch.settings.validation`.
"""

import copy
import copyreg
import dataclasses
import logging
import warnings
from collections.abc import Mapping
from typing import Any

from jaxrl import model_loading as policies
from jaxrl.algorithms import registry, requirements
from jaxrl.call_strings import ConfigError, unknown_name_error
from jaxrl.config import Config
from jaxrl.data.store import store_options
from jaxrl.envs.graders import composite
from jaxrl.types import Algorithm
from launch.settings import off_policy
from launch.settings.cluster_settings import parse_cluster
from launch.settings.component_calls import (
  parse_lora,
  parse_packing,
  parse_staleness_limit,
  parse_store_options,
  parse_sync_policy,
)
from launch.settings.engine_settings import parse_engine
from launch.settings.run_settings import (
  TEACHER_BY_TAG,
  TEACHER_CHECKPOINT,
  BatchSettings,
  CheckpointSettings,
  DatasetSettings,
  DumpSettings,
  EnvSettings,
  EvalSettings,
  FileSettings,
  MeshSettings,
  ModelSettings,
  OptimizerSettings,
  RewardTermSettings,
  RolloutSettings,
  RunSettings,
  TeacherSettings,
  WarmStartSettings,
)

log = logging.getLogger(__name__)

FROM_DATA = 'data'  # as a teacher's checkpoint: its outputs come with the rows


def resolve_settings(
  config: Config, *, warn: bool = True, check_machine: bool = True
) -> RunSettings:
  """Reads a config once, and parses every call string in it.

  Args:
    config: a `ConfigDict`, or its plain data.
    warn: whether doubts about the algorithm are logged.
    check_machine: whether this machine must have what the run needs.

  Returns:
    The settings, with the algorithm resolved for them.

  Raises:
    ConfigError: if a value cannot be read, with the key and what would be right.
  """
  data: dict[str, Any] = config.to_dict() if hasattr(config, 'to_dict') else config
  options = dict(data['algorithm'])
  name = options.pop('name')
  algorithm = _build_algorithm(name, options, warn=warn)
  model = _model(data['kernels'], **data['model'])
  rollout = _rollout(data['model'], data['batch'], **data['rollout'])
  settings = RunSettings(
    seed=data['seed'],
    num_steps=data['num_steps'],
    num_epochs=data['num_epochs'],
    algorithm=algorithm,
    algorithm_name=name,
    algorithm_options=options,
    model=model,
    dataset=_section(DatasetSettings, data, 'dataset'),
    experience_store=_experience_store(data['data']['source']),
    batch=_batch(**data['batch']),
    optimizer=_section(OptimizerSettings, data, 'optimizer'),
    rollout=rollout,
    env={tag: _env(**section) for tag, section in data['env'].items()},
    mesh=_section(MeshSettings, data, 'mesh'),
    checkpoint=_section(CheckpointSettings, data, 'checkpoint'),
    eval=_section(EvalSettings, data, 'eval'),
    files=_section(FileSettings, data, 'files'),
    sft=_section(WarmStartSettings, data, 'sft'),
    expert_path=data['expert']['path'],
    teacher=_teacher(**data['teacher']),
    cluster=parse_cluster(
      **data['cluster'],
      engine=rollout.engine,
      adapters=model.lora,
      adapters_text=data['model']['lora'],
      check_machine=check_machine,
    ),
    dump=_dump(**data['dump']) if 'dump' in data else None,
    config=data,
  )
  return dataclasses.replace(settings, algorithm=_fit_algorithm(settings))


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
    algorithm = registry.make(name, dict(options))
  for doubt in doubts if warn else ():
    log.warning('%s', doubt.message)
  return algorithm


def _fit_algorithm(settings: RunSettings) -> Algorithm:
  """Returns the algorithm with what it leaves to the run: a correction, a length."""
  algorithm = off_policy.apply_defaults(settings)
  tags = settings.env if settings.plays else ()
  limits = [settings.response_limit(tag) for tag in tags]
  return requirements.with_length(algorithm, max(limits or [settings.batch.max_length]))


def _experience_store(text: str) -> store_options.ReaderOptions | None:
  if not text:
    return None
  return parse_store_options(text, store_options.reader_options, 'data.source')


def _dump(*, path: str, columns: Any) -> DumpSettings:
  store = None
  if store_options.is_store_path(path):
    store = parse_store_options(path, store_options.writer_options, 'dump.path')
  return DumpSettings(path, tuple(columns), store)


def _section(cls: Any, data: Mapping[str, Any], name: str) -> Any:
  """Returns a section of the config as a dataclass that has the same fields."""
  fields = {field.name for field in dataclasses.fields(cls)}
  for key in data[name]:
    if key not in fields:
      raise unknown_name_error(key, fields, 'key', f'config.{name}')
  missing = fields - set(data[name])
  if missing:
    raise ConfigError(f'config.{name} has no {", ".join(sorted(missing))}')
  return cls(**data[name])


def _model(
  kernels: str,
  *,
  checkpoint: str,
  dtype: str,
  remat: str,
  lora: str,
  random: Mapping[str, Any],
) -> ModelSettings:
  return ModelSettings(
    checkpoint=checkpoint,
    random=None if checkpoint else policies.random_config(**random),
    dtype=dtype,
    remat=remat,
    lora=parse_lora(lora),
    kernels=kernels,
  )


def _batch(*, buckets: Any, max_length: int, packing: str, **fields: Any) -> Any:
  return BatchSettings(
    max_length=max_length,
    buckets=tuple(buckets) or (max_length,),
    packing=parse_packing(packing),
    **fields,
  )


def _rollout(
  model: Mapping[str, Any],
  batch: Mapping[str, Any],
  *,
  engine: str,
  rewards: str,
  sync: str,
  staleness: str,
  **fields: Any,
) -> RolloutSettings:
  return RolloutSettings(
    engine=parse_engine(
      engine,
      num_slots=fields['num_slots'],
      max_length=batch['max_length'],
      dtype=model['dtype'],
    ),
    rewards=parse_rewards(rewards),
    sync=parse_sync_policy(sync),
    staleness=parse_staleness_limit(staleness),
    **fields,
  )


def parse_rewards(text: str) -> tuple[RewardTermSettings, ...]:
  """Parses `rollout.rewards`, terms joined by +, each with an optional weight.

  Raises:
    ConfigError: if the text is no such sum.
  """
  try:
    return tuple(RewardTermSettings(*term) for term in composite.grader_terms(text))
  except ConfigError as error:
    raise ConfigError(f'--config.rollout.rewards={text}: {error}') from error


def _env(
  *,
  env_type: str,
  env_config: Mapping[str, Any],
  share: float,
  concurrency: int,
  formulation: str,
  max_steps: int,
  max_tokens_per_step: int,
  **manager_options: Any,
) -> EnvSettings:
  return EnvSettings(
    env_type,
    env_config,
    share,
    concurrency,
    formulation,
    max_steps,
    max_tokens_per_step,
    manager_options,
  )


def _teacher(*, checkpoint: str, by_tag: str) -> TeacherSettings:
  """Reads `teacher.by_tag`, as in 'gsm8k=FOLDER, lake=FOLDER', and the default."""
  folders: dict[str, str] = {}
  for item in filter(str.strip, by_tag.split(',')):
    tag, _, folder = (part.strip() for part in item.partition('='))
    if not (tag and folder) or tag in folders:
      raise ConfigError(
        f'{TEACHER_BY_TAG}={by_tag}: write tag=FOLDER, tag=FOLDER, each tag once'
      )
    folders[tag] = folder
  from_data = checkpoint == FROM_DATA
  if from_data and folders:
    raise ConfigError(
      f'{TEACHER_CHECKPOINT}=data: then there is no teacher, {TEACHER_BY_TAG}={by_tag}'
    )
  if checkpoint and not from_data:
    folders[''] = checkpoint
  return TeacherSettings(folders, from_data, bool(checkpoint or by_tag))
