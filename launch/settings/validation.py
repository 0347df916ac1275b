"""Validates the settings of a run as a whole, before any work.

`resolve_settings` has already parsed every call string; here numbers are checked
against their ranges and settings against each other.
"""

from collections.abc import Iterator, Mapping

from jaxrl.algorithms import requirements
from jaxrl.component_calls import ComponentCall
from jaxrl.component_table import join_calls
from jaxrl.data import hub, samplers
from jaxrl.data.curricula import CURRICULA, check_curriculum_class
from jaxrl.data.dataset import GlobalDataset
from jaxrl.data.rows.task_rows import USUAL_COLUMNS
from jaxrl.envs.env_registry import env_factory, find_env, unwrapped, uses_dataset
from jaxrl.functional import components
from jaxrl.models import huggingface, remat
from jaxrl.options import ConfigError, defaults, error_prefix, unknown_name_error
from jaxrl.rollout.queue.group_allocation import allocate_groups
from jaxrl.rollout.queue.group_filters import make_group_filter
from jaxrl.rollout.queue.reward_shaping import make_reward_shaper
from jaxrl.training import batch_fields
from jaxrl.training.batching import packing_plan
from jaxrl.training.optimizers import make_optimizer
from jaxrl.types import Algorithm
from launch.settings.engine_settings import check_engine
from launch.settings.off_policy import validate_off_policy
from launch.settings.run_settings import TEACHER_CHECKPOINT, RunSettings, teacher_key

# Columns that only rollouts can fill, and what they are.
ROLLOUT_COLUMNS = {
  'rollout_logprobs': 'the log-probs that tokens were sampled with',
  'weights_version': 'the weights version of each token',
  'greedy_mask': 'a greedy attempt at each task',
  'state_hash': 'what the environment showed at each turn',
  'reward_terms': 'the scores of its rewards, one by one',
  'role_ids': 'the role of its agent',
}


def validate(settings: RunSettings) -> None:
  """Runs every check that is possible before data and models are loaded.

  Raises:
    ConfigError: For a setting that cannot be, with its key.
  """
  validate_consistency(settings)
  _validate_checkpoint(settings)
  _validate_curriculum(settings)
  _validate_row_options(settings)
  _validate_offline(settings)
  if settings.plays or settings.evaluates:
    _validate_rollouts(settings)
    check_engine(settings)


def validate_training(settings: RunSettings) -> None:
  """Checks what only a run that trains needs: sampler, teachers, experience store.

  Raises:
    ConfigError: For a setting that cannot be, with its key.
  """
  if settings.plays and not settings.rollout.temperature:
    raise settings.refusal(
      'rollout.temperature',
      'must be above 0, as the policy is trained on what it samples',
    )
  read = requirements.fields_read(settings.algorithm)
  if 'sum_pi_squared' in read and settings.rollout.temperature != 1:
    raise settings.refusal(
      'rollout.temperature',
      'the algorithm reads sum_pi_squared, which is that of temperature 1',
    )
  if settings.plays:
    validate_sampling(settings)
  _validate_sampler(settings)
  validate_teachers(settings)
  _validate_store(settings)


def validate_sampling(settings: RunSettings) -> None:
  """Checks that samples which are trained on are drawn from all tokens.

  Raises:
    ConfigError: For a sampling rule that leaves tokens out.
  """
  for key, all_tokens in (('top_p', 1), ('top_k', 0)):
    if getattr(settings.rollout, key) != all_tokens:
      raise settings.refusal(
        f'rollout.{key}',
        'the learner cannot recompute the log-probs of tokens that were sampled from a '
        f'part of the vocabulary. Train with {key}={all_tokens}, and lower '
        'rollout.temperature instead',
      )


def validate_consistency(settings: RunSettings) -> None:
  """Checks the settings against each other; needs neither files nor packages.

  Raises:
    ConfigError: For settings that exclude each other.
  """
  algorithm = settings.algorithm
  if not (settings.num_steps or settings.num_epochs or settings.sft.num_steps):
    raise settings.refusal('num_steps', 'there is nothing to do')
  size = algorithm.group_size
  if size < 1:
    raise ConfigError(f'--config.algorithm.group_size={size}: must be at least 1')
  if settings.plays and not 0 <= settings.rollout.min_group_size <= size:
    raise settings.refusal(
      'rollout.min_group_size',
      f'must be in [0, {size}], as a group has {size} samples',
    )
  if 'values' in requirements.needs(algorithm) and algorithm.value_loss is None:
    raise ConfigError(
      f'algorithm {settings.algorithm_name} reads the values of a critic, but '
      'has no loss to train one: set --config.algorithm.value_loss=value_loss'
    )
  _validate_learner_components(settings)
  _validate_batch(settings)
  validate_off_policy(settings)
  if settings.plays:
    check_engine(settings, installed=False)


