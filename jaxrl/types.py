"""The nouns of the framework: what flows between its parts.

Every `[B, T]` array speaks of the token at its own position: `logprobs[b, t]` is
the log-probability of `tokens[b, t]` given the tokens before it. Only the function
that turns hidden states into `PolicyOutputs` shifts.
"""

import dataclasses
from collections.abc import Callable, Mapping, Sequence
from typing import Any, Protocol

import jax
import numpy as np

Array = jax.Array
Params = Any  # a pytree of arrays: nested dicts keyed by name
Message = dict[str, Any]  # {'role': …, 'content': …}, as chat templates take it

# Why an episode ended. The last six mark trajectories unfit for training.
STOP_REASONS = (
  'finish',
  'max_length',
  'max_steps',
  'abort',
  'env_reset_failed',
  'env_timeout',
  'env_error',
  'generate_failed',
  'reward_failed',
)
FAILURES = frozenset(STOP_REASONS[3:])


@dataclasses.dataclass(frozen=True)
class Task:
  """One thing to do: an item of a dataset, or a bare seed for a game.

  seed: the episode seed that drew this task (0 is a seed like any other).
  index: row number of the item in its dataset; None for a bare seed.
  item: the dataset row; None for a bare seed.
  """

  seed: int
  index: int | None = None
  item: Mapping[str, Any] | None = None


@dataclasses.dataclass(frozen=True)
class SamplingParams:
  """How one completion is drawn.

  temperature: 0 means greedy. top_p: 1 keeps all. top_k: 0 keeps all.
  stop: strings that end the completion (kept in its tokens).
  stop_token_ids: token ids that end it (kept as the last token).
  seed: token t is drawn with the key fold_in(key(seed), t).
  first: how many tokens of the completion the prompt ends in, from a part of it that
  was emitted before; the next one is token `first`. max_tokens counts the rest.
  """

  max_tokens: int
  temperature: float = 1.0
  top_p: float = 1.0
  top_k: int = 0
  stop: tuple[str, ...] = ()
  stop_token_ids: tuple[int, ...] = ()
  seed: int = 0
  first: int = 0


@dataclasses.dataclass(frozen=True)
class Completion:
  """What an engine returns. All arrays have length n, the number of new tokens.

  tokens: `[n]` int32. logprobs: `[n]` float32, of each sampled token under the
  distribution it was sampled from, temperature and truncation included.
  versions: `[n]` int32, the weights version that produced each token.
  finish_reason: 'stop' (stop token or string), 'length' or 'abort'.
  routed_experts: `[p + n − 1, L, k]` int16, the experts that each of p prompt tokens
  and of the new ones but the last took in each layer, if the engine keeps them.
  """

  tokens: np.ndarray
  logprobs: np.ndarray
  versions: np.ndarray
  finish_reason: str
  routed_experts: np.ndarray | None = None


class RolloutEngine(Protocol):
  """Generates tokens. One request is one sequence; requests are independent."""

  async def generate(
    self, request_id: str, token_ids: Sequence[int], sampling: SamplingParams
  ) -> Completion:
    """Completes `token_ids`. Raises ValueError when the prompt does not fit."""
    ...

  async def load(self, version: int, params: Params) -> None:
    """Serves `params` as `version` from the next decode dispatch on."""
    ...

  async def pause(self) -> None: ...

  async def drain(self) -> None:
    """Begins no more requests, ends those that run, and pauses; others wait."""
    ...

  async def resume(self) -> None: ...

  async def abort(self, request_id: str) -> None:
    """Ends the request with finish_reason 'abort'; unknown ids are ignored."""
    ...

  async def progress(self, request_ids: Sequence[str]) -> dict[str, Completion]:
    """What these requests have emitted so far, but for those not being served."""
    ...


