"""Makes algorithms by name, swaps their parts by call string, and calls parts.

An algorithm's name is that of its file and of the function in it. A user's own is
named `package.module:function` or `path/file.py:function`.
"""

import dataclasses
import functools
import importlib
import inspect
import pathlib
import warnings
from collections.abc import Callable, Mapping
from types import ModuleType
from typing import Any

from jaxrl import signature
from jaxrl.algorithms import checks
from jaxrl.algorithms.parts import Part as Part
from jaxrl.algorithms.parts import call_part as call_part
from jaxrl.algorithms.parts import columns, function_of, options_of
from jaxrl.functional import (
  advantages,
  aggregation,
  controllers,
  corrections,
  entropy,
  kl,
  losses,
  marks,
)
from jaxrl.signature import ConfigError
from jaxrl.types import Algorithm

# The slots of an algorithm that hold parts, and where a part's name is looked up.
PARTS: dict[str, ModuleType] = {
  'advantage': advantages,
  'policy_loss': losses,
  'kl_loss': kl,
  'kl_penalty': kl,
  'entropy_loss': entropy,
  'value_loss': losses,
  'correction': corrections,
  'kl_controller': controllers,
}
# Functions in those modules that serve parts and are none themselves.
HELPERS = frozenset(
  (
    'adaptive_coef',
    'check_pairs',
    'chord_mu',
    'effective_sample_size',
    'full',
    'init_moments',
    'init_scale',
    'mismatch',
    'nec',
    'ratio',
    'second_moment_keep',
    'term',
    'update_moments',
  )
)
# Other settings of an algorithm that its user may override, with the value that leaves
# the maker's choice.
SETTINGS: dict[str, Any] = {
  'aggregation': '',
  'behaviour': '',
  'sampler': '',
  'filters': '',
  'shapers': '',
  'schema': '',
  'critic_warmup': 0,
}
CHOICES = {
  'behaviour': ('rollout', 'decoupled'),
  'schema': ('rollout', 'messages', 'preference', 'text'),
}
# Columns that somebody must score or play, by what they need; any other column comes
# with the batch.
SCORED = {
  'old_logprobs': 'old_logprobs',
  'ref_logprobs': 'ref_logprobs',
  'teacher_logprobs': 'teacher_logprobs',
  'teacher_topk_ids': 'teacher_topk',
  'teacher_topk_logprobs': 'teacher_topk',
  'topk_logprobs': 'teacher_topk',
  'values': 'values',
  'old_values': 'values',
  'entropy': 'entropy',
  'nec': 'nec',
  'greedy_mask': 'greedy_mask',
}


TOOLS = ('checks', 'compose', 'describe', 'parts', 'plugins')


def names() -> list[str]:
  """The algorithms that come with the package."""
  folder = pathlib.Path(__file__).parent
  own = (path.stem for path in folder.glob('[a-z]*.py'))
  return sorted(name for name in own if name not in TOOLS)


def maker(spec: str) -> Callable[..., Algorithm]:
  """The function that makes the algorithm `spec` names."""
  if ':' in spec:
    return signature.resolve(spec)
  if spec not in names():
    raise signature.unknown(spec, names(), 'algorithm', 'algorithm')
  return getattr(importlib.import_module(f'jaxrl.algorithms.{spec}'), spec)


def maker_options(spec: str) -> dict[str, Any]:
  """Every option of the algorithm with its default; parts and settings as left open."""
  own = signature.defaults(maker(spec))
  return dict.fromkeys(PARTS, '') | SETTINGS | own


