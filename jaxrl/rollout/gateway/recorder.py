"""What one session of an agent said and heard, as tokens: a tree of replies.

A conversation that is sent back is recognised by its messages. The longest beginning
that is on record stands as the ids that the engine was given and returned; what comes
after it is tokenised, once. Where two conversations part, the tree branches.
"""

import dataclasses
import hashlib
import json
import zlib
from array import array
from collections.abc import Sequence
from typing import Any

import numpy as np

from jaxrl.data.chat import Chat
from jaxrl.rollout.episode import RolloutCache
from jaxrl.rollout.formulation import FORMULATIONS
from jaxrl.rollout.gateway.seen import KEPT
from jaxrl.rollout.group import Lease
from jaxrl.rollout.members import CUT_OFF
from jaxrl.types import Completion, Message, Trajectory

_WIDTH = array('q').itemsize


@dataclasses.dataclass(eq=False)
class Reply:
  """A completion in its place.

  parent: the reply before it in the conversation. heard: ids given since that one.
  messages: what they say, and the reply's own message last; empty for bare ids.
  digest: of the conversation up to here. reward: given for it so far.
  """

  name: str
  parent: 'Reply | None'
  heard: list[int]
  said: Completion
  messages: list[Message]
  digest: bytes
  reward: float = 0.0

  @property
  def path(self) -> list['Reply']:
    """The replies that lead here, the first one first."""
    path, at = [], self
    while at is not None:
      path.append(at)
      at = at.parent
    return path[::-1]

  @property
  def tokens(self) -> list[int]:
    """All ids up to the end of this reply."""
    return [t for r in self.path for t in (*r.heard, *r.said.tokens.tolist())]


@dataclasses.dataclass(frozen=True)
class Prompt:
  """What an engine is to complete: `tokens`, of which the last, `heard`, are new.

  parent: the reply that the others end in. messages: the new ones. digest: of the
  conversation up to their end.
  """

  tokens: list[int]
  heard: list[int]
  parent: Reply | None
  messages: list[Message]
  digest: bytes


