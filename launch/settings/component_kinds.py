"""Component kinds: what a config may name, where, and how a user's own is recognised.

`KINDS` lists every kind once. Plugins and the catalogue of `launch.algorithms` are made
from it.
"""

import dataclasses
import functools
import inspect
import pathlib
import re
from collections.abc import Callable, Mapping
from typing import Any

from jaxrl.algorithms import registry
from jaxrl.data.row_sources import GENERATE_PREFIX
from jaxrl.functional import components
from jaxrl.options import ConfigError, unwrap
from jaxrl.types import Algorithm
from jaxrl.user_code import FILE_MODULE_PREFIX, import_object

Components = Mapping[str, Callable[..., Any] | str]


@dataclasses.dataclass(frozen=True)
class ComponentKind:
  """A kind of component that configs name.

  Attributes:
    keys: The dotted config keys that name one; `*` stands for any one part of a key.
    what: What such a component does, in one line.
    built_in: Returns the built-in ones by name, as objects or as locations.
    accepts: Returns whether an object of a user's file is of this kind; None if all
      components of the kind are built in.
    other_names: Names that the keys take beside those of components.
    is_open: Whether the keys also take texts that name no component, such as paths.
    prefix: What the keys write before the name of a component.
    name: The kind, as error messages and the catalogue call it.
  """

  keys: tuple[str, ...]
  what: str
  built_in: Callable[[], Components]
  accepts: Callable[[Any], bool] | None = None
  other_names: tuple[str, ...] = ()
  is_open: bool = False
  prefix: str = ''
  name: str = ''

  @property
  def plural(self) -> str:
    """The name in the plural."""
    if self.name.endswith('um'):
      return f'{self.name[:-2]}a'
    if self.name.endswith('y'):
      return f'{self.name[:-1]}ies'
    return f'{self.name}es' if self.name.endswith(('ss', 'x')) else f'{self.name}s'


def _table(location: str) -> Callable[[], Components]:
  """Returns a function that imports a table of built-in components."""
  return lambda: import_object(location)


def _derives(location: str) -> Callable[[Any], bool]:
  """Returns a check for classes derived from a base class, which is imported late."""

  def accepts(value: Any) -> bool:
    return isinstance(value, type) and issubclass(value, import_object(location))

  return accepts


def _has_methods(*names: str) -> Callable[[Any], bool]:
  """Returns a check for classes that define some methods."""
  return lambda value: (
    isinstance(value, type) and all(callable(getattr(value, n, None)) for n in names)
  )


def _arguments(function: Any) -> list[str]:
  """Returns the names of the positional parameters."""
  try:
    parameters = inspect.signature(function).parameters.values()
  except (TypeError, ValueError):
    return []
  positional = (
    inspect.Parameter.POSITIONAL_OR_KEYWORD,
    inspect.Parameter.POSITIONAL_ONLY,
  )
  return [p.name for p in parameters if p.kind in positional]


def _returns(function: Any) -> Any:
  annotation = inspect.signature(function).return_annotation
  return None if annotation is inspect.Signature.empty else annotation


def builds_algorithm(function: Any) -> bool:
  """Returns whether a function builds an algorithm.

  It does if it is annotated so, or bears its file's name and reads no batch fields.

  Args:
    function: The function.
  """
  if not inspect.isfunction(function):
    return False
  if _returns(function) in (Algorithm, 'Algorithm'):
    return True
  stem = function.__module__.removeprefix(FILE_MODULE_PREFIX)
  return function.__name__ == stem and not components.fields_of(function)


def _is_group_filter(value: Any) -> bool:
  if inspect.isfunction(value):
    return _arguments(value) == ['group'] and _returns(value) in (None, bool, 'bool')
  return _has_methods('filter')(value)


def _is_reward_shaper(value: Any) -> bool:
  if not inspect.isfunction(value) or _arguments(value) != ['group']:
    return False
  return _returns(value) not in (bool, 'bool')


def _is_grader(value: Any) -> bool:
  if inspect.isfunction(value):
    return _arguments(value)[:2] == ['reply', 'item']
  call = vars(value).get('__call__') if isinstance(value, type) else None
  return call is not None and _arguments(call)[1:3] == ['reply', 'item']


def _is_env(value: Any) -> bool:
  return _has_methods('reset', 'step')(value) and not _is_manager(value)