@dataclasses.dataclass
class Trajectory:
  """One training row on the host: ragged, numpy, T tokens long.

  tokens: `[T]` int32. action_mask: `[T]` bool, True where the model wrote the token.
  rollout_logprobs: `[T]` float32, 0 where not an action. rewards: `[T]` float32, on
  the last action token of each turn. weights_version: `[T]` int32, −1 where not an
  action. group_id, episode_id: the env group and its episode, which together name
  the task; member: which of the group's attempts; step: the turn, for step rows.
  tag: the environment's tag. episode_seed: the seed every member plays.
  stop_reason: one of STOP_REASONS. messages: the conversation as text.
  is_expert: written by someone else, not by the policy. is_greedy: played at
  temperature 0, as a baseline, and not learned from. weight: multiplies the row's
  policy loss; shapers set it.
  metrics: numbers to average. columns: values for dumps. extras: state hash, images …
  """

  tokens: np.ndarray
  action_mask: np.ndarray
  rollout_logprobs: np.ndarray
  rewards: np.ndarray
  weights_version: np.ndarray
  group_id: int = 0
  episode_id: int = 0
  member: int = 0
  step: int = 0
  tag: str = ''
  episode_seed: int = 0
  stop_reason: str = 'finish'
  is_expert: bool = False
  is_greedy: bool = False
  weight: float = 1.0
  messages: list[Message] = dataclasses.field(default_factory=list)
  metrics: dict[str, float] = dataclasses.field(default_factory=dict)
  columns: dict[str, Any] = dataclasses.field(default_factory=dict)
  extras: dict[str, Any] = dataclasses.field(default_factory=dict)

  @property
  def score(self) -> float:
    """The episode's return: the plain sum of its rewards."""
    return float(np.sum(self.rewards, dtype=np.float64))

  @property
  def failed(self) -> bool:
    """True when the episode broke and must not be trained on."""
    return self.stop_reason in FAILURES

  @property
  def group_name(self) -> str:
    """Names the group's task; equal for all members."""
    return f'{self.group_id}_{self.episode_id}_{self.episode_seed}'

  @property
  def trajectory_id(self) -> str:
    """Unique within a run and mode."""
    return f'{self.tag}_{self.group_name}_{self.member}_{self.step}'


