"""Losses and KL estimators in float64 numpy, each written from its formula."""

import numpy as np

from tests.functional.harness import cexp, clip, largest, sg, smallest


def _masked(loss, c):
  return np.where(c['mask'], loss, 0)


def row_mean(x, mask):
  count = np.maximum(mask.sum(axis=1, keepdims=True), 1)
  return np.where(mask, x, 0).sum(axis=1, keepdims=True) / count


def vanilla(c, o):
  return _masked(-c['advantages'] * c['logprobs'], c)


def opmd(c, o):
  return _masked(-c['advantages'] * c['logprobs'] / (1 + o.get('tau', 1.0)), c)


def sft(c, o):
  return _masked(-c['logprobs'], c)


def ppo_clip(c, o):
  low, high = o.get('clip_low', 0.2), o.get('clip_high', 0.2)
  dual, delta = o.get('dual_clip', 3.0), o.get('sequence_mask')
  a, d = c['advantages'], c['logprobs'] - c['old_logprobs']
  r = cexp(d)
  loss = largest(-a * r, -a * clip(r, 1 - low, 1 + high))
  if dual is not None:
    loss = np.where(a < 0, smallest(loss, -dual * a), loss)
  if delta is not None:
    far = row_mean(sg(-d), c['mask']) > delta
    loss = np.where((a < 0) & far, 0, loss)
  return _masked(loss, c)


def value_loss(c, o):
  eps = o.get('clip', 0.2)
  v, old, g = c['values'], c['old_values'], c['returns']
  square = (v - g) ** 2
  if eps is not None:
    # The bounds differ from token to token, as V_old does.
    moved = np.where(sg(v) < old - eps, old - eps, v)
    moved = np.where(sg(v) > old + eps, old + eps, moved)
    square = largest(square, (moved - g) ** 2)
  return _masked(o.get('coef', 1.0) * square / 2, c)


def k1(c, o):
  return o.get('coef', 1.0) * (c['logprobs'] - c['ref_logprobs'])


def k2(c, o):
  return o.get('coef', 1.0) * (c['logprobs'] - c['ref_logprobs']) ** 2 / 2


def k3(c, o):
  d = c['ref_logprobs'] - c['logprobs']
  return o.get('coef', 1.0) * (cexp(d) - 1 - d)


def low_var(c, o):
  return o.get('coef', 1.0) * clip(k3(c, {}), -10, 10)


def abs_(c, o):
  d = c['logprobs'] - c['ref_logprobs']
  return o.get('coef', 1.0) * np.sign(sg(d)) * d  # slope 0 where both are equal


def corrected_k3(c, o):
  ratio = clip(cexp(c['logprobs'] - c['old_logprobs']), 0, 2)
  return o.get('coef', 1.0) * ratio * k3(c, {})


def _ratio(c):
  return cexp(c['logprobs'] - c['old_logprobs'])


def turns(mask):
  """Per row, the lists of positions of its unbroken stretches of action tokens."""
  rows = []
  for row in mask:
    stretches, current = [], []
    for t, action in enumerate([*row, False]):
      if action:
        current.append(t)
      elif current:
        stretches.append(current)
        current = []
    rows.append(stretches)
  return rows


def cispo(c, o):
  low, high = o.get('clip_low', 1.0), o.get('clip_high', 0.28)
  a, r = c['advantages'], sg(_ratio(c))
  w = np.minimum(np.maximum(r, 1 - low), 1 + high)
  if o.get('mask_clipped'):
    w = w * ~((a > 0) & (r > 1 + high)) * ~((a < 0) & (r < 1 - low))
  return _masked(-a * w * c['logprobs'], c)


def sapo(c, o):
  a, r = c['advantages'], _ratio(c)
  tau = np.where(a > 0, o.get('tau_positive', 1.0), o.get('tau_negative', 1.05))
  return _masked(-a * 4 / (1 + np.exp(-tau * (r - 1))) / tau, c)


