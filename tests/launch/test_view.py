"""The live view: who gets in, what it answers, and that it follows what changes."""

import asyncio
import base64
import concurrent.futures
import json
import os
import pathlib
import signal
import sqlite3
import subprocess
import sys
import threading

import aiohttp
import numpy as np
import pytest

from jaxrl.data.images import as_image
from jaxrl.data.trajectory_writers.dump_columns import DumpColumns
from jaxrl.data.trajectory_writers.file_writer import FileWriter
from jaxrl.types import Trajectory
from launch import view
from launch.logging.metric_sinks import JsonLines
from launch.logging.workdir import Workdir
from launch.report import samples, trajectory_index
from launch.report.dump_rows import dump_patterns
from launch.report.message_text import find_images, message_parts
from launch.report.run_folders import RunCatalogue, find_runs, repetition_key
from launch.report.trajectory_index import TrajectoryIndex, TrajectoryQuery
from launch.report.trajectory_view import show_group, show_trajectory
from launch.report.view_server import RunTrajectories, serve_view

TOKEN = 'a-token-of-the-tests'
EVIL = '</script><script>alert(1)</script><img src=x onerror=alert(2)>&"\''
PIXEL = np.zeros((1, 2, 3), np.uint8)


def play(text='hello', group=0, sample=0, turn=0, score=1.0, length=6, **more):
  """A trajectory of a question and an answer; its last three tokens are the model's."""
  mask = np.arange(length) >= length - 3
  rewards = np.zeros(length, np.float32)
  rewards[-1] = score
  return Trajectory(
    **{
      'tokens': np.arange(length, dtype=np.int32) + 10 * turn * (np.arange(length) > 3),
      'action_mask': mask,
      'rollout_logprobs': np.where(mask, -0.5, 0).astype(np.float32),
      'rewards': rewards,
      'weights_version': np.where(mask, 3, -1).astype(np.int32),
      'env_group': group,
      'sample_index': sample,
      'turn': turn,
      'tag': 'math',
      'messages': [
        {'role': 'user', 'content': f'question {group}'},
        {'role': 'assistant', 'content': text},
      ],
      **more,
    }
  )


def write_dump(folder, groups, step=0, mode='train', path='', name='part'):
  """Writes a part of a dump, as a run does."""
  columns = DumpColumns()
  folder.mkdir(exist_ok=True)
  writer = FileWriter(path or str(folder / 'trajectories'), mode, columns.types)
  writer.check(fresh=False)
  columns.write_images = writer.write_images
  rows = [
    row
    for group in groups
    for row in columns.rows(group, step=step, mode=mode, model_name='toy')
  ]
  writer.write(name, rows)
  return rows


def open_index(folder, record=None):
  index = TrajectoryIndex(folder, dump_patterns(record or {}, folder))
  index.refresh()
  return index


def ids(index, **query):
  page = index.select(TrajectoryQuery(**query), 0, 100)
  assert page['total'] == len(page['rows'])
  return [row['id'] for row in page['rows']]


def look_again(index):
  index._checked = float('-inf')
  index.refresh()


# ---- the index


def test_trajectories_are_filtered_and_sorted(tmp_path):
  write_dump(
    tmp_path,
    [
      [play('seven', sample=0, score=0.0), play('Eight or NINE', sample=1, length=9)],
      [play('ten', group=1, tag='lake', stop_reason='max_steps')],
    ],
  )
  write_dump(tmp_path, [[play('later', score=0.5)]], step=7, mode='val')
  index = open_index(tmp_path)
  a, b, c, d = (
    'train_0_math_0_0_0_0_0',
    'train_0_math_0_0_0_1_0',
    'train_0_lake_1_0_0_0_0',
    'val_7_math_0_0_0_0_0',
  )
  assert ids(index) == [a, b, c, d]
  assert ids(index, sort='score', descending=True) == [b, c, d, a]
  assert ids(index, sort='length', descending=True)[0] == b
  assert ids(index, text='nine') == [b] and ids(index, text='n') == [a, b, c, d]
  assert ids(index, text='question 1') == [c]
  assert ids(index, text="it's \"%' OR 1") == []
  assert [ids(index, text=sign) for sign in ('*', '?', '[a-z]', 'n*e')] == [[]] * 4
  assert ids(index, tag='lake') == [c] and ids(index, stop='max_steps') == [c]
  assert ids(index, step=(5, None)) == [d] and ids(index, mode='val') == [d]
  assert ids(index, score=(0.25, 0.75)) == [d] and ids(index, length=(7, None)) == [b]
  assert ids(index, group='train_0_math_0_0_0') == [a, b]
  assert ids(index, group='math_0_0_0') == [a, b, d]  # the task at all steps
  assert ids(index, group='ath_0_0_0') == [] == ids(index, group='%')
  assert ids(index, sort='grp') == [c, a, b, d]
  (row,) = index.select(TrajectoryQuery(text='nine'), 0, 5)['rows']
  assert (row['length'], row['actions'], row['version']) == (9, 3, 3)
  assert row['preview'] == 'Eight or NINE' and row['sample'] == 1
  page = index.select(TrajectoryQuery(), 1, 2)
  assert page['total'] == 4 and [r['id'] for r in page['rows']] == [b, c]
  assert index.neighbours(TrajectoryQuery(), b) == (1, a, c)
  assert index.neighbours(TrajectoryQuery(tag='lake'), b) == (None, None, None)
  assert index.facets()['tags'] == [('lake', 1), ('math', 3)]
  with pytest.raises(ValueError, match="'preview; DROP' is not one of"):
    ids(index, sort='preview; DROP')


