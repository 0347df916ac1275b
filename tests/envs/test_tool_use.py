"""Environments with tools: what a model is told, and what it is trained on."""

import pathlib
import shlex
import sys

import numpy as np
import pytest

from jaxrl.data.chat_tokenizer import ChatTokenizer
from jaxrl.data.dataset import GlobalDataset
from jaxrl.data.tokenizer import train_tokenizer
from jaxrl.envs import env_registry
from jaxrl.envs.games.countdown_env import CountdownEnv
from jaxrl.options import ConfigError
from jaxrl.rollout.env_manager import EnvContext, EnvManager
from jaxrl.rollout.thread_pool import ThreadPool
from tests.calls import env_factory
from tests.marks import SANDBOXED
from tests.rollout.fakes import completion, lease

HERE = pathlib.Path(__file__).parent / 'tools'
OWN = str(HERE / 'own_tools.py')
SERVER = shlex.join([sys.executable, str(HERE / 'server.py')])
PLAIN = {'env_type': 'countdown', 'tools': f'{OWN}:Counter'}


def written(name, **arguments):
  pairs = ', '.join(f'"{key}": {value}' for key, value in arguments.items())
  return f'<tool_call>{{"name": "{name}", "arguments": {{{pairs}}}}}</tool_call>'


class Scripted:
  """Says what it is told to, letter by letter: no tokenizer would have it so."""

  def __init__(self, chat, *replies):
    self._chat, self._replies, self.prompts, self.outputs = chat, list(replies), [], []

  async def generate(self, request_id, token_ids, sampling):
    self.prompts.append(list(token_ids))
    reply = self._replies.pop(0)
    ids = [i for letter in reply for i in self._chat.encode(letter)]
    self.outputs.append([*ids, self._chat.end_id])
    return completion(self.outputs[-1])

  async def abort(self, request_id):
    pass


@pytest.fixture(scope='module')
def chat():
  texts = ['<tool_call>{"name": "python", "arguments": {"code": "1 + 1"}}</tool_call>']
  return ChatTokenizer(train_tokenizer(texts * 9, 400))


async def play(chat, replies, options, *, dataset=None, **limits):
  """The row of one episode, the engine that played it, and its environments."""
  engine, envs = Scripted(chat, *replies), []
  factory = env_factory('tool_use', options)
  world = EnvContext(
    lambda: envs.append(factory()) or envs[-1],
    engine,
    chat,
    ThreadPool(1),
    None,
    dataset,
  )
  limits = {'max_steps': 9, 'max_length': 10**5, 'max_tokens_per_step': 10**4, **limits}
  (row,) = await EnvManager(world, **limits).play_episode(lease(), base_seed=3)
  world.pool.close()
  for env in envs:
    env.close()
  return row, engine


@SANDBOXED
async def test_an_episode_is_trained_on_what_the_model_wrote_alone(chat, tmp_path):
  (tmp_path / 'facts.txt').write_text('The answer to all is 42.\n\nCats purr.')
  tools = f'python(keep=True) + search(corpus="{tmp_path}") + mcp(command="{SERVER}")'
  replies = [
    'Let me see. '
    + written('python', code='"x = 6 * 7\\nprint(x)"')
    + '\n'
    + written('search', query='"answer"'),
    written('python', code='"x + 1"') + written('add', x=1, y=2),
    written('pyhton') + '<tool_call>{"name": ' + '</tool_call>',
    'So it is 42.\n#### 42',
  ]
  rows = [{'question': 'What is 6 times 7?', 'answer': '42'}]
  options = {'env_type': 'math', 'tools': tools, 'success_reward': 0.125}
  options['invalid_reward'] = -0.25
  row, engine = await play(
    chat, replies, options, dataset=GlobalDataset(rows), system_template='Be brief.'
  )
  assert row.extras.get('error') is None
  assert (row.stop_reason, row.score) == ('finish', 1.0)

  # Every token that was sampled, as it was sampled, and no other.
  assert row.tokens[row.action_mask].tolist() == [i for s in engine.outputs for i in s]
  history = []
  for prompt, sampled in zip(engine.prompts, engine.outputs, strict=True):
    assert prompt[: len(history)] == history
    assert not row.action_mask[len(history) : len(prompt)].any()
    history = prompt + sampled
  assert row.tokens.tolist() == history
  assert np.flatnonzero(row.rewards).tolist() == [
    len(engine.prompts[i]) + len(engine.outputs[i]) - 1 for i in range(4)
  ]

  # What it was shown: the tools once, then each result in a message of its own.
  decode = chat.tokenizer.decode
  first = decode(engine.prompts[0])
  assert first.count('"name": "python"') == 1 and '"name": "remember"' in first
  assert 'What is 6 times 7?' in first and 'Be brief.' in first
  heard = [
    decode(engine.prompts[i + 1][len(engine.prompts[i]) + len(engine.outputs[i]) :])
    for i in range(3)
  ]
  result = '<|im_start|>tool\n{}<|im_end|>\n'.format
  ask = '<|im_start|>assistant\n'
  passage = '[1] facts\nThe answer to all is 42.'
  assert heard[0] == f'\n{result("42")}{result(passage)}{ask}'
  assert heard[1] == f'\n{result("43")}{result("3")}{ask}'
  assert "Error: no tool 'pyhton'; there are python, search, add" in heard[2]
  assert 'Error: the call cannot be read: it is not JSON' in heard[2]

  assert [m['role'] for m in row.messages] == (
    'system user assistant tool tool assistant tool tool assistant tool tool assistant'
  ).split()
  assert [m['content'] for m in row.messages if m['role'] == 'assistant'] == replies
  tool_metrics = {k: v for k, v in row.metrics.items() if k.startswith('tools/') and v}
  assert tool_metrics == {
    'tools/calls': 6,
    'tools/errors': 2,
    'tools/unknown': 1,
    'tools/unreadable': 1,
    'tools/python/calls': 2,
    'tools/search/calls': 1,
    'tools/add/calls': 1,
  }
  assert row.metrics['accuracy'] == 1


