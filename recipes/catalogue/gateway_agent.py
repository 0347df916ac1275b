"""Compares training in an environment with training an agent that speaks HTTP."""

import json
import urllib.request
from collections.abc import Mapping
from typing import Any

from configs import base
from jaxrl.config import Config
from jaxrl.envs.graders.answer_marks import final_answer
from jaxrl.envs.graders.answer_matching import answers_match
from recipes.recipe import Arm, Recipe
from recipes.tasks import sums

ORDER = 10
RECIPE = Recipe(
  title='An agent behind the gateway',
  question='Does an agent that calls the model through an OpenAI-compatible endpoint '
  'learn like an environment of our own?',
  arms={
    'environment': Arm(changes={'env.sums.weight': 1.0, 'env.agent.weight': 0.0}),
    'agent through the gateway': Arm(
      changes={'env.sums.weight': 0.0, 'env.agent.weight': 1.0}
    ),
  },
  panels=sums.PANELS,
  columns=sums.COLUMNS,
)


def solve(task: Mapping[str, Any], base_url: str, api_key: str) -> float:
  """Asks the model once, as any program would, and grades what it said.

  Args:
    task: The row of the data set.
    base_url: Where the endpoint is.
    api_key: The key of the episode.

  Returns:
    The reward: 1 for the right answer.
  """
  body = {
    'model': 'policy',
    'messages': [{'role': 'user', 'content': task['question']}],
  }
  request = urllib.request.Request(
    f'{base_url}/chat/completions',
    json.dumps(body).encode(),
    {'Authorization': f'Bearer {api_key}', 'Content-Type': 'application/json'},
  )
  opener = urllib.request.build_opener(urllib.request.ProxyHandler({}))
  with opener.open(request) as response:
    reply = json.load(response)['choices'][0]['message']['content'] or ''
  return float(answers_match(final_answer(reply, task['answer']), task['answer']))


def get_config(algorithm: str = 'grpo') -> Config:
  """Returns the config of a run, with the task once as either."""
  config = sums.get_config(algorithm)
  config.env.agent = base.env_section(
    'agent',
    max_tokens_per_step=16,
    max_concurrency=16,
    env_config={'agent': 'recipes.catalogue.gateway_agent:solve'},
  )
  config.eval.update(interval=50, num_tasks=64)  # each tag, also that not trained on
  return config
