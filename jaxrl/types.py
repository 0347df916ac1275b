"""Types that flow between the parts of the framework.

Every `[B, T]` array describes the token at its own position: `logprobs[b, t]` is the
log-probability of `tokens[b, t]` given the tokens before it. Only the function that
turns hidden states into `PolicyOutputs` shifts.
"""

import dataclasses
import functools
from collections.abc import Awaitable, Callable, Mapping, Sequence
from typing import Any, Literal, Protocol, TypeVar

import jax
import numpy as np

from jaxrl.component_calls import parse_call
from jaxrl.component_table import Component, Configurable, as_call, as_calls

Array = jax.Array
AnyArray = Any  # numpy's or JAX's, one that is traced, or the shape of one
PyTree = Any  # arrays in nested dicts, lists and tuples
Params = PyTree  # of a model: nested dicts keyed by name
StateDict = dict[str, Any]  # what a checkpoint keeps of an object, beside arrays
Message = dict[str, Any]  # {'role': …, 'content': …}, as chat templates take it

# Why an episode ended. Those after 'max_steps' mark trajectories unfit for training.
STOP_REASONS = (
  'finish',
  'max_length',
  'max_steps',
  'abort',
  'prompt_too_long',
  'env_reset_failed',
  'env_timeout',
  'env_error',
  'generate_failed',
  'reward_failed',
)
FAILURES = frozenset(STOP_REASONS[3:])
TEACHER_PROMPT_KEY = 'teacher_prompt'  # in a row's extras: ids that its teacher reads
TASK_KEY = 'task'  # in a row's extras: columns of its task, by name
PLAYER_KEY = 'player'  # in a row's extras: which player's row it is, of several
MAX_ROLES = 8  # roles of agents, numbered from 0
MAX_REWARD_TERMS = 8  # rewards that can be told apart, the environment's own included


@dataclasses.dataclass(frozen=True)
class Task:
  """A task is an item of a dataset, or a bare seed for a game.

  Attributes:
    seed: The episode seed that drew this task (0 is a seed like any other).
    index: The row number of the item in its dataset; None for a bare seed.
    item: The row of the dataset; None for a bare seed.
  """

  seed: int
  index: int | None = None
  item: Mapping[str, Any] | None = None


@dataclasses.dataclass(frozen=True)
class TextConstraint:
  """A text constraint says which completions may be drawn at all.

  Attributes:
    alternatives: What may be written: each a beginning, a JSON schema as JSON text,
      whose value follows, and an end.
  """

  alternatives: tuple[tuple[str, str, str], ...]


@dataclasses.dataclass(frozen=True)
class SamplingParams:
  """Sampling parameters say how one completion is drawn.

  Attributes:
    max_tokens: The most tokens to generate from here on.
    temperature: 0 means greedy.
    top_p: 1 keeps all tokens.
    top_k: 0 keeps all tokens.
    stop: Strings that end the completion; they are kept in its tokens.
    stop_token_ids: Token ids that end it; the last token is kept.
    seed: Token t is drawn with the key fold_in(key(seed), t).
    num_generated: The number of already generated tokens at the end of the prompt, when
      resuming; the next token is token `num_generated`.
    top_logprobs: How many of the likeliest tokens are told in each place.
    constraint: What the completion must be; None for any text.
  """

  max_tokens: int
  temperature: float = 1.0
  top_p: float = 1.0
  top_k: int = 0
  stop: tuple[str, ...] = ()
  stop_token_ids: tuple[int, ...] = ()
  seed: int = 0
  num_generated: int = 0
  top_logprobs: int = 0
  constraint: TextConstraint | None = None


@dataclasses.dataclass(frozen=True)
class Completion:
  """A completion is what an engine returns; n is the number of new tokens.

  Attributes:
    tokens: `[n]` int32.
    logprobs: `[n]` float32, of each token under the distribution it was sampled from,
      temperature and truncation included.
    weights_versions: `[n]` int32, the weights version that produced each token.
    finish_reason: 'stop' (stop token or string), 'length' or 'abort'.
    routed_experts: `[p + n − 1, L, k]` int16, the experts that each of p prompt tokens
      and of the new ones but the last took in each layer, if the engine records them.
    top_logprobs: For each new token, the likeliest tokens in its place with their
      log-probabilities, the likeliest first, if they were asked for.
  """

  tokens: np.ndarray
  logprobs: np.ndarray
  weights_versions: np.ndarray
  finish_reason: str
  routed_experts: np.ndarray | None = None
  top_logprobs: tuple[dict[int, float], ...] | None = None


