"""A box with a thing inside: a tool looks into it, and a guess is right in 1 of 4.

An open box shows its thing in the question, so there is no need to look. The question
says whether there is the tool, without a schema, which would be most of a prompt. The
base learns from a player who looks in two games of five, whatever the box, and else
reads the question or guesses. Runs are rewarded for the right thing.

    python -m launch.train --config=recipes/tasks/boxes.py:sft
"""

from typing import Any

import numpy as np

from configs import base
from jaxrl.algorithms import registry
from jaxrl.config import Config
from jaxrl.data.tool_formats import UNKNOWN
from recipes.tasks import sums

THINGS = ('cup', 'hat', 'key', 'pen')
CALL: dict[str, Any] = {'name': 'look', 'arguments': {}}
LOOK_SHARE = 0.4  # of the player's games
TOOL_SHARE = 0.75  # of the player's games: the others are played without the tool


class BoxEnv:
  """Asks what is in a box, lets the model look, and rewards the right answer.

  The seed of an episode draws the thing.

  Args:
    is_open: Whether the question tells what is in the box.
    has_tool: Whether the model may look.
    call_reward: The reward of a look.
  """

  uses_dataset = False  # its tasks are seeds

  def __init__(
    self, *, is_open: bool = False, has_tool: bool = True, call_reward: float = 0.0
  ):
    self._is_open = is_open
    self._has_tool = has_tool
    self._call_reward = call_reward
    self._thing, self._num_calls = '', 0

  def reset(self, *, seed: int, options: Any = None) -> tuple[str, dict[str, Any]]:
    """Fills the box."""
    self._thing = str(np.random.default_rng(seed).choice(THINGS))
    self._num_calls = 0
    return question(self._thing, self._is_open, self._has_tool), {}

  def step(self, action: str) -> tuple[Any, float, bool, bool, dict[str, Any]]:
    """Answers a call of the tool, or ends the game with the answer."""
    _, calls = UNKNOWN.parse(action)
    if not calls:
      right = float(action.strip() == self._thing)
      return '', right, True, False, self._info(right)
    if self._has_tool and calls == [CALL]:
      self._num_calls += 1
      content, reward = self._thing, self._call_reward
    else:
      content, reward = 'Error', 0.0
    return [{'role': 'tool', 'content': content}], reward, False, False, self._info(0.0)

  def _info(self, right: float) -> dict[str, Any]:
    return {'metrics': {'right': right, 'calls': float(self._num_calls)}}


def question(thing: str, is_open: bool, has_tool: bool) -> str:
  """Returns what the model is asked.

  Args:
    thing: What is in the box.
    is_open: Whether the question says what is in the box.
    has_tool: Whether the model may look.
  """
  state = f'open: {thing}' if is_open else 'closed'
  return f'{"You may look. " if has_tool else ""}The box is {state}. What is in it?'


def lessons(
  split: str = 'train', *, size: int = 2000, seed: int = 0
) -> list[dict[str, Any]]:
  """Generates games of a player who looks by chance.

  Args:
    split: Seeds the generator.
    size: The number of games.
    seed: Seeds the generator too.

  Returns:
    Rows with `messages`.
  """
  rng = np.random.default_rng([seed, int(split == 'test')])
  rows = []
  for _ in range(size):
    thing, guess = (str(rng.choice(THINGS)) for _ in range(2))
    is_open, has_tool = rng.random() < 0.5, rng.random() < TOOL_SHARE
    looks = has_tool and rng.random() < LOOK_SHARE
    messages: list[dict[str, Any]] = [
      {'role': 'user', 'content': question(thing, is_open, has_tool)}
    ]
    if looks:
      messages += [
        {'role': 'assistant', 'content': '', 'tool_calls': [{'function': CALL}]},
        {'role': 'tool', 'content': thing},
      ]
    answer = thing if looks or is_open else guess
    messages.append({'role': 'assistant', 'content': answer})
    rows.append({'messages': messages})
  return rows


def get_config(algorithm: str = 'grpo') -> Config:
  """Returns the config of a run, or of the base for `sft`."""
  config = base.get_config(algorithm)
  config.batch.max_length = 128
  for tag, is_open in {'open': True, 'closed': False}.items():
    config.env[tag] = base.env_section(
      'recipes.tasks.boxes:BoxEnv',
      max_steps=3,  # two looks and an answer
      max_tokens_per_step=40,
      env_config={'is_open': is_open},
    )
  if registry.make(algorithm).data_format == 'messages':
    config.dataset.path = 'generate:recipes.tasks.boxes:lessons()'
    config.dataset.limit = 2000
    sums.set_up_base(config, num_steps=350)
    return config
  sums.set_up_run(config, 'boxes', num_steps=40, learning_rate=6e-4)
  config.eval.update(interval=10, num_tasks=64, temperature=1.0)
  return config
