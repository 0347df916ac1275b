"""Serves a checkpoint with OpenAI's API: `python -m launch.serve --checkpoint=FOLDER`.

Clients send the key in $JAXRL_API_KEY, or a random one that is printed. By default the
server accepts connections from this machine only. Ctrl-C or SIGTERM ends it.
"""

import asyncio
import pathlib
import signal
import tempfile
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

from jaxrl.options import ConfigError, require_package
from launch.logging.console import Console
from launch.logging.error_pages import print_error
from launch.runtime import process_env
from launch.runtime.ports import check_port, server_key
from launch.runtime.signal_handler import run_command
from launch.settings import command_line

if TYPE_CHECKING:
  from jaxrl.rollout.gateway.http_server import GatewayServer
  from launch.settings.run_settings import RunSettings

API_KEY_ENV = 'JAXRL_API_KEY'
FLAGS = {'checkpoint': '', 'host': '127.0.0.1', 'port': '8000'}
USAGE = f"""\
python -m launch.serve --config=FILE.py --checkpoint=FOLDER [--config.KEY=VALUE]

  --checkpoint=runs/mine/export   a folder as Hugging Face has them
  --host=127.0.0.1                whom it listens to; others than this machine need
                                  a key of yours in ${API_KEY_ENV}
  --port=8000                     0 takes any that is free
  --config.rollout.temperature=…  for those who ask for none; also
  --config.rollout.top_p=0.95     nucleus sampling; also top_k
  --config.batch.max_length=…     tokens of prompt and reply
  --config.rollout.max_num_seqs=… requests that are answered at once
"""


class ServedModel:
  """Holds the engines of a policy and the gateway in front of them."""

  def __init__(self, settings: 'RunSettings', workdir: pathlib.Path):
    """Creates engines and gateway.

    Args:
      settings: Settings of the run.
      workdir: Folder for temporary files.

    Raises:
      ConfigError: For invalid settings.
    """
    from launch.rollouts.inference_job import InferenceJob
    from launch.settings.engine_settings import check_engine

    check_engine(settings)
    self._settings, self._workdir = settings, workdir
    job = InferenceJob(settings, self._make_parts)
    self.run, self.description = job.run, job.description

  def _make_parts(self, runtime: Any, device_thread: Any) -> tuple[Any, 'ServedModel']:
    from jaxrl.data.chat_tokenizer import ChatTokenizer
    from jaxrl.data.seeds import fold_seed
    from jaxrl.rollout.gateway.gateway import Gateway
    from launch.rollouts.preparation import load_policy
    from launch.runtime.runtime_base import make_engines

    settings = self._settings
    rollout, max_length = settings.rollout, settings.batch.max_length
    policy = load_policy(settings, self._workdir, critic=False)
    _, router, self.weights = make_engines(settings, policy, runtime, device_thread)
    self.gateway = Gateway(
      router,
      ChatTokenizer(policy.tokenizer, settings.chat),
      model=pathlib.Path(settings.model.checkpoint).name,
      seed=fold_seed(settings.seed, 'serve'),
      max_length=max_length,
      max_tokens=max_length,
      temperature=rollout.temperature,
      top_p=rollout.top_p,
      top_k=rollout.top_k,
      evict_idle=True,
      traits=settings.engine.traits,
    )
    return policy, self


async def serve(
  served: ServedModel, server: 'GatewayServer', host: str, port: int, console: Console
) -> None:
  """Serves until Ctrl-C or SIGTERM.

  Args:
    served: The model to serve.
    server: The HTTP server.
    host: Address to listen on.
    port: Port to listen on; 0 chooses a free one.
    console: Shows the URL.
  """
  from jaxrl.rollout.gateway.http_server import serve_gateway

  stop, loop = asyncio.Event(), asyncio.get_running_loop()
  for number in (signal.SIGINT, signal.SIGTERM):
    loop.add_signal_handler(number, stop.set)

  async def wait_for_signal() -> None:
    try:
      async with serve_gateway(server, host=host, port=port) as url:
        console.fact('serving', f'{url}/v1')
        console.fact('model', served.gateway.model)
        await stop.wait()
    finally:
      served.gateway.close()

  await served.run(wait_for_signal)
  console.say('Stopped.')


def _run(argv: Sequence[str]) -> int:
  command = command_line.parse(argv, FLAGS)
  config: Any = command_line.load(command)
  flags = command.flags
  port = command.flag('port', int)
  if flags['checkpoint']:
    command_line.override(config, 'model.checkpoint', flags['checkpoint'])
  if not config.model.checkpoint:
    raise ConfigError(
      'no model to serve: set --checkpoint=FOLDER, as in --checkpoint=runs/mine/export'
    )
  require_package('aiohttp', 'the endpoint', 'serve')
  check_port(flags['host'], port)
  from jaxrl.rollout.gateway.http_server import GatewayServer
  from launch.settings.resolve import resolve_settings

  key, made_up = server_key(flags['host'], API_KEY_ENV)
  console = Console()
  with tempfile.TemporaryDirectory() as folder:
    flag = 'checkpoint' if flags['checkpoint'] else 'config.model.checkpoint'
    with command_line.naming_flag(flag, 'model.checkpoint'):
      served = ServedModel(resolve_settings(config), pathlib.Path(folder))
    if made_up:
      console.fact('key', key)
    if served.description:
      console.fact('placement', served.description)
    server = GatewayServer(served.gateway, [key])
    asyncio.run(serve(served, server, flags['host'], port, console))
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
