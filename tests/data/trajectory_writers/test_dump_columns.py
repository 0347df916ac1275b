"""Columns: their types are kept, and what is wrong with them is told at once."""

import json
import logging

import numpy as np
import pytest

from jaxrl.data import trajectory_codec
from jaxrl.data.trajectory_writers.dump_columns import STANDARD_COLUMNS, DumpColumns
from tests.data.trajectory_writers.dumps import row

FACTS = {'model_name': 'm', 'mode': 'train'}


def test_all_columns_when_none_are_asked_for():
  columns = DumpColumns(env_columns={'given': 'string', 'level': 'int'})
  assert list(columns.types) == [*STANDARD_COLUMNS, 'given', 'level']
  played = row(7, columns={'given': 'x', 'level': np.int64(3), 'other': 1})
  [record] = columns.rows([played], 7, **FACTS)
  content = trajectory_codec.from_json(json.loads(record.pop('save_content')))
  assert content.columns == played.columns
  np.testing.assert_array_equal(content.rollout_logprobs, played.rollout_logprobs)
  assert record == {
    'trajectory_id': 't_7_0_107_0_0', 'task_idx': 7, 'model_name': 'm', 'step': None,
    'turn': 0, 'stop_reason': 'finish', 'mode': 'train', 'episode_score': 0.5,
    'given': 'x', 'level': 3,
  }  # fmt: skip


def test_what_a_row_sets_holds(caplog):
  own = {
    'save_content': {'mine': [1]}, 'model_name': 'other', 'stop_reason': 'solved',
    'mode': 'shadow', 'episode_score': 9, 'note': 'n', 'lost': 1,
  }  # fmt: skip
  columns = DumpColumns(env_columns={'note': 'string'})
  with caplog.at_level(logging.WARNING):
    [record] = columns.rows([row(columns=own)], 0, **FACTS)
  assert record['save_content'] == '{"mine":[1]}'
  assert (record['model_name'], record['stop_reason']) == ('other', 'solved')
  assert (record['mode'], record['episode_score']) == ('shadow', 9.0)
  assert record['note'] == 'n'
  assert 'lost' not in record
  assert 'column lost: no dump has it: declare it' in caplog.text


def test_an_asked_column_that_no_row_sets_is_told(caplog):
  columns = DumpColumns(
    [['seen', 'bigint'], ['unseen', 'string']], {'seen': '', 'unseen': ''}
  )
  with caplog.at_level(logging.WARNING):
    [record] = columns.rows([row(columns={'seen': 4})], 0, **FACTS)
  assert record == {'seen': 4, 'unseen': None}
  assert 'column unseen: no row sets it' in caplog.text
  assert 'column seen' not in caplog.text


def test_asked_columns_in_their_order_and_the_score_of_the_episode():
  columns = DumpColumns([['episode_score', 'float'], ('turn', 'BIGINT')])
  group = [row(turn=0), row(turn=1), row(sample_index=1, rewards=(0, 2))]
  records = columns.rows(group, 0, **FACTS)
  assert [list(r.items()) for r in records] == [
    [('episode_score', 1.0), ('turn', 0)],
    [('episode_score', 1.0), ('turn', 1)],
    [('episode_score', 2.0), ('turn', 0)],
  ]


def test_what_is_played_again_at_another_step_or_in_another_mode_has_another_id():
  columns = DumpColumns([('trajectory_id', 'string'), ('step', 'bigint')])
  group = [row(turn=0), row(turn=1), row(sample_index=1)]
  records = [
    each
    for step, mode in [(0, 'train'), (0, 'val'), (2, 'val'), (20, 'val')]
    for each in columns.rows(group, step=step, model_name='m', mode=mode)
  ]
  assert [each['step'] for each in records] == [0] * 6 + [2] * 3 + [20] * 3
  assert len({each['trajectory_id'] for each in records}) == len(records)


