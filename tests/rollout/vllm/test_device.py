"""From GPU to GPU by vLLM's own means, without one: the two calls that no CPU can make,
NCCL's broadcast and the opening of CUDA's memory, are the only ones replaced.
"""

# pyright: reportMissingImports=false

import asyncio
import contextlib
import ctypes
import socket
import types

import jax
import numpy as np
import pytest

from jaxrl.model_loading import random_config
from jaxrl.models import huggingface
from jaxrl.models.transformer_lm import TransformerLM
from jaxrl.rollout.weights.direct_transfer import (
  TransferOptions,
  TransferTarget,
  make_engine_caller,
)
from jaxrl.rollout.weights.transport import WeightsError
from tests.rollout.vllm.needs import VLLM

pytestmark = VLLM
SHAPE = random_config(
  vocab_size=64, hidden_size=32, num_layers=2, intermediate_size=48, num_heads=2
)


@pytest.fixture(scope='module')
def params():
  return TransformerLM(SHAPE).init(jax.random.key(0))


class Kept:
  """A model that keeps what it loads."""

  def __init__(self):
    self.tensors = {}

  def load_weights(self, weights):
    self.tensors |= {name: tensor.clone() for name, tensor in weights}

  def modules(self):
    return []


class Worker:
  """One of an engine's processes: vLLM's transfer engine, as vLLM's worker calls it.

  rank: among the workers of its engine, of which there are `size`.
  """

  def __init__(self, engine_class, rank, size):
    engine = engine_class.__new__(engine_class)
    engine.model, engine.model_config, engine.device = (
      Kept(),
      None,
      types.SimpleNamespace(index=rank),
    )
    engine.parallel_config = types.SimpleNamespace(
      data_parallel_index=0, world_size=size, rank=rank
    )
    engine.model_update_group, engine._packed_importer = None, None
    self.engine = engine

  def init(self, info):
    self.engine.init_transfer_engine(self.engine.parse_init_info(dict(info)))

  def update(self, info):
    self.engine.receive_weights(self.engine.parse_update_info(dict(info)))


class Engine:
  """What `VllmEngine` has for a sender, over workers. calls: in the order they came."""

  def __init__(self, name, workers):
    self.name, self.workers, self.calls, self.version = name, workers, [], None

  def key(self):
    return self.name

  async def _all(self, name, *args):
    self.calls.append(name)
    work = (asyncio.to_thread(getattr(w, name), *args) for w in self.workers)
    await asyncio.gather(*work)

  async def init_transfer(self, info):
    await self._all('init', info)

  async def begin_update(self):
    self.calls.append('begin')
    for worker in self.workers:
      worker.engine.start_weight_update()

  async def update(self, info):
    await self._all('update', info)

  async def end_update(self, version, digest):
    self.calls.append('end')
    (held,) = {worker.engine.loaded_digest() for worker in self.workers}
    self.version = version if held == digest else None
    return held


def same(engine, params, dtype=np.float32):
  wanted = dict(huggingface.export(SHAPE, jax.tree.map(np.asarray, params)))
  for worker in engine.workers:
    tensors = worker.engine.model.tensors
    assert list(tensors) == list(wanted)
    for name, array in wanted.items():
      np.testing.assert_array_equal(tensors[name].float(), array.astype(dtype))


@pytest.fixture
def reload(monkeypatch):
  """vLLM's layerwise reload needs a model of vLLM's, which these are not."""
  from vllm.model_executor.model_loader import reload as loading

  monkeypatch.setattr(loading, 'initialize_layerwise_reload', lambda model: None)


