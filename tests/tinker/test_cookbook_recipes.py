"""Recipes of tinker-cookbook beside its two basic loops, with their own commands."""

import asyncio
import json

import pytest

from tests.tinker import tiny

pytest.importorskip('tinker_cookbook')
pytestmark = pytest.mark.clients

LIMITS = ('--max_length=512', '--step_tokens=512', '--max_samplers=4', '--max_rank=32')


@pytest.fixture(scope='module')
def served(checkpoint, tmp_path_factory):
  """Options of all recipes: the model, its server, and a place for their logs."""
  folder = tmp_path_factory.mktemp('recipes')
  server = tiny.ServerProcess(checkpoint, folder / 'store', *LIMITS)
  with pytest.MonkeyPatch.context() as patch:
    patch.setenv('TINKER_API_KEY', tiny.KEY)
    patch.setenv('TINKER_BASE_URL', server.url)
    options = {'model_name': str(checkpoint), 'renderer_name': 'role_colon'}
    yield options, folder
  server.stop()
  assert 'Traceback' not in server.log, server.log


def metrics(folder):
  lines = (folder / 'metrics.jsonl').read_text().splitlines()
  return [json.loads(line) for line in lines]


@pytest.mark.parametrize(
  'options',
  [
    {'loss_fn': 'stable_reinforce'},  # the recipe's own
    {'loss_fn': 'importance_sampling', 'compute_post_kl': True, 'num_substeps': 2},
    {'loss_fn': 'ppo', 'max_steps_off_policy': 1},
  ],
)
def test_reinforcement_in_an_environment(served, tmp_path, options):
  from tinker_cookbook.recipes.math_rl import train

  common, _ = served
  sizes = {'groups_per_batch': 2, 'group_size': 4, 'max_steps': 2, 'lora_rank': 8}
  log = tmp_path / 'log'
  places = {'log_path': str(log), 'save_every': 1, 'eval_every': 1}
  asyncio.run(train.cli_main(train.CLIConfig(**common, **sizes, **places, **options)))
  assert len(metrics(log)) >= 2
  assert (log / 'checkpoints.jsonl').read_text().count('sampler_weights') >= 2


def test_pairs_of_replies_are_compared(served, tmp_path):
  from tinker_cookbook.recipes.preference.shorter import train

  common, _ = served
  sizes = {'batch_size': 2, 'group_size': 4, 'max_tokens': 8, 'max_steps': 1}
  train.cli_main(train.CLIConfig(**common, **sizes, log_path=str(tmp_path / 'log')))
  assert metrics(tmp_path / 'log')


def test_supervised_chats_go_on_from_a_checkpoint(served, tmp_path):
  from tinker_cookbook.recipes.chat_sl import train

  common, _ = served
  rows = tmp_path / 'rows.jsonl'
  said = [{'role': 'user', 'content': 'one two'}]
  said += [{'role': 'assistant', 'content': 'the cat sat'}]
  rows.write_text('\n'.join([json.dumps({'messages': said})] * 16))
  sizes = {'batch_size': 4, 'lora_rank': 8, 'learning_rate': 1e-2, 'save_every': 1}
  more = {**sizes, 'dataset': str(rows), 'log_path': str(tmp_path / 'log')}
  train.cli_main(train.CLIConfig(**common, **more, max_steps=3))
  losses = [x['train_mean_nll'] for x in metrics(tmp_path / 'log')]
  assert losses[-1] < losses[0]
  lines = (tmp_path / 'log' / 'checkpoints.jsonl').read_text().splitlines()
  more |= {'load_checkpoint_path': json.loads(lines[-1])['state_path']}
  more |= {'log_path': str(tmp_path / 'other'), 'model_name': common['model_name']}
  train.cli_main(train.CLIConfig(**more, max_steps=1))  # knows how chats are written
  assert metrics(tmp_path / 'other')[0]['train_mean_nll'] < losses[0]


def test_preferences_are_learned(served, tmp_path):
  import chz
  import datasets
  from tinker_cookbook.preference import train_dpo, types
  from tinker_cookbook.preference.dpo_datasets import DPODatasetBuilderFromComparisons
  from tinker_cookbook.preference.preference_datasets import ComparisonDatasetBuilder
  from tinker_cookbook.supervised.types import ChatDatasetBuilderCommonConfig

  @chz.chz
  class Pairs(ComparisonDatasetBuilder):
    def get_train_and_test_datasets(self):
      rows = datasets.Dataset.from_list([{'number': i} for i in range(8)])
      return rows, rows.select(range(2))

    def example_to_labeled_comparison(self, example):
      asked = {'role': 'user', 'content': f'one {example["number"]}'}
      said = [[{'role': 'assistant', 'content': x}] for x in ('the cat', 'a dog')]
      pair = types.Comparison(
        prompt_conversation=[asked], completion_A=said[0], completion_B=said[1]
      )
      return types.LabeledComparison(comparison=pair, label='A')

  common, _ = served
  config = ChatDatasetBuilderCommonConfig(
    model_name_for_tokenizer=common['model_name'],
    renderer_name=common['renderer_name'],
    max_length=128,
    batch_size=4,
  )
  train_dpo.main(
    train_dpo.Config(
      **common,
      log_path=str(tmp_path),
      recipe_name='pairs',
      dataset_builder=DPODatasetBuilderFromComparisons(
        common_config=config, comparison_builder=Pairs()
      ),
      learning_rate=1e-3,
      num_epochs=2,
      lora_rank=8,
      eval_every=2,
    )
  )
  found = metrics(tmp_path)
  assert found[0]['dpo_loss'] == pytest.approx(0.6931, abs=1e-3)
  assert found[-1]['dpo_loss'] < 0.68 and found[-1]['accuracy'] == 1.0