def test_an_index_follows_parts_that_are_new_replaced_or_gone(tmp_path):
  write_dump(tmp_path, [[play('first')]], name='a')
  index = open_index(tmp_path)
  assert len(ids(index, text='first')) == 1
  write_dump(tmp_path, [[play('second', group=1)]], name='b')
  write_dump(tmp_path, [[play('replaced'), play(sample=1)]], name='a')
  look_again(index)
  assert len(ids(index)) == 3 and ids(index, text='first') == []
  assert len(ids(index, text='replaced')) == 1
  (tmp_path / 'trajectories' / 'train-a.jsonl').unlink()
  look_again(index)
  assert ids(index) == ['train_0_math_1_0_0_0_0'] and ids(index, text='replaced') == []
  index.close()
  again = open_index(tmp_path)  # nothing has to be read
  assert ids(again, text='second') == ['train_0_math_1_0_0_0_0']


def test_a_page_is_not_asked_for_twice_and_changes_of_others_are_seen(tmp_path):
  write_dump(tmp_path, [[play()]], name='a')
  mine, other = open_index(tmp_path), open_index(tmp_path)
  assert mine._matching(TrajectoryQuery()) is mine._matching(TrajectoryQuery())
  write_dump(tmp_path, [[play(group=1)]], name='b')
  look_again(other)
  assert len(ids(mine)) == 2


@pytest.mark.parametrize('damage', [b'no database', b''])
def test_a_damaged_index_is_built_again(tmp_path, damage):
  write_dump(tmp_path, [[play('kept')]])
  open_index(tmp_path).close()
  path = tmp_path / trajectory_index.FILE
  path.write_bytes(damage)
  assert len(ids(open_index(tmp_path), text='kept')) == 1
  with sqlite3.connect(path) as connection:
    connection.execute('PRAGMA user_version=99')
  assert len(ids(open_index(tmp_path), text='kept')) == 1


def test_what_is_not_a_dump_is_named_and_the_rest_is_shown(tmp_path):
  rows = write_dump(tmp_path, [[play()]])
  path = tmp_path / 'trajectories' / 'train-part.jsonl'
  bad = [b'{"torn', b'[1]', b'{"trajectory_id": 3}', b'\xff\x00', b'[' * 99_999]
  content = dict(rows[0], save_content='{"tokens": 3}', trajectory_id='x_0_0')
  path.write_bytes(
    path.read_bytes() + b'\n'.join([*bad, json.dumps(content).encode()]) + b'\n'
  )
  index = open_index(tmp_path)
  assert len(ids(index)) == 1
  assert index.problems == {str(path): '6 lines are not rows of a dump'}


