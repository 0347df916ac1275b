"""Algorithms written out in float64, from the equations of their papers.

Nothing of `jaxrl` computes here. A formula loops over rows and tokens, and returns the
loss with its derivatives by hand: `(row, t, token, slope)` says that the loss moves by
`slope` with the log-probability of `token` at place `t` of a row. What a policy's
parameters make of that is up to the policy.
"""

import copy
import dataclasses

import numpy as np


@dataclasses.dataclass
class Outcome:
  """A loss, its derivatives by log-probabilities, and metrics that the learner has."""

  loss: float
  slopes: list[tuple[int, int, int, float]]
  metrics: dict[str, float] = dataclasses.field(default_factory=dict)


class Bigram:
  """A policy whose next token depends on the last one: row k of `table` has logits."""

  def __init__(self, table):
    self.table = np.asarray(table, np.float64)

  def logprobs(self, tokens):
    """`[T, V]`: of every token at place t, given those before; zeros at place 0."""
    logits = self.table[tokens[:-1]]
    logits = logits - logits.max(-1, keepdims=True)
    logprobs = logits - np.log(np.exp(logits).sum(-1, keepdims=True))
    return np.concatenate([np.zeros((1, self.table.shape[1])), logprobs])

  def descend(self, rows, slopes, rate, max_norm):
    """The policy after a step of gradient descent, and the norm of the gradient.

    The gradient of log softmax is a unit vector less the softmax.
    """
    gradient = np.zeros_like(self.table)
    p = [np.exp(self.logprobs(row.tokens)) for row in rows]
    for i, t, token, slope in slopes:
      last = rows[i].tokens[t - 1]
      gradient[last, token] += slope
      gradient[last] -= slope * p[i][t]
    norm = np.sqrt(np.sum(gradient**2))
    return Bigram(self.table - rate * min(1, max_norm / norm) * gradient), norm


class TorchPolicy:
  """A causal language model of transformers, in float64; torch differentiates it."""

  def __init__(self, model):
    self.model = model.double().eval()

  def _logprobs(self, tokens):
    import torch

    logits = self.model(torch.tensor(tokens[None, :-1], dtype=torch.long)).logits
    return torch.log_softmax(logits[0], -1)

  def logprobs(self, tokens):
    """`[T, V]`, as those of `Bigram`."""
    logprobs = self._logprobs(tokens).detach().numpy()
    return np.concatenate([np.zeros((1, logprobs.shape[1])), logprobs])

  def descend(self, rows, slopes, rate, max_norm):
    """As `Bigram.descend`."""
    import torch

    model = copy.deepcopy(self.model)
    total = 0.0
    for i, row in enumerate(rows):
      logprobs = TorchPolicy(model)._logprobs(row.tokens)
      for _, t, token, slope in (each for each in slopes if each[0] == i):
        total = total + slope * logprobs[t - 1, token]
    model.zero_grad()
    total.backward()
    norm = np.sqrt(sum(float((p.grad**2).sum()) for p in model.parameters()))
    with torch.no_grad():
      for p in model.parameters():
        p -= rate * min(1, max_norm / norm) * p.grad
    return TorchPolicy(model), norm


def flat(groups):
  return [row for group in groups for row in group]


def actions(row):
  return [int(t) for t in np.flatnonzero(row.action_mask)]


def num_actions(rows):
  return sum(len(actions(row)) for row in rows)


def chosen(policy, row):
  """`[T]` log-probabilities of the row's own tokens."""
  logprobs = policy.logprobs(row.tokens)
  return np.array([logprobs[t, token] for t, token in enumerate(row.tokens)])


def rollout_logprobs(rows):
  return [row.rollout_logprobs.astype(np.float64) for row in rows]


def group_advantages(groups, scaled=True):
  """(R − mean)/std of each sample, std with n − 1; R itself for a sample alone.

  GRPO, arXiv 2402.03300, section 4.1.2; unscaled, Dr. GRPO, arXiv 2503.20783.
  """
  advantages = []
  for group in groups:
    scores = np.array([row.score for row in group])
    centred = scores if len(group) == 1 else scores - scores.mean()
    if np.allclose(centred, 0):
      centred = 0 * centred
    elif scaled and len(group) > 1:
      centred = centred / scores.std(ddof=1)
    advantages += list(centred)
  return advantages