def make(spec: str, options: Mapping[str, Any] | None = None) -> Algorithm:
  """The algorithm `spec`, with its options set and its parts swapped.

  options: the maker's own options, call strings for parts, as in
  `policy_loss='cispo(clip_high=.3)'`, and settings. '' leaves the maker's choice,
  'none' removes a part. Raises ConfigError naming what is wrong and what exists.
  """
  function = maker(spec)
  own = inspect.signature(function).parameters
  given, swaps = {}, {}
  for name, value in (options or {}).items():
    if name in own:
      given[name] = value
    elif name in PARTS or name in SETTINGS:
      swaps[name] = value
    else:
      everything = [*own, *PARTS, *SETTINGS]
      raise signature.unknown(name, everything, 'option', f'algorithm {spec}')
  signature.check_options(function, given, f'algorithm {spec}')
  try:
    inspect.signature(function).bind(**given)
  except TypeError as error:
    raise ConfigError(
      f'{spec} makes no algorithm: {error}. A maker takes options by name, each with '
      'a default, and returns an Algorithm'
    ) from error
  algorithm = function(**given)
  if not isinstance(algorithm, Algorithm):
    raise ConfigError(f'{spec} makes a {type(algorithm).__name__}, not an Algorithm')
  changes = {
    slot: _setting(slot, value) if slot in SETTINGS else make_part(slot, value)
    for slot, value in swaps.items()
    if value != SETTINGS.get(slot, '')
  }
  algorithm = dataclasses.replace(algorithm, **changes)
  for slot in PARTS:
    part = getattr(algorithm, slot)
    if part is not None:
      signature.check_options(
        signature.unwrap(part), options_of(part), f'algorithm {spec}, {slot}'
      )
  for name in SETTINGS:
    _setting(name, getattr(algorithm, name))
  checks.refuse(algorithm, f'algorithm {spec}', asked=changes)
  for words in checks.doubts(algorithm):
    warnings.warn(f'algorithm {spec}: {words}', stacklevel=2)
  return dataclasses.replace(algorithm, behaviour=behaviour(algorithm))


def make_part(slot: str, text: str) -> Callable[..., Any] | None:
  """The part a call string describes: a name in the slot's module, or dotted."""
  name, options = signature.parse_call(text)
  if name == 'none':
    if slot == 'policy_loss':
      raise ConfigError(
        f"algorithm.{slot}='none': there is nothing to train without it"
      )
    return None
  if ':' in name:
    function = signature.resolve(name)
  else:
    there = parts_of(PARTS[slot])
    if name not in there:
      raise signature.unknown(name, there, slot, f'algorithm.{slot}')
    function = there[name]
  signature.check_options(function, options, f'algorithm.{slot}={text!r}')
  return functools.partial(function, **options) if options else function


def parts_of(module: ModuleType) -> dict[str, Callable[..., Any]]:
  """The functions a module of parts offers, by name."""
  offered = getattr(module, '__all__', None)
  return {
    name: value
    for name, value in vars(module).items()
    if inspect.isfunction(value)
    and (
      name in offered if offered is not None else value.__module__ == module.__name__
    )
    and name not in HELPERS
    and not name.startswith('_')
  }


def _setting(name: str, value: Any) -> Any:
  """Checks a setting's value; 'none' empties a list of calls."""
  wanted = type(SETTINGS[name])
  if not isinstance(value, wanted) or isinstance(value, bool):
    raise ConfigError(f'algorithm.{name}={value!r} must be a {wanted.__name__}')
  if name in ('filters', 'shapers'):
    signature.parse_calls(value)
    return '' if value == 'none' else value
  if name == 'critic_warmup':
    if value < 0:
      raise ConfigError(f'algorithm.critic_warmup={value}: must be at least 0')
  elif name == 'aggregation':
    aggregation.check(value, length=1)  # the run gives it where the mode does not
  else:
    head, options = signature.parse_call(value)
    choices = CHOICES.get(name)
    if choices and head not in choices:
      raise signature.unknown(head, choices, name, 'algorithm')
    if choices and options:
      raise ConfigError(f'algorithm.{name}={value!r} takes no options')
  return value


def behaviour(algorithm: Algorithm) -> str:
  """Whose log-probs parts get as `old_logprobs`; a correction implies 'decoupled'."""
  return algorithm.behaviour if algorithm.correction is None else 'decoupled'


def parts(algorithm: Algorithm) -> dict[str, Callable[..., Any]]:
  """The parts an algorithm has, by slot."""
  found = {slot: getattr(algorithm, slot) for slot in PARTS}
  return {slot: part for slot, part in found.items() if part is not None}


