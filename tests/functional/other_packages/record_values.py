"""Records what the code of other packages computes, for `test_recorded_values`.

It runs in an environment with torch and the packages that `values.json` names:
beartype and jaxtyping, as `python record_values.py PRIME_RL AREAL R1_REWARD`. The first
and the last are checkouts of PrimeIntellect-ai/prime-rl and yfzhang114/r1_reward, which
are no packages; AREAL is the unpacked wheel of areal 1.0.4, of which two functions are
taken.
"""

import ast
import asyncio
import collections
import importlib.metadata
import importlib.util
import json
import pathlib
import sys
import types

import numpy as np
import torch

VALUES = pathlib.Path(__file__).parent / 'values.json'
ROWS, TOKENS = 8, 6
STEP, CAP = 10, 1.4  # of A-3PO
PACKAGES = ('verl', 'trl', 'trinity-rft')


def inputs():
  """A batch whose every number is exact in float32: eighths and sixty-fourths."""
  rng = np.random.default_rng(0)
  lengths = np.array([6, 5, 3, 6, 2, 4, 5, 1])
  group = np.repeat(np.arange(3), [3, 3, 2])
  old = -np.round(rng.exponential(size=(ROWS, TOKENS)) * 64) / 64
  drift = np.round(rng.normal(size=(ROWS, TOKENS)) * rng.choice([8, 64], ROWS)[:, None])
  by_row = np.round(rng.normal(size=ROWS) * 8) / 8
  by_row[3] = 0
  return {
    'mask': (np.arange(TOKENS) < lengths[:, None]) * 1.0,
    'old_logprobs': old,
    'logprobs': np.minimum(old + drift / 64, -1 / 64),
    'advantages': np.round(rng.normal(size=(ROWS, TOKENS)) * 16) / 8,
    'by_row': by_row,
    'entropy': np.round(rng.exponential(size=(ROWS, TOKENS)) * 64) / 64,
    'nec': np.round(rng.normal(size=(ROWS, TOKENS)) * 64) / 64,
    # What π² leaves, less than all of it on one other token.
    'pi_squared': np.float32(
      np.exp(2 * old) + rng.random((ROWS, TOKENS)) * (1 - np.exp(old)) ** 2
    ),
    'rewards': np.eye(TOKENS)[lengths - 1]
    * np.array([1, 0, 0, 0.5, 2, 1, 1, 0])[:, None],
    'second_rewards': np.array([0, 1, 1, 0, 0.25, 1, 3, 3]),
    'group': 1.0 * group,
    'weights_version': STEP - rng.integers(0, 6, (ROWS, TOKENS)) * 1.0,
  }


def tensors():
  return {k: torch.tensor(v, dtype=torch.float64) for k, v in inputs().items()}


def record(compute, spread=1):
  """The loss and its gradient by the log-probs, which may be further off than usual."""
  columns = tensors()
  drift = columns['logprobs'] - columns['old_logprobs']
  columns['logprobs'] = columns['old_logprobs'] + spread * drift
  columns['logprobs'].requires_grad_()
  loss = compute(columns)
  loss.backward()
  gradient = columns['logprobs'].grad.numpy()
  return {'loss': float(loss), 'gradient': gradient.tolist()}


