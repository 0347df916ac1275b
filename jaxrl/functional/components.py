"""Components are the plain functions that an algorithm is composed of.

An advantage, a policy loss or a KL estimator is a function whose positional parameters
name the batch fields it reads (`logprobs`, `advantages`, `mask`, `group_ids` …) and
whose keyword-only parameters are its options. The `component` decorator attaches the
facts that the framework needs to know about such a function. A component of your own
states them in the same way:

>>> @component(on_policy=True)
... def my_loss(logprobs, old_logprobs, advantages, mask, *, clip: float = 0.2):
...   ...
"""

import dataclasses
import functools
import inspect
from collections.abc import Callable, Mapping
from typing import Any, TypeVar

from jaxrl.options import (
  AT_LEAST_ONE,
  NOT_NEGATIVE,
  POSITIVE,
  SHARE,
  ConfigError,
  Configurable,
  Keywords,
  OptionValues,
  Range,
  defaults,
  unwrap,
)

Function = TypeVar('Function', bound=Configurable)


@dataclasses.dataclass(frozen=True)
class ComponentInfo:
  """The facts about a component that do not follow from its signature.

  Attributes:
    on_policy: True for a policy loss that is right only for tokens sampled by the
      policy it starts from. Where rollouts may be stale, or another program samples
      them, such a loss gets an importance-sampling correction by default.
    group_relative: True for an advantage that compares the samples of a group, so that
      a group of one leaves the bare reward; or a function from the component's options
      to that truth value.
    turn_level: True for a component that treats the turns of an episode separately.
    whole_episodes: True for an advantage that compares the players of an episode, so
      that the rows of all have one episode id. For others, what each player did is an
      episode by itself.
    init_state: A function without arguments that returns the pytree of arrays which
      the component carries from batch to batch. The component reads it as the field
      `state` and returns the next one: an advantage in `Advantages.state`, a KL
      controller as its result.
    precompute: A function `(batch fields, *, options) -> {field: array}` that is called
      on the whole optimizer batch before that is split. It takes the component's
      own options of the same names. An array is `[B, …]` or a scalar. If it reads
      `logprobs`, the whole batch is scored for it first; it may also read
      `aggregation`, the name of the mode. No gradient flows through its results.
  """

  on_policy: bool = False
  group_relative: bool | Callable[[Mapping[str, Any]], bool] = False
  turn_level: bool = False
  init_state: Callable[[], Any] | None = None
  precompute: Callable[..., dict[str, Any]] | None = None
  whole_episodes: bool = False


@dataclasses.dataclass(frozen=True)
class BoundComponent:
  """A component with some of its options fixed.

  Unlike `functools.partial` it is equal and hashable by value, so that jit can use it
  as a static argument.

  Attributes:
    fn: The component.
    options: Pairs of an option's name and value.
  """

  fn: Configurable
  options: tuple[tuple[str, Any], ...] = ()

  def __call__(self, *args: object, **kwargs: object) -> Any:
    """Calls the component with the fixed options and further arguments."""
    return self.fn(*args, **dict(self.options), **kwargs)


def component(
  *,
  on_policy: bool = False,
  group_relative: bool | Callable[[Mapping[str, Any]], bool] = False,
  turn_level: bool = False,
  init_state: Callable[[], Any] | None = None,
  precompute: Callable[..., dict[str, Any]] | None = None,
  whole_episodes: bool = False,
) -> Callable[[Function], Function]:
  """Marks a function as a component and attaches facts about it.

  Args:
    on_policy: See `ComponentInfo`, as for the other arguments.
    group_relative: Whether the component compares the samples of a group.
    turn_level: Whether the component treats turns separately.
    init_state: Makes the state that the component carries from batch to batch.
    precompute: Computes batch fields from the whole optimizer batch.
    whole_episodes: Whether the component compares the players of an episode.

  Returns:
    A decorator that returns the function itself, unwrapped.
  """
  info = ComponentInfo(
    on_policy, group_relative, turn_level, init_state, precompute, whole_episodes
  )

  def attach(function: Function) -> Function:
    vars(function)['component_info'] = info
    return function

  return attach


def component_info(part: Configurable | None) -> ComponentInfo:
  """Returns the facts about a component, through `functools.partial`.

  Args:
    part: A component, bound or not, or None.

  Returns:
    What its `component` decorator states; the defaults for an undecorated function.
  """
  if part is None:
    return ComponentInfo()
  return getattr(function_of(part), 'component_info', ComponentInfo())


def is_component(function: Configurable) -> bool:
  """Returns True if the function itself is decorated with `component`."""
  return inspect.isfunction(function) and 'component_info' in vars(function)


def is_group_relative(part: Configurable | None) -> bool:
  """Returns True if a component, with its options, compares the samples of a group."""
  if part is None:
    return False
  fact = component_info(part).group_relative
  if not callable(fact):
    return fact
  return fact(defaults(function_of(part)) | options_of(part))


def options_of(part: Configurable) -> Keywords:
  """Returns the options that are fixed on a component, by name."""
  if isinstance(part, BoundComponent):
    return dict(part.options)
  if isinstance(part, functools.partial):
    return options_of(part.func) | part.keywords
  return {}


def function_of(part: Configurable) -> Configurable:
  """Returns the plain function under fixed options."""
  function = unwrap(part)
  return function.fn if isinstance(function, BoundComponent) else function


