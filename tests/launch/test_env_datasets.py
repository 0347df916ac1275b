"""A run's data sets: those of environment tags, and those of evaluation sets."""

import json
import re
import types

import pytest

from configs import base
from jaxrl.data.dataset import GlobalDataset
from jaxrl.options import ConfigError
from launch.rollouts.env_datasets import (
  check_limit,
  describe_seen,
  load_datasets,
  named_training_rows,
  sibling_split_path,
)
from launch.rollouts.rollout_scheduler import RolloutScheduler
from launch.runtime.runtime_base import Runtime
from launch.settings.resolve import resolve_settings
from launch.settings.validation import validate
from tests.launch import runs, two_tags, varied


class Counting(Runtime):
  """Notes what it spawns."""

  def __init__(self):
    super().__init__()
    self.spawned = []

  def spawn(self, actor_class, *args, **options):
    self.spawned.append((actor_class, options))
    return super().spawn(actor_class, *args, **options)


def test_tags_share_their_rows_and_modes_do_not():
  config, host = two_tags.get_config(), Counting()
  config.dataset.limit = 20
  config.eval.num_tasks = -1
  train, tests, seen = load_datasets(resolve_settings(config), host)
  assert seen == {}
  assert train['arithmetic'] is train['more'] and tests['arithmetic'] is tests['more']
  assert [actor_class for actor_class, _ in host.spawned] == [GlobalDataset] * 2
  assert [options['mode'] for _, options in host.spawned] == ['sample', 'traversal']
  assert train['more'].size == 20
  assert [options['limit'] for _, options in host.spawned] == [20, None]  # -1: all
  config.eval.interval = 0
  assert load_datasets(resolve_settings(config), host).tests == {}


async def test_a_shared_curriculum_is_told_once_before_anyone_draws():
  heard = []

  class Data:
    async def report(self, results):
      heard.append(results)

  class Queue:
    def __init__(self, *results):
      self.played = list(results)

    def results(self):
      return self.played

    async def advance_step(self, step):
      heard.append(step)

  data, alone = Data(), Data()
  rollouts = types.SimpleNamespace(
    queues={
      'a': Queue((1, 0.5, 4)),
      'b': Queue((2, 1.0, 4), (3, 0.0, 4)),
      'c': Queue((9, 1.0, 4)),
      'game': Queue((5, 1.0, 4)),
    },
    datasets={'a': data, 'b': data, 'c': alone, 'game': None},
  )
  await RolloutScheduler.advance(rollouts, 7)  # pyright: ignore[reportArgumentType]
  assert heard[:2] == [[(1, 0.5, 4), (2, 1.0, 4), (3, 0.0, 4)], [(9, 1.0, 4)]]
  assert heard[2:] == [7] * 4


def write_rows(path, key, count):
  rows = [{key: f'{i}+{i}=', 'answer': str(2 * i), 'level': i} for i in range(count)]
  path.write_text('\n'.join(map(json.dumps, rows)) + '\n')
  return str(path)


def with_own_rows(tmp_path, **options):
  """Two tags that play the same environment, one of them on rows of its own."""
  config = varied.get_config()
  path = write_rows(tmp_path / 'train.jsonl', 'problem', 12)
  write_rows(tmp_path / 'test.jsonl', 'problem', 5)
  config.env.own = base.env_section(
    'math',
    max_tokens_per_step=4,
    dataset={'path': path, 'columns': {'question': 'problem'}, **options},
  )
  return config


def test_a_tag_has_rows_and_keys_of_its_own(tmp_path):
  config, host = with_own_rows(tmp_path, limit=8, curriculum='sequential'), Counting()
  settings = resolve_settings(config)
  train, tests, _ = load_datasets(settings, host)
  assert train['own'].size == 8 and train['arithmetic'].size != 8
  assert train['own'].get_data_item(3)['question'] == '3+3='
  # The file of the other split beside it, not the run's eval.path.
  assert tests['own'].size == 5 and tests['own'].path.endswith('test.jsonl')
  spawn_options = [options for _, options in host.spawned]
  assert [str(o['curriculum']) for o in spawn_options if o['mode'] == 'sample'] == [
    'shuffle',
    'sequential',
  ]


