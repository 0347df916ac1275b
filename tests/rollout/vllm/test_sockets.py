"""Where vLLM's processes wait for connections: on this machine alone."""

import ipaddress
import multiprocessing
import os

import psutil
import pytest

from jaxrl.types import SamplingParams
from tests.rollout.vllm.needs import VLLM

pytestmark = VLLM


def listening(processes):
  """Addresses and ports, each with the name of the process that listens there."""
  listeners = []
  for process in processes:
    try:
      sockets = process.net_connections(kind='inet')
    except psutil.NoSuchProcess:  # it ended, or only waits to be told of
      continue
    for socket in sockets:
      waits = socket.status == psutil.CONN_LISTEN or not socket.raddr
      if waits and socket.laddr:
        listeners.append((socket.laddr.ip, socket.laddr.port, process.name()))
  return listeners


def on_loopback(address):
  """Whether an address is this machine's own, IPv4 written as IPv6 included.

  `::ffff:127.0.0.1` is how a socket for both families (gRPC's) names 127.0.0.1; Python
  3.11 does not look through it.
  """
  ip = ipaddress.ip_address(address)
  return (getattr(ip, 'ipv4_mapped', None) or ip).is_loopback


@pytest.mark.parametrize(
  ('address', 'expected'),
  [
    ('127.0.0.1', True),
    ('::1', True),
    ('::ffff:127.0.0.1', True),
    ('0.0.0.0', False),
    ('::', False),
    ('::ffff:10.0.0.1', False),
    ('10.0.0.1', False),
  ],
)
def test_loopback_is_known_in_every_spelling(address, expected):
  assert on_loopback(address) is expected


@pytest.mark.asyncio(loop_scope='session')
async def test_all_sockets_are_on_loopback(world):
  await world.engine.load(version := world.next(), world.old)
  done = await world.engine.generate('served', [1, 2], SamplingParams(max_tokens=2))
  assert set(done.weights_versions) == {version}
  names = [child.name for child in multiprocessing.active_children()]
  assert any('EngineCore' in name for name in names), names
  process = psutil.Process(os.getpid())
  tree = [process, *process.children(recursive=True)]
  listeners = listening(tree)
  assert listeners  # of gloo's: were there none, there would be nothing to test
  open_ = [at for at in listeners if not on_loopback(at[0])]
  assert not open_, open_
