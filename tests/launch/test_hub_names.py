"""Commands take names on the Hub for checkpoints and data sets, as they take paths."""

import json

import jax
import numpy as np
import pytest

from jaxrl import model_loading
from jaxrl.data.tokenizer import load_tokenizer
from jaxrl.models import huggingface
from tests.hub_stub import HubRepository, serve_hub
from tests.launch import runs
from tests.marks import extended, slow

ONE_DEVICE = {'JAX_PLATFORMS': 'cpu', 'XLA_FLAGS': ''}
QUESTIONS = [f'What is {i} + {i}?' for i in range(6)]


def files_of(folder):
  files = [file for file in folder.rglob('*') if file.is_file()]
  return {str(file.relative_to(folder)): file.read_bytes() for file in files}


@pytest.fixture(scope='module')
def hub(tmp_path_factory):
  folder = tmp_path_factory.mktemp('hub')
  shape = model_loading.random_config(hidden_size=32, num_layers=1, head_dim=16)
  options = {'value_head': False, 'dtype': 'float32', 'remat': 'none'}
  key = jax.random.key(0)
  model_loading.create_model(folder / 'model', shape, QUESTIONS, key, **options)
  config, params = huggingface.load(folder / 'model')
  head = {'kernel': np.ones(32, np.float32), 'bias': np.float32(0)}
  with_head = (config.replace(value_head=True), {**params, 'value_head': head})
  tokenizer = load_tokenizer(folder / 'model')
  huggingface.save(folder / 'scorer', *with_head, tokenizer)
  model, scorer = (files_of(folder / name) for name in ('model', 'scorer'))
  lines = [{'question': q, 'answer': str(2 * i)} for i, q in enumerate(QUESTIONS)]
  rows = {
    f'data/{split}-00000-of-00001.jsonl': '\n'.join(map(json.dumps, part)).encode()
    for split, part in (('train', lines[:4]), ('test', lines[4:]))
  }
  with serve_hub(folder / 'cache') as stub:
    stub.models['me/tiny'] = HubRepository({**model, 'pytorch_model.bin': b'x'})
    stub.models['me/scorer'] = HubRepository(scorer)
    stub.datasets['me/sums'] = HubRepository(rows)
    yield stub


def flags(*options):
  return (f'--config={runs.VARIED}', '--config.dataset.path=me/sums', *options)


@pytest.mark.slow
def test_a_checkpoint_is_evaluated_by_name(hub, tmp_path):
  scores = tmp_path / 'scores.json'
  options = flags('--checkpoint=me/tiny', f'--json={scores}')
  done = hub.run('-m', 'launch.evaluate', *options, **ONE_DEVICE)
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
  done = hub.run('-m', f'launch.{command}', *flags(*options), **ONE_DEVICE)
  assert done.returncode == 0, done.stderr + done.stdout
  if command == 'train':
    assert 'from me/tiny at ' in ' '.join(done.stdout.split())


@pytest.mark.slow
@pytest.mark.extended
def test_teachers_judges_and_reward_models_have_names(hub, tmp_path):
  judge = "judge(checkpoint='me/tiny', max_tokens=2, otherwise=0.5)"
  rewards = judge + " + reward_model(checkpoint='{}')"
  train = ('--config.model.checkpoint=me/tiny', '--config.num_steps=1')
  train += ('--config.eval.interval=0', '--config.sft.num_steps=0')
  asks = f'--config={runs.VARIED}:on_policy_distill'
  _, *options = flags(*train, '--config.teacher.checkpoint=me/tiny')
  options += ['--config.batch.num_groups=2']
  for scorer in ('me/scorer', 'me/absent'):
    graders = f'--config.rollout.rewards={rewards.format(scorer)}'
    workdir = f'--workdir={tmp_path / scorer}'
    done = hub.run('-m', 'launch.train', asks, *options, graders, workdir, **ONE_DEVICE)
    text = ' '.join((done.stdout + done.stderr).split())
    if scorer == 'me/scorer':
      assert done.returncode == 0, text
    else:
      assert done.returncode == 2, text
      assert "reward_model: checkpoint='me/absent'" in text


@pytest.mark.parametrize(
  'command', [slow('train'), *map(extended, ['evaluate', 'play', 'plan', 'serve'])]
)
def test_a_name_that_nobody_has_is_one_line(hub, tmp_path, command):
  options = ['--config.model.checkpoint=me/absent']
  options += ['--topology=cpu:1'] if command == 'plan' else []
  if command == 'train':
    options.append(f'--workdir={tmp_path}')
  done = hub.run('-m', f'launch.{command}', *flags(*options), **ONE_DEVICE)
  text = ' '.join((done.stdout + done.stderr).split())
  assert done.returncode == 2, text
  assert 'model.checkpoint=me/absent' in text and 'there is no such model' in text
  assert 'Traceback' not in text