def _validate_learner_components(settings: RunSettings) -> None:
  """Builds what a learner will build, for the errors."""
  remat.policy(settings.model.remat)
  try:
    # A decay without `decay_steps` ends with the run, however many steps that has.
    make_optimizer(settings.optimizer, num_steps=1)
  except ConfigError:
    raise
  except ValueError as error:
    raise ConfigError(f'--config.optimizer: {error}') from error


def _validate_engine_rounding(settings: RunSettings) -> None:
  if not settings.batch.engine_rounding:
    return
  where = '--config.batch.engine_rounding=true'
  if settings.engine.weights_format is None:
    raise ConfigError(
      f'{where}: the engine {settings.quote("rollout.engine")} has no 8-bit weights: '
      "set jax(weights_dtype='int8'), or leave engine_rounding out"
    )
  if settings.model.adapters:
    raise ConfigError(
      f'{where}: the engine rounds weights with adapters merged into them, which the '
      f'learner keeps apart ({settings.quote("model.lora")}): leave one of the two out'
    )


def _validate_batch(settings: RunSettings) -> None:
  batch, exact = settings.batch, settings.engine.exact
  _validate_engine_rounding(settings)
  if settings.model.adapters and exact:
    raise settings.refusal(
      'model.lora',
      'adapters and exact engines exclude each other: an exact engine serves the '
      'trained weights themselves, but adapters are merged into new ones. Set one of '
      'the two',
    )
  if batch.packing_plan is not None:
    packing_plan.check_packing(
      batch.packing_plan,
      exact=settings.plays and exact is not None,
      context=settings.mesh.context,
      num_micro_batches=max(1, batch.num_micro_batches),
    )


def _validate_checkpoint(settings: RunSettings) -> None:
  folder = settings.model.checkpoint
  with error_prefix(settings.quote('model.checkpoint'), OSError):
    if folder:
      huggingface.load_config(hub.find_checkpoint(folder, only_config=True))


def _validate_rollouts(settings: RunSettings) -> None:
  if not settings.env:
    raise ConfigError('config.env has no environment: give it at least one tag')
  if settings.plays:
    shares = {tag: settings.env[tag].weight for tag in settings.training_tags}
    if not shares:
      raise ConfigError(
        f'--config.env.{next(iter(settings.env))}.weight=0: no tag is left to train '
        'on: give one a weight above 0'
      )
    allocate_groups(settings.batch.num_groups, shares)
  for tag, env in settings.env.items():
    with error_prefix(f'env.{tag}'):
      env_factory(env.env_type, env.env_config)
    _validate_tag_dataset(settings, tag)
    _validate_formulation(settings, tag)
    _validate_replay(settings, tag)
  for name in settings.active_evaluations:
    _validate_evaluation_end(settings, name)
  _validate_group_pipeline(settings)


def _validate_tag_dataset(settings: RunSettings, tag: str) -> None:
  """Refuses options of rows for a tag whose tasks are seeds."""
  env, section = settings.env[tag], settings.text(f'env.{tag}').get('dataset', {})
  # Those that eval.interval=0 switches off for now count too.
  evaluated = {evaluation.tag for evaluation in settings.evaluations.values()}
  if settings.plays and not env.weight and tag not in evaluated:
    raise ConfigError(
      f'--config.env.{tag}.weight=0: the tag is neither trained on nor evaluated: '
      'give it a weight above 0, or an evaluation set'
    )
  if uses_dataset(env.env_type, env.env_config):
    return
  for key in _set_keys(section, f'env.{tag}.dataset'):
    why = f'environment {env.env_type} takes its tasks from seeds'
    raise settings.no_effect(key, why)


def _set_keys(section: Mapping[str, object], name: str) -> Iterator[str]:
  """Yields the dotted keys of a section that are not left open, '' or None."""
  for key, value in section.items():
    if isinstance(value, dict):
      yield from _set_keys(value, f'{name}.{key}')
    elif value not in ('', None):
      yield f'{name}.{key}'