class PromptTooLongError(ValueError):
  """A prompt does not fit the window of an engine.

  It ends an episode as `max_length`, or as `prompt_too_long` if there is no reply yet.
  Any other error of an engine fails the episode as `generate_failed`.
  """


Value = TypeVar('Value')
# What a method returns: a value, or an awaitable of it if the object lives elsewhere.
MaybeAwaitable = Value | Awaitable[Value]


class TaskSource(Protocol):
  """Serves tasks: a `GlobalDataset`, or the handle of one in another process."""

  def get_task(self, seed: int, index: int) -> 'MaybeAwaitable[Task | None]':
    """Returns the task of an episode; None at the end of the data.

    Args:
      seed: The episode's seed.
      index: The number of the group among those of its tag.
    """
    ...

  def get_size(self) -> MaybeAwaitable[int]:
    """Returns the number of tasks."""
    ...


class Pixels(Protocol):
  """An image, such as `jaxrl.data.images.Image`."""

  @functools.cached_property
  def digest(self) -> str:
    """Returns a name of its contents."""
    ...

  @property
  def width(self) -> int:
    """Returns the pixels of a row."""
    ...

  @property
  def height(self) -> int:
    """Returns the pixels of a column."""
    ...

  def array(self) -> np.ndarray:
    """Returns the pixels, uint8 `[H, W, 3]`."""
    ...


class TokenGenerator(Protocol):
  """Generates tokens: an engine, or a router to several of them."""

  async def generate(
    self,
    request_id: str,
    token_ids: Sequence[int],
    sampling: SamplingParams,
    images: Sequence[Pixels] = (),
  ) -> Completion:
    """Completes a prompt.

    Args:
      request_id: A name for `abort` and `progress`.
      token_ids: The prompt.
      sampling: How tokens are drawn.
      images: The prompt's images, in the order of their runs of placeholders.

    Returns:
      The completion.

    Raises:
      PromptTooLongError: If the prompt does not fit.
    """
    ...

  async def abort(self, request_id: str) -> None:
    """Ends a request with finish_reason 'abort'.

    Args:
      request_id: Unknown ids are ignored.
    """
    ...

  async def progress(self, request_ids: Sequence[str]) -> dict[str, Completion]:
    """Returns what requests have generated so far.

    Args:
      request_ids: The requests.

    Returns:
      A partial completion for each of them that is being served.
    """
    ...


class RolloutEngine(TokenGenerator, Protocol):
  """An engine. One request is one sequence; requests are independent."""

  async def load(self, version: int, params: Params) -> None:
    """Serves new weights from the next decode step on.

    Args:
      version: Their number.
      params: The parameters.
    """
    ...

  async def pause(self) -> None:
    """Stops decoding until `resume`."""
    ...

  async def drain(self) -> None:
    """Finishes running requests, starts no others, and pauses; others wait."""
    ...

  async def resume(self) -> None:
    """Continues after `pause` or `drain`."""
    ...


