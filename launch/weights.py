"""How weights reach the engines: what `cluster.weights` says, and both ends of it.

Each process of the learner puts its shards into the transport by a `publisher`. The
run then tells the engines to load them, by `Pulls`; each has a `Puller`.
"""

import dataclasses
import functools
import inspect
import os
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from jaxrl.config import Config
from jaxrl.dispatch import Dispatcher
from jaxrl.models import lora
from jaxrl.rollout.vllm import arguments
from jaxrl.rollout.weight_store import InProcessWeights
from jaxrl.rollout.weights.broadcast import BroadcastWeights
from jaxrl.rollout.weights.direct import DirectWeights, Sending
from jaxrl.rollout.weights.layout import DTYPES
from jaxrl.rollout.weights.publisher import Publisher
from jaxrl.rollout.weights.pulls import PulledWeights, Pulls
from jaxrl.rollout.weights.shared_memory import SharedMemory
from jaxrl.rollout.weights.transport import Folder, Transport
from jaxrl.signature import ConfigError, check_options, parse_call, unknown
from launch.placement import Placement

KEY = '--config.cluster.weights'
MAPPED = {
  BroadcastWeights: ('dtype', 'on_device', 'tend'),
  Publisher: ('keep', 'chunk_bytes', 'blob_bytes', 'patience'),
}
SENT = {**MAPPED, Publisher: (*MAPPED[Publisher], 'full_every')}
DIRECT = {DirectWeights: ('patience',), Sending: ('dtype', 'buffer_bytes')}
OWN: dict[str, Mapping[Callable[..., Any], Sequence[str]]] = {  # options, by name
  'auto': {InProcessWeights: ('dtype',)},
  'inprocess': {InProcessWeights: ('dtype',)},
  'object_store': SENT,
  'shared_memory': MAPPED,
  'checkpoint': {**SENT, Folder: ('durable',)},
  'nccl': DIRECT,
  'ipc': DIRECT,
}
GPU = ('nccl', 'ipc')  # from one to another
RAY = ('object_store', 'shared_memory')  # which serve engines in other processes alone
REALS = [name for name in DTYPES if 'float' in name]


@dataclasses.dataclass(frozen=True)
class Plan:
  """name: of the transport, never 'auto'. options: of whoever publishes. folder,
  durable: of 'checkpoint'.
  """

  name: str
  options: Mapping[str, Any] = dataclasses.field(default_factory=dict)
  folder: str = ''
  durable: bool = True

  @property
  def direct(self) -> bool:
    """Whether the learner sends from its GPUs into the engines'."""
    return self.name in GPU


def plan(config: Config) -> Plan:
  """What `cluster.weights` says. Raises ConfigError for what is not, or cannot be."""
  text = config.cluster.weights
  name, options = parse_call(text)
  if name not in OWN:
    raise unknown(name, OWN, 'transport', KEY)
  folder = str(options.pop('folder', '')) if name == 'checkpoint' else ''
  check_options(_taking(OWN[name]), options, f'{KEY}={text}')
  dtype = options.get('dtype')
  if dtype is not None and dtype not in REALS:
    raise unknown(dtype, REALS, 'dtype', f'{KEY}={text}')
  for option in ('keep', 'full_every', 'chunk_bytes', 'blob_bytes', 'buffer_bytes'):
    if options.get(option, 1) < 1:
      raise ConfigError(f'{KEY}={text}: {option} must be at least 1')
  problem = _problem(name, bool(config.cluster.ray), folder)
  if not problem and name in GPU:
    problem = _direct(config)
  if problem := problem or _adapters(config, name, options):
    raise ConfigError(f'{KEY}={text}: {problem}')
  if name == 'auto':
    name = 'object_store' if config.cluster.ray else 'inprocess'
  if name == 'shared_memory':
    options['full_every'] = 1  # nothing travels, and what is whole is loaded as it lies
  durable = options.pop('durable', True)
  return Plan(name, options, folder and os.path.abspath(folder), durable)


def _problem(name: str, ray: bool, folder: str) -> str:
  """Why this cannot be here, and what to take; '' when it can."""
  if name == 'inprocess' and ray:
    return "Ray's engines are processes of their own: take auto or object_store"
  if name in RAY and not ray:
    return (
      'needs --config.cluster.ray=true; one process hands its weights over within '
      'itself: take auto'
    )
  if name == 'checkpoint' and not folder:
    return 'needs a folder: checkpoint(folder="/path/that/all/engines/see")'
  if name in GPU and not ray:
    return 'needs --config.cluster.ray=true, whose engines it sends to: take auto'
  return ''


