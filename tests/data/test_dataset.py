"""GlobalDataset: sampling is a function of the seed, traversal meets each row once."""

import dataclasses
import json
import threading
import tracemalloc

import pytest

from jaxrl.data.dataset import GlobalDataset, GlobalDatasetManager
from jaxrl.data.row_sources import DataError
from jaxrl.data.seeds import StartingEpisode, starting
from jaxrl.rollout.env_manager import EnvManager
from tests.rollout.fakes import world

ROWS = [{'question': f'q{i}', 'answer': str(i), 'hard': i % 2} for i in range(10)]


def make(mode='sample', rows=ROWS, **options):
  return GlobalDataset(rows, mode=mode, **options)


def test_sample_is_a_pure_function_of_the_seed():
  one, other = make(), make()
  forward = [one.get_data_item(seed) for seed in range(50)]
  backward = [other.get_data_item(seed) for seed in reversed(range(50))]
  assert forward == backward[::-1]


def test_consecutive_seeds_meet_every_row_before_any_twice():
  data = make()
  for epoch in range(3):
    rows = [data.get_task(seed).index for seed in range(10 * epoch, 10 * epoch + 10)]
    assert sorted(rows) == list(range(10))
    assert rows != list(range(10))


def test_seed_zero_is_a_seed_and_seeds_differ():
  tasks = [make(seed=seed).get_task(0) for seed in range(20)]
  assert len({task.index for task in tasks}) > 3
  assert tasks[0].seed == 0
  with pytest.raises(ValueError, match='pass one'):
    make().get_data_item()


def test_traversal_by_index_does_not_depend_on_who_asks_first():
  data = make('traversal')
  for index in (7, 0, 9, 7, 3):
    task = data.get_task(1000 + index, index)
    assert (task.index, task.item['question']) == (index, f'q{index}')
  assert data.get_task(1010, 10) is None


def test_traversal_by_seed_gives_each_row_once_a_pass():
  data = make('traversal')
  first = [data.get_data_item(seed)['question'] for seed in range(10)]
  assert first == [f'q{i}' for i in range(10)]
  assert data.get_data_item(4)['question'] == 'q4'
  assert data.get_data_item(99) is None
  assert data.get_data_item(99) is None
  data.reset()
  assert data.get_data_item(99)['question'] == 'q0'


def test_traversal_without_seeds():
  data = make('traversal')
  assert [data.get_data_item()['answer'] for _ in range(10)] == list('0123456789')
  assert data.get_data_item() is None


@pytest.mark.parametrize('mode', ['sample', 'traversal'])
def test_many_threads_equal_one(mode):
  rows = [{'question': f'q{i}', 'answer': '-'} for i in range(3200)]
  data, indices = make(mode, rows), {}

  def ask(part):
    for index in range(part, 3200, 16):
      indices[index] = data.get_task(77 + index, index).index

  threads = [threading.Thread(target=ask, args=(part,)) for part in range(16)]
  for thread in threads:
    thread.start()
  for thread in threads:
    thread.join()
  alone = make(mode, rows)
  assert indices == {i: alone.get_task(77 + i, i).index for i in range(3200)}
  if mode == 'traversal':
    assert sorted(indices.values()) == list(range(3200))


def test_many_threads_without_index_share_a_pass():
  rows = [{'question': f'q{i}', 'answer': '-'} for i in range(800)]
  data, questions = make('traversal', rows), []

  def ask():
    while (item := data.get_data_item()) is not None:
      questions.append(item['question'])

  threads = [threading.Thread(target=ask) for _ in range(8)]
  for thread in threads:
    thread.start()
  for thread in threads:
    thread.join()
  assert sorted(questions) == sorted(row['question'] for row in rows)


def test_keys_are_given_out_under_one_name():
  rows = [{'prompt': 'p', 'ground_truth': 'g'}]
  data = make(rows=rows, question_key='prompt', answer_key='ground_truth')
  assert data.get_data_item(0) == {**rows[0], 'question': 'p', 'answer': 'g'}


def test_a_missing_key_lists_those_that_are_there():
  with pytest.raises(DataError, match="no key 'prompt'; its keys are question, answer"):
    make(question_key='prompt')
  with pytest.raises(DataError, match='row 10'):
    make(rows=[*ROWS, {'question': 'x'}])
  assert make(rows=[{'q': 1}], question_key='q', answer_key='').size == 1


def test_what_is_given_out_is_a_copy():
  data = make()
  data.get_data_item(3)['question'] = 'spoiled'
  assert data.get_data_item(3)['question'] != 'spoiled'


def test_filter_once_per_name():
  data, tested = make(), []

  def hard(item):
    tested.append(item)
    return item['hard']

  assert data.filter('hard', hard) == data.filter('hard', hard) == data.size == 5
  assert len(tested) == 10
  assert all(data.get_data_item(seed)['hard'] for seed in range(9))
  with pytest.raises(DataError, match="filter 'none' leaves no row"):
    data.filter('none', lambda item: False)