def clipped(p, o, a, low, high, dual):
  """One token of PPO (arXiv 1707.06347, equation 7): (−gain, its slope, is it cut).

  With dual clip (arXiv 1912.09729) the gain is at least dual·A for A < 0.
  """
  r = np.exp(p - o)
  gain, slope = r * a, r * a
  bounded = min(max(r, 1 - low), 1 + high) * a
  if bounded < gain:
    gain, slope = bounded, 0.0
  if dual is not None and a < 0 and gain < dual * a:
    gain, slope = dual * a, 0.0
  return -gain, -slope, slope == 0 and a != 0


def ppo(
  policy, rows, advantage, old, weight, *, low=0.2, high=0.2, dual=3.0, factor=None
):
  """Σ weight·factor·(clipped loss) over action tokens; all arguments by row and token.

  factor: constants that multiply a token's loss, such as a correction's.
  """
  loss, slopes, cuts = 0.0, [], []
  for i, row in enumerate(rows):
    p = chosen(policy, row)
    for t in actions(row):
      each, slope, cut = clipped(p[t], old[i][t], advantage[i][t], low, high, dual)
      share = weight[i][t] * (1.0 if factor is None else factor[i][t])
      loss += share * each
      slopes.append((i, t, int(row.tokens[t]), share * slope))
      cuts.append(cut)
  return Outcome(loss, slopes, {'policy/clip_fraction': float(np.mean(cuts))})


def policy_gradient(policy, rows, factor):
  """Mean over action tokens of −factor·log π; the factors are constants."""
  loss, slopes, count = 0.0, [], num_actions(rows)
  for i, row in enumerate(rows):
    p = chosen(policy, row)
    for t in actions(row):
      slope = -factor[i][t] / count
      loss += slope * p[t]
      slopes.append((i, t, int(row.tokens[t]), slope))
  return Outcome(loss, slopes)


def everywhere(rows, values):
  """A number per row, at every place of it."""
  return [
    np.full(len(row.tokens), value) for row, value in zip(rows, values, strict=True)
  ]


def token_mean(rows):
  return everywhere(rows, [1 / num_actions(rows)] * len(rows))


# ---- algorithms: (policy, groups, start, reference) → Outcome. `start` is the policy
# before the first update of the batch, `reference` another one.


def drgrpo(policy, groups, start, reference, *, length):
  """Dr. GRPO: Σ over all tokens over rows·L, no division by std (arXiv 2503.20783)."""
  rows = flat(groups)
  advantage = everywhere(rows, group_advantages(groups, scaled=False))
  weight = everywhere(rows, [1 / (len(rows) * length)] * len(rows))
  return ppo(policy, rows, advantage, rollout_logprobs(rows), weight, dual=None)


def reinforce_plus_plus(policy, groups, start, reference, *, coef):
  """REINFORCE++ (arXiv 2501.03262): Σ_{k≥t} (r_k − β·KL_k), normalised over the batch.

  KL_k is log π_old − log π_ref of the token; the sum is over action tokens.
  """
  rows = flat(groups)
  old = rollout_logprobs(rows)
  advantage = [np.zeros(len(row.tokens)) for row in rows]
  for i, row in enumerate(rows):
    q, total = chosen(reference, row), 0.0
    for t in reversed(actions(row)):
      total += row.rewards[t] - coef * (old[i][t] - q[t])
      advantage[i][t] = total
  pool = np.array([advantage[i][t] for i, row in enumerate(rows) for t in actions(row)])
  advantage = [(a - pool.mean()) / pool.std(ddof=1) for a in advantage]
  return ppo(policy, rows, advantage, old, token_mean(rows))


def truncated(policy, groups, start, reference, *, cap):
  """A policy gradient times sg(min(r, C)), r against the rollout (Ionides, 2008)."""
  rows, score = flat(groups), group_advantages(groups)
  old = rollout_logprobs(rows)
  ratio = [np.exp(chosen(policy, row) - o) for row, o in zip(rows, old, strict=True)]
  factor = [a * np.minimum(r, cap) for a, r in zip(score, ratio, strict=True)]
  out = policy_gradient(policy, rows, factor)
  cuts = [ratio[i][t] > cap for i, row in enumerate(rows) for t in actions(row)]
  out.metrics['policy/clip_fraction'] = float(np.mean(cuts))
  return out


def corrected(policy, groups, start, reference, *, rule):
  """PPO against the learner's own old policy, times a correction of each token.

  rule: the π_old/π_rollout of a row's action tokens → their factors.
  """
  rows = flat(groups)
  old = [chosen(start, row) for row in rows]
  factor = [np.zeros(len(row.tokens)) for row in rows]
  for i, row in enumerate(rows):
    places = actions(row)
    ratios = [np.exp(old[i][t] - row.rollout_logprobs[t].astype(float)) for t in places]
    for t, value in zip(places, rule(ratios), strict=True):
      factor[i][t] = value
  advantage = everywhere(rows, group_advantages(groups))
  weight = token_mean(rows)
  out = ppo(policy, rows, advantage, old, weight, factor=factor)
  factors = [factor[i][t] for i, row in enumerate(rows) for t in actions(row)]
  out.metrics['correction/weight'] = float(np.mean(factors))
  return out


