"""Tests that a key or flag of another framework is answered with ours."""

import pytest

from jaxrl.options import ConfigError
from launch.settings import command_line, foreign_keys

# What a newcomer types, and what the answer must name.
KEYS = {
  'algorithm.repeat_times': 'algorithm.group_size',
  'repeat_times': 'algorithm.group_size',
  'num_generations': 'algorithm.group_size',
  'num_return_sequences_in_group': 'group_size',
  'actor_rollout_ref.rollout.n': 'algorithm.group_size',
  'rollout_batch_size': 'batch.num_groups',
  'buffer.batch_size': 'batch.num_groups',
  'data.train_batch_size': 'batch.num_groups',
  'per_device_train_batch_size': 'batch.num_groups',
  'data.train_files': 'dataset.path',
  'max_completion_length': 'max_tokens_per_step',
  'model.model_path': 'model.checkpoint',
  'pretrain': 'model.checkpoint',
  'algorithm.advantage_fn': 'algorithm.advantage',
  'policy_loss_fn': 'algorithm.policy_loss',
  'loss_agg_mode': 'algorithm.aggregation',
  'algorithm_type': '--config=FILE.py:ALGORITHM',
  'algorithm.adv_estimator': '--config=FILE.py:ALGORITHM',
  'gradient_accumulation_steps': 'batch.num_mi',
  'ppo_epochs_of_roll.ppo_epochs': 'ppo_epochs',
  'env_manager_cls': 'manager',
  'group_filter_cls': 'rollout.group_filter',
  'group_size_redundancy': 'rollout.extra_samples',
  'rollout_dump_dir': 'trajectory_dump.path',
  'sync_interval': 'weight_sync.policy',
  'sync_style': 'weight_sync.policy',
  'sample_strategy': 'algorithm.sampler',
  'eval_interval': 'eval.interval',
  'save_steps': 'checkpoint.save_interval',
  'total_steps': 'num_steps',
  'lora_rank': 'model.lora',
  'weight_decay': 'optimizer.name',
  'llm_proxy': 'rollout.engine',
  'resume_from_checkpoint': '--workdir',
  'output_dir': '--workdir',
  'warmup_ratio_of_them.lr_scheduler_type': 'optimizer.lr_schedule',
  'cluster.gpu_per_node': 'cluster',
  'plugin-dir': 'plugins',
}


@pytest.fixture(scope='module')
def config():
  return command_line.module('configs/debug.py').get_config()


@pytest.mark.parametrize(('key', 'ours'), KEYS.items())
def test_a_key_of_another_framework_is_answered_with_ours(key, ours, config):
  with pytest.raises(ConfigError) as error:
    command_line.override(config, key, '1')
  assert ours in str(error.value), str(error.value)
  assert '\n' not in str(error.value)
  assert len(str(error.value)) < 400


@pytest.mark.parametrize(
  ('flag', 'ours'),
  [
    ('num_steps', '--config.num_steps'),
    ('num-steps', '--config.num_steps'),
    ('learning_rate', '--config.optimizer.learning_rate'),
    ('seed', '--config.seed'),
    ('group_size', '--config.algorithm.group_size'),
    ('batch.num_groups', '--config.batch.num_groups'),
    ('num_generations', 'algorithm.group_size'),
    ('output_dir', '--workdir'),
    ('wrkdir', '--workdir'),
  ],
)
def test_a_key_typed_as_a_flag_is_answered_with_how_to_write_it(flag, ours):
  with pytest.raises(ConfigError) as error:
    command_line.parse(['--config=configs/debug.py', f'--{flag}=3'], {'workdir': ''})
  assert ours in str(error.value), str(error.value)


def test_a_misspelt_key_of_ours_is_still_told(config):
  with pytest.raises(ConfigError, match='did you mean --config'):
    command_line.override(config, 'batch.num_group', '1')


def test_a_key_that_no_table_has_gets_no_answer():
  assert foreign_keys.describe_foreign_key('nothing_of_the_kind') == ''
