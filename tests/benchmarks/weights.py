"""The weight broadcast: what a version takes, in full and as a difference, and what
is left of the full bytes over real training steps at a learning rate of 1e-6.
"""

import asyncio
import pathlib
import statistics
import tempfile
import time
from collections.abc import Callable
from typing import Any
from unittest import mock

import jax
import ml_dtypes
import numpy as np

from configs import quickstart
from jaxrl.config import Config
from jaxrl.device_thread import DeviceThread
from jaxrl.rollout.weights.publisher import VersionWriter, VersionWriterOptions
from jaxrl.rollout.weights.snapshots import snapshot
from jaxrl.rollout.weights.subscriber import VersionReader
from jaxrl.rollout.weights.transport import SharedMemoryTransport, Transport
from jaxrl.rollout.weights.weight_store import InProcessWeightStore
from jaxrl.types import Params
from launch import build
from launch.logging.metric_sinks import MultiSink
from launch.runtime import runtime_base
from launch.runtime.object_store import ObjectDirectory, ObjectStoreTransport
from launch.runtime.ray_runtime import RayRuntime
from launch.settings.resolve import resolve_settings
from tests.rollout.weights.helpers import MemoryTransport

LAYERS, WIDTH, FEED = 2, 2048, 6144
MOVED = 0.01  # of the weights, in a step of the made-up model
RATE = 1e-6


def _memcpy_rate(mebibytes: int = 128, repeats: int = 6) -> float:
  """Bytes a second that one thread copies; the best."""
  source = np.ones(mebibytes << 20, np.uint8)
  target = np.empty_like(source)
  times = [_seconds(lambda: np.copyto(target, source)) for _ in range(repeats)]
  return source.nbytes / min(times)


def _seconds(run: Callable[[], Any]) -> float:
  start = time.perf_counter()
  run()
  return time.perf_counter() - start


def _model(draw: np.random.Generator) -> dict[str, np.ndarray]:
  """Weights of a usual spread in bf16: 59 M of them, 118 MB."""
  shapes = {'q': (WIDTH, WIDTH), 'up': (WIDTH, FEED), 'down': (FEED, WIDTH)}
  return {
    f'{name}{layer}': draw.normal(0, rows**-0.5, (rows, columns))
    .astype(np.float32)
    .astype(ml_dtypes.bfloat16)
    for layer in range(LAYERS)
    for name, (rows, columns) in shapes.items()
  }


def _moved(params: Params, draw: np.random.Generator) -> Params:
  """`MOVED` of the weights go up or down by one unit in the last place."""

  def one(x: np.ndarray) -> np.ndarray:
    words = x.copy().view(np.uint16)
    places = draw.random(x.shape, np.float32) < MOVED
    words[places] += draw.choice(np.array([1, 65535], np.uint16), places.sum())
    return words.view(x.dtype)

  return jax.tree.map(one, params)


def _made_up(make: Callable[[], Transport], versions: int) -> dict[str, float]:
  """Medians of full and of delta versions, through transports that `make` makes."""
  draw = np.random.default_rng(0)
  params, channel = _model(draw), make()
  figures: dict[str, float] = {}
  full, delta = [], []
  publisher, receiver = (
    VersionWriter(channel, options=VersionWriterOptions(full_every=1000)),
    VersionReader(channel),
  )
  for number in range(versions + 1):
    report = publisher.publish(number, snapshot(params))
    receiver.poll()
    assert receiver.digests == (publisher.digest,)
    if number:
      delta.append((report, receiver.load_report))
    full.append(_first(params, make()))
    params = _moved(params, draw)
  receiver.close(), publisher.close(), channel.close()
  for name, kind in (('full', full), ('delta', delta)):
    figures |= _medians(name, kind)
  return {**figures, 'mb': full[0][0].full_bytes / 1e6}


def _first(params: Params, channel: Transport) -> tuple[Any, Any]:
  """What a first version takes, fresh memory on both ends included."""
  publisher, receiver = VersionWriter(channel), VersionReader(channel)
  report = publisher.publish(0, snapshot(params))
  receiver.poll()
  assert receiver.digests == (publisher.digest,)
  receiver.close(), publisher.close(), channel.close()
  return report, receiver.load_report


