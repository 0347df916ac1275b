"""Tests of step traces: spans of all processes and JAX's profile in one file."""

import asyncio
import gzip
import json

import jax
import jax.numpy as jnp
import pytest

from jaxrl import spans
from jaxrl.options import ConfigError
from jaxrl.spans import Span
from launch.logging import step_trace
from launch.logging.step_trace import ProcessTrace, Profile, StepTrace, StepTracer
from launch.settings.logging_settings import LoggingOptions
from tests.launch import runs

PARTS = {'trainer', 'learner', 'engine', 'environments', 'weights'}


def test_the_key_names_steps_and_ranges():
  assert LoggingOptions(trace_steps='').traces == ()
  assert LoggingOptions(trace_steps='3, 10 - 12,50').traces == (
    (3, 3),
    (10, 12),
    (50, 50),
  )
  for wrong in ('x', '5-3', '4, 4', '3-5, 5', '-1', '1.5'):
    with pytest.raises(ConfigError, match='trace_steps='):
      LoggingOptions(trace_steps=wrong)


def test_spans_are_kept_only_while_they_are_collected():
  spans.record('learner', 'a', 'lost', 0.0, 1.0)
  with spans.span('learner', 'a', 'lost'):
    pass
  spans.start()
  spans.record('learner', 'a', 'first', 0.0, 1.0, step=3)
  with spans.span('engine', 'b', 'second', detail='more'):
    pass
  collected = spans.stop()
  spans.record('learner', 'a', 'lost', 0.0, 1.0)
  assert [(s.part, s.name, s.step, s.detail) for s in collected] == [
    ('learner', 'first', 3, ''),
    ('engine', 'second', None, 'more'),
  ]
  assert collected[1].end >= collected[1].start and spans.stop() == []


def process(*recorded, actor='', host='a', offset=0.0, profile=None):
  return ProcessTrace(actor, host, 1, offset, list(recorded), profile)


def events_of(trace, path):
  trace.write(path)
  events = step_trace.read_trace(path)['traceEvents']
  names = {e['pid']: e['args']['name'] for e in events if e['name'] == 'process_name'}
  return [(names[e['pid']], e['name'], e['ts'], e['args']) for e in events if 'ts' in e]


def test_an_engines_spans_count_in_the_step_whose_report_follows(tmp_path):
  def engine(*moments):  # an engine of another machine, whose clock is 100 s behind
    recorded = [
      Span('engine', 'decode', name, t - 100, t - 100 + length)
      for name, t, length in moments
    ]
    return process(*recorded, actor='engine', host='b', offset=100.0)

  work = [('decode', 8, 1), ('report', 9.5, 0), ('decode', 9.6, 2), ('report', 20.2, 0)]
  work += [('decode', 21, 3), ('report', 30.1, 0), ('decode', 31, 1)]
  trace = StepTrace(
    steps=range(5, 7),
    window=(10.0, 40.0),
    reports=[(9.4, 9.6, 4), (20.0, 20.1, 5), (30.0, 30.2, 6)],
    seconds={},
    processes=[
      process(Span('trainer', 'step', 'step', 10.0, 30.0, 5)),
      engine(*work),
      engine(('decode', 12, 1), ('report', 20.1, 0)),
    ],
  )
  path = tmp_path / 'x.json.gz'
  events = events_of(trace, path)
  assert events == [
    ('trainer', 'step', 0.4e6, {'step': 5}),
    ('engine 1', 'decode', 0.0, {'step': 5}),  # nothing is before 0
    ('engine 1', 'decode', 11.4e6, {'step': 6}),
    ('engine 1', 'decode', 21.4e6, {}),  # the step after these will count it
    ('engine 2', 'decode', 2.4e6, {'step': 5}),
  ]
  sums = step_trace.seconds_by_metric(step_trace.read_trace(path))
  assert sums == {'time/step': 20.0, 'time/decode': pytest.approx((2 + 3 + 1) / 2)}


def test_a_profile_is_moved_to_the_time_of_the_trace(tmp_path):
  events = [
    {'ph': 'M', 'pid': 7, 'name': 'process_name', 'args': {'name': '/host:CPU'}},
    {'ph': 'X', 'pid': 7, 'tid': 1, 'ts': 50.0, 'dur': 1.0, 'name': 'jaxrl clock'},
    {'ph': 'X', 'pid': 7, 'tid': 1, 'ts': 250.0, 'dur': 9.0, 'name': 'dot', 'args': {}},
    {},
  ]
  data = gzip.compress(json.dumps({'traceEvents': events}).encode())
  profile_events = events_of(
    StepTrace(
      range(1), (10.0, 20.0), [], {}, [process(profile=Profile(data, clock_time=11.0))]
    ),
    tmp_path / 'x.json.gz',
  )
  assert profile_events == [('JAX: /host:CPU', 'dot', 1e6 + 200, {})]


