"""What happens to a host is said in time, and the run is that of one machine."""

import contextlib
import pathlib
import tempfile
import time

import pytest

from tests import hosts
from tests.launch import held, host_runs, runs

pytestmark = [
  pytest.mark.slow,
  pytest.mark.extended,
  pytest.mark.timeout(900),
  pytest.mark.ray,
  pytest.mark.xdist_group('ray'),
  pytest.mark.skipif(
    bool(reason := hosts.unsupported_reason()), reason=f'no hosts here: {reason}'
  ),
]
STEPS = 32
OPTIONS = (
  '--config.sft.num_steps=0',
  '--config.eval.interval=0',
  f'--config.num_steps={STEPS}',
)
# So that each host has an engine, and the third one, if all are there, no worker.
CLUSTER = (
  '--config.cluster.ray=true',
  '--config.cluster.num_engines=3',
  '--config.cluster.num_workers=2',
  '--config.cluster.placement=split(learners=2, devices=1)',
)
TIMEOUT = '--config.cluster.host_timeout=8'
NAMED_S = 30  # within which a line says which host does not answer
GOES_ON_S = 120  # within which the run takes another step


class Holder:
  """Holds episodes or engines of a run (tests/launch/held.py)."""

  def __init__(self, folder):
    self.folder = folder

  def hold(self, what):
    (self.folder / what).touch()

  def release(self, what):
    (self.folder / what).unlink()

  def wait_for_request_on(self, host):
    """Waits until a request is in flight on a host."""
    note = self.folder / f'generate-{host.name}'
    note.unlink(missing_ok=True)
    end = time.monotonic() + host_runs.LINE_S
    while not note.exists():
      assert time.monotonic() < end, f'no request on {host.name}'
      time.sleep(0.05)


@contextlib.contextmanager
def started_cluster(folder):
  """Three hosts with Ray: learners on the first two, and the third one for the rest."""
  with (
    hosts.hosts(3, folder, tmp='200m') as made,
    pytest.MonkeyPatch.context() as patch,
  ):
    (folder / 'held').mkdir()
    patch.setenv('HELD_FOLDER', str(folder / 'held'))
    hosts.start_ray(made[0])
    hosts.start_ray(made[1], made[0])
    hosts.start_ray(made[2], made[0], cpus=0)
    yield made, Holder(folder / 'held')


class Faults:
  """What is done to the hosts of a run, and what has to follow from it."""

  def __init__(self, made, run, holder):
    self.made, self.run, self.holder = made, run, holder

  def go_on(self):
    """Lets the run take steps, the first of them in time; holds it again."""
    start = time.monotonic()
    self.holder.release('step')
    took = self.run.wait_for_next_step() - start
    self.holder.hold('step')
    print(f'a step after {took:.1f} s')
    assert took < GOES_ON_S

  def check_named(self, host, *words, since):
    at = self.run.wait_for(f'{host.name} ({host.address})', *words, since=since)
    print(f'{host.name}, {words} after {at - since:.1f} s')
    assert at - since < NAMED_S

  def cut_off(self, host):
    """Cuts a host off, and waits until that is said."""
    start = time.monotonic()
    host.cut_off()
    self.check_named(host, 'has not answered', 'waits for engine', since=start)
    self.run.wait_for(host.name, 'is given up', since=start)

  def reconnect(self, host):
    """Joins the host again, and waits until an engine is there and has weights."""
    start = time.monotonic()
    host.reconnect()
    self.run.wait_for(host.name, 'answers again', since=start)
    self.wait_until_used(host, start)

  def wait_until_used(self, host, since):
    moved_at = self.run.wait_for('engine', f'moves to host {host.name}', since=since)
    (line,) = self.run.lines('engine', f'moves to host {host.name}', since=moved_at)
    engine = line.split(' moves ')[0].split(' ')[-1]
    self.run.wait_for(f'engine {engine} of 3 is back', since=moved_at)
    self.go_on()

  def lose_nothing_in_flight(self, host):
    """Cuts a host off while its engine has no request and no weights to load."""
    self.cut_off(host)
    self.go_on()
    self.reconnect(host)

  def lose_a_request_in_flight(self, host):
    self.holder.hold('generate')
    self.holder.release('step')
    self.holder.wait_for_request_on(host)
    self.holder.hold('step')
    self.cut_off(host)
    self.holder.release('generate')
    self.go_on()
    self.reconnect(host)

  def reset(self, host):
    start = time.monotonic()
    host.reset()
    self.check_named(host, 'has not answered', since=start)
    self.go_on()
    start = time.monotonic()
    hosts.start_ray(host, self.made[0])
    self.run.wait_for(host.name, 'is back', since=start)
    self.wait_until_used(host, start)

  def fill_disk(self, host):
    start = time.monotonic()
    filler = host.fill_disk()
    self.check_named(host, 'is full', 'wait for room there', since=start)
    self.go_on()
    host.run('rm', filler)
    self.run.wait_for(host.name, 'has room again', since=start)

  def slow_down(self, host):
    if problem := host.slow_down(50, 2):
      print(f'no slow link here: {problem}')
      return
    start = time.monotonic()
    self.go_on()
    host.speed_up()
    self.go_on()
    assert not self.run.said(host.name, 'given up', since=start)

  def lose_learner(self, host):
    """Cuts off a host with a learner's process, in whose place another host is."""
    start = time.monotonic()
    host.cut_off()
    self.check_named(host, 'has not answered', 'LearnerActor', since=start)
    self.holder.release('step')
    self.run.wait_for('goes on from its newest checkpoint', since=start)
    resumed_at = self.run.wait_for('train: resumes at step', since=start)
    assert resumed_at - start < GOES_ON_S
    host.reconnect()
    self.run.wait_for(host.name, 'answers again', since=start)


def test_a_run_whose_hosts_fail_one_after_the_other_loses_and_doubles_nothing(tmp_path):
  whole = (*OPTIONS, *CLUSTER, host_runs.dump_to(tmp_path))
  runs.run(tmp_path, *whole, config=held.__file__)  # the same parts on one machine
  with tempfile.TemporaryDirectory() as name, contextlib.ExitStack() as stack:
    folder = pathlib.Path(name)
    made, holder = stack.enter_context(started_cluster(folder))
    holder.hold('step')
    workdir, options = folder / 'run', (*OPTIONS, *CLUSTER, TIMEOUT)
    run = host_runs.Run(made, workdir, *options, config=held.__file__)
    stack.callback(run.close)
    faults = Faults(made, run, holder)
    faults.go_on()
    faults.lose_nothing_in_flight(made[2])
    faults.lose_a_request_in_flight(made[2])
    faults.fill_disk(made[2])
    faults.reset(made[2])
    faults.slow_down(made[2])
    faults.lose_learner(made[1])
    run.finish()
    assert 'given up' in run.text
    host_runs.check_equal(tmp_path, workdir, STEPS, rtol=1e-6)