def verl_losses():
  from verl.trainer.ppo import core_algos
  from verl.workers.config.actor import PolicyLossConfig

  def config(**policy):
    fields = {
      'clip_ratio': 0.2,
      'clip_ratio_low': None,
      'clip_ratio_high': None,
      'policy_loss': PolicyLossConfig(**policy),
      'global_batch_info': {},
    }
    out = types.SimpleNamespace(**fields)
    out.get = lambda name, default: getattr(out, name, default)
    return out

  def run(name, advantages='advantages', low=None, high=None, **policy):
    def compute(c):
      chosen = config(**policy)
      chosen.clip_ratio_low, chosen.clip_ratio_high = low, high
      a = c[advantages]
      if a.ndim == 1:
        a = a[:, None].expand(-1, TOKENS)
      loss_fn = core_algos.get_policy_loss_fn(name)
      return loss_fn(
        c['old_logprobs'], c['logprobs'], a, c['mask'], 'token-mean', chosen
      )[0]

    return record(compute)

  return {
    'dppo_tv': run('dppo_tv', low=0.15, high=0.1),
    'dppo_kl': run('dppo_kl', low=0.05, high=0.02),
    # All that may be drawn are drawn, so that the draw is the same everywhere.
    'clip_cov': run('clip_cov', clip_cov_ratio=1.0, clip_cov_lb=0.2, clip_cov_ub=1.5),
    'kl_cov': run('kl_cov', kl_cov_ratio=0.2, ppo_kl_coef=0.5),
    'gmpo': run('geo_mean', 'by_row', low=0.4, high=0.3),
    'dro': run('dro', dro_beta=0.3),
  }


def verl_advantages():
  from verl.trainer.ppo import core_algos

  c = tensors()
  index = c['group'].numpy()
  otb, _ = core_algos.compute_optimal_token_baseline_advantage(
    c['rewards'], c['mask'], index, c['old_logprobs'], c['pi_squared']
  )
  # Its masks need not be contiguous, as those of turns are not.
  turns = c['mask'].clone()
  turns[:, 2] = 0
  multi, _ = core_algos.compute_multi_turn_optimal_token_baseline_advantage(
    c['rewards'], turns, index, c['old_logprobs'], c['pi_squared']
  )
  prompts = torch.zeros(ROWS, 1)
  gdpo, _ = core_algos.compute_gdpo_outcome_advantage(
    c['rewards'],
    c['mask'],
    index,
    config={'gdpo_reward_keys': ['a', 'b'], 'gdpo_reward_weights': [1.0, 0.5]},
    non_tensor_batch={
      'a': c['rewards'].sum(-1).numpy(),
      'b': c['second_rewards'].numpy(),
    },
    batch={
      'prompts': prompts,
      'attention_mask': torch.cat([prompts + 1, c['mask']], dim=1).long(),
    },
  )
  names = ('optimal_token_baseline', 'turns_optimal_token_baseline', 'gdpo')
  values = (otb, multi, gdpo)
  return {n: v.tolist() for n, v in zip(names, values, strict=True)}


class Accelerator:
  num_processes = 1

  def reduce(self, x, reduction='sum'):
    return x

  def gather(self, x):
    return x


class Trainer:
  """What `_compute_loss` of TRL's trainers reads of themselves."""

  def __init__(self, loss_type, level, **settings):
    from trl import GRPOTrainer

    self.loss_type, self.importance_sampling_level = loss_type, level
    self.args = types.SimpleNamespace(
      delta=None,
      steps_per_generation=1,
      vespo_k_pos=2.0,
      vespo_lambda_pos=3.0,
      vespo_k_neg=3.0,
      vespo_lambda_neg=2.0,
    )
    self.beta, self.top_entropy_quantile = 0.0, 1.0
    self.aux_loss_enabled = self.use_vllm = self._entropy_bonus_enabled = False
    self.off_policy_mask_threshold = None
    self.vllm_importance_sampling_correction = False
    self.model = types.SimpleNamespace(training=True)
    self.current_gradient_accumulation_steps = 1
    self.accelerator = Accelerator()
    self._metrics = {'train': collections.defaultdict(list)}
    self.get_gamma_weights = GRPOTrainer.get_gamma_weights
    vars(self).update(settings)

  def __getattr__(self, name):
    raise AttributeError(name)

  def _get_per_token_logps_and_entropies(self, *args, **options):
    return self.logprobs, torch.zeros_like(self.logprobs), None


