"""What the user gets wrong: one clear line, before any work, and nothing half-done."""

import json
import pathlib

import pytest

from launch.rollouts import env_datasets
from tests.launch import runs

GOOD = {'question': 'What is 2 + 3?', 'answer': '5', 'solution': 'It is 5'}


def jsonl(path, rows):
  path.write_text(''.join(json.dumps(row) + '\n' for row in rows))
  return path


def refused(folder, capsys, *options, config=runs.DEBUG):
  """The one line that a refused run says."""
  status = runs.main(folder / 'run', *options, config=config)
  err = capsys.readouterr().err
  assert status == 2, err
  assert err.startswith('error: ') and err.count('\n') == 1, err
  left = {path.name for path in (folder / 'run').glob('*')}
  assert left <= {'.lock', 'error.txt', 'model'}, left
  return err


SETTINGS = {
  '--config.rollout.num_slot=3': 'did you mean --config.rollout.max_num_seqs?',
  '--config.num_steps=many': 'must be a whole number',
  '--config.batch.max_length=1.5': 'must be a whole number',
  '--config.sft.num_steps=0 --config.num_steps=0': 'nothing to do',
  '--config.num_steps=-1': 'num_steps=-1: must be at least 0',
  '--config.batch.num_groups=0': 'batch.num_groups=0: must be at least 1',
  '--config.batch.num_minibatches=0': 'batch.num_minibatches=0',
  '--config.batch.length_buckets=(16,32)': (
    'the largest must hold --config.batch.max_length=64'
  ),
  '--config.batch.length_buckets=(64,128)': '128 is longer than any row',
  '--config.algorithm.group_size=0': 'group_size=0',
  '--config.rollout.min_group_size=9': 'min_group_size=9: must be in [0, 8]',
  '--config.cluster.num_engines=2': 'num_engines=2: needs --config.cluster.ray=true',
  '--config.cluster.num_workers=3': 'num_workers=3: needs --config.cluster.ray=true',
  '--config.cluster.address=10': 'address=10: needs --config.cluster.ray=true',
  '--config.rollout.engine=jx': "Did you mean 'jax'",
  '--config.rollout.group_filter=reward_sd()': "Did you mean 'reward_std'",
  '--config.algorithm.policy_loss=ppo_clp()': "Did you mean 'ppo_clip'",
  '--config.algorithm.policy_loss=none': 'nothing to train without it',
  '--config.algorithm.advantage=gae': 'set --config.algorithm.value_loss=value_loss',
  '--config.dataset.curriculum=mixture(weights=(3,1))': 'it has 1, joined by',
  '--config.algorithm.policy_loss=ppo_clip(cliplow=.1)': "no option 'cliplow'",
  '--config.batch.packing=first_fit() --config.rollout.engine=jax(exact=True)': (
    'packing and exact mode'
  ),
  (
    '--config.batch.packing=first_fit() --config.batch.num_micro_batches=2'
  ): 'leave it at 1',
  '--config.kernels=fast': "--config.kernels='fast': is not one of auto, reference",
  '--config.mesh.data=3': 'the number of devices, 8',
  '--config.mesh.tensor=3': 'does not divide the number of devices, 8',
  '--config.dataset.path=generate:arithmetik()': "Did you mean 'arithmetic'",
  '--config.dataset.path=generate:arithmetic(max_nmber=3)': "no option 'max_nmber'",
  "--config.dataset.path=generate:arithmetic(kinds=['ad'])": 'ad',
  '--config.env.arithmetic.env_type=mth': "Did you mean 'math'",
  '--config.env.arithmetic.row_format=steps': 'is not one of auto, trajectory',
  '--config.env.arithmetic.max_steps=0': 'must be at least 1',
  '--config.model.checkpoint=/nowhere': 'model.checkpoint=/nowhere',
  '--config.seed=-1': '--config.seed=-1: must be at least 0',
  '--config.rollout.temperature=-1': 'rollout.temperature=-1.0: must be at least 0',
  '--config.rollout.temperature=0': 'rollout.temperature=0.0: must be above 0',
  '--config.optimizer.learning_rate=-1': 'learning_rate=-1.0: must be at least 0',
  '--config.rollout.async_ratio=-1': 'rollout.async_ratio=-1.0: must be at least 0',
  '--config.algorithm.clip_high=-.5': 'algorithm.clip_high=-0.5: must be at least 0',
  '--config.algorithm.policy_loss=ppo_clip(clip_high=-.5)': (
    'algorithm.policy_loss=ppo_clip: clip_high=-0.5 must be at least 0'
  ),
  '--config.algorithm.correction=tis(cap=0)': 'cap=0 must be above 0',
  '--config.algorithm.policy_loss=mix(mu=2)': 'mu=2 must be in [0, 1]',
  '--config.algorithm.correction=mis(low=3)': 'low=3 must be at most high=2.0',
  '--config.env.arithmetic.env_config.grader=exact()+format(tags="a",timeout=0)': (
    'timeout=0 must be above 0'
  ),
  '--config.model.remat=dot': "Did you mean 'dots'",
  '--config.optimizer.name=adam': "Did you mean 'adamw'",
  '--config.optimizer.lr_schedule=cosin': "Did you mean 'cosine'",
  '--config.optimizer.max_grad_norm=0': '--config.optimizer.max_grad_norm=0',
  '--config.dataset.curriculum=bandid': "Did you mean 'bandit'",
  '--config.dataset.system_prompt=Hi --config.sft.num_steps=0': (
    'set --config.env.TAG.system_template'
  ),
  (
    '--config.dataset.system_prompt=Hi --config.sft.num_steps=0 '
    "--config.dataset.experience_store=store(url='sqlite:////nowhere/a.db')"
  ): 'system_prompt=Hi: has no effect here',
  '--config.dataset.expert_path=a.jsonl': 'only samplers that mix expert rows',
}
# Options of components, each named with its key.
OUT_OF_RANGE = {
  'rollout.reward_shaping': {
    'overlong(cache=-1)': 'cache=-1 must be at least 0',
    'clip(low=1,high=-1)': 'low=1 must be at most high=-1',
    'clip(low=2)': 'low=2 must be at most high=1.0',
    'reward(divide=0)': 'divide=0 must not be 0',
    'difficulty_mask(low=.9,high=.1)': 'low=0.9 must be at most high=0.1',
    'difficulty_mask(high=2)': 'high=2 must be in [0, 1]',
    'difficulty_weights(easy=-1)': 'easy=-1 must be at least 0',
    'length_weights(shortest=-1)': 'shortest=-1 must be at least 0',
  },
  'rollout.group_filter': {
    'reward_std(threshold=-1)': 'threshold=-1 must be at least 0',
    'pass_rate(low=-1)': 'low=-1 must be in [0, 1]',
    'pass_rate(low=.9,high=.1)': 'low=0.9 must be at most high=0.1',
    'score_range(low=1,high=0)': 'low=1 must be at most high=0',
    'invalid_reward(low=1,high=0)': 'low=1 must be at most high=0',
  },
  'rollout.rewards': {
    'math(timeout=-1)': 'timeout=-1 must be above 0',
    'code(seconds=-1)': 'seconds=-1 must be above 0',
    'code(memory_mb=-1)': 'memory_mb=-1 must be above 0',
  },
  'env.arithmetic.timeouts.reset': {'-1': 'must be at least 0'},
  'env.arithmetic.max_steps': {'-1': 'max_steps=-1: must be at least 1'},
  'rollout.engine': {
    'jax(max_stop_ids=-1)': 'max_stop_ids=-1 must be at least 1',
    'jax(prompt_buckets=(-1,))': 'must be lengths of at least 1',
    'jax(decode_steps=0)': 'decode_steps=0 must be at least 1',
    'jax(decode_threads=-1)': 'decode_threads=-1 must be at least 0',
  },
  'rollout.min_group_size': {'-1': 'must be in [0, 8], as a group has 8 samples'},
  'batch.length_buckets': {
    '(-1,64)': '(-1, 64): each length must be at least 1',
    '(0,64)': '(0, 64): each length must be at least 1',
  },
  'eval.num_tasks': {'0': 'must be at least 1, or -1 for all'},
  'dataset.curriculum': {
    'bandit(target=-1)': 'target=-1 must be in [0, 1]',
    'bandit(decay=0)': 'decay=0 must be in (0, 1]',
    'bandit(prior=(0,1))': 'prior=(0, 1)',
  },
  'dataset.path': {
    'generate:arithmetic(max_number=-1)': 'max_number=-1 must be at least 1',
    'generate:arithmetic(max_factor=1)': 'max_factor=1 must be at least 2',
  },
  'algorithm.kl_coef': {'-1': 'must be at least 0'},
  'algorithm.kl_loss': {'k2(coef=-1)': 'coef=-1 must be at least 0'},
  'algorithm.entropy_loss': {'entropy_loss(coef=-1)': 'coef=-1 must be at least 0'},
  'algorithm.advantage': {'clip_b(mu=-1)': 'mu=-1 must be at least 0'},
  'algorithm.policy_loss': {
    'rec(regulariser_coef=-1)': 'regulariser_coef=-1 must be at least 0',
  },
}
# What names a file begins with the key that named it.
NAMED = {
  '--config.dataset.path=absent.jsonl': "dataset 'absent.jsonl' does not exist",
  '--config.eval.path=absent.jsonl': "dataset 'absent.jsonl' does not exist",
  '--config.sft.path=absent.jsonl': "dataset 'absent.jsonl' does not exist",
  '--config.algorithm.sampler=absent.py:S': "there is no file 'absent.py' (looked in ",
  '--config.dataset.curriculum=absent.py:C': "there is no file 'absent.py'",
  '--config.rollout.engine=absent.py:E': "there is no file 'absent.py'",
  '--config.rollout.group_filter=absent.py:f': "there is no file 'absent.py'",
  '--config.rollout.reward_shaping=absent.py:f': "there is no file 'absent.py'",
  '--config.rollout.rewards=absent.py:f': "there is no file 'absent.py'",
  '--config.model.random=absent.py:F': "there is no file 'absent.py'",
  '--config.trajectory_dump.path=absent.py:W': "there is no file 'absent.py'",
  '--config.env.arithmetic.env_type=absent.py:X': "there is no file 'absent.py'",
  '--config.algorithm.advantage=absent.py:a': "there is no file 'absent.py'",
}