@dataclasses.dataclass
class Trajectory:
  """A trajectory is one training row on the host: ragged numpy arrays of T tokens.

  Attributes:
    tokens: `[T]` int32.
    action_mask: `[T]` bool, True where the model wrote the token.
    rollout_logprobs: `[T]` float32, 0 where not an action.
    rewards: `[T]` float32, on the last action token of each turn.
    weights_version: `[T]` int32, −1 where not an action.
    env_group: The environment group, an env manager's `group_id`; with episode_id it
      names the task.
    episode_id: The episode of the group.
    sample_index: Which of the group's samples it is.
    turn: The turn, if each turn is a row.
    tag: The environment's tag.
    episode_seed: The seed that every sample of the group plays.
    stop_reason: One of STOP_REASONS.
    is_expert: Whether someone other than the policy wrote it.
    is_greedy: Whether it was played at temperature 0, as a baseline, and is not learned
      from.
    weight: Multiplies the row's policy loss; reward shaping sets it.
    messages: The conversation as text.
    metrics: Numbers to average.
    columns: Values for dumps.
    extras: State hash and the like.
    images: The images that it has, in the order of their runs of placeholders in
      tokens.
  """

  tokens: np.ndarray
  action_mask: np.ndarray
  rollout_logprobs: np.ndarray
  rewards: np.ndarray
  weights_version: np.ndarray
  env_group: int = 0
  episode_id: int = 0
  sample_index: int = 0
  turn: int = 0
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
  images: list[Any] = dataclasses.field(default_factory=list)

  @property
  def score(self) -> float:
    """Returns the episode's return, the plain sum of its rewards."""
    return float(np.sum(self.rewards, dtype=np.float64))

  @property
  def failed(self) -> bool:
    """Returns True if the episode broke and must not be trained on."""
    return self.stop_reason in FAILURES

  @property
  def group_name(self) -> str:
    """Names the task of the group; equal for all its samples."""
    return f'{self.env_group}_{self.episode_id}_{self.episode_seed}'

  @property
  def trajectory_id(self) -> str:
    """Names the trajectory uniquely within a run and mode."""
    return f'{self.tag}_{self.group_name}_{self.sample_index}_{self.turn}'