def _direct(config: Config) -> str:
  """Why this learner's environment, or the engine, knows no way from GPU to GPU."""
  kind, _ = parse_call(config.rollout.engine)
  if kind != 'vllm':
    return (
      f'--config.rollout.engine={kind} takes no weights from GPU to GPU, vllm alone '
      'does: take object_store'
    )
  if missing := arguments.no_gpu_transfer():
    return (
      f"{missing} in the learner's own environment, which sends by vLLM's own means: "
      'install the extra vllm there, with CUDA, or take shared_memory or object_store'
    )
  return ''


def _adapters(config: Config, name: str, options: Mapping[str, Any]) -> str:
  """Why this way cannot send adapters by themselves, if that is asked for."""
  own = lora.parse(config.model.lora)
  if own is None or own.send == 'merged':
    return ''
  asked = f"--config.model.lora={config.model.lora}: send='{own.send}'"
  if name in ('shared_memory', *GPU):
    return (
      f'writes every version whole, and {asked}: take object_store, or leave send out'
    )
  if options.get('dtype'):
    return (
      f'dtype would round the adapters too ({asked}): keep the base in bfloat16 by '
      "lora(base='bfloat16'), or leave send out"
    )
  return ''


def check_devices(plan: Plan, placement: Placement) -> None:
  """Raises ConfigError where learner and engines do not live as a transport needs."""
  where = f'{KEY}={plan.name}'
  if plan.name == 'shared_memory' and len(placement.bundles) > 1:
    raise ConfigError(
      f'{where}: the {len(placement.bundles)} machines of this run share no memory: '
      'take object_store'
    )
  if not plan.direct:
    return
  if not placement.learners and placement.bundles:
    raise ConfigError(f'{where}: there is no learner to send: take object_store')
  if not any('GPU' in bundle for bundle in placement.bundles):
    raise ConfigError(
      f'{where}: there is no GPU here to send from: take shared_memory or object_store'
    )
  shared = placement.name == 'colocated'
  if plan.name == 'nccl' and shared:
    raise ConfigError(
      f'{where}: learner and engines have the same GPUs (colocated), and NCCL knows no '
      'two processes on one: take ipc'
    )
  if plan.name == 'ipc' and not shared:
    raise ConfigError(
      f'{where}: learner and engines have GPUs of their own ({placement.name}), and '
      'vLLM opens memory of its own GPU alone: take nccl'
    )
  if plan.name == 'ipc' and len(placement.bundles) > 1:
    raise ConfigError(
      f'{where}: memory cannot be opened across the {len(placement.bundles)} machines '
      'of this run: take object_store'
    )


def _taking(makers: Mapping[Callable[..., Any], Sequence[str]]) -> Callable[..., None]:
  """A function that takes the named options of several, as their signatures say."""

  def taking(**_: Any) -> None:
    pass

  parameters = [
    inspect.signature(maker).parameters[name]
    for maker, names in makers.items()
    for name in names
  ]
  taking.__signature__ = inspect.Signature(parameters)  # pyright: ignore
  return taking


def open_transport(
  plan: Plan, object_store: Callable[[], Transport] | None = None
) -> Transport:
  """The learner's end, made anew. object_store: makes one of Ray's, where Ray is."""
  if plan.name == 'object_store':
    assert object_store is not None
    return object_store()
  if plan.name == 'shared_memory':
    return SharedMemory()
  return Folder(plan.folder, durable=plan.durable)


def elsewhere(transport: Transport) -> Callable[[], Transport]:
  """What may be sent to another process, and there makes its end of the transport."""
  if isinstance(transport, SharedMemory):
    return functools.partial(SharedMemory, transport.address)
  if isinstance(transport, Folder):
    return functools.partial(
      Folder, transport.path, durable=transport.durable, make=False
    )
  return functools.partial(_same, transport)


def _same(transport: Transport) -> Transport:
  return transport


def publisher(
  plan: Plan,
  transport: Transport,
  dispatcher: Dispatcher,
  *,
  part: int = 0,
  parts: int = 1,
) -> BroadcastWeights:
  """What a process of the learner publishes its shards by.

  part, parts: which process, of how many. All of them publish every version; whoever
  drives the run then has the engines load it, by `Pulls`, once for all processes.
  """
  return BroadcastWeights(
    transport, dispatcher=dispatcher, part=part, parts=parts, **plan.options
  )


def store(
  plan: Plan, transport: Transport, engines: Sequence[Any], dispatcher: Dispatcher
) -> PulledWeights:
  """For a learner of one process. engines: handles that have `Puller.pull`."""
  return PulledWeights(publisher(plan, transport, dispatcher), Pulls(engines))