def test_the_content_begins_with_the_messages_and_may_lack_the_arrays():
  played = row(messages=[{'role': 'user', 'content': 'Go'}])
  [whole] = DumpColumns().rows([played], 0, **FACTS)
  assert whole['save_content'].startswith(
    '{"messages":[{"role":"user","content":"Go"}]'
  )
  keys = list(json.loads(whole['save_content']))
  assert keys[-5:] == list(trajectory_codec.PER_TOKEN_FIELDS)
  [short] = DumpColumns(save_arrays=False).rows([played], 0, **FACTS)
  assert list(json.loads(short['save_content'])) == keys[:-5]


@pytest.mark.parametrize(
  'names, message',
  [
    ([['task_id', 'bigint']], "no column 'task_id'. Did you mean 'task_idx'"),
    ([['task_idx', 'bigimt']], "column 'task_idx': no type 'bigimt'. Did you mean 'b"),
    ([['gven', 'string']], "Did you mean 'given'"),
    ([['task_idx', 'int']], 'is a bigint, which a int cannot hold'),
    ([['mode', 'bigint']], 'is a string'),
    ([['mode', 'string'], ['mode', 'string']], 'twice'),
    (['mode'], 'not a pair'),
    ([['mode', 'string', 1]], 'not a pair'),
  ],
)
def test_what_is_wrong_is_told_with_the_nearest_name(names, message):
  with pytest.raises(ValueError, match=message):
    DumpColumns(names, {'given': 'string'})


def test_an_environment_cannot_take_a_standard_name_nor_an_unknown_type():
  with pytest.raises(ValueError, match='standard'):
    DumpColumns(env_columns={'mode': 'string'})
  with pytest.raises(ValueError, match="Did you mean 'string'"):
    DumpColumns(env_columns={'given': 'strng'})


@pytest.mark.parametrize(
  'kind, good, bad',
  [
    ('tinyint', -128, 128),
    ('bigint', 2**63 - 1, 2**63),
    ('int', 5, 5.0),
    ('int', np.int32(5), True),
    ('double', 1, float('nan')),
    ('boolean', np.bool_(True), 1),
    ('string', 'ä', b'x'),
  ],
)
def test_a_value_that_does_not_fit_is_null_and_warned_of_once(kind, good, bad, caplog):
  columns = DumpColumns([['x', kind]], {'x': ''})
  with caplog.at_level(logging.WARNING):
    group = [row(i, columns={'x': v}) for i, v in enumerate([good, None, bad, bad])]
    values = [r['x'] for r in columns.rows(group, 0, **FACTS)]
  assert values == [good, None, None, None]
  assert len(caplog.records) == 1 and 'column x' in caplog.text


def test_values_that_json_cannot_hold_cost_only_themselves(caplog):
  [record] = DumpColumns().rows([row(extras={'odd': object()})], 0, **FACTS)
  content = trajectory_codec.from_json(json.loads(record['save_content']))
  assert 'odd' in content.extras['error'] and content.score == 0.5
  assert 'save_content' in caplog.text


def test_images_are_stored_once_beside_the_dump_that_names_them(tmp_path, caplog):
  from jaxrl.data.images import ImageFolder
  from jaxrl.data.trajectory_writers.writer import DumpOptions, open_dump
  from tests.data.test_trajectory_codec import image, seeing

  group = [seeing(0, 1, sample_index=i) for i in range(2)]
  columns, writer = open_dump('train', tmp_path, DumpOptions(str(tmp_path / 'dump')))
  rows = columns.rows(group, 0, **FACTS)
  writer.write('part', rows)
  folder = tmp_path / 'dump' / 'images'
  stored = sorted(path.name for path in folder.iterdir())
  assert stored == sorted(f'{image(i).digest}.png' for i in range(2))
  known = ImageFolder(folder)
  for played, record in zip(group, rows, strict=True):
    assert (
      image(0).mark in record['save_content'] and 'PNG' not in record['save_content']
    )
    content = trajectory_codec.from_json(json.loads(record['save_content']), known)
    assert content.images == played.images and content.messages == played.messages
  with caplog.at_level(logging.WARNING):  # a table of a user has no place for them
    DumpColumns().rows(group, 0, **FACTS)
  assert caplog.text.count('images are not stored here') == 1
