"""Whole runs of the debug config: in this process, or in one of their own."""

import asyncio
import os
import pathlib
import subprocess
import sys

from configs import debug
from jaxrl.component_calls import parse_call
from launch import build, train
from launch.logging.console import Console
from launch.logging.metric_sinks import MetricSink, MultiSink, read_metrics
from launch.rollouts.preparation import check_run
from launch.settings import command_line
from launch.settings.resolve import resolve_settings
from tests import processes

ROOT = pathlib.Path(__file__).parents[2]
DEBUG = str(ROOT / 'configs' / 'debug.py')
VARIED = str(ROOT / 'tests' / 'launch' / 'varied.py')
BARE = ('--config.logging.sinks=',)


def model(family='qwen3', **sizes):
  """The option for a random model of the debug config's sizes, with these changed."""
  options = parse_call(debug.MODEL).options | sizes
  arguments = ', '.join(f'{name}={value!r}' for name, value in options.items())
  return f'--config.model.random={family}({arguments})'


ONE_LAYER = model(num_layers=1)


def argv(workdir, *options, config=DEBUG):
  return [f'--config={config}', f'--workdir={workdir}', *BARE, *options]


def main(workdir, *options, config=DEBUG):
  """Runs `launch.train` here, on the eight devices that tests have; its status."""
  return train.main(argv(workdir, *options, config=config))


def environment():
  """That of a process that a test starts: one device, compiled as quickly as here."""
  flags = os.environ.get('XLA_FLAGS', '').split()
  flags = [flag for flag in flags if 'host_platform_device_count' not in flag]
  return {**os.environ, 'XLA_FLAGS': ' '.join(flags)}


def spawn(workdir, *options, config=VARIED, obeys_modes=False, **popen):
  """Starts `python -m launch.train` as users do, on one device."""
  command = [sys.executable, '-u', *'-m launch.train'.split()]
  command += argv(workdir, *options, config=config)
  return subprocess.Popen(
    processes.obeying_modes(command) if obeys_modes else command,
    stdout=subprocess.PIPE,
    stderr=subprocess.STDOUT,
    text=True,
    cwd=ROOT,
    env=environment(),
    **popen,
  )


def run(workdir, *options, status=0, **more):
  """Runs it to its end; what it said."""
  process = spawn(workdir, *options, **more)
  output, _ = process.communicate(timeout=240)
  assert process.returncode == status, output
  return output


def rows(workdir, phase='train'):
  """The metrics of a phase's steps."""
  metrics = read_metrics(pathlib.Path(workdir) / 'metrics.jsonl')
  return [row for row in metrics if row['phase'] == phase]


def numbers(workdir):
  """What a run's rows say, but for times and speeds."""
  vague = 'time/ compile/ queue/ rollout/ tokens/ weights/ memory/'
  return [
    {k: v for k, v in row.items() if not k.startswith(tuple(vague.split()))}
    for phase in ('sft', 'train')
    for row in rows(workdir, phase)
  ]


def weights(workdir):
  """The exported parameters, as bytes."""
  return (pathlib.Path(workdir) / 'export' / 'model.safetensors').read_bytes()


class Recorder(MetricSink):
  """Keeps all that a run tells."""

  def __init__(self):
    self.played, self.metrics = [], []

  def write(self, step, metrics):
    self.metrics.append((step, dict(metrics)))

  def trajectories(self, step, groups, advantages=None, kind='train', logprobs=None):
    self.played.append((step, kind, groups, advantages))


def record(workdir, *options, config=VARIED):
  """Runs a job here without a command line's surroundings; what it told."""
  command = command_line.parse(argv(workdir, *options, config=config), {'workdir': ''})
  config_dict = command_line.load(command)
  sink = Recorder()
  workdir = pathlib.Path(workdir)
  workdir.mkdir(parents=True, exist_ok=True)
  settings = resolve_settings(config_dict)
  check_run(settings, trains=True)
  job = build.build(
    settings,
    workdir=workdir,
    sink=MultiSink([sink]),
    stop=lambda: False,
  )
  with Console().listening():
    assert asyncio.run(job.train())
  return sink
