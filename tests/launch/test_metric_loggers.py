"""metrics.jsonl through resumes and kills, numbers that are none, sinks that fail."""

import json
import sys
import types
import urllib.parse
import urllib.request

import numpy as np
import pytest
from prometheus_client.parser import text_string_to_metric_families

from jaxrl.options import ConfigError
from launch.logging.metric_loggers import (
  JsonLines,
  MetricLogger,
  MultiLogger,
  Prometheus,
  TensorBoard,
  Tracker,
  read_metrics,
)
from launch.report.report_logger import ReportLogger
from tests.processes import full_disk


def rows(path):
  return [
    {k: v for k, v in row.items() if k != 'time/wall'} for row in read_metrics(path)
  ]


@pytest.fixture
def path(tmp_path):
  return tmp_path / 'metrics.jsonl'


def run(path, steps, start=0, name='rl'):
  writers = MultiLogger([JsonLines(path)])
  writers.phase(name, 10, start)
  for step in steps:
    writers.write(step, {'reward/mean': step / 10})
  return writers


def test_one_object_a_step_on_disk_at_once(path):
  writers = run(path, [0, 1])
  assert rows(path) == [
    {'phase': 'rl', 'step': 0, 'reward/mean': 0.0},
    {'phase': 'rl', 'step': 1, 'reward/mean': 0.1},
  ]
  writers.close()


def test_a_second_write_of_a_step_adds_to_its_line(path):
  writers = run(path, [0, 1])
  writers.write(1, {'eval/math/mean': 0.25, 'reward/mean': 3})
  writers.write(2, {'reward/mean': np.float32(0.5)})
  assert rows(path)[1:] == [
    {'phase': 'rl', 'step': 1, 'reward/mean': 3.0, 'eval/math/mean': 0.25},
    {'phase': 'rl', 'step': 2, 'reward/mean': 0.5},
  ]


def test_resume_writes_every_step_exactly_once(path):
  run(path, [0, 1], name='sft')
  run(path, range(5)).close()
  run(path, range(3, 7), start=3)
  steps = [(row['phase'], row['step']) for row in rows(path)]
  assert steps == [('sft', 0), ('sft', 1)] + [('rl', step) for step in range(7)]


def test_a_phase_that_is_over_leaves_the_later_one(path):
  run(path, range(10), name='sft')
  run(path, [0, 1])
  run(path, [], start=10, name='sft')
  run(path, [2], start=2)
  steps = [row['step'] for row in rows(path) if row['phase'] == 'rl']
  assert steps == [0, 1, 2] and len(rows(path)) == 13


def test_resume_in_an_earlier_phase_drops_the_later_one(path):
  run(path, [0, 1], name='sft')
  run(path, [0])
  run(path, [1], start=1, name='sft')
  assert [(row['phase'], row['step']) for row in rows(path)] == [
    ('sft', 0),
    ('sft', 1),
  ]


def test_resume_keeps_the_evaluation_of_the_weights_it_goes_on_with(path):
  writers = run(path, [0, 1])
  writers.write(2, {'eval/math/mean': 0.5, 'reward/mean': 0.1})
  writers.write(3, {'reward/mean': 0.1})
  writers = run(path, [], start=2)
  assert rows(path)[-1] == {'phase': 'rl', 'step': 2, 'eval/math/mean': 0.5}
  writers.write(2, {'reward/mean': 0.7})
  assert rows(path)[-1] == {
    'phase': 'rl',
    'step': 2,
    'eval/math/mean': 0.5,
    'reward/mean': 0.7,
  }
  assert len(rows(path)) == 3


def test_a_torn_last_line_is_mended_and_a_broken_middle_one_named(path):
  run(path, [0, 1])
  whole = path.read_bytes()
  path.write_bytes(whole[:-9])
  run(path, [1], start=1)
  assert [row['step'] for row in rows(path)] == [0, 1]
  path.write_bytes(b'{"step"\n' + whole)
  with pytest.raises(ValueError, match='line 1: not JSON'):
    JsonLines(path)


