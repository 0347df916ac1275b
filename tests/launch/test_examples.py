"""The three examples of ROLL's agentic practice guide, as configs, run."""

import json

import pytest

from configs import swe_rollout
from jaxrl.envs.sandbox import local_sandbox
from launch import rollout, train
from launch.logging.metric_sinks import read_metrics
from tests.data.trajectory_writers.service import serve
from tests.envs import swe_repos
from tests.launch import runs

QUESTIONS = [
  {'prompt': f'What is {n} + {n}?', 'ground_truth': f'${2 * n}$'} for n in range(5)
]
SMALL = (
  '--config.model.random=qwen3(vocab_size=320, num_layers=1)',
  '--config.rollout.max_num_seqs=4',
)


def written(path, rows):
  path.write_text(''.join(json.dumps(row) + '\n' for row in rows))
  return f'--config.dataset.path={path}'


@pytest.mark.slow
def test_a_validation_that_traverses_its_data(tmp_path):
  options = [
    f'--config={runs.ROOT}/configs/deepmath.py', f'--workdir={tmp_path}/run',
    written(tmp_path / 'deepmath.jsonl', QUESTIONS), *runs.BARE, *SMALL,
    '--config.num_steps=1', '--config.batch.num_groups=2',
    '--config.algorithm.group_size=2',
    '--config.batch.max_length=192', '--config.env.deep_math.max_tokens_per_step=8',
    f'--config.trajectory_dump.path={tmp_path}/dump',
  ]  # fmt: skip
  assert train.main(options) == 0
  evaluated = [
    row for row in read_metrics(tmp_path / 'run' / 'metrics.jsonl')
    if 'eval/deep_math/mean' in row
  ]  # fmt: skip
  assert [row['eval/deep_math/tasks'] for row in evaluated] == [5, 5]
  for step in (0, 1):
    part = tmp_path / 'dump' / f'val-deep_math-step{step:06d}.jsonl'
    rows = [json.loads(line) for line in part.read_text().splitlines()]
    assert sorted(row['task_idx'] for row in rows) == [0, 1, 2, 3, 4]


@pytest.mark.slow
def test_questions_into_a_table(tmp_path, monkeypatch):
  pytest.importorskip('odps')
  with serve(dict(swe_rollout.COLUMNS)) as (service, address):
    for name, value in (
      ('ENDPOINT', f'{address}/api'), ('TUNNEL_ENDPOINT', address),
      ('ACCESS_ID', 'id'), ('ACCESS_KEY', 'key'),
    ):  # fmt: skip
      monkeypatch.setenv(f'ODPS_{name}', value)
    options = [
      f'--config={runs.ROOT}/configs/odps_rollout.py', f'--workdir={tmp_path}/run',
      written(tmp_path / 'deepmath.jsonl', QUESTIONS), *SMALL,
      '--config.env.deep_math.max_tokens_per_step=4',
      '--config.trajectory_dump.path=odps://lab/tables/played/ds=one',
    ]  # fmt: skip
    assert rollout.main(options) == 0
    rows = service.rows()
  assert sorted(row['task_idx'] for row in rows) == [0, 1, 2, 3, 4]
  assert {row['model_name'] for row in rows} == {'random'}
  assert all(json.loads(row['save_content'])['messages'] for row in rows)


@pytest.mark.skipif(
  bool(local_sandbox.unsupported_reason()), reason=local_sandbox.unsupported_reason()
)
@pytest.mark.slow
def test_an_agent_in_repositories(tmp_path):
  repos = tmp_path / 'repos'
  tasks = [swe_repos.ledger(repos), swe_repos.spans(repos)]
  options = [
    f'--config={runs.ROOT}/configs/swe_rollout.py', f'--workdir={tmp_path}/run',
    written(tmp_path / 'verified.jsonl', tasks), *SMALL,
    f'--config.env.swe.env_config.repos={repos}',
    '--config.env.swe.max_steps=2', '--config.env.swe.max_tokens_per_step=4',
    f'--config.trajectory_dump.path={tmp_path}/dump',
  ]  # fmt: skip
  assert rollout.main(options) == 0
  (part,) = (tmp_path / 'dump').iterdir()
  rows = [json.loads(line) for line in part.read_text().splitlines()]
  assert part.name == 'train-swe-00000.jsonl'
  assert [list(row) for row in rows] == [[name for name, _ in swe_rollout.COLUMNS]] * 2
  assert [row['task_idx'] for row in rows] == [0, 1]
  assert [row['episode_score'] for row in rows] == [0, 0]
  assert {row['stop_reason'] for row in rows} == {'max_steps'}
