"""Sessions before an engine: what is asked becomes a reply, which is recorded."""

import asyncio
import dataclasses
import functools
import hashlib
from collections import OrderedDict
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import Any

from jaxrl.data.chat import Chat
from jaxrl.data.seeds import fold
from jaxrl.rollout.formulation import FORMULATIONS
from jaxrl.rollout.gateway.choice import Choice, Seat, Terms
from jaxrl.rollout.gateway.errors import ApiError
from jaxrl.rollout.gateway.recorder import Prompt, Session
from jaxrl.rollout.gateway.requests import Ask
from jaxrl.rollout.gateway.seen import Seen
from jaxrl.rollout.group import Lease
from jaxrl.rollout.handles import settle
from jaxrl.types import RolloutEngine, SamplingParams, Trajectory


class Gateway:
  """Replies to requests and keeps what was said, by session.

  deliver: is given a session's name and rows when it ends; may be awaited. model: the
  name that clients see. seed: a reply is drawn by it, its session and its number there.
  max_length: tokens of prompt and reply. max_tokens: of one reply. temperature, top_p,
  top_k: of those who ask for no other; fixed: of all, whatever they ask for, seeds too.
  max_choices: replies to one request. max_sessions, max_replies: in all, and of one
  session; beyond them requests are refused, or if `forget` the session longest unused
  is dropped, and one too long begun anew. guests: a request under a new name begins a
  session; else only `open` does. formulation, tag: of the rows.
  """

  def __init__(
    self,
    engine: RolloutEngine,
    chat: Chat,
    *,
    deliver: Callable[[str, list[Trajectory]], Any] | None = None,
    model: str = 'policy',
    seed: int = 0,
    max_length: int = 4096,
    max_tokens: int = 1024,
    temperature: float = 1.0,
    top_p: float = 1.0,
    top_k: int = 0,
    fixed: bool = False,
    max_choices: int = 8,
    max_sessions: int = 4096,
    max_replies: int = 1024,
    forget: bool = False,
    guests: bool = True,
    formulation: str = 'trajectory',
    tag: str = '',
  ):
    if formulation not in FORMULATIONS:
      raise ValueError(
        f'no formulation {formulation!r}; there are {", ".join(FORMULATIONS)}'
      )
    self._engine, self._chat, self.model = engine, chat, model
    self._deliver, self._seed, self._max_choices = deliver, seed, max_choices
    self._forget, self._max_sessions = forget, max_sessions
    self._guests = guests
    self._form = {'formulation': formulation, 'tag': tag}
    sampling = SamplingParams(
      max_tokens=max_tokens,
      temperature=temperature,
      top_p=top_p,
      top_k=top_k,
      stop_token_ids=(chat.eos_id,),
    )
    self._terms = Terms(
      sampling,
      seed=lambda number: number,
      request_name='gateway',
      max_length=max_length,
      max_replies=max_replies,
      fixed=fixed,
    )
    self._seats: OrderedDict[str, Seat] = OrderedDict()
    self._opened = 0
    # One thread: tokenizers do not bear two at a time.
    self._scribe = ThreadPoolExecutor(1, thread_name_prefix='gateway-chat')

  def close(self) -> None:
    """Ends its thread."""
    self._scribe.shutdown(wait=False)

  def text(self, tokens: list[int]) -> str:
    """What ids say, special tokens left out."""
    return self._chat.decode(tokens)

  def seen(self, name: str) -> Seen:
    """What the session `name` has sent before; nothing, where there is none."""
    seat = self._seats.get(name)
    return Seen() if seat is None else seat.seen

  async def begin(self, name: str, ask: Ask, seen: Seen | None = None) -> list[Choice]:
    """The choices that `ask` wants in the session `name`, ready to be run.

    seen: what the session's requests will be compared with. Raises ApiError for what
    does not fit.
    """
    if ask.n > self._max_choices:
      raise ApiError(400, f'n: at most {self._max_choices}', param='n')
    seat = self._seat(name, ask.n)
    seat.seen = seen or seat.seen
    seat.busy += ask.n  # so that it is not dropped meanwhile, nor overfilled
    try:
      loop = asyncio.get_running_loop()
      prompt = await loop.run_in_executor(self._scribe, self._compose, seat, ask)
    except ValueError as error:
      field = 'prompt' if ask.messages is None else 'messages'
      raise ApiError(400, f'{field}: {error}', param=field) from error
    finally:
      seat.busy -= ask.n
    seat.check()
    room = seat.terms.max_length - len(prompt.tokens)
    if room < 1:
      seat.cut, seat.refused = 'max_length', prompt.tokens
      raise ApiError(
        400,
        f'the prompt of {len(prompt.tokens)} tokens leaves no room in the window of '
        f'{seat.terms.max_length}',
        param='prompt' if ask.messages is None else 'messages',
        code='context_length_exceeded',
      )
    return [self._choice(name, seat, ask, prompt, room, i) for i in range(ask.n)]

  def _compose(self, seat: Seat, ask: Ask) -> Prompt:
    if ask.messages is not None:
      return seat.session.prompt(ask.messages, ask.tools)
    given = ask.prompt or ''
    ids = self._chat.encode(given) if isinstance(given, str) else given
    return seat.session.bare_prompt(ids)

  def _choice(
    self, name: str, seat: Seat, ask: Ask, prompt: Prompt, room: int, index: int
  ) -> Choice:
    number, seat.begun = seat.begun, seat.begun + 1
    terms, own = seat.terms, seat.terms.sampling
    sampling = dataclasses.replace(
      own,
      max_tokens=min(room, own.max_tokens, ask.max_tokens or room),
      stop=(*ask.stop, *own.stop),
      seed=terms.seed(number),
    )
    wanted = _wanted(ask, index)
    if not terms.fixed:
      sampling = dataclasses.replace(sampling, **wanted)
    elif any(getattr(sampling, key) != value for key, value in wanted.items()):
      seat.overruled += 1
    mark = hashlib.sha256(f'{seat.number}/{name}'.encode()).hexdigest()[:12]
    kind = 'cmpl' if ask.messages is None else 'chatcmpl'
    return Choice(
      self._engine,
      self._chat,
      seat,
      ask,
      prompt,
      sampling,
      name=f'{kind}-{mark}-{number}',
      request_name=f'{terms.request_name}/{number}',
    )

  # ---- sessions

  def _seat(self, name: str, count: int) -> Seat:
    """The session's, a new one if there is none; `count` replies are to be added."""
    seat = self._seats.get(name)
    if seat is not None and seat.terms.owned:
      seat.check()
      if self._full(seat, count):
        seat.cut = 'max_steps'
        most = f'an episode may have {seat.terms.max_replies} replies'
        raise ApiError(400, f'{most}: this one is at its end', code='max_steps')
    elif seat is not None and self._full(seat, count):
      if not self._forget or seat.busy:
        raise ApiError(
          429, f'the session has {seat.terms.max_replies} replies: end it by /feedback'
        )
      del self._seats[name]
      seat = None
    if seat is None and not self._guests:  # it ended while its body came
      raise ApiError(400, 'the session is over', code='session_over')
    if seat is None:
      seed = functools.partial(fold, self._seed, name)
      terms = dataclasses.replace(
        self._terms, seed=seed, request_name=f'gateway/{self._opened}/0'
      )
      lease = Lease(0, self._opened, 0, 0, 0)
      seat = self.open(name, lease, fold(self._seed, name), terms)
    self._seats.move_to_end(name)
    return seat

  def _full(self, seat: Seat, count: int) -> bool:
    replies = len(seat.session.replies) + seat.busy + count
    return replies > seat.terms.max_replies

  def open(self, name: str, lease: Lease, seed: int, terms: Terms) -> Seat:
    """Begins an episode's session. Raises ApiError if there are too many."""
    self._make_room()
    seat = Seat(Session(self._chat, lease, seed=seed), self._opened, terms)
    self._opened += 1
    self._seats[name] = seat
    return seat

  def end(self, name: str) -> Seat:
    """Ends an owned session; what is being written for it is given up."""
    seat = self._seats.pop(name)
    seat.over = True
    for task in list(seat.work):
      task.cancel()
    return seat

  def _make_room(self) -> None:
    if len(self._seats) < self._max_sessions:
      return
    idle = next((n for n, seat in self._seats.items() if not seat.busy), None)
    if not self._forget or idle is None:
      raise ApiError(
        429, f'there are {self._max_sessions} sessions: end one by /feedback'
      )
    del self._seats[idle]

  async def feedback(
    self, name: str, reward: float | None = None, reply: str = '', *, done: bool = True
  ) -> Sequence[Trajectory]:
    """Rewards the session `name`, or one reply of it; delivers its rows if it is done.

    reply: the id that the client was given; without it the reward is that of the ends
    of all conversations. A done session is forgotten, also if `deliver` raises; what
    comes under its name next is another. An owned session is kept for its owner, and a
    reward without `reply` is the episode's. Raises ApiError where there is no such
    session or reply, or one is still being written.
    """
    seat = self._seats.get(name)
    if seat is None:
      raise ApiError(404, 'there is no such session', code='session_not_found')
    if done and seat.busy:
      raise ApiError(409, f'{seat.busy} replies to the session are being written')
    seat.check()
    if reply and reply not in seat.session.replies:
      raise ApiError(404, f'no reply {reply!r} in this session', param='completion_id')
    if reward is not None and seat.terms.owned and not reply:
      seat.reward += float(reward)
    elif reward is not None:
      seat.session.reward(float(reward), reply)
    if seat.terms.owned:
      seat.over = done
      return []
    if not done:
      return []
    rows = seat.session.trajectories(**self._form)
    del self._seats[name]
    if self._deliver is not None:
      await settle(self._deliver(name, rows))
    return rows


def _wanted(ask: Ask, index: int) -> dict[str, Any]:
  """How the client would have the reply `index` drawn, as options of sampling."""
  wanted = {
    'temperature': ask.temperature,
    'top_p': ask.top_p,
    'top_k': None if ask.top_k is None else max(ask.top_k, 0),
    'seed': None if ask.seed is None else fold(abs(ask.seed), index),
  }
  return {key: value for key, value in wanted.items() if value is not None}