Group = list[Trajectory]  # the attempts at one task


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class Batch:
  """A batch is a rectangle of B rows by T tokens; a field that is absent is None.

  Padding rows have id −1 and enter no statistic. The optional fields are `[B, T]`
  float32 where nothing else is said.

  Attributes:
    tokens: `[B, T]` int32.
    segment_ids: `[B, T]` int32, 0 at padding.
    action_mask: `[B, T]` bool.
    rollout_logprobs: `[B, T]` float32.
    rewards: `[B, T]` float32.
    group_ids: `[B]` dense int32, the group of each row.
    episode_ids: `[B]` dense int32, the episode of each row.
    turn_ids: `[B]` int32, the turn of each row in its episode.
    weights_version: `[B, T]` int32.
    old_logprobs: The learner's own log-probs before the update.
    ref_logprobs: The reference's log-probs.
    teacher_logprobs: The teacher's log-probs.
    teacher_topk_ids: `[B, T, K]` int32, the teacher's likeliest tokens.
    teacher_topk_logprobs: `[B, T, K]` float32, their log-probs.
    teacher_mask: `[B, T]` bool, where the teacher has something to teach.
    values: The critic's values.
    advantages: Advantages.
    returns: Targets of the critic.
    expert_mask: `[B]` bool.
    greedy_mask: `[B]` bool.
    loss_weights: `[B]` float32.
    pair_ids: `[B]` int32, equal for the two rows of a pair.
    state_hash: `[B]` int32.
    role_ids: `[B]` int32, the role of the agent that wrote a row.
    reward_terms: `[B, 8]` the scores of an episode's rewards, before their weights.
    reward_weights: `[B, 8]` their weights, 0 where there is none.
    step_ends: `[B, T]` bool, True at the last token of each step that was rewarded, and
      of each turn.
    routed_experts: `[B, T, L, k]` int16, −1 where the router is to choose.
    image_features: `[B, T]` int32, which feature of an image stands at a token; see
      `jaxrl.models.vision.image_places.ImagePlaces`.
    image_positions: `[B, T, 3]` int32, likewise, in time, row and column.
    patch_rows: The batch's images as `PatchRows`, whose rows are not those of the
      batch.
    extras: Anything else.
  """

  tokens: AnyArray
  segment_ids: AnyArray
  action_mask: AnyArray
  rollout_logprobs: AnyArray
  rewards: AnyArray
  group_ids: AnyArray
  episode_ids: AnyArray
  turn_ids: AnyArray
  weights_version: AnyArray = None
  old_logprobs: AnyArray = None
  ref_logprobs: AnyArray = None
  teacher_logprobs: AnyArray = None
  teacher_topk_ids: AnyArray = None
  teacher_topk_logprobs: AnyArray = None
  teacher_mask: AnyArray = None
  values: AnyArray = None
  advantages: AnyArray = None
  returns: AnyArray = None
  expert_mask: AnyArray = None
  greedy_mask: AnyArray = None
  loss_weights: AnyArray = None
  pair_ids: AnyArray = None
  state_hash: AnyArray = None
  role_ids: AnyArray = None
  reward_terms: AnyArray = None
  reward_weights: AnyArray = None
  step_ends: AnyArray = None
  routed_experts: AnyArray = None
  image_features: AnyArray = None
  image_positions: AnyArray = None
  patch_rows: PyTree = None
  extras: PyTree = None

  def replace(self, **columns: PyTree) -> 'Batch':
    """Returns the batch with some fields replaced.

    Args:
      **columns: New values by field.
    """
    return dataclasses.replace(self, **columns)


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class TokenTree:
  """A token tree arranges a row's tokens so that sequences share all that they can.

  A token's descendants follow it without a gap, so that the earlier tokens whose
  descendants have not ended are the ones it sees.

  Attributes:
    previous: `[R, L]` int32, column of the token before it in its sequences; −1 where
      a sequence starts, and at padding.
    ends: `[R, L]` int32, column behind a token's last descendant.
  """

  previous: AnyArray
  ends: AnyArray


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class PackedRows:
  """Maps the tokens of a rectangle `[B, T]` to R packed rows of L slots.

  A shared prompt lies in a row as [prompt without its last token][last prompt token and
  response 1][last prompt token and response 2] …, the first part being the prefix of
  the others: so a slot predicts one token, the next one of its segment. In a tree each
  shared token has one slot, whatever tokens follow it.

  Attributes:
    origin: `[R, L]` int32, b · T + t of the token in a slot, −1 at padding; of one of
      its tokens, if sequences share it.
    segment_ids: `[R, L]` int32, 0 at padding.
    prefix_ids: `[R, L]` int32, the number of an earlier segment of the row that a token
      sees beside its own, 0 for none; or None.
    positions: `[R, L]` int32, of a token in its sequence.
    place: `[B, T]` int32, r · L + c of the slot that holds the outputs for a token, −1
      where there are none.
    tree: The tree of the tokens; None if sequences share prompts or nothing.
  """

  origin: AnyArray
  segment_ids: AnyArray
  prefix_ids: AnyArray
  positions: AnyArray
  place: AnyArray
  tree: TokenTree | None = None


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class PolicyOutputs:
  """Policy outputs are what one forward pass says of a batch, all `[B, T]` float32.

  Attributes:
    logprobs: log π(tokens[t] | tokens[<t]) at the rollout's temperature; 0 at t = 0.
    entropy: Of the full distribution at temperature 1 that predicted token t.
    values: The value head's estimate of the state before token t, or None.
    nec: Σ_v π(v)²(H + log π(v)) of the same distribution as entropy, or None.
    sum_pi_squared: Σ_v π(v)² of the same distribution, without gradient, or None.
    topk_logprobs: `[B, T, K]` of K given tokens in the place of token t, or None.
    topk_ids: `[B, T, K]` int32, those tokens, where the model found them.
  """

  logprobs: AnyArray
  entropy: AnyArray = None
  values: AnyArray = None
  nec: AnyArray = None
  sum_pi_squared: AnyArray = None
  topk_logprobs: AnyArray = None
  topk_ids: AnyArray = None


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class Advantages:
  """Advantages are what an advantage component returns.

  Attributes:
    advantages: `[B, T]` float32, 0 where the mask is 0.
    returns: `[B, T]` float32, or None.
    keep: `[B, T]` bool or None; tokens to leave out of the loss are False.
    metrics: Name → scalar array.
    state: What a component with a state carries to the next batch, of the structure it
      was given.
  """

  advantages: AnyArray
  returns: AnyArray = None
  keep: AnyArray = None
  metrics: dict[str, Array] = dataclasses.field(default_factory=dict)
  state: PyTree = None


