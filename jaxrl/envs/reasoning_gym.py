"""Any generator of Reasoning Gym, with its own scorer; one question, one turn.

https://github.com/open-thought/reasoning-gym. The model answers within `<answer>` tags
or on its last line.
"""

import importlib
from collections.abc import Mapping
from typing import Any, ClassVar

from jaxrl import signature
from jaxrl.envs import replies

HELP = 'Give your answer within <answer> tags.'

_GLOBAL = (
  "it draws from the process's own random numbers, so that its tasks would not repeat"
)
REFUSED = {
  'composite': 'give each of its generators a tag of its own instead',
  'list_functions': _GLOBAL,
  'pool_matrix': _GLOBAL,
}

# Their scorers hand what the model wrote to Python's eval, some by way of sympy.
EVALUATING = frozenset(
  'binary_matrix countdown intermediate_integration n_queens polynomial_multiplication '
  'puzzle24 simple_integration spiral_matrix string_insertion'.split()
)


class ReasoningGymEnv:
  """One question of the generator `name`, a pure function of the seed and options.

  arguments: the generator's own, by the names of its config. threshold: the score from
  which an answer counts as correct. max_chars: a longer answer scores 0. unsafe: allow
  the generators of EVALUATING too, whose scorers run a model's answer as code in this
  process. The reward is the scorer's, from 0 to 1.
  """

  uses_dataset = False  # its tasks are seeds
  columns: ClassVar = {'given': 'string', 'expected': 'string'}

  def __init__(
    self,
    *,
    name: str = '',
    arguments: Mapping[str, Any] | None = None,
    threshold: float = 1.0,
    max_chars: int = 10_000,
    unsafe: bool = False,
  ):
    self._name, self._arguments = name, dict(arguments or {})
    self._threshold, self._max_chars = threshold, max_chars
    self._create = _checked(name, self._arguments, unsafe)
    self._generator: Any = None
    self._entry: dict[str, Any] = {}

  @classmethod
  def check(cls, **options: Any) -> None:
    """Raises ConfigError for a generator that cannot be made."""
    cls(**options)

  def reset(
    self, *, seed: int, options: Mapping[str, Any] | None = None
  ) -> tuple[str, dict[str, Any]]:
    self._generator = self._create(self._name, **self._arguments, seed=seed, size=1)
    self._entry = self._generator[0]
    return self._entry['question'], {'suffix': HELP}

  def step(self, action: str) -> tuple[str, float, bool, bool, dict[str, Any]]:
    if self._generator is None:
      raise RuntimeError('call reset before step')
    given = replies.answer(action)
    allowed = len(given) <= self._max_chars
    score, failed = 0.0, False
    if allowed:
      try:
        score = float(self._generator.score_answer(given, self._entry))
      except Exception:  # some scorers raise on an answer that they cannot read
        failed = True
    correct = float(score >= self._threshold)
    metrics = {'score': score, 'accuracy': correct, 'success': correct}
    metrics |= {'too_long': float(not allowed), 'scorer_failed': float(failed)}
    columns = {'given': given[: self._max_chars]}
    columns['expected'] = str(self._entry['answer'])
    shown = '' if allowed else f'An answer has at most {self._max_chars} characters.'
    info = {'metrics': metrics, 'columns': columns}
    return shown, score, True, False, info


def _checked(name: str, arguments: Mapping[str, Any], unsafe: bool) -> Any:
  """Reasoning Gym's maker of generators; ConfigError where it would not make one."""
  try:
    factory = importlib.import_module('reasoning_gym.factory')
    importlib.import_module('reasoning_gym')
  except ModuleNotFoundError as error:
    raise signature.ConfigError(
      "the environment 'reasoning_gym' needs its package: pip install -e '.[envs]'"
    ) from error
  where = f'reasoning_gym {name!r}'
  if name not in factory.DATASETS:
    raise signature.unknown(name, factory.DATASETS, 'generator', 'reasoning_gym')
  if name in REFUSED:
    raise signature.ConfigError(f'{where} cannot be played: {REFUSED[name]}')
  if name in EVALUATING and not unsafe:
    raise signature.ConfigError(
      f"{where}: its scorer runs the model's answer as Python code in this process; "
      'say unsafe=True to allow that'
    )
  settings = factory.DATASETS[name][1]
  known = set(settings.__dataclass_fields__) - {'seed', 'size'}
  for key in arguments:
    if key not in known:
      raise signature.unknown(key, known, 'argument', where)
  try:
    factory.create_dataset(name, **arguments, seed=0, size=1)
  except (AssertionError, TypeError, ValueError) as error:
    raise signature.ConfigError(f'{where}: {error}') from error
  return factory.create_dataset
