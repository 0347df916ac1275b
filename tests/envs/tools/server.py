"""A small MCP server over stdio, as users write them.

COUNT: a file to which each server that starts adds its process id.
"""

import os
import sys
import time


def main():
  from mcp.server import MCPServer

  server = MCPServer('small')
  kept = []

  @server.tool()
  def add(x: int, y: int) -> int:
    """Adds two numbers."""
    return x + y

  @server.tool()
  def remember(word: str) -> str:
    """Keeps a word; tells all that were kept."""
    kept.append(word)
    return ' '.join(kept)

  @server.tool()
  async def sleep(seconds: float) -> str:
    """Takes its time."""
    import anyio

    await anyio.sleep(seconds)
    return 'awake'

  @server.tool()
  def fail() -> str:
    """Raises an error."""
    raise ValueError('it is broken')

  @server.tool()
  def end() -> str:
    """Ends the server."""
    os._exit(3)

  @server.tool()
  def environment() -> str:
    """Names its environment variables."""
    return ' '.join(sorted(os.environ))

  server.run()


if __name__ == '__main__':
  if 'COUNT' in os.environ:
    with open(os.environ['COUNT'], 'a') as file:
      file.write(f'{os.getpid()}\n')
  if 'broken' in sys.argv:
    print('no luck today', file=sys.stderr)
    sys.exit(1)
  if 'silent' in sys.argv:
    time.sleep(60)
  main()
