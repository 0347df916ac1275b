"""Every public function beside its restatement, with every value of its options.

`test_complete` sees to it that none is missing: each function that a module of parts
offers, each choice of a `Literal`, both values of a switch, and None where it may be.
"""

import itertools

from jaxrl.functional import (
  advantages,
  aggregation,
  corrections,
  entropy,
  kl,
  kl_controllers,
  losses,
  shaping,
)
from tests.functional import (
  restated_advantages,
  restated_losses,
  restated_newer,
  restated_small,
)
from tests.functional.harness import Case


def advantage(name, *, steps=False, **options):
  fn, restated = getattr(advantages, name), getattr(restated_advantages, name)
  return Case(name, fn, restated, options, steps)


def loss(name, **options):
  newer = getattr(restated_newer, name, None)
  restated = getattr(restated_losses, name, newer)
  return Case(name, getattr(losses, name), restated, options)


def small(module, name, **options):
  restated = getattr(restated_small, name, None) or getattr(restated_losses, name)
  return Case(name, getattr(module, name), restated, options)


OVER = ('none', 'group', 'batch', 'running')
LEVELS = ('token', 'segment', 'geometric', 'sequence')

ADVANTAGES = [
  advantage('grpo'),
  advantage('grpo', scale_by_std=False),
  advantage('grpo', std_over='batch'),
  advantage('grpo', steps=True, std_threshold=0.3),
  advantage('grpo', rank_penalty=0.25, std_threshold=0.0),
  advantage('grpo', rank_penalty=0.5, scale_by_std=False, steps=True),
  advantage('grpo', rank_penalty=0.5, std_over='batch', steps=True),
  advantage('opmd', baseline='mean'),
  advantage('opmd', baseline='logavgexp', tau=0.5),
  advantage('opmd', baseline='logavgexp', steps=True),
  advantage('asymre', steps=True),
  advantage('asymre', shift=0.4),
  advantage('rloo'),
  advantage('rloo', steps=True),
  advantage('gdpo'),
  advantage('gdpo', whiten=False, steps=True),
  advantage('process_grpo'),
  advantage('process_grpo', steps=True),
  advantage('process_grpo', steps=True, scale_by_std=False),
  advantage('optimal_token_baseline'),
  advantage('rae', steps=True),
  advantage('rae', decay=0.5),
  advantage('hierarchical_grpo', steps=True),
  advantage('hierarchical_grpo', steps=True, episode_role=0),
  advantage('maxrl'),
  advantage('maxrl', steps=True),
  advantage('rec'),
  advantage('rec', scale_by_std=True, steps=True),
  advantage('rec', drop='balance'),
  advantage('rec', drop='balance', scale_by_std=True, steps=True),
  advantage('best_of_group'),
  advantage('best_of_group', threshold=0.8, steps=True),
  advantage('gae'),
  advantage('gae', gamma=0.9, lam=0.8),
  advantage('gae', gamma=0.99, lam=0.95, whiten=True),
  advantage('reinforce', steps=True),
  advantage('reinforce', gamma=0.9),
  advantage('reinforce_plus_plus'),
  advantage('reinforce_plus_plus', gamma=0.9, baseline='group', steps=True),
  advantage('reinforce_plus_plus', max_sigma=1.0),
  advantage('remax'),
  advantage('remax', gamma=0.9),
  advantage('agentic_reinforce'),
  advantage('agentic_reinforce', gamma=0.5),
  advantage('step_wise_grpo', steps=True),
  advantage('step_wise_grpo', steps=True, divide_by_steps=True, std_threshold=0.2),
  advantage('gigpo', steps=True),
  advantage('gigpo', steps=True, gamma=0.5, omega=0.3, norm='std'),
  advantage('step_reinforce', steps=True),
  advantage('step_reinforce', steps=True, gamma=0.5, over='group'),
  advantage('cod', steps=True),
  advantage('cod', steps=True, future='sliding', window=2),
  advantage('cod', steps=True, future='sliding', window=1),
  advantage('cod', steps=True, future='discounted', gamma=0.5),
  advantage('clip_b', mu=0.5),
  advantage('clip_b'),
  advantage('clip_v', mu=0.3, max_frac=0.05),
  advantage('clip_v'),
  advantage('clip_v', mu=0.3, max_frac=0.05, drop_zero=True),
  advantage('on_policy_distill', coef=0.5),
  advantage('grpo_distill', coef=0.1),
  advantage('grpo_distill', scale_by_std=False),
  advantage('grpo_distill', std_over='batch'),
  *(advantage('jsd', beta=beta) for beta in (0.0, 0.001, 0.5, 0.75, 1.0)),
  *(
    advantage('normalise', mean=mean, std=std, steps=mean == std)
    for mean, std in itertools.product(OVER, OVER)
  ),
  advantage('normalise', mean='batch', std='batch', reward_clip=0.8, whiten=True),
  advantage('normalise', mean='none', std='none', whiten=True, advantage_clip=1.0),
]
MOMENTS = [
  Case('update_moments', advantages.update_moments, restated_advantages.moments)
]

