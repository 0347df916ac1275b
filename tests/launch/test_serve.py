"""`python -m launch.serve` as people type it."""

import json
import subprocess
import sys
import urllib.request

import pytest

from launch import serve
from launch.rollouts.preparation import load_policy
from launch.settings import command_line
from launch.settings.resolve import resolve_settings
from tests.launch import runs

SMALL = (f'--config={runs.DEBUG}', '--config.batch.max_length=64')


@pytest.fixture
def checkpoint(tmp_path):
  """A small random model's folder."""
  from jaxrl.models import huggingface

  config = command_line.load(command_line.parse(SMALL))
  policy = load_policy(resolve_settings(config), tmp_path / 'made', critic=False)
  folder, shape = tmp_path / 'export', policy.model.config
  huggingface.save(folder, shape, policy.params, policy.tokenizer)
  return folder


@pytest.mark.parametrize(
  'options, message',
  [
    ((), 'no model to serve'),
    (('--checkpoint=nowhere',), 'error: --checkpoint=nowhere: no model in'),
    (('--checkpoint=x', '--port=70000'), '--port=70000'),
    (('--checkpoint=x', '--port=high'), 'must be a whole number'),
    (('--checkpoint=x', '--host=0.0.0.0'), serve.API_KEY_ENV),
    (('--checkpoint=x', '--hots=a'), 'did you mean --host?'),
    (('--checkpoint=x', '--config.rollout.engine=vllm'), 'set --config.cluster.ray'),
    (('--checkpoint=x', '--config.cluster.num_engines=2'), 'cluster.num_engines=2'),
  ],
)
def test_what_cannot_be_served(options, message, capsys, monkeypatch):
  pytest.importorskip('aiohttp')
  monkeypatch.delenv(serve.API_KEY_ENV, raising=False)
  assert serve.main([*SMALL, *options]) == 2
  error = capsys.readouterr().err
  assert error.startswith('error: ') and error.count('\n') == 1 and message in error


def ask(url, key, body):
  headers = {'Authorization': f'Bearer {key}', 'Content-Type': 'application/json'}
  request = urllib.request.Request(
    f'{url}/chat/completions', json.dumps(body).encode(), headers
  )
  with urllib.request.urlopen(request, timeout=120) as response:
    return json.load(response)


RAY = ('--config.cluster.ray=true', '--config.cluster.num_engines=2')


@pytest.mark.slow
@pytest.mark.parametrize('host', [(), pytest.param(RAY, marks=pytest.mark.ray)])
def test_a_checkpoint_is_served_until_it_is_told_to_end(checkpoint, host):
  pytest.importorskip('aiohttp')
  env = runs.environment()
  env.pop(serve.API_KEY_ENV, None)
  options = [*SMALL, f'--checkpoint={checkpoint}', '--port=0', *host]
  process = subprocess.Popen(
    [sys.executable, '-u', *'-m launch.serve'.split(), *options],
    stdout=subprocess.PIPE,
    stderr=subprocess.STDOUT,
    text=True,
    cwd=runs.ROOT,
    env=env,
  )
  try:
    facts = {}
    for line in process.stdout:
      words = line.split()
      if len(words) == 2:
        facts[words[0]] = words[1]
      if 'model' in facts:
        break
    assert facts['serving'].startswith('http://127.0.0.1:'), facts
    body = {
      'messages': [{'role': 'user', 'content': '2+2?'}],
      'max_tokens': 5,
      'temperature': 0,
      'return_token_ids': True,
    }
    first, second = (ask(facts['serving'], facts['key'], body) for _ in range(2))
    assert first['model'] == facts['model'] == 'export'
    assert 1 <= first['usage']['completion_tokens'] <= 5
    assert first['choices'][0]['token_ids'] == second['choices'][0]['token_ids']
    process.terminate()
    assert process.wait(60) == 0
  finally:
    process.kill()
    process.wait()