def gspo(c, o):
  low, high = o.get('clip_low', 3e-4), o.get('clip_high', 4e-4)
  a, d = c['advantages'], np.where(c['mask'], c['logprobs'] - c['old_logprobs'], 0)
  if o.get('level') == 'turn':
    mean = np.zeros_like(d)
    for row, stretches in enumerate(turns(c['mask'])):
      for where in stretches:
        mean[row, where] = d[row, where].mean()
  else:
    mean = row_mean(d, c['mask']) + 0 * d
  if o.get('gradient') != 'mean':
    mean = c['logprobs'] - sg(c['logprobs']) + sg(mean)
  s = cexp(mean)
  return _masked(largest(-a * s, -a * clip(s, 1 - low, 1 + high)), c)


def importance_sampling(c, o):
  return _masked(-c['advantages'] * _ratio(c), c)


def tis(c, o):
  w = np.minimum(sg(_ratio(c)), o.get('cap', 2.0))
  return _masked(-c['advantages'] * w * c['logprobs'], c)


def topr(c, o):
  d = np.where(c['mask'], sg(c['logprobs'] - c['old_logprobs']), 0)
  if o.get('ratio', 'sequence') == 'sequence':
    d = d.sum(axis=1, keepdims=True) + 0 * d
  alpha = np.where(c['advantages'] > 0, 1, np.clip(cexp(d), 0, 1))
  return _masked(-alpha * c['advantages'] * c['logprobs'], c)


def sppo(c, o):
  eps, r = o.get('epsilon', 0.3), sg(_ratio(c))
  inside = (1 / (1 + eps) <= r) & (r <= 1 + eps)
  return _masked(-c['advantages'] * (c['logprobs'] - c['old_logprobs']) * inside, c)


def kimi(c, o):
  d = np.where(c['mask'], c['logprobs'] - c['old_logprobs'], 0)
  if o.get('level') == 'sequence':
    count = np.maximum(c['mask'].sum(axis=1, keepdims=True), 1)
    square = d.sum(axis=1, keepdims=True) ** 2 / count
  else:
    square = d**2
  return _masked(-c['advantages'] * c['logprobs'] + o.get('tau', 1.0) / 2 * square, c)


def rec(c, o):
  low, high = o.get('clip_low', 0.2), o.get('clip_high', 0.2)
  a, p, r = c['advantages'], c['logprobs'], sg(_ratio(c))
  s = sg(cexp(row_mean(p - c['old_logprobs'], c['mask']))) + 0 * a
  keep, weight = o.get('keep', 'one_side'), o.get('weight', 'importance')
  inside = {
    'none': a == a,
    'two_side': (1 - low <= r) & (r <= 1 + high),
    'one_side': np.where(a > 0, r <= 1 + high, (a == 0) | (r >= 1 - low)),
    'gspo_one_side': np.where(a > 0, s <= 1 + high, (a == 0) | (s >= 1 - low)),
    'ring': ((1 - low <= r) & (r <= 1 + high))
    | ((a >= 0) & (r <= 1 - o.get('ring_low', 0.6)))
    | ((a <= 0) & (r >= 1 + o.get('ring_high', 2.0))),
  }[keep]
  w = {
    'none': 1,
    'importance': r,
    'gspo': s,
    'advantage': cexp(a / o.get('temperature', 1.0)),
  }[weight]
  loss = -a * w * p * inside
  coef = o.get('regulariser_coef', 0.0)
  if o.get('regulariser') == 'k2':
    loss = loss + coef * (p - c['old_logprobs']) ** 2
  if o.get('regulariser') == 'forward':
    loss = loss - coef * p
  return _masked(loss, c)


def sft_is(c, o):
  return _masked(-sg(np.exp(c['logprobs'])) * c['logprobs'], c)


def sft_phi(c, o):
  probability = sg(np.exp(c['logprobs']))
  return _masked(-probability * (1 - probability) * c['logprobs'], c)


def _mixed(c, o, mu, expert):
  usual = ppo_clip(c, o)
  loss = np.where(c['expert_mask'][:, None], mu * expert, (1 - mu) * usual)
  return c['term_scale'][:, None] * loss


def mix(c, o):
  return _mixed(c, o, o.get('mu', 0.1), sft(c, {}))


def mix_chord(c, o):
  return _mixed(c, o, chord_mu(c, o)[:, None], sft_phi(c, {}))


