"""Small weights, how they change, and a transport that fails as it is told to."""

import threading

import jax
import ml_dtypes
import numpy as np

from jaxrl.rollout.weights.publisher import PublisherOptions
from jaxrl.rollout.weights.shards import flatten


def small_blobs(**options):
  """Arguments of a writer or publisher that make a small version several blobs."""
  sizes = PublisherOptions(chunk_bytes=4096, blob_bytes=16384, **options)
  return {'options': sizes, 'threads': 2}


SMALL = small_blobs()


def make(seed=0, size=3000):
  draw = np.random.default_rng(seed)
  return {
    'layers': {'kernel': draw.standard_normal((3, size)).astype(np.float32)},
    'norm': np.ones(7, np.float32),
    'count': np.arange(5),
  }


def step(params, share=0.01, seed=0):
  """Other bits in a share of the elements, NaN, −0 and infinity among them."""
  draw = np.random.default_rng(seed)

  def one(x):
    x = x.copy()
    bits = x.reshape(-1).view(f'u{x.itemsize}')
    hit = draw.random(x.size) < share
    bits[hit] = draw.integers(0, np.iinfo(bits.dtype).max, hit.sum(), bits.dtype)
    return x

  return jax.tree.map(one, params)


def halves(params):
  return jax.tree.map(
    lambda x: x.astype(ml_dtypes.bfloat16) if x.dtype.kind == 'f' else x, params
  )


def same(actual, wanted):
  actual, wanted = flatten(actual), flatten(wanted)
  assert actual.keys() == wanted.keys()
  return all(
    actual[k].dtype == wanted[k].dtype
    and np.asarray(actual[k]).tobytes() == np.asarray(wanted[k]).tobytes()
    for k in wanted
  )


class MemoryTransport:
  """A transport within one process, between its threads."""

  mapped = False

  def __init__(self) -> None:
    self._blobs: dict[str, bytes] = {}
    self._lock = threading.Lock()

  def put(self, name, *data):
    with self._lock:
      self._blobs[name] = b''.join(data)

  def get(self, name):
    with self._lock:
      return memoryview(self._blobs[name])

  def delete(self, name):
    with self._lock:
      self._blobs.pop(name, None)

  def names(self, prefix):
    with self._lock:
      return [name for name in self._blobs if name.startswith(prefix)]

  def close(self):
    pass


class Rough(MemoryTransport):
  """Counts, and spoils what it hands out as it is told to."""

  def __init__(self):
    super().__init__()
    self.spoil = lambda name, data: data
    self.reads = []

  def get(self, name):
    self.reads.append(name)
    data = self.spoil(name, bytes(super().get(name)))
    if data is None:
      raise KeyError(name)
    return memoryview(data)
