"""The config with tools, for a model that cannot write a call yet: one is put in its
first reply's place, so that a run has tool turns.
"""

from configs import tool_use
from jaxrl.envs.tool_use_env import ToolUseEnv

CALL = '<tool_call>{"name": "python", "arguments": {"code": "6 * 7"}}</tool_call>'


class Eager(ToolUseEnv):
  def reset(self, *, seed, options=None):
    self._first = True
    return super().reset(seed=seed, options=options)

  def step(self, action):
    first, self._first = self._first, False
    return super().step(CALL if first else action)


def get_config(algorithm='grpo'):
  config = tool_use.get_config(algorithm)
  config.env.problems.env_type = f'{__file__}:Eager'
  return config