async def test_steps_are_traced_from_first_to_last(tmp_path):
  calls = []

  async def call_actors(fn):
    calls.append(fn.__name__)
    return {}

  tracer = StepTracer([(2, 3), (9, 9)], tmp_path, call_actors, profiles_here=True)
  for step in range(5):
    await tracer.before_step(step)
    if step == 2:
      jnp.ones(8).sum().block_until_ready()
    spans.record('trainer', 'step', 'step', 0.0, 0.5, step=step)
    await tracer.before_report(step)
    tracer.after_report(step)
    tracer.add_metrics({'time/step': 0.5, 'loss/policy': 1.0})
    await tracer.after_step(step)
  assert calls == ['start_spans', 'start_profile', 'stop']
  (path,) = tmp_path.iterdir()
  assert path.name == 'steps-2-3.json.gz'
  trace = step_trace.read_trace(path)
  assert trace['otherData']['steps'] == [2, 3]
  assert trace['otherData']['seconds_by_metric'] == {'time/step': 1.0}
  assert step_trace.seconds_by_metric(trace) == {'time/step': 1.0}
  assert any(event['pid'] >= 1000 for event in trace['traceEvents'])


async def test_a_trace_that_cannot_be_written_does_not_end_the_run(tmp_path, caplog):
  async def call_actors(fn):
    return {}

  (tmp_path / 'file').write_text('')
  folder = tmp_path / 'file' / 'traces'  # which cannot be made
  tracer = StepTracer([(0, 0)], folder, call_actors, profiles_here=False)
  await tracer.before_step(0)
  await tracer.after_step(0)
  assert 'the trace of steps 0 to 0 is not written' in caplog.text


@pytest.mark.slow
async def test_a_run_that_ends_within_a_range_leaves_the_steps_it_took(tmp_path):
  async def call_actors(fn):
    return {}

  tracer = StepTracer([(1, 9)], tmp_path, call_actors, profiles_here=False)
  await tracer.before_step(1)
  await asyncio.sleep(0)
  await tracer.after_step(1)
  assert not list(tmp_path.iterdir())
  await tracer.close(num_steps=3)
  assert [path.name for path in tmp_path.iterdir()] == ['steps-1-2.json.gz']
  await tracer.close(num_steps=3)  # once is enough
  assert spans.stop() == []


def check_trace(workdir, steps):
  (path,) = (workdir / 'traces').iterdir()
  assert path.name == f'steps-{steps[0]}-{steps[-1]}.json.gz'
  trace = step_trace.read_trace(path)
  sums = step_trace.seconds_by_metric(trace)
  rows = [row for row in runs.rows(workdir) if row['step'] in steps]
  names = {name for row in rows for name in row if name.startswith('time/')}
  names -= {'time/wall'}
  assert {'time/step', 'time/learn', 'time/decode', 'time/publish'} <= names
  for name in names:
    total = sum(row.get(name, 0.0) for row in rows)
    assert sums[name] == pytest.approx(total, rel=0.02), name
  events = trace['traceEvents']
  tracks = [e['args']['name'] for e in events if e['name'] == 'process_name']
  lanes = {e['args']['name'] for e in events if e['name'] == 'thread_name'}
  assert {'decode', 'prefill', 'arithmetic group 0 environment 0'} <= lanes
  return trace, tracks


@pytest.mark.slow
@pytest.mark.extended
def test_the_spans_of_a_run_agree_with_its_times(tmp_path):
  options = ('--config.num_steps=5', '--config.sft.num_steps=0')
  options += ('--config.rollout.async_ratio=1', '--config.logging.trace_steps=2-3')
  assert runs.main(tmp_path, *options) == 0
  trace, tracks = check_trace(tmp_path, range(2, 4))
  assert set(tracks[:5]) == PARTS
  assert tracks[5:] and all(track.startswith('JAX: ') for track in tracks[5:])
  steps = [e for e in trace['traceEvents'] if e.get('cat') == 'trainer']
  start = min(e['ts'] for e in steps)
  end = max(e['ts'] + e['dur'] for e in steps)
  programs = [e for e in trace['traceEvents'] if e['pid'] >= 1000 and e['ph'] == 'X']
  # JAX's clock is ours. Its profiler starts before the steps and stops after them; on a
  # busy machine it sees seconds of what an engine's thread does then.
  inside = [start - 1e5 <= e['ts'] <= end + 1e6 for e in programs]
  assert len(programs) > 100 and sum(inside) > len(inside) / 2
  assert all(start - 6e7 <= e['ts'] <= end + 6e7 for e in programs)
  assert min(e['ts'] for e in trace['traceEvents'] if 'ts' in e) >= 0
  jax.profiler.start_trace(str(tmp_path / 'again'))  # nobody else is using it
  jax.profiler.stop_trace()


@pytest.mark.slow
@pytest.mark.extended
@pytest.mark.ray
def test_actors_are_traced_too(tmp_path):
  options = ('--config.num_steps=4', '--config.sft.num_steps=0')
  options += ('--config.cluster.ray=true', '--config.cluster.num_engines=2')
  options += ('--config.eval.interval=0', '--config.logging.trace_steps=2-3')
  runs.run(tmp_path, *options, config=runs.DEBUG)
  _, tracks = check_trace(tmp_path, range(2, 4))
  assert {'trainer', 'learner', 'engine 1', 'engine 2', 'environments'} <= set(tracks)
  assert {'JAX: engine 1 /host:CPU', 'JAX: engine 2 /host:CPU'} <= set(tracks)