_is_manager = _has_methods('run_rollout_loop')
_is_metric_sink = _derives('launch.logging.metric_sinks:MetricSink')


def _is_writer(value: Any) -> bool:
  return _has_methods('check', 'write')(value) and not _is_metric_sink(value)


def _is_family(value: Any) -> bool:
  from jaxrl.models import families
  from jaxrl.models.families.family_spec import FamilySpec

  built_in = map(import_object, families.BUILT_IN.values())
  return isinstance(value, FamilySpec) and not any(value is one for one in built_in)


def _is_generator(value: Any) -> bool:
  return inspect.isfunction(value) and _arguments(value) == ['split']


def _is_agent(value: Any) -> bool:
  from jaxrl.envs.agents.function_agent import AGENT_ARGUMENTS

  names = _arguments(value) if inspect.isfunction(value) else []
  return bool(names) and set(names) <= set(AGENT_ARGUMENTS)


def _is_tool(value: Any) -> bool:
  """Accepts functions whose arguments have types for the model, and providers."""
  if not inspect.isfunction(value):
    return _has_methods('start', 'call', 'close')(value)
  if any(is_other(value) for is_other in (_is_generator, _is_agent, _is_grader)):
    return False
  if not inspect.getdoc(value) or not _arguments(value):
    return False
  from jaxrl.envs.tools.function_tool import function_schema

  try:
    parameters = function_schema(value, '')['function']['parameters']
  except (ConfigError, NameError, TypeError):  # such as names of types that are unknown
    return False
  return all(parameters['properties'].values())


def _is_part(value: Any) -> bool:
  """Accepts any other function, as a component of algorithms."""
  others = (
    *(builds_algorithm, _is_group_filter, _is_reward_shaper, _is_grader),
    *(_is_generator, _is_agent, _is_tool),
  )
  return inspect.isfunction(value) and not any(is_other(value) for is_other in others)


def _aggregations() -> Components:
  """Returns the modes of aggregation, with their lines of one function's docstring."""
  from jaxrl.functional import aggregation

  function, modes = aggregation.token_weights, {}
  length = inspect.signature(function).parameters['length']
  for name in aggregation.MODES:
    mode: Any = functools.partial(function, mode=name)
    line = re.search(rf'^ +{name}: (.+)$', inspect.getdoc(function) or '', re.M)
    mode.__doc__ = f'Computes {line[1]}' if line else ''
    takes = [length] if name == 'sequence_mean_token_sum_norm' else []
    mode.__signature__ = inspect.Signature(takes)
    modes[name] = mode
  return modes


def _stores() -> Components:
  from jaxrl.data.store.store_options import ReaderOptions

  return {'store': ReaderOptions}


def _presets() -> Components:
  return {name: f'jaxrl.algorithms.presets.{name}:{name}' for name in registry.names()}


PARTS = {
  'advantage': 'turns rewards into the advantage of each token',
  'policy_loss': 'the loss of the policy, from log-probs and advantages',
  'kl_loss': 'a divergence from the reference model, added to the loss',
  'kl_penalty': 'a divergence from the reference model, taken off the reward',
  'entropy_loss': 'what is added to the loss to keep the entropy up',
  'value_loss': "the critic's loss",
  'correction': 'weights for the mismatch of engine and learner',
  'kl_controller': 'changes the coefficient of the KL term during a run',
}


def _named(**kinds: ComponentKind) -> tuple[ComponentKind, ...]:
  return tuple(dataclasses.replace(kind, name=name) for name, kind in kinds.items())


