"""Word problems with a Python interpreter at hand.

    python -m launch.train --config=configs/tool_use.py

As it is: three steps of a random tiny model, which never calls anything, to see that
all parts run. For real: --config.model.checkpoint=FOLDER of a Qwen3, whose template
tells of tools, --config.dataset.path=train.jsonl of GSM8K, --config.num_steps=200, and
a machine to match.
"""

from ml_collections import ConfigDict

from configs import base, debug
from jaxrl.config import Config

PROMPT = '{observation}\nYou may run Python. End with the answer alone after ####.'
TOOLS = 'python(timeout=5.0, keep=True)'


def get_config(algorithm: str = 'grpo') -> Config:
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
