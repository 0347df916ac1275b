"""The table of causes: each real run that has a problem is told so, and no other."""

import re

import pytest

from configs import base
from jaxrl.training.diagnosis import (
  MIN_STEPS,
  MIN_STEPS_FOR_TREND,
  RULES,
  diagnose,
  has_learned,
  zero_gradient_cause,
)
from launch.logging.metric_sinks import is_trained, read_metrics
from launch.settings.command_line import dotted_keys
from tests.launch import runs
from tests.marks import slow_in_gate

CONFIG = str(runs.ROOT / 'tests' / 'launch' / 'rewarded.py')


def rewards(rule, *options):
  return [f'--config.env.arithmetic.env_config.rule={rule}', *options]


SLOW = '--config.optimizer.learning_rate=1e-6'
FAST = '--config.optimizer.learning_rate=1'
# Rewards by chance rise by chance in one run of many; too few steps to show a trend.
SHORT = f'--config.num_steps={MIN_STEPS_FOR_TREND - 1}'
# By rule, options of a run that has the problem.
RUNS = {
  'learning rate 0': rewards('letters', '--config.optimizer.learning_rate=0'),
  'never rewarded': rewards('constant'),
  'always rewarded': rewards('constant', '--config.env.arithmetic.env_config.value=1'),
  'no spread within groups': rewards('question'),
  'replies cut short': rewards('noise', SLOW, SHORT),
  'entropy collapsed': rewards('noise', FAST, SHORT),
  'updates clipped': rewards(
    'noise',
    SHORT,
    '--config.optimizer.learning_rate=0.1',
    '--config.batch.num_minibatches=4',
    '--config.batch.ppo_epochs=2',
  ),
  'engine and learner disagree': rewards(
    'noise',
    SLOW,
    SHORT,
    '--config.weight_sync.transport=auto(dtype="bfloat16")',
    '--config.batch.logprob_mismatch_warn=1e-4',
  ),
}
# Whose runs end with an error that names the cause: see below, and
# tests/training/test_staleness.py.
FATAL = {'all tokens stale', 'all tokens corrected away'}
# That a random model writes until it is cut short is true of all these runs; a run
# whose policy collapsed has groups without spread.
SEEN_WITH = {'replies cut short'}
FOLLOWS: dict[str, set[str]] = {}


def test_every_rule_has_a_run():
  assert set(RUNS) | FATAL == set(RULES)


@pytest.mark.parametrize(
  'name', slow_in_gate(('never rewarded', 'entropy collapsed'), RUNS)
)
def test_a_run_with_the_problem_is_told_so(name, tmp_path, capsys):
  options = [*RUNS[name], '--config.logging.sinks=report']
  assert runs.main(tmp_path / 'run', *options, config=CONFIG) == 0
  rows = [r for r in read_metrics(tmp_path / 'run' / 'metrics.jsonl') if is_trained(r)]
  findings = {finding.name: str(finding) for finding in diagnose(rows)}
  assert {name} <= set(findings) <= {name} | SEEN_WITH | FOLLOWS.get(name, set())
  summary = capsys.readouterr().out.rpartition('This run did not learn:')[2]
  page = (tmp_path / 'run' / 'report.html').read_text()
  page = page.replace(r'\u003c', '<').replace(r'\u003e', '>')
  for line in findings.values():
    assert line in summary and line in page


@pytest.mark.slow
def test_a_correction_that_leaves_no_token_ends_the_run(tmp_path, capsys):
  bounds = '--config.algorithm.correction=mis(low=1.5, high=2)'  # w is near 1
  assert runs.main(tmp_path, *rewards('noise', bounds), config=CONFIG) == 1
  rule = RULES['all tokens corrected away']
  stderr = capsys.readouterr().err
  assert stderr.startswith('error: steps 0 to 2 learn nothing, their gradient is 0: ')
  assert f'{rule.sentence}. {rule.advice} ({rule.page})' in stderr


@pytest.mark.slow
def test_a_run_that_learns_is_told_nothing(tmp_path, capsys):
  options = rewards('letters', '--config.num_steps=30')
  assert runs.main(tmp_path, *options, config=CONFIG) == 0
  rows = [r for r in read_metrics(tmp_path / 'metrics.jsonl') if is_trained(r)]
  assert rows[-1]['reward/mean'] > 2 * rows[0]['reward/mean']
  assert diagnose(rows) == []
  assert 'did not learn' not in capsys.readouterr().out


def steps(count=12, **metrics):
  """Rows of a run that does not learn and has no problem, but for what is given."""
  healthy = {
    'reward/std': 0.5,
    'reward/groups_without_spread': 0.2,
    'advantage/std': 0.9,
    'optimizer/learning_rate': 1e-4,
    'policy/entropy': 1.0,
    'policy/clip_fraction': 0.01,
    'rollout/truncated': 0.1,
    'mismatch/alarm': 0.0,
  }
  rows = []
  for step in range(count):
    row = {**healthy, 'reward/mean': 0.5 + 0.1 * (step % 2)}
    for name, value in metrics.items():
      row[name.replace('__', '/')] = value(step) if callable(value) else value
    rows.append(row)
  return rows