KEEPS = ('none', 'two_side', 'one_side', 'gspo_one_side', 'ring')
WEIGHTS = ('none', 'importance', 'gspo', 'advantage')
REGULARISERS = ('none', 'k2', 'forward')
LOSSES = [
  loss('vanilla'),
  loss('opmd'),
  loss('opmd', tau=0.3),
  loss('sft'),
  loss('sft_is'),
  loss('sft_phi'),
  loss('ppo_clip'),
  loss('ppo_clip', dual_clip=None, clip_high=0.28),
  loss('ppo_clip', sequence_mask=0.05),
  loss('cispo'),
  loss('cispo', mask_clipped=True, clip_low=0.3),
  loss('sapo'),
  loss('sapo', tau_positive=2.0, tau_negative=0.7),
  *(
    loss('gspo', level=level, gradient=gradient, clip_low=low)
    for level, gradient, low in itertools.product(
      ('sequence', 'turn'), ('token', 'mean'), (3e-4, 0.2)
    )
  ),
  loss('importance_sampling'),
  loss('tis'),
  loss('topr'),
  loss('topr', ratio='token'),
  loss('sppo'),
  loss('kimi'),
  loss('kimi', level='sequence', tau=0.2),
  loss('rec'),
  loss('rec', keep='ring', ring_low=0.5, ring_high=1.0, weight='none'),
  loss('rec', keep='two_side', clip_low=0.3, weight='advantage', temperature=2.0),
  loss('dppo_tv'),
  loss('dppo_tv', clip_low=0.05, clip_high=0.1, cap=1.5),
  loss('dppo_kl'),
  loss('dppo_kl', clip_low=0.02, clip_high=0.01, cap=1.5),
  loss('probability_band'),
  loss('probability_band', threshold=0.02, regulariser_coef=0.5),
  loss('dro'),
  loss('dro', beta=0.5),
  loss('stable_reinforce'),
  loss('stable_reinforce', ratio_low=0.5, ratio_high=2.0, clip_high=0.28),
  loss('a3po'),
  loss('a3po', clip_low=0.1, clip_high=0.3, cap=1.2),
  loss('gmpo'),
  loss('gmpo', clip_low=0.1, clip_high=0.05),
  loss('vespo'),
  loss('vespo', power_positive=1.0, decay_positive=0.5, decay_negative=1.0),
  loss('mix'),
  loss('mix', mu=0.4, clip_high=0.28),
  loss('mix_chord'),
  loss('mix_chord', warmup_steps=20.0, decay_steps=10.0, peak=0.5, valley=0.2),
]
# Each of them runs, which is what Trinity's do not.
RECS = [
  loss('rec', keep=k, weight=w, regulariser=r, regulariser_coef=0.1)
  for k, w, r in itertools.product(KEEPS, WEIGHTS, REGULARISERS)
]
M2PO = [loss('m2po'), loss('m2po', threshold=0.5)]  # the batch decides for each row
# Likewise, with the columns that say what is decided, and where it is 1.
COVARIANCE = [
  (loss('clip_cov'), restated_newer.clip_cov_keep, 0),
  (loss('clip_cov', ratio=0.1, cov_low=0.1), restated_newer.clip_cov_keep, 0),
  (loss('kl_cov'), restated_newer.kl_cov_penalised, 1),
  (loss('kl_cov', ratio=0.2, coef=0.5), restated_newer.kl_cov_penalised, 1),
]
PAIRS = [
  loss('dpo'),
  loss('dpo', beta=0.5, label_smoothing=0.2),
  loss('ipo'),
  loss('ipo', beta=0.5),
  loss('hinge'),
  loss('hinge', beta=0.3),
]
VALUE = [
  loss('value_loss'),
  loss('value_loss', clip=None),
  loss('value_loss', coef=0.5, clip=0.5),
]
DISTILL = [
  *(
    loss('distill', kind=kind)
    for kind in ('forward', 'reverse', 'adaptive', 'skewed', 'js')
  ),
  loss('distill', kind='skewed', skew=0.5, top_k=2),
  loss('distill', kind='adaptive', head=0.8, top_k=3),
]
KLS = [
  small(kl, 'k1'),
  small(kl, 'k2', coef=0.3),
  small(kl, 'k3'),
  small(kl, 'low_var', coef=0.3),
  Case('abs', kl.abs, restated_losses.abs_),
  small(kl, 'corrected_k3'),
]
OF_ENTROPY = [small(entropy, 'entropy_loss', coef=0.1), small(entropy, 'mix', coef=0.1)]
OF_LOGITS = [small(entropy, 'nec')]
CORRECTIONS = [
  *(small(corrections, 'tis', level=level, cap=1.5) for level in LEVELS),
  *(small(corrections, 'mis', level=level, low=0.7) for level in LEVELS),
  small(corrections, 'icepop'),
  *(
    small(corrections, 'train_infer_correction', weight=weight, mask_level=level)
    for weight, level in zip(('none', *LEVELS), (*LEVELS, 'token'), strict=True)
  ),
  *(
    small(
      corrections,
      'train_infer_correction',
      weight='segment',
      cap=1.5,
      mask_level=level,
      ratio_low=0.5,
      ratio_high=2.0,
      max_difference=0.3,
    )
    for level in LEVELS
  ),
]
RATIOS = [
  *(small(corrections, 'ratio', level=level) for level in LEVELS),
  small(corrections, 'mismatch'),
  small(corrections, 'effective_sample_size'),
]
AGGREGATION = [
  *(small(aggregation, 'token_weights', mode=mode) for mode in aggregation.MODES[:3]),
  small(aggregation, 'token_weights', mode=aggregation.MODES[3], length=9),
  small(aggregation, 'token_weights', mode=aggregation.MODES[3], length=5.0),
  *(small(aggregation, 'term_scale', mode=mode) for mode in aggregation.MODES[:3]),
  small(aggregation, 'row_weights'),
  small(aggregation, 'pair_weights'),
]
SCHEDULES = [
  small(losses, 'chord_mu', warmup_steps=10.0, decay_steps=20.0, peak=0.9, valley=0.1),
  small(kl_controllers, 'adaptive_coef'),
  small(kl_controllers, 'adaptive_coef', target=1.0, horizon=100.0),
  small(kl_controllers, 'adaptive'),
  small(kl_controllers, 'adaptive', target=1.0, horizon=100.0),
  small(shaping, 'overlong_penalty', max_length=9.0),
  small(shaping, 'overlong_penalty', max_length=9.0, cache=4.0),
]
PER_TOKEN = LOSSES + KLS
ALL = [
  *(case for case, *_ in COVARIANCE),
  *(ADVANTAGES + MOMENTS + PER_TOKEN + RECS + M2PO + PAIRS + VALUE + DISTILL),
  *(OF_ENTROPY + OF_LOGITS + CORRECTIONS + RATIOS + AGGREGATION + SCHEDULES),
]
# What has no formula to restate, and where it is tested.
OTHERS = {
  'check_pairs': 'test_preference',
  'check_aggregation': 'test_aggregation',
  'check_mode': 'test_aggregation',
  'term': 'test_small_parts',
  'init_moments': 'test_advantage_rules',
  'second_moment_keep': 'test_losses',
  'token_covariance': 'test_losses',
  'proximal_logprobs': 'test_recorded_values',
  'difficulty_weights': 'test_shaping',
  'length_weights': 'test_shaping',
  'rescale': 'test_shaping',
  'term_scale_field': 'test_small_parts',
}
