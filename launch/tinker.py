"""Serves the Tinker API: `python -m launch.tinker --checkpoint=FOLDER`.

Scripts for the package `tinker` train LoRA adapters of the model and sample from them.
They send the key in $TINKER_API_KEY, or a random one that is printed. By default the
server accepts connections from this machine only. Ctrl-C or SIGTERM ends it.
"""

import asyncio
import contextlib
import dataclasses
import logging
import pathlib
import signal
from collections.abc import AsyncIterator, Sequence
from typing import TYPE_CHECKING, Any

from jaxrl.options import ConfigError, require_package
from jaxrl.rollout.tinker.tinker_options import TinkerOptions
from launch.logging.console import Console
from launch.logging.error_pages import print_error
from launch.runtime import process_env
from launch.runtime.ports import check_port, server_key
from launch.runtime.signal_handler import run_command
from launch.settings import command_line

if TYPE_CHECKING:
  from jaxrl.model_loading import LoadedModel
  from jaxrl.rollout.tinker.tinker_model import TinkerModel

API_KEY_ENV = 'TINKER_API_KEY'
KEY_PREFIX = 'tml-'  # without which the package sends no key
DTYPES = '', 'float32', 'bfloat16'
OWN_FLAGS = {
  'checkpoint': '',
  'folder': 'runs/tinker',
  'host': '127.0.0.1',
  'port': '8000',
  'dtype': '',
}
LIMITS = {field.name: field for field in dataclasses.fields(TinkerOptions)}
FLAGS = OWN_FLAGS | {name: str(field.default) for name, field in LIMITS.items()}
_OWN_USAGE = f"""\
python -m launch.tinker --checkpoint=FOLDER|HUB_NAME [--NAME=VALUE]

  --checkpoint=Qwen/Qwen3-0.6B  a folder as Hugging Face has them, or a name there
  --folder=runs/tinker   where checkpoints of training are kept
  --host=127.0.0.1       whom it listens to; others than this machine need a key of
                         yours in ${API_KEY_ENV}, which begins with {KEY_PREFIX}
  --port=8000            0 takes any that is free
  --dtype=…              what the model computes in: bfloat16, or float32, as on a CPU
"""
_LIMITS_USAGE = '\n'.join(
  f'  --{name}={field.default}\n      {field.metadata["doc"]}'
  for name, field in LIMITS.items()
)
USAGE = f'{_OWN_USAGE}{_LIMITS_USAGE}\n'


def _load(checkpoint: str, dtype: str) -> tuple['LoadedModel', 'TinkerModel']:
  """Loads the model to be served."""
  import jax

  from jaxrl import model_loading
  from jaxrl.data import hub
  from jaxrl.models import lora
  from jaxrl.models.model_config import Lora
  from jaxrl.rollout.tinker.tinker_model import TinkerModel

  dtype = dtype or ('float32' if jax.default_backend() == 'cpu' else 'bfloat16')
  if dtype == 'bfloat16' and jax.default_backend() == 'cpu':
    raise ConfigError('--dtype=bfloat16: on a CPU the server computes in float32')
  name = checkpoint.rstrip('/')
  options: Any = {'value_head': False, 'remat': 'none', 'key': '--checkpoint'}
  loaded = model_loading.load_model(name, dtype=dtype, **options)
  config = loaded.model.config
  narrow = config.replace(lora=Lora(1, 1.0, (), dtype))
  params = lora.to_storage_dtype(narrow, loaded.params)
  params = jax.device_put(params, jax.devices()[0])
  is_hub = not pathlib.Path(name).exists() and hub.parse_name(name) is not None
  tokenizer_id = name if is_hub else str(loaded.folder.resolve())
  served = TinkerModel(name, loaded.folder, config, tokenizer_id)
  return dataclasses.replace(loaded, params=params), served


def _stop_token_ids(tokenizer: Any) -> tuple[int, ...]:
  """Returns what ends a reply: as the template says, or without one the tokenizer."""
  from jaxrl.data.chat_tokenizer import ChatTokenizer

  if tokenizer.chat_template is not None:
    return ChatTokenizer(tokenizer).stop_token_ids
  return () if tokenizer.eos_token_id is None else (tokenizer.eos_token_id,)