def fields_of(part: Configurable, *, required: bool = False) -> tuple[str, ...]:
  """Returns the batch fields that a component reads, in order.

  Args:
    part: A component, bound or not.
    required: Leave out fields with a default, which the component can do without.

  Returns:
    The names of its positional parameters.
  """
  return tuple(
    name
    for name, parameter in inspect.signature(function_of(part)).parameters.items()
    if parameter.kind in (parameter.POSITIONAL_ONLY, parameter.POSITIONAL_OR_KEYWORD)
    and not (required and parameter.default is not parameter.empty)
  )


def call_component(
  part: Configurable,
  batch_fields: Mapping[str, object],
  hparams: OptionValues | None = None,
) -> Any:
  """Calls a component with the batch fields that it names.

  Args:
    part: A component, bound or not.
    batch_fields: Arrays by name; None where the batch does not have one.
    hparams: Further options, such as traced scalars.

  Returns:
    What the component returns.

  Raises:
    ConfigError: If a field that the component requires is absent or None.
  """
  required = fields_of(part, required=True)
  arguments = {}
  for name in fields_of(part):
    value = batch_fields.get(name)
    if value is not None:
      arguments[name] = value
    elif name in required:
      present = sorted(k for k, v in batch_fields.items() if v is not None)
      raise ConfigError(
        f"{function_of(part).__name__} reads the batch field '{name}', which this "
        f'batch does not have. It has: {", ".join(present)}.'
      )
  return part(**arguments, **(hparams or {}))


def call_string(part: Configurable) -> str:
  """Returns a component as a call string, with every option it runs with.

  Args:
    part: The component, bound or not.
  """
  function = function_of(part)
  options = defaults(function) | options_of(part)
  arguments = ', '.join(f'{name}={value!r}' for name, value in options.items())
  return f'{function.__name__}({arguments})'


# An option means the same wherever it occurs in this package, so its range is written
# once, by name. The range of an option that means something else in one component
# stands under 'component.option'.
OPTION_RANGES: dict[str, Range] = {
  'advantage_clip': POSITIVE,
  'alpha': SHARE,
  'beta': POSITIVE,  # of preference losses
  'jsd.beta': SHARE,
  'cap': POSITIVE,
  'clip': NOT_NEGATIVE,
  'clip_b.mu': NOT_NEGATIVE,
  'clip_high': NOT_NEGATIVE,
  'clip_low': NOT_NEGATIVE,
  'clip_v.mu': NOT_NEGATIVE,
  'coef': NOT_NEGATIVE,
  'cov_high': NOT_NEGATIVE,
  'cov_low': NOT_NEGATIVE,
  'context_tokens': NOT_NEGATIVE,
  'critic_warmup': NOT_NEGATIVE,
  'decay_negative': POSITIVE,
  'decay_positive': POSITIVE,
  'decay_steps': NOT_NEGATIVE,
  'dual_clip': AT_LEAST_ONE,
  'entropy_coef': NOT_NEGATIVE,
  'epsilon': NOT_NEGATIVE,
  'gamma': SHARE,
  'head': SHARE,
  'high': NOT_NEGATIVE,
  'horizon': POSITIVE,
  'is_clip': POSITIVE,
  'kl_coef': NOT_NEGATIVE,
  'label_smoothing': SHARE,
  'lam': SHARE,
  'low': NOT_NEGATIVE,
  'max_difference': NOT_NEGATIVE,
  'max_frac': SHARE,
  'max_sigma': POSITIVE,
  'mix.mu': SHARE,
  'omega': NOT_NEGATIVE,
  'overlong_cache': NOT_NEGATIVE,
  'overlong_length': AT_LEAST_ONE,
  'peak': SHARE,
  'power_negative': POSITIVE,
  'power_positive': POSITIVE,
  'rank_penalty': SHARE,
  'clip_cov.ratio': SHARE,
  'kl_cov.ratio': SHARE,
  'ratio_high': NOT_NEGATIVE,
  'ratio_low': NOT_NEGATIVE,
  'regulariser_coef': NOT_NEGATIVE,
  'reward_clip': POSITIVE,
  'ring_high': NOT_NEGATIVE,
  'ring_low': NOT_NEGATIVE,
  'sequence_mask': NOT_NEGATIVE,
  'skew': SHARE,
  'std_threshold': NOT_NEGATIVE,
  'target': POSITIVE,
  'tau': POSITIVE,
  'tau_negative': POSITIVE,
  'tau_positive': POSITIVE,
  'teacher_rate': SHARE,
  'temperature': POSITIVE,
  'm2po.threshold': POSITIVE,
  'probability_band.threshold': NOT_NEGATIVE,
  'top_k': AT_LEAST_ONE,
  'valley': SHARE,
  'value_clip': NOT_NEGATIVE,
  'value_coef': NOT_NEGATIVE,
  'warmup_steps': NOT_NEGATIVE,
  'window': AT_LEAST_ONE,
}


def allowed_range(component: str, option: str) -> Range | None:
  """Returns the range of an option of this package's components; None for any value.

  Args:
    component: The name of the component or algorithm.
    option: The name of the option.
  """
  return OPTION_RANGES.get(f'{component}.{option}') or OPTION_RANGES.get(option)
