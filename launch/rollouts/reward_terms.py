"""Builds the terms of `rollout.rewards`, which are added to an episode's reward.

The terms are `judge(…)` and `reward_model(…)`, served once for the whole run by an
engine with weights of their own or by a server; any grader of the environments
(`jaxrl.envs.graders`); and `env(weight=…)`, the environment's own reward. Each takes a
`weight`; all but `env` also `otherwise`, the score in place of a missing one, and
`step_end`, which makes a term score each step of a reply.
"""

import asyncio
import pathlib
from collections.abc import Callable, Sequence
from typing import Any, Literal

import jax

from jaxrl.config import takes_options_of
from jaxrl.data import hub
from jaxrl.data.chat_tokenizer import ChatTokenizer
from jaxrl.data.tokenizer import load_tokenizer
from jaxrl.device_thread import DeviceThread
from jaxrl.envs.graders import composite
from jaxrl.models import huggingface
from jaxrl.models.transformer_lm import TransformerLM
from jaxrl.options import (
  ConfigError,
  check_options,
  defaults,
  error_prefix,
  require_package,
  unknown_name_error,
)
from jaxrl.rollout.engine.jax_engine import JaxEngine
from jaxrl.rollout.rewards.judge_clients import (
  LocalJudgeClient,
  OpenAIJudgeClient,
  ServedModelOptions,
  read_api_key,
  validate_judge_limits,
  validate_judge_url,
)
from jaxrl.rollout.rewards.llm_judge import LLMJudge
from jaxrl.rollout.rewards.reward_model import RewardModel, RewardModelTerm
from jaxrl.rollout.rewards.reward_pipeline import (
  EnvRewardOptions,
  GraderReward,
  RewardPipeline,
  RewardTerm,
  RewardTermOptions,
)
from jaxrl.types import Message, Params
from launch.runtime.runtime_base import Runtime
from launch.settings.run_settings import RewardTermSettings, RunSettings

KEY = '--config.rollout.rewards'
Dtype = Literal['float32', 'bfloat16']
Spawn = Callable[..., Any]  # makes an object of a class, or a handle of one elsewhere


class JudgeEngine(LocalJudgeClient):
  """A judge from a checkpoint, on an engine of its own.

  Args:
    folder: The checkpoint.
    device_thread: Of the devices it shares; None for its own.
    kernels: As `TransformerLM` has it.
    dtype: Data type of the weights.
    max_length: Tokens of prompt and answer together.
    concurrency: Answers at once.
    timeout: Seconds of one answer.
  """

  def __init__(
    self,
    folder: str,
    device_thread: DeviceThread | None,
    kernels: str = 'auto',
    *,
    dtype: Dtype = 'float32',
    max_length: int = 4096,
    concurrency: int = 8,
    timeout: float = 120.0,
  ):
    config, params = huggingface.load(folder, value_head=False)
    self._params = _cast(params, dtype)
    tokenizer = load_tokenizer(folder)
    engine = self._engine = JaxEngine(
      TransformerLM(config, dtype=dtype, kernels=kernels),
      tokenizer,
      device_thread=device_thread or DeviceThread('judge'),
      max_num_seqs=concurrency,
      max_length=min(max_length, config.max_position),
    )
    super().__init__(
      engine, ChatTokenizer(tokenizer), timeout=timeout, concurrency=concurrency
    )
    self._lock = asyncio.Lock()

  async def ask(self, name: str, messages: Sequence[Message], **sampling: Any) -> str:
    """Asks as `LocalJudgeClient` does; the first call loads the weights."""
    async with self._lock:
      if self._engine.version is None:
        await self._engine.load(0, self._params)
        self._params = None
    return await super().ask(name, messages, **sampling)