@pytest.mark.parametrize('options', SETTINGS, ids=lambda text: text[9:45])
def test_a_wrong_setting(tmp_path, capsys, options):
  assert SETTINGS[options] in refused(tmp_path, capsys, *options.split(' '))


@pytest.mark.parametrize(
  'key, value', [(key, value) for key in OUT_OF_RANGE for value in OUT_OF_RANGE[key]]
)
def test_a_number_out_of_range_is_named_with_its_one_key(tmp_path, capsys, key, value):
  error = refused(tmp_path, capsys, f'--config.{key}={value}')
  assert error.startswith(f'error: --config.{key}=')
  assert OUT_OF_RANGE[key][value] in error
  assert error.count('--config.') == 1


@pytest.mark.parametrize(
  'algorithm, option', [('ppo', 'value_coef'), ('gigpo', 'omega')]
)
def test_a_coefficient_out_of_range(tmp_path, capsys, algorithm, option):
  error = refused(
    tmp_path,
    capsys,
    f'--config.algorithm.{option}=-1',
    config=f'{runs.DEBUG}:{algorithm}',
  )
  assert f'--config.algorithm.{option}=-1.0: must be at least 0' in error


def test_wrong_keys_of_rows_are_named_with_their_key(tmp_path, capsys):
  path = jsonl(tmp_path / 'rows.jsonl', [{**GOOD, 'level': 1}] * 4)
  options = (
    f'--config.env.arithmetic.dataset.path={path}',
    '--config.env.arithmetic.dataset.columns.question=ask',
  )
  error = refused(tmp_path, capsys, *options)
  assert error.startswith(f'error: {options[0]}: {path}, row 0: ')
  assert "no key 'ask'; its keys are question, answer, solution" in error
  assert 'set columns.question to the one' in error


