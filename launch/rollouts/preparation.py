"""Prepares a run: checks its settings together, and loads the policy."""

import pathlib
import shutil

import jax

from jaxrl import model_loading
from jaxrl.data.chat_tokenizer import ChatOptions, ChatTokenizer
from jaxrl.data.seeds import fold_seed
from jaxrl.envs.env_registry import num_players
from jaxrl.model_loading import LoadedModel
from jaxrl.options import Keywords
from jaxrl.run_options import EnvOptions
from launch.rollouts import offline_data
from launch.settings.run_settings import RunSettings
from launch.settings.validation import validate, validate_training


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
