"""A learner whose state lies in the host's memory while others need the devices'."""

import jax
import numpy as np
import pytest

from jaxrl.algorithms.presets.grpo import grpo
from jaxrl.training.checkpointing import Checkpointer
from jaxrl.training.parallelism.mesh import MeshOptions, make_mesh
from tests.training import toy


def kinds(learner):
  return {x.sharding.memory_kind for x in jax.tree.leaves(learner._arrays())}


@pytest.mark.asyncio
async def test_it_learns_on_as_if_it_had_not_rested(tmp_path):
  mesh = make_mesh(MeshOptions(data=1, fsdp=2, tensor=1), devices=jax.devices()[:2])
  learner, other = (toy.learner(grpo(kl_coef=0.1), mesh=mesh) for _ in range(2))
  home = kinds(other)
  checkpointer = Checkpointer(tmp_path)
  for step in range(3):
    metrics = await learner.update(toy.groups(step))
    rested = await other.update(toy.groups(step))
    assert rested['loss/total'] == metrics['loss/total']
    assert step == 0 or rested['compile/programs'] == 0
    for _ in range(2):
      await other.offload()
    assert kinds(other) == {'pinned_host'} != home
    for one, two in zip(
      jax.tree.leaves(learner._arrays()), jax.tree.leaves(other._arrays()), strict=True
    ):
      np.testing.assert_array_equal(one, two)
    await other.save(checkpointer, {'at': step}, wait=True)
    for _ in range(2):
      await other.reload()
    assert kinds(other) == home
  assert await learner.restore(checkpointer) == {'at': 2}
  checkpointer.close()