@pytest.fixture
def nccl(monkeypatch, reload):
  """Groups meet as vLLM has them meet; a broadcast goes over their own store."""
  import torch
  from vllm.distributed.device_communicators import pynccl

  class Communicator:
    def __init__(self, group, device):
      self.group, self.ranks = group, group.all_gather_obj(group.rank)
      met.append(self)

    def broadcast(self, tensor, src, stream=None):
      tensor.copy_(self.group.broadcast(tensor, src))

    def destroy(self):
      met.remove(self)

  met = []
  monkeypatch.setattr(pynccl, 'PyNcclCommunicator', Communicator)
  monkeypatch.setattr(torch.accelerator, 'current_device_index', lambda: 0)
  monkeypatch.setattr(torch.cuda, 'current_stream', lambda: None)
  return met


def address():
  with socket.socket() as sock:
    sock.bind(('127.0.0.1', 0))
    return sock.getsockname()


@pytest.mark.asyncio
async def test_by_nccl_every_worker_of_every_engine_gets_every_tensor(params, nccl):
  from jaxrl.rollout.vllm.gpu_weight_receiver import NcclTransferEngine
  from jaxrl.rollout.vllm.gpu_weight_sender import GpuWeightSender

  def engine(name):
    fake = Engine(name, [Worker(NcclTransferEngine, rank, 2) for rank in range(2)])
    for worker in fake.workers:
      worker.engine.device = 'cpu'
    return fake

  one, two = engine('one'), engine('two')
  ask = make_engine_caller(asyncio.get_running_loop())
  sending = TransferOptions(dtype='bfloat16')
  sender = GpuWeightSender('nccl', SHAPE, ask, address, sending, packed=False)

  async def send(version, params, *engines):
    targets = [TransferTarget(engine, 2) for engine in engines]
    sent = await asyncio.to_thread(sender.send, version, params, targets)
    assert set(sent.engine_digests) == {sent.digest} and len(
      sent.engine_digests
    ) == len(engines)
    assert {engine.version for engine in engines} == {version} == {sent.version}
    return sent

  sent = await send(3, params, one, two)
  assert sorted(c.group.rank for c in nccl) == [0, 1, 2, 3, 4]
  assert all(c.ranks == [0, 1, 2, 3, 4] for c in nccl)
  assert one.calls == two.calls == ['init', 'begin', 'update', 'end']
  bf16 = jax.numpy.bfloat16
  rounded = jax.tree.map(lambda x: x.astype(bf16).astype('float32'), params)
  same(one, rounded)
  same(two, rounded)
  size = sum(x.nbytes for _, x in huggingface.export(SHAPE, jax.device_get(params)))
  assert sent.num_bytes * 2 == size
  # The same engines again: in the same group. Another one: in a new one, without those
  # that are gone, as is the learner's end of the old.
  moved = jax.tree.map(lambda x: x + 1, params)
  assert (await send(4, moved, one, two)).digest != sent.digest
  assert len(nccl) == 5 and one.calls.count('init') == 1
  three = engine('three')
  await send(4, moved, three)
  await send(5, params, one, three)
  assert sorted(c.group.rank for c in nccl) == [0, 1, 2, 3, 3, 4, 4]  # two still in one
  same(one, rounded)
  same(three, rounded)
  await asyncio.to_thread(sender.close)


@pytest.fixture
def ipc(monkeypatch, reload):
  """Memory that is opened is the memory itself; GPU i's name is 'GPU-i'."""
  import torch
  from vllm.model_executor.model_loader import reload as loading

  from jaxrl.rollout.vllm import cuda_ipc

  lent, opened = [], []
  name = lambda i: types.SimpleNamespace(uuid=f'GPU-{i}')  # noqa: E731

  def lend(tensor):
    lent.append(tensor)
    return cuda_ipc.IpcHandle(str(len(lent) - 1), 0)

  def view(self, loan, size, place):
    opened.append((int(loan.handle), place))
    buffer = lent[int(loan.handle)].reshape(-1).view(torch.uint8)
    assert len(buffer) == size
    return buffer

  monkeypatch.setattr(torch.cuda, 'get_device_properties', name)
  monkeypatch.setattr(cuda_ipc, 'export_ipc', lend)
  monkeypatch.setattr(cuda_ipc.ImportedMemory, 'view', view)
  monkeypatch.setattr(loading, 'finalize_layerwise_reload', lambda *_: None)
  return lent, opened