class RewardModelEngine(RewardModel):
  """A reward model from a checkpoint; see `huggingface.load_scorer` for which.

  Args:
    folder: The checkpoint.
    device_thread: Of the devices it shares; None for its own.
    kernels: As `TransformerLM` has it.
    dtype: Data type of the weights.
    max_length: Tokens that a conversation may have.
    batch_size: Conversations that are scored together.
    timeout: Seconds that a score may take.
  """

  def __init__(
    self,
    folder: str,
    device_thread: DeviceThread | None,
    kernels: str = 'auto',
    *,
    dtype: Dtype = 'float32',
    max_length: int = 4096,
    batch_size: int = 8,
    timeout: float = 600.0,
  ):
    config, params = huggingface.load_scorer(folder)
    super().__init__(
      TransformerLM(config, dtype=dtype, kernels=kernels),
      _cast(params, dtype),
      ChatTokenizer(load_tokenizer(folder)),
      device_thread=device_thread or DeviceThread('rewards'),
      pad_id=huggingface.pad_id(folder),
      max_length=min(max_length, config.max_position),
      batch_size=batch_size,
      timeout=timeout,
    )


def _cast(params: Params, dtype: str) -> Params:
  """Casts all weights but those of the head, whose sums are of float32."""
  kind = huggingface.DTYPES[dtype]
  cast = {name: jax.tree.map(lambda x: x.astype(kind), params[name]) for name in params}
  return cast | {name: params[name] for name in params if name == 'value_head'}


def validate_rewards(settings: RunSettings) -> None:
  """Checks the terms without loading any weights.

  Raises:
    ConfigError: For a term that cannot be, or rewards of a run that plays nothing.
  """
  terms, text = settings.rewards, settings.text('rollout.rewards')
  if not terms:
    return
  if not settings.plays and not settings.evaluates:
    raise ConfigError(f'{KEY}={text}: has no effect here: this run plays no episodes')
  _make_pipeline(terms, text, lambda *args, **options: None)


def make_reward_pipeline(
  settings: RunSettings, runtime: Runtime, device_thread: DeviceThread
) -> RewardPipeline:
  """Returns what the run adds to its episodes' rewards.

  In one process the engines of judges and reward models share the devices with the
  run's own, in turn; of Ray actors each has a process to itself.

  Raises:
    ConfigError: For a model or server that cannot be used.
  """
  spawn = make_spawn(settings, runtime, device_thread, KEY)
  text = settings.text('rollout.rewards')
  return _make_pipeline(settings.rewards, text, spawn)


def make_spawn(
  settings: RunSettings, runtime: Runtime, device_thread: DeviceThread, key: str
) -> Spawn:
  """Returns a function that serves a model of fixed weights, or asks a server.

  Args:
    settings: Settings of the run.
    runtime: Where models live.
    device_thread: The thread of this process's devices, which they share unless they
      are Ray actors.
    key: The config key that asks for them, for errors.
  """
  shared_thread = None if settings.cluster.ray else device_thread

  def spawn(cls: Callable[..., Any], *args: object, **options: object) -> Any:
    if cls is not OpenAIJudgeClient:
      args = (*args, shared_thread, settings.kernels)
    with error_prefix(f'{key}: {args[0]}', OSError):
      return runtime.spawn(cls, *args, **options)

  return spawn


def _make_pipeline(
  term_settings: Sequence[RewardTermSettings], text: str, spawn: Spawn
) -> RewardPipeline:
  terms: dict[str, RewardTerm] = {}
  env_weights: list[float] = []
  with error_prefix(f'{KEY}={text}'):
    for term in term_settings:
      options = dict(term.options)
      if term.target == 'env':
        check_options(EnvRewardOptions, options, 'env')
        env_weights.append(term.weight)
        continue
      names = defaults(RewardTermOptions)
      shared = {key: options.pop(key) for key in names if key in options}
      check_options(RewardTermOptions, shared, term.target)
      if make := REWARD_TERMS.get(term.target):
        scorer = make(spawn, **options)
      else:
        part = composite.make_grader_part(term.target, options, list(REWARD_TERMS))
        scorer = GraderReward(part)
      terms[term.name] = RewardTerm(scorer, weight=term.weight, **shared)
    if len(env_weights) > 1:
      raise ConfigError("'env' is listed twice")
  return RewardPipeline(terms, *env_weights)


