"""`env.<tag>.prefixes`: whole runs, kills, and what is refused."""

import signal

import pytest

from tests.launch import runs
from tests.launch.test_resume import has, when

COINS = str(runs.ROOT / 'tests' / 'launch' / 'coins.py')
KEY = '--config.env.coins.prefixes'
PREFIXES = f'{KEY}=prefix_sampling'


@pytest.fixture(scope='module')
def whole(tmp_path_factory):
  folder = tmp_path_factory.mktemp('whole')
  runs.run(folder, PREFIXES, config=COINS)
  return folder


@pytest.mark.slow
def test_a_run_replays_turns_and_says_so(whole):
  rows = [row for row in runs.rows(whole) if 'prefix/share' in row]
  assert rows[0]['prefix/share'] == 0 and 'prefix/turns' not in rows[0]
  replayed = [row for row in rows if row['prefix/share']]
  assert replayed
  for row in replayed:
    assert 1 <= row['prefix/turns'] <= 3 and row['prefix/diverged'] == 0
    assert 0 <= row['prefix/pass_rate'] <= 1 and row['prefix/head_starts'] >= 0
  assert any(row['optimizer/grad_norm'] > 0 for row in replayed)
  # Evaluations play from the start.
  last = runs.rows(whole)[-1]
  assert 'eval/coins/mean' in last
  assert not any('prefix' in name for name in last if name.startswith('eval/'))


@pytest.mark.slow
def test_a_killed_run_ends_at_the_same_bits(whole, tmp_path):
  for step, blow in ((2, signal.SIGKILL), (4, signal.SIGINT)):
    process = runs.spawn(tmp_path, PREFIXES, config=COINS)
    reached = when(process, lambda step=step: has(tmp_path, 'train', step))
    process.send_signal(blow)
    output, _ = process.communicate(timeout=120)
    assert reached, output
  runs.run(tmp_path, PREFIXES, config=COINS)
  assert runs.numbers(tmp_path) == runs.numbers(whole)
  assert runs.weights(tmp_path) == runs.weights(whole)


@pytest.mark.slow
def test_the_authors_ratios_replay_turns_too(tmp_path):
  runs.run(tmp_path, f'{KEY}=prefix_ratios(low=.5, high=.5)', config=COINS)
  replayed = [row for row in runs.rows(tmp_path) if row.get('prefix/share')]
  assert replayed and all(row['prefix/diverged'] == 0 for row in replayed)
  assert all(1 <= row['prefix/turns'] <= 3 for row in replayed)


AGENT = """
def agent(task, base_url, api_key):
  return 'done'


class Live:
  uses_dataset = False
  not_replayable = 'plays against people'

  def reset(self, *, seed, options=None):
    return 'go', {}

  def step(self, action):
    return None, 0.0, True, False, {}
"""
REFUSED = {
  'seeds': ((PREFIXES, '--config.env.coins.num_seeds=0'), 'num_seeds to how many'),
  'turns': ((PREFIXES, '--config.env.coins.max_steps=1'), 'max_steps=1'),
  'name': ((f'{KEY}=prefix_samples',), "no prefix sampler 'prefix_samples'"),
  'option': ((f'{KEY}=prefix_sampling(aim=2)',), 'aim=2 must be in'),
  'manager': (
    (PREFIXES, '--config.env.coins.manager={folder}/agent.py:Live'),
    'has no coroutine run_rollout_loop',
  ),
  'live': (
    (PREFIXES, '--config.env.coins.env_type={folder}/agent.py:Live'),
    'plays against people',
  ),
  'unused': (
    (PREFIXES, '--config.env.coins.weight=0', '--config.dataset.experience_store='),
    'is left to train on',
  ),
}


@pytest.mark.parametrize('case', REFUSED)
def test_what_cannot_be_replayed_is_refused_by_name(
  case, tmp_path, capsys, monkeypatch
):
  (tmp_path / 'agent.py').write_text(AGENT)
  monkeypatch.setattr('launch.build.load_policy', None)
  options, message = REFUSED[case]
  options = [option.format(folder=tmp_path) for option in options]
  assert runs.main(tmp_path / 'run', *options, config=COINS) == 2
  (line,) = [x for x in capsys.readouterr().err.splitlines() if 'error' in x]
  assert message in line and 'env.coins' in line


@pytest.mark.parametrize('key', ['num_seeds=3', 'prefixes=prefix_sampling'])
def test_an_agent_of_its_own_is_refused(key, tmp_path, capsys, monkeypatch):
  (tmp_path / 'agent.py').write_text(AGENT)
  monkeypatch.setattr('launch.build.load_policy', None)
  options = (
    '--config.env.arithmetic.env_type=agent',
    f'--config.env.arithmetic.env_config.agent={tmp_path}/agent.py:agent',
    f'--config.env.arithmetic.{key}',
  )
  assert runs.main(tmp_path / 'run', *options) == 2
  error = capsys.readouterr().err
  assert 'env.arithmetic.' in error and error.count('\n') == 1


def test_rows_come_again_without_seeds(tmp_path, capsys, monkeypatch):
  monkeypatch.setattr('launch.build.load_policy', None)
  assert runs.main(tmp_path / 'run', '--config.env.arithmetic.num_seeds=3') == 2
  assert 'takes its tasks from rows' in capsys.readouterr().err