def test_what_is_not_finite_becomes_null_with_one_warning_a_name(path):
  warnings = []
  writers = MultiLogger([JsonLines(path)], warnings.append)
  writers.phase('rl', 3)
  for step in range(3):
    writers.write(step, {'loss/total': float('nan'), 'grad_norm': float('inf')})
  text = path.read_text()
  assert 'NaN' not in text and 'Infinity' not in text
  assert [json.loads(line)['loss/total'] for line in text.splitlines()] == [None] * 3
  assert warnings == [
    'loss/total is nan at rl step 0',
    'grad_norm is inf at rl step 0',
  ]


class Broken(MetricLogger):
  def __init__(self):
    self.calls, self.phases, self.broken = 0, [], True

  def phase(self, name, total, start=0):
    self.phases.append(name)

  def write(self, step, metrics):
    self.calls += 1
    if self.broken:
      raise ConnectionError('no route')

  def close(self, status):
    if self.broken:
      raise ConnectionError('still no route')


def test_a_logger_that_fails_is_reported_once_and_tried_again(path):
  warnings, broken = [], Broken()
  writers = MultiLogger([broken, JsonLines(path)], warnings.append)
  writers.phase('rl', 2)
  for step in range(3):
    writers.write(step, {'a': 1})
  assert broken.calls == 1 and len(rows(path)) == 3
  assert warnings == ['Broken failed and is tried again later: no route']
  broken.retry_interval = 0.0
  writers._failures[0].retry_at = 0.0
  writers.write(3, {'a': 1})
  assert broken.calls == 2 and len(warnings) == 1
  broken.broken = False
  writers.write(4, {'a': 1})
  assert broken.calls == 3 and warnings[1:] == ['Broken works again']


def test_what_is_required_ends_the_run_and_closing_hides_no_error(path):
  warnings, broken = [], Broken()
  broken.required = True
  writers = MultiLogger([broken, JsonLines(path)], warnings.append)
  writers.phase('rl', 2)
  with pytest.raises(ConnectionError):
    writers.write(0, {'a': 1})
  writers.close('failed')
  assert warnings == ['Broken could not be closed: still no route']
  assert writers.sinks[1]._fd == -1  # the ones after it are closed too
  with pytest.raises(ConnectionError):
    writers.close('finished')


def test_a_full_disk_stops_no_training_and_loses_no_metrics(tmp_path):
  """Every file logger, at sizes at which each of them is cut within a line."""
  pytest.importorskip('tensorboardX')
  path, warnings = tmp_path / 'metrics.jsonl', []
  sinks = [JsonLines(path), TensorBoard(tmp_path / 'tb'), ReportLogger(tmp_path)]
  for sink in sinks:
    sink.retry_interval = 0.0
  writers = MultiLogger(sinks, warnings.append)
  writers.phase('rl', 100)
  writers.write(0, {'reward/mean': 0.0})
  with full_disk(300):
    for step in range(1, 20):
      writers.write(step, {'reward/mean': step / 100})
    whole = read_metrics(path)
    assert 0 < len(whole) < 10 and path.read_bytes().endswith(b'}\n')
  names = [line.split()[0] for line in warnings if 'failed' in line]
  assert {'JsonLines', 'TensorBoard'} <= set(names) and len(set(names)) == len(names)
  writers.write(20, {'reward/mean': 0.5})
  writers.close()
  assert [row['step'] for row in rows(path)] == list(range(21))
  assert {f'{name} works again' for name in ('JsonLines', 'TensorBoard')} <= {*warnings}
  assert (tmp_path / 'report.html').exists()
  assert b'reward/mean' in max((tmp_path / 'tb' / 'rl').iterdir()).read_bytes()


