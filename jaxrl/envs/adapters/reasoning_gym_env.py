"""ReasoningGymEnv plays any generator of Reasoning Gym: one question, one turn.

See https://github.com/open-thought/reasoning-gym. Its own scorer grades the answer,
which the model gives within `<answer>` tags or on its last line.
"""

import importlib
from typing import Any, ClassVar

from jaxrl.envs import reply_parsing
from jaxrl.envs.env_registry import Info, ResetOptions
from jaxrl.options import JsonObject, OptionValues, unknown_name_error

ANSWER_HELP = 'Give your answer within <answer> tags.'

_USES_GLOBAL_RNG = (
  "it draws from the process's global random numbers, so its tasks would not repeat"
)
UNSUPPORTED_GENERATORS = {
  'composite': 'give each of its generators a tag of its own instead',
  'list_functions': _USES_GLOBAL_RNG,
  'pool_matrix': _USES_GLOBAL_RNG,
}

# Their scorers hand what the model wrote to Python's eval, some by way of sympy.
EVAL_SCORERS = frozenset(
  'binary_matrix countdown intermediate_integration n_queens polynomial_multiplication '
  'puzzle24 simple_integration spiral_matrix string_insertion'.split()
)


class ReasoningGymEnv:
  """Asks one question of a generator, a pure function of the seed and the options.

  The reward is the scorer's, from 0 to 1.

  Args:
    name: The name of the generator.
    arguments: The generator's own options, by the names of its config.
    threshold: The score from which an answer counts as correct.
    max_chars: The maximum number of characters of an answer; a longer one scores 0.
    unsafe: Also allow the generators of EVAL_SCORERS, whose scorers run the model's
      answer as code in this process.

  Raises:
    ValueError: If the generator cannot be created.
  """

  uses_dataset = False  # its tasks are seeds
  columns: ClassVar = {'given': 'string', 'expected': 'string'}

  def __init__(
    self,
    *,
    name: str = '',
    arguments: OptionValues | None = None,
    threshold: float = 1.0,
    max_chars: int = 10_000,
    unsafe: bool = False,
  ):
    self._name = name
    self._arguments = dict(arguments or {})
    self._threshold = threshold
    self._max_chars = max_chars
    self._create = _check_generator(name, self._arguments, unsafe)
    self._generator: Any = None
    self._entry: JsonObject = {}

  @classmethod
  def check(cls, **options: Any) -> None:
    """Checks the options.

    Raises:
      ValueError: If the generator cannot be created.
    """
    cls(**options)

  def reset(
    self, *, seed: int, options: ResetOptions | None = None
  ) -> tuple[str, Info]:
    """Generates the question of `seed`."""
    self._generator = self._create(self._name, **self._arguments, seed=seed, size=1)
    self._entry = self._generator[0]
    return self._entry['question'], {'suffix': ANSWER_HELP}

  def step(self, action: str) -> tuple[str, float, bool, bool, Info]:
    """Scores the reply's answer and ends the episode."""
    if self._generator is None:
      raise RuntimeError('call reset before step')
    answer = reply_parsing.tagged_answer(action)
    allowed = len(answer) <= self._max_chars
    score, failed = 0.0, False
    if allowed:
      try:
        score = float(self._generator.score_answer(answer, self._entry))
      except Exception:  # some scorers raise on an answer that they cannot read
        failed = True
    correct = float(score >= self._threshold)
    metrics = {'score': score, 'accuracy': correct, 'success': correct}
    metrics |= {'too_long': float(not allowed), 'scorer_failed': float(failed)}
    columns = {'given': answer[: self._max_chars]}
    columns['expected'] = str(self._entry['answer'])
    message = '' if allowed else f'An answer has at most {self._max_chars} characters.'
    info = {'metrics': metrics, 'columns': columns}
    return message, score, True, False, info


def _check_generator(name: str, arguments: OptionValues, unsafe: bool) -> Any:
  """Returns Reasoning Gym's `create_dataset`; raises ValueError if it would fail."""
  try:
    factory = importlib.import_module('reasoning_gym.factory')
    importlib.import_module('reasoning_gym')
  except ModuleNotFoundError as error:
    raise ValueError(
      "the environment 'reasoning_gym' needs its package: pip install -e '.[envs]'"
    ) from error
  where = f'reasoning_gym {name!r}'
  if name not in factory.DATASETS:
    raise unknown_name_error(name, factory.DATASETS, 'generator', 'reasoning_gym')
  if name in UNSUPPORTED_GENERATORS:
    raise ValueError(f'{where} cannot be played: {UNSUPPORTED_GENERATORS[name]}')
  if name in EVAL_SCORERS and not unsafe:
    raise ValueError(
      f"{where}: its scorer runs the model's answer as Python code in this process; "
      'say unsafe=True to allow that'
    )
  settings = factory.DATASETS[name][1]
  known = set(settings.__dataclass_fields__) - {'seed', 'size'}
  for key in arguments:
    if key not in known:
      raise unknown_name_error(key, known, 'argument', where)
  try:
    factory.create_dataset(name, **arguments, seed=0, size=1)
  except (AssertionError, TypeError, ValueError) as error:
    raise ValueError(f'{where}: {error}') from error
  return factory.create_dataset
