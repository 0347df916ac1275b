"""Commands take names on the Hub for checkpoints and data sets, as they take paths."""

import json

import jax
import pytest

from jaxrl import model_loading
from tests.hub_stub import HubRepository, serve_hub
from tests.launch import runs
from tests.marks import extended, slow

QUESTIONS = [f'What is {i} + {i}?' for i in range(6)]


@pytest.fixture(scope='module')
def hub(tmp_path_factory):
  folder = tmp_path_factory.mktemp('hub')
  shape = model_loading.random_config(hidden_size=32, num_layers=1, head_dim=16)
  options = {'value_head': False, 'dtype': 'float32', 'remat': 'none'}
  key = jax.random.key(0)
  model_loading.create_model(folder / 'model', shape, QUESTIONS, key, **options)
  model = {file.name: file.read_bytes() for file in (folder / 'model').iterdir()}
  lines = [{'question': q, 'answer': str(2 * i)} for i, q in enumerate(QUESTIONS)]
  rows = {
    f'data/{split}-00000-of-00001.jsonl': '\n'.join(map(json.dumps, part)).encode()
    for split, part in (('train', lines[:4]), ('test', lines[4:]))
  }
  with serve_hub(folder / 'cache') as stub:
    stub.models['me/tiny'] = HubRepository({**model, 'pytorch_model.bin': b'x'})
    stub.datasets['me/sums'] = HubRepository(rows)
    yield stub


def flags(*options):
  return (f'--config={runs.VARIED}', '--config.dataset.path=me/sums', *options)


@pytest.mark.slow
def test_a_checkpoint_is_evaluated_by_name(hub, tmp_path):
  scores = tmp_path / 'scores.json'
  options = flags('--checkpoint=me/tiny', f'--json={scores}')
  done = hub.run('-m', 'launch.evaluate', *options, JAX_PLATFORMS='cpu')
  assert done.returncode == 0, done.stderr + done.stdout
  results = json.loads(scores.read_text())
  assert results['checkpoint'] == 'me/tiny'
  assert results['tags']['arithmetic']['num_tasks'] == 2  # of the split test
  assert 'pytorch_model.bin' not in hub.downloads


@pytest.mark.parametrize('command', [extended('play'), extended('plan'), slow('train')])
def test_commands_take_names(hub, tmp_path, command):
  options = ['--config.model.checkpoint=me/tiny', '--config.num_steps=1']
  options += ['--config.eval.interval=0', '--config.sft.num_steps=0']
  options += ['--topology=cpu:1'] if command == 'plan' else []
  if command == 'train':
    options += [f'--workdir={tmp_path}', '--config.rollout.rewards=']
  done = hub.run('-m', f'launch.{command}', *flags(*options), JAX_PLATFORMS='cpu')
  assert done.returncode == 0, done.stderr + done.stdout
  if command == 'train':
    assert 'from me/tiny at ' in ' '.join(done.stdout.split())


@pytest.mark.parametrize(
  'command', [slow('train'), *map(extended, ['evaluate', 'play', 'plan', 'serve'])]
)
def test_a_name_that_nobody_has_is_one_line(hub, tmp_path, command):
  options = ['--config.model.checkpoint=me/absent']
  options += ['--topology=cpu:1'] if command == 'plan' else []
  if command == 'train':
    options.append(f'--workdir={tmp_path}')
  done = hub.run('-m', f'launch.{command}', *flags(*options), JAX_PLATFORMS='cpu')
  text = ' '.join((done.stdout + done.stderr).split())
  assert done.returncode == 2, text
  assert 'model.checkpoint=me/absent' in text and 'there is no such model' in text
  assert 'Traceback' not in text
