"""Eighteen faults that agentic training has had elsewhere, and the tests against them.

A map for readers: to see how a fault is prevented, read its tests. Faults are numbered
from 1 on, in this order; those of losses are in tests/functional/test_known_faults.py.
"""

import ast
import functools
import pathlib

import pytest

ROOT = pathlib.Path(__file__).parents[2]
QUEUE = 'tests/rollout/test_group_queue.py'
MANAGER = 'tests/rollout/test_env_manager.py'
LOAD = 'tests/simulation/test_load.py'
ENGINE = 'tests/rollout/test_jax_engine_control.py'

FAULTS = {
  'a fast environment takes every slot of an episode: duplicate ids': [
    f'{QUEUE}::test_one_lease_for_each_member',
    f'{QUEUE}::test_what_the_dead_still_put_takes_nobodys_place',
    f'{LOAD}::test_two_thousand_at_once_of_lognormal_times',
  ],
  "a filtered group's replacement wakes no one": [
    f'{QUEUE}::test_a_filtered_group_is_replaced_and_everyone_is_woken',
  ],
  'a group with a failed member hangs get_batch': [
    f'{QUEUE}::test_a_failed_member_is_retried_with_its_seed_then_the_group_replaced',
    f'{QUEUE}::test_groups_with_a_failed_member_by_policy',
    f'{LOAD}::test_episodes_that_fail_for_good_leave_their_group_or_drop_it',
  ],
  'one environment that never returns stalls training': [
    f'{QUEUE}::test_a_lease_past_its_deadline_is_played_by_another',
    f'{LOAD}::test_hung_episodes_without_any_timeout_but_their_leases',
    'tests/envs/test_isolated_env.py::test_a_hung_environment_is_killed_and_replaced',
    'tests/rollout/test_killed_processes.py'
    '::test_environments_in_processes_that_die_hang_raise_or_leak',
  ],
  'each evaluation sees other seeds': [
    'tests/rollout/test_evaluation.py::test_each_evaluation_is_the_same',
    'tests/rollout/test_evaluation.py::test_games_have_a_fixed_list_of_seeds',
    'tests/rollout/test_evaluation.py::test_gsm8k_whole',
  ],
  'async_ratio=1.0 crashes, fractions do not work': [
    f'{QUEUE}::test_async_ratio_says_how_many_groups_are_ahead',
  ],
  'environments seed the process-global generators': [
    'tests/envs/test_sokoban_env.py::test_sixteen_threads_draw_the_rooms_that_one_draws',
    'tests/envs/test_sokoban_env.py::test_the_global_generators_are_left_alone',
    'tests/envs/test_frozen_lake.py::test_threads_draw_the_maps_that_one_thread_draws',
    'tests/envs/test_sudoku_env.py::test_threads_draw_the_puzzles_that_one_draws',
    'tests/envs/test_web_shop_env.py::test_errands_follow_from_the_seed_under_threads',
    'tests/envs/test_reasoning_gym_env.py::test_sixteen_threads_ask_what_one_asks',
  ],
  'run seeds are not recorded, so no run repeats': [
    'tests/launch/test_workdir.py::test_other_keys_may_not',
    'tests/launch/test_resume.py::test_any_moment',
    'tests/training/test_learner.py'
    '::test_two_runs_are_equal_bit_for_bit_and_seeds_differ',
  ],
  'seed 0 is treated as no seed': [
    'tests/data/test_seeds.py::test_every_part_counts_and_zero_is_a_seed',
    'tests/data/test_dataset.py::test_seed_zero_is_a_seed_and_seeds_differ',
    f'{MANAGER}::test_members_and_turns_have_seeds_of_their_own_and_repeat',
  ],
  'actors keyed by name alone ignore later options': [
    'tests/data/test_dataset.py::test_manager_keys_by_all_options',
  ],
  'a sink is accepted and nothing written, or one mode overwrites another': [
    'tests/data/trajectory_writers/test_file_writer.py::test_a_wrong_path',
    'tests/data/trajectory_writers/test_dump_columns.py'
    '::test_what_is_wrong_is_told_with_the_nearest_name',
    'tests/data/trajectory_writers/test_maxcompute_writer.py::test_rows_come_to_the_table_typed',
    'tests/data/trajectory_writers/test_file_writer.py::test_parts_of_another_run_are_not_written_over',
  ],
  'a first prompt as long as a sequence kills training': [
    f'{MANAGER}::test_a_first_prompt_that_is_too_long_is_a_failure',
    f'{MANAGER}::test_a_prompt_beyond_the_engines_window_is_a_failure',
  ],
  'a stuck grader blocks later ones, which then score 0': [
    'tests/envs/graders/test_grader_processes.py'
    '::test_stuck_calls_do_not_block_or_fail_those_behind_them',
    'tests/envs/graders/test_math_grader.py'
    '::test_algebra_without_end_is_a_timeout_and_the_next_reply_is_graded',
  ],
  'an exception in one environment ends the run': [
    'tests/rollout/test_env_worker.py::test_environments_that_break_now_and_then',
    f'{LOAD}::test_two_thousand_of_which_many_hang_crash_or_return_garbage',
  ],
  'padding rows or copies are trained on at full weight': [
    'tests/training/test_train_step.py::test_padding_changes_nothing',
    'tests/training/test_batch_builder.py::test_rows_survive_and_padding_is_empty',
    'tests/functional/test_known_faults.py::test_padding_ids_enter_no_statistic',
  ],
  'unknown config keys are ignored': [
    'tests/launch/test_config.py::test_a_wrong_override_gets_one_clear_line',
    'tests/launch/test_config.py::test_section_takes_further_keys_and_refuses_strangers',
  ],
  'an abort misses a request between registration and dispatch': [
    f'{ENGINE}::test_abort_at_once_is_not_missed',
    f'{ENGINE}::test_abort_at_any_moment',
    f'{ENGINE}::test_one_id_is_one_request',
  ],
  'aborted turns are generated again from the start': [
    f'{MANAGER}::test_an_interrupted_reply_goes_on_from_what_was_written',
    'tests/rollout/test_router.py'
    '::test_a_request_goes_on_elsewhere_from_what_was_emitted',
    'tests/rollout/test_resumable_generation.py'
    '::test_cut_anywhere_it_goes_on_elsewhere_as_it_would_have',
  ],
}


@functools.cache
def defined(path):
  body = ast.parse((ROOT / path).read_text()).body
  functions = (ast.FunctionDef, ast.AsyncFunctionDef)
  return {node.name for node in body if isinstance(node, functions)}


@pytest.mark.parametrize(
  'fault', FAULTS, ids=[f'{n} {fault}' for n, fault in enumerate(FAULTS, 1)]
)
def test_each_fault_has_its_tests(fault):
  assert FAULTS[fault]
  for test in FAULTS[fault]:
    path, name = test.split('::')
    assert name in defined(path), test


def test_there_are_eighteen():
  assert len(FAULTS) == 18
