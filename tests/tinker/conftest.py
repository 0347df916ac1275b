"""Tests of the Tinker server; those with the official client need its package."""

import pytest

from tests.tinker import tiny


@pytest.fixture(scope='session')
def checkpoint(tmp_path_factory):
  """A tiny random model's folder."""
  return tiny.make_checkpoint(tmp_path_factory.mktemp('tinker') / 'model')


@pytest.fixture(scope='session')
def server(checkpoint, tmp_path_factory):
  """A server of the tiny model, which the tests of a session share."""
  made = tiny.ServerProcess(checkpoint, tmp_path_factory.mktemp('store'))
  yield made
  made.stop()
  assert 'Traceback' not in made.log, made.log