def names(rows):
  return [finding.name for finding in diagnose(rows)]


def test_a_run_without_a_known_problem_gets_no_guess():
  assert names(steps()) == []


@pytest.mark.parametrize(
  ('metrics', 'name'),
  [
    ({'optimizer__learning_rate': 0.0}, 'learning rate 0'),
    ({'staleness__masked': 1.0}, 'all tokens stale'),
    ({'correction__masked': 1 - 1e-7}, 'all tokens corrected away'),
    ({'reward__mean': 0.0, 'reward__std': 0.0}, 'never rewarded'),
    ({'reward__mean': -1.0, 'reward__std': 0.0}, 'never rewarded'),
    ({'reward__mean': 2.0, 'reward__std': 0.0}, 'always rewarded'),
    (
      {'reward__groups_without_spread': 1.0, 'advantage__std': 0.0},
      'no spread within groups',
    ),
    ({'rollout__truncated': 0.95}, 'replies cut short'),
    ({'policy__entropy': lambda step: 2.0 * 0.5**step}, 'entropy collapsed'),
    ({'policy__clip_fraction': 0.4}, 'updates clipped'),
    ({'mismatch__alarm': 1.0}, 'engine and learner disagree'),
  ],
)
def test_each_condition_alone(metrics, name):
  rows = steps(**metrics)
  assert names(rows) == [name]
  assert names(rows[: MIN_STEPS - 1]) == []  # too short to tell
  # A run whose rewards rise has learned, whatever else is to be seen.
  if 'reward__mean' not in metrics:
    assert names(steps(**metrics, reward__mean=lambda step: 0.1 * step)) == []


def test_other_values_are_no_problem():
  warmed = steps(optimizer__learning_rate=lambda step: 1e-5 * step)
  of_ppo = steps(reward__groups_without_spread=1.0)  # groups of one sample
  sure_from_the_start = steps(policy__entropy=0.05)
  at_times = steps(mismatch__alarm=lambda step: float(step == 7))
  solved = steps(
    reward__mean=lambda step: min(1.0, step / 4),
    reward__std=lambda step: 0.5 * (step < 4),
  )
  for rows in (warmed, of_ppo, sure_from_the_start, at_times, solved):
    assert names(rows) == []


def test_the_trend_is_compared_with_its_noise():
  assert has_learned(steps(30, reward__mean=lambda step: step + 3 * (step % 2)))
  assert not has_learned(steps(30, reward__mean=lambda step: step % 7))
  assert not has_learned(steps(30, reward__mean=lambda step: -step))
  supervised = [{'loss/total': 3 - 0.1 * step} for step in range(12)]
  assert has_learned(supervised)
  assert not has_learned([{'loss/total': 3 + 0.1 * (step % 3)} for step in range(12)])
  assert not has_learned([{'loss/total': None}] * 12)  # not a finite number


def test_what_no_step_can_mend_is_final():
  cause, is_final = zero_gradient_cause({'correction/masked': 1.0})
  assert is_final and 'algorithm.correction' in cause and 'docs/mismatch.md' in cause
  cause, is_final = zero_gradient_cause({'reward/mean': 0.0})
  assert not is_final and 'same reward' in cause


def test_the_advice_names_keys_and_pages_that_exist():
  known = set(dotted_keys(base.get_config('grpo')))
  texts = [f'{rule.sentence} {rule.advice}' for rule in RULES.values()]
  sections = {key.partition('.')[0] for key in known}
  named = {
    key
    for text in texts
    for key in re.findall(r'\b[a-z_]+(?:\.[a-z_]+)+\b', text)
    if key.partition('.')[0] in sections
  }
  assert len(named) > 10 and named <= known, named - known
  for rule in RULES.values():
    assert (runs.ROOT / rule.page).is_file()


def test_the_page_explains_every_rule():
  page = (runs.ROOT / 'docs' / 'debugging.md').read_text()
  rows = re.findall(r'^\| \*\*(.+?)\*\*', page, re.MULTILINE)
  assert rows == list(RULES)


def test_a_policy_without_entropy_is_not_told_to_sample_hotter():
  cause, is_final = zero_gradient_cause({'policy/entropy': 0.0, 'kl/reference': 4.9})
  assert 'nearly deterministic' in cause and 'optimizer.learning_rate' in cause
  assert 'temperature' not in cause and not is_final
  row = {'reward/mean': 0.0, 'reward/std': 0.1, 'reward/groups_without_spread': 1.0}
  rows = [{**row, 'policy/entropy': e} for e in (5.0, 1.0, 0.0, 0.0, 0.0, 0.0)]
  names = {finding.name for finding in diagnose(rows)}
  assert 'entropy collapsed' in names and 'no spread within groups' not in names