@pytest.mark.parametrize('room', [1, 5000, 1 << 20])
@pytest.mark.asyncio
async def test_by_ipc_every_worker_opens_the_memory_of_its_own_gpu(params, ipc, room):
  from jaxrl.rollout.vllm.gpu_weight_receiver import IpcTransferEngine
  from jaxrl.rollout.vllm.gpu_weight_sender import GpuWeightSender

  def engine(*places):
    fake = Engine(
      f'of {places}', [Worker(IpcTransferEngine, place, 1) for place in places]
    )
    return fake, TransferTarget(fake, len(places), places)

  mesh = jax.sharding.Mesh(np.array(jax.devices()[:4]), 'x')
  everywhere = jax.sharding.NamedSharding(mesh, jax.sharding.PartitionSpec())
  shared = jax.device_put(params, everywhere)
  (one, first), (two, second) = engine(0, 1), engine(3)
  ask = make_engine_caller(asyncio.get_running_loop())
  sender = GpuWeightSender(
    'ipc', SHAPE, ask, address, TransferOptions(buffer_bytes=room)
  )
  for version in (1, 2):
    sent = await asyncio.to_thread(sender.send, version, shared, [first, second])
    assert sent.engine_digests == (sent.digest, sent.digest)
    assert one.version == two.version == version
    shared = jax.tree.map(lambda x: x * 2, shared)
  same(one, jax.tree.map(lambda x: x * 2, params))
  same(two, jax.tree.map(lambda x: x * 2, params))
  assert one.calls[:2] == ['init', 'begin'] and one.calls[-1] == 'end'
  # At most the ends and each layer by themselves; never a part of a layer.
  chunks = one.calls.count('update') / 2
  assert chunks == (1 if room > 1 << 19 else 1 + SHAPE.num_layers)
  # What is lent is opened once, by the one worker that has its GPU.
  places = (0, 1, 3)
  assert sorted(ipc[1]) == [(i, places[i % 3]) for i in range(len(ipc[0]))]
  assert len(ipc[0]) == 2 * 3 * len(one.workers[0].engine.model.tensors)


@pytest.mark.asyncio
async def test_a_tensor_that_arrives_otherwise_is_noticed(params, ipc):
  import torch

  from jaxrl.rollout.vllm.gpu_weight_receiver import IpcTransferEngine
  from jaxrl.rollout.vllm.gpu_weight_sender import GpuWeightSender

  worker = Worker(IpcTransferEngine, 0, 1)
  engine, update = Engine('one', [worker]), worker.update

  def spoil(info):
    ipc[0][0].view(torch.int32)[7, 7] ^= 1
    update(info)

  worker.update = spoil
  sender = GpuWeightSender(
    'ipc',
    SHAPE,
    make_engine_caller(asyncio.get_running_loop()),
    address,
    TransferOptions(),
  )
  sent = await asyncio.to_thread(
    sender.send, 1, params, [TransferTarget(engine, 1, (0,))]
  )
  assert sent.engine_digests != (sent.digest,) and engine.version is None
  assert torch.is_tensor(worker.engine.model.tensors['model.norm.weight'])


@pytest.mark.asyncio
async def test_an_engine_on_a_gpu_that_the_learner_has_not_says_so(params, ipc):
  from jaxrl.rollout.vllm.gpu_weight_receiver import IpcTransferEngine
  from jaxrl.rollout.vllm.gpu_weight_sender import GpuWeightSender

  engine = Engine('elsewhere', [Worker(IpcTransferEngine, 2, 1)])
  sender = GpuWeightSender(
    'ipc',
    SHAPE,
    make_engine_caller(asyncio.get_running_loop()),
    address,
    TransferOptions(),
  )
  with pytest.raises(WeightsError, match=r'GPU GPU-2 is none of .*GPU-0'):
    await asyncio.to_thread(sender.send, 1, params, [TransferTarget(engine, 1, (0,))])