def trl_losses():
  from trl import GRPOTrainer
  from trl.experimental.gmpo import GMPOTrainer

  def run(trainer_class, loss_type, level, **settings):
    def compute(c):
      trainer = Trainer(loss_type, level, logprobs=c['logprobs'], **settings)
      prompt = torch.zeros(ROWS, 1, dtype=torch.long)
      return trainer_class._compute_loss(
        trainer,
        None,
        {
          'prompt_ids': prompt,
          'prompt_mask': prompt + 1,
          'completion_ids': torch.zeros(ROWS, TOKENS, dtype=torch.long),
          'completion_mask': c['mask'],
          'advantages': c['by_row'],
          'old_per_token_logps': c['old_logprobs'],
          'num_items_in_batch': c['mask'].sum(),
        },
      )

    return record(compute)

  wide = {'epsilon_low': 0.4, 'epsilon_high': 0.3}
  narrow = {'epsilon_low': 0.1, 'epsilon_high': 0.05}
  return {
    'vespo': run(GRPOTrainer, 'vespo', 'token', **narrow),
    'luspo': run(GRPOTrainer, 'luspo', 'sequence', **narrow),
    'gmpo': run(GMPOTrainer, 'grpo', 'token', **wide),
  }


def trl_self_distillation():
  """SDPO's and SDFT's losses a token, and their gradients by the student's logits."""
  from trl.experimental.sdpo import loss_utils

  rng = np.random.default_rng(1)
  words, k = 12, 4
  each = np.tile(np.arange(words) * 3 / 8, (ROWS, TOKENS, 1))  # no two are equal
  given = {
    'student': rng.permuted(each, axis=-1),
    'teacher': rng.permuted(each, axis=-1),
    'old_gap': np.round(rng.normal(size=(ROWS, TOKENS)) * 64) / 64,
  }
  ids = rng.integers(0, words, (ROWS, TOKENS))
  columns = {n: torch.tensor(v, dtype=torch.float64) for n, v in given.items()}

  def run(alpha, tail, clip, k):
    student = columns['student'].clone().requires_grad_()
    chosen = torch.log_softmax(student, -1).gather(-1, torch.tensor(ids)[..., None])
    logprobs = chosen[..., 0]
    loss = loss_utils.compute_topk_self_distillation_loss(
      student,
      columns['teacher'],
      distillation_topk=k,
      distillation_alpha=alpha,
      distillation_add_tail=tail,
    )
    if clip is not None:
      old = logprobs.detach() + columns['old_gap']
      loss = loss_utils.apply_importance_sampling_clipping(loss, logprobs, old, clip)
    loss.sum().backward()
    return {'loss': loss.tolist(), 'gradient': student.grad.tolist()}

  return {
    'inputs': {name: x.tolist() for name, x in given.items()} | {'ids': ids.tolist()},
    'forward': run(0.0, True, None, k),
    'sdpo': run(0.5, True, 2.0, k),
    'sdft': run(0.5, False, 2.0, k),
    'reverse': run(1.0, True, 2.0, k),
    'whole': run(0.3, False, None, words),
  }


def trinity_keeps():
  """Which tokens `clipv` of Trinity-RFT keeps, of two batches."""
  from trinity.algorithm.advantage_fn.clipv_advantage import ClipVAdvantageFn

  def run(columns, **options):
    data = types.SimpleNamespace(
      batch={
        'token_level_rewards': columns['rewards'],
        'response_mask': columns['mask'].clone(),
        'old_log_probs': columns['old_logprobs'],
        'entropys': columns['entropy'],
        'necs': columns['nec'],
      },
      non_tensor_batch={'uid': columns['group'].numpy()},
    )
    out, _ = ClipVAdvantageFn(**options)(data)
    return out.batch['response_mask'].tolist()

  def column(*values):
    return torch.tensor(values, dtype=torch.float64)[:, None]

  equal = {
    'rewards': column(0.3, 0.3, 1, 0),
    'mask': column(1, 1, 1, 1),
    'old_logprobs': column(0, 0, 0, 0),
    'entropy': column(0, 0, 0, 0),
    'nec': column(0.9, 0, 0, 0),
    'group': column(0, 0, 1, 1)[:, 0],
  }
  return {
    'random': run(tensors(), mu=0.5, max_frac=0.05),
    'equal_rewards': run(equal, mu=1.0),
  }


