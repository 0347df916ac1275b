"""Hosts on this machine: namespaces that a bridge joins, as machines are by a switch.

Each host has its own address, host name, processes, IPC, `/tmp` and `/dev/shm`; the
rest of the disk is shared. Nothing outside the bridge can be reached from it, and no
interface of this machine changes. The first process of every host reads a pipe, so all
of a host ends with whoever made it, even by SIGKILL.
"""

import contextlib
import functools
import os
import pathlib
import shlex
import shutil
import signal
import subprocess
import sys

from tests import slow_wire

NETWORK = '10.213.7'  # of a private range
PROGRAMS = ('ip', 'unshare', 'nsenter', 'mount')
FIRST_PROCESS = """
set -e
hostname {name}
mount -t proc proc /proc
mount -t tmpfs -o mode=755 tmpfs /mnt
mkdir /mnt/shared
mount --bind {shared} /mnt/shared
mount -t tmpfs -o mode=1777,size={tmp} tmpfs /tmp
mount -t tmpfs -o mode=1777,size=200m tmpfs /dev/shm
mkdir -p {shared}
mount --bind /mnt/shared {shared}
ip link set lo up
echo ready
exec cat > /dev/null
"""
SWITCH = 'ip link add switch type bridge; ip link set switch up; echo ready; exec cat'
SHARED_OPTIONS = ('--net', '--mount', '--propagation=private')
HOST_OPTIONS = (*SHARED_OPTIONS, '--uts', '--ipc', '--pid', '--fork', '--kill-child')


@functools.cache
def unsupported_reason():
  """Why this machine can have no hosts; '' if it can."""
  if sys.platform != 'linux' or os.geteuid():
    return 'namespaces of a network need root on Linux'
  if missing := [name for name in PROGRAMS if shutil.which(name) is None]:
    return f'{", ".join(missing)} is not installed (iproute2, util-linux)'
  command = [
    'unshare',
    *HOST_OPTIONS,
    'ip',
    'link',
    'add',
    'name',
    'probe',
    'type',
    'bridge',
  ]
  result = subprocess.run(command, capture_output=True, text=True)
  return f'no bridge can be made: {result.stderr.strip()}' if result.returncode else ''


def _start(options, script):
  """Starts a namespace's first process, which lives until its input is closed."""
  process = subprocess.Popen(
    ['unshare', *options, 'sh', '-c', script],
    stdin=subprocess.PIPE,
    stdout=subprocess.PIPE,
    text=True,
  )
  if process.stdout.readline() != 'ready\n':
    raise RuntimeError(f'a namespace ended with {process.wait()}')
  return process


def _check(*command):
  subprocess.run(command, check=True, capture_output=True, timeout=20)


