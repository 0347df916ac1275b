"""Trains on three nodes of this machine, one of which is killed on the way.

`python -m tests.launch.runtime.lose_a_node VICTIMS WORKDIR [OPTION …]`: the node is one
without the run's own process where actors of the classes VICTIMS, `A,B`, live.
"""

import os
import pathlib
import sys
import threading
import time

HERE = '127.0.0.1'
os.environ['RAY_ENABLE_WINDOWS_OR_OSX_CLUSTER'] = '0'  # what it does: loopback alone


def nodes(cluster):
  for number in range(2):
    cluster.add_node(num_cpus=1, node_ip_address=HERE, object_store_memory=80_000_000)
    print('node', number + 2, flush=True)


def kill(cluster, victim, workdir):
  import ray
  from ray._private import state

  while not (workdir / 'checkpoints' / 'train' / '1').exists():
    time.sleep(0.1)
  alive = [actor for actor in state.actors().values() if actor['State'] == 'ALIVE']
  home = ray.get_runtime_context().get_node_id()
  for node in cluster.list_all_nodes():
    if node.node_id == home or node is cluster.head_node:
      continue
    there = [
      actor['ActorClassName']
      for actor in alive
      if actor['Address']['NodeID'] == node.node_id
    ]
    if set(victim.split(',')) & set(there):
      print('killed: ' + ' '.join(sorted(there)), flush=True)
      cluster.remove_node(node, allow_graceful=False)
      return
  print(f'no node to kill: {[a["ActorClassName"] for a in alive]}', flush=True)
  os._exit(3)


def main():
  import ray.cluster_utils

  victim, workdir, *options = sys.argv[1:]
  head = {
    'num_cpus': 1,
    'node_ip_address': HERE,
    'include_dashboard': False,
    'object_store_memory': 80_000_000,
    '_system_config': {
      'health_check_period_ms': 1000,
      'health_check_initial_delay_ms': 1000,
      'health_check_failure_threshold': 5,
    },
  }
  cluster = ray.cluster_utils.Cluster(initialize_head=True, head_node_args=head)
  nodes(cluster)
  place = pathlib.Path(workdir)
  killer = threading.Thread(target=kill, args=(cluster, victim, place), daemon=True)
  killer.start()
  from tests.launch import runs

  cluster_options = (
    '--config.cluster.ray=true',
    f'--config.cluster.address={cluster.address}',
  )
  status = runs.main(workdir, *cluster_options, *options, config=runs.VARIED)
  print('status', status, flush=True)
  cluster.shutdown()
  sys.exit(status)


if __name__ == '__main__':
  main()
