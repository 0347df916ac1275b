"""A learner of two processes is the learner of one."""

import asyncio

import jax
import numpy as np
import pytest

from jaxrl.device_thread import DeviceThread
from jaxrl.rollout.weights.publisher import SharedMemoryOptions
from jaxrl.rollout.weights.subscriber import VersionReader
from jaxrl.rollout.weights.transport import SharedMemoryTransport
from jaxrl.training.checkpointing import Checkpointer, flatten_by_name
from launch.learner.learner_factory import (
  LocalLearnerFactory,
  PhaseSpec,
  make_run_mesh,
)
from launch.rollouts.preparation import load_policy
from launch.runtime import placement, weight_transport
from launch.settings import command_line
from launch.settings.resolve import resolve_settings
from launch.settings.run_settings import WeightTransport
from tests.launch import runs
from tests.launch.runtime import sockets
from tests.training import toy

pytestmark = [pytest.mark.ray, pytest.mark.xdist_group('ray')]
STAGE = PhaseSpec('train', 8, 4)
OPTIONS = (
  '--config.mesh.fsdp=4',
  '--config.batch.max_length=16',
  '--config.optimizer.learning_rate=0.001',
  '--config.optimizer.warmup_steps=0',
  '--config.algorithm.kl_coef=0.1',  # so that there is a reference
  runs.ONE_LAYER,
)


def parsed(*options):
  command = command_line.parse(runs.argv('none', *OPTIONS, *options), {'workdir': ''})
  return command_line.load(command)


async def learn(factory, folder):
  """Two updates, a checkpoint, one more update, back to it, and that update again.

  A checkpoint after the third update is damaged, so that all processes must pass it by.
  """
  learner = await factory.make(STAGE)
  checkpointer = Checkpointer(folder)
  metrics = [await learner.update(toy.groups(i)) for i in range(2)]
  await learner.save(checkpointer, {'so': 'far'}, wait=True)
  metrics.append(await learner.update(toy.groups(2)))
  after = learner.advantages
  await learner.save(checkpointer, {'so': 'farther'}, wait=True)
  checkpointer.close()
  largest = max((folder / '3').rglob('*'), key=lambda path: path.stat().st_size)
  content = bytearray(largest.read_bytes())
  content[len(content) // 2] ^= 1
  largest.write_bytes(content)
  checkpointer = Checkpointer(folder)
  assert await learner.restore(checkpointer) == {'so': 'far'}
  assert learner.step == 2 and (folder / '3.damaged').is_dir()
  again = await learner.update(toy.groups(2))
  for name in ('loss/total', 'optimizer/grad_norm'):
    assert again[name] == metrics[-1][name]
  np.testing.assert_array_equal(after, learner.advantages)
  checkpointer.close()
  return learner, metrics


def close(one, two):
  np.testing.assert_allclose(one, two, rtol=1e-4, atol=1e-6)


@pytest.mark.slow
def test_two_processes_learn_what_one_does(ray, tmp_path):
  from launch.planning import memory_fit
  from launch.runtime import learner_actor, remote_learner
  from launch.runtime.placement_group import PlacementGroup
  from launch.runtime.ray_runtime import ActorProxy

  config = parsed()
  settings = resolve_settings(config)
  policy = load_policy(settings, tmp_path, critic=False)
  device_thread = DeviceThread()
  local = LocalLearnerFactory(
    settings, policy, make_run_mesh(settings.mesh), device_thread, None
  )
  learner, metrics = asyncio.run(learn(local, tmp_path / 'one'))

  split_config = parsed(
    '--config.cluster.ray=true',
    '--config.cluster.placement=split(learners=2, devices=4)',
  )
  seats = PlacementGroup(
    placement.plan_placement(resolve_settings(split_config), [placement.ClusterNode()])
  )
  handles = [
    ray.remote(learner_actor.LearnerActor)
    .options(max_concurrency=100, **seats.actor_options(seat))
    .remote(settings, policy.folder, memory_fit.make_fitting_learners)
    for seat in seats.placement.learners
  ]
  actors = [ActorProxy(actor) for actor in handles]
  memory = SharedMemoryTransport()
  try:
    connection = asyncio.run(remote_learner.connect_learner(actors))
    both = remote_learner.RemoteLearnerFactory(actors, connection, ray.put)
    assert both.describe() == '8 × cpu (data 2 × fsdp 4), in 2 processes'
    theirs, metrics_ = asyncio.run(learn(both, tmp_path / 'two'))
    for one, two in zip(metrics, metrics_, strict=True):
      names = [name for name in one if name.startswith(('loss/', 'optimizer/'))]
      assert names and one['optimizer/grad_norm'] > 0
      close([one[n] for n in names], [two[n] for n in names])
    close(learner.advantages, theirs.advantages)

    places = sockets.listening('"ray::LearnerA')
    assert len(places) > 2 and all(sockets.loopback(place) for place in places), places

    plan = WeightTransport('shared_memory', SharedMemoryOptions())
    store = remote_learner.RemotePublisher(
      plan, weight_transport.make_connector(memory), parts=2
    )
    held = asyncio.run(theirs.params.snapshot())
    asyncio.run(theirs.update(toy.groups(3)))  # of which what is held knows nothing
    asyncio.run(store.publish(3, held))
    receiver = VersionReader(memory, parts=2)
    assert receiver.poll() == 3
    version, params = receiver.take(lambda tree: jax.tree.map(np.array, tree))[1:]
    assert version == 3
    arrays, wanted = (
      flatten_by_name(params),
      flatten_by_name(jax.device_get(learner.params)),
    )
    start = flatten_by_name(policy.params)
    assert arrays.keys() == wanted.keys()
    for name, array in wanted.items():
      # Adam makes much of rounding where a gradient is nearly nothing: there a step,
      # of 1e-3, may differ by a share of itself.
      difference = np.abs(arrays[name] - array)
      assert difference.max() < 5e-5 and difference.mean() < 1e-6, name
    assert any(np.abs(wanted[n] - start[n]).max() > 0.001 for n in wanted)
    assert asyncio.run(store.combined_digest()) == '-'.join(receiver.digests)
  finally:
    for actor in handles:
      ray.kill(actor)
    seats.close()
    memory.close()
    device_thread.close()
