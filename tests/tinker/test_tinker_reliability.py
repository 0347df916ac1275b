"""Servers that are killed, and clients that vanish; with the official client."""

import json
import os
import signal
import subprocess
import sys
import time
import urllib.error
import urllib.request

import pytest

from tests.tinker import tiny
from tests.tinker.test_tinker_client import TEXT, WAIT, datum, types, unload

tinker = pytest.importorskip('tinker')
pytestmark = pytest.mark.clients

CLIENT = """
import sys, time, tinker
service = tinker.ServiceClient(base_url=sys.argv[1], api_key=sys.argv[2])
service.create_lora_training_client(sys.argv[3], rank=4).result()
print('made', flush=True)
time.sleep(600)
"""


def test_kill_and_start_again(checkpoint, tmp_path):
  server = tiny.ServerProcess(checkpoint, tmp_path)
  port = server.url.rpartition(':')[2]
  service = tinker.ServiceClient(base_url=server.url, api_key=tiny.KEY)
  client = service.create_lora_training_client(str(checkpoint), rank=4).result(WAIT)
  ids = client.get_tokenizer().encode(TEXT)
  adam = types.AdamParams(learning_rate=0.01)
  client.forward_backward([datum(ids)], 'cross_entropy')
  client.optim_step(adam).result(timeout=WAIT)
  state = client.save_state('kept').result(timeout=WAIT)
  sampler = client.save_weights_and_get_sampling_client().result(timeout=WAIT)
  prompt = types.ModelInput.from_ints(ids)
  scored = sampler.compute_logprobs(prompt).result(timeout=WAIT)
  # Killed in the middle of saving and of steps.
  saves = [client.save_state(f'more-{i}') for i in range(20)]
  lost = client.forward_backward([datum(ids)] * 8, 'cross_entropy')
  saves[2].result(timeout=WAIT)
  os.kill(server.process.pid, signal.SIGKILL)
  server.process.wait()
  server = tiny.ServerProcess(checkpoint, tmp_path, port=port)
  try:
    with pytest.raises((tinker.RequestFailedError, tinker.NotFoundError)) as caught:
      lost.result(timeout=WAIT)
    assert 'restarted' in str(caught.value)
    # What was saved is whole, or not there.
    rest = tinker.RestClient(base_url=server.url, api_key=tiny.KEY)
    listed = rest.list_checkpoints(client.model_id).result(timeout=WAIT).checkpoints
    names = {x.checkpoint_id for x in listed}
    assert {'weights/kept', 'weights/more-0', 'weights/more-2'} <= names
    for entry in listed:
      if entry.checkpoint_type == 'training':
        path = entry.tinker_path
        again = service.create_training_client_from_state_with_optimizer(path)
        unload(again.result(timeout=WAIT))
    folders = [p for p in tmp_path.glob('runs/*/*weights/*') if p.is_dir()]
    assert len(folders) == len(listed)
    # A sampling client goes on as if nothing had been.
    assert sampler.compute_logprobs(prompt).result(timeout=WAIT) == scored
    assert state.path in {x.tinker_path for x in listed}
  finally:
    server.stop()


def test_a_client_that_vanishes_frees_its_place(checkpoint, tmp_path):
  server = tiny.ServerProcess(
    checkpoint, tmp_path, '--session_timeout=3', '--max_tenants=1'
  )
  try:
    command = [sys.executable, '-c', CLIENT, server.url, tiny.KEY, str(checkpoint)]
    process = subprocess.Popen(command, stdout=subprocess.PIPE, text=True)
    assert process.stdout.readline() == 'made\n'
    process.kill()
    process.wait()
    service = tinker.ServiceClient(base_url=server.url, api_key=tiny.KEY)
    deadline = time.monotonic() + WAIT
    while True:
      try:
        service.create_lora_training_client(str(checkpoint), rank=4).result(
          timeout=WAIT
        )
        break
      except (tinker.RequestFailedError, tinker.APIStatusError):
        assert time.monotonic() < deadline
        service = tinker.ServiceClient(base_url=server.url, api_key=tiny.KEY)
        time.sleep(0.5)
    assert 'has vanished' in server.log
  finally:
    server.stop()


def ask(server, path, body, kind='application/json', method='POST'):
  request = urllib.request.Request(
    f'{server.url}{path}',
    body if isinstance(body, bytes) else json.dumps(body).encode(),
    {'X-API-Key': tiny.KEY, 'Content-Type': kind},
    method=method,
  )
  try:
    with urllib.request.urlopen(request, timeout=WAIT) as response:
      return response.status, response.read()
  except urllib.error.HTTPError as error:
    return error.code, error.read()


POSTS = [
  *('create_session', 'session_heartbeat', 'create_model', 'unload_model', 'get_info'),
  *('forward_backward', 'optim_step', 'save_weights', 'save_weights_for_sampler'),
  *('save_weights_external', 'load_weights', 'create_custom_loss', 'asample'),
  *('create_sampling_session', 'join_sampling_session', 'retrieve_future'),
  *('cancel_future', 'weights_info'),
]
BODIES = [b'', b'{', b'[]', b'{"model_id": 3}', b'\xff\xfe', b'\x0a\xff', b'[' * 5000]


@pytest.mark.parametrize('name', POSTS)
def test_bad_bodies_get_a_status(server, name):
  for body in BODIES:
    status, text = ask(server, f'/api/v1/{name}', body)
    assert 400 <= status < 500, (name, body, status, text)
    assert set(json.loads(text)) == {'detail'}


@pytest.mark.parametrize(
  'path, body, status, message',
  [
    ('session_heartbeat', {'session_id': 'x'}, 404, 'no session'),
    ('session_heartbeat', {'session_id': '../../etc/passwd'}, 404, 'no session'),
    ('optim_step', {'model_id': 'a:train:0', 'seq_id': 1}, 404, 'not open'),
    ('get_info', {'model_id': 'x'}, 404, 'no run'),
    ('get_info', {'model_id': '../x'}, 400, 'run'),
    ('weights_info', {'tinker_path': 'tinker://a/weights/b'}, 404, 'no checkpoint'),
    ('weights_info', {'tinker_path': 'tinker://../weights/..'}, 400, 'run'),
    ('weights_info', {'tinker_path': 'a'}, 400, 'tinker://'),
    ('retrieve_future', {'request_id': 'sample:x'}, 410, 'sample again'),
    ('nowhere', {}, 404, 'has no POST'),
  ],
)
def test_bad_requests_get_a_status(server, path, body, status, message):
  given, text = ask(server, f'/api/v1/{path}', body)
  assert given == status and message in json.loads(text)['detail']


def test_a_result_that_is_not_known(server):
  status, text = ask(server, '/api/v1/retrieve_future', {'request_id': 'a:train:0:3'})
  answer = json.loads(text)
  assert status == 200 and answer['category'] == 'server'
  assert 'restarted' in answer['error']
