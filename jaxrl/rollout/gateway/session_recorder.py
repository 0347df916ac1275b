"""The session recorder keeps an agent's conversations as a tree of token replies.

A conversation that an agent sends back is recognized by its messages. Its longest
recorded beginning stands as the ids that the engine was given and returned, and only
what follows is tokenized. Where two conversations part, the tree branches.
"""

import dataclasses
import hashlib
import json
import zlib
from array import array
from collections.abc import Mapping, Sequence

import numpy as np

from jaxrl.data.chat_tokenizer import ChatTokenizer, has_images
from jaxrl.group_stats import RESPONSE_TRUNCATED
from jaxrl.options import JsonObject
from jaxrl.rollout.episodes.rollout_cache import RolloutCache
from jaxrl.rollout.episodes.row_format import ROW_FORMATS
from jaxrl.rollout.gateway.request_cache import MAX_CACHED
from jaxrl.rollout.queue.group_state import EpisodeLease
from jaxrl.types import Completion, Message, Pixels, Trajectory

_TOKEN_BYTES = array('q').itemsize


@dataclasses.dataclass(eq=False)
class RecordedReply:
  """Holds one completion and its place in the tree.

  Attributes:
    name: The reply's id, as clients know it.
    parent: The reply before it in the conversation.
    new_tokens: The prompt ids that followed the parent.
    completion: What the engine returned.
    messages: The messages of `new_tokens`, and the reply's own message last; empty for
      prompts given as ids.
    digest: Digest of the conversation up to and including this reply.
    reward: The reward given for it so far.
  """

  name: str
  parent: 'RecordedReply | None'
  new_tokens: list[int]
  completion: Completion
  messages: list[Message]
  digest: bytes
  reward: float = 0.0

  @property
  def path(self) -> list['RecordedReply']:
    """Returns the replies of this conversation in order, up to this one."""
    path, reply = [], self
    while reply is not None:
      path.append(reply)
      reply = reply.parent
    return path[::-1]

  @property
  def tokens(self) -> list[int]:
    """Returns all token ids up to the end of this reply."""
    return [
      token
      for reply in self.path
      for token in (*reply.new_tokens, *reply.completion.tokens.tolist())
    ]


@dataclasses.dataclass(frozen=True)
class SessionPrompt:
  """Holds what an engine is to complete.

  Attributes:
    tokens: All prompt ids.
    new_tokens: The last of `tokens`, which follow the parent reply.
    parent: The recorded reply that the prompt continues, or None.
    messages: The messages of `new_tokens`.
    digest: Digest of the conversation up to the end of the prompt.
    images: The images of the whole prompt.
  """

  tokens: list[int]
  new_tokens: list[int]
  parent: RecordedReply | None
  messages: list[Message]
  digest: bytes
  images: tuple[Pixels, ...] = ()