@takes_options_of(
  ServedModelOptions, LLMJudge, JudgeEngine, OpenAIJudgeClient, RewardTermOptions
)
def judge(spawn: Spawn, **options: Any) -> LLMJudge:
  """Asks a model to rate an episode, on a scale that is mapped to [0, 1].

  Args:
    spawn: Makes the judge's client.
    **options: Where the judge is served and how, and what it is asked.
  """
  return make_model_asker('judge', LLMJudge, options, spawn)


@takes_options_of(RewardModelEngine, RewardModelTerm, RewardTermOptions)
def reward_model(
  spawn: Spawn, *, checkpoint: str = '', **options: Any
) -> RewardModelTerm:
  """Scores an episode by a reward model that the run serves.

  Args:
    spawn: Makes the reward model.
    checkpoint: Folder of the reward model.
    **options: How it is served.
  """
  options['checkpoint'] = checkpoint
  where, served, term_options = _split(
    'reward_model', options, RewardModelEngine, RewardModelTerm
  )
  if set(where) != {'checkpoint'} or not checkpoint:
    raise ConfigError(
      "reward_model: set checkpoint='FOLDER', and neither url nor model"
    )
  folder = _folder('reward_model', checkpoint)
  RewardModelTerm(None, **term_options)
  return RewardModelTerm(spawn(RewardModelEngine, folder, **served), **term_options)


REWARD_TERMS = {'env': EnvRewardOptions, 'judge': judge, 'reward_model': reward_model}


def make_model_asker(
  target: str, asker: Callable[..., object], options: dict[str, Any], spawn: Spawn
) -> Any:
  """Makes what asks a model of fixed weights, which the run or a server serves.

  Args:
    target: What the model is for, for errors.
    asker: Takes the model's client, and options of its own.
    options: Where the model is served, how, and the asker's own options.
    spawn: Makes the client; see `make_spawn`.

  Raises:
    ConfigError: If an option is wrong, or there is no such model.
  """
  backend = OpenAIJudgeClient if 'url' in options else JudgeEngine
  where, served, own_options = _split(target, options, backend, asker)
  asker(None, **own_options)  # what is wrong is said before anything is served
  validate_judge_limits(**served)
  if backend is JudgeEngine:
    if set(where) != {'checkpoint'}:
      raise ConfigError(
        f"{target}: set either checkpoint='FOLDER', or url='…' and model='…'"
      )
    folder = _folder(target, where['checkpoint'])
    return asker(spawn(JudgeEngine, folder, **served), **own_options)
  if 'checkpoint' in where or not where.get('model'):
    raise ConfigError(f"{target}: a url needs model='…', and excludes checkpoint")
  require_package('aiohttp', f'{target}: a url', 'serve')
  server = (
    validate_judge_url(where['url']),
    where['model'],
    read_api_key(where.get('key_env', '')),
  )
  return asker(spawn(OpenAIJudgeClient, *server, **served), **own_options)


def _split(
  target: str, options: dict[str, Any], *makers: Callable[..., object]
) -> list[dict[str, Any]]:
  """Divides options into those that say where a part is served, and each maker's."""
  option_groups = []
  for maker in (ServedModelOptions, *makers):
    mine = {key: options.pop(key) for key in defaults(maker) if key in options}
    check_options(maker, mine, target)
    option_groups.append(mine)
  for key in options:
    takers = (ServedModelOptions, *makers, RewardTermOptions)
    known = {name for maker in takers for name in defaults(maker)}
    raise unknown_name_error(key, known, 'option', target)
  return option_groups


def _folder(target: str, name: str) -> str:
  """Returns the absolute path of a folder, which must hold a model of this kind."""
  with error_prefix(f'{target}: checkpoint={name!r}', OSError):
    huggingface.load_config(hub.find_checkpoint(name, only_config=True))
    folder = hub.find_checkpoint(name)
    if target == 'reward_model':
      huggingface.check_scorer(folder)
    ChatTokenizer(load_tokenizer(folder))
  return str(pathlib.Path(folder).absolute())
