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
  found = []
  for process in processes:
    try:
      sockets = process.net_connections(kind='inet')
    except psutil.NoSuchProcess:  # it ended, or only waits to be told of
      continue
    for socket in sockets:
      waits = socket.status == psutil.CONN_LISTEN or not socket.raddr
      if waits and socket.laddr:
        found.append((socket.laddr.ip, socket.laddr.port, process.name()))
  return found


def on_loopback(address):
  """Whether an address is this machine's own, IPv4 written as IPv6 included.

  `::ffff:127.0.0.1` is how a socket for both families (gRPC's) names 127.0.0.1; Python
  3.11 does not look through it.
  """
  found = ipaddress.ip_address(address)
  return (getattr(found, 'ipv4_mapped', None) or found).is_loopback


@pytest.mark.parametrize(
  ('address', 'own'),
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
def test_loopback_is_known_in_every_spelling(address, own):
  assert on_loopback(address) is own


@pytest.mark.asyncio(loop_scope='session')
async def test_all_sockets_are_on_loopback(world):
  await world.engine.load(version := world.next(), world.old)
  done = await world.engine.generate('served', [1, 2], SamplingParams(max_tokens=2))
  assert set(done.weights_versions) == {version}
  names = [child.name for child in multiprocessing.active_children()]
  assert any('EngineCore' in name for name in names), names
  own = psutil.Process(os.getpid())
  tree = [own, *own.children(recursive=True)]
  found = listening(tree)
  assert found  # of gloo's: were there none, there would be nothing to test
  open_ = [at for at in found if not on_loopback(at[0])]
  assert not open_, open_