def _validate_evaluation_end(settings: RunSettings, name: str) -> None:
  """Refuses an evaluation without end, of all tasks of a tag whose tasks are seeds."""
  evaluation = settings.evaluations[name]
  tag, count = evaluation.tag, evaluation.num_tasks
  env = settings.env[tag]
  if count < 1 and not uses_dataset(env.env_type, env.env_config):
    is_named = name in settings.text('eval').get('sets', {})
    key = f'eval.sets.{name}.num_tasks' if is_named else 'eval.num_tasks'
    raise ConfigError(
      f'--config.{key}={count}: env.{tag} makes its tasks from seeds, without end: '
      'set the number of tasks of an evaluation'
    )


def _validate_formulation(settings: RunSettings, tag: str) -> None:
  """Refuses shared rows where turns must be told apart or scored exactly."""
  if settings.env[tag].row_format != 'concatenated':
    return
  key = f'env.{tag}.row_format'
  if requirements.row_format(settings.algorithm) == 'step':
    name = settings.algorithm_name
    raise settings.refusal(
      key, f"algorithm {name} needs each turn in its own row: set 'step'"
    )
  if settings.engine.exact is not None:
    raise settings.refusal(
      key,
      "an exact engine needs each sequence in its own row: set 'auto', or leave exact "
      'out of rollout.engine',
    )


def _validate_replay(settings: RunSettings, tag: str) -> None:
  """Checks that training plays, turn by turn, the episodes that shall come again."""
  env = settings.env[tag]
  for key in ('num_seeds', 'prefixes'):
    if not getattr(env, key):
      continue
    key = f'env.{tag}.{key}'
    if not (settings.plays and env.weight) or settings.experience_store is not None:
      raise settings.no_effect(key, 'training does not play this tag')
    if env.manager is not None:
      raise settings.refusal(
        key, f'env.{tag}.manager={env.manager} plays in its own way: leave one out'
      )
    inner = unwrapped(env.env_type, env.env_config)
    if any(
      getattr(e, 'played_by_agent', False) for e in (inner, find_env(env.env_type))
    ):
      raise settings.refusal(
        key,
        f'environment {env.env_type} is played by an agent of its own, whose turns '
        'nobody else can replay',
      )
    if getattr(inner, 'num_players', 1) > 1:
      raise settings.refusal(
        key,
        f'environment {env.env_type} has several players, whose games do not come '
        'again: leave it out',
      )
  from_rows = uses_dataset(env.env_type, env.env_config)
  if env.num_seeds and from_rows:
    raise settings.no_effect(
      f'env.{tag}.num_seeds',
      f'environment {env.env_type} takes its tasks from rows, which come again; see '
      'dataset.limit',
    )
  if env.prefixes is not None:
    _validate_prefixes(settings, tag, env.prefixes, from_rows=from_rows)


def _validate_prefixes(
  settings: RunSettings, tag: str, prefixes: ComponentCall, *, from_rows: bool
) -> None:
  """Checks that tasks come again, have several turns, and can be replayed."""
  env, key = settings.env[tag], f'env.{tag}.prefixes'
  if not from_rows and not env.num_seeds:
    raise settings.refusal(
      key,
      f'the tasks of environment {env.env_type} are seeds, none of which comes again: '
      f'set --config.env.{tag}.num_seeds to how many there are to be',
    )
  if env.max_steps < 2:
    raise settings.refusal(
      key,
      'whole turns are replayed, and an episode has one: '
      + settings.quote(f'env.{tag}.max_steps'),
    )
  reason = getattr(unwrapped(env.env_type, env.env_config), 'not_replayable', '')
  if reason:
    raise settings.refusal(key, f'environment {env.env_type} {reason}')
  # Imported here because few runs replay anything.
  from jaxrl.rollout.queue.prefix_samplers import PREFIX_SAMPLERS

  PREFIX_SAMPLERS.build(prefixes, where=settings.quote(key))


def _validate_group_pipeline(settings: RunSettings) -> None:
  """Checks what happens to groups between being played and being trained on."""
  group_size = settings.algorithm.group_size if settings.plays else None
  text = join_calls(settings.group_filters)
  with error_prefix(f'--config.rollout.group_filter={text}'):
    make_group_filter(
      settings.group_filters, settings.config, {}, group_size=group_size
    )
  text = join_calls(settings.reward_shapers)
  limits = {'max_length': settings.batch.max_length}
  with error_prefix(f'--config.rollout.reward_shaping={text}'):
    make_reward_shaper(settings.reward_shapers, limits)