def test_rows_of_experts_that_cannot_be_read_are_named_with_their_key(tmp_path, capsys):
  option = '--config.dataset.expert_path=absent.jsonl'
  error = refused(tmp_path, capsys, option, config=f'{runs.DEBUG}:mix_chord')
  assert error.startswith(f"error: {option}: dataset 'absent.jsonl' does not exist")
  assert 'algorithm.sampler' not in error


@pytest.mark.parametrize('option', NAMED, ids=lambda text: text[9:35])
def test_what_names_a_file_that_is_not_there(tmp_path, capsys, option):
  error = refused(tmp_path, capsys, option)
  key, _, value = option.removeprefix('--config.').partition('=')
  begin, _, end = error.partition(value)
  assert begin.removeprefix('error: ').removeprefix('--config.') in (
    f'{key}=',
    f"{key}='",
    "env.arithmetic: env_type='",
  )
  assert NAMED[option] in end


def test_an_algorithm_whose_file_is_not_there(tmp_path, capsys):
  error = refused(tmp_path, capsys, config=f'{runs.DEBUG}:absent.py:mine')
  assert 'algorithm absent.py:mine: ' in error
  assert "there is no file 'absent.py'" in error


def test_an_algorithm_that_does_not_exist(tmp_path, capsys):
  assert "'grpo'" in refused(tmp_path, capsys, config=f'{runs.DEBUG}:grpp')