@pytest.mark.asyncio
async def test_memory_that_cannot_be_lent_is_copied_once_more(
  params, ipc, monkeypatch, caplog
):
  from jaxrl.rollout.vllm import cuda_ipc
  from jaxrl.rollout.vllm.gpu_weight_receiver import IpcTransferEngine
  from jaxrl.rollout.vllm.gpu_weight_sender import GpuWeightSender

  lend, refused = cuda_ipc.export_ipc, set()

  def picky(tensor):
    if tensor.data_ptr() not in refused and len(refused) < 1:
      refused.add(tensor.data_ptr())
      raise cuda_ipc.GpuMemoryError('cuIpcGetMemHandle: CUDA_ERROR_INVALID_VALUE (1)')
    return lend(tensor)

  monkeypatch.setattr(cuda_ipc, 'export_ipc', picky)
  engine = Engine('one', [Worker(IpcTransferEngine, 0, 1)])
  sender = GpuWeightSender(
    'ipc',
    SHAPE,
    make_engine_caller(asyncio.get_running_loop()),
    address,
    TransferOptions(),
  )
  sent = await asyncio.to_thread(
    sender.send, 1, params, [TransferTarget(engine, 1, (0,))]
  )
  assert sent.engine_digests == (sent.digest,) and refused
  assert 'copied once more' in caplog.text and 'CUDA_ERROR_INVALID_VALUE' in caplog.text
  same(engine, params)


def test_what_is_lent_must_not_be_held_when_it_goes_back(monkeypatch):
  import torch

  from jaxrl.rollout.vllm import cuda_ipc

  memory = cuda_ipc.ImportedMemory()
  monkeypatch.setattr(cuda_ipc, '_open_handle', lambda handle: ctypes.c_uint64(1 << 20))
  monkeypatch.setattr(cuda_ipc, '_current_device', contextlib.nullcontext)
  closed = []
  monkeypatch.setattr(cuda_ipc, '_call_driver', lambda name, *_: closed.append(name))
  monkeypatch.setattr(torch, 'as_tensor', lambda held, device: (held, device))
  views = [memory.view(cuda_ipc.IpcHandle(h, 5), 3, 1) for h in ('aa', 'aa', 'bb')]
  (held, device), *_ = views
  assert device == 'cuda:1'
  assert held.__cuda_array_interface__['data'] == ((1 << 20) + 5, False)
  with pytest.raises(cuda_ipc.GpuMemoryError, match=r'3 tensors .* still held'):
    memory.release()
  del held, views, _
  memory.release()
  memory.close()
  assert closed == ['cuIpcCloseMemHandle'] * 2


def test_what_is_called_of_vllm_is_there():
  """By vLLM's own source: names, and what they take."""
  import inspect

  from vllm.v1.engine.async_llm import AsyncLLM
  from vllm.v1.worker.gpu_worker import Worker as Gpu

  signatures = {
    'init_weight_transfer_engine': ['request'],
    'start_weight_update': [],
    'update_weights': ['request'],
    'finish_weight_update': ['weight_version'],
    'sleep': ['level', 'mode'],
    'wake_up': ['tags'],
    'pause_generation': ['mode', 'clear_cache'],
    'resume_generation': [],
    'collective_rpc': ['method', 'args'],
  }
  for name, taken in signatures.items():
    known = inspect.signature(getattr(AsyncLLM, name)).parameters
    assert set(taken) <= set(known), (name, known)
  for name in ('init_weight_transfer_engine', 'start_weight_update', 'update_weights'):
    assert callable(getattr(Gpu, name))
  for name in ('finish_weight_update', 'sleep', 'wake_up'):
    assert callable(getattr(Gpu, name))