Group = list[Trajectory]  # the attempts at one task


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class Batch:
  """A rectangle of B rows by T tokens; a column that is not there is None.

  tokens: `[B, T]` int32. segment_ids: `[B, T]` int32, 0 at padding.
  action_mask: `[B, T]` bool. rollout_logprobs, rewards: `[B, T]` float32.
  task_ids (the group), run_ids (the episode), step_ids (its turn): `[B]` dense
  int32, −1 at padding rows, which enter no statistic.
  The optional columns are `[B, T]` float32 except weights_version `[B, T]` int32,
  expert_mask and greedy_mask `[B]` bool, loss_weights `[B]` float32, pair_ids and
  state_hash `[B]` int32, teacher_topk_ids and teacher_topk_logprobs `[B, T, K]` int32
  and float32, routed_experts `[B, T, L, k]` int16, −1 where a router is to choose.
  """

  tokens: Any
  segment_ids: Any
  action_mask: Any
  rollout_logprobs: Any
  rewards: Any
  task_ids: Any
  run_ids: Any
  step_ids: Any
  weights_version: Any = None
  old_logprobs: Any = None
  ref_logprobs: Any = None
  teacher_logprobs: Any = None
  teacher_topk_ids: Any = None
  teacher_topk_logprobs: Any = None
  values: Any = None
  advantages: Any = None
  returns: Any = None
  expert_mask: Any = None
  greedy_mask: Any = None
  loss_weights: Any = None
  pair_ids: Any = None
  state_hash: Any = None
  routed_experts: Any = None
  extras: Any = None

  def replace(self, **columns: Any) -> 'Batch':
    return dataclasses.replace(self, **columns)


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class Rows:
  """How the tokens of a rectangle `[B, T]` lie in R packed rows of L slots.

  origin: `[R, L]` int32, b · T + t of the token in a slot, −1 at padding.
  segment_ids: `[R, L]` int32, 0 at padding. prefix_ids: `[R, L]` int32, the number of
  an earlier segment of the row that a token sees beside its own, 0 for none; or None.
  positions: `[R, L]` int32, of a token in its sequence. place: `[B, T]` int32,
  r · L + c of the slot that holds what is said of a token, −1 where nothing is.

  A shared prompt lies in a row as [prompt but its last token][last prompt token and
  response 1][last prompt token and response 2] …, the first part being the prefix of
  the others: so a slot has one target, the next one of its segment.
  """

  origin: Any
  segment_ids: Any
  prefix_ids: Any
  positions: Any
  place: Any


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class PolicyOutputs:
  """What one forward pass says of a batch; all `[B, T]` float32.

  logprobs: log π(tokens[t] | tokens[<t]) at the rollout's temperature; 0 at t = 0.
  entropy: of the full distribution at temperature 1 that predicted token t.
  values: the value head's estimate of the state before token t, or None.
  nec: Σ_v π(v)²(H + log π(v)) of the same distribution as entropy, or None.
  topk_logprobs: `[B, T, K]` of K given tokens in the place of token t, or None.
  topk_ids: `[B, T, K]` int32, those tokens, where they were found and not given.
  """

  logprobs: Any
  entropy: Any = None
  values: Any = None
  nec: Any = None
  topk_logprobs: Any = None
  topk_ids: Any = None


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class Advantages:
  """advantages, returns: `[B, T]` float32, 0 where the mask is 0; returns may be None.

  keep: `[B, T]` bool or None; tokens to leave out of the loss are False.
  metrics: name → scalar array. state: what an estimator that reads `state` carries to
  the next batch, of the structure it was given.
  """

  advantages: Any
  returns: Any = None
  keep: Any = None
  metrics: dict[str, Any] = dataclasses.field(default_factory=dict)
  state: Any = None


@dataclasses.dataclass(frozen=True)
class Algorithm:
  """An algorithm is a composition of plain functions.

  A part names the columns it reads as its positional parameters (`logprobs`,
  `advantages`, `mask`, `task_ids` …) and its options as keyword-only parameters.
  What the learner must score follows from those signatures.

  behaviour: 'rollout' gives parts the engine's log-probs as `old_logprobs`;
    'decoupled' gives them the learner's own, recomputed before the first update.
  correction: weights for what lies between the two; it implies 'decoupled'.
  kl_controller: steers the coefficient of kl_loss and kl_penalty; None keeps it.
  aggregation: a mode of `functional.aggregation`. group_size: attempts per task.
  schema: 'rollout', 'messages', 'preference' or 'text'. atom: rows that are never
  split or shuffled apart: 'row', 'pair' or 'group'.
  sampler: a call string, where a step's groups come from. filters, shapers: call
  strings, joined by ' + '; which groups are dropped, and what is done to the others.
  critic_warmup: first steps that train the value head alone.
  prepare: once per optimizer batch. init_state: makes the state that it carries.
  """

  policy_loss: Callable[..., Any]
  advantage: Callable[..., Advantages] | None = None
  kl_loss: Callable[..., Any] | None = None
  kl_penalty: Callable[..., Any] | None = None
  entropy_loss: Callable[..., Any] | None = None
  value_loss: Callable[..., Any] | None = None
  correction: Callable[..., Any] | None = None
  kl_controller: Callable[..., Any] | None = None
  aggregation: str = 'token_mean'
  behaviour: str = 'rollout'
  group_size: int = 1
  sampler: str = 'fifo'
  filters: str = ''
  shapers: str = ''
  schema: str = 'rollout'
  atom: str = 'row'
  critic_warmup: int = 0
  prepare: Callable[..., Any] | None = None
  init_state: Callable[[], Any] | None = None