@pytest.mark.parametrize(
  'text, words',
  [
    ('', 'empty: it holds no rows'),
    (
      json.dumps(GOOD) + '\n{"question": \n',
      'rows.jsonl, line 2, column 13: not valid JSON: Expecting value',
    ),
    ('[1]\n', 'line 1: a row must be an object, not list'),
    ('{"query": "2 + 3"}\n', "no key 'question'; its keys are query"),
    ('{"question": "2 + 3", "answer": null}\n', 'its answer, answer, is empty (None)'),
  ],
)
def test_a_data_set_that_cannot_be(tmp_path, capsys, text, words):
  path = tmp_path / 'rows.jsonl'
  path.write_text(text)
  error = refused(tmp_path, capsys, f'--config.dataset.path={path}')
  assert words in error and 'rows.jsonl' in error


def test_a_missing_file(tmp_path, capsys):
  error = refused(tmp_path, capsys, '--config.dataset.path=absent.jsonl')
  assert "'absent.jsonl' does not exist" in error


def test_prompts_of_which_none_fits(tmp_path, capsys):
  question = ' '.join(str(i) for i in range(200))
  path = jsonl(tmp_path / 'rows.jsonl', [{**GOOD, 'question': question}] * 4)
  error = refused(tmp_path, capsys, f'--config.dataset.path={path}')
  assert (
    'none of the first 8 tasks can be started' in error and 'max_length=64' in error
  )


def test_an_environment_that_cannot_begin(tmp_path, capsys):
  (tmp_path / 'broken.py').write_text(
    'class Broken:\n  def reset(self, **_):\n    raise OSError("no game server")\n'
  )
  config = tmp_path / 'config.py'
  config.write_text(
    'from configs import base, debug\ndef get_config():\n  c = debug.get_config()\n'
    f'  c.env.x = base.env_section("{tmp_path}/broken.py:Broken")\n  return c\n'
  )
  error = refused(tmp_path, capsys, config=str(config))
  assert 'no game server' in error


RETURNS = {
  "def reset(self, *, seed, options=None):\n    return 'go'\n": (
    'Own.reset returned a str; it must return (observation, info)'
  ),
  "def reset(self, *, seed, options=None):\n    return 'go', None\n": (
    'Own.reset returned a NoneType as info; it must be a dict'
  ),
  "def step(self, action):\n    return '', 1.0, True\n": (
    'Own.step returned a tuple of 3; it must return (observation, reward, terminated, '
    'truncated, info)'
  ),
  "def step(self, action):\n    return '', 'good', True, False, {}\n": (
    "Own.step returned the reward 'good'; it must be a number"
  ),
  "def step(self, action):\n    return '', 1.0, 'no', False, {}\n": (
    "Own.step returned terminated='no'; it must be True or False"
  ),
  'def step(self, action):\n    return 5, 1.0, False, False, {}\n': (
    'Own.step returned an int as observation; it must be a text, a list of messages, '
    'or a list of parts of a message ({folder}/own.py, line 13)'
  ),
  'def reset(self, *, seed, options=None):\n    return 5, {}\n': (
    'Own.reset returned an int as observation; it must be a text, a list of messages, '
    'or a list of parts of a message ({folder}/own.py, line 13)'
  ),
  "def step(self, action):\n    return '', float('nan'), True, False, {}\n": (
    'Own.step returned the reward nan; it must be a finite number of at most ±1e+18 '
    '({folder}/own.py, line 13)'
  ),
  'step = property()\n  del Base.step, step\n': 'Own in {folder}/own.py:Own has no ',
}
OWN = """
class Base:
  def reset(self, *, seed, options=None):
    self.seed = seed
    return 'go', {{}}
  def step(self, action):
    score = 1 / len(action)
    if self.seed % 2 and action == first.setdefault(self.seed, action):
      raise KeyError('rare')
    return '', score, True, False, {{}}
first = {{}}
class Own(Base):
  {}
"""


