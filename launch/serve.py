"""Serves a checkpoint by OpenAI's API: `python -m launch.serve --config=FILE.py
--checkpoint=FOLDER`.

The key that clients need is $JAXRL_API_KEY, or one that is made up and printed. It
listens to this machine alone unless told. Ctrl-C or SIGTERM ends it.
"""

import asyncio
import importlib.util
import os
import pathlib
import secrets
import signal
import sys
import tempfile
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

from jaxrl.signature import ConfigError
from launch import config as configs
from launch import tune
from launch.console import Console
from launch.sinks import open_sinks

if TYPE_CHECKING:
  from jaxrl.rollout.gateway.server import Server

KEY = 'JAXRL_API_KEY'
FLAGS = {'checkpoint': '', 'host': '127.0.0.1', 'port': '8000'}
USAGE = f"""\
python -m launch.serve --config=FILE.py --checkpoint=FOLDER [--config.KEY=VALUE]

  --checkpoint=runs/mine/export   a folder as Hugging Face has them
  --host=127.0.0.1                whom it listens to; others than this machine need
                                  a key of yours in ${KEY}
  --port=8000                     0 takes any that is free
  --config.rollout.temperature=…  for those who ask for none; also top_p, top_k
  --config.batch.max_length=…     tokens of prompt and reply; rollout.num_slots at once
"""


class Served:
  """A policy's engines and the gateway before them."""

  def __init__(self, config: Any, workdir: pathlib.Path):
    from launch import checks, engines
    from launch.alone import Alone

    checks.numbers(config)
    checks.cluster(config)
    engines.parse(config)
    self._config, self._workdir = config, workdir
    alone = Alone(config, self._make)
    self.run, self.told = alone.run, alone.told

  def _make(self, host: Any, dispatcher: Any) -> tuple[Any, 'Served']:
    from jaxrl.data.chat import Chat
    from jaxrl.data.seeds import fold
    from jaxrl.rollout.gateway.gateway import Gateway
    from launch import build
    from launch.spawn import make_engines

    config = self._config
    rollout, window = config.rollout, config.batch.max_length
    policy = build.make_policy(config, self._workdir, critic=False)
    _, router, self.weights = make_engines(config, policy, host, dispatcher)
    self.gateway = Gateway(
      router,
      Chat(policy.tokenizer),
      model=pathlib.Path(config.model.checkpoint).name,
      seed=fold(config.seed, 'serve'),
      max_length=window,
      max_tokens=window,
      temperature=rollout.temperature,
      top_p=rollout.top_p,
      top_k=rollout.top_k,
      forget=True,
    )
    return policy, self


async def serve(
  served: Served, server: 'Server', host: str, port: int, console: Console
) -> None:
  """Serves until Ctrl-C or SIGTERM."""
  from jaxrl.rollout.gateway.server import serving

  stop, loop = asyncio.Event(), asyncio.get_running_loop()
  for number in (signal.SIGINT, signal.SIGTERM):
    loop.add_signal_handler(number, stop.set)

  async def until_told() -> None:
    try:
      async with serving(server, host=host, port=port) as url:
        console.fact('serving', f'{url}/v1')
        console.fact('model', served.gateway.model)
        await stop.wait()
    finally:
      served.gateway.close()

  await served.run(until_told)
  console.say('Stopped.')


def _key(host: str) -> tuple[str, bool]:
  """The key, and whether it was made up. Raises ConfigError where it must not be."""
  from jaxrl.rollout.gateway.server import LOOPBACK

  if key := os.environ.get(KEY, '').strip():
    return key, False
  if host not in LOOPBACK:
    raise ConfigError(
      f'--host={host} lets other machines in: set ${KEY} to the key they are to have'
    )
  return secrets.token_urlsafe(24), True


def _check() -> None:
  if importlib.util.find_spec('aiohttp') is None:
    raise ConfigError(
      "the endpoint needs aiohttp: install the extra serve, pip install -e '.[serve]'"
    )


def _run(argv: Sequence[str]) -> int:
  command = configs.parse(argv, FLAGS)
  config: Any = configs.load(command, {'logging': open_sinks})
  flags = command.flags
  port = configs.read(flags['port'], int, 0, False)
  if flags['checkpoint']:
    configs.override(config, 'model.checkpoint', flags['checkpoint'])
  if not config.model.checkpoint:
    raise ConfigError('which checkpoint? Name one: --checkpoint=runs/mine/export')
  if not 0 <= port < 2**16:
    raise ConfigError(f'--port={port}: a port is a number from 0 to 65535')
  _check()
  from jaxrl.rollout.gateway.server import Server

  key, made_up = _key(flags['host'])
  console = Console()
  with tempfile.TemporaryDirectory() as folder:
    served = Served(config, pathlib.Path(folder))
    if made_up:
      console.fact('key', key)
    if served.told:
      console.fact('placement', served.told)
    server = Server(served.gateway, [key])
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
    print(f'error: {error}', file=sys.stderr)
    return 2


if __name__ == '__main__':
  tune.apply()
  sys.exit(main(sys.argv[1:]))