def _medians(name: str, kind: list[tuple[Any, Any]]) -> dict[str, float]:
  """Of (Report, Loaded) pairs: bytes to a receiver, seconds of each end's work."""
  return {
    f'{name}_mb': statistics.median(b.received_bytes for _, b in kind) / 1e6,
    f'{name}_encode_s': statistics.median(a.encode_s for a, _ in kind),
    f'{name}_put_s': statistics.median(a.put_s for a, _ in kind),
    f'{name}_load_s': statistics.median(b.seconds for _, b in kind),
  }


def _under_ray(versions: int) -> dict[str, float]:
  """The same through Ray's object store, on one node."""
  host = RayRuntime()
  try:
    figures = _made_up(lambda: _object_store(host), versions)
  finally:
    asyncio.run(host.close())
  return {f'ray_{name}': value for name, value in figures.items()}


def _object_store(host: RayRuntime) -> ObjectStoreTransport:
  """One whose directory answers: the start of its process is not what is timed."""
  channel = ObjectStoreTransport(host.spawn(ObjectDirectory))
  channel.names('')
  return channel


class _Watched(InProcessWeightStore):
  """Publishes every version a second time, in bf16, and measures that."""

  def __init__(self, *engines: Any, device_thread: DeviceThread):
    super().__init__(*engines, device_thread=device_thread)
    channel = MemoryTransport()
    self._broadcast, self._receiver = VersionWriter(channel), VersionReader(channel)
    self.shares: list[float] = []
    self.moved: list[float] = []

  async def publish(self, version: int, params: Params) -> None:
    await super().publish(version, params)
    report = self._broadcast.publish(version, snapshot(params, 'bfloat16'))
    assert self._receiver.poll() == version
    assert self._receiver.digests == (report.digest,)
    if report.delta_bytes is not None:
      self.shares.append(report.delta_bytes / report.full_bytes)
      self.moved.append(report.num_changed / report.num_elements)


def real(config: Config, steps: int, lessons: int) -> dict[str, float]:
  """A run like the quickstart after `lessons` supervised steps, at a constant 1e-6.

  Means over `steps` versions in bf16. share: bytes of the difference to the version
  before, of the full bytes; moved: weights that changed, of all.
  """
  config.num_steps = steps + 1  # the version before the first step has no delta
  config.optimizer.update(learning_rate=RATE, warmup_steps=0, lr_schedule='constant')
  config.sft.num_steps, config.eval.interval = lessons, 0
  config.checkpoint.update(save_interval=0, export=False)
  watched: list[_Watched] = []

  def weights(_, engines: list[Any], device_thread: DeviceThread) -> _Watched:
    watched.append(_Watched(*engines, device_thread=device_thread))
    return watched[-1]

  with (
    tempfile.TemporaryDirectory() as folder,
    mock.patch.object(runtime_base.Runtime, 'make_weight_store', weights),
  ):
    job = build.build(
      resolve_settings(config),
      workdir=pathlib.Path(folder),
      sink=MultiSink([]),
      stop=lambda: False,
    )
    assert asyncio.run(job.train())
  (store,) = watched
  assert len(store.shares) >= steps
  return {
    'real_steps': steps,
    'real_share': statistics.mean(store.shares[:steps]),
    'real_worst_share': max(store.shares[:steps]),
    'real_moved': statistics.mean(store.moved[:steps]),
  }


def measure(
  *, steps: int = 50, lessons: int = 200, versions: int = 4
) -> dict[str, float]:
  """Seconds and megabytes of a full and of a delta version of 118 MB through shared
  memory and, as `ray_…`, the object store, medians; and the share of the full bytes in
  `steps` real steps.
  """
  memcpy, figures = _memcpy_rate(), _made_up(SharedMemoryTransport, versions)
  figures |= {'memcpy_gb_s': memcpy / 1e9, 'memcpy_s': 1e6 * figures['mb'] / memcpy}
  figures |= {'moved': MOVED, **_under_ray(versions)}
  return {**figures, **real(quickstart.get_config(), steps, lessons)}