def own_env(folder, method='pass'):
  (folder / 'own.py').write_text(OWN.format(method))
  config = folder / 'config.py'
  config.write_text(
    'from configs import base, debug\ndef get_config():\n  c = debug.get_config()\n'
    f'  c.env.x = base.env_section("{folder}/own.py:Own")\n  return c\n'
  )
  return str(config)


@pytest.mark.parametrize('method', RETURNS, ids=range(len(RETURNS)))
def test_an_environment_that_returns_something_else(tmp_path, capsys, method):
  error = refused(tmp_path, capsys, config=own_env(tmp_path, method))
  assert error.startswith('error: --config.env.x: ')
  assert RETURNS[method].format(folder=tmp_path) in error


@pytest.mark.parametrize(
  'method, message',
  [
    (
      "step = lambda self, action: ('', 1.0, True, {})",
      'Own.step returned a tuple of 4',
    ),
    (
      'step = property()\n  del Base.step, step',
      'Own in {folder}/own.py:Own has no method step',
    ),
  ],
)
def test_an_environment_that_is_given_tools_is_tried_too(
  tmp_path, capsys, method, message
):
  config = pathlib.Path(own_env(tmp_path, method))
  text = config.read_text()
  own = f'"{tmp_path}/own.py:Own"'
  config.write_text(
    text.replace(
      f'({own})', f'("tool_use", env_config={{"env_type": {own}, "tools": "python"}})'
    )
  )
  window = '--config.batch.max_length=512'  # for what describes the tool
  error = refused(tmp_path, capsys, window, config=str(config))
  assert (
    error.startswith('error: --config.env.x: ')
    and message.format(folder=tmp_path) in error
  )
  assert f'{tmp_path}/own.py' in error


def test_a_function_may_build_an_environment_and_is_told_what_that_lacks(
  tmp_path, capsys
):
  config = pathlib.Path(own_env(tmp_path, 'step = property()\n  del Base.step, step'))
  with (tmp_path / 'own.py').open('a') as file:
    file.write('def build():\n  return Own()\n')
  config.write_text(config.read_text().replace('own.py:Own', 'own.py:build'))
  error = refused(tmp_path, capsys, config=str(config))
  assert f'env.x: build in {tmp_path}/own.py:build has no method step' in error


MANAGER = """
from jaxrl.rollout.env_manager import EnvManager
class Without(EnvManager):
  async def step(self, cache, completion):
    cache.turns[-1].reward, cache.terminated = 1.0, True
class Broken(EnvManager):
  def __init__(self, *args, **options):
    raise {error}
"""


@pytest.mark.slow
def test_a_manager_of_ones_own_may_play_without_step(tmp_path):
  config = own_env(tmp_path, 'step = property()\n  del Base.step, step')
  (tmp_path / 'manager.py').write_text(MANAGER.format(error='ValueError'))
  options = ('--config.num_steps=1', '--config.sft.num_steps=0')
  manager = f'--config.env.x.manager={tmp_path}/manager.py:Without'
  run = runs.record(tmp_path / 'run', *options, manager, config=config)
  tagged = [rows for _, _, groups, _ in run.played for rows in groups]
  assert any(row.tag == 'x' and row.score == 1 for rows in tagged for row in rows)


def test_what_a_manager_of_ones_own_raises_has_its_place(tmp_path, capsys):
  (tmp_path / 'manager.py').write_text(MANAGER.format(error='ValueError("no game")'))
  manager = f'--config.env.x.manager={tmp_path}/manager.py:Broken'
  error = refused(tmp_path, capsys, manager, config=own_env(tmp_path))
  assert error.startswith('error: --config.env.x or rollout: no game')
  assert f'({tmp_path}/manager.py, line 8)' in error


