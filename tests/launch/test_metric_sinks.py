"""metrics.jsonl through resumes and kills, numbers that are none, sinks that fail."""

import io
import json
import socket
import sys
import types
import urllib.parse
import urllib.request

import numpy as np
import pytest
from prometheus_client.parser import text_string_to_metric_families

from jaxrl.component_calls import parse_calls
from jaxrl.options import ConfigError
from launch.logging.console import Console
from launch.logging.metric_sinks import (
  JsonLines,
  MetricSink,
  MultiSink,
  Prometheus,
  TensorBoard,
  Tracker,
  read_metrics,
)
from launch.logging.workdir import Workdir
from launch.report.open_sinks import open_sinks
from launch.report.report_sink import ReportSink
from launch.settings.logging_settings import LoggingOptions
from tests.processes import full_disk


def rows(path):
  return [
    {k: v for k, v in row.items() if k != 'time/wall'} for row in read_metrics(path)
  ]


@pytest.fixture
def path(tmp_path):
  return tmp_path / 'metrics.jsonl'


def run(path, steps, start=0, name='rl'):
  sink = MultiSink([JsonLines(path)])
  sink.phase(name, 10, start)
  for step in steps:
    sink.write(step, {'reward/mean': step / 10})
  return sink


def test_one_object_a_step_on_disk_at_once(path):
  sink = run(path, [0, 1])
  assert rows(path) == [
    {'phase': 'rl', 'step': 0, 'reward/mean': 0.0},
    {'phase': 'rl', 'step': 1, 'reward/mean': 0.1},
  ]
  sink.close()


def test_a_second_write_of_a_step_adds_to_its_line(path):
  sink = run(path, [0, 1])
  sink.write(1, {'eval/math/mean': 0.25, 'reward/mean': 3})
  sink.write(2, {'reward/mean': np.float32(0.5)})
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
  sink = run(path, [0, 1])
  sink.write(2, {'eval/math/mean': 0.5, 'reward/mean': 0.1})
  sink.write(3, {'reward/mean': 0.1})
  sink = run(path, [], start=2)
  assert rows(path)[-1] == {'phase': 'rl', 'step': 2, 'eval/math/mean': 0.5}
  sink.write(2, {'reward/mean': 0.7})
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
  sink = MultiSink([JsonLines(path)], warnings.append)
  sink.phase('rl', 3)
  for step in range(3):
    sink.write(step, {'loss/total': float('nan'), 'grad_norm': float('inf')})
  text = path.read_text()
  assert 'NaN' not in text and 'Infinity' not in text
  assert [json.loads(line)['loss/total'] for line in text.splitlines()] == [None] * 3
  assert warnings == [
    'loss/total is nan at rl step 0',
    'grad_norm is inf at rl step 0',
  ]


class Broken(MetricSink):
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
  sink = MultiSink([broken, JsonLines(path)], warnings.append)
  sink.phase('rl', 2)
  for step in range(3):
    sink.write(step, {'a': 1})
  assert broken.calls == 1 and len(rows(path)) == 3
  assert warnings == ['Broken failed and is tried again later: no route']
  broken.retry_interval = 0.0
  sink._failures[0].retry_at = 0.0
  sink.write(3, {'a': 1})
  assert broken.calls == 2 and len(warnings) == 1
  broken.broken = False
  sink.write(4, {'a': 1})
  assert broken.calls == 3 and warnings[1:] == ['Broken works again']


def test_what_is_required_ends_the_run_and_closing_hides_no_error(path):
  warnings, broken = [], Broken()
  broken.required = True
  sink = MultiSink([broken, JsonLines(path)], warnings.append)
  sink.phase('rl', 2)
  with pytest.raises(ConnectionError):
    sink.write(0, {'a': 1})
  sink.close('failed')
  assert warnings == ['Broken could not be closed: still no route']
  assert sink.sinks[1]._fd == -1  # the ones after it are closed too
  with pytest.raises(ConnectionError):
    sink.close('finished')


