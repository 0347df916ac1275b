"""A taskset of verifiers with a tool, in a folder, and a model that plays it."""

import json
import re

from tests.data.letters import END
from tests.envs.swe_repos import write
from tests.rollout.gateway.agents import OWN

TASKSET = """
import os

import verifiers.v1 as vf

from sums.tool import AdderToolset


class SumsData(vf.TaskData):
  answer: str


class SumsTaskConfig(vf.TaskConfig):
  tools: vf.ToolsetConfig = vf.ToolsetConfig()


class SumsTask(vf.Task[SumsData, vf.State, SumsTaskConfig]):
  @classmethod
  def toolsets(cls, config):
    return [AdderToolset(config.tools)]

  @vf.reward(weight=1.0)
  async def right(self, trace: vf.Trace) -> float:
    if 'crash' in trace.last_reply:
      os._exit(3)
    return float(trace.last_reply.endswith(self.data.answer))

  @vf.reward(weight=0.25)
  async def used_tool(self, trace: vf.Trace) -> float:
    return float(len(trace.tool_messages))

  @vf.metric
  async def letters(self, trace: vf.Trace) -> float:
    return float(len(trace.last_reply))


class SumsConfig(vf.TasksetConfig):
  num_tasks: int = 3
  task: SumsTaskConfig = SumsTaskConfig()


class SumsTaskset(vf.Taskset[SumsTask, SumsConfig]):
  def load(self):
    return [
      SumsTask(
        SumsData(prompt=f'What is {i} + 10?', answer=str(i + 10)), self.config.task
      )
      for i in range(self.config.num_tasks)
    ]
"""
TOOL = '''
import verifiers.v1 as vf


class AdderToolset(vf.Toolset[vf.ToolsetConfig]):
  @vf.tool
  def add(self, a: int, b: int) -> int:
    """Adds two numbers."""
    return a + b


if __name__ == '__main__':
  AdderToolset.run()
'''
EXPORTS = "from sums.taskset import SumsTaskset\n\n__all__ = ['SumsTaskset']\n"


def write_taskset(folder):
  """Writes the package and returns its folder."""
  files = {'__init__.py': EXPORTS, 'taskset.py': TASKSET, 'tool.py': TOOL}
  write(folder / 'sums', files)
  return folder / 'sums'


def reply(prompt, sampling):
  """Calls the tool once or twice and says the sum; is wrong about 1, crashes at 2."""
  heard = ''.join(chr(i % OWN) for i in prompt)
  first = int(re.findall(r'What is (\d+)', heard)[0])
  results = re.findall('<tool:([^<]*)', heard)
  if first == 1 or len(results) > (first == 0):
    ending = {1: 'none of 12', 2: 'crash'}.get(first, f'It is {first + 10}')
    return f'{ending}{END}'
  arguments = {'a': first, 'b': 10 * len(results)}
  call = {'name': 'adder_toolset_add', 'arguments': arguments}
  return f'<tool_call>{json.dumps(call)}</tool_call>{END}'