def test_a_dump_may_lie_elsewhere_and_be_parquet(tmp_path):
  run = tmp_path / 'runs' / 'mine'
  run.mkdir(parents=True)
  place = str(tmp_path / 'dumps' / 'mine.parquet')
  write_dump(run, [[play('columnar')], [play(group=1)]], path=place)
  write_dump(run, [[play('of another')]], path=place.replace('mine', 'other'))
  record = {'config': {'trajectory_dump': {'path': place}}}
  index = open_index(run, record)
  assert len(ids(index)) == 2 and len(ids(index, text='columnar')) == 1
  shown = show_trajectory(index, 'train_0_math_1_0_0_0_0', None)
  assert shown['messages'][0]['parts'][0]['text'] == 'question 1'
  relative = {'config': {'trajectory_dump': {'path': 'dumps/mine.parquet'}}}
  assert dump_patterns(relative, run)[0] == str(tmp_path / 'dumps' / 'mine-*.parquet')
  remote = {'config': {'trajectory_dump': {'path': 's3://bucket/x.jsonl'}}}
  assert all(str(run) in pattern for pattern in dump_patterns(remote, run))


def test_samples_of_the_report_are_shown_until_the_dump_has_them(tmp_path):
  groups = [[play('sampled', sample=m, score=float(m)) for m in range(2)]]
  advantages = [np.full(6, 0.25)] * 2
  snapshot = samples.make_snapshot(
    'train', 4, groups, advantages, lambda i: f'<{i[0]}>'
  )
  (tmp_path / 'samples.json').write_text(json.dumps([snapshot]))
  index = open_index(tmp_path)
  name = 'train_4_math_0_0_0_1_0'
  assert ids(index) == [name, 'train_4_math_0_0_0_0_0']  # the best one first
  shown = show_trajectory(index, name, None)
  assert shown['source'] == 'samples.json' and shown['num_tokens'] == 6
  assert shown['tokens'][-1] == ['<5>', 5, 1, -0.5, 0.25, 1, 3]
  assert ids(index, text='<5>') == ids(index)
  (first, _) = show_group(index, 'train_4_math_0_0_0')
  assert [m['role'] for m in first['messages']] == ['given', 'assistant']
  write_dump(tmp_path, [groups[0][1:]], step=4)
  look_again(index)
  assert len(ids(index)) == 2
  assert show_trajectory(index, name, None)['source'] == 'train-part.jsonl'


# ---- one trajectory


def test_a_trajectory_is_shown_token_by_token(tmp_path):
  extras = {
    'advantages': np.full(6, -0.75, np.float32),
    'old_logprobs': np.full(6, -0.625, np.float32),
  }
  write_dump(tmp_path, [[play(extras=extras)]])
  index = open_index(tmp_path)
  shown = show_trajectory(index, 'train_0_math_0_0_0_0_0', lambda i: chr(97 + i[0]))
  assert shown['tokens'][2] == ['c', 2, 0, None, None, 0, None, None]
  assert shown['tokens'][5] == ['f', 5, 1, -0.5, -0.75, 1, 3, -0.125]
  assert shown['extras'] == dict.fromkeys(extras, 'array <f4 [6]')
  assert shown['columns']['model_name'] == 'toy' and shown['decoded']
  assert show_trajectory(index, shown['id'], None, start=4)['tokens'][0][0] == '‹4›'
  with pytest.raises(KeyError):
    show_trajectory(index, 'another', None)


def test_tool_calls_thoughts_and_images_are_parts(tmp_path):
  written = (
    '<think>Use it.</think>\nSo:<tool_call>{"name": "python", "arguments": {"x": 1}}'
    '</tool_call><tool_call>{"torn'
  )
  assert message_parts({'role': 'assistant', 'content': written}) == [
    {'kind': 'thought', 'text': 'Use it.'},
    {'kind': 'text', 'text': 'So:'},
    {'kind': 'call', 'name': 'python', 'arguments': '{"x": 1}'},
    {'kind': 'call', 'name': '', 'arguments': '{"torn'},
  ]
  call = {'function': {'name': 'search', 'arguments': '{"q": 2}'}}
  assert message_parts(
    {'role': 'assistant', 'content': None, 'tool_calls': [call]}
  ) == [{'kind': 'call', 'name': 'search', 'arguments': '{"q": 2}'}]
  data = 'data:image/png;base64,iVBORw0KGgo='
  outside = {'type': 'image_url', 'image_url': {'url': 'http://example.com/x.png'}}
  content = [{'type': 'image_url', 'image_url': {'url': data}}, outside]
  image, text = message_parts({'role': 'user', 'content': content})
  assert image == {'kind': 'image', 'src': data}
  assert text['kind'] == 'text' and 'example.com' in text['text']  # it is not loaded
  trajectory = play(written, extras={'frames': [PIXEL], 'photo': b'\xff\xd8\xff.'})
  write_dump(tmp_path, [[trajectory]])
  index = open_index(tmp_path)
  ((row,), _) = (index.select(TrajectoryQuery(text='python'), 0, 5)['rows'], None)
  assert row['tools'] == 2
  frame, photo = show_trajectory(index, row['id'], None)['images']
  assert frame[0] == 'frames[0]' and photo[0] == 'photo'
  assert photo[1].startswith('data:image/jpeg;base64,')
  png = base64.b64decode(frame[1].removeprefix('data:image/png;base64,'))
  assert png[16:24] == b'\0\0\0\x02\0\0\0\x01'  # its width and height
  assert find_images({'$array': {'dtype': '|u1', 'shape': [9, 9], 'data': '!'}}) == []


