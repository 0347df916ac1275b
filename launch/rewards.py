"""From `rollout.rewards` to what is added to an episode's reward after its end.

A call string, its terms joined by +: `judge(…)` and `reward_model(…)`, which are served
once for the whole run, by an engine with weights of their own or by a server; any
grader of the environments (`graders.combine`); `env(weight=…)`, what the environment
itself gave. Each takes a `weight`; all but `env` also `otherwise`, the score in place
of a missing one.
"""

import asyncio
import importlib.util
import pathlib
from collections.abc import Callable, Sequence
from typing import Any, Literal

import jax

from jaxrl.config import Config
from jaxrl.data.chat import Chat
from jaxrl.data.tokenizer import load_tokenizer
from jaxrl.dispatch import Dispatcher
from jaxrl.envs.graders import combine
from jaxrl.models import huggingface
from jaxrl.models.model import Model
from jaxrl.rollout.jax_engine import JaxEngine
from jaxrl.rollout.rewards.judge import Judge
from jaxrl.rollout.rewards.reward_model import RewardModel, Scored
from jaxrl.rollout.rewards.speakers import (
  Endpoint,
  EngineSpeaker,
  check_limits,
  check_url,
  key_from,
)
from jaxrl.rollout.rewards.stage import Rewards, Rule, Term
from jaxrl.signature import ConfigError, check_options, defaults, unknown
from jaxrl.types import Algorithm, Message, Params
from launch.spawn import Host

KEY = '--config.rollout.rewards'
SERVED = ('env', 'judge', 'reward_model')
Dtype = Literal['float32', 'bfloat16']
Spawn = Callable[..., Any]  # makes an object of a class, or a handle of one elsewhere