def test_a_tag_takes_what_it_leaves_open_from_the_run(tmp_path):
  config = with_own_rows(tmp_path, columns={})
  config.dataset.columns.question = 'problem'
  tasks = resolve_settings(config).tasks['own']
  assert tasks.columns.question == 'problem' and tasks.split == config.dataset.split
  assert str(tasks.curriculum) == config.dataset.curriculum
  assert resolve_settings(config).tasks['arithmetic'].path


def test_tags_that_name_the_same_rows_share_them(tmp_path):
  config, host = with_own_rows(tmp_path), Counting()
  config.env.again = base.env_section(
    'math', dataset={**config.env.own.dataset.to_dict(), 'limit': None}
  )
  train, tests, _ = load_datasets(resolve_settings(config), host)
  assert train['own'] is train['again'] and tests['own'] is tests['again']
  assert train['arithmetic'] is not train['own']


@pytest.mark.parametrize(
  ('change', 'message'),
  [
    ({'limit': 0}, 'env.own.dataset.limit=0: must be at least 1'),
    ({'curriculum': 'shufle'}, "env.own.dataset.curriculum.*'shuffle'"),
    ({'path': 'generate:arithmetic('}, 'env.own.dataset.path='),
  ],
)
def test_what_is_wrong_in_a_tag_is_told_with_its_key(tmp_path, change, message):
  config = with_own_rows(tmp_path, **change)
  with pytest.raises(ConfigError, match=message):
    validate(resolve_settings(config))


def test_a_tag_whose_tasks_are_seeds_has_no_rows():
  with pytest.raises(ConfigError, match='its tasks come from seeds'):
    base.env_section('frozen_lake', dataset={'path': 'rows.jsonl'})
  assert 'dataset' not in base.env_section('frozen_lake')


@pytest.mark.parametrize(
  'change', [{}, {'path': 'a.jsonl'}, {'columns': {'answer': 'a'}}]
)
def test_tools_around_an_environment_of_seeds_need_no_rows(tmp_path, change):
  config = with_own_rows(tmp_path)
  config.batch.num_groups = 3
  env_config = {'env_type': 'frozen_lake', 'tools': 'python'}
  config.env.tools = base.env_section('tool_use', env_config=env_config, dataset=change)
  settings = resolve_settings(config)
  if not change:
    validate(settings)
    return
  key = r'path=a\.jsonl' if 'path' in change else 'columns.answer=a'
  with pytest.raises(ConfigError, match=rf'env\.tools\.dataset\.{key}: has no effect'):
    validate(settings)


def test_a_tag_of_weight_0_is_only_evaluated(tmp_path):
  config, host = with_own_rows(tmp_path), Counting()
  config.env.own.weight = 0.0
  settings = resolve_settings(config)
  validate(settings)
  assert settings.training_tags == ['arithmetic']
  train, tests, _ = load_datasets(settings, host)
  assert 'own' not in train and tests['own'].size == 5
  config.eval.sets.only = base.eval_set(tag='arithmetic')
  with pytest.raises(ConfigError, match=r'own.weight=0: the tag is neither trained'):
    validate(resolve_settings(config))
  del config.eval.sets.only
  config.eval.interval = 0  # for once, the config is run without evaluations
  settings = resolve_settings(config)
  validate(settings)
  assert load_datasets(settings, host).tests == {}
  config.env.arithmetic.weight = 0.0
  with pytest.raises(ConfigError, match='no tag is left to train on'):
    validate(resolve_settings(config))
  config.env.own.weight = -1.0
  with pytest.raises(ConfigError, match=r'env.own.weight=-1.0: must be at least 0'):
    validate(resolve_settings(config))