def prime_rl_losses(root):
  """Loads the file alone, without the packages that it takes its configs from."""
  path = f'{root}/src/prime_rl/trainer/rl/loss.py'

  class Configs(types.ModuleType):
    def __getattr__(self, name):
      return object

  for name in ('prime_rl', 'prime_rl.configs', 'prime_rl.utils'):
    sys.modules[name] = types.ModuleType(name)
  for name in ('prime_rl.configs.trainer', 'prime_rl.utils.utils'):
    sys.modules[name] = Configs(name)
  spec = importlib.util.spec_from_file_location('prime_rl_loss', path)
  module = importlib.util.module_from_spec(spec)
  sys.modules['prime_rl_loss'] = module
  spec.loader.exec_module(module)
  config = types.SimpleNamespace(ipo_threshold=0.1, adv_tau=1.0, kl_tau=0.25)

  def compute(c):
    rows = [
      module.ipo_loss_fn(module.LossInputs(p, o, None, a, m > 0, None), config).loss
      for p, o, a, m in zip(
        c['logprobs'], c['old_logprobs'], c['advantages'], c['mask'], strict=True
      )
    ]
    return sum(rows) / c['mask'].sum()

  return {'ipo': record(compute)}


def definition_in(path, name, **names):
  """A function or class of a module that is not imported, with the names it needs."""
  tree = ast.parse(pathlib.Path(path).read_text())
  (found,) = (x for x in tree.body if getattr(x, 'name', '') == name)
  for node in ast.walk(found):
    if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef):
      node.returns, node.decorator_list = None, []
      for argument in node.args.args:
        argument.annotation = None
  if isinstance(found, ast.ClassDef):
    found.bases = [x for x in found.bases if ast.unparse(x) == 'nn.Module']
  module = ast.Module(body=[found], type_ignores=[])
  scope = {'torch': torch, 'np': np, 'nn': torch.nn, **names}
  exec(compile(module, str(path), 'exec'), scope)
  return scope[name]


PROPOSER, SOLVER = 0, 1
ROLES = (PROPOSER, SOLVER, SOLVER, PROPOSER, SOLVER, SOLVER, SOLVER, PROPOSER)
EPISODES = (0, 0, 0, 1, 1, 1, 1, 2)  # of one group


