"""RolloutCache records what an episode produces, token by token.

Tokens in, tokens out: the ids that the engine returned are the ids trained on, and
only new observations are tokenized.
"""

import dataclasses
from collections.abc import Sequence
from typing import Any

from jaxrl.envs.env_registry import MAX_REWARD, is_valid_reward
from jaxrl.rollout.engine.resumable_generation import concat_routed_experts
from jaxrl.rollout.queue.group_state import EpisodeLease
from jaxrl.training.batching.batch_builder import ROUTED_EXPERTS_KEY
from jaxrl.types import FAILURES, TASK_KEY, Completion, Message, Task
from jaxrl.user_code import describe_error

MAX_ERROR_CHARS = 500  # kept of what went wrong in an episode


@dataclasses.dataclass
class Turn:
  """Marks one response within the tokens of an episode.

  Attributes:
    start: Index of the response's first token.
    stop: Index after the response's last token.
    state_hash: Hash of what the model was shown before it responded.
    reward: What the environment gave for the response.
    step_rewards: Rewards of steps that end before the response does, by the index of
      their last token in the episode.
    replayed: Whether it is that of an earlier episode: context, and not trained on.
  """

  start: int
  stop: int
  state_hash: int
  reward: float = 0.0
  step_rewards: dict[int, float] = dataclasses.field(default_factory=dict)
  replayed: bool = False


@dataclasses.dataclass
class RolloutCache:
  """Holds the state of one episode while it is played.

  Attributes:
    lease: Which sample of which group is played.
    seed: The episode seed.
    env_seed: What the environment is reset with, where that is not the episode seed.
    task: The item of the data set; None for games, whose task is the seed.
    env: The environment that plays the episode.
    chat: The chat tokenizer, with the tools that the environment offers.
    generation_prompt: What the chat template writes before a reply.
    tokens: Token ids of the whole history.
    mask: For each token, whether the model wrote it.
    logprobs: For each token, its log-probability; 0 where the model did not write it.
    versions: For each token, the weights version that wrote it, else −1.
    turns: The responses so far.
    messages: The conversation as text.
    metrics: Numbers to average.
    columns: Values for trajectory dumps.
    extras: Anything else, by name.
    images: The images of the history, each with the index after its last token.
    state_hash: Hash of the latest observation.
    terminated: Whether the environment ended the episode, as in Gymnasium.
    truncated: Whether the episode was cut short, as in Gymnasium.
    stop_reason: One of `STOP_REASONS`.
  """

  lease: EpisodeLease
  seed: int
  env_seed: int | None = None
  task: Task | None = None
  env: Any = None
  chat: Any = None
  generation_prompt: str = ''
  tokens: list[int] = dataclasses.field(default_factory=list)
  mask: list[bool] = dataclasses.field(default_factory=list)
  logprobs: list[float] = dataclasses.field(default_factory=list)
  versions: list[int] = dataclasses.field(default_factory=list)
  turns: list[Turn] = dataclasses.field(default_factory=list)
  messages: list[Message] = dataclasses.field(default_factory=list)
  metrics: dict[str, float] = dataclasses.field(default_factory=dict)
  columns: dict[str, Any] = dataclasses.field(default_factory=dict)
  extras: dict[str, Any] = dataclasses.field(default_factory=dict)
  images: list[tuple[int, Any]] = dataclasses.field(default_factory=list)
  state_hash: int = 0
  terminated: bool = False
  truncated: bool = False
  stop_reason: str = 'finish'

  @property
  def done(self) -> bool:
    """Returns whether the episode has ended."""
    return self.terminated or self.truncated

  @property
  def own_turns(self) -> list[Turn]:
    """Returns the responses that were generated in this episode, not replayed."""
    return [turn for turn in self.turns if not turn.replayed]

  @property
  def failed(self) -> bool:
    """Returns whether the episode failed and must not be trained on."""
    return self.stop_reason in FAILURES

  @property
  def turn_number(self) -> int:
    """Returns the number of the turn that is being played, from 0."""
    return len(self.turns)

  def keep_columns(self, keys: Sequence[str]) -> None:
    """Keeps columns of the task, those that it has, for the episode's rows."""
    item = (self.task and self.task.item) or {}
    if kept := {key: str(item[key]) for key in keys if item.get(key) is not None}:
      self.extras[TASK_KEY] = kept

  def append_observation(self, tokens: list[int]) -> None:
    """Appends the ids of what the model is shown."""
    self.tokens += tokens
    self.mask += [False] * len(tokens)
    self.logprobs += [0.0] * len(tokens)
    self.versions += [-1] * len(tokens)

  def add_images(self, chat: Any, tokens: list[int], messages: list[Message]) -> None:
    """Records the images of an observation, before its ids are appended.

    Args:
      chat: The chat tokenizer that encoded it.
      tokens: The ids that will be appended.
      messages: The observation.
    """
    from jaxrl.data.images import find_images  # text alone needs none

    ends, start = chat.image_ends(tokens, messages), len(self.tokens)
    pairs = zip(ends, find_images(messages), strict=False)  # some may be cut off
    self.images += [(start + end, image) for end, image in pairs]

  def append_response(self, completion: Completion) -> None:
    """Appends what the model wrote, as the engine returned it, as a new turn."""
    start = len(self.tokens)
    self.tokens += completion.tokens.tolist()
    self.mask += [True] * len(completion.tokens)
    self.logprobs += completion.logprobs.tolist()
    self.versions += completion.weights_versions.tolist()
    if completion.routed_experts is not None:
      self.extras[ROUTED_EXPERTS_KEY] = concat_routed_experts(
        self.extras.get(ROUTED_EXPERTS_KEY), completion.routed_experts
      )
    self.turns.append(Turn(start, len(self.tokens), self.state_hash))

  def append_replayed(self, tokens: list[int]) -> None:
    """Appends a response of an earlier episode as a turn of this one.

    Args:
      tokens: Its token ids. They are context, as observations are.
    """
    start = len(self.tokens)
    self.append_observation(tokens)
    turn = Turn(start, len(self.tokens), self.state_hash, replayed=True)
    self.turns.append(turn)

  def check_rewards(self) -> None:
    """Makes the episode a failure if weights or sums made its rewards too large."""
    size = sum(
      abs(reward)
      for turn in self.turns
      for reward in (turn.reward, *turn.step_rewards.values())
    )
    if is_valid_reward(size):
      return
    for turn in self.turns:
      turn.reward = 0.0
      turn.step_rewards.clear()
    error = f'its rewards sum up to {size}; the largest allowed is {MAX_REWARD:g}'
    self.truncate('reward_failed', error)

  def truncate(self, reason: str, error: BaseException | str = '') -> None:
    """Cuts the episode short.

    Args:
      reason: One of `STOP_REASONS`.
      error: What went wrong; kept as text in `extras['error']`.
    """
    self.truncated, self.stop_reason = True, reason
    if error:
      text = error if isinstance(error, str) else describe_error(error)
      if len(text) > MAX_ERROR_CHARS:  # its end says where in the code it arose
        half = MAX_ERROR_CHARS // 2
        text = f'{text[:half]} … {text[-half:]}'
      self.extras['error'] = text