def test_empty_and_bad_mode():
  with pytest.raises(DataError, match='empty'):
    make(rows=[])
  with pytest.raises(ValueError, match='sample, traversal'):
    make('val')


def test_state_goes_through_json():
  data = make('traversal')
  for seed in (5, 6, 7):
    data.get_data_item(seed)
  resumed = make('traversal')
  resumed.load_state_dict(json.loads(json.dumps(data.state_dict())))
  for seed in (6, 8, 5, 9):
    assert resumed.get_data_item(seed) == data.get_data_item(seed)
  with pytest.raises(DataError, match='10 rows, the checkpoint was written with 9'):
    data.load_state_dict(make('traversal', ROWS[:9]).state_dict())


def test_manager_keys_by_all_options():
  manager, created = GlobalDatasetManager(), []

  def create(name, **options):
    created.append((name, options))
    return make(**options)

  one = manager.get('a', create, mode='traversal')
  assert manager.get('a', create, mode='traversal') is one
  other = manager.get('a', create, mode='sample')
  assert other is not one
  assert manager.register('a', object(), mode='sample') is other
  assert len(created) == 2
  one.get_data_item()
  manager.reset()
  assert one.get_data_item()['question'] == 'q0'


def test_a_hundred_thousand_items_serve_64_environments_without_a_copy_each():
  text = 'x' * 200
  rows = [{'question': f'what is {i}? {text}', 'answer': i} for i in range(100_000)]
  data, size = make(rows=rows), 64
  tracemalloc.start()
  try:
    shared = dataclasses.replace(world(), dataset=data)
    managers = [EnvManager(shared, i) for i in range(size)]
    before, _ = tracemalloc.get_traced_memory()
    held = {}
    for manager in managers:
      for seed in range(manager.group_id, 64 * 20, size):
        held[seed] = manager.context.dataset.get_task(seed).index
    after, _ = tracemalloc.get_traced_memory()
  finally:
    tracemalloc.stop()
    shared.pool.close()
  assert before < size * 8_000
  assert after - before < 2 * 8 * len(rows)  # two permutations of the row numbers
  assert len(set(held.values())) == len(held) == 64 * 20
  assert data.get_task(7).item['question'] is rows[held[7]]['question']


VERL = {
  'data_source': 'openai/gsm8k',
  'prompt': [{'role': 'user', 'content': '1+1?'}],
  'ability': 'math',
  'reward_model': {'style': 'rule', 'ground_truth': '2'},
  'extra_info': {'split': 'train', 'index': 0},
}


def test_rows_of_verl_are_read_as_they_are():
  item = GlobalDataset([VERL]).get_data_item(seed=0)
  assert (item['question'], item['answer']) == ('1+1?', '2')
  system = {'role': 'system', 'content': 'Be brief.'}
  several = VERL | {'prompt': [system, *VERL['prompt']]}
  item = GlobalDataset([several]).get_data_item(seed=0)
  assert item['question'] == [system, *VERL['prompt']]
  named = GlobalDataset([VERL], answer_key='extra_info.index')
  assert named.get_data_item(seed=0)['answer'] == 0


@pytest.mark.parametrize('empty', [None, '', ' \n', [], float('nan')])
@pytest.mark.parametrize('key', ['question', 'answer'])
def test_an_empty_question_or_answer_is_refused_with_its_row(key, empty):
  rows = [{'question': '1+1?', 'answer': '2'}] * 2
  rows.append(rows[0] | {key: empty})
  with pytest.raises(DataError, match=rf'row 2: its {key}'):
    GlobalDataset(rows)


def test_an_environments_row_is_that_of_its_episode_also_in_later_passes():
  data = make('traversal', ROWS[:3])

  def draw(number, *, is_trial=False, by_seed=True):
    with starting(StartingEpisode(70 + number, number, is_trial)):
      item = data.get_data_item(70 + number if by_seed else None)
    return item and ROWS.index({key: item[key] for key in ROWS[0]})

  assert draw(0, is_trial=True) == 0 and draw(0, is_trial=True, by_seed=False) == 0
  assert [draw(number) for number in (2, 0, 1, 0)] == [2, 0, 1, 0]
  assert draw(3) is None
  data.reset()
  assert [draw(number) for number in (4, 3, 2, 5)] == [1, 0, 2, 2]
  assert draw(6) is None
  assert draw(0, by_seed=False) == 0 and draw(0, by_seed=False) == 1


def test_rows_that_ask_the_same_of_other_pictures_are_other_tasks():
  rows = [
    {'question': 'How many?', 'answer': '2', 'images': [f'{n}.png']} for n in 'ab'
  ]
  one, other = GlobalDataset(rows).fingerprints()
  assert one != other
  assert GlobalDataset([rows[0] | {'split': 'test'}]).fingerprints() == [one]
  assert GlobalDataset(rows, question_key='').fingerprints() == []