def chord_mu(c, o):
  peak, valley = o.get('peak', 0.9), o.get('valley', 0.05)
  warmup, decay = o.get('warmup_steps', 0.0), o.get('decay_steps', 200.0)
  out = []
  for step in c['step']:
    share = min((step - warmup) / decay, 1)
    fall = valley + (peak - valley) * (1 + np.cos(np.pi * share)) / 2
    out.append(peak * step / warmup if step < warmup else fall)
  return np.array(out)


def m2po_keep(c, threshold=0.04):
  """Drops the worst candidate again and again, until the rest is calm enough."""
  d = np.where(c['mask'], sg(c['logprobs'] - c['old_logprobs']), 0)
  a = c['advantages']
  left = [
    (d[at] ** 2, at)
    for at in zip(*np.nonzero(((a > 0) & (d > 0)) | ((a < 0) & (d < 0))), strict=True)
  ]
  keep = np.ones(d.shape, bool)
  left.sort()
  while left and np.mean([square for square, _ in left]) > threshold:
    keep[left.pop()[1]] = False
  return keep


def m2po(c, o):
  return importance_sampling(c, o) * m2po_keep(c, o.get('threshold', 0.04))


def pairs(c, score, loss_of):
  """Per row, the loss of its pair; `score` is per row."""
  total, out = c['rewards'].sum(axis=1), np.zeros(len(score), complex)
  for pair in set(c['pair_ids'][c['pair_ids'] >= 0]):
    i, j = np.flatnonzero(c['pair_ids'] == pair)
    chosen, rejected = (i, j) if total[i] > total[j] else (j, i)
    out[[i, j]] = loss_of(score[chosen] - score[rejected])
  return out


def _log_sigmoid(x):
  return -np.log1p(np.exp(-x)) if sg(x) > 0 else x - np.log1p(np.exp(x))


def dpo(c, o):
  beta, ls = o.get('beta', 0.1), o.get('label_smoothing', 0.0)
  score = np.where(c['mask'], c['logprobs'] - c['ref_logprobs'], 0).sum(axis=1)

  def loss(delta):
    x = beta * delta
    return -(1 - ls) * _log_sigmoid(x) - ls * _log_sigmoid(-x)

  return pairs(c, score, loss)


def ipo(c, o):
  score = row_mean(c['logprobs'] - c['ref_logprobs'], c['mask'])[:, 0]
  return pairs(c, score, lambda d: (d - 1 / (2 * o.get('beta', 0.1))) ** 2)


def hinge(c, o):
  score = np.where(c['mask'], c['logprobs'] - c['ref_logprobs'], 0).sum(axis=1)
  return pairs(c, score, lambda d: largest(0 * d, 1 - o.get('beta', 0.1) * d))


def distill(c, o):
  def with_rest(logprobs):
    logprobs = logprobs[..., : o.get('top_k')]
    rest = 1 - np.exp(logprobs).sum(axis=-1, keepdims=True)
    floor = np.exp(-20.0)
    return np.concatenate([np.exp(logprobs), largest(rest, floor + 0 * rest)], axis=-1)

  def divergence(a, b):
    return np.sum(a * np.log(a / b), axis=-1)

  s, t = with_rest(c['topk_logprobs']), with_rest(c['teacher_topk_logprobs'])
  kind, skew, m = o['kind'], o.get('skew', 0.1), (s + t) / 2
  if kind == 'adaptive':
    order = np.argsort(-t, axis=-1, kind='stable')
    ordered = np.take_along_axis(t, order, axis=-1)
    before = np.cumsum(ordered, axis=-1) - ordered
    gap = np.take_along_axis(np.abs(sg(t - s)), order, axis=-1)
    a = (gap * (before < o.get('head', 0.5))).sum(axis=-1) / gap.sum(axis=-1)
    loss = a * divergence(t, s) + (1 - a) * divergence(s, t)
  else:
    loss = {
      'forward': lambda: divergence(t, s),
      'reverse': lambda: divergence(s, t),
      'skewed': lambda: divergence(t, skew * t + (1 - skew) * s),
      'js': lambda: (divergence(t, m) + divergence(s, m)) / 2,
    }[kind]()
  return _masked(loss, c)