def test_rows_of_an_episode_are_branches_that_part_somewhere(tmp_path):
  write_dump(tmp_path, [[play(turn=0), play(turn=1), play(sample=1)]])
  index = open_index(tmp_path)
  shown = show_trajectory(index, 'train_0_math_0_0_0_0_1', None)
  branches = [(row['id'], row['parts_at']) for row in shown['branches']]
  assert branches == [('train_0_math_0_0_0_0_0', 4), ('train_0_math_0_0_0_0_1', None)]
  assert show_trajectory(index, 'train_0_math_0_0_0_1_0', None)['branches'] == []
  assert [row['sample'] for row in show_group(index, 'train_0_math_0_0_0')] == [0, 0, 1]


# ---- runs


def test_runs_are_found_and_have_a_status(tmp_path):
  first = Workdir(tmp_path / 'a' / 'one', {'seed': 1, 'num_steps': 3})
  first.record()
  (tmp_path / 'a' / 'one' / 'metrics.jsonl').touch()
  inside = tmp_path / 'a' / 'one' / 'export'
  inside.mkdir()
  (inside / 'config.json').write_text('{}')
  second = Workdir(tmp_path / 'two', {'seed': 2, 'num_steps': 3})
  (tmp_path / 'two' / 'metrics.jsonl').touch()
  os.utime(tmp_path / 'two' / 'metrics.jsonl', (0, 0))
  assert len(find_runs(tmp_path)) == 2
  catalogue = RunCatalogue(tmp_path)
  run = catalogue.run('a/one')
  assert run.status(run.record()) == 'running'  # its lock is held
  first.end('stopped')
  first.close()
  assert run.status(run.record()) == 'stopped'
  second.end('failed')  # it was never recorded
  second.close()
  two = catalogue.run('two')
  assert two.record() == {} and two.status({}) == 'ended'
  first_config = run.record()['config']
  assert repetition_key(first_config) == repetition_key({**first_config, 'seed': 5})
  assert repetition_key(first_config) != repetition_key(
    {**first_config, 'num_steps': 4}
  )
  for name in ('', '..', '../..', 'a', '/etc', 'a/one/export'):
    with pytest.raises(KeyError):
      catalogue.run(name)
  assert RunCatalogue(tmp_path / 'two').run('.').folder == tmp_path / 'two'


def test_a_run_without_a_note_of_its_end_is_judged_by_its_last_step(tmp_path):
  log = JsonLines(tmp_path / 'metrics.jsonl')
  log.phase('train', 3)
  record = {'config': {'num_steps': 3}}
  for step, status in enumerate(('ended', 'ended', 'finished')):
    log.write(step, {'loss/total': 1.0})
    run = RunCatalogue(tmp_path).run('.')
    run.rows()
    assert run.status(record) == 'running'  # it has just written
    os.utime(tmp_path / 'metrics.jsonl', (0, 0))
    assert run.status(record) == status


def test_the_page_of_a_run_that_did_not_learn_says_why_once_it_is_over(tmp_path):
  log = JsonLines(tmp_path / 'metrics.jsonl')
  log.phase('train', 6)
  for step in range(6):
    log.write(step, {'reward/mean': 0.0, 'reward/std': 0.0})
  run = RunCatalogue(tmp_path).run('.')
  assert run.report().warnings == []
  os.utime(tmp_path / 'metrics.jsonl', (0, 0))
  (warning,) = run.report().warnings
  assert warning.startswith('Every reward of the run was 0. Read the samples')
  assert warning.endswith('(docs/debugging.md)')


