"""Each server answers what is no HTTP with a status and a line, and no traceback."""

import logging

import pytest

from launch.report.view_server import serve_view
from tests.rollout.gateway import broken_http
from tests.rollout.gateway.agents import KEY, endpoint, post

TOKEN = 'a-token-of-the-tests'
ASK = {'messages': [{'role': 'user', 'content': 'hi'}]}
AUTH = f'Authorization: Bearer {KEY}'
PATHS = '/v1/chat/completions', '/v1/responses', '/v1/messages', '/feedback'


@pytest.mark.parametrize('path', PATHS)
async def test_the_endpoint(path, caplog):
  caplog.set_level(logging.INFO)
  async with endpoint() as (client, _):
    url = str(client._base_url)
    for name, data, statuses in broken_http.requests('POST', path, AUTH):
      caplog.clear()
      status, _ = await broken_http.send(url, data)
      assert status in statuses, (name, status)
      assert status == 200 or name == 'expectation' or caplog.records, name
      broken_http.check_log(caplog.records)
    assert (await post(client, PATHS[0], ASK))[0] == 200


async def test_the_view(tmp_path, caplog):
  caplog.set_level(logging.INFO)
  async with serve_view(tmp_path, TOKEN) as url:
    path = f'/{TOKEN}/api/runs'
    for name, data, statuses in broken_http.requests('GET', path):
      caplog.clear()
      status, _ = await broken_http.send(url, data)
      # Nothing of a body is read here.
      assert status in (*statuses, 200), (name, status)
      assert status == 200 or name == 'expectation' or caplog.records, name
      broken_http.check_log(caplog.records)
      assert TOKEN not in caplog.text
