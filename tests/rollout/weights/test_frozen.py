"""Adapters on their way: the base leaves once, and every version arrives to the bit."""

import itertools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jaxrl.dispatch import Dispatcher
from jaxrl.models import lora, unmerged
from jaxrl.models.model import Model
from jaxrl.rollout.jax_engine import JaxEngine
from jaxrl.rollout.weights.broadcast import BroadcastWeights
from jaxrl.rollout.weights.frozen import Frozen
from jaxrl.rollout.weights.layout import snapshot
from jaxrl.rollout.weights.publisher import Publisher
from jaxrl.rollout.weights.receiver import Receiver
from jaxrl.rollout.weights.transport import Memory
from jaxrl.types import SamplingParams
from tests.models import small
from tests.rollout.weights.helpers import SMALL, same

OWN = lora.lora(rank=2, targets='q,down', send='adapters')


def version(number, base=0):
  """What engines are given after so many steps of a learner."""
  model = Model(small.config(lora=OWN))
  params = jax.tree.map(np.asarray, model.init(jax.random.key(base)))
  part = lora.trained(model.config, params)
  for i in range(number):
    part = jax.tree.map(lambda x, i=i: x + np.float32(0.1 * (i + 1)), part)
  return unmerged.given(model.config, lora.join(model.config, params, part))


def on_devices(params):
  return jax.tree.map(jnp.asarray, params)


def test_snapshots_are_those_that_copy_all():
  taker, words = Frozen(), []
  for number, base in ((0, 0), (1, 0), (2, 0), (2, 1), (3, 1)):
    params = on_devices(version(number, base))
    found, wanted = taker.snapshot(params), snapshot(params)
    assert [s.region for s in found] == [s.region for s in wanted]
    for a, b in zip(found, wanted, strict=True):
      np.testing.assert_array_equal(a.words, b.words)
    words.append({s.region.name: s for s in found})
  table, adapter = 'embedding.table', 'layers.attention.q.lora_a'
  kept = [b[table].words is a[table].words for a, b in itertools.pairwise(words)]
  assert kept == [True, True, False, True]  # but for another base
  assert words[1][table].since is words[0][table].words
  assert not len(words[1][table].changed) and words[1][adapter].since is None


def test_weights_without_adapters_are_copied_whole():
  taker = Frozen('bfloat16')
  for given in (version(0), version(1)):
    del given[unmerged.SCALE]
    found, wanted = taker.snapshot(on_devices(given)), snapshot(given, 'bfloat16')
    for a, b in zip(found, wanted, strict=True):
      assert a.changed is None
      np.testing.assert_array_equal(a.words, b.words)


def test_after_the_first_version_adapters_travel_alone():
  memory, taker = Memory(), Frozen()
  publisher, early = Publisher(memory, **SMALL), Receiver(memory)
  reports = []
  for number in range(4):
    params = version(number)
    reports.append(publisher.publish(number, taker.snapshot(on_devices(params))))
    assert early.poll() == number and same(early.params(), params)
    late = Receiver(memory)
    assert late.poll() == number and same(late.params(), params)
    late.close()
  learned = jax.tree.leaves(lora.trained(Model(small.config(lora=OWN)).config, params))
  size = sum(x.nbytes for x in learned)
  whole = sum(x.nbytes for x in jax.tree.leaves(params))
  assert reports[0].delta_bytes is None and reports[0].full_bytes == whole > 5 * size
  for report in reports[1:]:
    assert report.changed == size // 4
    manifest = report.delta_bytes - size
    assert manifest < reports[0].written_bytes - whole  # digests and places, no weights
  early.close()
  publisher.close()


@pytest.mark.parametrize('on_device', [False, True])
async def test_an_engine_merges_what_it_is_sent(on_device):
  dispatcher = Dispatcher()
  model = Model(lora.bare(small.config(lora=OWN)))
  engine = JaxEngine(model, dispatcher=dispatcher, num_slots=2, max_length=32)
  memory = Memory()
  service = BroadcastWeights(
    memory, dispatcher=dispatcher, on_device=on_device, **SMALL
  )
  rules = SamplingParams(max_tokens=12, seed=3)
  found = []
  for number in (1, 2):
    params = version(number)
    merged = unmerged.merge(params, 'float32')
    await engine.load(10 * number, merged)
    wanted = await engine.generate('merged', [1, 2, 3], rules)
    await service.publish(number, on_devices(params))
    await engine.load(10 * number + 1, (await service.fetch(number - 1))[1])
    found.append(await engine.generate('sent', [1, 2, 3], rules))
    np.testing.assert_array_equal(found[-1].tokens, wanted.tokens)
    np.testing.assert_allclose(found[-1].logprobs, wanted.logprobs, atol=1e-6)
  assert (found[0].logprobs != found[1].logprobs).any()
  await service.close()
  dispatcher.close()