def test_metrics_are_followed_from_where_a_reader_is(tmp_path):
  log = JsonLines(tmp_path / 'metrics.jsonl')
  run = RunCatalogue(tmp_path)
  assert run.runs()[0].metrics(0, '')['step'] == []
  log.phase('train', 9)
  for step in range(3):
    log.write(step, {'loss/total': step / 3})
  run = run.run('.')
  first = run.metrics(0, '')
  assert first['all'] and first['step'] == [0, 1, 2]
  assert first['metrics'] == {'loss/total': [0, 0.333333, 0.666667]}
  log.write(2, {'eval/a/mean': 0.5})  # the last row is replaced
  log.write(3, {'loss/total': None})
  more = run.metrics(first['position'], first['file'])
  assert not more['all'] and more['step'] == [2, 3]
  assert more['metrics'] == {
    'eval/a/mean': [0.5, None],
    'loss/total': [0.666667, 'nan'],
  }
  again = run.metrics(more['position'], more['file'])
  assert again['step'] == [3] and again['position'] == more['position']
  log.phase('train', 9, 1)  # steps are repeated: the file is another one
  log.write(1, {'loss/total': 9.0})
  whole = run.metrics(again['position'], again['file'])
  assert whole['all'] and whole['step'] == [0, 1]


# ---- the server


async def get(session, url, status=200, **parameters):
  async with session.get(url, params=parameters) as response:
    assert response.status == status, await response.text()
    return await response.json()


async def test_only_the_token_lets_one_in(tmp_path):
  async with serve_view(tmp_path, TOKEN) as url, aiohttp.ClientSession() as session:
    root = url.removesuffix(f'{TOKEN}/')
    assert root.startswith('http://127.0.0.1:')
    for path in (
      '',
      'api/runs',
      f'{TOKEN[:-1]}/',
      f'{TOKEN}x/api/runs',
      'é/',
      '%2e%2e/',
    ):
      assert 'token' in (await get(session, root + path, 403))['error']
    headers = {'Host': 'evil.example'}
    async with session.get(f'{url}api/runs', headers=headers) as response:
      assert response.status == 403
    for name in ('../view_server.py', '%2e%2e%2fview_server.py', 'none.js', ''):
      async with session.get(f'{url}static/{name}') as response:
        assert response.status in (403, 404), name
    async with session.post(f'{url}api/runs') as response:
      assert response.status == 405
    async with session.get(url) as response:
      page = await response.text()
      assert "script-src 'self'" in response.headers['Content-Security-Policy']
      assert response.headers['Cache-Control'] == 'no-store'
      assert response.headers['Referrer-Policy'] == 'no-referrer'
    assert '<script type="module" src="static/view.js">' in page
    assert page.count('<script') == 1 and ' on' not in page and TOKEN not in page
    async with session.get(f'{url}static/view.js') as response:
      assert response.content_type == 'text/javascript'


async def test_the_answers_on_runs_and_trajectories(tmp_path):
  for name, seed in (('one', 1), ('two', 2)):
    workdir = Workdir(tmp_path / name, {'seed': seed, 'algorithm': {'name': EVIL}})
    workdir.record()
    log = JsonLines(tmp_path / name / 'metrics.jsonl')
    log.phase('train', 2)
    log.write(0, {'reward/mean': 0.5, f'loss/{EVIL}': 1.0})
    workdir.end('finished')
    workdir.close()
  write_dump(tmp_path / 'one', [[play(EVIL), play('fine', sample=1)]])
  async with serve_view(tmp_path, TOKEN) as url, aiohttp.ClientSession() as session:
    api = f'{url}api/'
    runs = await get(session, f'{api}runs')
    assert [run['name'] for run in runs['runs']] == ['one', 'two']
    assert runs['runs'][0]['status'] == 'finished' and runs['runs'][0]['reward'] == 0.5
    assert runs['runs'][0]['repeats'] == runs['runs'][1]['repeats']
    run = await get(session, f'{api}run', run='one')
    assert run['facts'][0] == ['algorithm', EVIL] and run['config']
    metrics = await get(session, f'{api}metrics', run='one')
    assert metrics['metrics'][f'loss/{EVIL}'] == [1]
    difference = await get(session, f'{api}diff', a='one', b='two')
    assert difference['keys'] == [['seed', 1, 2]]
    answer = await get(session, f'{api}trajectories', run='one', text=EVIL[:20])
    assert answer['total'] == 1 and not answer['indexing']
    name = answer['rows'][0]['id']
    shown = await get(session, f'{api}trajectory', run='one', id=name, sort='score')
    assert shown['messages'][1]['parts'] == [{'kind': 'text', 'text': EVIL}]
    assert shown['after'] == 'train_0_math_0_0_0_1_0'
    group = await get(session, f'{api}group', run='one', group=shown['grp'])
    assert len(group['members']) == 2
    async with session.get(f'{api}trajectory', params={'run': 'one', 'id': name}) as r:
      assert r.content_type == 'application/json'
      assert r.headers['X-Content-Type-Options'] == 'nosniff'
    for path, status, parameters in (
      ('run', 404, {'run': '..'}),
      ('trajectory', 404, {'run': 'one', 'id': 'x'}),
      ('group', 404, {'run': 'one', 'group': 'x'}),
      ('trajectories', 400, {'run': 'one', 'sort': 'x'}),
      ('trajectories', 400, {'run': 'one', 'step_min': 'nan'}),
      ('metrics', 400, {'run': 'one', 'since': 'x'}),
      ('nothing', 404, {}),
    ):
      assert (await get(session, api + path, status, **parameters))['error']


