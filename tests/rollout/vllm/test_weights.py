"""Weights from a transport into vLLM's processes, by vLLM's own transfer."""

import asyncio

import jax
import numpy as np
import pytest
import pytest_asyncio

from jaxrl.models import lora
from jaxrl.models.transformer_lm import TransformerLM
from jaxrl.rollout.weights.publisher import VersionWriter
from jaxrl.rollout.weights.snapshots import snapshot
from jaxrl.rollout.weights.transport import (
  FolderTransport,
  SharedMemoryTransport,
  WeightsError,
)
from jaxrl.types import SamplingParams
from tests.rollout.vllm.needs import VLLM

pytestmark = [*VLLM, pytest.mark.asyncio(loop_scope='session')]

PROMPT, RULES = [9, 8, 7], SamplingParams(max_tokens=12, seed=4)


@pytest_asyncio.fixture(
  loop_scope='session', params=[SharedMemoryTransport, FolderTransport]
)
async def channel(request, world, tmp_path):
  """A transport that the engine reads from, and a publisher on it."""
  transport = (
    SharedMemoryTransport()
    if request.param is SharedMemoryTransport
    else FolderTransport(tmp_path / 'w')
  )
  publisher = VersionWriter(transport)
  engine = world.engine
  local_channel, engine._local_channel = engine._local_channel, None
  await engine.connect(str(transport.path))
  yield publisher
  publisher.close()
  transport.close()
  engine._local_channel = local_channel
  if local_channel is not None:
    await engine.connect(local_channel[0].address)


async def test_what_is_pulled_is_what_was_published(world, channel):
  engine, version = world.engine, world.next()
  channel.publish(version, snapshot(world.new))
  assert await engine.pull(version) == channel.digest
  assert engine.version == version
  completion = await engine.generate('pulled', PROMPT, RULES)
  learners = world.rescore(world.new, PROMPT, completion.tokens)
  np.testing.assert_allclose(completion.logprobs, learners, atol=1e-4)
  assert set(completion.weights_versions) == {version}
  # A difference from it, and the same in full.
  moved = jax.tree.map(lambda x: x * np.float32(1.01), world.new)
  version = world.next()
  channel.publish(version, snapshot(moved))
  assert await engine.pull(version) == channel.digest
  assert await engine.pull(version, full=True) == channel.digest
  completion = await engine.generate('moved', PROMPT, RULES)
  learners = world.rescore(moved, PROMPT, completion.tokens)
  np.testing.assert_allclose(completion.logprobs, learners, atol=1e-4)


async def test_adapters_are_merged_where_they_arrive(world):
  lora_config = lora.lora_adapters(rank=4, targets='q,o,down', send='adapters')
  model = TransformerLM(world.model.config.replace(lora=lora_config))
  params = lora.add_adapters(model, world.new, jax.random.key(0))
  draw = np.random.default_rng(1)
  for number in (1, 2):  # the second brings adapters alone

    def fill(path, x):
      b = path[-1].key == 'lora_b'
      return np.float32(0.1 * draw.normal(size=x.shape)) if b else np.asarray(x)

    params = jax.tree_util.tree_map_with_path(fill, params)
    version = world.next()
    await world.engine.load(version, lora.make_transfer(model.config, params))
    completion = await world.engine.generate(f'adapters {number}', PROMPT, RULES)
    assert set(completion.weights_versions) == {version}
    merged = lora.merged(model.config, params)
    learners = world.rescore(merged, PROMPT, completion.tokens)
    np.testing.assert_allclose(completion.logprobs, learners, atol=1e-4)
    plain = world.rescore(world.new, PROMPT, completion.tokens)
    assert np.abs(completion.logprobs - plain).max() > 0.01


async def test_a_version_may_be_loaded_twice(world):
  engine, version = world.engine, world.next()
  await engine.load(version, world.new)
  await engine.load(version, world.new)
  assert engine.version == version


async def test_decoding_goes_on_while_a_version_is_fetched(world, channel):
  """A version that is not there yet is waited for, and no request waits with it."""
  engine, version = world.engine, world.next()
  channel.publish(version, snapshot(world.old))
  await engine.pull(version)
  later = world.next()
  pulling = asyncio.create_task(engine.pull(later))
  completion = await asyncio.wait_for(engine.generate('meanwhile', PROMPT, RULES), 60)
  assert set(completion.weights_versions) == {version} and not pulling.done()
  channel.publish(later, snapshot(world.new))
  assert await pulling == channel.digest and engine.version == later


async def test_weights_that_cannot_be_had_are_an_error_and_no_end(world, channel):
  engine, version = world.engine, world.next()
  channel.publish(version, snapshot(world.old))
  await engine.pull(version)
  with pytest.raises(WeightsError, match='has no such folder'):
    await engine.connect('/nowhere')
  assert set((await engine.generate('on', PROMPT, RULES)).weights_versions) == {version}


async def test_bfloat16_weights_are_loaded_as_they_are(world, channel):
  engine, version = world.engine, world.next()
  channel.publish(version, snapshot(world.old, 'bfloat16'))
  assert await engine.pull(version) == channel.digest
  rounded = jax.tree.map(lambda x: x.astype('bfloat16').astype(np.float32), world.old)
  completion = await engine.generate('rounded', PROMPT, RULES)
  learners = world.rescore(rounded, PROMPT, completion.tokens)
  np.testing.assert_allclose(completion.logprobs, learners, atol=1e-4)