KINDS = _named(
  algorithm=ComponentKind(
    ('algorithm.name',),
    'how rollouts or rows become an update; --config=FILE.py:NAME chooses it',
    _presets,
    builds_algorithm,
  ),
  **{
    slot: ComponentKind(
      (f'algorithm.{slot}',),
      what,
      functools.partial(registry.parts_for, slot),
      _is_part,
      other_names=('none',),
    )
    for slot, what in PARTS.items()
  },
  sampler=ComponentKind(
    ('algorithm.sampler',),
    'chooses the groups that each step trains on',
    _table('jaxrl.data.samplers:SAMPLERS'),
    _derives('jaxrl.data.samplers:Sampler'),
  ),
  group_filter=ComponentKind(
    ('rollout.group_filter', 'algorithm.filters'),
    'drops groups that are not worth training on',
    _table('jaxrl.rollout.queue.group_filters:GROUP_FILTERS'),
    _is_group_filter,
    other_names=('none',),
  ),
  reward_shaper=ComponentKind(
    ('rollout.reward_shaping', 'algorithm.shapers'),
    "changes a group's rewards or weights",
    _table('jaxrl.rollout.queue.reward_shaping:REWARD_SHAPERS'),
    _is_reward_shaper,
    other_names=('none',),
  ),
  teacher_context=ComponentKind(
    ('algorithm.context',),
    'says what the policy is shown when it teaches itself',
    _table('jaxrl.rollout.queue.teacher_contexts:TEACHER_CONTEXTS'),
    _derives('jaxrl.rollout.queue.teacher_contexts:TeacherContext'),
  ),
  env=ComponentKind(
    ('env.*.env_type', 'env.*.env_config.env_type'),
    'the environment that the model plays',
    _table('jaxrl.envs.env_registry:ENVS'),
    _is_env,
    other_names=('',),
  ),
  env_manager=ComponentKind(
    ('env.*.manager',),
    'plays episodes and turns them into rows, in place of EnvManager',
    dict,
    _is_manager,
  ),
  prefix_sampler=ComponentKind(
    ('env.*.prefixes',),
    'chooses turns of earlier episodes that groups go on from',
    _table('jaxrl.rollout.queue.prefix_samplers:PREFIX_SAMPLERS'),
    _derives('jaxrl.rollout.queue.prefix_samplers:PrefixSampler'),
  ),
  opponent=ComponentKind(
    ('env.*.opponent',),
    'plays roles of an environment of several players in the place of the policy',
    _table('jaxrl.rollout.opponents:OPPONENTS'),
    _has_methods('reply'),
    other_names=('model',),
  ),
  grader=ComponentKind(
    (
      'rollout.rewards',
      'env.*.env_config.grader',
      'env.*.env_config.env_config.grader',
    ),
    'scores a reply',
    _table('jaxrl.envs.graders.composite:GRADERS'),
    _is_grader,
    other_names=('env', 'judge', 'reward_model'),
  ),
  tool=ComponentKind(
    ('env.*.env_config.tools',),
    'what the model can call in the environment tool_use',
    _table('jaxrl.envs.tools.toolbox:TOOLS'),
    _is_tool,
  ),
  agent=ComponentKind(
    ('env.*.env_config.agent',),
    "plays an episode of the environment agent through OpenAI's API",
    dict,
    _is_agent,
    is_open=True,
  ),
  generator=ComponentKind(
    (
      'dataset.path',
      'dataset.expert_path',
      'env.*.dataset.path',
      'eval.path',
      'eval.sets.*.path',
      'sft.path',
    ),
    "makes the rows of a data set, in place of a file: 'generate:NAME'",
    _table('jaxrl.data.row_sources:GENERATORS'),
    _is_generator,
    prefix=GENERATE_PREFIX,
  ),
  curriculum=ComponentKind(
    ('dataset.curriculum', 'env.*.dataset.curriculum'),
    'chooses the rows that are drawn',
    _table('jaxrl.data.curricula:CURRICULA'),
    _derives('jaxrl.data.curricula:Curriculum'),
  ),
  metric_sink=ComponentKind(
    ('logging.sinks',),
    'receives the metrics of every step',
    _table('launch.report.open_sinks:SINKS'),
    _is_metric_sink,
  ),
  trajectory_writer=ComponentKind(
    ('trajectory_dump.path',),
    'stores trajectories; built-in ones are chosen by the form of the path',
    dict,
    _is_writer,
    is_open=True,
  ),
  model_family=ComponentKind(
    ('model.random',),
    'the architecture of a model',
    _table('jaxrl.models.families:BUILT_IN'),
    _is_family,
  ),
  engine=ComponentKind(
    ('rollout.engine',),
    'generates the responses',
    _table('jaxrl.rollout.engine:ENGINES'),
    _derives('jaxrl.rollout.engine.engine_base:EngineBase'),
  ),
  reward_term=ComponentKind(
    ('rollout.rewards',),
    'what may stand in rollout.rewards beside graders',
    _table('launch.rollouts.reward_terms:REWARD_TERMS'),
  ),
  aggregation=ComponentKind(
    ('algorithm.aggregation',),
    'turns the losses of tokens into one number',
    _aggregations,
  ),
  row_format=ComponentKind(
    ('env.*.row_format',),
    'turns an episode into training rows',
    _table('jaxrl.rollout.episodes.row_format:ROW_FORMATS'),
  ),
  staleness_policy=ComponentKind(
    ('rollout.staleness_policy',),
    'what happens to tokens of old weights',
    _table('jaxrl.training.staleness:STALENESS_POLICIES'),
  ),
  sync_policy=ComponentKind(
    ('weight_sync.policy',),
    'when engines get new weights',
    _table('jaxrl.rollout.weights.weight_sync:SYNC_POLICIES'),
  ),
  transport=ComponentKind(
    ('weight_sync.transport',),
    'how new weights reach the engines',
    _table('launch.settings.cluster_settings:TRANSPORTS'),
  ),
  placement=ComponentKind(
    ('cluster.placement',),
    'which devices learner and engines have',
    _table('launch.settings.cluster_settings:PLACEMENTS'),
  ),
  packing=ComponentKind(
    ('batch.packing',),
    'places several sequences in one row',
    _table('jaxrl.training.batching.packing_plan:PACKINGS'),
  ),
  optimizer=ComponentKind(
    ('optimizer.name',),
    'turns gradients into updates of the weights',
    _table('jaxrl.training.optimizers:OPTIMIZERS'),
  ),
  lr_schedule=ComponentKind(
    ('optimizer.lr_schedule',),
    'how the learning rate goes on after its warm-up',
    _table('jaxrl.training.optimizers:SCHEDULES'),
  ),
  adapter=ComponentKind(
    ('model.lora',),
    'what is trained in place of the whole model',
    _table('jaxrl.models.lora:ADAPTER_KINDS'),
  ),
  remat_policy=ComponentKind(
    ('model.remat',),
    'what the backward pass keeps of the forward pass',
    _table('jaxrl.models.remat:REMAT_POLICIES'),
  ),
  sandbox=ComponentKind(
    ('env.*.env_config.sandbox',),
    'where the commands of swe and terminal_bench run',
    _table('jaxrl.envs.sandbox.sandbox_backends:SANDBOX_BACKENDS'),
  ),
  shell=ComponentKind(
    ('env.*.env_config.shell',),
    'how swe and terminal_bench run the commands of a reply',
    _table('jaxrl.envs.terminal.shell_session:SHELLS'),
  ),
  experience_store=ComponentKind(
    ('dataset.experience_store',),
    'a store of trajectories to learn from',
    _stores,
  ),
)


