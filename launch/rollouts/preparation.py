"""Prepares a run: checks its settings together, loads the policy, and describes it."""

import logging
import pathlib
import shutil

import jax

from jaxrl import model_loading
from jaxrl.algorithms import requirements
from jaxrl.component_table import join_calls
from jaxrl.data import hub
from jaxrl.data.chat_tokenizer import ChatOptions, ChatTokenizer
from jaxrl.data.seeds import fold_seed
from jaxrl.envs.env_registry import num_players
from jaxrl.functional.components import call_string
from jaxrl.model_loading import LoadedModel
from jaxrl.options import Keywords
from jaxrl.run_options import EnvOptions
from launch.rollouts import offline_data
from launch.rollouts.env_datasets import describe_tasks
from launch.settings.run_settings import RunSettings
from launch.settings.validation import validate, validate_training

log = logging.getLogger(__name__)


def check_run(settings: RunSettings, *, trains: bool) -> None:
  """Checks the settings of a run together, before its data and models are loaded.

  Args:
    settings: Settings of the run.
    trains: Whether the run trains, rather than only plays.

  Raises:
    ConfigError: For settings that cannot be.
  """
  validate(settings)
  if trains:
    validate_training(settings)
  if settings.rewards:
    # Imported here because most rewards are the environments' own.
    from launch.rollouts.reward_terms import validate_rewards

    validate_rewards(settings)
  if any(_has_players(env) for env in settings.env.values()):
    # Imported here because few environments have several players.
    from launch.rollouts.opponent_models import validate_opponents

    validate_opponents(settings)


def _has_players(env: EnvOptions) -> bool:
  count = num_players(env.env_type, env.env_config)
  return count != 1 or env.opponent is not None or env.policy_role is not None


def load_policy(
  settings: RunSettings, workdir: pathlib.Path, *, critic: bool
) -> LoadedModel:
  """Loads the checkpoint's policy, or makes a random one.

  A random policy has its teacher's tokenizer if the run has a teacher, and else one
  that is trained on the run's texts.

  Args:
    settings: Settings of the run.
    workdir: Folder of the run, where a random policy is saved.
    critic: Whether the policy has a value head.

  Raises:
    ConfigError: For a folder that holds no model, or a run without texts.
  """
  model = settings.model
  options: Keywords = {
    **settings.compute_options,
    'value_head': critic,
    'chat': settings.chat,
  }
  if model.checkpoint:
    return model_loading.load_model(model.checkpoint, **options)
  if not (workdir / 'config.json').exists():  # a start that failed may have left one
    shutil.rmtree(workdir / 'model', ignore_errors=True)
  key = jax.random.key(fold_seed(settings.seed, 'model'))
  shape = model.random_config
  if settings.teacher.folders:
    # Imported here because only algorithms that distil have teachers.
    from launch.learner.teacher_set import teacher_vocabulary

    options['tokenizer'], vocab_size = teacher_vocabulary(settings.teacher)
    shape = shape.replace(vocab_size=vocab_size)
    texts = ()
  else:
    texts = offline_data.tokenizer_texts(settings)
  return model_loading.create_model(workdir / 'model', shape, texts, key, **options)


def name_formats(chat: ChatOptions, policy: LoadedModel) -> dict[str, str]:
  """Returns the names of how the policy writes tool calls and thoughts."""
  if policy.tokenizer.chat_template is None:
    return {}
  return ChatTokenizer(policy.tokenizer, chat).format_names


def describe_run(
  settings: RunSettings, policy: LoadedModel, devices: str
) -> dict[str, str]:
  """Describes the run, a line for each part of it.

  Args:
    settings: Settings of the run.
    policy: The model that it trains.
    devices: Describes the devices that it trains on.
  """
  shape, algorithm = policy.model.config, settings.algorithm
  count = sum(x.size for x in jax.tree.leaves(policy.params))
  components = {
    slot: call_string(component)
    for slot, component in requirements.components_of(algorithm).items()
  }
  components['aggregation'] = str(algorithm.aggregation)
  for key in ('filters', 'shapers'):
    if calls := getattr(algorithm, key):
      components[key] = join_calls(calls)
  if algorithm.batch_unit == 'pair':  # its loss is a mean over pairs, whatever is set
    components['aggregation'] = 'mean over pairs'
  listing = ', '.join(f'{slot}={text}' for slot, text in components.items())
  origin = hub.describe_checkpoint(settings.model.checkpoint) or 'scratch'
  return {
    'model': f'{shape.family}, {count:,} parameters, {shape.num_layers} layers, '
    f'vocabulary {shape.vocab_size}, from {origin}',
    'replies': _describe_replies(settings.chat, policy),
    'devices': devices,
    'data': describe_tasks(settings),
    'algorithm': f'{settings.algorithm_name}: {listing}',
  }


def _describe_replies(options: ChatOptions, policy: LoadedModel) -> str:
  """Says which tokens end a reply, and warns if that is doubtful."""
  if policy.tokenizer.chat_template is None:
    return 'no chat template: the model learns texts alone'
  chat = ChatTokenizer(policy.tokenizer, options)
  if chat.turn_end.doubt:
    log.warning('--config.model.checkpoint: %s', chat.turn_end.doubt)
  return chat.describe()