def _validate_curriculum(settings: RunSettings) -> None:
  """Refuses a curriculum where no rows are played that it could choose among."""
  plays = settings.plays and settings.experience_store is None
  tags = settings.training_tags if plays else []
  users = [
    settings.tasks[tag].curriculum
    for tag in tags
    if uses_dataset(settings.env[tag].env_type, settings.env[tag].env_config)
  ]
  chosen = {'dataset.curriculum': settings.dataset.curriculum}
  for tag, env in settings.env.items():
    if env.dataset.curriculum is not None:
      chosen[f'env.{tag}.dataset.curriculum'] = env.dataset.curriculum
  for key, curriculum in chosen.items():
    where = settings.quote(key)
    _, found, _ = CURRICULA.find(curriculum, where)
    check_curriculum_class(found, where)
    is_default = str(curriculum) == defaults(GlobalDataset)['curriculum']
    if not is_default and curriculum not in users:
      raise settings.no_effect(
        key, 'no environment of this run takes its tasks from the data set'
      )


def _validate_row_options(settings: RunSettings) -> None:
  """Refuses options of rows where nothing reads rows."""
  data = settings.dataset
  if data.expert_path and not _reads_experts(settings):
    raise settings.no_effect(
      'dataset.expert_path',
      'only samplers that mix expert rows with rollouts read it',
    )
  if data.system_prompt and not _reads_conversations(settings):
    raise settings.no_effect(
      'dataset.system_prompt',
      'it is the system message of conversations from files, and this run trains on '
      'none. For episodes, set --config.env.TAG.system_template',
    )
  paths = [data.path, data.expert_path, settings.sft.path]
  paths += [tasks.path for tasks in settings.tasks.values()]
  paths += [evaluation.path for evaluation in settings.evaluations.values()]
  for name, key in data.columns.as_dict().items():
    if key != getattr(USUAL_COLUMNS, name) and not any(paths):
      raise settings.no_effect(f'dataset.columns.{name}', 'this run reads no rows')


def _reads_experts(settings: RunSettings) -> bool:
  """Returns whether the sampler mixes rows that experts wrote with rollouts."""
  sampler = settings.algorithm.sampler
  return settings.plays and samplers.find_sampler(sampler)[0].reads_experts


def _reads_conversations(settings: RunSettings) -> bool:
  """Returns whether conversations or pairs from files are trained on."""
  return bool(
    settings.sft.num_steps
    or settings.algorithm.data_format in ('messages', 'preference')
    or _reads_experts(settings)
  )


def _validate_offline(settings: RunSettings) -> None:
  """Checks that files can give the algorithm what it learns from."""
  name, algorithm = settings.algorithm_name, settings.algorithm
  if settings.plays:
    if settings.num_epochs:
      raise settings.refusal(
        'num_epochs',
        f'counts passes over files, and {name} learns from rollouts: set '
        '--config.num_steps, or use an algorithm that learns from files',
      )
    return
  data_format = algorithm.data_format
  where = f'algorithm {name}'
  if not settings.dataset.path:
    raise ConfigError(f'{where} learns from files: set --config.dataset.path=…')
  if algorithm.batch_unit == 'pair' and data_format != 'preference':
    raise ConfigError(
      f"{where} compares pairs, which only data_format='preference' has, not "
      f'{data_format!r}'
    )
  for column in sorted(ROLLOUT_COLUMNS.keys() & _required_columns(algorithm)):
    raise ConfigError(
      f'{where} needs {ROLLOUT_COLUMNS[column]}, which files do not have'
    )
  reads_old = 'old_logprobs' in requirements.fields_read(algorithm)
  if reads_old and algorithm.old_logprobs_source == 'rollout':
    raise ConfigError(
      f'{where} needs the log-probs that tokens were sampled with, which files do not '
      "have; with old_logprobs_source='decoupled' in its Algorithm, the learner "
      'computes them before the update'
    )
  for key, calls in (
    ('group_filter', settings.group_filters),
    ('reward_shaping', settings.reward_shapers),
  ):
    if calls:
      raise ConfigError(
        f'--config.rollout.{key}={join_calls(calls)}: has no effect here: {name} '
        "learns from files and plays nothing; 'none' removes what the algorithm itself "
        'brings'
      )