class Session:
  """The conversations of one agent at one task.

  lease: whose attempt it is. seed: the episode's.
  """

  def __init__(self, chat: Chat, lease: Lease, *, seed: int = 0):
    self._chat, self._lease, self._seed = chat, lease, seed
    self._known: dict[bytes, Reply] = {}
    self._bare: dict[bytes, tuple[int, Reply]] = {}  # by the hash of all its ids
    self._walks: list[tuple[list[Message], list[bytes]]] = []
    self._latest: tuple[Reply | None, list[int]] = (None, [])  # and its tokens
    self.replies: dict[str, Reply] = {}

  def prompt(
    self, messages: Sequence[Message], tools: Sequence[dict[str, Any]] = ()
  ) -> Prompt:
    """The ids that ask for a reply to `messages`, in the form of `data.messages`.

    Of replies that read alike in the same place the latest is taken for the one meant.
    Raises ValueError for messages that the chat template refuses.
    """
    chat = self._chat.with_options(tools=list(tools)) if tools else self._chat
    digests = self._digests(messages, tools)
    found = (i for i in range(len(messages), 0, -1) if digests[i] in self._known)
    known = next(found, 0)
    parent = self._known[digests[known]] if known else None
    new = list(messages[known:])
    if parent is None:
      heard = chat.first_prompt(new)
    else:
      ended = bool(parent.said.tokens[-1] == chat.eos_id)
      heard = chat.next_prompt(new, ended=ended)
    latest, before = self._latest
    if parent is not latest:
      before = parent.tokens if parent else []
    return Prompt(before + heard, heard, parent, new, digests[-1])

  def _digests(
    self, messages: Sequence[Message], tools: Sequence[dict[str, Any]]
  ) -> list[bytes]:
    """Of every beginning of the conversation, that of no message first.

    A message that is the very object that came before is not looked at again.
    """
    digests = [_digest(b'', list(tools))]
    source: list[Message] | None = None
    for known, theirs in reversed(self._walks):
      pairs = enumerate(zip(known, messages, strict=False))
      least = min(len(known), len(messages))
      same = next((i for i, (a, b) in pairs if a is not b), least)
      if theirs[0] == digests[0] and same >= len(digests):
        digests, source = theirs[: same + 1], known
      if source is known and same == len(known):
        self._walks = [walk for walk in self._walks if walk[0] is not known]
        break  # it goes on from this one
    for message in messages[len(digests) - 1 :]:
      digests.append(_digest(digests[-1], message))
    self._walks = [*self._walks[-KEPT:], (list(messages), digests)]
    return digests

  def bare_prompt(self, tokens: Sequence[int]) -> Prompt:
    """Ids as they stand; they go on from a recorded reply that they begin with."""
    tokens, parent, known = list(tokens), None, 0
    data, read, running = _bytes(tokens), 0, hashlib.sha256()
    # A copy: others may be recorded meanwhile, on another thread.
    for size in sorted({size for size, _ in list(self._bare.values())}):
      if size >= len(tokens):
        break
      running.update(data[read * _WIDTH : size * _WIDTH])
      read = size
      if (found := self._bare.get(running.digest())) is not None:
        known, parent = found
    return Prompt(tokens, tokens[known:], parent, [], b'')

  def record(
    self, name: str, prompt: Prompt, said: Completion, message: Message | None = None
  ) -> Reply:
    """Keeps what the engine returned for `prompt`.

    message: the reply as the agent is told of it and will send it back; None for bare
    ids. Raises ValueError for a completion without a token.
    """
    if not len(said.tokens):
      raise ValueError('the engine returned no token')
    messages = prompt.messages if message is None else [*prompt.messages, message]
    digest = prompt.digest if message is None else _digest(prompt.digest, message)
    reply = Reply(name, prompt.parent, prompt.heard, said, messages, digest)
    self.replies[name] = reply
    self._latest = reply, prompt.tokens + said.tokens.tolist()
    if message is None:
      ids = self._latest[1]
      self._bare.setdefault(hashlib.sha256(_bytes(ids)).digest(), (len(ids), reply))
    else:
      self._known[digest] = reply
    return reply

  def ends(self) -> list[Reply]:
    """The replies that no other goes on from, in the order of their recording."""
    inner = {id(reply.parent) for reply in self.replies.values()}
    return [reply for reply in self.replies.values() if id(reply) not in inner]

  def reward(self, value: float, name: str = '') -> None:
    """Adds a reward to the reply `name`, or to the end of every conversation.

    Raises KeyError for a reply that is not there.
    """
    for reply in [self.replies[name]] if name else self.ends():
      reply.reward += value

  def caches(self) -> list[RolloutCache]:
    """What `trajectories` makes rows of: one for each conversation."""
    given: set[str] = set()
    caches = []
    for end in self.ends():
      cache = RolloutCache(self._lease, self._seed)
      for reply in end.path:
        cache.hear(reply.heard)
        cache.messages += reply.messages
        if reply.name in given:
          cache.hear(reply.said.tokens.tolist())
        else:
          shown = np.array(reply.heard, np.int32).tobytes()
          cache.state_hash = zlib.crc32(shown) >> 1
          cache.say(reply.said)
          cache.turns[-1].reward = reply.reward
      given.update(reply.name for reply in end.path)
      cache.extras[CUT_OFF] = end.said.finish_reason == 'length'
      cache.metrics['turns'] = float(len(cache.turns))
      said = sum(turn.stop - turn.start for turn in cache.turns)
      cache.metrics['response_length'] = float(said)
      caches.append(cache)
    return caches

  def trajectories(
    self, *, formulation: str = 'trajectory', tag: str = ''
  ) -> list[Trajectory]:
    """The rows of all conversations, one after the other; `step` counts them.

    Every reply is an action once: conversations that share their beginning have it as
    actions in the first of them, with its rewards, and as context in the others.
    """
    rows = [
      row for cache in self.caches() for row in FORMULATIONS[formulation](cache, tag)
    ]
    for i, row in enumerate(rows):
      row.step = i
    return rows


def _bytes(tokens: list[int]) -> bytes:
  return array('q', tokens).tobytes()


def _digest(before: bytes, value: Any) -> bytes:
  text = json.dumps(value, sort_keys=True)
  return hashlib.sha256(before + text.encode()).digest()