@contextlib.asynccontextmanager
async def serve_tinker(
  checkpoint: str,
  folder: pathlib.Path,
  options: TinkerOptions,
  key: str,
  *,
  host: str = '127.0.0.1',
  port: int = 0,
  dtype: str = '',
) -> AsyncIterator[str]:
  """Serves a checkpoint while the context lasts.

  Args:
    checkpoint: A folder, or a name on the Hub.
    folder: Where checkpoints of training are kept.
    options: The limits.
    key: The key that clients send.
    host: Address to listen on.
    port: Port to listen on; 0 chooses a free one.
    dtype: What the model computes in; '' for what suits the device.

  Yields:
    The base URL.
  """
  from jaxrl.device_thread import DeviceThread
  from jaxrl.rollout.tinker.checkpoint_store import CheckpointStore
  from jaxrl.rollout.tinker.pending_results import PendingResults
  from jaxrl.rollout.tinker.sampler_endpoint import SamplerEndpoint
  from jaxrl.rollout.tinker.sampling_service import SamplingService
  from jaxrl.rollout.tinker.sessions import SessionTable
  from jaxrl.rollout.tinker.tenant_engine import TenantEngine
  from jaxrl.rollout.tinker.tenant_learner import TenantLearner
  from jaxrl.rollout.tinker.tinker_server import TinkerServer
  from jaxrl.rollout.tinker.training_service import TrainingService

  loaded, served = _load(checkpoint, dtype)
  device_thread = DeviceThread()
  learner = TenantLearner(
    loaded.model,
    loaded.params,
    max_tenants=options.max_tenants,
    max_rank=options.max_rank,
    max_length=options.max_length,
    step_tokens=options.step_tokens,
  )
  engine = TenantEngine(
    loaded.model,
    loaded.tokenizer,
    device_thread=device_thread,
    max_adapters=options.max_samplers,
    max_rank=options.max_rank,
    max_length=options.max_length,
    max_num_seqs=options.max_num_seqs,
  )
  await engine.load(0, loaded.params)
  store = CheckpointStore(folder, options.max_checkpoints)
  sessions = SessionTable(
    store, max_sessions=options.max_sessions, timeout=options.session_timeout
  )
  pending = PendingResults(
    max_pending=options.max_pending,
    keep_seconds=options.keep_seconds,
    max_kept_bytes=options.max_kept_bytes,
  )
  shared = store, sessions, pending, options
  training = TrainingService(served, learner, device_thread, *shared)
  stop_ids = _stop_token_ids(loaded.tokenizer)
  sampling = SamplingService(served, engine, stop_ids, *shared)
  endpoint = SamplerEndpoint(
    key, served, engine, loaded.tokenizer, sampling, options.max_length
  )
  server = TinkerServer(key, served, training, sampling, *shared, endpoint)
  try:
    async with server.serve(host, port) as url:
      yield url
  finally:
    await asyncio.to_thread(device_thread.close)


def _options(command: command_line.Command) -> TinkerOptions:
  """Returns the limits that a command line sets."""
  values = {
    name: command.flag(name, type(field.default)) for name, field in LIMITS.items()
  }
  try:
    return TinkerOptions(**values)
  except ConfigError as error:
    raise ConfigError(f'--{error}') from error


async def _serve(command: command_line.Command, key: str, console: Console) -> None:
  """Serves until Ctrl-C or SIGTERM."""
  stop, loop = asyncio.Event(), asyncio.get_running_loop()
  for number in (signal.SIGINT, signal.SIGTERM):
    loop.add_signal_handler(number, stop.set)
  flags = command.flags
  serving = serve_tinker(
    flags['checkpoint'],
    pathlib.Path(flags['folder']),
    _options(command),
    key,
    host=flags['host'],
    port=command.flag('port', int),
    dtype=flags['dtype'],
  )
  async with serving as url:
    console.fact('serving', url)
    console.fact('model', flags['checkpoint'])
    await stop.wait()
  console.say('Stopped.')


def _run(argv: Sequence[str]) -> int:
  if not any(item.startswith('--checkpoint') for item in argv):
    raise ConfigError(
      'no model to serve: set --checkpoint=FOLDER, as in --checkpoint=runs/mine/export'
    )
  command = command_line.parse(argv, FLAGS, without='checkpoint')
  flags, port = command.flags, command.flag('port', int)
  if command.overrides:
    raise ConfigError(f'--config.{command.overrides[0][0]}: this command has no config')
  if flags['dtype'] not in DTYPES:
    raise ConfigError(f'--dtype={flags["dtype"]}: choose float32 or bfloat16')
  _options(command)
  require_package('aiohttp', 'the Tinker API', 'serve')
  require_package('msgspec', 'the Tinker API', 'serve')
  check_port(flags['host'], port)
  key, made_up = server_key(flags['host'], API_KEY_ENV, KEY_PREFIX)
  logging.basicConfig(format='%(message)s', level=logging.INFO)
  console = Console()
  if made_up:
    console.fact('key', key)
  asyncio.run(_serve(command, key, console))
  return 0


def main(argv: Sequence[str]) -> int:
  """Serves from a command line; returns the exit status."""
  if not argv or '--help' in argv:
    print(USAGE)
    return 0
  try:
    return _run(argv)
  except (ValueError, OSError) as error:
    print_error(error)
    return 2


if __name__ == '__main__':
  process_env.apply()
  run_command(main)