class Host:
  """One host.

  Attributes:
    name: Its host name.
    address: Its address.
  """

  def __init__(self, switch, number, shared, tmp):
    self.name, self.address = f'host{number}', f'{NETWORK}.{number}'
    self._switch, self._number, self._shared = switch, number, shared
    self._tmp = tmp
    self._port, self._slow_wire = f'port{number}', None
    self._boot()

  def _boot(self):
    values = {'name': self.name, 'shared': shlex.quote(str(self._shared))}
    script = FIRST_PROCESS.format(**values, tmp=self._tmp)
    self._process = _start(HOST_OPTIONS, script)
    pid = self._process.pid
    children = pathlib.Path(f'/proc/{pid}/task/{pid}/children').read_text()
    self._pid = children.split()[0]
    self._plug_in()

  def _plug_in(self):
    """Joins the host to the switch, by a wire that the kernel makes."""
    wire = ('type', 'veth', 'peer', 'name', 'eth0', 'netns', self._pid)
    self._in_switch('add', self._port, *wire)
    self._bring_up()

  def _bring_up(self):
    self._in_switch('set', self._port, 'master', 'switch', 'up')
    # Always the same, so that the other hosts need not ask anew.
    self._ip('link', 'set', 'eth0', 'address', f'02:00:00:00:00:{self._number:02x}')
    self._ip('addr', 'add', f'{self.address}/24', 'dev', 'eth0')
    self._ip('link', 'set', 'eth0', 'up')

  def _in_switch(self, *arguments):
    _check('nsenter', '-t', str(self._switch), '-n', 'ip', 'link', *arguments)

  def _ip(self, *arguments, program='ip'):
    _check('nsenter', '-t', self._pid, '-n', program, *arguments)

  def command(self, *command):
    """Returns the command that runs another one on this host, in this folder."""
    names = ('-n', '-m', '-u', '-i', '-p')
    return ['nsenter', '-t', self._pid, *names, f'--wd={os.getcwd()}', *command]

  def run(self, *command, timeout=60, **options):
    """Runs a command to its end; returns what it wrote, errors included."""
    result = subprocess.run(
      self.command(*command),
      stdout=subprocess.PIPE,
      stderr=subprocess.STDOUT,
      text=True,
      timeout=timeout,
      **options,
    )
    assert result.returncode == 0, result.stdout
    return result.stdout

  def spawn(self, *command, **options):
    """Starts a command."""
    return subprocess.Popen(self.command(*command), text=True, **options)

  def cut_off(self):
    """Takes the link down: packets get lost, and nobody is told."""
    self._ip('link', 'set', 'eth0', 'down')

  def reconnect(self):
    """Takes the link up again."""
    self._ip('link', 'set', 'eth0', 'up')

  def slow_down(self, delay, loss):
    """Delays what this host sends, and loses a share of it.

    Args:
      delay: Milliseconds.
      loss: Percent of the packets.

    Returns:
      Why this machine cannot; '' if it does.
    """
    netem = ('netem', 'delay', f'{delay}ms', 'loss', f'{loss}%')
    with contextlib.suppress(FileNotFoundError, subprocess.CalledProcessError):
      self._ip('qdisc', 'add', 'dev', 'eth0', 'root', *netem, program='tc')
      return ''
    if not os.path.exists('/dev/net/tun'):
      return 'neither tc netem nor /dev/net/tun is there'
    self._ip('link', 'delete', 'eth0')
    ends = (self._pid, 'eth0', str(self._switch), self._port)
    self._slow_wire = subprocess.Popen(
      [sys.executable, slow_wire.__file__, *ends, str(delay / 1000), str(loss / 100)],
      stdin=subprocess.PIPE,
      stdout=subprocess.PIPE,
      text=True,
    )
    assert self._slow_wire.stdout.readline() == 'ready\n'
    self._bring_up()
    return ''

  def speed_up(self):
    """Ends what `slow_down` began."""
    if self._slow_wire is None:
      self._ip('qdisc', 'delete', 'dev', 'eth0', 'root', program='tc')
    else:
      self._end_slow_wire()
      self._plug_in()

  def _end_slow_wire(self):
    if self._slow_wire is not None:
      self._slow_wire.communicate(timeout=20)
      self._slow_wire = None

  def reset(self):
    """Ends all processes, as a loss of power does, and starts the host anew."""
    self._in_switch('delete', self._port)  # its namespace takes a while to end
    self.close()
    self._boot()

  def fill_disk(self):
    """Leaves no room in `/tmp`; returns the file to remove."""
    with contextlib.suppress(AssertionError):
      self.run('dd', 'if=/dev/zero', 'of=/tmp/filler', 'bs=64k')
    return '/tmp/filler'

  def close(self):
    """Ends all processes of this host; its namespaces go with them."""
    self._end_slow_wire()
    self._process.stdin.close()
    with contextlib.suppress(ProcessLookupError):
      os.kill(int(self._pid), signal.SIGKILL)
    self._process.wait(timeout=20)
    self._process.stdout.close()


@contextlib.contextmanager
def hosts(count, shared, *, tmp='1g'):
  """Makes hosts, and ends them.

  Args:
    count: How many.
    shared: A folder that all of them see under this path, even if it is in `/tmp`.
    tmp: Size of the file system at `/tmp`.

  Yields:
    The hosts, whose addresses end in 1, 2, ….
  """
  with contextlib.ExitStack() as stack:
    switch = _start(SHARED_OPTIONS, SWITCH)

    def close_switch():
      switch.kill()
      switch.communicate(timeout=20)

    stack.callback(close_switch)
    made = []
    for number in range(1, count + 1):
      made.append(Host(switch.pid, number, shared, tmp))
      stack.callback(made[-1].close)
    yield made


def ray_environment(environment):
  """Returns the environment of processes that use Ray on hosts."""
  return {
    **environment,
    'JAX_PLATFORMS': 'cpu',
    'RAY_AUTH_MODE': 'disabled',
    # Tests that ran before in this process may have bound Ray to the loopback.
    'RAY_ENABLE_WINDOWS_OR_OSX_CLUSTER': '1',
    'RAY_raylet_start_wait_time_s': '120',  # on a machine that has other work
  }


def start_ray(host, head=None, *, cpus=1, memory=100_000_000):
  """Starts Ray on a host.

  Args:
    host: The host.
    head: The one that the cluster began on; None to begin one.
    cpus: Number of cores that Ray may reserve.
    memory: Bytes of the object store.
  """
  where = ('--head', '--port=6379', '--include-dashboard=false')
  if head is not None:
    where = (f'--address={head.address}:6379',)
  host.run(
    *(sys.executable, '-m', 'ray.scripts.scripts', 'start', *where),
    *(f'--node-ip-address={host.address}', f'--num-cpus={cpus}'),
    *(f'--object-store-memory={memory}', '--disable-usage-stats'),
    env=ray_environment(os.environ),
    timeout=150,
  )
