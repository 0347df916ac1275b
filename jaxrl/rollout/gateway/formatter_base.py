"""FormatterBase holds what the formatters of all APIs know of their request."""

import dataclasses
from collections.abc import Callable
from typing import Any, ClassVar

from jaxrl.rollout.gateway.generation_request import GenerationRequest

Decode = Callable[[list[int]], str]
Event = dict[str, Any]


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
