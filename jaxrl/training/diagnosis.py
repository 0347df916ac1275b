"""The table of what is known to keep a run from learning, and how metrics show it.

`diagnose` reads a run's metrics after its end. `zero_gradient_cause` reads those of one
step, while there is still time to change something.
"""

import dataclasses
from collections.abc import Callable, Mapping, Sequence

import numpy as np

Metrics = Mapping[str, float | None]
Rows = Sequence[Metrics]

MIN_STEPS = 5  # a shorter run may learn nothing without anything being wrong
MIN_STEPS_FOR_TREND = 9
# A gradient that is only rounding: of a KL term at the reference, where it is 0.
NO_GRADIENT = 1e-8
COLLAPSED_ENTROPY = 0.01  # at which all samples of a group are alike
SIGMAS = 2.5  # of noise, by which the last third of a run must differ from the first
PAGE = 'docs/debugging.md'


@dataclasses.dataclass(frozen=True)
class Rule:
  """A cause of not learning.

  Attributes:
    applies: Returns whether the metrics of a run's training steps show the cause.
    sentence: What is known; `{reward}` is the mean reward of the last step.
    advice: What to try.
    page: The page of the documentation that explains it.
    is_final: Whether no later step can be better, as long as settings stay.
  """

  applies: Callable[[Rows], bool]
  sentence: str
  advice: str
  page: str = PAGE
  is_final: bool = False


@dataclasses.dataclass(frozen=True)
class Finding:
  """A rule that a run's metrics meet.

  Attributes:
    name: Its name in RULES.
    sentence: What is known.
    advice: What to try.
    page: The page of the documentation that explains it.
  """

  name: str
  sentence: str
  advice: str
  page: str

  def __str__(self) -> str:
    """Returns the finding as one line."""
    return f'{self.sentence}. {self.advice} ({self.page})'


def _values(rows: Rows, name: str) -> np.ndarray:
  """Returns a metric's values at the steps that have it."""
  values = [row.get(name) for row in rows]
  return np.array([value for value in values if value is not None], np.float64)