def test_a_full_disk_stops_no_training_and_loses_no_metrics(tmp_path):
  """Every file sink, at sizes at which each of them is cut within a line."""
  pytest.importorskip('tensorboardX')
  path, warnings = tmp_path / 'metrics.jsonl', []
  sinks = [JsonLines(path), TensorBoard(tmp_path / 'tb'), ReportSink(tmp_path)]
  for sink in sinks:
    sink.retry_interval = 0.0
  sink = MultiSink(sinks, warnings.append)
  sink.phase('rl', 100)
  sink.write(0, {'reward/mean': 0.0})
  with full_disk(300):
    for step in range(1, 20):
      sink.write(step, {'reward/mean': step / 100})
    whole = read_metrics(path)
    assert 0 < len(whole) < 10 and path.read_bytes().endswith(b'}\n')
  names = [line.split()[0] for line in warnings if 'failed' in line]
  assert {'JsonLines', 'TensorBoard'} <= set(names) and len(set(names)) == len(names)
  sink.write(20, {'reward/mean': 0.5})
  sink.close()
  assert [row['step'] for row in rows(path)] == list(range(21))
  assert {f'{name} works again' for name in ('JsonLines', 'TensorBoard')} <= {*warnings}
  assert (tmp_path / 'report.html').exists()
  assert b'reward/mean' in max((tmp_path / 'tb' / 'rl').iterdir()).read_bytes()


def test_closing_on_a_full_disk_reports_each_logger_once(tmp_path):
  warnings = []
  sinks = [JsonLines(tmp_path / 'metrics.jsonl'), ReportSink(tmp_path)]
  sink = MultiSink(sinks, warnings.append)
  sink.phase('rl', 3)
  sink.write(0, {'reward/mean': 0.0})
  with full_disk(1):
    sink.write(1, {'reward/mean': 0.0})
    sink.close('failed')
  assert [line.split()[0] for line in warnings] == ['JsonLines', 'ReportSink']
  assert not list(tmp_path.glob('.*.part')) and len(rows(sinks[0].path)) == 1


def test_tensorboard_events_by_phase(tmp_path):
  sink = MultiSink([TensorBoard(tmp_path)])
  for name in ('sft', 'rl'):
    sink.phase(name, 1)
    sink.write(0, {'reward/mean': 0.5, 'loss/total': float('nan')})
  sink.close()
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
    sink = MultiSink([Tracker(service, tmp_path, {'seed': 0}, project='mine')])
    sink.phase('rl', 1)
    sink.write(4, {'reward/mean': 0.5, 'loss/total': float('nan')})
    sink.close()
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
  sink = Prometheus(tmp_path / 'mine')
  sinks = MultiSink([sink], warn=lambda text: None)
  sinks.phase('train', 9)
  sinks.write(3, {'reward/mean': 0.5, 'reward_mean': 2, 'loss/total': 1.0})
  sinks.write(4, {'reward/mean': 0.75, 'loss/total': float('nan')})
  labels = {'run': 'mine', 'phase': 'train'}
  assert served(sink.url) == {
    'jaxrl_step': (labels, 4),
    'jaxrl_reward_mean': (labels, 0.75),
    'jaxrl_reward_mean2': (labels, 2),
  }
  port = urllib.parse.urlsplit(sink.url).port
  with pytest.raises(ConfigError, match=rf'port={port}\): the port is in use'):
    Prometheus(tmp_path, port=port)
  sinks.close()
  Prometheus(tmp_path, port=port).close('finished')


def test_prometheus_listens_on_loopback_alone(tmp_path):
  sink = Prometheus(tmp_path)
  assert sink._server.server_address[0] == '127.0.0.1'
  sink.close('finished')
  with pytest.raises(ConfigError, match='from 0 to 65535'):
    Prometheus(tmp_path, port=65536)


def test_a_config_sets_the_port_of_prometheus(tmp_path):
  with socket.socket() as free:
    free.bind(('127.0.0.1', 0))
    port = free.getsockname()[1]
  options = LoggingOptions(sinks=parse_calls(f'prometheus(port={port})'))
  workdir = Workdir(tmp_path, {})
  sinks = open_sinks(workdir, Console(io.StringIO()), options)
  try:
    assert sinks.sinks[-1].url == f'http://127.0.0.1:{port}/metrics'
  finally:
    sinks.close()
    workdir.close()
