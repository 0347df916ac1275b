"""The report: what it shows, how it grows, and that a run's text stays text."""

import html.parser
import json
import pathlib
import re
import shutil
import subprocess

import numpy as np
import pytest

from jaxrl.options import ConfigError
from jaxrl.types import Trajectory
from launch.logging.metric_sinks import (
  JsonLines,
  MultiSink,
  parse_row,
  read_metrics,
)
from launch.logging.workdir import read_json
from launch.report import assets, evaluations, report_sink, samples
from launch.report import page as report_page
from launch.report.page import ReportData, render_page, thin_points
from launch.report.report_sink import (
  MAX_ROWS,
  MetricHistory,
  ReportSink,
  write_report,
)

EVIL = '</script><script>alert(1)</script><img src=x onerror=alert(2)>&"\''


def trajectory(length=12, prompt=4, score=1.0, sample_index=0, tag='math'):
  mask = np.arange(length) >= prompt
  rewards = np.zeros(length, np.float32)
  rewards[-1] = score
  return Trajectory(
    tokens=np.arange(length, dtype=np.int32),
    action_mask=mask,
    rollout_logprobs=np.where(mask, -0.5, 0).astype(np.float32),
    rewards=rewards,
    weights_version=np.where(mask, 3, -1).astype(np.int32),
    sample_index=sample_index,
    tag=tag,
  )


def island(page):
  text = re.search(r'id="data">(.*?)</script>', page, re.S)
  assert text
  return json.loads(text.group(1))


def a_run(folder, steps=6, total=6, start=0, decode=None, status='finished'):
  sink = MultiSink([JsonLines(folder / 'metrics.jsonl'), ReportSink(folder)])
  sink.decode_with(decode or (lambda ids: ''.join(f'<{i}>' for i in ids)))
  sink.phase('rl', total, start)
  for step in range(start, start + steps):
    group = [trajectory(sample_index=m, score=float(m % 2)) for m in range(6)]
    sink.trajectories(step, [group], np.full((6, 20), 0.5))
    evals = (
      {'eval/math/mean': step / 10, 'eval/math/tasks': 100} if step % 3 == 0 else {}
    )
    sink.write(step, {'reward/mean': step / 10, 'loss/total': float(step), **evals})
  sink.close(status)
  return (folder / 'report.html').read_text()


class Tags(html.parser.HTMLParser):
  VOID = frozenset(('meta', 'br', 'img', 'input', 'link'))

  def __init__(self):
    super().__init__()
    self.open, self.seen, self.attributes = [], [], []

  def handle_starttag(self, tag, attrs):
    self.seen.append(tag)
    self.attributes += attrs
    if tag not in self.VOID:
      self.open.append(tag)

  def handle_startendtag(self, tag, attrs):
    self.seen.append(tag)
    self.attributes += attrs

  def handle_endtag(self, tag):
    assert self.open and self.open[-1] == tag, (tag, self.open)
    self.open.pop()


def test_the_page_is_whole_and_self_contained(tmp_path):
  page = a_run(tmp_path)
  tags = Tags()
  tags.feed(page)
  assert not tags.open
  assert tags.seen.count('script') == 2
  urls = [v for k, v in tags.attributes if k in ('src', 'href', 'xlink:href')]
  assert urls == [] and 'url(' not in page and '@import' not in page
  assert '{{' not in page and not re.search(r'^(import|export) ', page, re.M)
  assert "default-src 'none'" in page


def test_text_of_a_run_is_never_markup(tmp_path):
  rows = [
    {'phase': EVIL, 'step': s, f'loss/{EVIL}': s, f'eval/{EVIL}/mean': s, 'same': 1}
    for s in range(3)
  ]
  snap = samples.make_snapshot(
    EVIL, 0, [[trajectory(tag=EVIL)]], None, lambda ids: EVIL * len(ids)
  )
  record = {
    'config': {'algorithm': {'name': EVIL}, EVIL: EVIL, 'seed': EVIL},
    'launches': [{'command': EVIL, 'time': EVIL, EVIL: EVIL}],
  }
  page = render_page(ReportData(EVIL, rows, record, [snap], EVIL, [EVIL]))
  tags = Tags()
  tags.feed(page)
  assert not tags.open
  assert tags.seen.count('script') == 2 and 'img' not in tags.seen
  assert not [k for k, _ in tags.attributes if k.startswith('on')]
  assert island(page)['snapshots'][0]['groups'][0]['members'][0]['tag'] == EVIL