def test_a_limit_of_training_rows_limits_their_evaluation_and_no_other(tmp_path):
  config = with_own_rows(tmp_path, limit=3)
  config.eval.num_tasks = -1
  train, tests, _ = load_datasets(resolve_settings(config), Counting())
  assert train['own'].size == 3 and tests['own'].size == 5  # all that are held out
  (tmp_path / 'test.jsonl').unlink()  # the evaluation plays the rows of training
  settings = resolve_settings(config)
  train, tests, _ = load_datasets(settings, Counting())
  assert train['own'].size == tests['own'].size == 3
  check_limit(settings, {'env.own.dataset.limit': '3'})
  config.eval.num_tasks = 2
  assert load_datasets(resolve_settings(config), Counting()).tests['own'].size == 2


@pytest.mark.parametrize('key', ['dataset.limit', 'env.own.dataset.limit'])
def test_a_limit_without_effect_on_an_evaluation_is_refused(tmp_path, key):
  settings = resolve_settings(with_own_rows(tmp_path))
  with pytest.raises(ConfigError, match=rf'--config.{key}=7: limits .*eval.num_tasks'):
    check_limit(settings, {key: '7'})
  check_limit(settings, {'seed': '7'})


def with_sets(tmp_path, **options):
  config = with_own_rows(tmp_path)
  config.eval.update(interval=4, num_tasks=3)
  config.eval.sets.easy = base.eval_set(tag='arithmetic')
  path = write_rows(tmp_path / 'hard.jsonl', 'q', 7)
  config.eval.sets.hard = base.eval_set(
    tag='own', path=path, columns={'question': 'q'}, num_tasks=-1, **options
  )
  return config


def test_evaluation_sets_have_files_and_numbers_of_their_own(tmp_path):
  config = with_sets(tmp_path, group_size=2, temperature=0.5, interval=2)
  settings = resolve_settings(config)
  validate(settings)
  easy, hard = settings.evaluations['easy'], settings.evaluations['hard']
  assert (easy.interval, easy.num_tasks, easy.group_size) == (4, 3, 1)
  assert (hard.interval, hard.group_size, hard.temperature) == (2, 2, 0.5)
  tests = load_datasets(settings, Counting()).tests
  assert list(tests) == ['easy', 'hard'] and tests['hard'].size == 7
  assert tests['hard'].get_data_item(0, 6)['question'] == '6+6='


@pytest.mark.parametrize(
  ('change', 'message'),
  [
    ({'tag': 'other'}, "config.eval.sets.hard.tag.*'other'"),
    ({'tag': ''}, 'config.eval.sets.hard.tag'),
    ({'temperature': -1.0}, 'eval.sets.hard.temperature=-1.0: must be at least 0'),
    ({'group_size': 0}, 'eval.sets.hard.group_size=0: must be at least 1'),
  ],
)
def test_what_is_wrong_in_a_set_is_told_with_its_key(tmp_path, change, message):
  config = with_sets(tmp_path)
  config.eval.sets.hard.update(change)
  with pytest.raises(ConfigError, match=message):
    validate(resolve_settings(config))


CONFIG = """
from tests.launch.test_env_datasets import with_sets
import pathlib

def get_config():
  config = with_sets(pathlib.Path({folder!r}), interval=1)
  config.env.own.weight = 0.0
  return config
"""


@pytest.mark.slow
def test_sets_are_evaluated_each_at_its_interval(tmp_path):
  """A whole run with a tag that is only evaluated, and its trajectories."""
  file = tmp_path / 'config.py'
  file.write_text(CONFIG.format(folder=str(tmp_path)))
  options = (
    '--config.sft.num_steps=0',
    '--config.num_steps=3',
    '--config.eval.sets.hard.interval=2',
    f'--config.trajectory_dump.path={tmp_path / "dump"}',
  )
  assert runs.main(tmp_path / 'run', *options, config=str(file)) == 0
  rows = {row['step']: row for row in runs.rows(tmp_path / 'run')}
  evaluated = {
    step: {name.split('/')[1] for name in row if name.startswith('eval/')}
    for step, row in rows.items()
  }
  both = {'easy', 'hard'}
  assert evaluated == {0: both, 1: set(), 2: {'hard'}, 3: both}
  assert rows[0]['eval/hard/tasks'] == 7 and rows[0]['eval/easy/tasks'] == 3
  dumped = [
    json.loads(line)
    for part in sorted((tmp_path / 'dump').rglob('*.jsonl'))
    for line in part.read_text().splitlines()
  ]
  played = {tuple(row['trajectory_id'].split('_')[:3:2]) for row in dumped}
  assert played == {('train', 'arithmetic'), ('val', 'easy'), ('val', 'hard')}
  names = [row['trajectory_id'] for row in dumped]
  assert len(set(names)) == len(names)


