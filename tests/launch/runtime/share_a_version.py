"""Publishes versions to receivers on two other nodes of this machine, and prints how
many bytes they took and how many the node of the learner has sent.
"""

import json
import os
import re
import subprocess

HERE = '127.0.0.1'
os.environ['RAY_ENABLE_WINDOWS_OR_OSX_CLUSTER'] = '0'  # what it does: loopback alone
VERSIONS, MIB = 4, 48


def sent(raylet):
  """Bytes that the process has sent through the TCP connections it has."""
  result = subprocess.run(['ss', '-tinpOH'], capture_output=True, text=True, check=True)
  mine = [line for line in result.stdout.splitlines() if f'pid={raylet},' in line]
  return sum(int(n) for line in mine for n in re.findall(r'bytes_sent:(\d+)', line))


class Reader:
  """A receiver on a node of its own."""

  def __init__(self, channel):
    from jaxrl.rollout.weights.subscriber import VersionReader

    self._receiver = VersionReader(channel, threads=2)

  def read(self):
    version = self._receiver.poll()
    return version, self._receiver.digests[0], self._receiver.load_report.received_bytes


def main():
  import numpy as np
  import ray
  from ray.cluster_utils import Cluster

  from jaxrl.rollout.engine.actor_proxy import ActorProxy
  from jaxrl.rollout.weights.publisher import VersionWriter, VersionWriterOptions
  from jaxrl.rollout.weights.snapshots import snapshot
  from launch.runtime.object_store import ObjectDirectory, ObjectStoreTransport

  node = {'num_cpus': 1, 'node_ip_address': HERE, 'object_store_memory': 300 << 20}
  head = {**node, 'include_dashboard': False}
  cluster = Cluster(initialize_head=True, head_node_args=head)
  for number in (1, 2):
    cluster.add_node(**node, resources={f'node{number}': 1})
  ray.init(address=cluster.address, log_to_driver=False)
  directory = (
    ray.remote(ObjectDirectory).options(num_cpus=0, max_concurrency=100).remote()
  )
  channel = ObjectStoreTransport(ActorProxy(directory))
  readers = [
    ray.remote(Reader).options(num_cpus=0, resources={f'node{i}': 1}).remote(channel)
    for i in (1, 2)
  ]
  ray.get([reader.__ray_ready__.remote() for reader in readers])
  processes = cluster.head_node.all_processes['raylet']
  before = sent(processes[0].process.pid)
  options = VersionWriterOptions(chunk_bytes=1 << 20, blob_bytes=2 << 20, full_every=1)
  publisher = VersionWriter(channel, options=options)
  draw, read = np.random.default_rng(0), 0
  for version in range(VERSIONS):
    params = {f'w{i}': draw.integers(0, 255, MIB << 16, np.uint8) for i in range(16)}
    publisher.publish(version, snapshot(params))
    for reading in ray.get([reader.read.remote() for reader in readers]):
      assert reading[:2] == (version, publisher.digest)
      read += reading[2]
  figures = {'read': read, 'sent': sent(processes[0].process.pid) - before}
  print(json.dumps(figures), flush=True)
  ray.shutdown()
  cluster.shutdown()


if __name__ == '__main__':
  main()