def test_samples_carry_mask_logprob_advantage_and_reward(tmp_path):
  (snap, *_) = island(a_run(tmp_path))['snapshots']
  (group,) = snap['groups']
  assert group['scores'] == [0, 1, 0, 1, 0, 1]
  assert [m['score'] for m in group['members']] == [1, 1, 0, 0]
  tokens = group['members'][0]['tokens']
  assert tokens[3] == ['<3>', 3, 0, None, None, 0, None]
  assert tokens[4] == ['<4>', 4, 1, -0.5, 0.5, 0, 3]
  assert tokens[-1] == ['<11>', 11, 1, -0.5, 0.5, 1, 3]
  assert group['members'][0]['versions'] == [3]


def test_samples_carry_the_mismatch_of_learner_and_engine(tmp_path):
  sink = MultiSink([ReportSink(tmp_path)])
  sink.phase('rl', 2)
  for step in range(2):
    logprobs = np.full((1, 14), -0.75) if step == 0 else None
    sink.trajectories(step, [[trajectory()]], logprobs=logprobs)
  sink.close('stopped')
  first, second = (
    snap['groups'][0]['members'][0]['tokens']
    for snap in read_json(tmp_path / 'samples.json')
  )
  assert first[3][7] is None and first[4][7] == -0.25
  assert len(second[4]) == 7


def test_rows_of_advantages_follow_the_groups():
  groups = [[trajectory(score=0.0)] * 2, [trajectory(score=float(m)) for m in (1, 5)]]
  rows = [np.full(12, float(i)) for i in range(4)]
  shown = samples.make_snapshot('rl', 0, groups, rows)['groups']
  got = [m['tokens'][-1][4] for g in shown for m in g['members']]
  assert got == [0, 1, 3, 2]  # the second group's best comes first


def test_a_long_trajectory_loses_its_middle():
  kept = samples.trajectory_record(trajectory(length=5000))
  assert len(kept['tokens']) == samples.MAX_TOKENS
  assert kept['length'] == 5000 and kept['gap'] == samples.MAX_TOKENS // 2
  assert [kept['tokens'][i][1] for i in (0, -1)] == [0, 4999]


def test_a_character_of_several_tokens_shows_once():
  data = 'aé€b'.encode()
  decode = lambda ids: bytes(ids).decode(errors='replace')  # noqa: E731
  assert samples.token_texts(list(data), decode) == ['a', '', 'é', '', '', '€', 'b']
  assert samples.token_texts([0xE2, 0x82], decode)[-1] == '\ufffd'
  assert samples.token_texts([0x82, 0x82, 65, 66], decode) == [
    '\ufffd',
    '\ufffd',
    'A',
    'B',
  ]
  assert samples.token_texts([7], None) == ['‹7›']


def test_snapshots_are_bounded_and_spread():
  snaps = []
  for step in range(300):
    snaps = samples.limit_snapshots([*snaps, {'phase': 'rl', 'step': step}])
  steps = [s['step'] for s in snaps]
  assert len(steps) == samples.MAX_SNAPSHOTS
  assert steps[0] == 0 and steps[-1] == 299


def test_a_resumed_run_shows_each_snapshot_once(tmp_path):
  a_run(tmp_path, steps=5, total=8, status='stopped')
  a_run(tmp_path, steps=5, total=8, start=3)
  steps = [s['step'] for s in read_json(tmp_path / 'samples.json')]
  assert steps == sorted(set(steps)) and steps[0] == 0 and steps[-1] == 7


def test_the_report_of_a_killed_run_can_be_drawn(tmp_path):
  a_run(tmp_path)
  (tmp_path / 'report.html').unlink()
  (tmp_path / 'samples.json').write_text('[{"torn')
  page = write_report(tmp_path, 'stopped').read_text()
  assert 'reward/mean' in page and island(page)['snapshots'] == []


def test_nothing_measured_yet(tmp_path):
  empty = island(render_page(ReportData('empty', [])))
  assert empty['tiles'] == [] and empty['phases'] == []


def test_modules_are_laid_end_to_end_and_declare_no_name_twice():
  script = assets.inline_modules('report.js')
  names = re.findall(r'^(?:const|let|class|function) (\w+)', script, re.M)
  assert len(names) > 20 and len(names) == len(set(names))
  assert script.index('const make =') < script.index('class ChartGroup')
  # A page ends its script, or its style, where it reads the end of the element.
  for name in assets.asset_names():
    if name.endswith(('.js', '.css')):
      assert not re.search(r'</\s*(script|style)|<!--', assets.read_asset(name), re.I)


def about(*ends):
  return pytest.approx(ends, abs=1e-4)