async def test_requests_that_come_together_share_an_index(tmp_path, monkeypatch):
  (workdir := Workdir(tmp_path / 'one', {'seed': 1})).record()
  workdir.close()
  write_dump(tmp_path / 'one', [[play()]])
  opened = []
  connect = TrajectoryIndex.__init__
  monkeypatch.setattr(
    TrajectoryIndex,
    '__init__',
    lambda self, *given: (opened.append(given), connect(self, *given))[1],
  )
  async with serve_view(tmp_path, TOKEN) as url, aiohttp.ClientSession() as session:
    asked = [get(session, f'{url}api/trajectories', run='one') for _ in range(8)]
    answers = await asyncio.gather(*asked)
  assert [answer['total'] for answer in answers] == [1] * 8 and len(opened) == 1


async def test_a_request_may_find_its_refresh_already_taken_away(tmp_path, monkeypatch):
  """Another one comes between the end of a refresh and those who wait for it."""
  (workdir := Workdir(tmp_path / 'one', {'seed': 1})).record()
  workdir.close()
  loop, both, goes_on = asyncio.get_running_loop(), [], threading.Event()
  whole = TrajectoryIndex.refresh

  def refresh(index):
    goes_on.wait(10)
    whole(index)

  monkeypatch.setattr(TrajectoryIndex, 'refresh', refresh)
  with concurrent.futures.ThreadPoolExecutor(1) as pool:
    trajectories = RunTrajectories(RunCatalogue(tmp_path).run('one'), pool)

    class Pool:
      def submit(self, *call):
        def again():
          both.append(asyncio.create_task(trajectories.refresh()))

        job = pool.submit(*call)
        job.add_done_callback(lambda _: loop.call_soon_threadsafe(again))
        return job

    trajectories._pool = Pool()
    both.append(asyncio.create_task(trajectories.refresh()))
    await asyncio.sleep(0)
    goes_on.set()
    assert await both[0] is False and await both[1] is False
    trajectories.index.close()


def test_the_command_serves_until_it_is_stopped(tmp_path):
  environment = {**os.environ, view.TOKEN_ENV: TOKEN}
  command = [sys.executable, '-m', 'launch.view', str(tmp_path)]
  process = subprocess.Popen(
    command, stdout=subprocess.PIPE, env=environment, text=True
  )
  try:
    assert process.stdout
    lines = [process.stdout.readline() for _ in range(2)]
    assert str(tmp_path) in lines[0] and lines[1].rstrip().endswith(f'/{TOKEN}/')
    process.send_signal(signal.SIGINT)
    assert process.wait(20) == 0
  finally:
    process.kill()
    process.wait()


@pytest.mark.parametrize(
  'words, message',
  [
    (['nowhere'], 'nowhere: no such folder'),
    (['.', '.'], 'name one folder, not 2'),
    (['.', '--port=x'], '--port=x: a port is a number'),
    (['.', '--host=0.0.0.0'], '--host=0.0.0.0: unknown flag'),
  ],
)
def test_mistakes_are_one_line(words, message, capsys):
  assert view.main(words) == 2
  assert message in capsys.readouterr().err


def test_a_short_token_is_refused(monkeypatch, capsys):
  monkeypatch.setenv(view.TOKEN_ENV, 'short')
  assert view.main(['.']) == 2
  assert '16 to 128' in capsys.readouterr().err
  assert view.main(['--help']) == 0


