"""Shows runs in a browser, during and after them: `python -m launch.view [RUNS_DIR]`.

The pages are served to this machine alone, at a URL with a token. Ctrl-C or SIGTERM
ends the server.
"""

import asyncio
import logging
import os
import pathlib
import re
import secrets
import signal
from collections.abc import Sequence

from jaxrl.options import ConfigError, require_package
from launch.logging.console import Console
from launch.logging.error_pages import print_error
from launch.runtime.ports import check_port
from launch.runtime.signal_handler import run_command

TOKEN_ENV = 'JAXRL_VIEW_TOKEN'
TOKEN = re.compile(r'[A-Za-z0-9_-]{16,128}')
USAGE = f"""\
python -m launch.view [RUNS_DIR] [--port=PORT]

  runs          a folder of runs, or a run; runs are looked for in its subfolders
  --port=0      0 takes any port that is free
  ${TOKEN_ENV}  the token of the URL, so that it stays the same; random by default
"""


async def view(root: pathlib.Path, token: str, port: int, console: Console) -> None:
  """Serves until Ctrl-C or SIGTERM."""
  from launch.report.view_server import serve_view

  stop, loop = asyncio.Event(), asyncio.get_running_loop()
  for number in (signal.SIGINT, signal.SIGTERM):
    loop.add_signal_handler(number, stop.set)
  async with serve_view(root, token, port=port) as url:
    console.fact('runs', str(root))
    console.fact('view', url)
    await stop.wait()


def _read_command(argv: Sequence[str]) -> tuple[pathlib.Path, int, str]:
  """Returns the folder, the port and the token."""
  folders = [word for word in argv if not word.startswith('-')]
  port = '0'
  for flag in [word for word in argv if word.startswith('-')]:
    name, _, port = flag.partition('=')
    if name != '--port':
      raise ConfigError(f'{flag}: unknown flag; there is --port=PORT')
  if len(folders) > 1:
    raise ConfigError(f'name one folder, not {len(folders)}: {" ".join(folders)}')
  if not port.isdecimal() or int(port) >= 2**16:
    raise ConfigError(f'--port={port}: a port is a number from 0 to 65535')
  root = pathlib.Path(folders[0] if folders else 'runs')
  if not root.is_dir():
    raise ConfigError(f'{root}: no such folder; name the one that has the runs')
  token = os.environ.get(TOKEN_ENV, '') or secrets.token_urlsafe(24)
  if not TOKEN.fullmatch(token):
    raise ConfigError(
      f'${TOKEN_ENV}: a token has 16 to 128 letters, digits and characters of -_'
    )
  return root, int(port), token


def main(argv: Sequence[str]) -> int:
  """Serves from a command line; returns the exit status."""
  if '--help' in argv or '-h' in argv:
    print(USAGE)
    return 0
  try:
    root, port, token = _read_command(argv)
    require_package('aiohttp', 'the view', 'view')
    check_port('127.0.0.1', port)
    logging.basicConfig(format='%(message)s', level=logging.INFO)
    asyncio.run(view(root, token, port, Console()))
  except (ValueError, OSError) as error:
    print_error(error)
    return 2
  return 0


if __name__ == '__main__':
  run_command(main)
