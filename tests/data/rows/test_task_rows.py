"""Questions and answers of tasks, in the rows of many frameworks."""

import json

import pytest

from jaxrl.data.dataset import GlobalDataset
from jaxrl.data.row_sources import SOURCE_KEY, DataError, load_rows
from jaxrl.data.rows.task_rows import TaskReader

USER = {'role': 'user', 'content': '1+1?'}
SYSTEM = {'role': 'system', 'content': 'Be brief.'}
REPLY = {'role': 'assistant', 'content': '2'}
VERL = {
  'data_source': 'openai/gsm8k',
  'prompt': [USER],
  'ability': 'math',
  'reward_model': {'style': 'rule', 'ground_truth': '2'},
  'extra_info': {
    'split': 'train',
    'index': 0,
    'answer': 'It is 2.',
    'question': '1+1?',
  },
}


def item(row, **keys):
  found = GlobalDataset([row], **keys).get_data_item(seed=0)
  assert found is not None
  return found


@pytest.mark.parametrize(
  'row',
  [
    {'question': '1+1?', 'answer': '2'},
    VERL,
    VERL | {'prompt': json.dumps([USER]), 'reward_model': '{"ground_truth": "2"}'},
    {'prompt': '1+1?', 'ground_truth': '2'},  # TRL
    {'prompt': [USER], 'solution': '2'},
    {'prompt': [USER], 'completion': [REPLY]},
    {'prompt': '1+1?', 'completion': '2'},
    {'problem': '1+1?', 'answer': '2', 'solution': 'Add them.'},
    {'problem': '1+1?', 'solution': '2'},
    {'question': '1+1?', 'final_answer': '2', 'difficulty': 3},
    {'instruction': '1+1?', 'input': '', 'output': '2'},  # Alpaca
    {'messages': [USER, REPLY]},  # OpenAI
    {'messages': json.dumps([USER, REPLY])},
    {'messages': [USER], 'answer': '2'},
    {'messages': [USER, REPLY], 'answer': '2'},
    {
      'conversations': [
        {'from': 'human', 'value': '1+1?'},
        {'from': 'gpt', 'value': '2'},
      ]
    },
    {'question': '1+1?', 'answer': ['2']},
    {'prompt': [USER | {'content': [{'type': 'text', 'text': '1+1?'}]}], 'answer': '2'},
  ],
)  # fmt: skip
def test_rows_of_other_frameworks(row):
  found = item(row)
  assert (found['question'], found['answer']) == ('1+1?', '2')
  for key in row.keys() - {'question', 'answer'}:
    assert found[key] == row[key]


TESTS = ['assert add(1, 2) == 3', 'assert add(0, 0) == 0']


@pytest.mark.parametrize(
  'row',
  [
    # The two forms in which MBPP is published.
    {'task_id': 1, 'text': 'Add.', 'code': 'x', 'test_list': TESTS},
    {'task_id': 1, 'prompt': 'Add.', 'code': 'x', 'test_list': TESTS},
    {'text': 'A note.', 'prompt': 'Add.', 'test_list': TESTS},
    {'text': 'A note.', 'question': 'Add.', 'test_list': TESTS},
  ],
)
def test_rows_of_mbpp_are_read_without_keys(row):
  found = item(row)
  assert (found['question'], found['answer']) == ('Add.', TESTS)


@pytest.mark.parametrize(
  'row',
  [
    {'text': 'Add.', 'answer': '2'},  # any text, perhaps a page of a book
    {'text': 'Add.', 'tests': TESTS},
    {'text': 5, 'test_list': TESTS},
    {'text': None, 'test_list': TESTS},
    {'text': ' ', 'test_list': TESTS},
  ],
)
def test_a_text_alone_is_no_question(row):
  with pytest.raises(DataError, match='question'):
    item(row)


def test_a_prompt_of_several_messages_stays_one():
  for prompt in ([SYSTEM, USER], [USER, REPLY, USER]):
    assert item(VERL | {'prompt': prompt})['question'] == prompt
  row = {'messages': [SYSTEM, USER, REPLY, USER, REPLY]}
  assert item(row)['question'] == [SYSTEM, USER, REPLY, USER]
  row = {'instruction': 'Add.', 'input': '1 2', 'output': '3'}
  assert item(row)['question'] == 'Add.\n\n1 2'


def test_keys_may_be_paths():
  keys = {'question_key': 'extra_info.question', 'answer_key': 'extra_info.answer'}
  found = item(VERL, **keys)
  assert (found['question'], found['answer']) == ('1+1?', 'It is 2.')
  with pytest.raises(
    DataError, match=r"no key 'extra_info\.reply'; its keys are data_"
  ):
    item(VERL, answer_key='extra_info.reply')