def reads(algorithm: Algorithm, *slots: str) -> frozenset[str]:
  """The columns that the parts in `slots` read, or without any, that anything does."""
  found = parts(algorithm)
  chosen = [part for slot, part in found.items() if slot in slots or not slots]
  if algorithm.prepare is not None and ('prepare' in slots or not slots):
    chosen.append(algorithm.prepare)
  made = [marks.make_columns(function_of(part)) for part in chosen]
  read = {name for part in (*chosen, *made) if part for name in columns(part)}
  if found.get('correction') in chosen and not uses_old(algorithm):
    # The correction stands in for a ratio and starts from the policy as it is.
    others = [part for part in chosen if part is not algorithm.correction]
    if not any('old_logprobs' in columns(part) for part in others):
      read.discard('old_logprobs')
  return frozenset(read)


def uses_old(algorithm: Algorithm) -> bool:
  """Whether the policy loss reads `old_logprobs`: it then has a ratio of its own."""
  return 'old_logprobs' in columns(algorithm.policy_loss)


def reads_before(algorithm: Algorithm) -> frozenset[str]:
  """The columns that parts read before the first update of a batch.

  There 'logprobs' are those of whoever `behaviour` names.
  """
  slots = ['advantage', 'kl_penalty']
  if algorithm.kl_controller is not None:
    slots += ['kl_controller', 'kl_loss']
  return reads(algorithm, *slots)


def needs(algorithm: Algorithm) -> frozenset[str]:
  """What must be scored or played for this algorithm, mostly by `Batch` column.

  'old_logprobs' only under behaviour 'decoupled': otherwise the rollout's own serve.
  'teacher_topk' is the teacher's likeliest tokens with their log-probs.
  """
  scored = {SCORED[name] for name in reads(algorithm) if name in SCORED}
  if behaviour(algorithm) != 'decoupled':
    scored.discard('old_logprobs')
  elif 'logprobs' in reads_before(algorithm) | reads(algorithm, 'prepare'):
    scored.add('old_logprobs')
  return frozenset(scored)


def rows_per_group(algorithm: Algorithm) -> int:
  """Attempts at each task: those sampled, and the greedy one if any part reads it."""
  return algorithm.group_size + ('greedy_mask' in needs(algorithm))


def formulation(algorithm: Algorithm) -> str:
  """How episodes become rows: 'step' if a part tells turns apart, else 'trajectory'."""
  return 'step' if reads(algorithm) & {'step_ids', 'state_hash'} else 'trajectory'


def with_length(algorithm: Algorithm, length: float) -> Algorithm:
  """The algorithm with `length` as the constant its aggregation divides by.

  For an aggregation that leaves it to the run; any other is as it was.
  """
  name, options = signature.parse_call(algorithm.aggregation)
  if name != 'sequence_mean_token_sum_norm' or 'length' in options:
    return algorithm
  return dataclasses.replace(algorithm, aggregation=f'{name}(length={length})')


def init_state(algorithm: Algorithm) -> dict[str, Any]:
  """What the parts carry from batch to batch, before any, by slot."""
  made = {
    slot: init
    for slot, part in parts(algorithm).items()
    if (init := marks.init_state(function_of(part)))
  }
  if algorithm.init_state is not None:
    made['prepare'] = algorithm.init_state
  return {slot: init() for slot, init in made.items()}


def split_numbers(algorithm: Algorithm) -> tuple[Algorithm, dict[str, dict[str, Any]]]:
  """Parts the numeric options from the rest, so that jit can trace them.

  Returns the algorithm without them, hashable and equal by value, and a pytree
  {slot: {option: number}}; `call_part(part, columns, numbers[slot])` joins the two.
  """
  static, numbers = {}, {}
  for slot, part in parts(algorithm).items():
    keywords = options_of(part)
    function = function_of(part)
    numbers[slot] = {
      # 1 and 1.0 must not compile twice, so an option that is a float always is one.
      k: float(v) if signature.wanted_type(function, k) is float else v
      for k, v in keywords.items()
      if _is_number(v)
    }
    rest = sorted((k, v) for k, v in keywords.items() if not _is_number(v))
    static[slot] = Part(function, tuple(rest))
  if algorithm.prepare is not None:
    # Runs outside the parts that take numbers, so it keeps its own.
    whole = tuple(sorted(options_of(algorithm.prepare).items()))
    static['prepare'] = Part(function_of(algorithm.prepare), whole)
  static['behaviour'] = behaviour(algorithm)
  return dataclasses.replace(algorithm, **static), numbers


def _is_number(value: Any) -> bool:
  return isinstance(value, int | float) and not isinstance(value, bool)
