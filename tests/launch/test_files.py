"""Runs on files: what they read, how long they last, and that they resume."""

import json

import pytest

from jaxrl.options import ConfigError
from launch.settings import command_line
from launch.settings.resolve import resolve_settings
from launch.settings.validation import validate
from tests.launch import runs

SHORT = ('--config.eval.interval=0', '--config.optimizer.lr_schedule=constant')


def load(algorithm, *overrides, config=runs.DEBUG):
  command = command_line.parse([f'--config={config}:{algorithm}', *overrides], {})
  return command_line.load(command)


@pytest.mark.parametrize(
  'algorithm, options, words',
  [
    ('sft', ['dataset.path='], ['sft learns from files', '--config.dataset.path']),
    ('grpo', ['num_epochs=2'], ['--config.num_epochs=2.0', 'set --config.num_steps']),
    ('raft', ['num_epochs=2'], ['use an algorithm that learns from files']),
    ('cpt', ['dataset.system_prompt=Hi'], ['system_prompt=Hi: has no effect here']),
    ('sft', ['rollout.group_filter=accuracy'], ['group_filter=accuracy', 'no effect']),
    (
      'sft',
      ['rollout.reward_shaping=clip'],
      ['rollout.reward_shaping=clip', 'plays nothing'],
    ),
    (
      'dpo',
      ['eval.interval=0', 'rollout.staleness_policy=nonsense'],
      ["no rule 'nonsense'"],
    ),
    (
      'dpo',
      ['eval.interval=0', 'weight_sync.policy=nonsense'],
      ["no style 'nonsense'"],
    ),
    (
      'dpo',
      ['rollout.staleness_policy=drop'],
      ['staleness_policy=drop: has no effect', 'dpo'],
    ),
    ('sft', ['weight_sync.policy=trainer'], ['policy=trainer: has no effect', 'sft']),
    ('sft', ['num_epochs=-1'], ['num_epochs=-1', 'at least 0']),
    (
      'raft',
      ['algorithm.data_format=messages', 'algorithm.policy_loss=ppo_clip'],
      ['algorithm raft needs the log-probs', "old_logprobs_source='decoupled'"],
    ),
    (
      'raft',
      ['algorithm.data_format=messages', 'algorithm.advantage=grpo(rank_penalty=.1)'],
      ['log-probs that tokens were sampled with', 'do not have'],
    ),
    (
      'raft',
      ['algorithm.data_format=messages', 'algorithm.advantage=remax'],
      ['greedy attempt'],
    ),
    (
      'raft',
      ['algorithm.data_format=messages', 'algorithm.advantage=gigpo'],
      ['what the environment showed'],
    ),
    (
      'raft',
      ['algorithm.data_format=messages', 'algorithm.correction=tis'],
      ['correction judges what the policy sampled', 'leave it out'],
    ),
    (
      'raft',
      ['algorithm.data_format=messages', 'rollout.group_filter=reward_std'],
      ['group_filter=reward_std', 'plays nothing', "'none' removes"],
    ),
  ],
)
def test_what_files_cannot_give(algorithm, options, words):
  config = load(algorithm, *(f'--config.{option}' for option in options))
  with pytest.raises(ConfigError) as caught:
    validate(resolve_settings(config))
  for word in words:
    assert word in str(caught.value)


def rows(workdir):
  return [row for row in runs.rows(workdir) if 'loss/total' in row]


@pytest.mark.slow
def test_epochs_make_the_steps(tmp_path):
  options = ['--config.num_epochs=1.5', '--config.dataset.limit=9']
  assert runs.main(tmp_path, *SHORT, *options, config=f'{runs.DEBUG}:sft') == 0
  batch = load('sft').batch.num_groups
  metrics = rows(tmp_path)
  assert len(metrics) == -(-1.5 * 9 // batch)
  assert metrics[-1]['data/epoch'] >= 1.5 > metrics[-2]['data/epoch']


@pytest.mark.slow
@pytest.mark.parametrize('algorithm', ['sft', 'dpo'])
def test_a_run_that_was_stopped_goes_on_as_if_it_was_not(algorithm, tmp_path):
  """The second half reads the rows that are left, against the same reference."""
  config = f'{runs.DEBUG}:{algorithm}'
  options = [*SHORT, '--config.sft.num_steps=0', '--config.dataset.limit=7']
  for name, ends in (('whole', (4,)), ('parts', (2, 4))):
    for end in ends:
      steps = f'--config.num_steps={end}'
      assert runs.main(tmp_path / name, *options, steps, config=config) == 0
  whole, parts = (runs.numbers(tmp_path / name) for name in ('whole', 'parts'))
  assert whole == parts and len(whole) == 4
  assert runs.weights(tmp_path / 'whole') == runs.weights(tmp_path / 'parts')


@pytest.mark.slow
def test_rated_rows_of_the_users_own_names(tmp_path):
  """RAFT from a file: groups are prompts, and only their best answers are kept."""
  file = tmp_path / 'rated.jsonl'
  lines = [
    {
      'ask': f'{i % 3}+1?',
      'reply': str(i),
      'score': i > 2,
      'question': '',
      'answer': '-',
    }
    for i in range(6)
  ]
  file.write_text('\n'.join(map(json.dumps, lines)))
  keys = {'prompt': 'ask', 'response': 'reply', 'reward': 'score'}
  recorder = runs.record(
    tmp_path / 'run',
    *SHORT,
    '--config.sft.num_steps=0',
    f'--config.dataset.path={file}',
    *(f'--config.dataset.columns.{name}={key}' for name, key in keys.items()),
    '--config.algorithm.data_format=messages',
    '--config.num_epochs=2',
    config=f'{runs.DEBUG}:raft',
  )
  metrics = [row for _, row in recorder.metrics if 'loss/total' in row]
  assert len(metrics) == 3  # of two prompts each
  assert {row['tokens/rows'] for row in metrics} == {4}
  assert {row['advantage/kept'] for row in metrics} == {0.5}
  assert len({row['compile/programs'] for row in metrics[1:]}) == 1


def test_a_broken_row_is_named_before_any_work(tmp_path, capsys):
  file = tmp_path / 'pairs.jsonl'
  good = {'question': 'a', 'answer': 'b', 'chosen': 'c', 'rejected': 'd'}
  file.write_text(f'{json.dumps(good)}\n{json.dumps(good | {"chosen": None})}\n')
  options = [*SHORT, f'--config.dataset.path={file}']
  assert runs.main(tmp_path / 'run', *options, config=f'{runs.DEBUG}:dpo') == 2
  output = ''.join(capsys.readouterr())
  assert 'pairs.jsonl, row 1' in output.replace('\n', '')
  assert not runs.rows(tmp_path / 'run', 'sft')