def find_kind(name: str) -> ComponentKind | None:
  """Returns the kind of this name; None if there is none.

  Args:
    name: The name, in the singular or plural, with '_', '-' or a space between words.
  """
  wanted = name.replace('-', '_').replace(' ', '_').lower()
  return next((kind for kind in KINDS if wanted in (kind.name, kind.plural)), None)


def load_component(component: Callable[..., Any] | str) -> Any:
  """Returns a component of a table, which may be a location.

  Args:
    component: The component or its location.
  """
  return import_object(component) if isinstance(component, str) else component


def component_docstring(component: Callable[..., Any]) -> str:
  """Returns the docstring of a function or class, also of a partial one.

  Args:
    component: The function or class.
  """
  is_partial = isinstance(component, functools.partial)
  if is_partial and '__doc__' not in vars(component):  # has that of `partial` itself
    component = unwrap(component)
  return inspect.getdoc(component) or ''


def defined_at(component: Callable[..., Any] | str) -> str:
  """Returns the file and the line of a component's definition.

  Args:
    component: The component or its location.

  Returns:
    'path/file.py:line'; without the line where the component cannot be imported here.
  """
  if isinstance(component, str):
    location, _, name = component.rpartition(':')
    if location.endswith('.py'):  # a class of such a file is in no module of Python's
      definition = re.compile(rf'(?:class|(?:async )?def) {name}\b|{name}\b.*=')
      lines = pathlib.Path(location).expanduser().read_text().splitlines()
      line_numbers = [i for i, line in enumerate(lines, 1) if definition.match(line)]
      return f'{location}:{line_numbers[-1]}' if line_numbers else location
  try:
    value = unwrap(load_component(component))
    module, line = value.__module__, f':{inspect.getsourcelines(value)[1]}'
  except (ImportError, OSError, TypeError, AttributeError):  # not installed, or no code
    module, line = str(component).rpartition(':')[0], ''
  return f'{module.replace(".", "/")}.py{line}'
