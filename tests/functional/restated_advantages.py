"""Advantages in float64 numpy: loops over tasks, runs and tokens, no vector tricks."""

import jax
import numpy as np

from tests.functional.restated_losses import turns


def by_run(c, value_of_run):
  """`[B, T]` from {run: number}; 0 where the mask is 0."""
  out = np.zeros(c['mask'].shape)
  for row, run in enumerate(c['episode_ids']):
    if run >= 0:
      out[row] = np.where(c['mask'][row], value_of_run[run], 0)
  return out


def returns_by_task(c):
  """{task: {run: R}}."""
  tasks = {}
  for row, (task, run) in enumerate(zip(c['group_ids'], c['episode_ids'], strict=True)):
    if run >= 0:
      members = tasks.setdefault(int(task), {})
      members[int(run)] = members.get(int(run), 0.0) + c['rewards'][row].sum()
  return tasks


def _equal(values):
  # Rewards are float32, and equal rewards make equal float32 sums.
  return np.ptp(np.asarray(values, np.float32)) == 0


def _all(tasks):
  return [r for members in tasks.values() for r in members.values()]


def _group_relative(tasks, o):
  """{run: A} of GRPO from {task: {run: R}}."""
  everyone = _all(tasks)
  batch_std = np.std(everyone, ddof=1) if len(everyone) > 1 else 1.0
  advantage = {}
  for members in tasks.values():
    values = list(members.values())
    mean, std = 0.0, 1.0
    if len(values) > 1:
      mean, std = np.mean(values), np.std(values, ddof=1)
    scale = batch_std if o.get('std_over') == 'batch' else std
    for run, value in members.items():
      a = value - mean
      if len(values) > 1 and _equal(values):
        a = 0.0
      if o.get('scale_by_std', True):
        a /= scale + 1e-6
      advantage[run] = a
  return advantage


def _penalised(c, o):
  """{task: {run: R}}, less for runs that were likelier than others of their task."""
  tasks, rho = returns_by_task(c), o.get('rank_penalty')
  if rho is None:
    return tasks
  likelihood = {}
  for row, run in enumerate(c['episode_ids']):
    new = c['rollout_logprobs'][row][c['mask'][row]].sum()
    likelihood[run] = likelihood.get(run, 0.0) + new
  out = {}
  for task, members in tasks.items():
    out[task] = {}
    for run, value in members.items():
      rank = sum(likelihood[other] < likelihood[run] for other in members)
      out[task][run] = value * (1 - rho * rank / len(members))
  return out


def grpo(c, o):
  return by_run(c, _group_relative(_penalised(c, o), o))


def opmd(c, o):
  tau, advantage = o.get('tau', 1.0), {}
  for members in returns_by_task(c).values():
    values = np.array(list(members.values()))
    if o.get('baseline', 'mean') == 'mean':
      b = values.mean()
    else:
      b = tau * np.log(np.mean(np.exp(values / tau)))
    if len(values) == 1:
      b = 0.0
    for run, value in members.items():
      advantage[run] = 0.0 if len(values) > 1 and _equal(values) else value - b
  return by_run(c, advantage)


def gae(c, o):
  gamma, lam = o.get('gamma', 1.0), o.get('lam', 1.0)
  out = np.zeros(c['mask'].shape)
  for row in range(len(out)):
    where = np.flatnonzero(c['mask'][row])
    value, advantage = 0.0, 0.0
    for t in where[::-1]:
      delta = c['rewards'][row, t] + gamma * value - c['old_values'][row, t]
      advantage = delta + gamma * lam * advantage
      value = c['old_values'][row, t]
      out[row, t] = advantage
  return whiten(out, c['mask']) if o.get('whiten') else out


def _each_group(c, rule):
  """by_run of rule(values) -> advantages, applied to every task's rewards."""
  advantage = {}
  for members in returns_by_task(c).values():
    values = np.array(list(members.values()))
    advantage.update(zip(members, rule(values), strict=True))
  return by_run(c, advantage)


def _centred(values):
  return values * 0 if _equal(values) else values - values.mean()


def asymre(c, o):
  shift = o.get('shift', -0.1)
  return _each_group(c, lambda v: v if len(v) == 1 else _centred(v) - shift)


def rloo(c, o):
  def rule(v):
    n = len(v)
    if n == 1:
      return v
    if _equal(v):
      return 0 * v
    return np.array([v[i] - np.delete(v, i).mean() for i in range(n)])

  return _each_group(c, rule)