def _later(rows: Rows, name: str) -> float:
  """Returns a metric's mean over the second half of the run; 0 if it has none."""
  values = _values(rows, name)
  return float(values[len(values) // 2 :].mean()) if len(values) else 0.0


def _always(rows: Rows, name: str, value: float) -> bool:
  values = _values(rows, name)
  return len(values) > 0 and bool((values == value).all())


def _all_stale(rows: Rows) -> bool:
  return _later(rows, 'staleness/masked') == 1


def _all_corrected(rows: Rows) -> bool:
  # Sums of weights that add up to 1 may miss it by rounding.
  return _later(rows, 'correction/masked') > 1 - 1e-5


def _rewards_are_constant(rows: Rows) -> bool:
  means = _values(rows, 'reward/mean')
  return len(means) > 0 and means.std() == 0 and _always(rows, 'reward/std', 0)


def _never_rewarded(rows: Rows) -> bool:
  return _rewards_are_constant(rows) and _values(rows, 'reward/mean')[0] <= 0


def _always_rewarded(rows: Rows) -> bool:
  return _rewards_are_constant(rows) and _values(rows, 'reward/mean')[0] > 0


def _groups_have_no_spread(rows: Rows) -> bool:
  """Returns whether most steps lacked advantages, although groups' rewards differ.

  If a step has advantages although no group has spread, its algorithm does not compare
  the samples of a group.
  """
  if _rewards_are_constant(rows) or _later(rows, 'reward/groups_without_spread') < 0.9:
    return False
  alike = [row for row in rows if row.get('reward/groups_without_spread') == 1]
  return len(alike) > 0 and float(_values(alike, 'advantage/std').max(initial=0)) < 1e-6


def _entropy_collapsed(rows: Rows) -> bool:
  values = _values(rows, 'policy/entropy')
  if len(values) < MIN_STEPS:
    return False
  return values[0] > 0.1 and _later(rows, 'policy/entropy') < min(0.1, values[0] / 4)


RULES = {
  'learning rate 0': Rule(
    lambda rows: _always(rows, 'optimizer/learning_rate', 0),
    'The learning rate was 0 at every step',
    'Set optimizer.learning_rate, and fewer optimizer.warmup_steps than the run has '
    'steps',
  ),
  'all tokens stale': Rule(
    _all_stale,
    'Every sampled token is older than rollout.staleness_policy allows',
    'Raise its max, lower rollout.async_ratio, or publish weights more often '
    '(weight_sync.policy)',
    'docs/mismatch.md',
    is_final=True,
  ),
  'all tokens corrected away': Rule(
    _all_corrected,
    'algorithm.correction leaves no token: engine and learner disagree on all of them, '
    'or its bounds are too tight',
    'Find out why they disagree, or widen the bounds',
    'docs/mismatch.md',
    is_final=True,
  ),
  'never rewarded': Rule(
    _never_rewarded,
    'Every reward of the run was {reward:g}',
    'Read the samples in report.html: if right answers are there, the grader or '
    'dataset.columns.answer is wrong. Else start from a better model or with '
    'supervised steps (sft.num_steps), take easier tasks, or reward a part of the '
    'answer',
  ),
  'always rewarded': Rule(
    _always_rewarded,
    'Every reward of the run was {reward:g}',
    'Read the samples in report.html: if the replies deserve it, take harder tasks; '
    'else the grader accepts anything',
  ),
  'no spread within groups': Rule(
    _groups_have_no_spread,
    'In nearly every group all samples have the same reward, so nothing tells them '
    'apart',
    'Take tasks of which the model solves some attempts, larger groups '
    '(algorithm.group_size) or a higher rollout.temperature, or drop such groups by '
    "rollout.group_filter='reward_std'",
  ),
  'replies cut short': Rule(
    lambda rows: _later(rows, 'rollout/truncated') >= 0.9,
    'Nearly all episodes reached their limit of tokens or turns, before an answer was '
    'complete',
    'Raise max_tokens_per_step and max_steps of the environment (env.<tag>) and '
    'batch.max_length',
  ),
  'entropy collapsed': Rule(
    _entropy_collapsed,
    'The policy has become nearly deterministic: its entropy fell below 0.1, and '
    'samples no longer differ',
    'Lower optimizer.learning_rate, or set algorithm.entropy_loss or algorithm.kl_coef',
  ),
  'updates clipped': Rule(
    lambda rows: _later(rows, 'policy/clip_fraction') > 0.2,
    'More than 20% of the tokens were clipped: the policy moves far from the one that '
    'sampled them',
    'Lower optimizer.learning_rate, batch.num_minibatches, batch.ppo_epochs or '
    'rollout.async_ratio',
  ),
  'engine and learner disagree': Rule(
    lambda rows: _later(rows, 'mismatch/alarm') >= 0.5,
    'The rollout engine and the learner disagree on the log-probs of sampled tokens by '
    'more than batch.logprob_mismatch_warn',
    'The page lists the causes and how to tell them apart',
    'docs/mismatch.md',
  ),
}


def diagnose(rows: Rows) -> list[Finding]:
  """Names what is known about why a run did not learn.

  Args:
    rows: The metrics of its training steps, in order.

  Returns:
    The findings, the surest first; none for a run that learned, or that was too short
    to tell.
  """
  if len(rows) < MIN_STEPS or has_learned(rows):
    return []
  reward = float([0.0, *_values(rows, 'reward/mean')][-1])
  names = [name for name, rule in RULES.items() if rule.applies(rows)]
  if 'entropy collapsed' in names:  # equal samples follow from it
    names = [name for name in names if name != 'no spread within groups']
  return [
    Finding(name, rule.sentence.format(reward=reward), rule.advice, rule.page)
    for name, rule in ((name, RULES[name]) for name in names)
  ]


def has_learned(rows: Rows) -> bool:
  """Returns whether rewards rose, or else the loss fell, by more than their noise.

  Args:
    rows: The metrics of the training steps, in order.
  """
  values = _values(rows, 'reward/mean')
  if not len(values):
    values = -_values(rows, 'loss/total')
  if len(values) < MIN_STEPS_FOR_TREND:
    return False
  third = len(values) // 3
  first, last = values[:third], values[-third:]
  noise = np.sqrt((first.var(ddof=1) + last.var(ddof=1)) / third)
  return bool(last.mean() - first.mean() > SIGMAS * noise)


def zero_gradient_cause(metrics: Metrics) -> tuple[str, bool]:
  """Says why the gradient of a step is 0.

  Args:
    metrics: The metrics of the step.

  Returns:
    The cause with advice, and whether no later step can be better.
  """
  for rule in RULES.values():
    if rule.is_final and rule.applies([metrics]):
      return f'{rule.sentence}. {rule.advice} ({rule.page})', True
  entropy = metrics.get('policy/entropy')
  if entropy is not None and entropy < COLLAPSED_ENTROPY:
    rule = RULES['entropy collapsed']
    return f'{rule.sentence}. {rule.advice} ({rule.page})', False
  rule = RULES['no spread within groups']
  advice = rule.advice[0].lower() + rule.advice[1:]
  return (
    'in every group all samples have the same reward, or nothing else tells them '
    f'apart. If this goes on, {advice} ({rule.page})'
  ), False