def _required_columns(algorithm: Algorithm) -> set[str]:
  """Returns the columns without which some component of the algorithm cannot do."""
  parts = requirements.components_of(algorithm).values()
  read = {name for part in parts for name in components.fields_of(part, required=True)}
  ranks = any(components.options_of(part).get('rank_penalty') for part in parts)
  return read | ({'rollout_logprobs'} if ranks else set())


def _validate_sampler(settings: RunSettings) -> None:
  if settings.plays:
    samplers.find_sampler(settings.algorithm.sampler)
  elif settings.algorithm_options['sampler']:
    raise settings.no_effect(
      'algorithm.sampler',
      f'algorithm {settings.algorithm_name} reads all of its rows from files, in their '
      'own order',
    )


def validate_teachers(settings: RunSettings) -> None:
  """Checks that the algorithm and the config agree about teachers.

  Raises:
    ConfigError: For a teacher that is not asked for, one that is missing, or an unknown
      tag.
  """
  name, teacher = settings.algorithm_name, settings.teacher
  if not batch_fields.teacher_fields(settings.algorithm):
    _refuse_teachers(settings, f'algorithm {name} does not use a teacher')
    return
  batch_fields.teacher_top_k(settings.algorithm)
  if settings.algorithm.self_teacher is not None:
    _validate_self_teacher(settings)
    return
  if not teacher.named:
    raise ConfigError(
      f'algorithm {name} needs a teacher: set {TEACHER_CHECKPOINT}=FOLDER'
    )
  if settings.plays:
    for tag in filter(None, teacher.folders):
      if tag not in settings.env:
        raise unknown_name_error(
          tag, settings.env, 'environment tag', '--config.teacher.by_tag'
        )
    for tag in settings.training_tags:
      if not teacher.from_data and not {'', tag} & teacher.folders.keys():
        # Imported here because only algorithms that distill have teachers.
        from jaxrl.training.teacher_scoring import missing_teacher_error

        raise missing_teacher_error(repr(tag), tag, teacher.folders)


def _refuse_teachers(settings: RunSettings, why: str) -> None:
  """Raises ConfigError if a teacher is named, and says why that has no effect."""
  teacher = settings.teacher
  for tag, folder in {'': teacher.checkpoint, **teacher.by_tag}.items():
    if folder:
      raise ConfigError(f'{teacher_key(tag)}={folder}: has no effect here: {why}')


def _validate_self_teacher(settings: RunSettings) -> None:
  """Checks that a run can have the self-teacher of its algorithm.

  Raises:
    ConfigError: For another teacher, rows from a store, episodes of several turns, or
      a context that cannot be.
  """
  name, teacher = settings.algorithm_name, settings.algorithm.self_teacher
  assert teacher is not None
  _refuse_teachers(settings, f'with algorithm {name} the policy is its own teacher')
  if settings.experience_store is not None:
    raise ConfigError(
      f'algorithm {name}: groups from a store do not bring what its teacher is shown: '
      'play them in this run'
    )
  for tag in settings.training_tags:
    if settings.env[tag].max_steps > 1:
      raise settings.refusal(
        f'env.{tag}.max_steps',
        f'with algorithm {name} the policy teaches itself single replies: set 1',
      )
  from jaxrl.rollout.queue import teacher_contexts

  with error_prefix(f'--config.algorithm.context={teacher.context}'):
    teacher_contexts.task_keys(teacher.context)


def _validate_store(settings: RunSettings) -> None:
  """Checks what a store cannot give, and what has no effect with one."""
  store, algorithm = settings.experience_store, settings.algorithm
  if store is None:
    return
  key, name = 'dataset.experience_store', settings.algorithm_name
  if not settings.plays:
    raise settings.no_effect(
      key, f'{name} learns from files of {algorithm.data_format}'
    )
  if 'greedy_mask' in requirements.needs(algorithm):
    raise settings.refusal(
      key, f'{name} needs a greedy attempt at each task, which a store does not have'
    )
  if samplers.find_sampler(algorithm.sampler)[0].reuses and store.uses > 1:
    raise settings.refusal(
      key,
      f'--config.algorithm.sampler={algorithm.sampler} already decides how often a '
      'group is used: leave uses=1',
    )
  for other in ('weight_sync.policy', 'rollout.async_ratio'):
    if settings.text(other) not in ('fixed', 0):
      raise settings.no_effect(
        other,
        f'this run plays nothing, but trains from {settings.quote(key)}. To limit the '
        'age of groups, set rollout.staleness_policy',
      )
