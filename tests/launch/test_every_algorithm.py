"""From its name alone an algorithm trains: three whole steps, config to metrics.

Rollouts are played by the engine, files are read, teachers and experts are asked: the
parts are the real ones, only the model is tiny.
"""

import json

import numpy as np
import pytest
from ml_collections import ConfigDict
from safetensors.numpy import load_file

from jaxrl.algorithms import registry, requirements
from jaxrl.functional import components
from launch.settings import command_line
from tests.calls import make_algorithm
from tests.launch import runs
from tests.marks import slow_except

STEPS = 3
BASIC = ('loss/total', 'loss/policy', 'optimizer/grad_norm', 'optimizer/learning_rate')
METRICS = {  # that a run has if its algorithm has the part
  'kl_loss': 'loss/kl',
  'kl_penalty': 'kl/penalty',
  'value_loss': 'loss/value',
  'entropy_loss': 'loss/entropy',
  'advantage': 'advantage/mean',
}
TINY = (
  '--config.sft.num_steps=0',
  '--config.eval.interval=0',
  '--config.checkpoint.save_interval=0',
  runs.ONE_LAYER,
  '--config.optimizer.warmup_steps=0',
  '--config.optimizer.learning_rate=1e-3',
  f'--config.num_steps={STEPS}',
)


# These take paths through the launcher that no other fast run takes. Fast runs exist
# of sft in test_files, of teachers in test_teachers and of experts in test_samplers.
# test_learning takes eight real steps with other algorithms that play, and test_offline
# with those of preferences.
FAST = ('grpo', 'dpo')


def path_of(algorithm):
  """What the launcher reads of an algorithm: what differs in it takes another path."""
  return (
    algorithm.data_format,
    algorithm.sampler,
    algorithm.filters,
    algorithm.shapers,
    algorithm.batch_unit,
    algorithm.old_logprobs_source,
    algorithm.init_state is None,
    algorithm.self_teacher,
    frozenset(requirements.needs(algorithm)),
    frozenset(slot for slot in METRICS if getattr(algorithm, slot) is not None),
  )


def one_for_each_path(names):
  """The first of the algorithms that take the same path."""
  first = {}
  for name in names:
    first.setdefault(path_of(make_algorithm(name)), name)
  return list(first.values())


# The learner trains the others, too: in tests/algorithms/test_learning.py those that
# play, in tests/training/test_offline_learning.py those that learn preferences.
NAMES = slow_except(FAST, one_for_each_path([*FAST, *registry.names()]))


def asks_a_teacher(algorithm):
  return algorithm.self_teacher is None and any(
    need.startswith('teacher') for need in requirements.needs(algorithm)
  )


@pytest.fixture(scope='session')
def teacher(tmp_path_factory):
  """A policy other than the student, with the student's tokenizer."""
  workdir = tmp_path_factory.mktemp('teacher')
  options = ('--config.sft.num_steps=20', '--config.num_steps=0')
  recorder = runs.record(
    workdir, *TINY, *options, '--config.optimizer.learning_rate=1e-2'
  )
  assert recorder.metrics
  return workdir / 'export'


@pytest.mark.parametrize('name', NAMES)
def test_it_trains(name, tmp_path, request):
  algorithm = make_algorithm(name)
  options = [*TINY, '--config.checkpoint.export=true']
  if asks_a_teacher(algorithm):
    folder = request.getfixturevalue('teacher')
    options += [f'--config.teacher.checkpoint={folder}']
  recorder = runs.record(tmp_path, *options, config=f'{runs.VARIED}:{name}')
  rows = [row for _, row in recorder.metrics if 'loss/total' in row]
  assert len(rows) == STEPS
  for row in rows:
    assert set(BASIC) <= row.keys()
    assert all(np.isfinite(value) for value in row.values()), row
  _has_its_own_metrics(algorithm, rows[-1])
  assert sum(row['compile/programs'] for row in rows[2:]) == 0
  before = load_file(tmp_path / 'model' / 'model.safetensors')
  after = load_file(tmp_path / 'export' / 'model.safetensors')
  moved = max(np.abs(after[name] - before[name]).max() for name in before)
  assert 0 < moved < 1


def _has_its_own_metrics(algorithm, row):
  for slot, metric in METRICS.items():
    assert (metric in row) == (getattr(algorithm, slot) is not None), metric
  if algorithm.data_format == 'rollout':
    assert {'reward/mean', 'mismatch/logprob_difference', 'tokens/action'} <= row.keys()


@pytest.mark.parametrize('name', registry.names())
def test_its_config_survives_json(name):
  command = command_line.parse([f'--config={runs.DEBUG}:{name}'], {})
  config = command_line.load(command)
  again = ConfigDict(json.loads(config.to_json_best_effort()))
  options = again.algorithm.to_dict()
  assert options.pop('name') == name
  algorithm = make_algorithm(name, options)
  assert requirements.split_hparams(algorithm) == requirements.split_hparams(
    make_algorithm(name)
  )


@pytest.mark.parametrize('name', registry.names())
def test_its_parts_can_be_written_as_call_strings(name):
  """What the listing shows is what a user may type to get the same algorithm."""
  algorithm = make_algorithm(name)
  swaps = {
    slot: components.call_string(part)
    for slot, part in requirements.components_of(algorithm).items()
  }
  swaps = {slot: text for slot, text in swaps.items() if text}
  static, numbers = requirements.split_hparams(make_algorithm(name, swaps))
  for slot, text in swaps.items():
    assert components.call_string(getattr(make_algorithm(name, swaps), slot)) == text
  assert numbers.keys() == requirements.split_hparams(algorithm)[1].keys()
  assert requirements.needs(static) == requirements.needs(algorithm)
