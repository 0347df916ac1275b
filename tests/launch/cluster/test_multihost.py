"""A learner of two processes is the learner of one."""

import asyncio

import jax
import numpy as np
import pytest

from jaxrl.dispatch import Dispatcher
from jaxrl.rollout.weights.receiver import Receiver
from jaxrl.rollout.weights.shared_memory import SharedMemory
from jaxrl.training.checkpoint import Checkpointer, flatten
from launch import build, placement, weights
from launch import config as configs
from launch.learners import LocalLearners, Stage, mesh_of
from launch.sinks import open_sinks
from tests.launch import runs
from tests.launch.cluster import sockets
from tests.training import toy

pytestmark = [pytest.mark.ray, pytest.mark.xdist_group('ray')]
STAGE = Stage('train', 8, 4)
OPTIONS = (
  '--config.mesh.fsdp=4',
  '--config.batch.max_length=16',
  '--config.optimizer.learning_rate=0.001',
  '--config.optimizer.warmup_steps=0',
  '--config.algorithm.kl_coef=0.1',  # so that there is a reference
  '--config.model.random.num_layers=1',
)


def parsed(*options):
  command = configs.parse(runs.argv('none', *OPTIONS, *options), {'workdir': ''})
  return configs.load(command, {'logging': open_sinks})


async def learn(made, folder):
  """Two updates, a checkpoint, one more update, back to it, and that update again."""
  learner = await made.make(STAGE)
  checkpointer = Checkpointer(folder)
  metrics = [await learner.update(toy.groups(i)) for i in range(2)]
  await learner.save(checkpointer, {'so': 'far'}, wait=True)
  metrics.append(await learner.update(toy.groups(2)))
  after = learner.advantages
  checkpointer.close()
  checkpointer = Checkpointer(folder)
  assert await learner.restore(checkpointer) == {'so': 'far'}
  assert learner.step == 2
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
  from launch.cluster import learners, remote_params
  from launch.cluster.placement import Seats
  from launch.cluster.ray_host import Remote

  config = parsed()
  policy = build.make_policy(config, tmp_path, critic=False)
  algorithm = build.make_algorithm(config)
  dispatcher = Dispatcher()
  local = LocalLearners(config, policy, algorithm, mesh_of(config), dispatcher, None)
  learner, metrics = asyncio.run(learn(local, tmp_path / 'one'))

  asked = parsed(
    '--config.cluster.ray=true',
    '--config.cluster.placement=split(learners=2, devices=4)',
  )
  seats = Seats(placement.plan(asked, [placement.Node()]))
  made = [
    ray.remote(learners.LearnerActor)
    .options(max_concurrency=100, **seats.options(seat))
    .remote(config, policy.folder)
    for seat in seats.placement.learners
  ]
  actors = [Remote(actor) for actor in made]
  memory = SharedMemory()
  try:
    said = asyncio.run(learners.meet(actors))
    both = learners.RemoteLearners(actors, said, ray.put)
    assert both.describe() == '8 × cpu (data 2 × fsdp 4), in 2 processes'
    theirs, metrics_ = asyncio.run(learn(both, tmp_path / 'two'))
    for one, two in zip(metrics, metrics_, strict=True):
      names = [name for name in one if name.startswith(('loss/', 'optimizer/'))]
      assert names and one['optimizer/grad_norm'] > 0
      close([one[n] for n in names], [two[n] for n in names])
    close(learner.advantages, theirs.advantages)

    places = sockets.listening('"ray::LearnerA')
    assert len(places) > 2 and all(sockets.loopback(place) for place in places), places

    plan = weights.Plan('shared_memory', {'dtype': None})
    store = remote_params.RemoteBroadcast(plan, weights.elsewhere(memory), parts=2)
    held = asyncio.run(theirs.params.hold())
    asyncio.run(theirs.update(toy.groups(3)))  # of which what is held knows nothing
    asyncio.run(store.publish(3, held))
    receiver = Receiver(memory, parts=2)
    assert receiver.poll() == 3
    version, params = receiver.take(lambda tree: jax.tree.map(np.array, tree))[1:]
    assert version == 3
    found, wanted = flatten(params), flatten(jax.device_get(learner.params))
    start = flatten(policy.params)
    assert found.keys() == wanted.keys()
    for name, array in wanted.items():
      # Adam makes much of rounding where a gradient is nearly nothing: there a step,
      # of 1e-3, may differ by a share of itself.
      difference = np.abs(found[name] - array)
      assert difference.max() < 5e-5 and difference.mean() < 1e-6, name
    assert any(np.abs(wanted[n] - start[n]).max() > 0.001 for n in wanted)
    assert asyncio.run(store.whole_digest()) == '-'.join(receiver.digests)
  finally:
    for actor in made:
      ray.kill(actor)
    seats.close()
    memory.close()
    dispatcher.close()
