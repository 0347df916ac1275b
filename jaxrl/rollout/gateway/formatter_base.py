"""FormatterBase holds what the formatters of all APIs know of their request."""

import dataclasses
from collections.abc import Callable, Sequence
from typing import ClassVar

from jaxrl.options import JsonObject
from jaxrl.rollout.gateway.choice_runner import ChoiceResult, ChoiceRunner, ReplyDelta
from jaxrl.rollout.gateway.generation_request import ApiError, GenerationRequest

Decode = Callable[[list[int]], str]
Event = JsonObject


@dataclasses.dataclass
class FormatterBase:
  """Formats the results of one request.

  Attributes:
    request: The request.
    decode: Turns token ids into text.
    model: The model's name.
    created: When the response was created, in seconds since the epoch.
    heartbeat: The event of a stream in which nothing is new; None for none.
    names_events: Whether events are sent under the name of their type.
    last_line: What ends a stream, after its events; '' for nothing.
  """

  request: GenerationRequest
  decode: Decode
  model: str
  created: int

  heartbeat: ClassVar[Event | None] = None
  names_events: ClassVar[bool] = False
  last_line: ClassVar[str] = ''

  def __post_init__(self):
    """Prepares what a formatter of one API counts on."""

  def full_response(self, results: Sequence[ChoiceResult]) -> JsonObject:
    """Formats the body of a response that is not streamed.

    Args:
      results: The result of each choice; some APIs have one choice alone.

    Returns:
      The body.
    """
    raise NotImplementedError

  def opening_events(self, choices: Sequence[ChoiceRunner]) -> list[Event]:
    """Returns the events that open a stream.

    Args:
      choices: What generates the replies.
    """
    raise NotImplementedError

  def delta_events(self, index: int, delta: ReplyDelta) -> list[Event]:
    """Returns the events of what is new of a reply.

    Args:
      index: The choice's index.
      delta: What is new of it.
    """
    raise NotImplementedError

  def result_events(self, index: int, result: ChoiceResult) -> list[Event]:
    """Returns the events that end a reply, with its tool calls.

    Args:
      index: The choice's index.
      result: The reply.
    """
    raise NotImplementedError

  def closing_events(self, results: Sequence[ChoiceResult]) -> list[Event]:
    """Returns the events that end a stream.

    Args:
      results: The result of each choice.
    """
    raise NotImplementedError

  def error_events(self, error: ApiError) -> list[Event]:
    """Returns the events of an error in a stream.

    Args:
      error: The error.
    """
    raise NotImplementedError
