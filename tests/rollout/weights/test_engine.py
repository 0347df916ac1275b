"""A real engine that takes a broadcast serves what the learner has, to the bit."""

import jax
import numpy as np
import pytest

from jaxrl.device_thread import DeviceThread
from jaxrl.models.model_config import ModelConfig
from jaxrl.models.transformer_lm import TransformerLM
from jaxrl.rollout.engine.jax_engine import JaxEngine
from jaxrl.rollout.weights.publisher import PublisherOptions, WeightPublisher
from jaxrl.rollout.weights.subscriber import WeightSubscriber
from jaxrl.rollout.weights.transport import SharedMemoryTransport
from jaxrl.types import SamplingParams
from tests.marks import slow

MODEL = TransformerLM(
  ModelConfig(
    vocab_size=48,
    hidden_size=32,
    num_layers=1,
    num_heads=4,
    num_kv_heads=2,
    head_dim=8,
    intermediate_size=48,
  )
)
RULES = SamplingParams(max_tokens=8, seed=3)


@pytest.mark.parametrize('dtype', [slow(None), 'bfloat16'])
async def test_versions_arrive_through_shared_memory(dtype):
  device_thread, channel = DeviceThread(), SharedMemoryTransport()
  engine = JaxEngine(
    MODEL,
    device_thread=device_thread,
    max_num_seqs=2,
    max_length=16,
    decode_steps=4,
    prompt_buckets=[16],
  )
  store = WeightPublisher(
    channel, device_thread=device_thread, options=PublisherOptions(dtype=dtype)
  )
  end = WeightSubscriber(SharedMemoryTransport(channel.address))
  params = MODEL.init(jax.random.key(0))
  for version in range(3):
    await store.publish(version, params)
    number, received = await end.fetch(version - 1)
    completions = []
    cast = jax.tree.map(lambda x: x.astype(dtype or x.dtype), params)
    for tree in (received, cast):
      await engine.load(number, tree)
      completions.append(await engine.generate('a', [1, 2, 3], RULES))
    assert set(completions[0].weights_versions) == {version}
    np.testing.assert_array_equal(completions[0].tokens, completions[1].tokens)
    np.testing.assert_array_equal(completions[0].logprobs, completions[1].logprobs)
    params = jax.tree.map(lambda x: x * 1.25, params)
  end.close(), await store.close(), device_thread.close(), channel.close()