@dataclasses.dataclass(frozen=True)
class SelfTeacher:
  """A self-teacher is the policy itself, shown more than the student is.

  Attributes:
    context: What it is shown: a call or class as in
      `jaxrl.rollout.queue.teacher_contexts`.
    params: Its parameters: 'live', those of the student before each update; 'initial',
      those that training began with; 'ema', a moving average of the student's.
    update_rate: The student's share in each step of the average.
    support: Whose likeliest tokens the two are compared on, 'student' or 'teacher'.
    max_tokens: Tokens that its prompt may have; 0 for twice the longest row.
  """

  context: Component
  params: Literal['live', 'initial', 'ema'] = 'live'
  update_rate: float = 0.05
  support: Literal['student', 'teacher'] = 'student'
  max_tokens: int = 0

  def __post_init__(self) -> None:
    if isinstance(self.context, str):
      object.__setattr__(self, 'context', parse_call(self.context))


@dataclasses.dataclass(frozen=True)
class Algorithm:
  """An algorithm is a composition of plain functions, its components.

  A component names the batch fields it reads as its positional parameters (`logprobs`,
  `advantages`, `mask`, `group_ids` …) and its options as keyword-only parameters. What
  the learner must score follows from those signatures.

  Attributes:
    policy_loss: The loss of the policy.
    advantage: Estimates advantages; None if the loss reads none.
    kl_loss: A KL estimator that is added to the loss.
    kl_penalty: A KL estimator that is subtracted from rewards.
    entropy_loss: The entropy bonus.
    value_loss: The critic's loss; an algorithm with one trains a value head.
    correction: Weights for the mismatch between rollout and learner; it implies
      'decoupled'.
    kl_controller: Steers the coefficient of kl_loss and kl_penalty; None keeps it.
    aggregation: A mode of `functional.aggregation`, with the length it may take.
    old_logprobs_source: 'rollout' gives components the engine's log-probs as
      `old_logprobs`; 'decoupled' gives them the learner's own, recomputed before the
      first update.
    group_size: Samples per task.
    sampler: Where a step's groups come from: a call, or a class like
      `jaxrl.data.samplers.Sampler`.
    filters: Which groups are dropped: calls, or classes.
    shapers: What is done to the rewards of the others: calls, or functions.
    data_format: 'rollout', 'messages', 'preference' or 'text'.
    batch_unit: Rows that are never separated or shuffled apart: 'row', 'pair' or
      'group'.
    critic_warmup: First steps that train the value head alone.
    prepare: Computes batch fields once per optimizer batch.
    init_state: Makes the state that `prepare` carries.
    self_teacher: Makes the policy its own teacher; None for another teacher, or none.
    provenance: Whose values a builder's defaults are, for the catalogue: 'paper',
      'trinity' (Trinity-RFT), 'verl', 'trl', 'prime-rl' or 'ours'; '' if it does not
      say.
  """

  policy_loss: Configurable
  advantage: Callable[..., Advantages] | None = None
  kl_loss: Configurable | None = None
  kl_penalty: Configurable | None = None
  entropy_loss: Configurable | None = None
  value_loss: Configurable | None = None
  correction: Configurable | None = None
  kl_controller: Configurable | None = None
  aggregation: Component = 'token_mean'
  old_logprobs_source: str = 'rollout'
  group_size: int = 1
  sampler: Component = 'fifo'
  filters: tuple[Component, ...] = ()
  shapers: tuple[Component, ...] = ()
  data_format: str = 'rollout'
  batch_unit: str = 'row'
  critic_warmup: int = 0
  prepare: Configurable | None = None
  init_state: Callable[[], PyTree] | None = None
  self_teacher: SelfTeacher | None = None
  provenance: str = dataclasses.field(default='', compare=False)

  def __post_init__(self) -> None:
    # A component without options may be given by its name alone.
    object.__setattr__(self, 'aggregation', as_call(self.aggregation))
    if isinstance(self.sampler, str):
      object.__setattr__(self, 'sampler', as_call(self.sampler))
    object.__setattr__(self, 'filters', as_calls(self.filters))
    object.__setattr__(self, 'shapers', as_calls(self.shapers))
