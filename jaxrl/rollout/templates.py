"""How observations become messages: the templates of an environment's tag."""

import string
from collections.abc import Mapping
from typing import Any

from jaxrl.envs.base import Observation
from jaxrl.types import Message

FIELDS = ('observation', 'turn_idx', 'suffix', 'actions_left', 'max_response_length')


class Templates:
  """system: the opening system message, '' = none. first, turn: the user messages.

  Fields: {observation}, {turn_idx} (from 0), {suffix} (the environment's `suffix`),
  {actions_left}, {max_response_length}.
  """

  def __init__(self, system: str = '', first: str = '', turn: str = '{observation}'):
    self.system, self.turn, self.first = system, turn, first or turn
    for name, text in (('turn_template', turn), ('first_template', self.first)):
      used = {field for _, field, _, _ in string.Formatter().parse(text) if field}
      if unknown := used - set(FIELDS):
        raise ValueError(
          f'{name} has unknown fields {sorted(unknown)}; there are {", ".join(FIELDS)}'
        )

  def messages(
    self,
    observation: Observation,
    info: Mapping[str, Any],
    *,
    turn_idx: int,
    actions_left: int,
    max_response_length: int,
  ) -> list[Message]:
    """The messages that show `observation`; chat messages are passed on as they are."""
    opening = turn_idx == 0 and self.system
    system = [{'role': 'system', 'content': self.system}] if opening else []
    if not isinstance(observation, str):
      return [*system, *(observation or [])]
    text = (self.turn if turn_idx else self.first).format(
      observation=observation,
      turn_idx=turn_idx,
      suffix=info.get('suffix', ''),
      actions_left=actions_left,
      max_response_length=max_response_length,
    )
    return [*system, {'role': 'user', 'content': text}]