def rec(c, o):
  tasks, advantage = returns_by_task(c), {}
  for members in tasks.values():
    dropped = _surplus(c, members) if o.get('drop') == 'balance' else ()
    left = {run: value for run, value in members.items() if run not in dropped}
    v = np.array(list(left.values()))
    centred = v if len(v) == 1 else _centred(v)
    std = 1.0 if len(v) == 1 else np.sqrt(np.mean(centred**2))
    values = centred / (std + 1e-6) if o.get('scale_by_std') else centred
    advantage |= dict.fromkeys(dropped, 0.0) | dict(zip(left, values, strict=True))
  return by_run(c, advantage)


def _surplus(c, members):
  """Runs under the mean, beyond as many as there are others: those drawn lowest."""
  if _equal(list(members.values())):
    return []
  mean = np.mean(list(members.values()))
  below = [r for r, v in members.items() if v < mean - 1e-6 * max(abs(mean), 1)]
  draws = np.asarray(jax.random.uniform(c['key'], (c['rows'],)))
  below.sort(key=lambda run: draws[run])
  return below[: max(2 * len(below) - len(members), 0)]


def best_of_group(c, o):
  bound = o.get('threshold', 0.0)
  return _each_group(c, lambda v: 1.0 * ((v == v.max()) & (v > bound)))


def to_go(c, gamma):
  out = np.zeros(c['mask'].shape)
  for row in range(len(out)):
    where = np.flatnonzero(c['mask'][row])
    for i, t in enumerate(where):
      future = c['rewards'][row, where[i:]]
      out[row, t] = np.sum(future * gamma ** np.arange(len(future)))
  return out


def whiten(x, mask):
  seen = x[mask]
  if len(seen) == 0 or np.ptp(seen) < 1e-6:
    return np.zeros_like(x)
  std = np.std(seen, ddof=1) if len(seen) > 1 else 0.0
  return np.where(mask, (x - seen.mean()) / (std + 1e-6), 0)


def reinforce(c, o):
  if o.get('gamma') is not None:
    return to_go(c, o['gamma'])
  return _each_group(c, lambda v: v)


def reinforce_plus_plus(c, o):
  out = to_go(c, o.get('gamma', 1.0))
  if o.get('baseline') == 'group':
    out = out - _each_group(c, lambda v: 0 * v + (v.mean() if len(v) > 1 else 0))
  out = whiten(np.where(c['mask'], out, 0), c['mask'])
  return np.where(np.abs(out) <= (o.get('max_sigma') or np.inf), out, 0)


def remax(c, o):
  out = to_go(c, o.get('gamma', 1.0))
  greedy = {}
  for row, task in enumerate(c['group_ids']):
    if task >= 0 and c['greedy_mask'][row]:
      greedy.setdefault(task, []).append(c['rewards'][row].sum())
  for row, task in enumerate(c['group_ids']):
    out[row] -= np.mean(greedy.get(task, [0.0]))
  return np.where(c['mask'] & ~c['greedy_mask'][:, None], out, 0)


def agentic_reinforce(c, o):
  out = np.zeros(c['mask'].shape)
  for row, stretches in enumerate(turns(c['mask'])):
    value = 0.0
    for where in stretches[::-1]:
      value = c['rewards'][row, where].sum() + o.get('gamma', 1.0) * value
      out[row, where] = value
  return out


def _steps(c):
  """{run: its rows, in the order of their steps}."""
  runs = {}
  for row in np.argsort(c['turn_ids'], kind='stable'):
    if c['episode_ids'][row] >= 0:
      runs.setdefault(c['episode_ids'][row], []).append(row)
  return runs


def _row_values(c, values):
  return np.where(c['mask'], np.asarray(values)[:, None], 0)


def _discounted(c, gamma):
  """Per row: Σ over its run's rows from this one on."""
  values, r = np.zeros(len(c['mask'])), c['rewards'].sum(axis=1)
  for rows in _steps(c).values():
    for i, row in enumerate(rows):
      values[row] = sum(gamma**j * r[later] for j, later in enumerate(rows[i:]))
  return values


def step_wise_grpo(c, o):
  runs, tasks = _steps(c), {}
  for run, rows in runs.items():
    members = tasks.setdefault(c['group_ids'][rows[0]], {})
    members[run] = c['rewards'][rows[-1]].sum()
  advantage = _group_relative(tasks, {})
  if o.get('divide_by_steps'):
    advantage = {run: a / len(runs[run]) for run, a in advantage.items()}
  return by_run(c, advantage)