def test_before_and_after(tmp_path):
  page = island(a_run(tmp_path))
  assert page['evaluations'] == [
    {
      'name': 'math/mean',
      'first': {
        'value': 0.0,
        'step': 0,
        'interval': about(0.0, 0.0370),
      },
      'last': {
        'value': 0.3,
        'step': 3,
        'interval': about(0.2190, 0.3958),
      },
      'is_score': True,
    }
  ]
  assert page['tiles'][:2] == [
    {'before': '0.00', 'value': '0.30', 'label': 'math, held out: before and after'},
    {'value': '+0.3', 'tone': 'good', 'label': 'math: gain'},
  ]
  rows = [
    {'phase': 'sft', 'step': 9, 'eval/a/mean': 0.1},
    {'phase': 'rl', 'step': 0, 'eval/a/mean': 0.5, 'eval/a/tasks': 400},
    {'phase': 'rl', 'step': 5, 'eval/a/mean': None},
    {'phase': 'rl', 'step': 9, 'eval/a/mean': 0.9, 'eval/a/tasks': 400},
  ]
  ((tag, first, last),) = evaluations.before_and_after(rows)
  assert (tag, first.value, last.value) == ('a', 0.5, 0.9)
  assert first.interval == about(0.4512, 0.5488)


def test_a_reason_that_ended_nothing_counts_as_none():
  rows = [
    {'phase': 'rl', 'step': 0, 'eval/a/mean': 0.2, 'eval/a/stop/finish': 1.0},
    {'phase': 'rl', 'step': 1, 'loss/total': 0.1},
    {'phase': 'rl', 'step': 9, 'eval/a/mean': 0.5, 'eval/a/stop/max_steps': 1.0},
  ]
  curves = {
    reason: [
      (s.step, s.value) for s in evaluations.evaluation_scores(rows, f'eval/a/{reason}')
    ]
    for reason in ('stop/finish', 'stop/max_steps')
  }
  assert curves['stop/finish'] == [(0, 1.0), (9, 0.0)]
  assert curves['stop/max_steps'] == [(0, 0.0), (9, 1.0)]


def test_size_stays_bounded():
  rows = [
    {
      'phase': 'rl',
      'step': s,
      **{f'loss/{i}': s * (i + 1) + 0.123456 for i in range(50)},
    }
    for s in range(5000)
  ]
  page = render_page(ReportData('long', rows))
  assert len(page) < 2_000_000
  (phase,) = island(page)['phases']
  assert phase['more'] == 5 and phase['flat'] == []
  assert len(phase['first']) == 9 and len(phase['rest']) == report_page.MAX_CHARTS


def test_long_curves_are_thinned_and_keep_their_ends():
  thin = thin_points([(float(s), 1.0) for s in range(10_001)])
  assert len(thin) <= report_page.MAX_POINTS
  assert (thin[0][0], thin[-1][0]) == (0.0, 10_000.0)


def test_metrics_that_never_change_are_lines_of_text():
  rows = [{'phase': 'rl', 'step': s, 'loss/total': s, 'same': 1} for s in range(3)]
  (phase,) = island(render_page(ReportData('run', rows)))['phases']
  assert phase['flat'] == [['same', 1]] and phase['steps'] == 3
  assert [one['name'] for one in phase['first']] == ['loss/total']


CHROMIUM = shutil.which('chromium') or shutil.which('google-chrome')


@pytest.mark.skipif(CHROMIUM is None, reason='needs chromium, to run the page')
def test_the_script_runs_in_a_browser_and_shows_text_as_text(tmp_path):
  (tmp_path / 'run').mkdir()
  a_run(tmp_path / 'run', decode=lambda ids: EVIL * len(ids))
  page = pathlib.Path(tmp_path / 'run' / 'report.html')
  flags = (
    '--headless --no-sandbox --disable-gpu --disable-quic --no-first-run '
    '--disable-background-networking --disable-component-update --disable-sync '
  ).split()
  profile = f'--user-data-dir={tmp_path / "profile"}'
  command = [CHROMIUM, *flags, profile, '--dump-dom', page.as_uri()]
  shown = subprocess.run(command, capture_output=True, text=True, timeout=60).stdout
  assert shown.count('class="t a') == 4 * 8
  assert '&lt;/script&gt;&lt;script&gt;alert(1)' in shown
  assert shown.count('<script') == 2 and '<img' not in shown
  for text in ('math/mean', ' (0.22 – 0.40) at 3', '+0.3', 'for 6 steps'):
    assert text in shown, text
  assert shown.count('<svg') == 3  # the first chart, a bar of the table, the loss
  assert 'aria-label="reward/mean, eval/math/mean"' in shown