def test_no_page_makes_markup_of_text():
  """Text of a run becomes nodes by textContent and append alone."""
  folder = pathlib.Path(trajectory_index.__file__).parent / 'static'
  for path in folder.glob('*.js'):
    text = path.read_text()
    for word in (
      'innerHTML',
      'outerHTML',
      'insertAdjacentHTML',
      'document.write',
      'eval(',
    ):
      assert word not in text, f'{path.name}: {word}'


def test_each_reply_has_its_reward(tmp_path):
  """Those of a prompt's examples are not the model's, and have none."""
  mask = np.array([0, 0, 0, 1, 1, 0, 1, 1], bool)
  rewards = np.array([0, 0, 0, 0, 0.25, 0, 0, -1], np.float32)
  roles = ['user', 'assistant', 'user', 'assistant', 'user', 'assistant']
  messages = [{'role': role, 'content': 'text'} for role in roles]
  one = play(length=8, action_mask=mask, rewards=rewards, messages=messages)
  write_dump(tmp_path, [[one]])
  index = open_index(tmp_path)
  (row,) = index.select(TrajectoryQuery(), 0, 5)['rows']
  shown = show_trajectory(index, row['id'], None)['messages']
  assert [m.get('reward') for m in shown] == [None, None, None, 0.25, None, -1]
  (member,) = show_group(index, row['grp'])
  assert [m.get('reward') for m in member['messages']] == [
    m.get('reward') for m in shown
  ]


def test_images_of_a_dump_are_shown_in_their_messages(tmp_path):
  image = as_image(PIXEL)
  parts = [{'type': 'image', 'image': image}, {'type': 'text', 'text': 'What is it?'}]
  one = play(messages=[{'role': 'user', 'content': parts}], images=[image])
  write_dump(tmp_path, [[one]])
  index = open_index(tmp_path)
  (row,) = index.select(TrajectoryQuery(), 0, 5)['rows']
  name = row['id']
  shown = show_trajectory(index, name, None)['messages'][0]['parts']
  assert shown[0] == {'kind': 'image', 'src': image.data_url()}
  assert shown[1] == {'kind': 'text', 'text': 'What is it?'}
  (member,) = show_group(index, row['grp'])
  assert member['messages'][0]['parts'][0]['src'] == image.data_url()
  stored = tmp_path / 'trajectories' / 'images' / f'{image.digest}.png'
  stored.unlink()
  lost = show_trajectory(index, name, None)['messages'][0]['parts'][0]
  assert lost['kind'] == 'text' and image.mark in lost['text']
  record = samples.trajectory_record(one)
  assert record['images'] == [('image 1: 2 × 1', image.data_url())]
  assert 'images' not in samples.trajectory_record(play())


def test_a_dump_that_two_patterns_name_is_shown_once(tmp_path, monkeypatch):
  run = tmp_path / 'runs' / 'mine'
  path = run / 'trajectories'
  run.mkdir(parents=True)
  write_dump(run, [[play()]], path=str(path))
  monkeypatch.chdir(tmp_path)
  for folder in (pathlib.Path('runs/mine'), pathlib.Path('runs/../runs/mine'), run):
    record = {'config': {'trajectory_dump': {'path': 'runs/mine/trajectories'}}}
    index = TrajectoryIndex(folder, dump_patterns(record, folder))
    index.refresh()
    assert index.facets()['total'] == 1
    index.close()


def test_a_dump_with_columns_of_ones_own_is_shown(tmp_path):
  folder = tmp_path / 'trajectories'
  folder.mkdir()
  rows = [{'task_idx': i // 2, 'save_content': '{}', 'answer': 'x'} for i in range(4)]
  text = ''.join(json.dumps(row) + '\n' for row in [*rows, {'something': 'else'}])
  (folder / 'val-math-00000.jsonl').write_text(text)
  index = TrajectoryIndex(tmp_path, dump_patterns({}, tmp_path))
  index.refresh()
  found = index.select(TrajectoryQuery(), 0, 10)
  assert found['total'] == 4 and list(index.problems.values()) == [
    '1 lines are not rows of a dump'
  ]
  assert [row['grp'] for row in found['rows']] == ['task_0'] * 2 + ['task_1'] * 2
  assert len({row['id'] for row in found['rows']}) == 4