def _compare(values, keys, norm, keep_alone=False):
  """Per entry: its value less the mean of those with its key; None is no key."""
  out = np.zeros(len(values))
  for i, key in enumerate(keys):
    if key is None:
      continue
    peers = np.array([v for v, k in zip(values, keys, strict=True) if k == key])
    if len(peers) == 1 and keep_alone:
      out[i] = values[i] / (1 + 1e-6 if norm == 'std' else 1)
      continue
    out[i] = 0 if _equal(peers) else values[i] - peers.mean()
    if norm == 'std':
      out[i] /= (np.std(peers, ddof=1) if len(peers) > 1 else 0) + 1e-6
  return out


def gigpo(c, o):
  norm = o.get('norm', 'none')
  episode = np.zeros(c['mask'].shape)
  for task, members in returns_by_task(c).items():
    a = _compare(list(members.values()), [task] * len(members), norm, True)
    episode += by_run(
      c, dict.fromkeys(c['episode_ids'], 0.0) | dict(zip(members, a, strict=True))
    )
  keys = [
    (t, h) if t >= 0 else None
    for t, h in zip(c['group_ids'], c['state_hash'], strict=True)
  ]
  step = _compare(_discounted(c, o.get('gamma', 1.0)), keys, norm)
  return episode + o.get('omega', 1.0) * _row_values(c, step)


def step_reinforce(c, o):
  values = _discounted(c, o.get('gamma', 1.0))
  groups = {}
  for row, task in enumerate(c['group_ids']):
    if task >= 0:
      name = task if o.get('over') == 'group' else 'all'
      groups.setdefault(name, {})[row] = values[row]
  advantage = _group_relative(groups, {})
  return _row_values(c, [advantage.get(row, 0.0) for row in range(len(values))])


def _ahead(c, o):
  future, r = o.get('future', 'mean'), c['rewards'].sum(axis=1)
  values = np.zeros(len(r))
  for rows in _steps(c).values():
    for i, row in enumerate(rows):
      ahead = r[rows[i:]]
      if future == 'sliding':
        ahead = ahead[: o.get('window', 2)]
      if future == 'discounted':
        values[row] = np.sum(ahead * o.get('gamma', 0.9) ** np.arange(len(ahead)))
      else:
        values[row] = ahead.mean()
  return values


def cod(c, o):
  keys = [
    (t, k) if t >= 0 else None
    for t, k in zip(c['group_ids'], c['turn_ids'], strict=True)
  ]
  return _row_values(c, _compare(_ahead(c, o), keys, 'none', True))


def on_policy_distill(c, o):
  gap = c['teacher_logprobs'] - c['old_logprobs']
  return np.where(c['mask'], o.get('coef', 1.0) * gap, 0)


def grpo_distill(c, o):
  return grpo(c, o) + on_policy_distill(c, o)


def jsd(c, o):
  beta = o.get('beta', 0.5)
  d = np.clip(c['teacher_logprobs'] - c['old_logprobs'], -20, 20)
  value = np.exp(d) - 1
  if beta:
    value = np.log(1 + beta * value) / beta
  return np.where(c['mask'], o.get('coef', 1.0) * value, 0)


def maxrl(c, o):
  advantage = {}
  for members in returns_by_task(c).values():
    mean = np.mean(list(members.values()))
    for run, value in members.items():
      scaled = (value - mean) / mean if mean > 0 else 0.0
      advantage[run] = value if len(members) == 1 else scaled
      if len(members) > 1 and _equal(list(members.values())):
        advantage[run] = 0.0
  return by_run(c, advantage)


def gdpo(c, o):
  total = {}
  for k in range(c['reward_terms'].shape[1]):
    tasks = returns_by_task(c)
    for members in tasks.values():
      for run in members:
        (row, *_) = np.flatnonzero(c['episode_ids'] == run)
        members[run] = c['reward_terms'][row, k]
    (row, *_) = np.flatnonzero(c['episode_ids'] >= 0)
    for run, a in _group_relative(tasks, {}).items():
      total[run] = total.get(run, 0.0) + c['reward_weights'][row, k] * a
  out = by_run(c, total)
  return whiten(out, c['mask']) if o.get('whiten', True) else out


