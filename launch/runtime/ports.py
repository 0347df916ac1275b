"""Ports: what commands listen on is checked before they do any work."""

import errno
import os
import secrets
import socket

from jaxrl.options import ConfigError

REASONS = {
  errno.EADDRINUSE: 'is in use: choose another one, or 0 for any that is free',
  errno.EACCES: 'is reserved by the system: choose one from 1024 on',
}


def check_port(host: str, port: int) -> None:
  """Raises ConfigError if a command cannot listen where its flags say.

  Args:
    host: The address, `--host`.
    port: The port, `--port`; 0 is any that is free.
  """
  if not 0 <= port < 2**16:
    raise ConfigError(f'--port={port}: a port is a number from 0 to 65535')
  try:
    infos = socket.getaddrinfo(
      host or None, port, type=socket.SOCK_STREAM, flags=socket.AI_PASSIVE
    )
  except OSError as error:
    raise ConfigError(f'--host={host}: is not an address: {error.strerror}') from error
  for family, kind, protocol, _, address in dict.fromkeys(infos):
    with socket.socket(family, kind, protocol) as listener:
      listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
      if family == socket.AF_INET6:
        listener.setsockopt(socket.IPPROTO_IPV6, socket.IPV6_V6ONLY, 1)
      try:
        listener.bind(address)
        listener.listen()
      except OSError as error:
        if error.errno not in REASONS:
          where = f'--host={host}: cannot be listened on here'
          raise ConfigError(f'{where}: {error.strerror}') from error
        reason = REASONS[error.errno]
        raise ConfigError(f'--port={port}: the port {reason}') from error


def server_key(host: str, variable: str, prefix: str = '') -> tuple[str, bool]:
  """Returns the key that clients of a server must send, and whether it was generated.

  Args:
    host: The address, `--host`; only servers of this machine generate a key.
    variable: The environment variable that holds the user's key.
    prefix: What every key begins with.

  Raises:
    ConfigError: If the key has another beginning, or is missing where other machines
      may connect.
  """
  from jaxrl.rollout.gateway.connection_limits import LOOPBACK_HOSTS

  if key := os.environ.get(variable, '').strip():
    if not key.startswith(prefix):
      raise ConfigError(f'${variable}: a key begins with {prefix}')
    return key, False
  if host not in LOOPBACK_HOSTS:
    raise ConfigError(
      f'--host={host} accepts other machines: set ${variable} to the key that their '
      'clients must send'
    )
  return prefix + secrets.token_urlsafe(24), True