class JudgeEngine(EngineSpeaker):
  """A judge from a checkpoint, on an engine of its own.

  max_length: tokens of prompt and answer together. concurrency: answers at once.
  timeout: seconds of one. dispatcher: of the devices it shares; None for its own.
  kernels: as `Model` has it.
  """

  def __init__(
    self,
    folder: str,
    dispatcher: Dispatcher | None,
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
    engine = self._own = JaxEngine(
      Model(config, dtype=dtype, kernels=kernels),
      tokenizer,
      dispatcher=dispatcher or Dispatcher('judge'),
      num_slots=concurrency,
      max_length=min(max_length, config.max_position),
    )
    super().__init__(engine, Chat(tokenizer), timeout=timeout, concurrency=concurrency)
    self._lock = asyncio.Lock()

  async def ask(self, name: str, messages: Sequence[Message], **sampling: Any) -> str:
    """As `EngineSpeaker.ask`; the first to ask has the weights put on the device."""
    async with self._lock:
      if self._own.version is None:
        await self._own.load(0, self._params)
        self._params = None
    return await super().ask(name, messages, **sampling)


class RewardModelEngine(RewardModel):
  """A reward model from a checkpoint; see `huggingface.load_scorer` for which."""

  def __init__(
    self,
    folder: str,
    dispatcher: Dispatcher | None,
    kernels: str = 'auto',
    *,
    dtype: Dtype = 'float32',
    max_length: int = 4096,
    batch_size: int = 8,
    timeout: float = 600.0,
  ):
    config, params = huggingface.load_scorer(folder)
    super().__init__(
      Model(config, dtype=dtype, kernels=kernels),
      _cast(params, dtype),
      Chat(load_tokenizer(folder)),
      dispatcher=dispatcher or Dispatcher('rewards'),
      pad_id=huggingface.pad_id(folder),
      max_length=min(max_length, config.max_position),
      batch_size=batch_size,
      timeout=timeout,
    )


def _cast(params: Params, dtype: str) -> Params:
  """The weights as they are computed with, but for a head, whose sum is of float32."""
  kind = huggingface.DTYPES[dtype]
  cast = {name: jax.tree.map(lambda x: x.astype(kind), params[name]) for name in params}
  return cast | {name: params[name] for name in params if name == 'value_head'}


def check(config: Config, algorithm: Algorithm) -> None:
  """Raises ConfigError for rewards that cannot be; loads no weights."""
  if not config.rollout.rewards:
    return
  if algorithm.schema != 'rollout' and not (config.eval.every and config.env):
    raise ConfigError(
      f'{KEY}={config.rollout.rewards}: has no effect here: nothing is played'
    )
  _make(config.rollout.rewards, lambda *args, **options: None)


def make(config: Config, host: Host, dispatcher: Dispatcher) -> Rewards | None:
  """What the run adds to its episodes' rewards; None for nothing.

  In one process its engines share the devices with the run's own, in turn; of Ray
  actors each has a process to itself.
  """
  if not config.rollout.rewards:
    return None
  mine = None if config.cluster.ray else dispatcher

  def spawn(made: Callable[..., Any], *args: Any, **options: Any) -> Any:
    given = args if made is Endpoint else (*args, mine, config.kernels)
    try:
      return host.spawn(made, *given, **options)
    except (OSError, ValueError) as error:
      raise ConfigError(f'{KEY}: {args[0]}: {error}') from error

  return _make(config.rollout.rewards, spawn)


def _make(spec: str, spawn: Spawn) -> Rewards:
  terms: dict[str, Term] = {}
  env: list[float] = []
  try:
    for name, weight, target, options in combine.terms(spec):
      if target == 'env':
        check_options(_env, options, 'env')
        env.append(weight)
        continue
      stands_in = {key: options.pop(key) for key in ('otherwise',) if key in options}
      check_options(_any, stands_in, target)
      terms[name] = Term(_part(target, options, spawn), weight, **stands_in)
    if len(env) > 1:
      raise ConfigError('env stands there twice')
  except ConfigError as error:
    raise ConfigError(f'{KEY}={spec}: {error}') from error
  return Rewards(terms, *env)


def _env() -> None:
  """The options of `env`, but for its weight: none."""


def _any(*, otherwise: float | None = None) -> None:
  """The options of every other part, but for its weight."""


def _served(
  *, checkpoint: str = '', url: str = '', model: str = '', key_env: str = ''
) -> None:
  """Where a judge is served: from a folder, or by the `model` of a server."""


def _part(target: str, options: dict[str, Any], spawn: Spawn) -> Any:
  if target == 'judge':
    return _judge(options, spawn)
  if target == 'reward_model':
    where, served, own = _split(target, options, RewardModelEngine, Scored)
    if set(where) != {'checkpoint'}:
      raise ConfigError("reward_model: name its folder, checkpoint='…', and no server")
    folder = _folder(target, where['checkpoint'])
    Scored(None, **own)
    return Scored(spawn(RewardModelEngine, folder, **served), **own)
  return Rule(combine.make_part(target, options, SERVED))


def _judge(options: dict[str, Any], spawn: Spawn) -> Judge:
  made = Endpoint if 'url' in options else JudgeEngine
  where, served, own = _split('judge', options, made, Judge)
  Judge(None, **own)  # what is wrong is said before anything is served
  check_limits(**served)
  if made is JudgeEngine:
    if set(where) != {'checkpoint'}:
      raise ConfigError("judge: give a checkpoint='…', or a url='…' and a model='…'")
    folder = _folder('judge', where['checkpoint'])
    return Judge(spawn(JudgeEngine, folder, **served), **own)
  if 'checkpoint' in where or not where.get('model'):
    raise ConfigError("judge: a url needs a model='…', and no checkpoint")
  if importlib.util.find_spec('aiohttp') is None:
    raise ConfigError("judge: a url needs aiohttp: pip install 'jaxrl[serve]'")
  server = check_url(where['url']), where['model'], key_from(where.get('key_env', ''))
  return Judge(spawn(Endpoint, *server, **served), **own)


def _split(
  target: str, options: dict[str, Any], *makers: Callable[..., Any]
) -> list[dict[str, Any]]:
  """The options that say where a part is served, and those of each of its makers."""
  found = []
  for maker in (_served, *makers):
    mine = {key: options.pop(key) for key in defaults(maker) if key in options}
    check_options(maker, mine, target)
    found.append(mine)
  for key in options:
    known = {name for maker in (_served, *makers, _any) for name in defaults(maker)}
    raise unknown(key, known | {'weight'}, 'option', target)
  return found


def _folder(target: str, folder: str) -> str:
  """The folder's absolute path. ConfigError unless it holds such a model."""
  try:
    huggingface.load_config(folder)
    if target == 'reward_model':
      huggingface.check_scorer(folder)
    Chat(load_tokenizer(folder))
  except (OSError, ValueError) as error:
    raise ConfigError(f'{target}: checkpoint={folder!r}: {error}') from error
  return str(pathlib.Path(folder).absolute())