def process_grpo(c, o):
  ends = c['step_ends'] & c['mask']
  scaled = np.zeros(c['mask'].shape)
  for task in set(c['group_ids'][c['group_ids'] >= 0]):
    steps = ends & (c['group_ids'] == task)[:, None]
    found = np.asarray(c['rewards'][steps], np.float64)
    if len(found) == 0:
      continue
    std = 1.0
    if o.get('scale_by_std', True):
      std = (np.std(found, ddof=1) if len(found) > 1 else 1.0) + 1e-6
    mean = np.mean(found) if len(found) > 1 else 0.0
    scaled[steps] = 0 if len(found) > 1 and _equal(found) else (found - mean) / std
  return to_go(c | {'rewards': scaled}, 1.0)


def optimal_token_baseline(c, o):
  logp = np.minimum(c['old_logprobs'], 0)
  energy = np.maximum(
    (1 - np.exp(logp)) ** 2 + c['sum_pi_squared'] - np.exp(2 * logp), 0
  )
  returns, out = to_go(c, 1.0), np.zeros(c['mask'].shape)
  for task in set(c['group_ids'][c['group_ids'] >= 0]):
    rows = np.flatnonzero(c['group_ids'] == task)
    places = {row: np.flatnonzero(c['mask'][row]) for row in rows}
    weights = {row: np.cumsum(energy[row][places[row]]) for row in rows}
    for t in range(c['mask'].shape[1]):
      there = [row for row in rows if t < len(places[row])]
      w = np.array([weights[row][t] for row in there])
      g = np.array([returns[row, places[row][t]] for row in there])
      baseline = (w * g).sum() / (w.sum() + 1e-8) if len(there) > 1 else 0.0
      for row in there:
        out[row, places[row][t]] = returns[row, places[row][t]] - baseline
  return out


def _role_of_run(c):
  roles = {}
  for run, role in zip(c['episode_ids'], c['role_ids'], strict=True):
    if run >= 0:
      roles[int(run)] = max(roles.get(int(run), 0), int(role))
  return roles


def rae(c, o):
  returns = {r: v for m in returns_by_task(c).values() for r, v in m.items()}
  baseline, roles = c['state']['baseline'], _role_of_run(c)
  return by_run(
    c, {run: value - baseline[roles[run]] for run, value in returns.items()}
  )


def hierarchical_grpo(c, o):
  rows, peers = np.flatnonzero(c['episode_ids'] >= 0), {}
  for row in rows:
    role, solver = c['role_ids'][row], o.get('episode_role', 1)
    scope = ('episode', c['episode_ids'][row])
    if role != solver:
      scope = ('group', c['group_ids'][row])
    peers.setdefault((*scope, role), []).append(row)
  out = np.zeros(c['mask'].shape)
  for members in peers.values():
    totals = np.array([c['rewards'][row].sum() for row in members])
    base = totals.mean() if len(members) > 1 else 0.0
    if len(members) > 1 and _equal(totals):
      base = totals
    for row, a in zip(members, totals - base, strict=True):
      out[row] = np.where(c['mask'][row], a, 0)
  return out


def clip_b(c, o):
  return grpo(c, {})


def clip_v(c, o):
  return grpo(c, {})


def normalise(c, o):
  tasks, bound = returns_by_task(c), o.get('reward_clip') or np.inf
  tasks = {
    t: {r: np.clip(v, -bound, bound) for r, v in m.items()} for t, m in tasks.items()
  }
  everyone, advantage = np.array(_all(tasks)), {}
  seen = _moments(c['state'], everyone)
  for members in tasks.values():
    pools = {'group': np.array(list(members.values())), 'batch': everyone}
    for run, value in members.items():
      a = value
      if o['mean'] == 'running':
        a = value - seen['mean']
      elif o['mean'] == 'group' and len(members) == 1:
        a = value
      elif o['mean'] != 'none':
        a = 0.0 if _equal(pools[o['mean']]) else value - pools[o['mean']].mean()
      if o['std'] == 'running':
        a = _over(a, seen['count'], np.sqrt(seen['square'] / max(seen['count'] - 1, 1)))
      elif o['std'] != 'none':
        pool = pools[o['std']]
        std = np.std(pool, ddof=1) if len(pool) > 1 and not _equal(pool) else 0.0
        a = _over(a, len(pool), std)
      advantage[run] = a
  out = by_run(c, advantage)
  if o.get('whiten'):
    out = whiten(out, c['mask'])
  limit = o.get('advantage_clip') or np.inf
  return np.clip(out, -limit, limit)