async def test_a_game_of_several_turns_with_calls_between(chat):
  options = {
    **PLAIN,
    'env_config': {'attempts': 2, 'format_reward': 0.5},
    'max_calls': 1,
    'max_calls_per_turn': 1,
    'success_reward': 0.5,
    'invalid_reward': -1.0,
  }
  replies = ['1 +', written('count') * 2, written('count'), '<answer>1 + x</answer>']
  row, _ = await play(chat, replies, options)
  assert row.score == -2
  roles = [m['role'] for m in row.messages]
  assert roles[2:] == 'user assistant tool tool assistant tool assistant'.split()
  results = [m['content'] for m in row.messages if m['role'] == 'tool']
  assert (
    results[0] == '1'
    and 'at most 1' in results[1]
    and 'no calls are left' in results[2]
  )
  assert row.metrics['tools/refused'] == 2
  assert row.metrics['invalid_actions'] == 2


async def test_calls_take_turns(chat):
  row, _ = await play(chat, [written('count')] * 3, PLAIN, max_steps=3)
  assert (row.stop_reason, row.score) == ('max_steps', 0)
  assert row.metrics['tools/calls'] == 3


async def test_a_call_that_is_cut_off_is_told(chat):
  engine = Scripted(chat, written('count')[:-5], 'no')
  world = EnvContext(env_factory('tool_use', PLAIN), engine, chat, ThreadPool(1))
  limits = {'max_steps': 2, 'max_length': 10**4, 'max_tokens_per_step': 999}
  (row,) = await EnvManager(world, **limits).play_episode(lease(), base_seed=3)
  world.pool.close()
  assert 'does not end with </tool_call>' in row.messages[2]['content']


async def test_a_template_without_tools_is_refused(chat):
  tokenizer = train_tokenizer(['abc'], 300)
  tokenizer.chat_template = (
    "{% for m in messages %}{{ m['content'] }}<|im_end|>{% endfor %}"
  )
  row, _ = await play(ChatTokenizer(tokenizer), [], PLAIN)
  assert row.stop_reason == 'env_reset_failed'
  assert 'does not render tools' in row.extras['error']


async def test_what_fails_to_start_fails_the_reset(chat):
  row, _ = await play(chat, [], {**PLAIN, 'tools': f'mcp(command="{SERVER} broken")'})
  assert row.stop_reason == 'env_reset_failed'
  assert 'no luck today' in row.extras['error']


def test_kill_reaches_tools_and_environment():
  env = env_factory('tool_use', PLAIN)()
  env.reset(seed=0)
  ended = []
  env._env.kill = lambda: ended.append('env')
  (counter,) = env._toolbox._providers
  assert counter.open
  env.kill()
  assert ended == ['env'] and not counter.open
  env.reset(seed=1)
  assert counter.open


def test_the_end_of_a_data_set_starts_nothing():
  class Over(CountdownEnv):
    def reset(self, *, seed, options=None):
      return None, {}

  env = env_factory('tool_use', PLAIN)()
  env._env = Over()
  assert env.reset(seed=0) == (None, {})
  assert not env._toolbox._providers[0].open


def test_who_sets_the_tasks():
  assert env_registry.unwrapped('math').__name__ == 'MathEnv'
  assert env_registry.unwrapped('tool_use', PLAIN) is CountdownEnv
  lake = {'env_type': 'frozen_lake', 'env_config': {'map_size': 5}}
  assert env_registry.options_for_split('tool_use', lake, 'test') == {
    'env_type': 'frozen_lake',
    'env_config': {'map_size': 5, 'split': 'test'},
  }
  assert env_registry.options_for_split('countdown', {'count': 3}, 'test') == {
    'count': 3
  }


@pytest.mark.parametrize(
  'options, words',
  [
    ({}, "'env_type' must name"),
    ({'env_type': 'countdwn'}, "Did you mean 'countdown'"),
    ({'env_type': 'tool_use'}, 'it cannot wrap itself'),
    ({**PLAIN, 'env_config': {'cout': 3}}, "Did you mean 'count'"),
    ({**PLAIN, 'tools': ''}, 'name at least one'),
    ({**PLAIN, 'tools': 'pythn'}, "Did you mean 'python'"),
    ({**PLAIN, 'tool': 'python'}, "Did you mean 'tools'"),
    ({**PLAIN, 'max_calls': 0}, 'must be at least 1'),
  ],
)
def test_wrong_options_are_told_before_a_run(options, words):
  with pytest.raises(ConfigError, match=words):
    env_factory('tool_use', options)