def test_evaluations_have_their_own_samples(tmp_path):
  sink = MultiSink([JsonLines(tmp_path / 'metrics.jsonl'), ReportSink(tmp_path)])
  sink.phase('train', 4)
  for step in range(5):
    if step % 2 == 0:
      sink.trajectories(step, [[trajectory()]], kind='eval')
    if step < 4:
      sink.trajectories(step, [[trajectory()]])
    sink.write(step, {'reward/mean': 0.5})
  sink.close()
  shown = island((tmp_path / 'report.html').read_text())['snapshots']
  labels = [(s['series'], s['step']) for s in shown]
  assert sorted(labels) == [
    *(('evaluation', step) for step in (0, 2, 4)),
    *(('training', step) for step in range(4)),
  ]


def test_a_page_reads_only_what_is_new(tmp_path, monkeypatch):
  path, parsed = tmp_path / 'metrics.jsonl', []
  monkeypatch.setattr(
    report_sink,
    'parse_row',
    lambda line, *where: parsed.append(line) or parse_row(line, *where),
  )
  log, history = JsonLines(path), MetricHistory(path)
  log.phase('rl', 100)
  for step in range(50):
    log.write(step, {'loss/total': float(step)})
  history.update()
  assert len(parsed) == 50
  log.write(49, {'eval/a/mean': 0.5})  # the last row is replaced
  log.write(50, {'loss/total': None})
  history.update()
  assert len(parsed) == 52  # the replaced one and the new one
  assert history.rows() == read_metrics(path)
  assert history.num_rows() == 51 and history.num_trained() == {'rl': 51}
  assert history.non_finite == {'loss/total'}
  log.phase('rl', 100, 20)  # repeated steps: the file is written anew
  log.write(20, {'loss/total': 0.0})
  history.update()
  assert history.rows() == read_metrics(path) and history.num_rows() == 21
  with path.open('ab') as file:
    file.write(b'{"phase": "rl", "st')  # being written
  history.update()
  assert history.num_rows() == 21
  with path.open('ab') as file:
    file.write(b'\n{}\n')
  with pytest.raises(ConfigError, match='line 22: not JSON'):
    history.update()


def test_a_long_run_keeps_few_rows_and_counts_all(tmp_path):
  path = tmp_path / 'metrics.jsonl'
  with path.open('w') as file:
    for step in range(20_000):
      row = {'phase': 'rl', 'step': step, 'loss/total': float(step == 777)}
      row['time/wall'] = 1e9 + step
      row |= {'eval/a/mean': step / 20_000} if step % 2 == 0 else {}
      file.write(json.dumps(row) + '\n')
  history = MetricHistory(path)
  history.update()
  steps = [row['step'] for row in history.rows()]
  assert steps == sorted(set(steps)) and len(steps) <= 2 * (MAX_ROWS + 1) + 1
  assert steps[0] == 0 and steps[-3:] == [19_997, 19_998, 19_999]
  assert history.num_rows() == 20_000 and history.num_trained() == {'rl': 20_000}
  page = island(write_report(tmp_path, 'running', history).read_text())
  assert page['tiles'][-1]['label'] == 'for 20000 steps'
  (phase,) = page['phases']
  assert phase['steps'] == 20_000
  assert phase['flat'] == []  # step 777 may not be among the rows


def test_a_clock_that_is_set_back_does_not_shorten_a_run(tmp_path):
  clock = [1e9, 1e9 + 60, 1e9 - 3600, 1e9 - 3585]
  rows = [{'phase': 'rl', 'step': i, 'time/wall': t} for i, t in enumerate(clock)]
  (tmp_path / 'metrics.jsonl').write_text(''.join(f'{json.dumps(r)}\n' for r in rows))
  assert '1:15' in write_report(tmp_path, 'finished').read_text()


@pytest.mark.parametrize(
  'line, problem',
  [
    (b'\xff\x00garbage', 'not JSON'),
    (b'[' * 100_000, 'not JSON'),
    (b'{"phase": "rl", "step": ' + b'9' * 5000 + b'}', 'not JSON'),
    (b'[1, 2]', 'not the metrics of a step'),
    (b'{"step": 1}', 'not the metrics of a step'),
  ],
  ids=['bytes', 'deep', 'digits', 'list', 'no phase'],
)
def test_garbage_in_the_metrics_is_one_line_with_its_position(tmp_path, line, problem):
  path = tmp_path / 'metrics.jsonl'
  good = b'{"phase": "rl", "step": 1, "loss/total": 0.5}\n'
  path.write_bytes(good + line + b'\n' + good)
  for read in (JsonLines, lambda _: write_report(tmp_path, 'running')):
    with pytest.raises(ConfigError, match=f'line 2: {problem}') as error:
      read(path)
    assert '\n' not in str(error.value) and len(str(error.value)) < 400