def tis(cap):
  """min(ρ, C) of each token (Yao et al., 2025, "Your efficient RL framework …")."""
  return lambda ratios: [min(ratio, cap) for ratio in ratios]


def icepop(low, high):
  """ρ where low ≤ ρ ≤ high, else 0, token by token (arXiv 2510.18855)."""
  return lambda ratios: [ratio if low <= ratio <= high else 0.0 for ratio in ratios]


def mis(low, high):
  """1 for rows whose geometric mean of ρ is in the band, else 0 (Liu et al., 2025)."""

  def rule(ratios):
    mean = np.prod(ratios) ** (1 / len(ratios))
    return [1.0 if low <= mean <= high else 0.0] * len(ratios)

  return rule


def clip_b(policy, groups, start, reference, *, mu):
  """Clip-B (arXiv 2602.03392): GRPO without some of the tokens that A < 0 pushes down.

  S = π(y)·(H + log π(y)) of a token y, H the entropy of its distribution. Tokens with
  A < 0 whose S is more than μ standard deviations below the mean are left out, of the
  mean over tokens too.
  """
  rows = flat(groups)
  old, score = rollout_logprobs(rows), group_advantages(groups)
  indicator = {}
  for i, row in enumerate(rows):
    logprobs = start.logprobs(row.tokens)
    for t in actions(row):
      entropy = -np.sum(np.exp(logprobs[t]) * logprobs[t])
      indicator[i, t] = np.exp(old[i][t]) * (entropy + old[i][t])
  values = np.array(list(indicator.values()))
  bound = values.mean() - mu * values.std()
  dropped = {at for at, s in indicator.items() if score[at[0]] < 0 and s < bound}
  kept = [dataclasses.replace(row, action_mask=row.action_mask.copy()) for row in rows]
  for i, t in dropped:
    kept[i].action_mask[t] = False
  out = ppo(policy, kept, everywhere(kept, score), old, token_mean(kept))
  out.metrics['advantage/dropped'] = len(dropped) / len(indicator)
  return out


def preference(policy, groups, reference, weight, loss_of):
  """The mean over pairs of loss_of(h), which returns (value, derivative).

  h is Σ_t weight(row)·log π/π_ref of the chosen answer less that of the rejected one.
  """
  loss, slopes, margins, i = 0.0, [], [], 0
  for pair in groups:
    signs = [1 if row.score == max(each.score for each in pair) else -1 for row in pair]
    h = 0.0
    for sign, row in zip(signs, pair, strict=True):
      gap = chosen(policy, row) - chosen(reference, row)
      h += sign * weight(row) * sum(gap[t] for t in actions(row))
    value, slope = loss_of(h)
    loss += value / len(groups)
    for sign, row in zip(signs, pair, strict=True):
      share = sign * weight(row) * slope / len(groups)
      slopes += [(i, t, int(row.tokens[t]), share) for t in actions(row)]
      i += 1
    margins.append(h)
  accuracy = float(np.mean(np.array(margins) > 0))
  return Outcome(loss, slopes, {'policy/accuracy': accuracy})


def dpo(policy, groups, start, reference, *, beta, smoothing=0.0):
  """DPO (arXiv 2305.18290, equation 7); with smoothing, equation 3 of cDPO's note."""

  def loss_of(h):
    sigma = 1 / (1 + np.exp(-beta * h))
    value = -(1 - smoothing) * np.log(sigma) - smoothing * np.log(1 - sigma)
    return value, beta * (sigma - (1 - smoothing))

  return preference(policy, groups, reference, lambda row: 1, loss_of)


def ipo(policy, groups, start, reference, *, tau):
  """IPO (arXiv 2310.12036, equation 17), of means over the tokens of an answer."""

  def loss_of(h):
    return (h - 1 / (2 * tau)) ** 2, 2 * (h - 1 / (2 * tau))

  weight = lambda row: 1 / len(actions(row))  # noqa: E731
  return preference(policy, groups, reference, weight, loss_of)


