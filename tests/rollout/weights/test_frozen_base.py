"""Adapters on their way: the base leaves once, and every version arrives to the bit."""

import itertools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jaxrl.device_thread import DeviceThread
from jaxrl.models import lora
from jaxrl.models.transformer_lm import TransformerLM
from jaxrl.rollout.engine.jax_engine import JaxEngine
from jaxrl.rollout.weights.publisher import VersionWriter, WeightPublisher
from jaxrl.rollout.weights.snapshots import FrozenBaseSnapshot, snapshot
from jaxrl.rollout.weights.subscriber import VersionReader
from jaxrl.types import SamplingParams
from tests.marks import slow
from tests.models import small
from tests.rollout.weights.helpers import SMALL, MemoryTransport, same, small_blobs

OWN = lora.lora_adapters(rank=2, targets='q,down', send='adapters')


def version(number, base=0):
  """What engines are given after so many steps of a learner."""
  model = TransformerLM(small.config(lora=OWN))
  params = jax.tree.map(np.asarray, model.init(jax.random.key(base)))
  part = lora.trainable_params(model.config, params)
  for i in range(number):
    part = jax.tree.map(lambda x, i=i: x + np.float32(0.1 * (i + 1)), part)
  return lora.make_transfer(
    model.config, lora.merge_trainable(model.config, params, part)
  )


def on_devices(params):
  return jax.tree.map(jnp.asarray, params)


def test_snapshots_are_those_that_copy_all():
  taker, words = FrozenBaseSnapshot(), []
  for number, base in ((0, 0), (1, 0), (2, 0), (2, 1), (3, 1)):
    params = on_devices(version(number, base))
    shards, wanted = taker.snapshot(params), snapshot(params)
    assert [s.region for s in shards] == [s.region for s in wanted]
    for a, b in zip(shards, wanted, strict=True):
      np.testing.assert_array_equal(a.bits, b.bits)
    words.append({s.region.name: s for s in shards})
  table, adapter = 'embedding.table', 'layers.attention.q.lora_a'
  kept = [b[table].bits is a[table].bits for a, b in itertools.pairwise(words)]
  assert kept == [True, True, False, True]  # but for another base
  assert words[1][table].base_bits is words[0][table].bits
  assert (
    not len(words[1][table].changed_indices) and words[1][adapter].base_bits is None
  )


def test_weights_without_adapters_are_copied_whole():
  taker = FrozenBaseSnapshot('bfloat16')
  for params in (version(0), version(1)):
    del params[lora.SCALE_KEY]
    shards, wanted = taker.snapshot(on_devices(params)), snapshot(params, 'bfloat16')
    for a, b in zip(shards, wanted, strict=True):
      assert a.changed_indices is None
      np.testing.assert_array_equal(a.bits, b.bits)


def test_after_the_first_version_adapters_travel_alone():
  memory, taker = MemoryTransport(), FrozenBaseSnapshot()
  publisher, early = VersionWriter(memory, **SMALL), VersionReader(memory)
  reports = []
  for number in range(4):
    params = version(number)
    reports.append(publisher.publish(number, taker.snapshot(on_devices(params))))
    assert early.poll() == number and same(early.params(), params)
    late = VersionReader(memory)
    assert late.poll() == number and same(late.params(), params)
    late.close()
  learned = jax.tree.leaves(
    lora.trainable_params(TransformerLM(small.config(lora=OWN)).config, params)
  )
  size = sum(x.nbytes for x in learned)
  whole = sum(x.nbytes for x in jax.tree.leaves(params))
  assert reports[0].delta_bytes is None and reports[0].full_bytes == whole > 5 * size
  for report in reports[1:]:
    assert report.num_changed == size // 4
    manifest = report.delta_bytes - size
    assert manifest < reports[0].written_bytes - whole  # digests and places, no weights
  early.close()
  publisher.close()


@pytest.mark.parametrize('on_device', [slow(False), True])
async def test_an_engine_merges_what_it_is_sent(on_device):
  device_thread = DeviceThread()
  model = TransformerLM(lora.base_config(small.config(lora=OWN)))
  engine = JaxEngine(model, device_thread=device_thread, max_num_seqs=2, max_length=32)
  memory = MemoryTransport()
  service = WeightPublisher(
    memory, device_thread=device_thread, **small_blobs(on_device=on_device)
  )
  rules = SamplingParams(max_tokens=12, seed=3)
  completions = []
  for number in (1, 2):
    params = version(number)
    merged = lora.merge_transfer(params, 'float32')
    await engine.load(10 * number, merged)
    wanted = await engine.generate('merged', [1, 2, 3], rules)
    await service.publish(number, on_devices(params))
    await engine.load(10 * number + 1, (await service.fetch(number - 1))[1])
    completions.append(await engine.generate('sent', [1, 2, 3], rules))
    np.testing.assert_array_equal(completions[-1].tokens, wanted.tokens)
    np.testing.assert_allclose(completions[-1].logprobs, wanted.logprobs, atol=1e-6)
  assert (completions[0].logprobs != completions[1].logprobs).any()
  await service.close()
  device_thread.close()
