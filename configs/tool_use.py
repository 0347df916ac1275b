"""Trains on word problems with a Python interpreter as a tool.

    python -m launch.train --config=configs/tool_use.py

By default it trains a random tiny model for three steps, which never calls the tool, to
see that all parts run. To train a real model, set --config.model.checkpoint=FOLDER of a
Qwen3, whose template describes tools, --config.dataset.path=train.jsonl of GSM8K and
--config.num_steps=200 on a suitable machine.
"""

from ml_collections import ConfigDict

from configs import base, debug
from jaxrl.config import Config

PROMPT = '{observation}\nYou may run Python. End with the answer alone after ####.'
TOOLS = 'python(timeout=5.0, keep=True)'


def get_config(algorithm: str = 'grpo') -> Config:
  """Returns the config for tool use."""
  config = debug.get_config(algorithm)
  config.batch.update(max_length=1024)
  config.env = ConfigDict()
  config.env.problems = base.env_section(
    'tool_use',
    first_template=PROMPT,
    max_steps=4,
    max_tokens_per_step=64,
    env_config={'env_type': 'math', 'tools': TOOLS, 'max_calls': 6},
  )
  config.sft.num_steps = 0
  return config