class AgentSession:
  """Records the conversations of one agent at one task.

  Attributes:
    replies: All replies by name, in the order of recording.
  """

  def __init__(self, chat: ChatTokenizer, lease: EpisodeLease, *, seed: int = 0):
    """Creates an empty session.

    Args:
      chat: The chat tokenizer of the engine's model.
      lease: Which sample of which group the agent plays.
      seed: The episode seed.
    """
    self._chat = chat
    self._lease = lease
    self._seed = seed
    self.replies: dict[str, RecordedReply] = {}
    self._by_digest: dict[bytes, RecordedReply] = {}
    # Digests of conversations whose last reply is spelt otherwise → the proper digest.
    self._aliases: dict[bytes, bytes] = {}
    # Replies to prompts given as ids: digest of all ids → (number of ids, reply).
    self._by_token_digest: dict[bytes, tuple[int, RecordedReply]] = {}
    # The latest conversations with the digests of all their beginnings.
    self._recent: list[tuple[list[Message], list[bytes]]] = []
    self._latest: tuple[RecordedReply | None, list[int]] = (None, [])  # and its tokens

  def make_prompt(
    self,
    messages: Sequence[Message],
    tools: Sequence[JsonObject] = (),
    template_options: Mapping[str, object] | None = None,
    *,
    max_length: int | None = None,
  ) -> SessionPrompt:
    """Builds the ids that ask for a reply to a conversation.

    If several recorded replies read alike in the same place, the latest is meant.

    Args:
      messages: The whole conversation, in the form of `data.chat_messages`.
      tools: The tools that the agent offers.
      template_options: Options of the chat template. A recorded beginning that they
        would change is not continued.
      max_length: Tokens of the window. A prompt that does not fit may lack its end, but
        has at least this many tokens.

    Returns:
      The prompt.

    Raises:
      ValueError: If the chat template refuses the messages.
    """
    chat, opening = self._chat, ''
    if template_options:
      plain, chat = chat, chat.with_options(**template_options)
      opening = chat.opening() if chat.opening() != plain.opening() else ''
    if tools:
      chat = chat.with_tools(tools)
    digests = self._digests(messages, [*tools, opening] if opening else tools)
    recorded = (i for i in range(len(messages), 0, -1) if digests[i] in self._by_digest)
    num_recorded = next(recorded, 0)
    parent = self._by_digest[digests[num_recorded]] if num_recorded else None
    new_messages = list(messages[num_recorded:])
    latest, prefix = self._latest
    if parent is not latest:
      prefix = parent.tokens if parent else []
    needed = None if max_length is None else max(max_length - len(prefix), 1)
    if parent is None:
      new_tokens = chat.encode_prompt(new_messages, max_tokens=needed)
    else:
      reply = parent.completion.tokens
      new_tokens = chat.encode_next_prompt(new_messages, reply=reply, max_tokens=needed)
    if needed is not None and len(new_tokens) >= needed:
      self._recent.pop()  # it is refused, and may hold megabytes
    prompt = prefix + new_tokens
    images = _images(messages)
    return SessionPrompt(prompt, new_tokens, parent, new_messages, digests[-1], images)

  def _digests(
    self, messages: Sequence[Message], tools: Sequence[object]
  ) -> list[bytes]:
    """Returns the digest of every beginning of the conversation, the empty one first.

    A message object that was in an earlier conversation is not digested again.
    """
    digests = [_digest(b'', list(tools))]
    source: list[Message] | None = None
    for earlier, earlier_digests in reversed(self._recent):
      pairs = enumerate(zip(earlier, messages, strict=False))
      shorter = min(len(earlier), len(messages))
      num_same = next((i for i, (a, b) in pairs if a is not b), shorter)
      if earlier_digests[0] == digests[0] and num_same >= len(digests):
        digests, source = earlier_digests[: num_same + 1], earlier
      if source is earlier and num_same == len(earlier):
        # This conversation continues the earlier one and takes its place.
        self._recent = [entry for entry in self._recent if entry[0] is not earlier]
        break
    for message in messages[len(digests) - 1 :]:
      digest = _digest(digests[-1], message)
      digests.append(self._aliases.get(digest, digest))
    self._recent = [*self._recent[-MAX_CACHED:], (list(messages), digests)]
    return digests

  def make_token_prompt(self, tokens: Sequence[int]) -> SessionPrompt:
    """Builds a prompt of ids as they stand.

    Args:
      tokens: The prompt ids. They continue a recorded reply that they begin with.

    Returns:
      The prompt.
    """
    tokens, parent, num_recorded = list(tokens), None, 0
    data, num_hashed, running = _to_bytes(tokens), 0, hashlib.sha256()
    # Copies the values: another thread may record a reply meanwhile.
    for size in sorted({size for size, _ in list(self._by_token_digest.values())}):
      if size >= len(tokens):
        break
      running.update(data[num_hashed * _TOKEN_BYTES : size * _TOKEN_BYTES])
      num_hashed = size
      if (entry := self._by_token_digest.get(running.digest())) is not None:
        num_recorded, parent = entry
    return SessionPrompt(tokens, tokens[num_recorded:], parent, [], b'')

  def record(
    self,
    name: str,
    prompt: SessionPrompt,
    completion: Completion,
    message: Message | None = None,
    other_spellings: Sequence[Message] = (),
  ) -> RecordedReply:
    """Records what the engine returned for a prompt.

    Args:
      name: The reply's id, as clients know it.
      prompt: What was completed.
      completion: What the engine returned.
      message: The reply as the agent receives it and will send it back; None for
        prompts given as ids.
      other_spellings: The same reply as agents send it back through other APIs.

    Returns:
      The recorded reply.

    Raises:
      ValueError: If the completion has no token.
    """
    if not len(completion.tokens):
      raise ValueError('the engine returned no token')
    messages = prompt.messages if message is None else [*prompt.messages, message]
    digest = prompt.digest if message is None else _digest(prompt.digest, message)
    reply = RecordedReply(
      name, prompt.parent, prompt.new_tokens, completion, messages, digest
    )
    self.replies[name] = reply
    tokens = prompt.tokens + completion.tokens.tolist()
    self._latest = reply, tokens
    if message is None:
      token_digest = hashlib.sha256(_to_bytes(tokens)).digest()
      self._by_token_digest.setdefault(token_digest, (len(tokens), reply))
    else:
      self._by_digest[digest] = reply
      for spelling in other_spellings:
        self._aliases[_digest(prompt.digest, spelling)] = digest
    return reply

  def leaves(self) -> list[RecordedReply]:
    """Returns the replies that no other continues, in the order of recording."""
    parents = {id(reply.parent) for reply in self.replies.values()}
    return [reply for reply in self.replies.values() if id(reply) not in parents]

  def add_reward(self, value: float, name: str = '') -> None:
    """Adds a reward to one reply, or to the end of every conversation.

    Args:
      value: The reward.
      name: The reply; '' for the last reply of every conversation.

    Raises:
      KeyError: If there is no such reply.
    """
    for reply in [self.replies[name]] if name else self.leaves():
      reply.reward += value

  def rollout_caches(self) -> list[RolloutCache]:
    """Returns one rollout cache for each conversation; `trajectories` makes the rows.

    Every reply is an action once: conversations that share their beginning have it as
    actions in the first of them, with its rewards, and as context in the others.
    """
    used_names: set[str] = set()
    caches = []
    for leaf in self.leaves():
      cache = RolloutCache(self._lease, self._seed)
      for reply in leaf.path:
        if has_images(reply.messages):
          cache.add_images(self._chat, reply.new_tokens, reply.messages)
        cache.append_observation(reply.new_tokens)
        cache.messages += reply.messages
        if reply.name in used_names:
          cache.append_observation(reply.completion.tokens.tolist())
        else:
          observation = np.array(reply.new_tokens, np.int32).tobytes()
          digests = [image.digest for image in _images(reply.messages)]
          observation += ''.join(digests).encode()
          cache.state_hash = zlib.crc32(observation) >> 1
          cache.append_response(reply.completion)
          cache.turns[-1].reward = reply.reward
      used_names.update(reply.name for reply in leaf.path)
      cache.extras[RESPONSE_TRUNCATED] = leaf.completion.finish_reason == 'length'
      cache.metrics['turns'] = float(len(cache.turns))
      response_length = sum(turn.stop - turn.start for turn in cache.turns)
      cache.metrics['response_length'] = float(response_length)
      caches.append(cache)
    return caches

  def trajectories(
    self, *, row_format: str = 'trajectory', tag: str = ''
  ) -> list[Trajectory]:
    """Makes the rows of all conversations, one after the other.

    Args:
      row_format: One of `ROW_FORMATS`.
      tag: The tag of the rows.

    Returns:
      The rows, numbered by their `turn`.
    """
    make_rows = ROW_FORMATS[row_format]
    rows = [row for cache in self.rollout_caches() for row in make_rows(cache, tag)]
    for i, row in enumerate(rows):
      row.turn = i
    return rows


def _to_bytes(tokens: list[int]) -> bytes:
  return array('q', tokens).tobytes()


def _images(messages: Sequence[Message]) -> tuple[Pixels, ...]:
  """Returns the images of messages, in order."""
  if not has_images(messages):
    return ()
  from jaxrl.data.images import find_images  # text alone needs none

  return tuple(find_images(messages))


def _digest(prefix: bytes, value: object) -> bytes:
  # What JSON has no form for is an image, which its digest stands for.
  text = json.dumps(value, sort_keys=True, default=lambda image: image.mark)
  return hashlib.sha256(prefix + text.encode()).digest()