def _over(a, count, std):
  """a/s; a single run's deviation is 1, and equal runs have nothing to tell."""
  if count <= 1:
    return a / (1 + 1e-6)
  return a / (std + 1e-6) if std > 1e-6 else 0.0


def moments(c, o):
  return _moments(c['state'], np.array(_all(returns_by_task(c))))


def _moments(old, new):
  """Of all rewards ever seen, from the count, mean and squares of those before."""
  count = old['count'] + len(new)
  total = old['count'] * old['mean'] + new.sum()
  squares = old['square'] + old['count'] * old['mean'] ** 2 + (new**2).sum()
  mean = total / max(count, 1)
  return {'count': count, 'mean': mean, 'square': squares - count * mean**2}


# Tokens that stay in the loss, by the name of the advantage; the others keep all.


def _rows_of(c, runs):
  return np.isin(c['episode_ids'], list(runs))[:, None] | np.zeros(
    c['mask'].shape, bool
  )


def _spread_groups(c, tasks, threshold):
  if threshold is None:
    return None
  kept = []
  for members in tasks.values():
    values = list(members.values())
    std = 0.0 if _equal(values) else np.std(values, ddof=1)  # of one value too
    kept += members if len(values) > 1 and std > threshold else []
  return _rows_of(c, kept)


def _indicator(c):
  return np.exp(np.clip(c['old_logprobs'], -20, 20)) * (
    c['entropy'] + c['old_logprobs']
  )


def _keep_clip_b(c, o):
  a, m, s = grpo(c, {}), c['mask'], _indicator(c)
  far = s - s[m].mean() < -o.get('mu', 2.5) * s[m].std() if m.any() else m
  return ~(m & (a < 0) & far)


def _keep_clip_v(c, o):
  a, m, d = grpo(c, {}), c['mask'], c['nec'] - _indicator(c)
  far = m & (d > o.get('mu', 8.5) * d[m].std()) if m.any() else m
  drop = far & (a < 0)
  most = max(int(o.get('max_frac', 1e-4) * m.sum()), 1)
  keep = np.ones(m.shape, bool)
  for at in sorted(zip(*np.nonzero(drop), strict=True), key=lambda at: -d[at])[:most]:
    keep[at] = False
  return keep & ~(far & (a == 0)) if o.get('drop_zero') else keep


def _keep_rec(c, o):
  if o.get('drop') != 'balance':
    return None
  tasks = returns_by_task(c)
  return ~_rows_of(c, [run for m in tasks.values() for run in _surplus(c, m)])


def _keep_best(c, o):
  kept = []
  for members in returns_by_task(c).values():
    top = max(members.values())
    kept += [r for r, v in members.items() if v == top > o.get('threshold', 0.0)]
  return _rows_of(c, kept)


def _keep_step_wise(c, o):
  tasks = {}
  for run, rows in _steps(c).items():
    members = tasks.setdefault(c['group_ids'][rows[0]], {})
    members[run] = c['rewards'][rows[-1]].sum()
  return _spread_groups(c, tasks, o.get('std_threshold'))


KEEPS = {
  'grpo': lambda c, o: _spread_groups(c, _penalised(c, o), o.get('std_threshold')),
  'step_wise_grpo': _keep_step_wise,
  'rec': _keep_rec,
  'best_of_group': _keep_best,
  'remax': lambda c, o: (
    ~(c['greedy_mask'] & (c['group_ids'] >= 0))[:, None]
    | np.zeros(c['mask'].shape, bool)
  ),
  'clip_b': _keep_clip_b,
  'clip_v': _keep_clip_v,
}
# What a critic or a report sees as returns.
RETURNS = {
  'gae': lambda c, o: np.where(
    c['mask'], gae(c, o | {'whiten': False}) + c['old_values'], 0
  ),
  'reinforce': reinforce,
  'reinforce_plus_plus': lambda c, o: to_go(c, o.get('gamma', 1.0)),
  'remax': lambda c, o: to_go(c, o.get('gamma', 1.0)),
  'agentic_reinforce': agentic_reinforce,
  'step_reinforce': lambda c, o: _row_values(c, _discounted(c, o.get('gamma', 1.0))),
  'cod': lambda c, o: _row_values(c, _ahead(c, o)),
  'optimal_token_baseline': lambda c, o: to_go(c, 1.0),
}