def test_answers_of_other_kinds_are_kept():
  for answer in (
    0,
    0.5,
    False,
    ['a', 'b'],
    [{'input': '2', 'output': '4'}],
    {'inputs': ['1'], 'outputs': ['2']},
    'None',
  ):
    assert item({'question': 'q', 'answer': answer})['answer'] == answer


@pytest.mark.parametrize(
  'answer',
  [
    '####',
    '#### ',
    '#### $$',
    '2+3=5\n####\n',
    r'\boxed{}',
    r'$\boxed{ }$.',
    r'\boxed{$$}',
    r'\boxed{\text{}}',
    r'\fbox{}',
    '<answer></answer>',
    '<answer>\n</answer>\n',
  ],
)
@pytest.mark.parametrize('key', ['answer', 'ground_truth', 'solution'])
def test_a_mark_without_an_answer_is_refused(answer, key):
  rows = [{'question': 'q', key: '#### 5'}, {'question': 'q', key: answer}]
  with pytest.raises(DataError, match=f'row 1: its answer, {key}, ends with a mark'):
    TaskReader('question', 'answer').check(rows, 'data')
  kept = {'question': 'q', key: 'Use #### before the answer'}
  assert TaskReader('question', 'answer').read(kept)['answer'] == kept[key]


EMPTY = [None, float('nan'), '', ' \n', [], {}, [None], ['', None]]


@pytest.mark.parametrize('empty', EMPTY, ids=repr)
@pytest.mark.parametrize('name', ['question', 'answer', 'prompt', 'ground_truth'])
def test_what_is_empty_is_refused_with_its_row(tmp_path, name, empty):
  keys = {'question': 'answer', 'prompt': 'ground_truth'}
  keys |= {other: key for key, other in keys.items()}
  rows = [{name: 'a', keys[name]: 'b'}, {name: empty, keys[name]: 'b'}]
  (tmp_path / 'a.jsonl').write_text(json.dumps(rows[0]))
  (tmp_path / 'b.jsonl').write_text('\n'.join(map(json.dumps, rows)))
  with pytest.raises(DataError) as caught:
    GlobalDataset(path=str(tmp_path))
  assert f'{tmp_path}/b.jsonl, row 1: its' in str(caught.value)
  assert f'{name}, is empty' in str(caught.value)


@pytest.mark.parametrize(
  ('row', 'words'),
  [
    ({'question': 5, 'answer': '2'}, 'not a text or messages'),
    ({'prompt': [USER, REPLY], 'answer': '2'}, 'ends with a message of the assistant'),
    ({'prompt': [USER | {'content': ' '}], 'answer': '2'}, 'no message has a content'),
    ({'prompt': [{'role': 'robot', 'content': 'x'}], 'answer': '2'}, "'robot'"),
    ({'messages': [USER]}, 'no reply of the assistant'),
    ({'messages': [USER, REPLY | {'content': ''}]}, 'no reply of the assistant'),
    ({'question': 'a'}, "no key 'answer'; its keys are question"),
    ({'answer': 'a'}, "no key 'question'; its keys are answer"),
    (VERL | {'reward_model': {'style': 'rule'}}, "no key 'answer'"),
  ],
)
def test_what_is_no_task_is_refused(row, words):
  with pytest.raises(DataError, match='row 0: ') as caught:
    item(row)
  assert words in str(caught.value)


def test_each_source_has_its_own_keys(tmp_path):
  (tmp_path / 'a.jsonl').write_text(json.dumps({'question': 'q1', 'answer': '1'}))
  rows = [{'prompt': 'q2', 'solution': '2'}, {'prompt': 'q3', 'answer': '3'}]
  (tmp_path / 'b.jsonl').write_text('\n'.join(map(json.dumps, rows[:1])))
  paths = (f'{tmp_path}/a.jsonl', f'{tmp_path}/b.jsonl')
  data = GlobalDataset(load_rows(paths), mode='traversal')
  found = [data.get_data_item() or {} for _ in range(2)]
  assert [(row['question'], row['answer']) for row in found] == [
    ('q1', '1'),
    ('q2', '2'),
  ]
  assert found[1][SOURCE_KEY] == paths[1]
  # Within a source the first row says where the answer is.
  (tmp_path / 'b.jsonl').write_text('\n'.join(map(json.dumps, rows)))
  with pytest.raises(DataError, match=r"b\.jsonl, row 1: no key 'solution'"):
    GlobalDataset(load_rows(paths))