def mix(policy, groups, start, reference, *, mu):
  """MIX (arXiv 2505.17826): (1−μ)·GRPO on rollouts + μ·SFT on an expert's rows.

  The expert's rows come last.
  """
  rows = flat(groups)
  played = [group for group in groups if not group[0].is_expert]
  rollouts, experts = flat(played), [row for row in rows if row.is_expert]
  advantage = everywhere(rollouts, group_advantages(played))
  part = ppo(
    policy, rollouts, advantage, rollout_logprobs(rollouts), token_mean(rollouts)
  )
  copied = policy_gradient(policy, experts, everywhere(experts, [1.0] * len(experts)))
  slopes = [
    (i + shift, t, token, share * slope)
    for shift, share, each in ((0, 1 - mu, part), (len(rollouts), mu, copied))
    for i, t, token, slope in each.slopes
  ]
  return Outcome((1 - mu) * part.loss + mu * copied.loss, slopes, part.metrics)


def corrected_k3(policy, groups, start, reference, *, coef):
  """GRPO with the unbiased KL estimate of DeepSeek-V3.2 (arXiv 2512.02556).

  π_θ/π_old·(π_ref/π_θ − log π_ref/π_θ − 1), the ratio at most 2; with p its derivative
  is ratio·(k3 + 1 − π_ref/π_θ), without k3 where the ratio is cut.
  """
  rows = flat(groups)
  old, weight = rollout_logprobs(rows), token_mean(rows)
  out = ppo(policy, rows, everywhere(rows, group_advantages(groups)), old, weight)
  total, cuts = 0.0, []
  for i, row in enumerate(rows):
    p, q = chosen(policy, row), chosen(reference, row)
    for t in actions(row):
      x, ratio = np.exp(q[t] - p[t]), np.exp(p[t] - old[i][t])
      k3 = x - np.log(x) - 1
      slope = min(ratio, 2) * (1 - x) + (ratio * k3 if ratio < 2 else 0)
      total += coef * weight[i][t] * min(ratio, 2) * k3
      out.slopes.append((i, t, int(row.tokens[t]), coef * weight[i][t] * slope))
      cuts.append(ratio > 2)
  assert 0 < np.mean(cuts) < 1
  return Outcome(out.loss + total, out.slopes, out.metrics | {'loss/kl': total})


def step_reinforce(policy, groups, start, reference, *, gamma):
  """Returns of turns, discounted and whitened over all turns (ROLL, 2506.06122)."""
  rows, returns = flat(groups), []
  for row in rows:
    later = [
      each
      for each in rows
      if (each.env_group, each.sample_index) == (row.env_group, row.sample_index)
      and each.turn >= row.turn
    ]
    returns.append(sum(gamma ** (each.turn - row.turn) * each.score for each in later))
  advantage = (np.array(returns) - np.mean(returns)) / np.std(returns, ddof=1)
  return policy_gradient(policy, rows, everywhere(rows, advantage))


def grpo_distill(policy, groups, start, reference, *, coef):
  """GRPO's advantage less c·(log π_old − log π_teacher) of each token (2306.08543)."""
  rows = flat(groups)
  old, score = rollout_logprobs(rows), group_advantages(groups)
  advantage = [
    score[i] - coef * (old[i] - row.extras['teacher_logprobs'].astype(np.float64))
    for i, row in enumerate(rows)
  ]
  return ppo(policy, rows, advantage, old, token_mean(rows))


def distill(policy, groups, start, reference, *, kind):
  """KL over a teacher's K likeliest tokens and one more that stands for the rest.

  Forward, Σ t·log(t/s) (arXiv 1503.02531), or reverse, Σ s·log(s/t) (2306.08543). The
  derivative by a token's log s is −t, or s·(log(s/t) + 1), and the rest's probability,
  1 − Σ s, changes by −s.
  """
  rows = flat(groups)
  loss, slopes, count = 0.0, [], num_actions(rows)
  for i, row in enumerate(rows):
    logprobs = policy.logprobs(row.tokens)
    for t in actions(row):
      ids = row.extras['teacher_topk_ids'][t]
      teacher = np.exp(row.extras['teacher_topk_logprobs'][t].astype(np.float64))
      student = np.exp(logprobs[t, ids])
      t_rest, s_rest = 1 - teacher.sum(), 1 - student.sum()
      if kind == 'forward':
        value = np.sum(teacher * np.log(teacher / student))
        value += t_rest * np.log(t_rest / s_rest)
        slope = -teacher + t_rest / s_rest * student
      else:
        value = np.sum(student * np.log(student / teacher))
        value += s_rest * np.log(s_rest / t_rest)
        slope = student * (np.log(student / teacher) - np.log(s_rest / t_rest))
      loss += value / count
      slopes += [
        (i, t, int(token), each / count) for token, each in zip(ids, slope, strict=True)
      ]
  return Outcome(loss, slopes)