@pytest.mark.slow
def test_the_config_of_the_docs_trains_and_is_evaluated(tmp_path, monkeypatch):
  docs = (runs.ROOT / 'docs' / 'environments.md').read_text()
  (block,) = re.findall(r'```python\n# two_sources.py\n(.*?)```', docs, re.DOTALL)
  (tmp_path / 'two_sources.py').write_text(block)
  for name, question, answer in (
    ('gsm8k', 'question', 'answer'),
    ('deepmath', 'problem', 'final_answer'),
    ('aime', 'question', 'answer'),
  ):
    rows = [{question: f'{i}+1=', answer: str(i + 1)} for i in range(9)]
    (tmp_path / f'{name}.jsonl').write_text('\n'.join(map(json.dumps, rows)))
  monkeypatch.chdir(tmp_path)
  options = '--config.sft.num_steps=0', '--config.num_steps=2', runs.ONE_LAYER
  dump = f'--config.trajectory_dump.path={tmp_path / "dump"}'
  status = runs.main(tmp_path / 'run', *options, dump, config='two_sources.py')
  assert status == 0
  last = runs.rows(tmp_path / 'run')[-1]
  assert last['eval/gsm8k/tasks'] == 3 and last['eval/aime/tasks'] == 8
  assert 'eval/aime/pass@4' in last and 'eval/deepmath/tasks' not in last
  played = {path.name.split('-')[1] for path in (tmp_path / 'dump').glob('train-*')}
  assert played == {'gsm8k', 'deepmath'}


def seen_shares(config, **paths):
  for name, value in paths.items():
    (config.dataset if name == 'path' else config.eval).path = str(value)
  settings = resolve_settings(config)
  return load_datasets(settings, Runtime()).seen_shares, settings


def test_evaluating_on_training_rows_is_said(tmp_path):
  write_rows(tmp_path / 'rows.jsonl', 'question', 8)
  config = varied.get_config()
  shares, settings = seen_shares(config, path=tmp_path / 'rows.jsonl')
  assert shares == {'arithmetic': 1}
  assert describe_seen(shares) == 'arithmetic is evaluated on training rows'
  assert named_training_rows(settings) == {}  # it may be any file
  write_rows(tmp_path / 'more.jsonl', 'question', 16)
  config.eval.num_tasks = -1
  shares, _ = seen_shares(config, eval=tmp_path / 'more.jsonl')
  assert describe_seen(shares).endswith('training rows in 50% of its tasks')
  write_rows(tmp_path / 'train.jsonl', 'question', 8)
  _, settings = seen_shares(config, path=tmp_path / 'train.jsonl', eval='')
  assert named_training_rows(settings) == {'arithmetic': 1}
  (tmp_path / 'test.jsonl').write_text('{"question": "what?", "answer": "5"}\n')
  assert seen_shares(config)[0] == {}
  assert named_training_rows(resolve_settings(config)) == {}


@pytest.mark.parametrize(
  'train, test',
  [
    ('train.jsonl', 'test.jsonl'),
    ('foo_train.jsonl', 'foo_test.jsonl'),
    ('train/rows.jsonl', 'test/rows.jsonl'),
    ('Training-set.json', 'test-set.json'),
    ('x-train-00000-of-00001.jsonl', 'x-test-00000-of-00001.jsonl'),
    ('constraints.jsonl', ''),
    ('strain.jsonl', ''),
    ('train.jsonl', ''),
  ],
)
def test_the_file_of_another_split(tmp_path, train, test):
  for name in filter(None, (train, test, 'constests.jsonl', 'stest.jsonl')):
    (tmp_path / name).parent.mkdir(exist_ok=True)
    (tmp_path / name).write_text('')
  found = sibling_split_path(str(tmp_path / train), 'test')
  assert found == str(tmp_path / (test or train))
