"""A port that cannot be had is one line that names its flag, before any work."""

import socket

import pytest

from jaxrl.options import ConfigError
from launch import serve, view
from launch.runtime.ports import check_port, server_key
from tests.launch import runs


@pytest.fixture
def busy():
  """A port that somebody listens on."""
  with socket.create_server(('127.0.0.1', 0)) as listener:
    yield listener.getsockname()[1]


@pytest.mark.parametrize(
  ('command', 'argv'),
  [(view, ['.']), (serve, [f'--config={runs.DEBUG}', '--checkpoint=none'])],
)
def test_a_busy_port_is_named_with_its_flag(busy, command, argv, capsys):
  assert command.main([*argv, f'--port={busy}']) == 2
  error = capsys.readouterr().err
  assert error.count('\n') == 1
  assert error.startswith(f'error: --port={busy}: the port is in use: choose another')


def test_any_free_port_is_taken_and_left(busy):
  check_port('127.0.0.1', 0)
  check_port('localhost', 0)
  check_port('', 0)  # every address
  with pytest.raises(ConfigError, match=f'--port={busy}'):
    check_port('', busy)


@pytest.mark.parametrize('host', ['no host', 'nowhere.invalid', '192.0.2.1'])
def test_an_address_of_no_or_another_machine_is_named(host):
  with pytest.raises(ConfigError, match=f'^--host={host}: '):
    check_port(host, 0)


def test_a_key_is_the_users_own_or_made_up_for_this_machine_alone(monkeypatch):
  monkeypatch.delenv('OWN_KEY', raising=False)
  key, made_up = server_key('127.0.0.1', 'OWN_KEY', 'tml-')
  assert made_up and key.startswith('tml-') and len(key) > 30
  with pytest.raises(ConfigError, match=r'--host=0\.0\.0\.0 .*\$OWN_KEY'):
    server_key('0.0.0.0', 'OWN_KEY')
  monkeypatch.setenv('OWN_KEY', ' mine ')
  assert server_key('0.0.0.0', 'OWN_KEY') == ('mine', False)
  with pytest.raises(ConfigError, match='begins with tml-'):
    server_key('127.0.0.1', 'OWN_KEY', 'tml-')