@pytest.mark.slow
def test_what_an_environment_raises_is_told_once_with_its_line(
  tmp_path, caplog, capsys
):
  options = ('--config.num_steps=1', '--config.sft.num_steps=0')
  lenient = '--config.rollout.min_group_size=2'
  runs.record(tmp_path / 'run', *options, lenient, config=own_env(tmp_path))
  (line,) = [text for text in caplog.messages if 'a trial step' in text]
  assert line.endswith(f'division by zero ({tmp_path}/own.py, line 7)')
  lines = capsys.readouterr().out.splitlines()  # the console's, once the run has begun
  assert [text for text in lines if 'warning: env.x: ' in text] == [
    "warning: env.x: an episode failed with env_error (shown once): KeyError: 'rare' "
    f'({tmp_path}/own.py, line 9)'
  ]


def test_no_environment_and_too_many(tmp_path, capsys):
  text = (
    'from configs import base, debug\ndef get_config():\n  c = debug.get_config()\n'
  )
  none, many = tmp_path / 'none.py', tmp_path / 'many.py'
  none.write_text(text + '  del c.env.arithmetic\n  return c\n')
  assert 'has no environment' in refused(tmp_path, capsys, config=str(none))
  more = "  for x in 'ab':\n    c.env[x] = base.env_section('math')\n  return c\n"
  many.write_text(text + more)
  error = refused(tmp_path, capsys, config=str(many))
  assert 'batch.num_groups=2: each of the 3 environment tags' in error


def test_a_folder_that_is_no_model(tmp_path, capsys):
  (tmp_path / 'folder').mkdir()
  error = refused(tmp_path, capsys, f'--config.model.checkpoint={tmp_path}/folder')
  assert 'config.json' in error


def test_ones_own_file_that_python_cannot_read_shows_where(tmp_path, capsys):
  (tmp_path / 'mine.py').write_text('def mine(*, a=1):\n  return (a\n')
  status = runs.main(tmp_path / 'run', config=f'{runs.DEBUG}:{tmp_path}/mine.py:mine')
  err = capsys.readouterr().err
  assert status == 2 and err.count('\n') == 1
  assert f'{tmp_path}/mine.py, line 2: ' in err and err.endswith(': return (a\n')


@pytest.mark.slow
def test_after_a_failed_start_the_right_one_is_as_if_there_had_been_none(
  tmp_path, capsys
):
  """The tokenizer of the wrong data does not stay."""
  wrong = jsonl(
    tmp_path / 'wrong.jsonl', [{**GOOD, 'question': f'{list(range(99))}'}] * 4
  )
  refused(tmp_path, capsys, f'--config.dataset.path={wrong}')
  options = (
    '--config.sft.num_steps=0',
    '--config.num_steps=1',
    '--config.eval.interval=0',
  )
  assert runs.main(tmp_path / 'run', *options) == 0
  assert runs.main(tmp_path / 'other', *options) == 0
  assert runs.weights(tmp_path / 'run') == runs.weights(tmp_path / 'other')


@pytest.mark.slow
def test_prompts_that_do_not_fit_are_left_out_and_counted(tmp_path, capsys):
  """And a data set smaller than a batch is gone through again."""
  question = ' '.join(str(i) for i in range(200))
  path = jsonl(tmp_path / 'rows.jsonl', [{**GOOD, 'question': question}, GOOD, GOOD])
  recorder = runs.record(
    tmp_path / 'run',
    f'--config.dataset.path={path}',
    '--config.sft.num_steps=0',
    '--config.batch.num_groups=4',
    '--config.rollout.max_num_seqs=32',
    config=runs.DEBUG,
  )
  rows = [
    row
    for _, kind, groups, _ in recorder.played
    for group in groups
    for row in group
    if kind == 'train'
  ]
  assert len(rows) == 3 * 4 * 8
  assert all(row.action_mask.any() for row in rows)
  last = [metrics for _, metrics in recorder.metrics if 'loss/total' in metrics][-1]
  assert last['queue/stopped/prompt_too_long'] >= 8
  assert 'prompt_too_long (shown once): the first prompt, of row 0,' in (
    capsys.readouterr().out
  )


def test_the_test_file_of_two_sources_is_read_once(tmp_path):
  train, test = (
    jsonl(tmp_path / f'{name}.jsonl', [GOOD]) for name in ('train', 'test')
  )
  sources = str(train), str(test)
  assert env_datasets.sibling_split_path(sources, 'test') == str(test)