def test_closing_on_a_full_disk_reports_each_logger_once(tmp_path):
  warnings = []
  sinks = [JsonLines(tmp_path / 'metrics.jsonl'), ReportLogger(tmp_path)]
  writers = MultiLogger(sinks, warnings.append)
  writers.phase('rl', 3)
  writers.write(0, {'reward/mean': 0.0})
  with full_disk(1):
    writers.write(1, {'reward/mean': 0.0})
    writers.close('failed')
  assert [line.split()[0] for line in warnings] == ['JsonLines', 'ReportLogger']
  assert not list(tmp_path.glob('.*.part')) and len(rows(sinks[0].path)) == 1


def test_tensorboard_events_by_phase(tmp_path):
  writers = MultiLogger([TensorBoard(tmp_path)])
  for name in ('sft', 'rl'):
    writers.phase(name, 1)
    writers.write(0, {'reward/mean': 0.5, 'loss/total': float('nan')})
  writers.close()
  for name in ('sft', 'rl'):
    (events,) = (tmp_path / name).glob('events.*')
    text = events.read_bytes()
    assert b'reward/mean' in text and b'loss/total' not in text


@pytest.mark.parametrize('service', ['wandb', 'trackio'])
def test_tracker_goes_on_with_the_same_run(tmp_path, monkeypatch, service):
  calls = []
  fake = types.SimpleNamespace(
    init=lambda **kw: calls.append(('init', kw)),
    log=lambda row: calls.append(('log', row)),
    finish=lambda: calls.append(('finish',)),
  )
  monkeypatch.setitem(sys.modules, service, fake)
  for _ in range(2):
    writers = MultiLogger([Tracker(service, tmp_path, {'seed': 0}, project='mine')])
    writers.phase('rl', 1)
    writers.write(4, {'reward/mean': 0.5, 'loss/total': float('nan')})
    writers.close()
  assert calls[1:3] == [('log', {'rl/reward/mean': 0.5, 'rl/step': 4}), ('finish',)]
  first, second = calls[0][1], calls[3][1]
  assert first == second and first['project'] == 'mine'
  assert first['resume'] == 'allow' and first['config'] == {'seed': 0}


def test_tracker_that_is_not_there(tmp_path, monkeypatch):
  monkeypatch.setitem(sys.modules, 'wandb', None)
  with pytest.raises(ConfigError, match=r"not installed: pip install -e '\.\[wandb\]'"):
    Tracker('wandb', tmp_path, {})


def served(url):
  with urllib.request.urlopen(url, timeout=10) as response:
    text = response.read().decode()
  return {
    sample.name: (sample.labels, sample.value)
    for family in text_string_to_metric_families(text)
    for sample in family.samples
  }


def test_prometheus_reads_the_latest_metrics(tmp_path):
  """Its own parser does. One port at a time, which is free again at the end."""
  logger = Prometheus(tmp_path / 'mine')
  loggers = MultiLogger([logger], warn=lambda text: None)
  loggers.phase('train', 9)
  loggers.write(3, {'reward/mean': 0.5, 'reward_mean': 2, 'loss/total': 1.0})
  loggers.write(4, {'reward/mean': 0.75, 'loss/total': float('nan')})
  labels = {'run': 'mine', 'phase': 'train'}
  assert served(logger.url) == {
    'jaxrl_step': (labels, 4),
    'jaxrl_reward_mean': (labels, 0.75),
    'jaxrl_reward_mean2': (labels, 2),
  }
  port = urllib.parse.urlsplit(logger.url).port
  with pytest.raises(ConfigError, match=rf'port={port}\): the port is in use'):
    Prometheus(tmp_path, port)
  loggers.close()
  Prometheus(tmp_path, port).close('finished')


def test_prometheus_listens_on_loopback_alone(tmp_path):
  logger = Prometheus(tmp_path)
  assert logger._server.server_address[0] == '127.0.0.1'
  logger.close('finished')
  with pytest.raises(ConfigError, match='from 0 to 65535'):
    Prometheus(tmp_path, 65536)