def prime_rl_advantages(root):
  """Of MaxRL in three groups, of agents with roles in one, and of RAE game by game."""
  folder = f'{root}/src/prime_rl/orchestrator/algo'
  rewards = inputs()['second_rewards'].tolist()

  def score(name, episodes, **fields):
    scored = {}

    def pairs(episodes):
      return [(e, trace) for e in episodes for trace in e.traces]

    algorithm = definition_in(
      f'{folder}/{name[0]}.py',
      name[1],
      iter_trainable_traces=pairs,
      assign_advantages=lambda trace, a: scored.update({trace.row: a}),
      defaultdict=collections.defaultdict,
    )
    made = algorithm.__new__(algorithm)
    vars(made).update(fields)
    for group in episodes:
      asyncio.run(made.score_group(group))
    return [scored[row] for row in sorted(scored)]

  def trace(row, role=PROPOSER, reward=None):
    reward = rewards[row] if reward is None else reward
    agent = types.SimpleNamespace(name=role)
    return types.SimpleNamespace(row=row, agent=agent, reward=reward)

  def episode(number, *traces):
    return types.SimpleNamespace(id=number, traces=traces)

  totals = inputs()['rewards'].sum(axis=1).tolist()
  group = inputs()['group']
  groups = [
    [episode(r, trace(r, reward=totals[r])) for r in range(ROWS) if group[r] == g]
    for g in range(3)
  ]
  family = [
    episode(e, *(trace(r, ROLES[r]) for r in range(ROWS) if EPISODES[r] == e))
    for e in range(3)
  ]
  games = [[episode(i, trace(2 * i, 0), trace(2 * i + 1, 1))] for i in range(ROWS // 2)]
  return {
    'maxrl': score(('max_rl', 'MaxRLAlgorithm'), groups),
    'hierarchical_grpo': score(
      ('hierarchical_grpo', 'HierarchicalGRPOAlgorithm'),
      [family],
      episode_agents={SOLVER},
    ),
    'rae': score(
      ('rae', 'RAEAlgorithm'),
      games,
      baselines=collections.defaultdict(float),
      decay=0.95,
    ),
  }


SPREAD = 6  # log-ratios go beyond ±log 1000
RETURNS = [0.5, -0.5] * 11 + [1.0, -1.0, 4.0, -4.0]  # two are more than 3σ off


def r1_reward(root):
  """StableReinforce: its loss, and what its buffer makes of advantages.

  The buffer's bounds are ±3 around the batch's mean, so that the batch here has mean 0.
  """
  mean = definition_in(f'{root}/openrlhf/models/utils.py', 'masked_mean')
  policy_loss = definition_in(
    f'{root}/openrlhf/models/loss.py', 'PolicyLoss', masked_mean=mean
  )()
  buffer = definition_in(
    f'{root}/openrlhf/trainer/ppo_utils/replay_buffer.py', 'NaiveReplayBuffer'
  )

  def compute(c):
    return policy_loss(c['logprobs'], c['old_logprobs'], c['advantages'], c['mask'])

  class Buffer(list):
    normalize = buffer.normalize

  items = Buffer(
    types.SimpleNamespace(
      advantages=torch.tensor([value], dtype=torch.float64),
      action_mask=torch.ones(1, dtype=torch.bool),
    )
    for value in RETURNS
  )
  items.normalize('advantages', types.SimpleNamespace(all_reduce=lambda x, how: x))
  return {
    'stable_reinforce': record(compute, spread=SPREAD),
    'filtered': [float(item.advantages) for item in items],
  }


def areal_losses(root):
  methods = ('LOGLINEAR', 'LINEAR', 'ROLLOUT')
  constants = {f'PROX_APPROX_METHOD_{name}': name for name in methods}
  approximate = definition_in(
    f'{root}/areal/trainer/ppo/actor.py',
    'compute_prox_logp_approximations',
    PROX_APPROX_METHODS_ALL=list(constants.values()),
    **constants,
  )
  files = pathlib.Path(root).glob('areal/utils/functional/*.py')
  (source,) = (f for f in files if 'def ppo_actor_loss_fn' in f.read_text())
  loss_fn = definition_in(str(source), 'ppo_actor_loss_fn')
  proximal = []

  def compute(c):
    version = c['weights_version'].long()
    prox = approximate(
      c['old_logprobs'], c['logprobs'].detach(), version, STEP, 'LOGLINEAR'
    )['LOGLINEAR']
    proximal.append(prox.tolist())
    weight = torch.exp(prox - c['old_logprobs'])
    a = c['advantages'] * torch.where(weight > CAP, 0, weight)
    return loss_fn(c['logprobs'], prox, c['old_logprobs'], a, 0.2, c['mask'] > 0, 0.28)[
      0
    ]

  return record(compute) | {'proximal': proximal[0]}


def main():
  values = {
    'versions': {name: importlib.metadata.version(name) for name in PACKAGES},
    'inputs': {name: x.tolist() for name, x in inputs().items()},
    'verl': verl_losses(),
    'verl_advantages': verl_advantages(),
    'trl': trl_losses(),
    'trl_self_distillation': trl_self_distillation(),
    'trinity': trinity_keeps(),
    'prime-rl': prime_rl_losses(sys.argv[1]),
    'prime-rl_advantages': prime_rl_advantages(sys.argv[1]),
    'areal': {'a3po': areal_losses(sys.argv[2])},
    'r1_reward': r1_reward(sys.argv[3]),
  }
  VALUES.write_text(json.dumps(values, indent=None) + '\n')


if __name__ == '__main__':
  main()
